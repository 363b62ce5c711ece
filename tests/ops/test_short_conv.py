"""The short convolution written out in float64, its window, and one sequence cut in every way."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable import short_conv as portable_file
from firstlight.ops.case import starts_of
from firstlight.ops.short_conv import short_conv as reference

FORMS = {"reference": reference, "portable": portable_file.short_conv}
Form = Callable[..., Tensor]
D, W = 3, 4


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(length)
    return torch.randn(length, D, generator=rng).to(dtype), torch.randn(D, W, generator=rng)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """The whole sequence from nothing, by the sum in the definition."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for d in range(x.shape[1]):
            total = sum(float(weight[d, j]) * float(x[t - W + 1 + j, d]) for j in range(W) if t - W + 1 + j >= 0)
            y[t, d] = total / (1 + math.exp(-total))
    return y


def fresh_pool(num_slots: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((num_slots, W - 1, D), torch.nan, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 131])
def test_formula_in_float64(form: Form, length: int) -> None:
    x, weight = inputs(length)
    got = form(x, weight, fresh_pool(), integers(1), starts_of([length]), integers(0))
    assert float((convolved(x, weight) - got).abs().max()) < 1e-6


@pytest.mark.parametrize("size", range(1, 18))
def test_chunks_of_every_size_equal_one_call(form: Form, size: int) -> None:
    """Windows bit for bit; outputs up to the last bits of SiLU, which vector code and scalar code round apart."""
    x, weight = inputs(19)
    whole_pool, pool = fresh_pool(), fresh_pool()
    want = form(x, weight, whole_pool, integers(1), starts_of([19]), integers(0))
    got = [form(x[t : t + size], weight, pool, integers(1), starts_of([len(x[t : t + size])]), integers(t)) for t in range(0, 19, size)]
    assert float((want - torch.cat(got)).abs().max()) < 1e-6
    assert torch.equal(whole_pool[1], pool[1])


@pytest.mark.parametrize("length", range(1, 7))
def test_the_window_holds_the_last_raw_inputs_oldest_first(form: Form, length: int) -> None:
    x, weight = inputs(length)
    pool = fresh_pool()
    form(x, weight, pool, integers(2), starts_of([length]), integers(0))
    assert torch.equal(torch.cat((torch.zeros(W - 1, D), x))[-(W - 1):], pool[2])
    assert bool(pool[:2].isnan().all())


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences_shift_the_old_window(form: Form, length: int) -> None:
    x, weight = inputs(length)
    pool = torch.arange(float((W - 1) * D)).view(1, W - 1, D)
    old = pool[0].clone()
    form(x, weight, pool, integers(0), starts_of([length]), integers(9))
    assert torch.equal(torch.cat((old[length:], x)), pool[0])


def test_a_batch_equals_its_sequences_alone(form: Form) -> None:
    lengths, contexts, slots = [1, 6, 1, 2, 1], [5, 0, 0, 1, 2], [4, 0, 3, 6, 1]
    x, weight = inputs(sum(lengths))
    pool = torch.randn(7, W - 1, D, generator=torch.Generator().manual_seed(1))
    together, alone, starts = pool.clone(), pool.clone(), starts_of(lengths)
    got = form(x, weight, together, integers(*slots), starts, integers(*contexts))
    parts = []
    for n, length in enumerate(lengths):
        parts.append(form(x[starts[n]:starts[n + 1]], weight, alone, integers(slots[n]), starts_of([length]), integers(contexts[n])))
    assert torch.allclose(torch.cat(parts), got, rtol=1e-6, atol=1e-7)
    assert torch.equal(alone, together)


def test_bf16_is_rounded_once_and_the_window_keeps_its_own_dtype(form: Form) -> None:
    x, weight = inputs(40, torch.bfloat16)
    pool = fresh_pool(dtype=torch.float32)
    got = form(x, weight, pool, integers(0), starts_of([40]), integers(0))
    want = convolved(x, weight)
    assert torch.bfloat16 == got.dtype
    assert float(((want - got) / want).abs().max()) <= 2.0**-8 * 1.001
    assert torch.equal(x[-3:].float(), pool[0])


def test_portable_calls_do_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither decodes nor mixed batches loop over sequences or tokens."""

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        num_calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    def calls(lengths: list[int]) -> int:
        x, weight = inputs(sum(lengths))
        pool = torch.zeros(len(lengths), W - 1, D)
        with Counter() as counter:
            FORMS["portable"](x, weight, pool, torch.arange(len(lengths)), starts_of(lengths), torch.ones(len(lengths), dtype=torch.int64))
        return counter.num_calls

    assert calls([1] * 3) == calls([1] * 40) < 30
    assert calls([1, 5]) == calls([7, 1, 90] * 20) < 60
