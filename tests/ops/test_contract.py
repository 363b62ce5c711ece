"""One contract for every operator, every back-end and every case: right values, nothing else touched, nothing unwritten read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.ops.case import Case, letters_of, parameters_of, tensors_of
from firstlight.ops.registry import OPERATORS, REFERENCE, Operator

Contract = tuple[Operator, str, str, Case]
Outputs = tuple[Tensor, ...]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SEQUENCE_OPERATORS = [name for name in OPERATORS if "starts_N1" in parameters_of(name)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal shape, dtype and bytes; NaN equals itself."""
    kind = BITS[got.element_size()]
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.view(kind), want.view(kind))


def form_of(operator: Operator, backend: str, case: Case) -> Callable[..., Any]:
    """The function under test; a use that the back-end declines is not its business."""
    if backend == REFERENCE:
        return operator.reference
    reason = operator.implementations[backend].refuse(case.use)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return operator.bind(case.use, [backend])


def slots_of(case: Case) -> Tensor:
    """The slots that a call may write."""
    return case.named["slots_N"].cpu()


def results(function: Callable[..., Any], case: Case, operator: Operator) -> Outputs:
    """Outputs, then what the used slots of every mutated argument hold afterwards."""
    outputs = case.run(function)
    return (*(output.cpu() for output in outputs), *(case.named[name].cpu()[slots_of(case)] for name in operator.mutates))


def assert_close(got: Outputs, want: Outputs, operator: Operator, case: Case) -> None:
    """Every value within the operator's bound, integers equal, NaN only where the definition says so."""
    assert len(want) == len(got)
    for got_part, want_part in zip(got, want, strict=True):
        assert (want_part.dtype, want_part.shape) == (got_part.dtype, got_part.shape)
        if not want_part.is_floating_point():
            assert want_part.tolist() == got_part.tolist()
            continue
        assert case.has_nan or not bool(got_part.isnan().any()), "NaN in the output"
        assert torch.equal(want_part.isnan(), got_part.isnan())
        odd = ~want_part.isfinite() | ~got_part.isfinite()
        assert torch.equal(want_part[odd].nan_to_num(), got_part[odd].nan_to_num())
        want_64, got_64 = want_part[~odd].double(), got_part[~odd].double()
        if want_64.numel():
            bound = operator.tol.of(case.use.dtype) * (1.0 + float(want_64.abs().max()))
            assert float((got_64 - want_64).abs().max()) <= bound


def expected(operator: Operator, case: Case) -> Outputs:
    """What the reference makes of clean inputs on the CPU."""
    return results(operator.reference, case.clone(), operator)


def test_values_dtypes_shapes(contract: Contract) -> None:
    operator, backend, device, case = contract
    got = results(form_of(operator, backend, case), case.to(device), operator)
    assert_close(got, expected(operator, case), operator, case)


def test_only_used_slots_of_mutated_arguments_change(contract: Contract) -> None:
    operator, backend, device, case = contract
    given = case.to(device)
    before = given.clone()
    given.run(form_of(operator, backend, case))
    for name, value in given.named.items():
        for now, was in zip(tensors_of(value), tensors_of(before.named[name]), strict=True):
            if name in operator.mutates:
                unused = torch.ones(len(now), dtype=torch.bool)
                unused[slots_of(case)] = False
                now, was = now.cpu()[unused], was.cpu()[unused]
            assert same_bits(now, was), f"{name} was changed"
    for now, was in zip(tensors_of(list(given.kwargs.values())), tensors_of(list(before.kwargs.values())), strict=True):
        assert same_bits(now, was)


@pytest.mark.parametrize("slack", ["columns", "steps"])
def test_strided_inputs(contract: Contract, slack: Any) -> None:
    """Views into larger garbage give the same values, and what lies around them stays."""
    operator, backend, device, case = contract
    given = case.to(device).strided(slack)
    views = [(name, tensor) for name, value in given.named.items() for tensor in tensors_of(value) if tensor._base is not None]
    around = [tensor._base.clone() for _, tensor in views]
    got = results(form_of(operator, backend, case), given, operator)
    assert_close(got, expected(operator, case), operator, case)
    for (name, view), was in zip(views, around, strict=True):
        if name in operator.mutates:
            was.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
        assert same_bits(view._base, was), f"memory around {name} was changed"


