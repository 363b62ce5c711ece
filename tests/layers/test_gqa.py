"""Grouped-query attention with and without head norms and output gate, module against module of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstlight.layers.gqa import Gqa
from firstlight.layers.leaves import inv_freq_of
from firstlight.layers.step import Step
from firstlight.ops.registry import REFERENCE, Binder, load_backends
from firstlight.parallel.mesh import Mesh
from firstlight.parts.gqa import Gqa as Spec
from firstlight.parts.rotation import Rotation, Slowdown

DIM, NUM_TOKENS, BLOCK = 40, 23, 4


def qwen3_next() -> tuple[Any, Spec]:
    """Norms by 1 + weight, an output gate, a quarter of the channels turning."""
    from transformers.models.qwen3_next import configuration_qwen3_next as config
    from transformers.models.qwen3_next import modeling_qwen3_next as model

    made = config.Qwen3NextConfig(
        hidden_size=DIM, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_hidden_layers=4, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25})
    spec = Spec(
        dim=DIM, num_heads=6, num_key_heads=2, head_k=16, head_v=16, rotation=Rotation(width=4, theta=100.0), dtype="float32", normed=True,
        plus_one=True, gated=True, norm_eps=1e-5)
    return (made, model.Qwen3NextAttention(made, 3), model.Qwen3NextRotaryEmbedding(made)), spec


def qwen3() -> tuple[Any, Spec]:
    """Norms by weight, no gate, all channels turning."""
    from transformers.models.qwen3 import configuration_qwen3 as config
    from transformers.models.qwen3 import modeling_qwen3 as model

    made = config.Qwen3Config(
        hidden_size=DIM, num_attention_heads=4, num_key_value_heads=4, head_dim=12, num_hidden_layers=4, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    spec = Spec(
        dim=DIM, num_heads=4, num_key_heads=4, head_k=12, head_v=12, rotation=Rotation(width=12, theta=1000.0), dtype="float32", normed=True,
        norm_eps=1e-5)
    return (made, model.Qwen3Attention(made, 0), model.Qwen3RotaryEmbedding(made)), spec


MAKERS = {"qwen3_next": qwen3_next, "qwen3": qwen3}


def drawn(module: nn.Module) -> dict[str, Tensor]:
    """Seeded weights for a module of transformers, and the same for ours."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, tensor in sorted(module.named_parameters()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2.0 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3))
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def reference(witness: Any, x_TD: Tensor) -> Tensor:
    config, attention, rotary = witness
    config._attn_implementation = "eager"
    positions = torch.arange(len(x_TD))[None]
    mask = torch.full((len(x_TD), len(x_TD)), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        return attention(x_TD[None], position_embeddings=rotary(x_TD[None], positions), attention_mask=mask)[0][0]


def ours(spec: Spec, weights: dict[str, Tensor], x_TD: Tensor, sizes: list[int], order: tuple[str, ...]) -> Tensor:
    """The module over forced chunks, its rows in shuffled blocks among NaN."""
    load_backends()
    layer = Gqa(spec, Mesh(), Binder(order))
    for name in dict(layer.named_parameters()):
        place, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(place), leaf, nn.Parameter(weights[name], requires_grad=False))
    num_blocks = -(-len(x_TD) // BLOCK)
    table_1B = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[None]
    cache = {field.name: torch.full((num_blocks, BLOCK, *field.shape), torch.nan) for field in spec.cache()[0].fields}
    outs, context = [], 0
    for size in sizes:
        at_T = torch.arange(context, context + size)
        step = Step(
            tokens_T=at_T, positions_T=at_T, starts_N1=torch.tensor([0, size]), contexts_N=torch.tensor([context]), tables={"gqa": table_1B},
            row_slots={"gqa": table_1B[0, at_T // BLOCK] * BLOCK + at_T % BLOCK}, slots={}, logit_rows_R=at_T)
        with torch.inference_mode():
            outs.append(layer(x_TD[context:context + size], step, cache))
        context += size
    return torch.cat(outs)


@pytest.mark.parametrize("order", [("portable", REFERENCE), (REFERENCE,)], ids=lambda order: order[0])
@pytest.mark.parametrize("sizes", [[NUM_TOKENS], [1, 2, 9, 11], [1] * NUM_TOKENS], ids=["one shot", "chunks", "token by token"])
@pytest.mark.parametrize("maker", MAKERS)
def test_against_transformers(maker: str, sizes: list[int], order: tuple[str, ...]) -> None:
    witness, spec = MAKERS[maker]()
    weights = drawn(witness[1])
    assert {weight.name: weight.shape for weight in spec.weights()} == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    x_TD = torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(5))
    want = reference(witness, x_TD)
    assert float((ours(spec, weights, x_TD, sizes, order) - want).abs().max()) < 1e-5


@pytest.mark.parametrize("change", [
    {"plus_one": False}, {"rotation": None}, {"rotation": Rotation(width=4, theta=101.0)}, {"rotation": Rotation(width=8, theta=100.0)},
    {"rotation": Rotation(width=4, theta=100.0, interleaved=True)}, {"rotation": Rotation(width=4, theta=100.0, factor=2.0)}, {"norm_eps": 1e-1},
    {"rotation": Rotation(width=4, theta=100.0, slowdown=Slowdown(factor=2.0, low=1.0, high=4.0, context=8))},
], ids=str)
def test_every_flag_matters(change: dict[str, Any]) -> None:
    """Control: the comparison above sees each of them."""
    from dataclasses import replace

    witness, spec = qwen3_next()
    weights = drawn(witness[1])
    x_TD = torch.randn(NUM_TOKENS, DIM, generator=torch.Generator().manual_seed(5))
    assert float((ours(replace(spec, **change), weights, x_TD, [NUM_TOKENS], (REFERENCE,)) - reference(witness, x_TD)).abs().max()) > 1e-4


@pytest.mark.parametrize("parameters", [
    {"rope_type": "default", "rope_theta": 500_000.0}, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
], ids=lambda parameters: parameters["rope_type"])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    """Equal to the last bit where nothing is blended: at position 100,000 a bit is a hundredth of a radian."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    want = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=dict(parameters))).inv_freq
    slowdown = None
    if parameters["rope_type"] == "llama3":
        slowdown = Slowdown(factor=8.0, low=1.0, high=4.0, context=8192)
    factor = parameters["factor"] if parameters["rope_type"] == "linear" else 1.0
    got = inv_freq_of(Rotation(width=128, theta=parameters["rope_theta"], factor=factor, slowdown=slowdown))
    torch.testing.assert_close(got, want, rtol=0 if slowdown is None else 3e-7, atol=0)
