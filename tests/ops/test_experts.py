"""Experts token by token in float64, both forms and every format; the bank; what may not be unpacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.backends.portable import experts as portable_file
from firstlight.ops import experts as reference_file
from firstlight.ops.case import Case
from firstlight.ops.declared import experts as operator
from firstlight.ops.experts import Bank

CASES = [case for case in operator.cases(7) if case.use.dtype == "float32"]
FORMS = {"reference": reference_file.experts, "portable": portable_file.experts}
NIBBLES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return FORMS[request.param]


def unpacked(packed: Tensor, scale: Tensor | None) -> Tensor:
    """One matrix in float64, entry by entry."""
    if scale is None:
        return packed.double()
    if scale.is_floating_point():
        values = packed.view(torch.float8_e4m3fn).double()
        return torch.stack([torch.stack([value * scale[r // 128, c // 128].double() for c, value in enumerate(row)]) for r, row in enumerate(values)])
    rows = []
    for row, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append([NIBBLES[code] * 2.0 ** (scales[column // 32] - 127) for column, code in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.float64)


def matrices_of(bank: Bank, expert: int) -> list[Tensor]:
    """Gate, up and down in float64."""
    scales = [None if part is None else part[expert] for part in (bank.gate_scale, bank.up_scale, bank.down_scale)]
    return [unpacked(part[expert], scale) for part, scale in zip((bank.gate, bank.up, bank.down), scales, strict=True)]


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kind: str, beta: float = 1.0, linear_beta: float = math.inf) -> Tensor:
    g, u = gate @ x, up @ x
    opened = g if kind == "silu" else beta * torch.tanh(g / beta)
    carried = u if kind == "silu" else linear_beta * torch.tanh(u / linear_beta)
    return down @ (opened * torch.sigmoid(g) * carried)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_token_by_token_in_float64(form: Callable[..., Tensor], case: Case) -> None:
    x, bank, ids, weights = case.args
    want = torch.zeros(x.shape, dtype=torch.float64)
    matrices = {expert: matrices_of(bank, expert) for expert in ids.unique().tolist()}
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            want[t] += weight * feed_forward(x[t].double(), *matrices[expert], **case.kwargs)
    (got,) = case.run(form)
    assert want.shape == got.shape
    if want.numel():
        assert float((want - got).abs().max()) <= operator.tol.float32 * (1 + float(want.abs().max()))


def stacked_bank(num_experts: int = 4) -> Bank:
    rng = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(num_experts, *shape, generator=rng) for shape in ((6, 8), (6, 8), (8, 6)))
    return Bank("dense", gate.unbind(0), up.unbind(0), down.unbind(0))


def test_an_expert_chosen_twice_counts_twice(form: Callable[..., Tensor]) -> None:
    x, bank = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), stacked_bank()
    twice = form(x, bank, torch.tensor([[2, 2]] * 3), torch.tensor([[0.25, 0.5]] * 3), kind="silu")
    once = form(x, bank, torch.tensor([[2]] * 3), torch.tensor([[0.75]] * 3), kind="silu")
    assert torch.allclose(once, twice, rtol=1e-6, atol=1e-6)


def test_the_order_of_choices_does_not_matter(form: Callable[..., Tensor]) -> None:
    x, bank = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), stacked_bank()
    ids, weights = torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.7, 0.3]])
    assert torch.allclose(form(x, bank, ids, weights, kind="silu"), form(x, bank, ids.flip(1), weights.flip(1), kind="silu"), atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_only_chosen_experts_are_unpacked(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """896 experts of a layer are never unpacked for 16 of them, and each of those once, however many tokens it has."""
    case = next(case for case in CASES if form in case.name and len(case.args[0]) == 67)
    x, bank, _, weights = case.args
    ids = torch.tensor([[3, 1, 3]] * 67)[:, : weights.shape[1]]
    file, seen = (reference_file if name == "reference" else portable_file), []
    unpack = file.UNPACK[form]

    def counted(packed: Tensor, scale: Tensor) -> Tensor:
        seen.append(packed)
        return unpack(packed, scale)

    monkeypatch.setitem(file.UNPACK, form, counted)
    FORMS[name](x, bank, ids, weights, **case.kwargs)
    wanted = [part[expert] for expert in (1, 3) for part in (bank.gate, bank.up, bank.down)]
    assert [part.data_ptr() for part in wanted] == [part.data_ptr() for part in seen]


def test_the_sum_over_experts_is_fp32(form: Callable[..., Tensor]) -> None:
    """1 + 256 + 1 - 256 is 2, or 0 when the sum is kept in bf16."""
    identity = torch.eye(2, dtype=torch.bfloat16)
    sizes = (1.0, 256.0, 1.0, -256.0)
    bank = Bank("dense", (identity * 64,) * 4, (identity / 64,) * 4, tuple(identity * size for size in sizes))
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    got = form(x, bank, torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4), kind="silu")
    assert [[2.0, 2.0]] == got.tolist()
    assert torch.bfloat16 == got.dtype


def test_bf16_experts_are_rounded_to_bf16() -> None:
    case = next(case for case in CASES if "mxfp4" in case.name)
    bank: Bank = case.args[1]
    dense = bank.dense(0, torch.bfloat16)
    assert [torch.bfloat16] * 3 == [part.dtype for part in dense]
    assert all(torch.equal(part.float(), want) for part, want in zip(dense, bank.dense(0, torch.float32), strict=True))


@pytest.mark.parametrize("wrong", [
    {"format": "mxfp4"},
    {"gate_scale": (torch.zeros(1),) * 4},
    {"down": (torch.zeros(8, 6),) * 3},
])
def test_a_bank_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    bank = stacked_bank()
    parts = {"format": bank.format, "gate": bank.gate, "up": bank.up, "down": bank.down} | wrong
    with pytest.raises(AssertionError):
        Bank(**parts)


def test_num_experts() -> None:
    assert 4 == stacked_bank(4).num_experts
