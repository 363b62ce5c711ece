"""The smallest modules: one operator with its weights. They exist so that a recorder can see every output by name.

Letters: T packed tokens, I O D widths, H heads, K V head widths, W window, E experts, X chosen experts, N sequences,
R rotary width, F = R / 2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from firstlight.layers.step import Step
from firstlight.ops.experts import Bank
from firstlight.ops.registry import Binder
from firstlight.parts.activation import Activation
from firstlight.parts.moe import Router as RouterSpec
from firstlight.parts.rotation import Rotation, Yarn
from firstlight.spec.model import OpUse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def empty(dtype: str, *shape: int) -> nn.Parameter:
    """A parameter that has a shape but no memory yet; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=DTYPES[dtype], device="meta"), requires_grad=False)


class Linear(nn.Module):
    """Product with a weight in checkpoint layout."""

    def __init__(self, binder: Binder, num_in: int, num_out: int, dtype: str) -> None:
        super().__init__()
        self.weight = empty(dtype, num_out, num_in)
        self.compute = binder.bind(OpUse.of("linear", dtype, I=num_in, O=num_out))

    def forward(self, x_TI: Tensor) -> Tensor:
        """One product."""
        return self.compute(x_TI, self.weight)  # type: ignore[no-any-return]


class RmsNorm(nn.Module):
    """Norm over the last dim; with `plus_one` the scale is 1 + weight."""

    def __init__(self, binder: Binder, dim: int, eps: float, dtype: str, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = empty(dtype, dim)
        self.eps, self.plus_one = eps, plus_one
        self.compute = binder.bind(OpUse.of("rms_norm", dtype, D=dim))

    def forward(self, x_TD: Tensor) -> Tensor:
        """One norm."""
        return self.compute(x_TD, self.weight, eps=self.eps, plus_one=self.plus_one)  # type: ignore[no-any-return]


class LayerNorm(nn.Module):
    """Norm around the mean over the last dim, with a bias; what comes out has the dtype of what went in."""

    def __init__(self, binder: Binder, dim: int, eps: float, dtype: str, weight_dtype: str) -> None:
        super().__init__()
        self.weight, self.bias = empty(weight_dtype, dim), empty(weight_dtype, dim)
        self.eps = eps
        self.compute = binder.bind(OpUse.of("layer_norm", dtype, D=dim))

    def forward(self, x_TD: Tensor) -> Tensor:
        """One norm."""
        return self.compute(x_TD, self.weight, self.bias, eps=self.eps)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Turns the first channels of every head by position, and leaves the others.

    Note: frequencies are computed in fp32, like the checkpoints' own: exact ones would be a thousandth of a radian off at position 8,000.
    """

    def __init__(self, binder: Binder, spec: Rotation, num_heads: int, dtype: str) -> None:
        super().__init__()
        self.spec = spec
        self.inv_freq = inv_freq_of(spec)
        self.compute = binder.bind(spec.use(num_heads, dtype))

    def forward(self, x_THK: Tensor, positions_T: Tensor) -> Tensor:
        """The turned heads, all channels."""
        width = self.spec.width
        turned_THR: Tensor = self.compute(
            x_THK[..., :width], positions_T, self.inv_freq, interleaved=self.spec.interleaved, scale=self.spec.magnitude)
        return turned_THR if width == x_THK.shape[-1] else torch.cat((turned_THR, x_THK[..., width:]), dim=-1)


def inv_freq_of(spec: Rotation) -> Tensor:
    """Radians per position of each pair, fp32."""
    inv_freq_F: Tensor = 1.0 / (spec.theta ** (torch.arange(0, spec.width, 2, dtype=torch.float32) / spec.width)) / spec.factor
    slow = spec.slowdown
    if spec.yarn is not None:
        return _yarn(spec, spec.yarn, inv_freq_F)
    if slow is None:
        return inv_freq_F
    num_turns_F = slow.context * inv_freq_F / (2 * math.pi)  # within the context that the model was first made for
    share_F = ((num_turns_F - slow.low) / (slow.high - slow.low)).clamp(0, 1)
    return (1 - share_F) * inv_freq_F / slow.factor + share_F * inv_freq_F


def _yarn(spec: Rotation, yarn: Yarn, inv_freq_F: Tensor) -> Tensor:
    """Each pair between its own speed and the slow one, by how often it turns within the first context."""

    def pair_of(num_turns: float) -> float:
        return spec.width * math.log(yarn.context / (num_turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = max(math.floor(pair_of(yarn.fast)), 0), min(math.ceil(pair_of(yarn.slow)), spec.width - 1)
    pairs_F = torch.arange(len(inv_freq_F), dtype=torch.float32)
    slow_F = ((pairs_F - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return inv_freq_F / yarn.factor * slow_F + inv_freq_F * (1 - slow_F)


class GatedRmsNorm(nn.Module):
    """Norm of every head times an activated gate."""

    def __init__(self, binder: Binder, num_heads: int, head_v: int, eps: float, activation: str, dtype: str) -> None:
        super().__init__()
        self.weight = empty("float32", head_v)
        self.eps = eps
        self.activation = activation
        self.compute = binder.bind(OpUse.of("gated_rms_norm", dtype, H=num_heads, V=head_v, activation=activation))

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        """Normed, gated, cast once."""
        return self.compute(x_THV, gate_THV, self.weight, eps=self.eps, activation=self.activation)  # type: ignore[no-any-return]


class ShortConv(nn.Module):
    """Causal depthwise convolution and SiLU with its window in a slot of the cache."""

    def __init__(self, binder: Binder, width: int, window: int, dtype: str) -> None:
        super().__init__()
        self.weight = empty("float32", width, window)
        self.compute = binder.bind(OpUse.of("short_conv", dtype, D=width, W=window))

    def forward(self, x_TD: Tensor, window_SWD: Tensor, slots_N: Tensor, step: Step) -> Tensor:
        """Convolves this step's tokens and leaves the new window in the slots."""
        return self.compute(x_TD, self.weight, window_SWD, slots_N, step.starts_N1, step.contexts_N)  # type: ignore[no-any-return]


class Act(nn.Module):
    """Gated activation."""

    def __init__(self, binder: Binder, spec: Activation, width: int, dtype: str) -> None:
        super().__init__()
        self.spec = spec
        self.compute = binder.bind(spec.use(width, dtype))

    def forward(self, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        """act(gate) * up."""
        spec = self.spec
        return self.compute(gate_TI, up_TI, kind=spec.kind, beta=spec.beta, linear_beta=spec.linear_beta)  # type: ignore[no-any-return]


class Router(nn.Module):
    """Chooses experts; the module's output is (ids, weights) so that a trace holds the ids."""

    def __init__(self, binder: Binder, spec: RouterSpec, dim: int, num_experts: int, top_k: int, dtype: str) -> None:
        super().__init__()
        self.weight = empty(dtype, num_experts, dim)
        self.bias = empty("float32", num_experts) if spec.biased else None
        self.spec, self.top_k = spec, top_k
        self.compute = binder.bind(spec.use(dim, num_experts, top_k, dtype))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(ids_TX, weights_TX)."""
        spec = self.spec
        weights_TX, ids_TX = self.compute(
            x_TD, self.weight, self.bias, top_k=self.top_k, score=spec.score, num_groups=spec.num_groups, top_groups=spec.top_groups,
            renormalize=spec.renormalize, scale=spec.scale)
        return ids_TX, weights_TX


class Experts(nn.Module):
    """A bank of experts in whatever format the checkpoint has; `bank` is set by the loader."""

    def __init__(self, binder: Binder, spec: Activation, use: OpUse) -> None:
        super().__init__()
        self.spec = spec
        self.bank: Bank | None = None
        self.compute = binder.bind(use)

    def forward(self, x_TD: Tensor, ids_TX: Tensor, weights_TX: Tensor) -> Tensor:
        """Weighted sum of the chosen experts."""
        spec = self.spec
        return self.compute(x_TD, self.bank, ids_TX, weights_TX, kind=spec.kind, beta=spec.beta, linear_beta=spec.linear_beta)  # type: ignore[no-any-return]
