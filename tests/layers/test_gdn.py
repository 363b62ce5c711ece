"""Gated DeltaNet in both layouts of its projections, module against module of transformers; then the bf16 forms and what stays fp32.

Letters: T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstlight import LLM
from firstlight.adapt.compare import compare
from firstlight.layers.gdn import Gdn
from firstlight.layers.step import Step
from firstlight.models.registry import read
from firstlight.ops.registry import REFERENCE, Binder, load_backends
from firstlight.parallel.mesh import Mesh
from firstlight.parts.gdn import Gdn as Spec
from tests.layers.test_trace import BF16_MODULE_TOLERANCE, bf16_errors, trace_of
from tests.models.hf_tiny import reference_trace
from tests.models.qwen_tiny import draw_gdn, make_qwen

DIM, NUM_TOKENS, NUM_SLOTS = 40, 150, 3
HEADS = {"three groups of two": (3, 6), "one group of four": (1, 4), "no groups": (2, 2)}
WIDTHS = {"narrow values": (20, 12), "wide values": (12, 20)}


def witness(interleaved: bool, heads: tuple[int, int], widths: tuple[int, int]) -> tuple[nn.Module, Spec]:
    """The module of transformers with drawn weights, and ours as facts."""
    import transformers
    from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe as configs
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as apart
    from transformers.models.qwen3_next import modeling_qwen3_next as fused

    fields: dict[str, Any] = {
        "hidden_size": DIM, "linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1], "linear_key_head_dim": widths[0],
        "linear_value_head_dim": widths[1], "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    }
    if interleaved:
        module: nn.Module = fused.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**fields), 0)
    else:
        module = apart.Qwen3_5MoeGatedDeltaNet(configs.Qwen3_5MoeTextConfig(**fields), 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in sorted(module.named_parameters()):
            tensor.copy_(draw_gdn(name, tensor, generator))
    spec = Spec(
        dim=DIM, num_heads=heads[1], num_key_heads=heads[0], head_k=widths[0], head_v=widths[1], conv_width=4, interleaved=interleaved,
        norm_eps=1e-5, dtype="float32")
    return module, spec


def input_of() -> Tensor:
    return torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(5))


def want_of(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(input_of()[None])[0]  # type: ignore[no-any-return]


def got_of(spec: Spec, module: nn.Module, sizes: list[int], order: tuple[str, ...] = ("portable", REFERENCE)) -> Tensor:
    """Ours over forced chunks, its state and window in a slot that held NaN."""
    load_backends()
    layer = Gdn(spec, Mesh(), Binder(order))
    weights = {name: tensor.detach().squeeze(1) if "conv1d" in name else tensor.detach() for name, tensor in module.named_parameters()}
    assert {weight.name: weight.shape for weight in spec.weights()} == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in dict(layer.named_parameters()):
        place, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(place), leaf, nn.Parameter(weights[name], requires_grad=False))
    cache = {field.name: torch.full((NUM_SLOTS, *field.shape), torch.nan) for field in spec.cache()[0].fields}
    x_TD, outs, context = input_of(), [], 0
    for size in sizes:
        at_T = torch.arange(context, context + size)
        step = Step(
            tokens_T=at_T, positions_T=at_T, starts_N1=torch.tensor([0, size]), contexts_N=torch.tensor([context]), tables={}, row_slots={},
            slots={"gdn": torch.tensor([1])}, logit_rows_R=at_T)
        with torch.inference_mode():
            outs.append(layer(x_TD[context:context + size], step, cache))
        context += size
    assert all(tensor[[0, 2]].isnan().all() for tensor in cache.values()), "another slot was written"
    return torch.cat(outs)


@pytest.mark.parametrize("order", [("portable", REFERENCE), (REFERENCE,)], ids=lambda order: order[0])
@pytest.mark.parametrize("sizes", [[NUM_TOKENS], [1, 2, 9, 11, 65, 62], [1] * NUM_TOKENS], ids=["one shot", "chunks", "token by token"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("interleaved", [True, False], ids=["Qwen3-Next", "Qwen3.5"])
def test_against_transformers(interleaved: bool, heads: str, sizes: list[int], order: tuple[str, ...]) -> None:
    for widths in WIDTHS.values():
        module, spec = witness(interleaved, HEADS[heads], widths)
        assert float((got_of(spec, module, sizes, order) - want_of(module)).abs().max()) < 1e-5


def test_decay_is_near_one() -> None:
    """Of the inputs: with a fast decay the tests above would not see a lost state."""
    module, _ = witness(False, (3, 6), (12, 20))
    with torch.no_grad():
        decay = torch.exp(-module.A_log.exp() * nn.functional.softplus(module.in_proj_a(input_of()) + module.dt_bias))  # type: ignore[operator]
    assert 0.97 < float(decay.median()) < 0.999


@pytest.mark.parametrize("change", [
    {"interleaved": False}, {"num_key_heads": 6}, {"num_heads": 9}, {"head_k": 20}, {"head_v": 12}, {"conv_width": 3},
], ids=str)
def test_facts_decide_the_weights(change: dict[str, Any]) -> None:
    _, spec = witness(True, (3, 6), (12, 20))
    assert list(spec.weights()) != list(replace(spec, **change).weights())


def test_the_eps_of_either_norm_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On queries and keys so small that 1e-6 beside their squares is much: as transformers has it, and not otherwise."""
    module, spec = witness(True, (3, 6), (12, 20))
    with torch.no_grad():
        module.get_parameter("conv1d.weight").mul_(1e-3)
    want = want_of(module)
    assert float((got_of(spec, module, [NUM_TOKENS]) - want).abs().max()) < 1e-5
    assert float((got_of(replace(spec, norm_eps=1e-3), module, [NUM_TOKENS]) - want).abs().max()) > 1e-3
    monkeypatch.setattr("firstlight.layers.gdn.QK_NORM_EPS", 1e-5)
    assert float((got_of(spec, module, [NUM_TOKENS]) - want).abs().max()) > 1e-3


