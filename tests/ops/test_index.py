"""The indexer's operators: scores against loops in float64, choices against a sort in Python, and what disturbs neither.

Letters: T tokens, M rows, U rows chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable import index_scores as portable_scores
from firstlight.backends.portable import index_topk as portable_topk
from firstlight.ops.case import Case
from firstlight.ops.declared import index_scores as operator
from firstlight.ops.index_scores import index_scores, make_case
from firstlight.ops.index_topk import index_topk

TOLERANCE = operator.tol.float32
SCORES = {"reference": index_scores, "portable": portable_scores.index_scores}
CHOICES = {"reference": index_topk, "portable": portable_topk.index_topk}
Form = Callable[..., Tensor]


@pytest.fixture(params=SCORES)
def score(request: pytest.FixtureRequest) -> Form:
    return SCORES[request.param]


@pytest.fixture(params=CHOICES)
def choose(request: pytest.FixtureRequest) -> Form:
    return CHOICES[request.param]


def case(lengths: list[int], contexts: list[int], **options: Any) -> Case:
    return make_case(torch.Generator().manual_seed(0), "test", lengths, contexts, **options)


def outside(inputs: Case) -> Tensor:
    """Row by row and head by head in float64."""
    named, scale = inputs.named, inputs.kwargs["scale"]
    q, weights, keys = (named[name].double() for name in ("q_THK", "weights_TH", "keys_SBK"))
    starts, contexts = named["starts_N1"].tolist(), named["contexts_N"].tolist()
    found = torch.full((len(q), max(c + e - b for c, b, e in zip(contexts, starts, starts[1:], strict=False))), -torch.inf, dtype=torch.float64)
    for n, context in enumerate(contexts):
        for token in range(starts[n], starts[n + 1]):
            for m in range(context + token - starts[n] + 1):
                key = keys[named["tables_NB"][n, m // keys.shape[1]], m % keys.shape[1]]
                found[token, m] = sum(float(weights[token, h]) * max(0.0, scale * float(q[token, h] @ key)) for h in range(q.shape[1]))
    return found


def error(got_TM: Tensor, want_TM: Tensor) -> float:
    hidden = want_TM == -torch.inf
    assert torch.equal(hidden, got_TM == -torch.inf)
    return float((got_TM.double() - want_TM)[~hidden].abs().max())


def test_outside_scores(score: Form) -> None:
    inputs = case([1, 9, 1, 3], [0, 0, 21, 16], heads=5).poisoned()
    assert error(inputs.run(score)[0], outside(inputs)) < TOLERANCE


def test_negative_weights_and_relu_matter(score: Form) -> None:
    """Control: without the ReLU, and with the weights' size only, scores are others."""
    inputs = case([6], [4])
    want = outside(inputs)
    positive = inputs.with_tensors(lambda name, tensor: tensor.abs() if name == "weights_TH" else tensor)
    visible = want > -torch.inf
    assert float((positive.run(score)[0].double() - want)[visible].abs().max()) > 0.1
    named = inputs.named
    keys_MK = named["keys_SBK"][named["tables_NB"][0, :3]].flatten(0, 1)[:10]
    linear = torch.einsum("thk,mk,th->tm", named["q_THK"], keys_MK, named["weights_TH"]) * inputs.kwargs["scale"]
    assert float((linear.double() - want)[visible].abs().max()) > 0.1


@pytest.mark.parametrize(("gather_bytes", "score_elements", "min_rows"), [(1, 1, 1), (1, 300, 4), (1 << 20, 700, 16), (1 << 12, 1 << 20, 1)])
def test_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, gather_bytes: int, score_elements: int, min_rows: int) -> None:
    inputs = case([1, 21, 1, 6, 40], [150, 30, 0, 58, 0]).poisoned()
    want = index_scores(*inputs.args, **inputs.kwargs).double()
    monkeypatch.setattr(portable_scores, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(portable_scores, "SCORE_ELEMENTS", score_elements)
    monkeypatch.setattr(portable_scores, "MIN_ROWS", min_rows)
    assert error(inputs.run(portable_scores.index_scores)[0], want) < TOLERANCE


def test_a_turn_of_both_sides_changes_no_score(score: Form) -> None:
    """An orthonormal Hadamard turn of queries and keys, which the official code applies before rounding to eight bits, is left out here."""
    inputs = case([7, 1], [20, 3], width=16)
    turn = torch.ones(1, 1)
    while len(turn) < 16:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1))) / 2**0.5
    turned = inputs.with_tensors(lambda name, tensor: tensor @ turn if name in ("q_THK", "keys_SBK") else tensor)
    assert float((turned.args[0] - inputs.args[0]).abs().max()) > 0.5
    assert error(turned.run(score)[0], inputs.run(score)[0].double()) < TOLERANCE


def by_sort(scores: list[float], visible: int, top_k: int) -> list[int]:
    return sorted(sorted(range(visible), key=lambda m: (-scores[m], m))[:top_k])


@pytest.mark.parametrize("top_k", [1, 5, 8, 40, 100])
def test_choices_against_a_sort(choose: Form, top_k: int) -> None:
    """Coarse scores, so that most choices cut through ties."""
    rng = random.Random(top_k)
    num_rows = 40
    scores = [[float(rng.randint(-3, 3)) for _ in range(num_rows)] for _ in range(60)]
    visible = [rng.randint(0, num_rows) for _ in scores]
    got_TU = choose(torch.tensor(scores), torch.tensor(visible), top_k=top_k)
    assert (torch.int32, (60, min(top_k, num_rows))) == (got_TU.dtype, tuple(got_TU.shape))
    for row, count, got in zip(scores, visible, got_TU.tolist(), strict=True):
        want = by_sort(row, count, top_k)
        assert want + [-1] * (len(got) - len(want)) == got


def test_zero_scores_go_to_the_first(choose: Form) -> None:
    """Few heads often agree on exactly zero: order then says who is chosen, not chance."""
    scores = torch.zeros(3, 50)
    scores[1, 30] = 1.0
    scores[2, 10] = -1.0
    got = choose(scores, torch.tensor([50, 50, 50]), top_k=4).tolist()
    assert [[0, 1, 2, 3], [0, 1, 2, 30], [0, 1, 2, 3]] == got


def test_a_needle_is_chosen(score: Form, choose: Form) -> None:
    """One key among 300 looks like the query; rows of other sequences and of the future never are."""
    inputs = case([1, 300], [299, 0], heads=16, width=16, block=16)
    q_THK, weights_TH, keys_SBK, tables_NB = inputs.args[:4]
    weights_TH.abs_()
    keys_SBK[tables_NB[0, 77 // 16], 77 % 16] = 20.0 * torch.nn.functional.normalize(q_THK[0].mean(0), dim=0)
    got = choose(score(*inputs.args, **inputs.kwargs), torch.tensor([300, *range(1, 301)]), top_k=8)
    assert 77 in got[0].tolist()
    assert all(max(rows) <= token for token, rows in enumerate(got[1:].tolist()))
    assert [0] + [-1] * 7 == got[1].tolist()
