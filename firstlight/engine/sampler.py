"""From logits to tokens. A draw depends on the request's seed and the position only, so company and preemption change nothing.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from firstlight.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of the unmodified distribution: the token's own, and the likeliest ones in order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """`seed` stands in for requests that bring none, mixed with their id."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._counts: WeakKeyDictionary[Sequence, _Counts] = WeakKeyDictionary()

    def draw(self, logits_RV: Tensor, seqs: Rows[Sequence]) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row; row r belongs to sequence r."""
        if all(_plain_greedy(seq) for seq in seqs):
            return logits_RV.argmax(dim=-1).tolist(), [None] * len(seqs)
        tokens, logprobs = [], []
        for row_V, seq in zip(logits_RV.float(), seqs, strict=True):
            token = self._one(row_V, seq)
            tokens.append(token)
            logprobs.append(None if seq.sampling.logprobs is None else describe(row_V, token, seq.sampling.logprobs))
        return tokens, logprobs

    def _one(self, row_V: Tensor, seq: Sequence) -> int:
        params = seq.sampling
        adjusted_V = self._adjust(row_V, seq)
        if params.greedy:
            return int(adjusted_V.argmax())
        seed = params.seed if params.seed is not None else hash((self.seed, seq.seq_id))
        return _pick(adjusted_V, params.temperature, params.top_k, params.top_p, params.min_p, uniform(seed, len(seq.tokens)))

    def _adjust(self, row_V: Tensor, seq: Sequence) -> Tensor:
        params = seq.sampling
        row_V = row_V.clone()
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._penalise(row_V, seq)
        for token, bias in (params.logit_bias or {}).items():
            row_V[token] += bias
        if seq.num_generated < params.min_tokens:
            banned = [*params.stop_token_ids, *(() if params.ignore_eos else seq.stop_ids)]
            row_V[banned] = -math.inf
        return row_V

    def _penalise(self, row_V: Tensor, seq: Sequence) -> None:
        params = seq.sampling
        counts = self._counts.get(seq)
        if counts is None:
            counts = self._counts[seq] = _Counts(torch.zeros_like(row_V), torch.zeros_like(row_V, dtype=torch.bool))
        counts.catch_up(seq)
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            row_V.copy_(torch.where(counts.seen_V, torch.where(row_V > 0, row_V / factor, row_V * factor), row_V))
        row_V -= params.frequency_penalty * counts.generated_V + params.presence_penalty * (counts.generated_V > 0)


@dataclass(slots=True)
class _Counts:
    """Grows with the sequence, token by token, so that a step costs the same at any length."""

    generated_V: Tensor
    seen_V: Tensor
    num_seen: int = 0

    def catch_up(self, seq: Sequence) -> None:
        for position in range(self.num_seen, len(seq.tokens)):
            token = seq.tokens[position]
            self.seen_V[token] = True
            if position >= seq.num_prompt:
                self.generated_V[token] += 1
        self.num_seen = len(seq.tokens)


def _plain_greedy(seq: Sequence) -> bool:
    params = seq.sampling
    touched = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty or params.logit_bias
    return params.greedy and params.logprobs is None and not touched and seq.num_generated >= params.min_tokens


def _pick(row_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, draw: float) -> int:
    """Inverse of the cumulative distribution over tokens sorted by probability, ties by lowest id."""
    order_V = torch.argsort(row_V, descending=True, stable=True)
    probs_V = torch.softmax(row_V[order_V].double() / temperature, dim=-1)
    keep = probs_V.numel()
    if min_p > 0:
        keep = min(keep, int((probs_V >= min_p * probs_V[0]).sum()))
    if top_k > 0:
        keep = min(keep, top_k)
    if top_p < 1:
        before_V = probs_V.cumsum(0) - probs_V
        keep = min(keep, max(1, int((before_V < top_p).sum())))
    cumulative = probs_V[: max(1, keep)].cumsum(0)
    index = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    return int(order_V[min(index, cumulative.numel() - 1)])


def describe(row_V: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of one row."""
    logprobs_V = torch.log_softmax(row_V.double(), dim=-1)
    top = torch.topk(logprobs_V, min(num_top, logprobs_V.numel()))
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs_V[token]), pairs)
