"""Every code under the scales that go wrong elsewhere, the order of nibbles, the edges of groups, and flushed subnormals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable.mxfp4_unpack import mxfp4_unpack as portable
from firstlight.ops.mxfp4_unpack import mxfp4_unpack as reference

CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
SCALES = {0: 2.0**-127, 1: 2.0**-126, 120: 2.0**-7, 127: 1.0, 254: 2.0**127, 255: math.nan}
LARGEST = (2 - 2.0**-23) * 2.0**127
Form = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(params=[reference, portable], ids=["reference", "portable"])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def row_of_all_codes() -> Tensor:
    """32 columns: codes 0 to 15 twice."""
    return torch.tensor([[low | (low + 1) << 4 for low in range(0, 16, 2)] * 2], dtype=torch.uint8)


@pytest.mark.parametrize("scale", SCALES)
def test_table_of_codes_and_scales(form: Form, scale: int) -> None:
    got = form(row_of_all_codes(), torch.tensor([[scale]], dtype=torch.uint8))[0].tolist()
    for code, value in zip(list(range(16)) * 2, got, strict=True):
        want = CODES[code] * SCALES[scale]  # exact in float64
        if math.isnan(want):
            assert math.isnan(value)
        elif abs(want) > LARGEST:
            assert math.copysign(math.inf, want) == value
        else:
            assert (want, math.copysign(1.0, want)) == (value, math.copysign(1.0, value))


def test_low_nibble_is_the_even_column(form: Form) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 15] = 0x72, 0xA0
    got = form(packed, torch.tensor([[127]], dtype=torch.uint8))[0]
    assert [1.0, 6.0] == got[:2].tolist()
    assert [0.0, -1.0] == got[30:].tolist()
    assert 0 == int(got[2:30].count_nonzero())


def test_scales_change_at_multiples_of_32(form: Form) -> None:
    got = form(torch.full((2, 48), 0x22, dtype=torch.uint8), torch.tensor([[127, 128, 126], [129, 127, 0]], dtype=torch.uint8))
    want = [[1.0] * 32 + [2.0] * 32 + [0.5] * 32, [4.0] * 32 + [1.0] * 32 + [2.0**-127] * 32]
    assert want == got.tolist()


def test_a_cut_group_keeps_its_scale(form: Form) -> None:
    """Columns that are no multiple of 32, as a shard may hold them."""
    got = form(torch.full((1, 20), 0x22, dtype=torch.uint8), torch.tensor([[128, 126]], dtype=torch.uint8))
    assert [[2.0] * 32 + [0.5] * 8] == got.tolist()


def test_the_definition_survives_flushed_subnormals() -> None:
    packed, scale = row_of_all_codes(), torch.tensor([[0]], dtype=torch.uint8)
    want = reference(packed, scale).view(torch.int32).tolist()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = reference(packed, scale).view(torch.int32).tolist()
    finally:
        torch.set_flush_denormal(False)
    assert want == got
    assert 0 != want[0][1]
