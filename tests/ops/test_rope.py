"""Rotation against complex numbers in float64; the pairings are permutations of each other."""

from __future__ import annotations

import cmath

import pytest
import torch

from firstlight.ops.rope import rope

INV_FREQ = [1.0, 0.1, 0.01]


@pytest.mark.parametrize("interleaved", [True, False])
def test_each_pair_is_a_complex_number(interleaved: bool) -> None:
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    positions = [0, 1, 7, 1000]
    got = rope(x, torch.tensor(positions), INV_FREQ, interleaved=interleaved, scale=1.5)
    for t, position in enumerate(positions):
        for h in range(2):
            for i, freq in enumerate(INV_FREQ):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                want = complex(float(x[t, h, a]), float(x[t, h, b])) * cmath.exp(1j * position * freq) * 1.5
                assert abs(want - complex(float(got[t, h, a]), float(got[t, h, b]))) < 2e-4


def test_position_zero_is_the_identity_and_norms_stay() -> None:
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(x, rope(x, torch.zeros(3, dtype=torch.int64), INV_FREQ, interleaved=True))
    turned = rope(x, torch.tensor([5, 123, 999_999]), INV_FREQ, interleaved=False)
    assert torch.allclose(x.norm(dim=-1), turned.norm(dim=-1), rtol=1e-6)


def test_dot_products_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 6, generator=torch.Generator().manual_seed(2))
    for interleaved in (True, False):
        products = []
        for position in (0, 500):
            turned_q = rope(q, torch.tensor([position + 3]), INV_FREQ, interleaved=interleaved)
            turned_k = rope(k, torch.tensor([position]), INV_FREQ, interleaved=interleaved)
            products.append(float((turned_q * turned_k).sum()))
        near, far = products
        assert abs(near - far) < 1e-4


def test_list_and_tensor_frequencies_are_one() -> None:
    x, positions = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(3)), torch.arange(5)
    assert torch.equal(rope(x, positions, INV_FREQ, interleaved=True), rope(x, positions, torch.tensor(INV_FREQ), interleaved=True))


def test_pairings_differ() -> None:
    x = torch.arange(6.0).view(1, 1, 6)
    order = [0, 2, 4, 1, 3, 5]
    halves = rope(x[..., order], torch.tensor([2]), INV_FREQ, interleaved=False)
    pairs = rope(x, torch.tensor([2]), INV_FREQ, interleaved=True)
    assert torch.equal(pairs[..., order], halves)
    assert not torch.allclose(pairs, rope(x, torch.tensor([2]), INV_FREQ, interleaved=False))
