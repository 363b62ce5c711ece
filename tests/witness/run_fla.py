"""Run fla's plain-torch KDA on seeded inputs and write both to a safetensors file: python run_fla.py OUT.

It needs an environment of its own (see test_fla.py): where fla can be imported, transformers switches to its GPU kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from safetensors.torch import save_file

LOWER_BOUND = -5.0


class Shape(NamedTuple):
    """Sizes of one witness; tokens are a multiple of 64, as fla's chunk form needs."""

    num_tokens: int
    num_key_heads: int
    num_heads: int
    head_k: int
    head_v: int
    rate: float     # largest log rate of the decay


SHAPES = {
    "square": Shape(128, 4, 4, 32, 32, 1.0),
    "oblong": Shape(192, 2, 2, 16, 40, 1.0),
    "grouped": Shape(64, 2, 6, 24, 16, 0.5),
    "lasting": Shape(1024, 2, 2, 64, 32, -6.0),
}
GATES = {"softplus": None, "bounded": LOWER_BOUND}


def witness(seed: int, gate: str, shape: Shape) -> dict[str, torch.Tensor]:
    """Inputs in the packed layout [T, ...] and what fla makes of them."""
    rng = torch.Generator().manual_seed(seed)
    num_tokens, num_key_heads, num_heads, head_k, head_v, rate = shape

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    q, k = (torch.nn.functional.normalize(normal(num_tokens, num_key_heads, head_k), dim=-1) for _ in range(2))
    v, beta = normal(num_tokens, num_heads, head_v), torch.sigmoid(normal(num_tokens, num_heads))
    f, dt_bias = normal(num_tokens, num_heads, head_k), normal(num_heads, head_k)
    # A lasting gate needs a slow rate without a bound, and a very negative argument below one.
    a_log, state = rate - torch.rand(num_heads, generator=rng), normal(num_heads, head_k, head_v)
    if rate < 0 and gate == "bounded":
        a_log, dt_bias = -a_log / 6, dt_bias - 6.0
    g = naive_kda_gate(f, a_log, dt_bias.flatten()) if GATES[gate] is None else naive_kda_lowerbound_gate(f, a_log, dt_bias.flatten(), LOWER_BOUND)
    batch = tuple(x.unsqueeze(0) for x in (q, k, v, g, beta))
    found = {"q": q, "k": k, "v": v, "f": f, "a_log": a_log, "dt_bias": dt_bias, "g": g, "beta": beta, "state": state}
    for form, function in (("recurrent", naive_recurrent_kda), ("chunk", naive_chunk_kda)):
        o, last = function(*batch, initial_state=state.unsqueeze(0), output_final_state=True)
        found[f"o_{form}"], found[f"state_{form}"] = o[0], last[0]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    tensors = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        for gate in GATES:
            tensors.update({f"{name}.{gate}.{key}": value.contiguous() for key, value in witness(seed, gate, shape).items()})
    save_file(tensors, Path(sys.argv[1]))
