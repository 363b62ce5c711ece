"""Latent attention against torch's own attention in float64, and its forms against each other: split, batched, poisoned, bounded, far away."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firstlight.backends.portable import latent_attention as portable
from firstlight.backends.portable import running_softmax
from firstlight.ops.case import Case, tensors_of
from firstlight.ops.declared import latent_attention as operator
from firstlight.ops.latent_attention import latent_attention as reference
from firstlight.ops.latent_attention import make_case

TOLERANCE = operator.tol.float32
FORMS = {"reference": reference, "portable": portable.latent_attention}
Form = Callable[..., Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def case(lengths: list[int], contexts: list[int], seed: int = 0, **options: Any) -> Case:
    return make_case(torch.Generator().manual_seed(seed), "test", lengths, contexts, **options)


def run(form: Form, inputs: Case) -> Tensor:
    (out,) = inputs.run(form)
    assert isinstance(out, Tensor)
    return out


def with_args(inputs: Case, **changed: Tensor) -> Case:
    args = tuple({**inputs.named, **changed}.values())
    return Case(inputs.name, inputs.use, args, inputs.kwargs)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def outside(inputs: Case) -> Tensor:
    """torch's scaled_dot_product_attention in float64 over keys and values expanded one row at a time."""
    named, nope, v_dim, scale = inputs.named, inputs.kwargs["nope"], inputs.kwargs["v_dim"], inputs.kwargs["scale"]
    q_THQ, pool, weight = named["q_THQ"].double(), named["rows_SBC"].double(), named["kv_b_OL"].double()
    num_heads, latent = q_THQ.shape[1], weight.shape[1]
    outs = []
    for n, context in enumerate(named["contexts_N"].tolist()):
        begin, end = named["starts_N1"][n:n + 2].tolist()
        total = context + end - begin
        keys, values = torch.zeros(num_heads, total, q_THQ.shape[2], dtype=torch.float64), torch.zeros(num_heads, total, v_dim, dtype=torch.float64)
        for m in range(total):
            row = pool[named["tables_NB"][n, m // pool.shape[1]], m % pool.shape[1]]
            for h in range(num_heads):
                mine = weight[h * (nope + v_dim):(h + 1) * (nope + v_dim)]
                keys[h, m] = torch.cat((mine[:nope] @ row[:latent], row[latent:]))
                values[h, m] = mine[nope:] @ row[:latent]
        mask = torch.arange(total) <= context + torch.arange(end - begin)[:, None]
        queries = q_THQ[begin:end].transpose(0, 1)
        outs.append(functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("widths", [(6, 3, 5, 9), (4, 0, 7, 8), (8, 2, 8, 5)])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_outside_attention(form: Form, widths: tuple[int, int, int, int], block: int) -> None:
    inputs = case([1, 11, 1, 3], [0, 0, 37, 16], widths=widths, block=block, spread=2.0).poisoned()
    assert error(run(form, inputs), outside(inputs)) < TOLERANCE


def blockwise(monkeypatch: pytest.MonkeyPatch, *, gather_bytes: int = 1, score_elements: int = 64, min_keys: int = 4) -> None:
    """Thresholds so small that every path which bounds memory runs on a few dozen rows."""
    monkeypatch.setattr(portable, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(portable, "SCORE_ELEMENTS", score_elements)
    monkeypatch.setattr(portable, "MIN_KEYS", min_keys)


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("score_elements", [1, 64, 500])
@pytest.mark.parametrize("block", [4, 16])
def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, pays: bool, score_elements: int, block: int) -> None:
    """Absorbed and expanded by blocks, heads in parts, causal border inside, at and off the block's edge."""
    inputs = case([1, 21, 1, 6, 40], [150, 30, 0, 58, 0], block=block, spread=3.0, heads=5).poisoned()
    want = run(reference, inputs)
    blockwise(monkeypatch, score_elements=score_elements)
    monkeypatch.setattr(portable, "_absorbing_pays", lambda *_: pays)
    assert error(run(portable.latent_attention, inputs), want) < TOLERANCE


@pytest.mark.parametrize("pays", [True, False])
def test_absorbed_and_expanded_agree(monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    inputs = case([9, 64, 1, 2], [70, 0, 3, 200], spread=3.0).poisoned()
    want = run(reference, inputs)
    monkeypatch.setattr(portable, "_absorbing_pays", lambda *_: pays)
    assert error(run(portable.latent_attention, inputs), want) < TOLERANCE


def test_the_cheaper_form_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At K3's widths, over 8192 rows: absorbed for short chunks, expanded for a long one."""
    taken: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., Tensor]:
        def stand_in(self: portable.Attention, q_XHQ: Tensor, *_: Any) -> Tensor:
            taken.append((name, len(q_XHQ)))
            return q_XHQ[..., :128]
        return stand_in

    for name in ("absorbed", "absorbed_blocks", "expanded"):
        monkeypatch.setattr(portable.Attention, name, note(name))
    sizes = [1, 8, 128, 256, 512]
    for size in sizes:
        run(portable.latent_attention, case([size], [8192 - size], heads=1, widths=(128, 64, 128, 512), block=64))
    assert list(zip(["absorbed"] * 3 + ["expanded"] * 2, sizes, strict=True)) == taken
    taken.clear()
    # The mask of a chunk is as large as its scores.
    monkeypatch.setattr(portable, "SCORE_ELEMENTS", 8 * 8192)
    for size in (8, 9):
        run(portable.latent_attention, case([size], [8192 - size], heads=1, widths=(128, 64, 128, 512), block=64))
    assert [("absorbed", 8), ("absorbed_blocks", 9)] == taken


@pytest.mark.parametrize("size", range(1, 18))
def test_one_chunk_is_many(form: Form, size: int) -> None:
    """Rows of later tokens are NaN until their chunk has come."""
    length, context = 45, 22
    inputs = case([length], [context], block=4).poisoned()
    whole, named = run(reference, inputs), inputs.named
    outs = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        starts, contexts = torch.tensor([0, end - begin]), torch.tensor([context + begin])
        part = with_args(inputs, q_THQ=named["q_THQ"][begin:end], starts_N1=starts, contexts_N=contexts)
        outs.append(run(form, part.poisoned()))
    assert error(torch.cat(outs), whole) < TOLERANCE


def test_alone_is_batched(form: Form) -> None:
    """Decode rows of unlike lengths, prefill rows and an idle row."""
    inputs = case([1, 17, 1, 0, 1, 4, 1], [0, 9, 300, 6, 31, 64, 33]).poisoned()
    batched, named = run(form, inputs), inputs.named
    starts = named["starts_N1"].tolist()
    for n in range(7):
        begin, end = starts[n:n + 2]
        alone = with_args(inputs, q_THQ=named["q_THQ"][begin:end], tables_NB=named["tables_NB"][n:n + 1],
                          starts_N1=torch.tensor([0, end - begin]), contexts_N=named["contexts_N"][n:n + 1])
        if end > begin:
            assert error(batched[begin:end], run(form, alone)) < TOLERANCE


def test_every_row_up_to_the_token_matters_and_none_after(form: Form) -> None:
    """Change one row: outputs change from its token on, and are equal bit for bit before."""
    inputs = case([24], [10], heads=2)
    want, named = run(form, inputs), inputs.named
    for position in (0, 9, 10, 21, 33):
        rows = named["rows_SBC"].clone()
        rows[named["tables_NB"][0, position // 4], position % 4] += 1.0
        got = run(form, with_args(inputs, rows_SBC=rows))
        first = max(0, position - 10)
        assert torch.equal(want[:first], got[:first])
        assert ((want - got).abs().amax((1, 2)) > 1e-4)[first:].all()


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 9, 5]])
def test_a_nan_stays_with_its_sequence(form: Form, lengths: list[int]) -> None:
    inputs = case(lengths, [30, 31, 32])
    rows, named = inputs.named["rows_SBC"].clone(), inputs.named
    rows[named["tables_NB"][1, 2]] = torch.nan
    want, got = run(form, inputs), run(form, with_args(inputs, rows_SBC=rows))
    victims = torch.zeros(sum(lengths), dtype=torch.bool)
    victims[lengths[0]:lengths[0] + lengths[1]] = True
    assert got[victims].isnan().all()
    assert torch.equal(want[~victims], got[~victims])


class Watch(TorchDispatchMode):
    """Counts operator calls and the largest tensor that any of them allocates."""

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
        run(portable.latent_attention, inputs)
    return watch


@pytest.mark.parametrize(("pays", "length"), [(True, 1), (True, 9), (False, 9), (False, 70)])
def test_memory_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch, pays: bool, length: int) -> None:
    """Twenty times the rows, the same largest tensor, in both blockwise forms; the control is the form that gathers all at once."""
    few, many = (case([length], [context], block=4, heads=2) for context in (100, 2000))
    monkeypatch.setattr(portable, "_absorbing_pays", lambda *_: pays)
    control = watched(few).largest, watched(many).largest
    if pays:
        assert 10 * control[0] < control[1]
    blockwise(monkeypatch, score_elements=2048)
    assert watched(few).largest == watched(many).largest
    assert watched(many).largest <= 4 * 2048 + 4 * 2 * length * (24 + 4 + 1)


def test_gathered_rows_are_bounded_over_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded decode batches are cut before they gather more than one sequence may."""
    inputs = case([1] * 12, [100 + n for n in range(12)], block=4, heads=2)
    want, bound = run(reference, inputs), 300 * 28 * 4
    assert bound < watched(inputs).largest
    monkeypatch.setattr(portable, "GATHER_BYTES", bound)
    assert watched(inputs).largest <= bound
    assert error(run(portable.latent_attention, inputs), want) < TOLERANCE


def test_calls_per_decoded_token_are_constant_up_to_64k_rows() -> None:
    few, many = (watched(case([1], [context], block=16, heads=2, widths=(4, 0, 4, 8))) for context in (99, 65535))
    assert few.num_calls == many.num_calls


@pytest.mark.parametrize("lengths", [[1, 1], [1, 6]])
def test_unused_table_columns_cost_nothing(lengths: list[int]) -> None:
    """Tables as wide as a million tokens, two short sequences."""
    inputs = case(lengths, [20, 9], heads=2)
    tables = torch.full((2, 1 << 16), -1)
    tables[:, :inputs.named["tables_NB"].shape[1]] = inputs.named["tables_NB"]
    wide = with_args(inputs, tables_NB=tables)
    narrow_watch, wide_watch = watched(inputs), watched(wide)
    assert (narrow_watch.num_calls, narrow_watch.largest) == (wide_watch.num_calls, wide_watch.largest)
    assert torch.equal(run(portable.latent_attention, inputs), run(portable.latent_attention, wide))


def test_padding_costs_less_than_the_rows() -> None:
    """Groups of a batch: every sequence once, the widest at most twice the narrowest and a little."""
    totals = [3, 70000, 1, 128, 500, 130, 64, 900, 65536, 2]
    groups = list(running_softmax.similar(range(len(totals)), totals, 1 << 17))
    assert list(range(len(totals))) == sorted(n for group in groups for n in group)
    for group in groups:
        sizes = [totals[n] for n in group]
        assert max(sizes) <= 2 * min(sizes) + running_softmax.SLACK_ROWS
        assert len(sizes) * max(sizes) <= 1 << 17


def test_blocks_beyond_two_billion_elements(form: Form, tmp_path: Path) -> None:
    """A sparse file stands in for a pool whose last blocks have offsets that no int32 holds."""
    inputs = case([1, 1, 6], [40, 30, 3], block=16, widths=(8, 4, 12, 508))
    near, tables = inputs.named["rows_SBC"], inputs.named["tables_NB"]
    num_blocks = (1 << 31) // near[0].numel() + len(near)
    far = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_blocks * near[0].numel()).view(num_blocks, *near.shape[1:])
    far[-len(near):] = near
    moved = with_args(inputs, rows_SBC=far, tables_NB=torch.where(tables < 0, tables, tables + num_blocks - len(near)))
    assert torch.equal(run(form, inputs), run(form, moved))


def test_scores_far_apart_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks that arrive late, and blocks whose weights underflow: the running maximum carries both."""
    inputs = case([5], [90], spread=60.0)
    want = outside(inputs)
    assert error(run(reference, inputs), want) < TOLERANCE
    blockwise(monkeypatch)
    for pays in (True, False):
        monkeypatch.setattr(portable, "_absorbing_pays", lambda *_, answer=pays: answer)
        assert error(run(portable.latent_attention, inputs), want) < 4 * TOLERANCE


def test_bfloat16_keeps_scores_in_float32(form: Form) -> None:
    """One key in 3000 has a score 1/16 above the rest, at a height where bfloat16 steps by 1/4; its weight must show it."""
    latent, heads, total = 8, 2, 3000
    inputs = case([1], [total - 1], heads=heads, widths=(8, 0, 8, latent), dtype=torch.bfloat16, block=16)
    named = inputs.named
    q, rows, weight = (torch.zeros_like(named[name]) for name in ("q_THQ", "rows_SBC", "kv_b_OL"))
    weight.view(heads, 16, latent)[:, :8] = torch.eye(8)
    weight.view(heads, 16, latent)[:, 8:] = torch.eye(8)
    rows[:, :, 0], q[:, :, 0] = 32.0, 1.0
    q[:, :, 1] = 0.0625
    special = named["tables_NB"][0, 100], 7
    rows[special][1], rows[special][2] = 1.0, 1.0
    out = with_args(inputs, q_THQ=q, rows_SBC=rows, kv_b_OL=weight)
    got = Case(out.name, out.use, out.args, {**out.kwargs, "scale": 1.0}).run(form)[0].float()
    weighed = math.exp(0.0625) / (total - 1 + math.exp(0.0625))
    torch.testing.assert_close(got[0, :, 2], torch.full((heads,), weighed), rtol=1e-2, atol=0.0)