@pytest.mark.parametrize("swap", ["in_proj_qkvz", "in_proj_ba"])
def test_heads_are_interleaved_by_key_head(swap: str) -> None:
    """Control: rows laid out block by block instead of key head by key head give another result."""
    module, spec = witness(True, (3, 6), (12, 20))
    want = want_of(module)
    weight = module.get_parameter(f"{swap}.weight")
    sizes = [12, 12, 40, 40] if swap == "in_proj_qkvz" else [2, 2]
    with torch.no_grad():
        parts = weight.unflatten(0, (3, -1)).split(sizes, dim=1)
        weight.copy_(torch.cat([part.flatten(0, 1) for part in parts]))
    assert float((got_of(spec, module, [NUM_TOKENS]) - want).abs().max()) > 1e-2


@pytest.mark.parametrize(("kind", "count"), [("qwen3_next", 83), ("qwen3_5_moe_text", 93), ("qwen3_5_moe", 93)])
def test_every_module_of_a_model(tmp_path: Path, kind: str, count: int) -> None:
    """Outputs of all modules of transformers that have a counterpart, found by name; routers by the sets of experts that they choose."""
    model, ids = make_qwen(kind, tmp_path), [3 + 7 * i % 300 for i in range(90)]
    want = reference_trace(model, ids)
    with LLM(tmp_path, dtype="float32", cache_bytes=4_000_000, max_sequences=2) as llm:
        got = trace_of(llm, ids, [7, 1, 70, 12])
    compared = compare(got, want, read(tmp_path).names.module, 1e-4)
    assert compared.first is None, str(compared)
    assert (count, []) == (len(compared.compared), list(compared.only_want))
    assert {"model", "language_model", "rotary_emb"} >= {name.rpartition(".")[2] for name in compared.unmapped}


def test_bf16_modules_are_bounded(tmp_path: Path) -> None:
    """Each module of a tiny Qwen3-Next fed with the fp32 run's own inputs rounded to bf16: the bound of tests/layers/test_trace.py."""
    make_qwen("qwen3_next", tmp_path)
    errors = bf16_errors(tmp_path, [3 + 7 * i % 300 for i in range(90)])
    assert len(errors) > 60
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= BF16_MODULE_TOLERANCE, f"{worst}: {errors[worst]:.4f}"
    assert max(errors.values()) > 1e-4, "bf16 was not used"


def test_what_stays_fp32(tmp_path: Path) -> None:
    """In bf16: convolutions, decay parameters and gated norms, and the recurrent state; windows and rows follow the dtype."""
    make_qwen("qwen3_next", tmp_path)
    spec = read(tmp_path).spec.with_dtype("bfloat16")
    kept = {".".join(weight.name.split(".")[2:]) for weight in spec.weights() if weight.dtype == "float32"}
    assert {"mixer.conv1d.weight", "mixer.A_log", "mixer.dt_bias", "mixer.norm.weight"} == kept
    dtypes = {field.name: field.dtype for layer in spec.layers for cache in layer.mixer.cache() for field in cache.fields}
    assert {"recurrent": "float32", "conv": "bfloat16", "keys": "bfloat16", "values": "bfloat16"} == dtypes
