"""What is asked and when: conversations with the names and lengths of their pieces, without a byte of text."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from firstlight.bench.options import Options
from firstlight.spec.errors import RequestError

TRACE_BLOCK = 512
"""Tokens that one of `hash_ids` stands for; the last of a request may stand for fewer."""


class Kind(IntEnum):
    """Whose piece it is; part of its name, so that no two kinds meet."""

    OWN, BLOCK, PREFIX, WARM = range(4)

    def named(self, number: int) -> int:
        """The name of the piece of this number."""
        return number * len(Kind) + self


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: (name, tokens) of what it adds, the answer's length, and how many prompt tokens somebody sent before."""

    pieces: tuple[tuple[int, float], ...]
    num_output: int
    num_shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that wait for one another; `due_s` after the begin of the run, None: when a client is free."""

    turns: tuple[Turn, ...]
    due_s: float | None = None


@dataclass(slots=True)
class Plan:
    """Conversations in order; `left_out` counts those of a trace that --longest excludes, as they go by."""

    conversations: Iterator[Conversation]
    widest: tuple[int, float] | None = None
    left_out: int = 0


def plan(options: Options) -> Plan:
    """The whole run; it depends on the options alone, never on the server."""
    if options.trace is None:
        return Plan(_timed(options, _synthetic(options)))
    lines = _read(options.trace)
    block = TRACE_BLOCK * options.scale_lengths
    highest = max((name for line in lines for name in line["hash_ids"]), default=0)
    made = Plan(iter(()), (Kind.BLOCK.named(highest), block))
    made.conversations = _replayed(options, lines, made)
    if options.closed or options.rate is not None:
        made.conversations = _timed(options, made.conversations)
    return made


def warm_up(options: Options) -> Iterator[Turn]:
    """Requests of the same lengths whose contents nobody else sends."""
    rng = random.Random(f"warm-up {options.seed}")
    for number in range(options.warmup):
        yield Turn(((Kind.WARM.named(number), float(options.inputs.draw(rng))),), _capped(options, options.outputs.draw(rng)))


def _synthetic(options: Options) -> Iterator[Conversation]:
    """Drawn lengths; the number of requests is met exactly, the last conversation may be shorter for it."""
    rng = random.Random(f"lengths {options.seed}")
    inputs, outputs, left = options.inputs, options.outputs, options.num_requests
    numbers = itertools.count()
    for which in itertools.count():
        turns: list[Turn] = []
        group, before = which % options.prefix_groups, 0.0
        for turn in range(options.turns if left is None else min(options.turns, left)):
            own = (Kind.OWN.named(next(numbers)), float(inputs.draw(rng)))
            prefix = (Kind.PREFIX.named(group), float(options.prefix_tokens))
            pieces = (prefix, own) if options.prefix_tokens and turn == 0 else (own,)
            shared = before if turn else options.prefix_tokens * (which >= options.prefix_groups)
            turns.append(Turn(pieces, _capped(options, outputs.draw(rng)), shared))
            before += sum(length for _, length in pieces) + turns[-1].num_output
        if not turns:
            return
        left = None if left is None else left - len(turns)
        yield Conversation(tuple(turns))


def _replayed(options: Options, lines: list[dict[str, Any]], made: Plan) -> Iterator[Conversation]:
    seen: set[int] = set()
    left, scale = options.num_requests, options.scale_lengths
    for line in lines:
        length, names = line["input_length"], line["hash_ids"]
        if options.longest is not None and length * scale > options.longest:
            made.left_out += 1
            continue
        if left is not None and left <= 0:
            return
        left = None if left is None else left - 1
        sizes = [min(TRACE_BLOCK, length - TRACE_BLOCK * place) * scale for place in range(len(names))]
        shared = sum(size for size, _ in zip(sizes, itertools.takewhile(seen.__contains__, names), strict=False))
        seen.update(names)
        pieces = tuple((Kind.BLOCK.named(name), size) for name, size in zip(names, sizes, strict=True))
        due_s = (line["timestamp"] - lines[0]["timestamp"]) / 1000 / options.speed
        yield Conversation((Turn(pieces, _capped(options, max(1, round(line["output_length"] * scale))), shared),), due_s)


def _timed(options: Options, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
    """Arrivals of the open loop; drawn apart from the lengths, so that another rate asks the same."""
    rng, due_s = random.Random(f"arrivals {options.seed}"), 0.0
    for conversation in conversations:
        if options.rate is None:
            yield Conversation(conversation.turns)
            continue
        yield Conversation(conversation.turns, due_s)
        due_s += rng.expovariate(options.rate) if options.arrivals == "poisson" else 1 / options.rate


def _capped(options: Options, num_output: int) -> int:
    return num_output if options.max_output is None else min(num_output, options.max_output)


def _read(path: Path) -> list[dict[str, Any]]:
    """All lines of a trace, in order of time; each is checked."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            lines = [(number, json.loads(line)) for number, line in enumerate(stream, 1) if line.strip()]
    except (UnicodeDecodeError, json.JSONDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise RequestError(f"--trace {path} is not lines of JSON: {error}", "Give a file in Mooncake's format, one object per line.") from None
    for number, line in lines:
        if not _sound(line):
            raise RequestError(
                f"line {number} of {path} is {json.dumps(line)[:120]}",
                f"Give timestamp (ms), input_length, output_length, and in hash_ids one id per {TRACE_BLOCK} tokens of the input.",
            )
    if not lines:
        raise RequestError(f"--trace {path} is empty", "Give a file with one request per line.")
    return sorted((line for _, line in lines), key=lambda line: float(line["timestamp"]))


def _sound(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("hash_ids"), list) or not isinstance(line.get("timestamp"), int | float):
        return False
    lengths = (line.get("input_length"), line.get("output_length"))
    if not all(isinstance(number, int) and number >= 0 for number in (*lengths, *line["hash_ids"])):
        return False
    return bool(lengths[0]) and -(-int(lengths[0] or 0) // TRACE_BLOCK) == len(line["hash_ids"])
