"""Gated delta rule: single tokens as one batched update, longer runs by chunks of 64 tokens whose state meets them in matrix products.

Letters: T packed tokens, L tokens of one sequence, N sequences, S slots, H value heads, J key heads, K key width, V value width, C tokens of a
chunk, B blocks of 16 tokens (those of all heads and chunks together), P pairs of a chunk and a value head, Q pairs of a chunk and a key head, G value
heads of a key head.
Every decay is a product of factors exp(g) <= 1, never a quotient of two cumulative ones: no gate overflows and none cancels digits.
Source: chunkwise form, arXiv 2412.06464 (s. 3.3); decay per channel, arXiv 2510.26692 (s. 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.gated_delta import normalise, spread_heads

CHUNK = 64
BLOCK = 16
SHORT = 8
"""Runs of fewer tokens go token by token: a chunk would cost more."""

SEGMENT_ELEMENTS = 1 << 18
"""Elements of one [chunks, H, C, K] temporary: 1 MiB each keeps the dozen of them in cache and bounds memory whatever the length."""

IN_PLACE_ELEMENTS = 1 << 17
"""From this size of one state on, a CPU updates states one by one in their slots: gathering them costs more than the extra calls."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a run of tokens: as given (g, any dtype), in fp32 with exp(g) once `prepared`, with H key heads once `spread`."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_THK: Tensor
    beta_TH: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All five, in the order of construction."""
        return self.q_THK, self.k_THK, self.v_THV, self.decay_THK, self.beta_TH

    def slice(self, begin: int, end: int) -> Tokens:
        """Tokens begin to end, as views."""
        return Tokens(*(x[begin:end] for x in self.tensors()))

    def select(self, index_N: Tensor) -> Tokens:
        """The chosen tokens, copied."""
        return Tokens(*(x.index_select(0, index_N) for x in self.tensors()))

    def prepared(self, scale: float, norm_eps: float | None) -> Tokens:
        """Normalise, scale q, exponentiate the log decay; a decay per head gets one column."""
        q_TJK, k_TJK = normalise(self.q_THK, norm_eps) * scale, normalise(self.k_THK, norm_eps)
        log_THK = self.decay_THK if self.decay_THK.dim() == 3 else self.decay_THK.unsqueeze(-1)
        return Tokens(q_TJK, k_TJK, self.v_THV.float(), log_THK.float().exp(), self.beta_TH.float())

    def spread(self) -> Tokens:
        """Key heads repeated for the value heads that they serve."""
        q_THK, k_THK = (spread_heads(x_TJK, self.v_THV.shape[1]) for x_TJK in (self.q_THK, self.k_THK))
        return Tokens(q_THK, k_THK, self.v_THV, self.decay_THK, self.beta_TH)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What chunks do to a state, worked out before the state is known. P runs over chunks, then heads."""

    solve_PCC: Tensor
    attend_PCC: Tensor
    read_PDK: Tensor       # D = 2C: keys that find, then queries that read, both decayed from the chunk's start
    write_PKC: Tensor      # keys decayed to the chunk's end
    values_PCV: Tensor
    total_PK1: Tensor


def gated_delta(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THK: Tensor, beta_TH: Tensor,
    state_SHKV: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, scale: float, norm_eps: float | None = None,
) -> Tensor:
    """The operator of firstlight.ops.gated_delta; sequences of one token take the batched update, the others go one by one."""
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    tokens, o_THV = Tokens(q_THK, k_THK, v_THV, g_THK, beta_TH), torch.empty_like(v_THV, memory_format=torch.contiguous_format)
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    singles = [n for n, length in enumerate(lengths) if length == 1]
    if len(singles) == len(lengths):
        return o_THV.copy_(_decode(tokens.prepared(scale, norm_eps).spread(), state_SHKV, slots_N, contexts))
    if singles:
        index_N = torch.tensor(singles, device=slots_N.device)
        rows_N = torch.tensor([starts[n] for n in singles], device=slots_N.device)
        single = tokens.select(rows_N).prepared(scale, norm_eps).spread()
        o_THV[rows_N] = _decode(single, state_SHKV, slots_N[index_N], [contexts[n] for n in singles]).to(o_THV.dtype)
    for n, slot in enumerate(slots_N.tolist()):
        if lengths[n] == 1:
            continue
        state_HKV = state_SHKV[slot]
        if contexts[n] == 0:
            state_HKV.zero_()
        for begin, end, size in _segments(starts[n], starts[n + 1], k_THK.shape[-1] * v_THV.shape[1]):
            _prefill(tokens.slice(begin, end).prepared(scale, norm_eps), size, state_HKV, o_THV[begin:end])
    return o_THV


