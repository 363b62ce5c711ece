"""The gated delta rule against a closed form, and its two forms against themselves: split, batched, recycled, poisoned, far away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable import gated_delta as portable
from firstlight.ops.declared import gated_delta as operator
from firstlight.ops.gated_delta import gated_delta as reference
from firstlight.ops.gated_delta import log_decay, make_case

TOLERANCE = operator.tol.float32
FORMS = {"reference": reference, "portable": portable.gated_delta}
Form = Callable[..., Tensor]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@dataclass
class Stream:
    """Tokens of one sequence, to be cut into calls."""

    q_TJK: Tensor
    k_TJK: Tensor
    v_THV: Tensor
    g: Tensor
    beta_TH: Tensor

    @classmethod
    def random(cls, length: int, *, heads: tuple[int, int] = (2, 2), widths: tuple[int, int] = (8, 12), decay: str = "slow", scalar: bool = False,
               seed: int = 0) -> Stream:
        case = make_case(torch.Generator().manual_seed(seed), "stream", [length], [0], heads=heads, widths=widths, decay=decay, scalar=scalar)
        return cls(*case.args[:5])

    def part(self, begin: int, end: int) -> tuple[Tensor, ...]:
        return tuple(x[begin:end] for x in (self.q_TJK, self.k_TJK, self.v_THV, self.g, self.beta_TH))

    def __len__(self) -> int:
        return len(self.q_TJK)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.v_THV.shape[1], self.q_TJK.shape[2], self.v_THV.shape[2]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def call(form: Form, parts: tuple[Tensor, ...], pool_SHKV: Tensor, slots: list[int], lengths: list[int], contexts: list[int]) -> Tensor:
    starts = integers(0, *lengths).cumsum(0)
    scale = 1 / math.sqrt(parts[0].shape[-1])
    return form(*parts, pool_SHKV, integers(*slots), starts, integers(*contexts), scale=scale, norm_eps=1e-6)


def in_calls(form: Form, stream: Stream, pool_SHKV: Tensor, slot: int, sizes: list[int], context: int = 0) -> Tensor:
    """Run a stream in calls of the given sizes, its state carried in one slot."""
    outs, begin = [], 0
    for size in sizes:
        outs.append(call(form, stream.part(begin, begin + size), pool_SHKV, [slot], [size], [context + begin]))
        begin += size
    assert len(stream) == begin
    return torch.cat(outs)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def closed_form(stream: Stream, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """S_t as a sum over all writes, each carried on by its own product of (I - beta k k^T) diag(alpha); float64, nothing recurrent.

    The scale and the norm of q and k are applied to the operator, not to the vectors.
    """
    num_heads, head_k, head_v = state_HKV.shape
    eye = torch.eye(head_k, dtype=torch.float64)
    o_THV = torch.zeros(len(stream), num_heads, head_v, dtype=torch.float64)
    last_HKV = torch.zeros_like(state_HKV, dtype=torch.float64)
    for h in range(num_heads):
        j = h // (num_heads // stream.q_TJK.shape[1])
        keys, values, betas = stream.k_TJK[:, j].double(), stream.v_THV[:, h].double(), stream.beta_TH[:, h].double()
        norms = 1 / (keys.square().sum(1) + 1e-6)
        steps = []
        for t in range(len(stream)):
            alpha = torch.diag_embed(stream.g[t, h].double().exp().expand(head_k))
            steps.append((eye - betas[t] * norms[t] * torch.outer(keys[t], keys[t])) @ alpha)
        for t in range(len(stream)):
            carried, total = eye, torch.zeros(head_k, head_v, dtype=torch.float64)
            for i in range(t, -1, -1):
                total = total + carried @ (betas[i] * norms[i].sqrt() * torch.outer(keys[i], values[i]))
                carried = carried @ steps[i]
            total = total + carried @ state_HKV[h].double()
            query = stream.q_TJK[t, j].double()
            o_THV[t, h] = query @ total / torch.sqrt((query.square().sum() + 1e-6) * head_k)
        last_HKV[h] = total
    return o_THV, last_HKV


@pytest.mark.parametrize(("decay", "scalar", "heads"), [
    ("bounded", False, (2, 2)), ("slow", False, (2, 2)), ("strong", False, (1, 2)), ("bounded", True, (1, 3)), ("slow", True, (2, 4)),
])
def test_closed_form(form: Form, decay: str, scalar: bool, heads: tuple[int, int]) -> None:
    stream = Stream.random(37, heads=heads, widths=(5, 7), decay=decay, scalar=scalar)
    pool_SHKV = torch.randn(3, *stream.state_shape, generator=torch.Generator().manual_seed(1))
    want_o, want_state = closed_form(stream, pool_SHKV[1])
    got = in_calls(form, stream, pool_SHKV, 1, [37], context=9)
    assert error(got, want_o) < TOLERANCE
    assert error(pool_SHKV[1], want_state) < TOLERANCE


@pytest.mark.parametrize("size", range(1, 18))
def test_one_chunk_is_many(form: Form, size: int) -> None:
    """The state outlives all chunks (decay near one), so a lost or doubled one would show everywhere."""
    stream, tail = Stream.random(75, decay="slow"), 75 % size
    one, many = (torch.full((2, *stream.state_shape), torch.nan) for _ in range(2))
    whole = in_calls(reference, stream, one, 0, [75])
    split = in_calls(form, stream, many, 1, [size] * (75 // size) + [tail] * (tail > 0))
    assert error(split, whole) < TOLERANCE
    assert error(many[1], one[0]) < TOLERANCE


def test_old_state_matters_after_a_thousand_tokens() -> None:
    """A control on the inputs: without it the tests of carried states could pass on forgotten ones."""
    stream = Stream.random(1000, decay="slow", widths=(64, 32))
    pool_SHKV = torch.randn(2, *stream.state_shape, generator=torch.Generator().manual_seed(3))
    first, second = (in_calls(portable.gated_delta, stream, pool_SHKV, slot, [1000], context=1) for slot in (0, 1))
    assert 1e-3 < error(second[900:], first[900:])


@pytest.mark.parametrize("sizes", [[1] * 200, [64, 64, 72], [63, 1, 65, 71], [130, 70], [7, 9, 16, 168]])
def test_forms_share_a_state(sizes: list[int]) -> None:
    """Either form goes on from what the other wrote; the layout in the slot is part of the contract."""
    stream = Stream.random(200, decay="slow", widths=(16, 24))
    want_pool, pool_SHKV = torch.zeros(1, *stream.state_shape), torch.zeros(1, *stream.state_shape)
    want = in_calls(reference, stream, want_pool, 0, [200])
    outs, begin = [], 0
    for number, size in enumerate(sizes):
        turn = (portable.gated_delta, reference)[number % 2]
        outs.append(call(turn, stream.part(begin, begin + size), pool_SHKV, [0], [size], [begin]))
        begin += size
    assert error(torch.cat(outs), want) < TOLERANCE
    assert error(pool_SHKV, want_pool) < TOLERANCE


def test_transposed_state_is_another_state(form: Form) -> None:
    """K = V hides the layout from shapes but not from values; K != V does not let a transposed state in at all."""
    square = Stream.random(3, widths=(16, 16), decay="bounded")
    pool_SHKV = torch.randn(1, *square.state_shape, generator=torch.Generator().manual_seed(5))
    turned = pool_SHKV.transpose(2, 3).contiguous()
    right, wrong = (in_calls(form, square, pool, 0, [3], context=4) for pool in (pool_SHKV, turned))
    assert 0.1 < error(wrong, right)
    oblong = Stream.random(3, widths=(8, 12))
    with pytest.raises(RuntimeError):
        in_calls(form, oblong, torch.zeros(1, 2, 12, 8), 0, [3], context=4)


def test_alone_is_batched(form: Form) -> None:
    """Decode rows, prefill rows and an idle row of one call, each equal to its own call."""
    lengths, contexts, slots = [1, 70, 1, 0, 5, 1, 33], [3, 0, 64, 8, 12, 0, 90], [4, 0, 6, 8, 1, 3, 7]
    streams = [Stream.random(length, decay="slow", seed=20 + n) for n, length in enumerate(lengths)]
    pool_SHKV = torch.randn(9, *streams[0].state_shape, generator=torch.Generator().manual_seed(6))
    alone_pool, before = pool_SHKV.clone(), pool_SHKV.clone()
    parts = tuple(torch.cat(columns) for columns in zip(*(stream.part(0, len(stream)) for stream in streams), strict=True))
    batched = call(form, parts, pool_SHKV, slots, lengths, contexts)
    alone = torch.cat([call(form, s.part(0, len(s)), alone_pool, [slot], [len(s)], [c]) for s, slot, c in zip(streams, slots, contexts, strict=True)])
    assert error(batched, alone) < TOLERANCE
    assert error(pool_SHKV, alone_pool) < TOLERANCE
    untouched = sorted(set(range(9)) - {slot for slot, length in zip(slots, lengths, strict=True) if length})
    assert torch.equal(before[untouched], pool_SHKV[untouched])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 20, 64], [2, 1, 130]])
def test_recycled_slots_start_from_zero(form: Form, lengths: list[int]) -> None:
    """Context 0 means a zero state although the slot still holds NaN; slots outside of the batch keep theirs."""
    streams = [Stream.random(length, seed=40 + n) for n, length in enumerate(lengths)]
    parts = tuple(torch.cat(columns) for columns in zip(*(stream.part(0, len(stream)) for stream in streams), strict=True))
    dirty, clean = torch.full((5, *streams[0].state_shape), torch.nan), torch.zeros(5, *streams[0].state_shape)
    got, want = (call(form, parts, pool, [4, 0, 2], lengths, [0, 0, 0]) for pool in (dirty, clean))
    assert torch.equal(want, got)
    assert torch.equal(clean[[4, 0, 2]], dirty[[4, 0, 2]])
    assert dirty[[1, 3]].isnan().all()


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 20, 64]])
def test_a_nan_stays_with_its_sequence(form: Form, lengths: list[int]) -> None:
    streams = [Stream.random(length, seed=50 + n) for n, length in enumerate(lengths)]
    parts = tuple(torch.cat(columns) for columns in zip(*(stream.part(0, len(stream)) for stream in streams), strict=True))
    clean = torch.randn(3, *streams[0].state_shape, generator=torch.Generator().manual_seed(7))
    sick = clean.clone()
    sick[1] = torch.nan
    want, got = (call(form, parts, pool, [0, 1, 2], lengths, [5, 5, 5]) for pool in (clean, sick))
    victims = torch.zeros(sum(lengths), dtype=torch.bool)
    victims[lengths[0]:lengths[0] + lengths[1]] = True
    assert got[victims].isnan().all()
    assert torch.equal(want[~victims], got[~victims])
    assert torch.equal(clean[[0, 2]], sick[[0, 2]])


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("gate", [-60.0, -1e4, -torch.inf])
def test_no_gate_overflows(gate: float, scalar: bool) -> None:
    """Single channels that forget everything at once, between others that forget nothing."""
    stream = Stream.random(150, scalar=scalar, decay="slow")
    stream.g[20::31] = gate
    if not scalar:
        stream.g[:, :, 3] = gate
    want_pool, pool_SHKV = (torch.zeros(1, *stream.state_shape) for _ in range(2))
    want = in_calls(reference, stream, want_pool, 0, [150])
    assert error(in_calls(portable.gated_delta, stream, pool_SHKV, 0, [150]), want) < TOLERANCE
    assert error(pool_SHKV, want_pool) < TOLERANCE


def test_repeated_keys(form: Form) -> None:
    """The worst system to solve inside a chunk: every key equal, every write in full, nothing forgotten."""
    stream = Stream.random(140, decay="slow", widths=(6, 9))
    stream.k_TJK[:] = stream.k_TJK[:1]
    stream.beta_TH[:] = 1.0
    pool_SHKV = torch.randn(1, *stream.state_shape, generator=torch.Generator().manual_seed(8))
    want, want_state = closed_form(stream, pool_SHKV[0])
    assert error(in_calls(form, stream, pool_SHKV, 0, [140], context=1), want) < TOLERANCE
    assert error(pool_SHKV[0], want_state) < TOLERANCE


@pytest.mark.parametrize("num_sequences", [1, 2, 5])
def test_large_states_move_in_place(monkeypatch: pytest.MonkeyPatch, num_sequences: int) -> None:
    streams = [Stream.random(1, seed=60 + n) for n in range(num_sequences)]
    parts = tuple(torch.cat(columns) for columns in zip(*(stream.part(0, 1) for stream in streams), strict=True))
    gathered = torch.randn(7, *streams[0].state_shape, generator=torch.Generator().manual_seed(9))
    in_place, slots, contexts = gathered.clone(), [6, 2, 0, 5, 1][:num_sequences], [0, 3, 3, 0, 3][:num_sequences]
    want = call(portable.gated_delta, parts, gathered, slots, [1] * num_sequences, contexts)
    monkeypatch.setattr(portable, "IN_PLACE_ELEMENTS", 1)
    got = call(portable.gated_delta, parts, in_place, slots, [1] * num_sequences, contexts)
    assert error(got, want) < 1e-6
    assert error(in_place, gathered) < 1e-6


@pytest.mark.parametrize("scalar", [False, True])
def test_segments_are_seamless(monkeypatch: pytest.MonkeyPatch, scalar: bool) -> None:
    """As many chunks at once as fit, one at a time, or all: the same numbers."""
    stream = Stream.random(64 * 5 + 40, scalar=scalar)
    found = []
    for elements in (1, 2 * 64 * 16, 1 << 24):
        monkeypatch.setattr(portable, "SEGMENT_ELEMENTS", elements)
        pool_SHKV = torch.zeros(1, *stream.state_shape)
        found.append((in_calls(portable.gated_delta, stream, pool_SHKV, 0, [len(stream)]), pool_SHKV))
    for got, pool in found[1:]:
        assert error(got, found[0][0]) < 1e-6
        assert error(pool, found[0][1]) < 1e-6


def test_slots_beyond_two_billion_elements(form: Form, tmp_path: Path) -> None:
    """A sparse file stands in for a pool whose last slots have offsets that no int32 holds."""
    stream = Stream.random(20, heads=(4, 4), widths=(64, 128))
    slot_elements = math.prod(stream.state_shape)
    num_slots = (1 << 31) // slot_elements + 8
    pool_SHKV = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_slots * slot_elements).view(num_slots, *stream.state_shape)
    near = torch.zeros(1, *stream.state_shape)
    want = in_calls(form, stream, near, 0, [19, 1])
    assert torch.equal(want, in_calls(form, stream, pool_SHKV, num_slots - 1, [19, 1]))
    assert torch.equal(near[0], pool_SHKV[num_slots - 1])
    assert not pool_SHKV[:2].any()


def test_gates_of_the_cases_are_what_they_say() -> None:
    rng = torch.Generator().manual_seed(0)
    bounded, strong, slow = (log_decay(rng, decay, 4000) for decay in ("bounded", "strong", "slow"))
    assert -5.0 <= bounded.min() < -4.0 and bounded.max() < 0.0
    assert -60.0 <= strong.min() < -40.0
    assert slow.exp().min() > 0.998
