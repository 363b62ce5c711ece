"""DeepSeek sparse attention: latent attention over the rows that an indexer chose.

Letters: T packed tokens, D model width, H heads, Q query width of a head, V value width, K width of an indexer head, U rows chosen, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import DTYPES, LayerNorm, Linear, Rotary
from firstlight.layers.mla import Mla
from firstlight.layers.registry import part
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.dsa import Dsa as Spec

SCORE_ELEMENTS = 1 << 24
"""Scores of fp32 that are held at once: a prompt is scored in pieces, a batch of decodes in one."""


@part("dsa")
class Dsa(Mla):
    """While no sequence of a step has more rows than would be chosen, attention is dense and nothing is scored."""

    spec: Spec

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__(spec, mesh, binder)
        self.attend_chosen = binder.bind(next(use for use in spec.ops() if use.op == "sparse_attention"))
        if not spec.shared:
            self.indexer = Indexer(spec, binder)

    def look(self, x_TD: Tensor, resid_TD: Tensor, q_THQ: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Attention [T, H, V] over the rows that this layer's indexer chose, or the last one before it."""
        spec = self.spec
        if not spec.shared:
            self.indexer.remember(x_TD, step, cache["index_key"])
        if int((step.contexts_N + step.starts_N1.diff()).max()) <= spec.top_k:
            return super().look(x_TD, resid_TD, q_THQ, step, cache)
        if not spec.shared:
            step.handed["chosen"] = self.indexer(x_TD, resid_TD, step, cache["index_key"])
        return self.attend_chosen(  # type: ignore[no-any-return]
            q_THQ, cache["latent"], step.tables["mla"], self.kv_b_proj.weight, step.handed["chosen"], step.starts_N1, step.contexts_N,
            nope=spec.nope, v_dim=spec.v_dim, scale=spec.scale)


class Indexer(nn.Module):
    """Chooses rows; the module's output is their places, so that a trace holds them."""

    def __init__(self, spec: Spec, binder: Binder) -> None:
        super().__init__()
        self.spec = spec
        products = {name: Linear(binder, num_in, num_out, spec.precision(name)) for name, num_in, num_out in spec.index_linears()}
        self.wq_b, self.wk, self.weights_proj = products["wq_b"], products["wk"], products["weights_proj"]
        self.k_norm = LayerNorm(binder, spec.index_dim, spec.index_eps, spec.dtype, spec.precision("k_norm"))
        self.turn_q, self.turn_k = (Rotary(binder, spec.index_rotation, heads, spec.dtype) for heads in (spec.index_heads, 1))
        uses = {use.op: use for use in spec.index_ops()}
        self.score, self.choose = binder.bind(uses["index_scores"]), binder.bind(uses["index_topk"])

    def remember(self, x_TD: Tensor, step: Step, keys_SBK: Tensor) -> None:
        """Writes the keys of this step's tokens, scored or not."""
        key_TK = self.turn_k(self.k_norm(self.wk(x_TD)).unsqueeze(1), step.positions_T).squeeze(1)
        keys_SBK.view(-1, self.spec.index_dim).index_copy_(0, step.row_slots["index"], key_TK)

    def forward(self, x_TD: Tensor, resid_TD: Tensor, step: Step, keys_SBK: Tensor) -> Tensor:
        """Places [T, U] of the chosen rows in their sequences, ascending, -1 behind them."""
        spec = self.spec
        q_THK = self.turn_q(self.wq_b(resid_TD).unflatten(1, (spec.index_heads, spec.index_dim)), step.positions_T)
        weights_TH = self.weights_proj(x_TD.to(DTYPES[spec.precision("weights_proj")])).float() * spec.index_heads**-0.5
        visible_T = step.positions_T + 1
        most = int((step.contexts_N + step.starts_N1.diff()).max())
        chosen_TU = torch.full((len(x_TD), min(spec.top_k, most)), -1, dtype=torch.int32, device=x_TD.device)
        for piece, (tables_NB, starts_N1, contexts_N) in _pieces(step, max(1, SCORE_ELEMENTS // most)):
            scores_TM = self.score(q_THK[piece], weights_TH[piece], keys_SBK, tables_NB, starts_N1, contexts_N, scale=spec.index_dim**-0.5)
            found_TU = self.choose(scores_TM, visible_T[piece], top_k=spec.top_k)
            chosen_TU[piece, : found_TU.shape[1]] = found_TU
        return chosen_TU


def _pieces(step: Step, size: int) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
    """Runs of at most `size` packed tokens, with the tables, borders and contexts of the sequences that they belong to."""
    starts_N1, tables_NB = step.starts_N1, step.tables["index"]
    num_tokens = int(starts_N1[-1])
    if num_tokens <= size:
        yield slice(None), (tables_NB, starts_N1, step.contexts_N)
        return
    for begin in range(0, num_tokens, size):
        inside_N1 = starts_N1.clamp(begin, begin + size)
        lengths_N = inside_N1.diff()
        here_N = lengths_N > 0
        contexts_N = (step.contexts_N + inside_N1[:-1] - starts_N1[:-1])[here_N]
        borders_N1 = nn.functional.pad(lengths_N[here_N].cumsum(0), (1, 0))
        yield slice(begin, begin + size), (tables_NB[here_N.to(tables_NB.device)], borders_N1, contexts_N)
