"""From logits to tokens. A draw depends on the request's seed and the position only, so company and preemption change nothing.

Letters: R rows, M rows under a mask, V vocabulary, C candidates, B biased ids, S stop ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.sched.sequence import Sequence, Status
from firstlight.spec.sampling import SamplingParams

# Below any logit and any bias, yet finite: if everything is banned, all tokens are equal instead of none being a number.
BANNED = torch.finfo(torch.float32).min

# Most filters keep fewer tokens than this, and finding that many costs a twentieth of sorting a vocabulary; if not, more are looked at.
NUM_CANDIDATES = 1024
CANDIDATE_GROWTH = 16

# For every byte of a mask eight booleans, true where its bit is clear, as one word: looking words up costs a tenth of shifting bits.
_CLEAR_BITS = torch.tensor([[not byte >> bit & 1 for bit in range(8)] for byte in range(256)]).view(torch.int64).flatten()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of the unmodified distribution: the token's own, and the likeliest ones as (token, logprob) in order.

    No mask and no penalty changes them, so a token that a mask forced shows how likely the model itself found it.
    `top` has as many pairs as were asked for; of equal ones the lower id comes first. The token itself need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def uniform(seed: int | str, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """`seed` stands in for requests that bring none, mixed with their id."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._changes: dict[Sequence, _Changes] = {}

    def draw(
        self, logits_RV: Tensor, seqs: Rows[Sequence], masks: Mapping[int, bytes] | None = None
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row; row r belongs to sequence r. Row by row but for plain greedy ones: one row stays in the processor's cache.

        `masks`: by row, one bit per token that may be drawn; what is banned is out before temperature and filters look.
        """
        self._forget()
        banned = banned_tokens(masks, logits_RV) if masks else {}
        tokens: list[int] = logits_RV.argmax(dim=-1).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for row, seq in enumerate(seqs):
            params = seq.sampling
            changed = _changes_logits(seq)
            if changed or row in banned or not params.greedy:
                tokens[row] = self._one(logits_RV[row], seq, changed, banned.get(row))
            if params.logprobs is not None:
                logprobs[row] = describe(logits_RV[row], tokens[row], params.logprobs)
        return tokens, logprobs

    def adjusted(self, row_V: Tensor, seq: Sequence) -> Tensor:
        """Float32 logits after repetition, frequency and presence penalties, bias, and the ban of ends before `min_tokens`."""
        if seq not in self._changes:
            self._changes[seq] = _Changes.of(seq, row_V)
        return self._changes[seq].apply(row_V.float(), seq)

    def _one(self, row_V: Tensor, seq: Sequence, changed: bool, banned_V: Tensor | None) -> int:
        params = seq.sampling
        if changed:
            row_V = self.adjusted(row_V, seq)
        if banned_V is not None:
            # Below BANNED, so that a structure which ends here ends even before `min_tokens`.
            row_V = row_V.masked_fill(banned_V, -torch.inf)
        if params.greedy:
            return int(row_V.argmax())
        seed = f"{self.seed}/{seq.seq_id}" if params.seed is None else params.seed
        return pick(weights(row_V, params), uniform(seed, len(seq.tokens)))

    def _forget(self) -> None:
        for seq in [seq for seq in self._changes if seq.status is Status.FINISHED]:
            del self._changes[seq]


def weights(row_V: Tensor, params: SamplingParams) -> Tensor:
    """Float64 probabilities at the temperature, zero for what the filters drop: top_k, then top_p of what is left, and min_p.

    Note: not normalised again. The likeliest token always stays; of equal ones at the edge the lower ids stay.
    """
    row_V = row_V.double()
    # The largest is 0 before the division, so no temperature makes it overflow.
    probs_V = torch.softmax((row_V - row_V.max()) / params.temperature, dim=-1)
    num_kept, edge = _cut(probs_V, params)
    if num_kept == probs_V.numel():
        return probs_V
    above_V, equal_V = probs_V > edge, probs_V == edge
    kept_V = above_V | (equal_V & (equal_V.cumsum(0) <= num_kept - above_V.sum()))
    return probs_V.masked_fill(~kept_V, 0.0)


def banned_tokens(masks: Mapping[int, bytes], logits_RV: Tensor) -> dict[int, Tensor]:
    """The same rows with true for each token that may not be drawn; a mask that is too short bans the rest."""
    num_vocab, device = logits_RV.shape[1], logits_RV.device
    size = -(-num_vocab // 8)
    packed = b"".join(mask[:size].ljust(size, b"\0") for mask in masks.values())
    words = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device).int()
    banned_MV = _CLEAR_BITS.to(device).index_select(0, words).view(torch.bool).reshape(len(masks), -1)[:, :num_vocab]
    return dict(zip(masks, banned_MV, strict=True))


def pick(weights_V: Tensor, draw: float) -> int:
    """Inverse of the cumulative distribution in the order of ids: noise in the logits moves its edges, but never reorders tokens."""
    cumulative_V = weights_V.cumsum(0)
    return int(torch.searchsorted(cumulative_V, draw * cumulative_V[-1], right=True))


def describe(row_V: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of one row of logits."""
    logprobs_V = torch.log_softmax(row_V.double(), dim=-1)
    num_top = min(num_top, logprobs_V.numel())
    if not num_top:
        return TokenLogprobs(token, float(logprobs_V[token]), ())
    edge = torch.topk(logprobs_V, num_top).values[-1]
    ids_C = (logprobs_V >= edge).nonzero().flatten()
    top_C, order_C = torch.sort(logprobs_V[ids_C], descending=True, stable=True)
    pairs = zip(ids_C[order_C[:num_top]].tolist(), top_C[:num_top].tolist(), strict=True)
    return TokenLogprobs(token, float(logprobs_V[token]), tuple(pairs))


def _cut(probs_V: Tensor, params: SamplingParams) -> tuple[int, float]:
    """How many tokens the filters keep, and the probability of the last of them."""
    num_vocab = probs_V.numel()
    top_k = min(params.top_k or num_vocab, num_vocab)
    if top_k == num_vocab and params.top_p >= 1 and params.min_p == 0:
        return num_vocab, 0.0
    size = top_k if top_k < num_vocab else min(NUM_CANDIDATES, num_vocab)
    while True:
        best_C = torch.topk(probs_V, size).values
        total = float(best_C.sum()) if top_k < num_vocab else 1.0
        kept_C = best_C >= params.min_p * best_C[0]
        if params.top_p < 1:
            kept_C &= best_C.cumsum(0) - best_C < params.top_p * total
        num_kept = max(1, int(kept_C.sum()))
        if num_kept < size or size == top_k:
            return num_kept, float(best_C[num_kept - 1])
        size = min(size * CANDIDATE_GROWTH, num_vocab)


def _changes_logits(seq: Sequence) -> bool:
    params = seq.sampling
    return bool(_penalised(params) or params.logit_bias) or seq.num_generated < params.min_tokens


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass(slots=True)
class _Changes:
    """What a request does to its logits. Counts grow with the sequence, token by token, so that a step costs the same at any length."""

    bias_ids_B: Tensor
    biases_B: Tensor
    stop_ids_S: Tensor
    generated_V: Tensor | None
    seen_V: Tensor | None
    num_counted: int = 0

    @classmethod
    def of(cls, seq: Sequence, row_V: Tensor) -> _Changes:
        params, device = seq.sampling, row_V.device
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else seq.stop_ids)}
        bias = params.logit_bias or {}
        counted = _penalised(params)
        return cls(
            torch.tensor([*bias], dtype=torch.int64, device=device), torch.tensor([*bias.values()], dtype=torch.float32, device=device),
            torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device), torch.zeros_like(row_V, dtype=torch.float32) if counted else None,
            torch.zeros_like(row_V, dtype=torch.bool) if counted else None)

    def apply(self, row_V: Tensor, seq: Sequence) -> Tensor:
        """Changed logits, the row itself untouched."""
        params = seq.sampling
        row_V = row_V.clone()
        if self.seen_V is not None and self.generated_V is not None:
            self._count(seq, self.seen_V, self.generated_V)
            factor = params.repetition_penalty
            if factor != 1.0:
                row_V.copy_(torch.where(self.seen_V, torch.where(row_V > 0, row_V / factor, row_V * factor), row_V))
            row_V -= params.frequency_penalty * self.generated_V + params.presence_penalty * (self.generated_V > 0)
        row_V[self.bias_ids_B] += self.biases_B
        if seq.num_generated < params.min_tokens:
            row_V[self.stop_ids_S] = BANNED
        return row_V

    def _count(self, seq: Sequence, seen_V: Tensor, generated_V: Tensor) -> None:
        seen_V[torch.tensor(seq.tokens[self.num_counted :], dtype=torch.int64, device=seen_V.device)] = True
        ids = torch.tensor(seq.tokens[max(self.num_counted, seq.num_prompt) :], dtype=torch.int64, device=generated_V.device)
        generated_V.index_add_(0, ids, torch.ones_like(ids, dtype=generated_V.dtype))
        self.num_counted = len(seq.tokens)
