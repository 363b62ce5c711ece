"""fla-core's plain-torch KDA as a second witness: the decay gate, the recurrence and the chunkwise form.

Runs in .venv-fla, made on first use; FIRSTLIGHT_FLA_PYTHON names an interpreter that has fla-core already.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight.backends.portable.gated_delta import gated_delta as portable
from firstlight.ops.decay_gate import decay_gate
from firstlight.ops.gated_delta import gated_delta as reference

ROOT = Path(__file__).parents[2]
FORMS = {"reference": reference, "portable": portable}
NAMES = ["square", "oblong", "grouped", "lasting"]
GATES = {"softplus": None, "bounded": -5.0}
TOLERANCE = 1e-5

# torch first and alone, so that it comes from the same place as ours; fla-core without dependencies, because it asks for more than these
# files import; triton by exact version, because fla-core 0.6.0 cannot be imported beside 3.9.
INSTALLS = (
    ("torch==2.13.0",), ("numpy", "safetensors", "einops", "packaging"), ("--no-deps", "fla-core==0.6.0", "triton==3.6.0"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def fla_python() -> Path:
    """The interpreter that has fla; its environment is made if need be."""
    named = os.environ.get("FIRSTLIGHT_FLA_PYTHON")
    if named:
        return Path(named)
    home = ROOT / ".venv-fla"
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        for packages in INSTALLS:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-input", *packages], check=True)
        ready.touch()
    return python


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Inputs and outputs of every shape and gate."""
    out = tmp_path_factory.mktemp("fla") / "kda.safetensors"
    script = Path(__file__).with_name("run_fla.py")
    run = subprocess.run([str(fla_python()), "-I", str(script), str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return load_file(out)


def of(witnessed: dict[str, Tensor], name: str, gate: str) -> dict[str, Tensor]:
    prefix = f"{name}.{gate}."
    return {key.removeprefix(prefix): value for key, value in witnessed.items() if key.startswith(prefix)}


def error(got: Tensor, want: Tensor) -> float:
    assert want.isfinite().all() and got.isfinite().all()
    return ((got - want).abs().max() / want.abs().max()).item()


def test_fla_is_not_beside_transformers() -> None:
    """Importable here, it would change what transformers computes."""
    run = subprocess.run([sys.executable, "-c", "import fla"], capture_output=True, text=True)
    assert "No module named 'fla'" in run.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", GATES)
def test_decay_gate(witnessed: dict[str, Tensor], name: str, gate: str) -> None:
    x = of(witnessed, name, gate)
    got = decay_gate(x["f"], x["a_log"], x["dt_bias"], lower_bound=GATES[gate])
    assert error(got, x["g"]) <= TOLERANCE
    if name == "lasting":
        assert got.exp().median() > 0.98


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("witness", ["recurrent", "chunk"])
def test_gated_delta(witnessed: dict[str, Tensor], name: str, gate: str, form: str, witness: str) -> None:
    x = of(witnessed, name, gate)
    pool_SHKV = torch.full((3, *x["state"].shape), torch.nan)
    pool_SHKV[1] = x["state"]
    slots, starts, contexts = torch.tensor([1]), torch.tensor([0, len(x["q"])]), torch.tensor([8])
    scale = 1 / math.sqrt(x["q"].shape[-1])
    o = FORMS[form](x["q"], x["k"], x["v"], x["g"], x["beta"], pool_SHKV, slots, starts, contexts, scale=scale)
    assert error(o, x[f"o_{witness}"]) <= TOLERANCE
    assert error(pool_SHKV[1], x[f"state_{witness}"]) <= TOLERANCE
