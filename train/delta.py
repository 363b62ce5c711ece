"""Short convolution and gated delta rule with gradients: compiled loops where there is a compiler, the same in PyTorch otherwise."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.shape import CONV_WIDTH, QK_NORM_EPS


@cache
def kernels() -> Any:
    """The compiled loops."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("kernels.cpp")
    return load("firstlight_train_kernels", [str(source)], extra_cflags=["-O3", "-march=native", "-ffast-math", "-mprefer-vector-width=512"])


class FastDelta(torch.autograd.Function):
    """q, k, v [B, T, 3, H, K], decay [B, T, H, K], beta [B, T, H], state [B, H, K, V] -> outputs and last state."""

    @staticmethod
    def forward(ctx, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        """Output, and what the way back needs."""
        out, last, kept = kernels().delta_forward(qkv, decay, beta, state, scale)
        ctx.scale = scale
        ctx.save_for_backward(qkv, decay, beta, kept)
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    def backward(ctx, d_out: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of the inputs."""
        qkv, decay, beta, kept = ctx.saved_tensors
        return *kernels().delta_backward(qkv, decay, beta, kept, d_out.contiguous(), ctx.scale), None, None


class FastConv(torch.autograd.Function):
    """x [B, T, C], weight [W, C], window [B, W - 1, C] of inputs before x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, window: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """Output, and what the way back needs."""
        ctx.save_for_backward(x, weight, window)
        return kernels().conv_forward(x, weight, window)

    @staticmethod
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        """Gradients of the inputs."""
        return *kernels().conv_backward(*ctx.saved_tensors, d.contiguous()), None


def slow_delta(qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same token by token with autograd's own gradients."""
    q, k, v = qkv.unbind(2)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_NORM_EPS) for x in (q, k))
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1), state.detach()


def slow_conv(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    """The same by shifted sums."""
    padded = torch.cat((window, x), 1)
    return F.silu(sum(weight[j] * padded[:, j : j + x.shape[1]] for j in range(CONV_WIDTH)))
