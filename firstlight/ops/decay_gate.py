"""Log decay of the delta rule. Letters: T packed tokens, H heads, K key width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def decay_gate(f_THK: Tensor, a_log_H: Tensor, dt_bias_HK: Tensor, *, lower_bound: float | None = None) -> Tensor:
    """Logarithm of the decay, always fp32 and never above zero.

    Per channel with f [T, H, K] and bias [H, K] (KDA), per head with f [T, H] and bias [H] (Gated DeltaNet).
    With a lower bound (Kimi K3: -5) the decay cannot fall below exp(lower_bound) in one step.

    Source: arXiv 2510.26692, and the configuration of Kimi K3 for the bounded form.
    """
    rate = a_log_H.float().exp()
    shifted = f_THK.float() + dt_bias_HK.float()
    if f_THK.dim() == 3:
        rate = rate[:, None]
    if lower_bound is None:
        return -rate * F.softplus(shifted)
    return lower_bound * torch.sigmoid(rate * shifted)


def cases(seed: int) -> Iterator[Case]:
    """Both forms, per channel and per head, decays near one and gates far out."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for gate, lower_bound in (("softplus", None), ("bounded", -5.0)):
            for shape in ((0, 2, 4), (1, 1, 1), (7, 3, 5), (66, 4, 16), (0, 3), (9, 3)):
                heads, rest = shape[1], shape[1:]
                use = OpUse.of("decay_gate", name, H=heads, K=shape[2] if len(shape) == 3 else 1, gate=gate)
                a_log = torch.rand(heads, generator=rng) * 3.0 - 1.0
                args = (normal(rng, *shape, dtype=dtype, spread=3.0), a_log, normal(rng, *rest))
                yield Case(f"{name}-{gate}-{'x'.join(map(str, shape))}", use, args, {"lower_bound": lower_bound})
            use = OpUse.of("decay_gate", name, H=2, K=3, gate=gate)
            f = torch.tensor([-300.0, -7.0, 300.0], dtype=dtype).expand(2, 2, 3)
            yield Case(f"{name}-{gate}-extreme", use, (f, torch.tensor([0.0, 2.7]), torch.zeros(2, 3)), {"lower_bound": lower_bound})
