"""Eight-bit weights with a scale per block. Letters: O I rows and columns of a matrix, F G blocks of rows and of columns.

Source: deepseek-ai/DeepSeek-V3 inference/kernel.py, `weight_dequant`: what is stored as `weight_scale_inv` multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.ops.case import Case, normal
from firstlight.spec.model import OpUse

BLOCK = 128


def fp8_unpack(codes_OI: Tensor, scale_FG: Tensor) -> Tensor:
    """Each code (E4M3, without infinities, as a byte) times the scale of its block, in fp32."""
    num_rows, num_columns = codes_OI.shape
    scale_OI = scale_FG.float().repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
    return codes_OI.contiguous().view(torch.float8_e4m3fn).float() * scale_OI


def pack(w_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales that use the whole range of each block, as the checkpoints' do; for cases and tests."""
    blocks = tuple(-(-size // BLOCK) for size in w_OI.shape)
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK)
    padded[: w_OI.shape[0], : w_OI.shape[1]] = w_OI.float()
    largest_FG = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
    scale_FG = largest_FG.clamp(min=1e-12) / 448.0
    scale_OI = scale_FG.repeat_interleave(BLOCK, 0)[: w_OI.shape[0]].repeat_interleave(BLOCK, 1)[:, : w_OI.shape[1]]
    return (w_OI.float() / scale_OI).to(torch.float8_e4m3fn).view(torch.uint8), scale_FG


def cases(seed: int) -> Iterator[Case]:
    """Every code, whole blocks, blocks cut off on either side, scales of every size."""
    rng = torch.Generator().manual_seed(seed)
    use = OpUse.of("fp8_unpack", "float32")
    for shape in ((0, 8), (1, 1), (128, 128), (129, 127), (5, 300), (300, 5), (257, 385)):
        yield Case("x".join(map(str, shape)), use, pack(normal(rng, *shape)))
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(2, 127)
    for label, scale in (("tiny", 1e-30), ("power", 2.0**-7), ("large", 3e4)):
        yield Case(f"codes-{label}", use, (finite, torch.tensor([[scale]])))
    yield Case("nan", use, (codes.view(2, 128), torch.tensor([[0.5]])), has_nan=True)
