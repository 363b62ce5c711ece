"""Log decays against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.ops.decay_gate import decay_gate

F = [[[-9.0, 0.0], [2.5, 40.0]]]
A_LOG = [0.3, -1.0]
BIAS = [[0.1, -0.2], [0.0, 1.0]]


def gate(f: float, a_log: float, bias: float, lower_bound: float | None) -> float:
    shifted = f + bias
    if lower_bound is None:
        return -math.exp(a_log) * math.log1p(math.exp(shifted))
    return lower_bound / (1 + math.exp(-math.exp(a_log) * shifted))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_per_channel_in_float64(lower_bound: float | None) -> None:
    want = [[[gate(F[0][h][k], A_LOG[h], BIAS[h][k], lower_bound) for k in range(2)] for h in range(2)]]
    got = decay_gate(torch.tensor(F), torch.tensor(A_LOG), torch.tensor(BIAS), lower_bound=lower_bound)
    assert torch.allclose(torch.tensor(want), got, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_per_head_in_float64(lower_bound: float | None) -> None:
    want = [[gate(f, a_log, bias, lower_bound) for f, a_log, bias in zip(row, A_LOG, [0.5, -0.5], strict=True)] for row in ([1.0, -2.0], [0.0, 3.0])]
    got = decay_gate(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), torch.tensor(A_LOG), torch.tensor([0.5, -0.5]), lower_bound=lower_bound)
    assert torch.allclose(torch.tensor(want), got, rtol=1e-6, atol=1e-8)


def test_bf16_inputs_give_fp32_decays_of_full_precision() -> None:
    """A decay of 0.999 per step in bf16 would be 1: 300 steps later the state would not have faded."""
    f = torch.full((1, 1, 1), -7.0, dtype=torch.bfloat16)
    got = decay_gate(f, torch.zeros(1), torch.full((1, 1), 0.0923), lower_bound=None)
    assert torch.float32 == got.dtype
    assert math.isclose(gate(-7.0, 0.0, 0.0923, None), float(got), rel_tol=1e-6)


def test_the_bound_is_never_passed() -> None:
    f = torch.tensor([-1e4, 0.0, 1e4]).view(1, 1, 3)
    got = decay_gate(f, torch.tensor([3.0]), torch.zeros(1, 3), lower_bound=-5.0)
    assert [0.0, -2.5, -5.0] == got.flatten().tolist()
