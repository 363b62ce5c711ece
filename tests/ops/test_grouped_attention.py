"""Grouped attention against torch's own attention in float64, and its forms against each other: split, batched, bounded, poisoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstlight.backends.portable import grouped_attention as portable
from firstlight.ops.case import Case, tensors_of
from firstlight.ops.declared import grouped_attention as operator
from firstlight.ops.grouped_attention import grouped_attention as reference
from firstlight.ops.grouped_attention import make_case

TOLERANCE = operator.tol.float32
FORMS = {"reference": reference, "portable": portable.grouped_attention}
Form = Callable[..., Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def case(lengths: list[int], contexts: list[int], **options: Any) -> Case:
    return make_case(torch.Generator().manual_seed(0), "test", lengths, contexts, **options)


def run(form: Form, inputs: Case) -> Tensor:
    (out,) = inputs.run(form)
    assert isinstance(out, Tensor)
    return out


def with_args(inputs: Case, **changed: Tensor) -> Case:
    return Case(inputs.name, inputs.use, tuple({**inputs.named, **changed}.values()), inputs.kwargs)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def outside(inputs: Case) -> Tensor:
    """torch's scaled_dot_product_attention in float64, head by head, over rows that were looked up one at a time."""
    named, scale = inputs.named, inputs.kwargs["scale"]
    q_THK, keys, values = (named[name].double() for name in ("q_THK", "keys_SBJK", "values_SBJV"))
    size, per_key_head = keys.shape[1], q_THK.shape[1] // keys.shape[2]
    outs = []
    for n, context in enumerate(named["contexts_N"].tolist()):
        begin, end = named["starts_N1"][n:n + 2].tolist()
        places = [(int(named["tables_NB"][n, m // size]), m % size) for m in range(context + end - begin)]
        mask = torch.arange(len(places)) <= context + torch.arange(end - begin)[:, None]
        heads = []
        for h in range(q_THK.shape[1]):
            rows = [torch.stack([pool[block, row, h // per_key_head] for block, row in places]) for pool in (keys, values)]
            heads.append(functional.scaled_dot_product_attention(q_THK[begin:end, h], *rows, attn_mask=mask, scale=scale))
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@pytest.mark.parametrize("widths", [(6, 6), (4, 9), (8, 5)])
@pytest.mark.parametrize("block", [1, 4])
def test_outside_attention(form: Form, heads: tuple[int, int], widths: tuple[int, int], block: int) -> None:
    inputs = case([1, 11, 1, 3], [0, 0, 37, 16], heads=heads, widths=widths, block=block, spread=2.0).poisoned()
    assert error(run(form, inputs), outside(inputs)) < TOLERANCE


@pytest.mark.parametrize("gather_bytes", [1, 1 << 20])
@pytest.mark.parametrize("score_elements", [1, 64, 500, 3000])
@pytest.mark.parametrize("block", [4, 16])
def test_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, gather_bytes: int, score_elements: int, block: int) -> None:
    """By blocks of rows, and by pieces of queries; the causal border inside, at and off the edges."""
    inputs = case([1, 21, 1, 6, 40], [150, 30, 0, 58, 0], block=block, spread=3.0).poisoned()
    want = run(reference, inputs)
    monkeypatch.setattr(portable, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(portable, "SCORE_ELEMENTS", score_elements)
    assert error(run(portable.grouped_attention, inputs), want) < TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 44])
def test_one_chunk_is_many(form: Form, size: int) -> None:
    """Rows of later tokens are NaN until their chunk has come."""
    length, context = 45, 22
    inputs = case([length], [context]).poisoned()
    whole, outs = run(reference, inputs), []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        part = with_args(inputs, q_THK=inputs.named["q_THK"][begin:end], starts_N1=torch.tensor([0, end - begin]),
                         contexts_N=torch.tensor([context + begin]))
        outs.append(run(form, part.poisoned()))
    assert error(torch.cat(outs), whole) < TOLERANCE


def test_alone_is_batched(form: Form) -> None:
    """Decode rows of unlike lengths, prefill rows and an idle row."""
    inputs = case([1, 17, 1, 0, 1, 4, 1], [0, 9, 300, 6, 31, 64, 33]).poisoned()
    batched, named = run(form, inputs), inputs.named
    starts = named["starts_N1"].tolist()
    for n in (0, 1, 2, 4, 5, 6):
        begin, end = starts[n:n + 2]
        alone = with_args(inputs, q_THK=named["q_THK"][begin:end], tables_NB=named["tables_NB"][n:n + 1],
                          starts_N1=torch.tensor([0, end - begin]), contexts_N=named["contexts_N"][n:n + 1])
        assert error(batched[begin:end], run(form, alone)) < TOLERANCE


@pytest.mark.parametrize("pool", ["keys_SBJK", "values_SBJV"])
def test_every_row_up_to_the_token_matters_and_none_after(form: Form, pool: str) -> None:
    """Change one row: outputs change from its token on, for the heads that share it, and for nobody else by a bit."""
    inputs = case([24], [10])
    want, named = run(form, inputs), inputs.named
    for position in (0, 9, 10, 21, 33):
        rows = named[pool].clone()
        rows[named["tables_NB"][0, position // 4], position % 4, 1] += 1.0
        got = run(form, with_args(inputs, **{pool: rows}))
        first = max(0, position - 10)
        assert torch.equal(want[:first], got[:first])
        assert torch.equal(want[:, :3], got[:, :3])
        changed = (want - got).abs().amax(2)[first:, 3:]
        assert (changed > 1e-6).all()


class Watch(TorchDispatchMode):
    """The largest tensor that any operator call allocates, and how many calls there are."""

    def __init__(self, inputs: Case) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(list(inputs.args))}
        self.num_calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_calls += 1
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in fresh)])
        return out


def watched(inputs: Case) -> Watch:
    with Watch(inputs) as watch:
        run(portable.grouped_attention, inputs)
    return watch


@pytest.mark.parametrize("length", [1, 9])
def test_memory_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Twenty times the rows, the same largest tensor; the control gathers all at once."""
    few, many = (case([length], [context]) for context in (100, 2000))
    assert 10 * watched(few).largest < watched(many).largest
    monkeypatch.setattr(portable, "GATHER_BYTES", 1 << 12)
    monkeypatch.setattr(portable, "SCORE_ELEMENTS", 2048)
    assert watched(few).largest == watched(many).largest


def test_gathered_rows_are_bounded_over_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case([1] * 12, [100 + n for n in range(12)])
    want, bound = run(reference, inputs), 300 * 2 * 22 * 4
    assert bound < 2 * watched(inputs).largest
    monkeypatch.setattr(portable, "GATHER_BYTES", bound)
    assert watched(inputs).largest <= bound
    assert error(run(portable.grouped_attention, inputs), want) < TOLERANCE


def test_calls_per_decoded_token_are_constant() -> None:
    few, many = (watched(case([1], [context], block=16)) for context in (99, 16_383))
    assert few.num_calls == many.num_calls


@pytest.mark.parametrize("widths", [(8, 8), (8, 6)])
def test_bfloat16_keeps_scores_in_float32(form: Form, widths: tuple[int, int]) -> None:
    """One key in 3000 has a score 1/16 above the rest, at a height where bfloat16 steps by 1/4; its weight must show it."""
    inputs = case([1], [2999], widths=widths, dtype=torch.bfloat16, block=16)
    named = inputs.named
    q, keys, values = (torch.zeros_like(named[name]) for name in ("q_THK", "keys_SBJK", "values_SBJV"))
    keys[..., 0], q[..., 0], q[..., 1] = 32.0, 1.0, 0.0625
    special = named["tables_NB"][0, 100], 7
    keys[special][:, 1], values[special][:, 2] = 1.0, 1.0
    out = with_args(inputs, q_THK=q, keys_SBJK=keys, values_SBJV=values)
    got = Case(out.name, out.use, out.args, {"scale": 1.0}).run(form)[0].float()
    weighed = torch.tensor(0.0625).exp() / (2999 + torch.tensor(0.0625).exp())
    torch.testing.assert_close(got[0, :, 2], weighed.expand(6), rtol=1e-2, atol=0.0)
