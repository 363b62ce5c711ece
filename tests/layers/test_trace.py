"""Module by module against the official code's recorded outputs, fp32; then every module's bf16 form against its fp32 form.

Letters: T tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from firstlight import LLM
from firstlight.adapt.compare import compare
from firstlight.adapt.record import Trace, record
from firstlight.models.registry import read

FIXTURE = Path(__file__).parents[1] / "data/kimi_k3_text_trace"
TOLERANCE = 1e-4
BF16_MODULE_TOLERANCE = 2e-2
NOT_RUN = "kv_b_proj"  # absorbed into attention here; checked on its own below


def trace_of(llm: LLM, ids: list[int], chunks: list[int] | None) -> Trace:
    with record(llm.machine.runner.decoder) as trace:  # type: ignore[union-attr]
        logits_TV = llm.logits(ids, chunks=chunks)
    trace.extra["logits"] = logits_TV
    return trace


@pytest.mark.parametrize("backends", [("reference",), ("portable", "reference")], ids=lambda order: order[0])
@pytest.mark.parametrize("chunks", [None, [7, 1, 1, 51], [1] * 60], ids=["one shot", "chunks", "token by token"])
def test_every_recorded_module(backends: tuple[str, ...], chunks: list[int] | None) -> None:
    want = Trace.load(FIXTURE / "trace.safetensors")
    names = read(FIXTURE).names
    with LLM(FIXTURE, dtype="float32", backends=backends, cache_bytes=4_000_000, poison_freed=True, max_sequences=2) as llm:
        got = trace_of(llm, want.extra["ids"].flatten().tolist(), chunks)
        expansions = expanded(llm, got)
    got.outputs.update(expansions)
    compared = compare(got, want, names.module, TOLERANCE)
    assert [] == list(compared.unmapped) + list(compared.only_want)
    assert 194 == len(compared.compared)
    assert compared.first is None, str(compared)
    assert max(row.max_abs for row in compared.compared) <= TOLERANCE, str(compared)


def expanded(llm: LLM, trace: Trace) -> dict[str, Tensor]:
    """What the expansion kv_b makes of the recorded latents: attention absorbs it, so no hook sees it."""
    decoder = llm.machine.runner.decoder  # type: ignore[union-attr]
    found = {}
    for layer in llm.spec.layers:
        if layer.mixer.kind == "mla":
            name = f"layers.{layer.index}.mixer"
            found[f"{name}.kv_b_proj"] = decoder.get_submodule(f"{name}.kv_b_proj")(trace.outputs[f"{name}.kv_a_layernorm"])
    return found


def test_first_divergence_is_named() -> None:
    """Control: one changed weight, and the comparison points at the module that holds it."""
    want = Trace.load(FIXTURE / "trace.safetensors")
    with LLM(FIXTURE, dtype="float32", cache_bytes=4_000_000, max_sequences=2) as llm:
        weight = llm.machine.runner.decoder.get_submodule("layers.4.mixer.f_b_proj").weight  # type: ignore[union-attr]
        weight.data = weight.data + 0.01
        got = trace_of(llm, want.extra["ids"].flatten().tolist(), None)
    first = compare(got, want, read(FIXTURE).names.module, TOLERANCE).first
    assert first is not None
    assert "layers.4.mixer.f_b_proj" == first.name


def test_bf16_modules_are_bounded() -> None:
    """Each module fed with the fp32 run's own inputs rounded to bf16: relative error of its output within BF16_MODULE_TOLERANCE."""
    ids = Trace.load(FIXTURE / "trace.safetensors").extra["ids"].flatten().tolist()
    errors = bf16_errors(FIXTURE, ids)
    assert len(errors) > 150
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= BF16_MODULE_TOLERANCE, f"{worst}: {errors[worst]:.4f}"
    assert max(errors.values()) > 1e-4, "bf16 was not used"


def bf16_errors(folder: Path, ids: list[int]) -> dict[str, float]:
    """Relative rms error of every leaf module in bf16, its inputs taken from the fp32 run."""
    inputs: dict[str, tuple[object, ...]] = {}
    outputs: dict[str, Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(module: torch.nn.Module, args: tuple[object, ...], output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                inputs[name] = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
                outputs[name] = output.clone()
        return hook

    with LLM(folder, dtype="float32", cache_bytes=4_000_000, max_sequences=2, prefix_cache=False) as llm:
        decoder = llm.machine.runner.decoder  # type: ignore[union-attr]
        for name, module in decoder.named_modules():
            if name and not list(module.children()) and name != "embed":
                module.register_forward_hook(keep(name))
        llm.logits(ids)
    with LLM(folder, dtype="bfloat16", cache_bytes=4_000_000, max_sequences=2, prefix_cache=False) as llm, torch.inference_mode():
        decoder = llm.machine.runner.decoder  # type: ignore[union-attr]
        found = {}
        for name, args in inputs.items():
            rounded = [args[0].bfloat16(), *args[1:]]  # type: ignore[attr-defined]
            if not name.endswith(".experts"):
                rounded = [arg.bfloat16() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
            got = decoder.get_submodule(name)(*rounded).float()
            found[name] = float((got - outputs[name]).norm() / outputs[name].norm())
    return found