def _decode(tokens: Tokens, state_SHKV: Tensor, slots_N: Tensor, contexts: Sequence[int]) -> Tensor:
    """One token per sequence: o [N, H, V]; the states of their slots move on."""
    large = state_SHKV.device.type == "cpu" and state_SHKV[:1].numel() >= IN_PLACE_ELEMENTS
    if large or len(contexts) == 1:
        o_NHV = torch.empty_like(tokens.v_THV)
        for n, slot in enumerate(slots_N.tolist()):
            state_1HKV = state_SHKV[slot:slot + 1]
            if contexts[n] == 0:
                state_1HKV.zero_()
            o_NHV[n] = _advance(state_1HKV, tokens.slice(n, n + 1))[0]
        return o_NHV
    state_NHKV = state_SHKV.index_select(0, slots_N)
    if 0 in contexts:
        fresh_N = torch.tensor([context == 0 for context in contexts], device=slots_N.device)
        state_NHKV.masked_fill_(fresh_N.view(-1, 1, 1, 1), 0.0)
    o_NHV = _advance(state_NHKV, tokens)
    state_SHKV.index_copy_(0, slots_N, state_NHKV)
    return o_NHV


def _advance(state_NHKV: Tensor, tokens: Tokens) -> Tensor:
    """Move N states on by one token each, in place; one pass reads for k and q together, one pass writes."""
    q_NHK, k_NHK, v_NHV, decay_NHK, beta_NH = tokens.tensors()
    found_NH2V = torch.matmul(torch.stack((k_NHK, q_NHK), 2) * decay_NHK.unsqueeze(2), state_NHKV)
    write_NHV = (v_NHV - found_NH2V[:, :, 0]) * beta_NH.unsqueeze(-1)
    state_NHKV.mul_(decay_NHK.unsqueeze(-1)).addcmul_(k_NHK.unsqueeze(-1), write_NHV.unsqueeze(-2))
    return torch.addcmul(found_NH2V[:, :, 1], (q_NHK * k_NHK).sum(-1, keepdim=True), write_NHV)


def _prefill(tokens: Tokens, size: int, state_HKV: Tensor, o_LHV: Tensor) -> None:
    """One segment of one sequence, in chunks of `size` (1: token by token); state_HKV and o_LHV are written in place."""
    if size == 1:
        tokens = tokens.spread()
        for t in range(len(o_LHV)):
            o_LHV[t] = _advance(state_HKV.unsqueeze(0), tokens.slice(t, t + 1))[0]
        return
    o_PCV = _scan(_chunks(tokens, size), state_HKV)
    o_LHV.copy_(o_PCV.view(-1, len(state_HKV), size, o_PCV.shape[-1]).transpose(1, 2).flatten(0, 1)[:len(o_LHV)])


def _segments(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, tokens per chunk): full chunks, several at once, then a tail padded to whole blocks, or token by token if it is short."""
    step = max(1, SEGMENT_ELEMENTS // (width * CHUNK)) * CHUNK
    full = end - (end - begin) % CHUNK
    for first in range(begin, full, step):
        yield first, min(first + step, full), CHUNK
    if end > full:
        yield full, end, 1 if end - full < SHORT else -(-(end - full) // BLOCK) * BLOCK


def _by_chunk(x_LHW: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[L, H, W] -> [P, C, W], the last chunk padded with `fill`."""
    missing = -x_LHW.shape[0] % size
    if missing:
        x_LHW = functional.pad(x_LHW, (0, 0, 0, 0, 0, missing), value=fill)
    _, num_heads, width = x_LHW.shape
    return x_LHW.reshape(-1, size, num_heads, width).transpose(1, 2).contiguous().view(-1, size, width)


def _chunks(tokens: Tokens, size: int) -> Chunks:
    """Padding neither decays (factor 1) nor writes (key, value and beta 0), so the state after the last token is that after the chunk."""
    by_head = tokens.decay_THK.shape[-1] == 1
    tokens = tokens if by_head else tokens.spread()
    q_QCK, k_QCK, v_PCV = (_by_chunk(x, size) for x in (tokens.q_THK, tokens.k_THK, tokens.v_THV))
    decay_PCK, beta_PC1 = _by_chunk(tokens.decay_THK, size, 1.0), _by_chunk(tokens.beta_TH.unsqueeze(-1), size)
    keys_PCC, attend_PCC, since_PCK, ended_PCK = (_weigh_by_head if by_head else _weigh_by_channel)(q_QCK, k_QCK, decay_PCK)
    # The solver reads below the diagonal only, and takes the diagonal for 1.
    eye_PCC = torch.eye(size, dtype=k_QCK.dtype, device=k_QCK.device).expand_as(keys_PCC)
    solve_PCC = torch.linalg.solve_triangular(keys_PCC * beta_PC1, eye_PCC, upper=False, unitriangular=True)
    read_PDK = torch.cat((_weighed(k_QCK, since_PCK * beta_PC1), _weighed(q_QCK, since_PCK)), 1)
    return Chunks(solve_PCC, attend_PCC, read_PDK, ended_PCK.transpose(1, 2), v_PCV * beta_PC1, since_PCK[:, -1].unsqueeze(-1))


