"""Sparse attention against torch's own in float64 over gathered rows, and against dense attention where every row is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from firstlight.backends.portable import sparse_attention as portable
from firstlight.ops.case import Case
from firstlight.ops.declared import sparse_attention as operator
from firstlight.ops.latent_attention import latent_attention
from firstlight.ops.sparse_attention import make_case
from firstlight.ops.sparse_attention import sparse_attention as reference

TOLERANCE = operator.tol.float32
FORMS = {"reference": reference, "portable": portable.sparse_attention}
Form = Callable[..., Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def case(lengths: list[int], contexts: list[int], top_k: int = 8, **options: Any) -> Case:
    return make_case(torch.Generator().manual_seed(0), "test", lengths, contexts, top_k, **options)


def with_chosen(inputs: Case, chosen_TU: Tensor) -> Case:
    return Case(inputs.name, inputs.use, tuple({**inputs.named, "chosen_TU": chosen_TU}.values()), inputs.kwargs)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def outside(inputs: Case) -> Tensor:
    """torch's scaled_dot_product_attention in float64, one token and head at a time."""
    named, nope, v_dim, scale = inputs.named, inputs.kwargs["nope"], inputs.kwargs["v_dim"], inputs.kwargs["scale"]
    q, pool, weight = (named[name].double() for name in ("q_THQ", "rows_SBC", "kv_b_OL"))
    starts, latent, size = named["starts_N1"].tolist(), weight.shape[1], pool.shape[1]
    found = torch.zeros(*q.shape[:2], v_dim, dtype=torch.float64)
    for n, context in enumerate(named["contexts_N"].tolist()):
        for token in range(starts[n], starts[n + 1]):
            mine = [m for m in named["chosen_TU"][token].tolist() if 0 <= m <= context + token - starts[n]]
            for head in range(q.shape[1] if mine else 0):
                rows = torch.stack([pool[named["tables_NB"][n, m // size], m % size] for m in mine])
                part = weight[head * (nope + v_dim):(head + 1) * (nope + v_dim)]
                keys = torch.cat((rows[:, :latent] @ part[:nope].T, rows[:, latent:]), 1)
                out = functional.scaled_dot_product_attention(q[token, head][None], keys, rows[:, :latent] @ part[nope:].T, scale=scale)
                found[token, head] = out[0]
    return found


@pytest.mark.parametrize("widths", [(12, 4, 10, 24), (16, 0, 8, 20), (5, 6, 9, 7)])
@pytest.mark.parametrize("block", [1, 4])
def test_outside_attention(form: Form, widths: tuple[int, int, int, int], block: int) -> None:
    inputs = case([1, 11, 1, 3], [0, 0, 37, 16], widths=widths, block=block, spread=2.0).poisoned()
    assert error(inputs.run(form)[0], outside(inputs)) < TOLERANCE


def test_every_row_chosen_is_dense_attention(form: Form) -> None:
    """In any order, with -1 behind; one row less is something else."""
    inputs = case([9, 1, 4], [0, 30, 20], top_k=31)
    named = inputs.named
    dense = latent_attention(*(named[name] for name in named if name != "chosen_TU"), **inputs.kwargs)
    rng = torch.Generator().manual_seed(1)
    totals = [*range(1, 10), 31, *range(21, 25)]
    chosen = torch.full((14, 31), -1, dtype=torch.int32)
    for token, total in enumerate(totals):
        chosen[token, :total] = torch.randperm(total, generator=rng).int()
    assert error(with_chosen(inputs, chosen).run(form)[0], dense) < TOLERANCE
    chosen[9, 5] = -1
    assert error(with_chosen(inputs, chosen).run(form)[0][9], dense[9]) > 100 * TOLERANCE


def test_a_token_without_rows_is_zero(form: Form) -> None:
    """None, rows of the future only, and rows that hold NaN but were not chosen."""
    inputs = case([3, 1], [10, 5])
    named = inputs.named
    chosen = torch.tensor([[-1, -1], [13, 11], [3, -1], [-1, -1]], dtype=torch.int32)
    named["rows_SBC"][named["tables_NB"][0, 0], 0] = torch.nan
    out = with_chosen(inputs, chosen).run(form)[0]
    assert torch.equal(torch.zeros_like(out[[0, 3]]), out[[0, 3]])
    assert out[1].isfinite().all() and bool((out[1] != 0).all()), "its own row is place 11, and 13 is beyond the end"
    assert out[2].isfinite().all()


@pytest.mark.parametrize("elements", [1, 500, 1 << 20])
def test_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    inputs = case([1, 21, 0, 6], [150, 30, 4, 58], spread=3.0).poisoned()
    want = inputs.run(reference)[0]
    monkeypatch.setattr(portable, "GATHER_ELEMENTS", elements)
    assert error(inputs.run(portable.sparse_attention)[0], want) < TOLERANCE
