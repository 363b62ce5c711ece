"""Routing by hand: precision of the bias, groups with negative scores, ties, both scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from firstlight.ops.route import route


def logits_in(scores: list[float]) -> tuple[Tensor, Tensor]:
    """x and weight whose sigmoid scores are these."""
    return torch.ones(1, 1), torch.tensor([[math.log(score / (1 - score))] for score in scores])


def chosen(x: Tensor, weight: Tensor, bias: list[float] | None = None, **kwargs: object) -> tuple[list[float], list[int]]:
    weights, ids = route(x, weight, None if bias is None else torch.tensor(bias), **kwargs)
    return weights[0].tolist(), ids[0].tolist()


def test_bias_chooses_and_unbiased_scores_weigh() -> None:
    weights, ids = chosen(*logits_in([0.9, 0.5, 0.4, 0.2]), [-1.0, 0.0, 0.3, 0.1], top_k=2, score="sigmoid", scale=2.0)
    assert [2, 1] == ids
    assert pytest.approx([2.0 * 0.4 / 0.9, 2.0 * 0.5 / 0.9], rel=1e-5) == weights


def test_without_renormalisation_the_scores_stay() -> None:
    weights, ids = chosen(*logits_in([0.9, 0.5, 0.4]), top_k=2, score="sigmoid", renormalize=False, scale=3.0)
    assert [0, 1] == ids
    assert pytest.approx([2.7, 1.5], rel=1e-5) == weights


def test_softmax_in_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 12, generator=rng), torch.randn(7, 12, generator=rng)
    logits = [[float(a.double() @ b.double()) for b in weight] for a in x]
    weights, ids = route(x, weight, top_k=3, score="softmax")
    for row, got_weights, got_ids in zip(logits, weights, ids, strict=True):
        total = sum(math.exp(value) for value in row)
        best = sorted(range(7), key=lambda e: -row[e])[:3]
        shares = [math.exp(row[e]) / total for e in best]
        assert best == got_ids.tolist()
        assert pytest.approx([share / sum(shares) for share in shares], rel=1e-5) == got_weights.tolist()


def test_a_bias_below_bf16_resolution_decides() -> None:
    """With activations and weights in bf16 the bias stays fp32: near 8, bf16 steps are 1/16."""
    x, weight = torch.ones(1, 8, dtype=torch.bfloat16), torch.full((4, 8), 0.25, dtype=torch.bfloat16)
    bias = torch.tensor([8.0, 8.001, 8.003, 8.002])
    assert 1 == len(set(bias.bfloat16().tolist()))
    weights, ids = route(x, weight, bias, top_k=2, score="sigmoid")
    assert [[2, 3]] == ids.tolist()
    assert (torch.float32, torch.int64) == (weights.dtype, ids.dtype)
    assert pytest.approx([0.5, 0.5]) == weights[0].tolist()


def test_bf16_inputs_give_fp32_logits() -> None:
    """Near 2, bf16 steps are 1/64: logits in bf16 would tie, and the lowest index would win."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[2.0, 0.0], [2.0, 2.0**-8], [2.0, 2.0**-9]], dtype=torch.bfloat16)
    assert 1 == len(set((x @ weight.T)[0].tolist()))
    weights, ids = route(x, weight, top_k=3, score="sigmoid", renormalize=False)
    assert [[1, 2, 0]] == ids.tolist()
    assert pytest.approx([1 / (1 + math.exp(-2 - step)) for step in (2.0**-8, 2.0**-9, 0.0)], rel=1e-6) == weights[0].tolist()


def test_groups_with_negative_biased_scores() -> None:
    """Masking by 0 instead of -inf would choose outside the best group, whose biased scores are all negative."""
    scores, bias = [0.5, 0.4, 0.3, 0.6], [-1.0, -1.0, -1.5, -2.5]
    _, ids = chosen(*logits_in(scores), bias, top_k=2, score="sigmoid", num_groups=2, top_groups=1)
    assert [0, 1] == ids


def test_a_group_is_as_good_as_its_two_best() -> None:
    """Group 0 has the best expert, group 1 the best two, group 2 the best sum of three."""
    scores = [0.9, 0.1, 0.1, 0.7, 0.6, 0.1, 0.5, 0.5, 0.5]
    _, ids = chosen(*logits_in(scores), top_k=3, score="sigmoid", num_groups=3, top_groups=1)
    assert [3, 4, 5] == ids


def test_groups_are_chosen_with_the_bias_too() -> None:
    _, ids = chosen(*logits_in([0.9, 0.8, 0.2, 0.1]), [0.0, 0.0, 1.0, 1.0], top_k=2, score="sigmoid", num_groups=2, top_groups=1)
    assert [2, 3] == ids


@pytest.mark.parametrize("num_experts", [8, 64, 896])
def test_ties_go_to_the_lowest_index(num_experts: int) -> None:
    """Enough experts that an unstable sort would shuffle them."""
    x, weight = torch.zeros(3, 4), torch.zeros(num_experts, 4)
    _, ids = route(x, weight, torch.zeros(num_experts), top_k=8, score="sigmoid")
    assert [list(range(8))] * 3 == ids.tolist()
    bias = torch.zeros(num_experts)
    bias[5], bias[num_experts - 1] = 1.0, 1.0
    _, ids = route(x, weight, bias, top_k=4, score="sigmoid")
    assert [[*sorted({5, num_experts - 1}), 0, 1]] * 3 == ids.tolist()


def test_tied_groups_go_to_the_lowest_index() -> None:
    _, ids = route(torch.zeros(1, 4), torch.zeros(64, 4), top_k=8, score="softmax", num_groups=16, top_groups=2)
    assert [list(range(8))] == ids.tolist()


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    x, weight = torch.ones(1, 1), torch.full((3, 1), -200.0)
    weights, _ = route(x, weight, top_k=2, score="sigmoid")
    assert [[0.0, 0.0]] == weights.tolist()