def _weighed(x_QCK: Tensor, factor_PCK: Tensor) -> Tensor:
    """Rows of each key head times the factors of every value head that it serves, [P, C, ...]; the rows are not repeated in memory."""
    product_QGCK: Tensor = x_QCK.unsqueeze(1) * factor_PCK.unflatten(0, (len(x_QCK), -1))
    return product_QGCK.flatten(0, 1)


def _weigh_by_head(q_QCK: Tensor, k_QCK: Tensor, decay_PC1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k.k and q.k weighed by the decay between both tokens (q.k zero above the diagonal), decay since the start, keys at the end."""
    size = k_QCK.shape[1]
    below_CC = torch.ones(size, size, dtype=torch.bool, device=k_QCK.device).tril(-1)
    between_PCC = torch.where(below_CC, decay_PC1, 1.0).cumprod(1).tril()
    keys_QKC = k_QCK.transpose(1, 2)
    return (
        _weighed(torch.bmm(k_QCK, keys_QKC), between_PCC), _weighed(torch.bmm(q_QCK, keys_QKC), between_PCC),
        decay_PC1.cumprod(1), _weighed(k_QCK, between_PCC[:, -1].unsqueeze(-1)),
    )


def _weigh_by_channel(q_PCK: Tensor, k_PCK: Tensor, decay_PCK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_weigh_by_head`; between blocks the decay splits at the later block's start, so that a matrix product sums over channels."""
    num_pairs, size, head_k = k_PCK.shape
    blocks = (num_pairs, size // BLOCK, BLOCK)
    both_PCDK = torch.stack((k_PCK, q_PCK), 2)
    scores_PCDC = k_PCK.new_zeros(num_pairs, size, 2, size)
    since_PCK = decay_PCK.view(*blocks, head_k).cumprod(2).view_as(k_PCK)
    inside_B16D16, ended_PCK = _weigh_block(both_PCDK.view(-1, BLOCK, 2, head_k), k_PCK, decay_PCK)
    inside = inside_B16D16.view(*blocks, 2, BLOCK)
    for b, begin in enumerate(range(0, size, BLOCK)):
        rows = slice(begin, begin + BLOCK)
        scores_PCDC[:, rows, :, rows] = inside[:, b]
        if begin == 0:
            continue
        whole_P1K = since_PCK[:, begin + BLOCK - 1:begin + BLOCK].clone()
        later_PDK = (both_PCDK[:, rows] * since_PCK[:, rows].unsqueeze(2)).view(num_pairs, 2 * BLOCK, head_k)
        earlier_PKC = ended_PCK[:, :begin].transpose(1, 2)
        scores_PCDC[:, rows, :, :begin] = torch.bmm(later_PDK, earlier_PKC).view(num_pairs, BLOCK, 2, begin)
        ended_PCK[:, :begin] *= whole_P1K
        since_PCK[:, rows] *= since_PCK[:, begin - 1:begin]
    return scores_PCDC[:, :, 0], scores_PCDC[:, :, 1], since_PCK, ended_PCK


def _weigh_block(both_B16DK: Tensor, k_PCK: Tensor, decay_PCK: Tensor) -> tuple[Tensor, Tensor]:
    """Weighed k.k and q.k within blocks of 16, lower triangles; and every key decayed to the end of its block."""
    head_k = k_PCK.shape[-1]
    decay_B16K = decay_PCK.view(-1, BLOCK, head_k)
    keys_B16K = k_PCK.view(-1, BLOCK, head_k).clone()
    scores_B16D16 = keys_B16K.new_zeros(len(keys_B16K), BLOCK, 2, BLOCK)
    for i in range(BLOCK):
        keys_B16K[:, :i] *= decay_B16K[:, i:i + 1]
        scores_B16D16[:, i, :, :i + 1] = torch.bmm(both_B16DK[:, i], keys_B16K[:, :i + 1].transpose(1, 2))
    return scores_B16D16, keys_B16K.view_as(k_PCK)


def _scan(chunks: Chunks, state_HKV: Tensor) -> Tensor:
    """Run the state through the chunks in order, in place; o [P, C, V]."""
    size, num_heads = chunks.solve_PCC.shape[1], state_HKV.shape[0]
    o_PCV = torch.empty_like(chunks.values_PCV)
    for begin in range(0, len(o_PCV), num_heads):
        now = slice(begin, begin + num_heads)
        found_HDV = torch.bmm(chunks.read_PDK[now], state_HKV)
        write_HCV = torch.bmm(chunks.solve_PCC[now], chunks.values_PCV[now] - found_HDV[:, :size])
        torch.baddbmm(found_HDV[:, size:], chunks.attend_PCC[now], write_HCV, out=o_PCV[now])
        state_HKV.mul_(chunks.total_PK1[now]).baddbmm_(chunks.write_PKC[now], write_HCV)
    return o_PCV