def test_memory_that_is_not_the_batch_s_is_never_read(contract: Contract, garbage_memory: None) -> None:
    """NaN in fresh memory, in unused slots, blocks and rows, and in the slots of sequences without context."""
    operator, backend, device, case = contract
    got = results(form_of(operator, backend, case), case.poisoned().to(device), operator)
    assert_close(got, expected(operator, case), operator, case)


def test_two_runs_are_equal(contract: Contract) -> None:
    operator, backend, device, case = contract
    function = form_of(operator, backend, case)
    runs = [results(function, case.to(device), operator) for _ in range(2)]
    assert all(same_bits(first, second) for first, second in zip(*runs, strict=True))


def test_a_nan_stays_with_its_token_or_sequence(column: tuple[Operator, str, str]) -> None:
    """Everybody else gets the values of the clean batch."""
    operator, backend, device = column
    if not any("T" in letters_of(name) for name in parameters_of(operator.name)):
        pytest.skip("has no tokens")
    num_tried = 0
    for case in operator.cases(0):
        victim = victim_of(case)
        if victim is None or (backend != REFERENCE and operator.implementations[backend].refuse(case.use)):
            continue
        num_tried += 1
        spoilt = spoil(case, *victim)
        got, want = results(form_of(operator, backend, case), spoilt.to(device), operator), expected(operator, case)
        kept = keep_others(case, *victim)
        num_outputs = len(want) - len(operator.mutates)
        for index, (got_part, want_part) in enumerate(zip(got, want, strict=True)):
            rows = kept if index < num_outputs else torch.arange(len(want_part)) != victim[0]
            assert_close((got_part[rows],), (want_part[rows],), operator, case)
    assert num_tried


def victim_of(case: Case) -> tuple[int, int, int] | None:
    """(sequence or token, first token, last token + 1) of one among several that do not share."""
    first, name = case.args[0], parameters_of(case.use.op)[0]
    if "starts_N1" not in case.named:
        at, count = first.shape[letters_of(name).index("T")] // 2, first.shape[letters_of(name).index("T")]
        return (at, at, at + 1) if count > 1 else None
    starts = case.named["starts_N1"].tolist()
    at = (len(starts) - 1) // 2
    return (at, starts[at], starts[at + 1]) if len(starts) > 2 else None


