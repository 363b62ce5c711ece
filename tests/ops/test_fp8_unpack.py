"""E4M3 by its definition: sign, four bits of exponent with bias 7, three of mantissa; and blocks that end where the matrix does."""

from __future__ import annotations

import pytest
import torch

from firstlight.backends.portable.fp8_unpack import fp8_unpack as portable
from firstlight.ops.fp8_unpack import fp8_unpack, pack

FORMS = {"reference": fp8_unpack, "portable": portable}


def meaning(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20])
def test_every_code(form: str, scale: float) -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    assert 448.0 == max(meaning(code) for code in codes)
    got = FORMS[form](torch.tensor([codes], dtype=torch.uint8), torch.tensor([[scale, scale]]))
    assert torch.equal(torch.tensor([[meaning(code) for code in codes]]) * torch.tensor(scale), got)
    assert FORMS[form](torch.tensor([[0x7F, 0xFF]], dtype=torch.uint8), torch.ones(1, 1)).isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 127), (257, 300)])
def test_scales_belong_to_blocks(form: str, shape: tuple[int, int]) -> None:
    codes = torch.full(shape, 0x38, dtype=torch.uint8)  # one
    blocks = tuple(-(-size // 128) for size in shape)
    scale = torch.arange(1.0, 1.0 + blocks[0] * blocks[1]).view(blocks)
    got = FORMS[form](codes, scale)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] - 1, 0), (shape[0] // 2, shape[1] // 2)):
        assert float(scale[row // 128, column // 128]) == float(got[row, column])


def test_packing_uses_the_range_of_each_block() -> None:
    w = torch.randn(200, 140, generator=torch.Generator().manual_seed(0))
    w[150:, :100] *= 1000
    got = fp8_unpack(*pack(w))
    assert float(((got - w).abs() / w.abs().clamp(min=1e-3)).max()) > 0.01, "eight bits lose something"
    assert float((got - w)[:128, :128].abs().max()) < 0.2
    assert float((got - w)[150:, :100].abs().max()) < 200
