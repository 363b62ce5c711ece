"""Who may import whom: the contracts hold, each of them is live, and what thinks runs without torch."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tree import PACKAGE, PROJECT, ROOT, SOURCES, relative, tree_of

THINKING = (
    "spec", "parts", "models", "sched", "text", "plan", "ops.registry", "ops.declared",
    "cache.blocks", "cache.codec", "cache.evict", "cache.holding", "cache.keys", "cache.manager", "cache.prefix", "cache.snapshots", "cache.tier",
    "engine.loop", "fetch.catalogue", "adapt.inspect",
)
"""Rooms and files that import neither torch nor numpy, planned ones included."""


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the contracts and the package of a folder."""
    program = Path(sys.executable).parent / "lint-imports"
    return subprocess.run([program, "--no-cache", "--no-logo"], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)


def contract(name: str) -> dict[str, list[str]]:
    """One import-linter contract by the start of its name."""
    return next(item for item in PROJECT["tool"]["importlinter"]["contracts"] if item["name"].startswith(name))


def test_floors() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_floors_break_when_a_rule_is_broken(tmp_path: Path) -> None:
    """Each contract is live: one bad import per contract, and every contract reports it."""
    shutil.copytree(PACKAGE, tmp_path / "firstlight", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in (
        ("spec/errors.py", "from firstlight.parts import kda"),
        ("sched/sequence.py", "import torch"),
        ("engine/loop.py", "import firstlight.backends.portable"),
        ("models/kimi_linear.py", "from firstlight.models import kimi_k3"),
        ("backends/other/__init__.py", "import firstlight.backends.portable"),
        ("parts/kda.py", "from firstlight.parts import mla"),
        ("parts/mla.py", "from firstlight.parts import kda"),
        ("layers/decoder.py", "def f():\n    import transformers"),
    ):
        target = tmp_path / "firstlight" / file
        target.parent.mkdir(exist_ok=True)
        with target.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    run = lint_imports(tmp_path)
    lines = [" ".join(line.split()) for line in run.stdout.splitlines()]
    silent = [item["name"] for item in PROJECT["tool"]["importlinter"]["contracts"] if f"{item['name']} BROKEN" not in lines]
    assert [] == silent, run.stdout + run.stderr


def test_a_room_without_a_floor_breaks_the_build(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "firstlight", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "firstlight" / "attic.py").write_text("", encoding="utf-8")
    run = lint_imports(tmp_path)
    assert run.returncode != 0
    assert "attic" in run.stdout + run.stderr


def test_thinking_rooms_are_under_contract() -> None:
    """What exists of the torch-free list is named by the contract, and nothing else is."""
    exists = [name for name in THINKING if (PACKAGE / name.replace(".", "/")).is_dir() or (PACKAGE / f"{name.replace('.', '/')}.py").is_file()]
    assert sorted(f"firstlight.{name}" for name in exists) == sorted(contract("What thinks")["source_modules"])


def test_thinking_rooms_run_without_torch_and_numpy() -> None:
    """Imports made by name at run time count too."""
    modules = []
    for name in THINKING:
        base = PACKAGE / name.replace(".", "/")
        found = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")] if base.with_suffix(".py").is_file() else []
        modules += [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in found]
    program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\nprint({'torch', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert ("set()\n", 0) == (run.stdout, run.returncode), run.stderr


def test_public_names_come_without_torch() -> None:
    program = (
        "import firstlight, sys\nfor name in set(firstlight.__all__) - {'LLM', 'Output'}:\n    getattr(firstlight, name)\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ("False\n", 0) == (run.stdout, run.returncode), run.stderr


def test_public_names_exist() -> None:
    import firstlight

    assert [] == [name for name in firstlight.__all__ if not hasattr(firstlight, name)]
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = firstlight.Nothing


def test_imports_are_declared_dependencies() -> None:
    """What the package imports is what it installs; transformers is a witness of the tests, and one file is imported only with its extra."""
    declared = {re.match(r"[\w-]+", line).group().replace("-", "_") for line in PROJECT["project"]["dependencies"]}  # type: ignore[union-attr]
    witnesses = {
        "firstlight/adapt/align.py": {"transformers"}, "firstlight/adapt/rehearse.py": {"transformers"},
        "firstlight/serve/tracing.py": {"opentelemetry"},
        "firstlight/fetch/gguf_form.py": {"gguf"},
    }
    found = []
    for path in SOURCES:
        allowed = declared | {"firstlight"} | set(sys.stdlib_module_names) | witnesses.get(relative(path), set())
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                found += [f"{relative(path)}:{node.lineno} {name}" for name in names if name.split(".")[0] not in allowed]
    assert [] == found
