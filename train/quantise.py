"""MXFP4: pack, unpack, and the rounding inside training that lets gradients through."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
LARGEST = E2M1[-1]


def exponents(weight: Tensor) -> Tensor:
    """Per group of 32 columns the power of two under which the error is least: the largest value fits, or is cut to 6."""
    groups = weight.unflatten(-1, (-1, GROUP))
    whole = torch.ceil(torch.log2(groups.abs().amax(-1) / LARGEST).clamp(min=-100.0)).to(torch.int32)
    errors = [(_nearest(groups, exponent) - groups).square().sum(-1) for exponent in (whole, whole - 1)]
    return torch.where(errors[0] <= errors[1], whole, whole - 1)


def _nearest(groups: Tensor, exponent: Tensor) -> Tensor:
    """The values that can be kept; steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6, halves go down."""
    scaled = torch.ldexp(groups, -exponent[..., None])
    size = scaled.abs().clamp(max=LARGEST)
    step = torch.where(size <= 1.75, 0.5, torch.where(size <= 3.5, 1.0, 2.0))
    return torch.ldexp((torch.ceil(size / step - 0.5) * step).copysign(scaled), exponent[..., None])


def codes(weight: Tensor, exponent: Tensor) -> Tensor:
    """Index of the nearest value, bit 3 is the sign."""
    scaled = torch.ldexp(weight.unflatten(-1, (-1, GROUP)), -exponent[..., None]).flatten(-2)
    grid = torch.tensor(E2M1)
    return (torch.bucketize(scaled.abs(), (grid[1:] + grid[:-1]) / 2) + 8 * (scaled < 0)).to(torch.uint8)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [.., in / 2], the even column in the low nibble, and biased exponents [.., in / 32]."""
    exponent = exponents(weight)
    code = codes(weight, exponent)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + E8M0_BIAS).to(torch.uint8)


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """Fp32 values of packed codes."""
    code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    value = torch.tensor((*E2M1, *(-size for size in E2M1)))[code.long()]
    return torch.ldexp(value.unflatten(-1, (-1, GROUP)), scale.to(torch.int32)[..., None] - E8M0_BIAS).flatten(-2)


def rounded(weight: Tensor) -> Tensor:
    """What `pack` keeps, as numbers; exact in bf16."""
    return _nearest(weight.unflatten(-1, (-1, GROUP)), exponents(weight)).flatten(-2)


_rounded_fast = torch.compile(rounded, dynamic=False)


class FakeMxfp4(torch.autograd.Function):
    """Rounds on the way forward; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """Output, and what the way back needs."""
        return _rounded_fast(weight)

    @staticmethod
    def backward(ctx, d: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """Gradients of the inputs."""
        return d
