"""A Batch becomes tensors, logits become tokens.

Letters: T packed tokens, N sequences, R rows that yield logits, V vocabulary, B blocks of a table.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from firstlight.cache.pool import CachePool
from firstlight.engine.sampler import Sampler, TokenLogprobs, describe
from firstlight.layers.decoder import Decoder
from firstlight.layers.step import Step
from firstlight.sched.sequence import Batch, Chunk, Sequence, StepResult
from firstlight.spec.errors import RequestError


class TorchRunner:
    """Runs batches on one device with one copy of the model."""

    def __init__(self, decoder: Decoder, pool: CachePool, sampler: Sampler, *, device: str = "cpu") -> None:
        self.decoder, self.pool, self.sampler, self.device = decoder, pool, sampler, device
        self.caches = [pool.layer(layer.index) for layer in decoder.spec.layers]

    def run(self, batch: Batch) -> StepResult:
        """Computes every chunk; a sequence whose logits are not finite fails alone."""
        begun_s = time.perf_counter()
        self.pool.scrub(batch.scrub)
        self.pool.claim(batch.fresh)
        self.pool.copy(move for move in batch.transfers if move.when == "before")
        with torch.inference_mode():
            logits_RV = self.decoder(build_step(batch.chunks, self.pool, self.device), self.caches).float()
            result = self._results(batch.chunks, logits_RV, begun_s)
        self.pool.copy(move for move in batch.transfers if move.when == "after")
        return result

    def close(self) -> None:
        """Nothing to end: memory goes with the object."""

    def _results(self, chunks: Rows[Chunk], logits_RV: Tensor, begun_s: float) -> StepResult:
        finite = finite_rows(logits_RV)
        rows, sampled, collected, errors, told = 0, [], {}, {}, {}
        for chunk in chunks:
            count = num_rows(chunk)
            if not all(finite[rows : rows + count]):
                errors[chunk.seq.seq_id] = f"logits at position {chunk.end - 1} are not finite"
                rows += count
                continue
            if rates(chunk):
                told[chunk.seq.seq_id] = prompt_logprobs(chunk, logits_RV[rows : rows + count])
            elif chunk.seq.collect:
                collected[chunk.seq.seq_id] = logits_RV[rows : rows + count]
            rows += count
            if chunk.samples:
                sampled.append((rows - 1, chunk.seq))
                if chunk.seq.watched and not chunk.seq.num_generated:
                    collected[chunk.seq.seq_id] = logits_RV[rows - 1]
        sampled, masks = held(sampled, errors)
        index = [row for row, _ in sampled]
        rows_RV = logits_RV if len(index) == len(logits_RV) else logits_RV[index]
        tokens, logprobs = self.sampler.draw(rows_RV, [seq for _, seq in sampled], masks) if sampled else ([], [])
        ids = [seq.seq_id for _, seq in sampled]
        return StepResult(
            dict(zip(ids, tokens, strict=True)), time.perf_counter() - begun_s, errors,
            {seq_id: found for seq_id, found in zip(ids, logprobs, strict=True) if found is not None}, collected, told)


def held(sampled: Rows[tuple[int, Sequence]], errors: dict[int, str]) -> tuple[list[tuple[int, Sequence]], dict[int, bytes]]:
    """The rows that can go on, and what those may draw whose answer is held to a structure, by their new place; of the others, why not."""
    kept: list[tuple[int, Sequence]] = []
    masks: dict[int, bytes] = {}
    for row, seq in sampled:
        try:
            mask = None if seq.constraint is None else seq.constraint.allowed()
        except RequestError as error:
            errors[seq.seq_id] = str(error)
            continue
        if mask is not None:
            masks[len(kept)] = mask
        kept.append((row, seq))
    return kept, masks


def num_rows(chunk: Chunk) -> int:
    """Rows of logits that a chunk yields: all when collecting and where prompt tokens are rated, else the last one.

    Note: also of a chunk that does not sample. Its last token has seen all before it, so what it computed is known to be finite before
    anybody may build on it.
    """
    return chunk.end - chunk.begin if chunk.seq.collect or rates(chunk) else 1


def rates(chunk: Chunk) -> bool:
    """Whether log probabilities of prompt tokens are wanted of a chunk; of the first one always, so that a prompt of one token has its none."""
    return chunk.seq.sampling.prompt_logprobs is not None and (not chunk.begin or chunk.begin < chunk.seq.num_prompt - 1)


def prompt_logprobs(chunk: Chunk, logits_RV: Tensor) -> tuple[TokenLogprobs, ...]:
    """Those of the prompt's tokens chunk.begin + 1 and later, as far as this chunk's rows rate them."""
    seq = chunk.seq
    assert seq.sampling.prompt_logprobs is not None
    rated = seq.tokens[chunk.begin + 1 : min(chunk.end + 1, seq.num_prompt)]
    return tuple(describe(row_V, token, seq.sampling.prompt_logprobs) for row_V, token in zip(logits_RV[: len(rated)], rated, strict=True))


def finite_rows(logits_RV: Tensor) -> list[bool]:
    """Whether all values of a row are finite. A finite sum has finite terms only and costs a fortieth; others are looked at in full."""
    finite_R = logits_RV.sum(dim=-1).isfinite()
    if not finite_R.all():
        finite_R = logits_RV.isfinite().all(dim=-1)
    found: list[bool] = finite_R.tolist()
    return found


def build_step(chunks: Rows[Chunk], pool: CachePool, device: str = "cpu") -> Step:
    """One batch as tensors; work is proportional to new tokens and blocks, and no loop runs over the context."""
    tokens: list[int] = []
    starts, wanted = [0], []
    for chunk in chunks:
        tokens += chunk.seq.tokens[chunk.begin : chunk.end]
        starts.append(len(tokens))
        wanted.append(torch.arange(starts[-1] - num_rows(chunk), starts[-1]))
    positions_T = torch.cat([torch.arange(chunk.begin, chunk.end) for chunk in chunks])
    tables, row_slots, slots = {}, {}, {}
    for name, group in pool.groups.items():
        blocks = [chunk.table.blocks[name] for chunk in chunks]
        if group.kind == "state":
            slots[name] = torch.tensor([ids[0] for ids in blocks]).to(device)
        else:
            tables[name] = _table(blocks).to(device)
            row_slots[name] = _row_slots(tables[name], positions_T, starts, group.tokens_per_block).to(device)
    return Step(
        tokens_T=torch.tensor(tokens, device=device), positions_T=positions_T.to(device), starts_N1=torch.tensor(starts),
        contexts_N=torch.tensor([chunk.begin for chunk in chunks]), tables=tables, row_slots=row_slots, slots=slots,
        logit_rows_R=torch.cat(wanted).to(device))


def _table(blocks: Rows[array[int]]) -> Tensor:
    """Block ids padded with -1 to the longest table."""
    rows = [torch.frombuffer(ids, dtype=torch.int64).clone() for ids in blocks]
    if len(rows) == 1:
        return rows[0].unsqueeze(0)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _row_slots(table_NB: Tensor, positions_T: Tensor, starts: Rows[int], tokens_per_block: int) -> Tensor:
    lengths_N = torch.tensor(starts).diff()
    seq_T = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
    block_T = table_NB[seq_T, positions_T // tokens_per_block]
    return block_T * tokens_per_block + positions_T % tokens_per_block
