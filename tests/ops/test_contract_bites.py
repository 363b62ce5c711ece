"""The contract test itself: forms with one typical mistake each, and the check that must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable.short_conv import short_conv as sound_conv
from firstlight.ops.case import Case
from firstlight.ops.registry import OPERATORS, Operator, Tolerance
from tests.ops import test_contract as contract_test
from tests.ops.conftest import contract_items


def writes_its_input(x_TD: Tensor, weight_D: Tensor, *, eps: float, plus_one: bool = False) -> Tensor:
    y_TD = OPERATORS["rms_norm"].reference(x_TD, weight_D, eps=eps, plus_one=plus_one)
    x_TD.mul_(1.5)
    return y_TD


def returns_fp32(x_TD: Tensor, weight_D: Tensor, **kwargs: Any) -> Tensor:
    return OPERATORS["rms_norm"].reference(x_TD, weight_D, **kwargs).float()


def forgets_the_last_row(x_TD: Tensor, weight_D: Tensor, **kwargs: Any) -> Tensor:
    y_TD = torch.empty_like(x_TD)
    y_TD[:-1] = OPERATORS["rms_norm"].reference(x_TD, weight_D, **kwargs)[:-1]
    return y_TD


def ignores_strides(x_TD: Tensor, weight_D: Tensor, **kwargs: Any) -> Tensor:
    return OPERATORS["rms_norm"].reference(x_TD.as_strided(x_TD.shape, torch.empty(x_TD.shape).stride()), weight_D, **kwargs)


def is_slightly_wrong(x_TD: Tensor, weight_D: Tensor, *, eps: float, plus_one: bool = False) -> Tensor:
    return OPERATORS["rms_norm"].reference(x_TD, weight_D, eps=eps, plus_one=plus_one) * 1.0001


def rounds_by_chance(x_TD: Tensor, weight_D: Tensor, **kwargs: Any) -> Tensor:
    y_TD = OPERATORS["rms_norm"].reference(x_TD, weight_D, **kwargs)
    return y_TD * (1 + 1e-6 * torch.rand_like(y_TD.float())).to(y_TD.dtype)


def mixes_rows(x_TD: Tensor, weight_D: Tensor, **kwargs: Any) -> Tensor:
    return OPERATORS["rms_norm"].reference(x_TD + 0.0 * x_TD.sum(0), weight_D, **kwargs)


def reads_fresh_slots(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    window_SWD[slots_N] *= (contexts_N > 0)[:, None, None]
    return sound_conv(x_TD, weight_DW, window_SWD, slots_N, starts_N1, torch.ones_like(contexts_N))


def writes_a_neighbour_slot(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    y_TD = sound_conv(x_TD, weight_DW, window_SWD, slots_N, starts_N1, contexts_N)
    spare = next(slot for slot in range(len(window_SWD)) if slot not in slots_N.tolist())
    window_SWD[spare] = 1.0
    return y_TD


def forgets_the_window(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    return sound_conv(x_TD, weight_DW, window_SWD.clone(), slots_N, starts_N1, contexts_N)


def runs_over_the_slot(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    y_TD = sound_conv(x_TD, weight_DW, window_SWD, slots_N, starts_N1, contexts_N)
    if window_SWD._base is not None:
        window_SWD._base[:, 0] = 0.0
    return y_TD


MISTAKES: list[tuple[str, str, Callable[..., Tensor], str, tuple[Any, ...]]] = [
    ("rms_norm", "float32-5x64", writes_its_input, "test_only_used_slots_of_mutated_arguments_change", ()),
    ("rms_norm", "bfloat16-5x64", returns_fp32, "test_values_dtypes_shapes", ()),
    ("rms_norm", "float32-5x64", is_slightly_wrong, "test_values_dtypes_shapes", ()),
    ("rms_norm", "float32-5x64", ignores_strides, "test_strided_inputs", ("columns",)),
    ("rms_norm", "float32-5x64", ignores_strides, "test_strided_inputs", ("steps",)),
    ("rms_norm", "float32-5x64", forgets_the_last_row, "test_memory_that_is_not_the_batch_s_is_never_read", (None,)),
    ("rms_norm", "float32-5x64", rounds_by_chance, "test_two_runs_are_equal", ()),
    ("short_conv", "float32-mixed-6x4", reads_fresh_slots, "test_memory_that_is_not_the_batch_s_is_never_read", (None,)),
    ("short_conv", "float32-mixed-6x4", writes_a_neighbour_slot, "test_only_used_slots_of_mutated_arguments_change", ()),
    ("short_conv", "float32-decode-6x4", forgets_the_window, "test_values_dtypes_shapes", ()),
    ("short_conv", "float32-decode-6x4", runs_over_the_slot, "test_strided_inputs", ("columns",)),
]


def case_of(op: str, name: str) -> Case:
    return next(case for case in OPERATORS[op].cases(0) if case.name == name)


@pytest.mark.parametrize(("op", "name", "form", "check", "rest"), MISTAKES, ids=lambda value: getattr(value, "__name__", None))
def test_a_mistake_is_seen(op: str, name: str, form: Callable[..., Tensor], check: str, rest: tuple[Any, ...],
                           monkeypatch: pytest.MonkeyPatch, garbage_memory: None) -> None:
    operator = OPERATORS[op]
    monkeypatch.setitem(operator.implementations, "flawed", None)
    operator.on("flawed")(form)
    with pytest.raises(AssertionError):
        getattr(contract_test, check)((operator, "flawed", "cpu", case_of(op, name)), *rest)


def test_a_nan_that_spreads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS["rms_norm"]
    monkeypatch.setitem(operator.implementations, "flawed", None)
    operator.on("flawed")(mixes_rows)
    with pytest.raises(AssertionError):
        contract_test.test_a_nan_stays_with_its_token_or_sequence((operator, "flawed", "cpu"))


def test_an_operator_without_a_file_gets_an_item_that_fails() -> None:
    items = contract_items(Operator("absent", "Nothing.", "(x_TD) -> y_TD", Tolerance(0.0, 0.0)), "reference", "cpu")
    assert 1 == len(items)
    assert isinstance(items[0].values[0], ImportError)
