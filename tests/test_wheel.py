"""What people install: the wheel alone, outside of the clone, generates with the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tree import PACKAGE, ROOT, relative


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without a network."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT], check=True, capture_output=True, text=True)
    (found,) = out.glob("*.whl")
    return found


def outside(tmp_path: Path, wheel: Path) -> Path:
    """The bin folder of a new environment that holds the wheel and sees this one's other packages, but not the clone."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, text=True)
    purelib = Path(sysconfig.get_path("purelib"))
    # A plain path line: .pth files of the other folder, an editable install of the clone among them, are not followed.
    (home / purelib.relative_to(sys.prefix) / "others.pth").write_text(f"{purelib}\n", encoding="utf-8")
    return home / "bin"


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {relative(path) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert expected == {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert any(name.startswith("firstlight/assets/") and name.endswith(".safetensors") for name in names)
    assert "firstlight/py.typed" in names


@pytest.mark.slow
def test_wheel_generates_outside_of_the_clone(wheel: Path, tmp_path: Path) -> None:
    programs = outside(tmp_path, wheel)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}

    def run(program: str, *arguments: str) -> str:
        result = subprocess.run([programs / program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert 0 == result.returncode, result.stderr
        return result.stdout

    assert str(tmp_path) in run("python", "-c", "import firstlight; print(firstlight.__file__)")
    assert run("firstlight", "generate", "--prompt", "The first light", "--max-tokens", "8").strip()