def spoil(case: Case, at: int, begin: int, end: int) -> Case:
    """NaN in all that belongs to the victim: its tokens, its slot, its blocks."""
    pools, named = case.pools, case.named

    def change(name: str, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        if name in pools:
            mine = named["slots_N"][at : at + 1] if "slots_N" in named else own_blocks(case, at)
            copy[mine] = torch.nan
        elif letters_of(name)[:1] == "T" and tensor.is_floating_point():
            copy[begin:end] = torch.nan
        elif letters_of(name)[:2] == "MT":
            copy[:, begin:end] = torch.nan
        return copy

    return case.with_tensors(change)


def own_blocks(case: Case, at: int) -> Tensor:
    """Blocks of one sequence that no other one lists among its own."""
    size, totals = case.named[case.pools[0]].shape[1], case.named["contexts_N"] + case.named["starts_N1"].diff()
    tables = [blocks[: -(-total // size)] for blocks, total in zip(case.named["tables_NB"].tolist(), totals.tolist(), strict=True)]
    others = {block for n, blocks in enumerate(tables) if n != at for block in blocks}
    return torch.tensor([block for block in tables[at] if block not in others], dtype=torch.int64)


def keep_others(case: Case, at: int, begin: int, end: int) -> Tensor:
    """Mask of the tokens that are not the victim's."""
    token_T = torch.arange(case.args[0].shape[letters_of(parameters_of(case.use.op)[0]).index("T")])
    return (token_T < begin) | (token_T >= end)


@pytest.mark.parametrize("op", OPERATORS)
def test_outputs_have_the_declared_letters(op: str) -> None:
    """Sizes that the inputs and keywords give to letters hold in the outputs."""
    operator = OPERATORS[op]
    names = [name.strip() for name in operator.signature.rpartition("->")[2].split(",")]
    for case in operator.cases(0):
        sizes = letter_sizes(case)
        outputs = case.clone().run(operator.reference)
        assert len(names) == len(outputs)
        for name, output in zip(names, outputs, strict=True):
            letters = letters_of(name)
            if len(letters) == output.dim():
                assert [sizes.get(letter, size) for letter, size in zip(letters, output.shape, strict=True)] == list(output.shape), case


def letter_sizes(case: Case) -> dict[str, int]:
    """Letter -> size, from arguments whose rank is that of their name; letters with two sizes and pools say nothing."""
    found: dict[str, set[int]] = {"X": {case.kwargs["top_k"]}} if "top_k" in case.kwargs else {}
    for name, value in case.named.items():
        letters = letters_of(name)
        if isinstance(value, Tensor) and name not in case.pools and letters.isalpha() and len(letters) == value.dim():
            for letter, size in zip(letters, value.shape, strict=True):
                found.setdefault(letter, set()).add(size)
    return {letter: sizes.pop() for letter, sizes in found.items() if len(sizes) == 1}


@pytest.mark.parametrize("op", OPERATORS)
def test_forms_have_the_declared_signature(op: str) -> None:
    operator = OPERATORS[op]
    declared = operator.signature.rpartition("->")[0].strip()
    for function in (operator.reference, *(form.load() for form in operator.implementations.values())):
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
        assert without_defaults(declared) == without_defaults(shown)
        assert defaults_of(declared) == defaults_of(shown)


def without_defaults(signature: str) -> list[str]:
    return [part.split("=")[0].strip() for part in signature.strip("()").split(",")]


def defaults_of(signature: str) -> dict[str, str]:
    pairs = (part.split("=") for part in signature.strip("()").split(",") if "=" in part)
    return {name.strip(): default.strip() for name, default in pairs}


@pytest.mark.parametrize("op", OPERATORS)
def test_cases_reach_the_corners(op: str) -> None:
    """Empty, single and odd inputs, every dtype; for sequences also unlike lengths, several chunks, fresh and resumed ones."""
    operator = OPERATORS[op]
    cases = list(operator.cases(0))
    firsts = [tensors_of(case.args)[0] for case in cases]
    assert len(cases) == len({case.name for case in cases})
    assert all(case.use.op == op for case in cases)
    assert any(first.numel() == 0 for first in firsts)
    assert any(size % 2 and size > 1 for first in firsts for size in first.shape)
    if firsts[0].is_floating_point():
        assert {"float32", "bfloat16"} <= {case.use.dtype for case in cases}
    if op in SEQUENCE_OPERATORS:
        lengths = [case.named["starts_N1"].diff().tolist() for case in cases]
        contexts = [case.named["contexts_N"].tolist() for case in cases]
        assert [] in lengths
        assert any(0 in batch for batch in lengths)
        assert any(len(set(batch)) > 2 for batch in lengths)
        assert any(max(batch, default=0) > 128 for batch in lengths)
        assert any(len(batch) > 1 and set(batch) == {1} for batch in lengths)
        assert any(0 in batch and max(batch) > 0 for batch in contexts)


@pytest.mark.parametrize("op", OPERATORS)
def test_cases_depend_on_the_seed_only(op: str) -> None:
    first, again, other = (list(OPERATORS[op].cases(seed)) for seed in (0, 0, 1))
    pairs = list(zip(tensors_of([case.args for case in first]), tensors_of([case.args for case in again]), strict=True))
    assert all(same_bits(one, two) for one, two in pairs)
    others = tensors_of([case.args for case in other])
    assert any(one.shape != two.shape or not same_bits(one, two) for (one, _), two in zip(pairs, others, strict=True))


@pytest.mark.parametrize("op", OPERATORS)
def test_a_form_serves_a_case_at_least(op: str) -> None:
    """Refusals are words, and a form that refuses everything is none."""
    for backend, form in OPERATORS[op].implementations.items():
        reasons = [form.refuse(case.use) for case in OPERATORS[op].cases(0)]
        assert None in reasons, backend
        assert all(reason is None or (isinstance(reason, str) and reason.strip()) for reason in reasons)
