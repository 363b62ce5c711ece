"""Recall at a distance: keys bound once in held-out English, each asked at the end; greedy decoding must give the value.

Letters: B questions at once, T tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from train.draft import Draft
from train.network import Carry, Network
from train.tasks import statement, value, word

WINDOW = 4096
NUM_KEYS = 20
"""Keys bound in one document; each is one question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`by_age`: right answers and questions per quarter of the document, the oldest first. `foreign`: right after another document."""

    length: int
    right: int
    asked: int
    by_age: tuple[tuple[int, int], ...]
    foreign: int

    @property
    def rate(self) -> float:
        """Share of right answers."""
        return self.right / self.asked


def document(rng: random.Random, filler: bytes, length: int) -> tuple[Draft, list[tuple[str, str, float]]]:
    """English of that many bytes with keys at even depths, and (key, value, depth) of each."""
    draft, bound = Draft(), []
    first = rng.randrange(len(filler))
    text = (filler + filler)[first : first + length]
    taken: set[str] = set()
    for number in range(NUM_KEYS):
        key = next(each for each in iter(lambda: word(rng), "") if each not in taken)
        taken.add(key)
        depth = (number + rng.random()) / NUM_KEYS
        bound.append((key, value(rng), depth))
    at = 0
    spare = length - sum(len(key) + len(what) + 5 for key, what, _ in bound)
    for key, what, depth in bound:
        upto = int(depth * spare)
        draft.add(text[at:upto])
        statement(draft, key, what, 1.0)
        at = upto
    draft.add(text[at:spare])
    return draft, bound


@torch.no_grad()
def after(network: Network, tokens: list[int]) -> Carry:
    """Memory after a document, window by window."""
    carry: Carry | None = None
    for at in range(0, len(tokens), WINDOW):
        carry = network.forward(torch.tensor([tokens[at : at + WINDOW]]), carry).carry
    assert carry is not None
    return carry


@torch.no_grad()
def answers(network: Network, carry: Carry, bound: list[tuple[str, str, float]]) -> list[bool]:
    """Whether each value comes out, line end included, when its key is said again after the document."""
    found = []
    for size in sorted({len(what) for _, what, _ in bound}):
        group = [(index, key, what) for index, (key, what, _) in enumerate(bound) if len(what) == size]
        rows = torch.tensor([list(f"\n@{key}: {what}\n".encode()) for _, key, what in group])
        spread = [tuple(part.expand(len(group), *part.shape[1:]).contiguous() for part in layer) for layer in carry]
        guesses = network.forward(rows[:, :-1], spread).logits.argmax(1).view(len(group), -1)
        asked = slice(len("\n@xxxxxx: ") - 1, None)
        right = (guesses[:, asked] == rows[:, 1:][:, asked]).all(1).tolist()
        found += [(index, good) for (index, _, _), good in zip(group, right, strict=True)]
    return [good for _, good in sorted(found)]


def recall(network: Network, filler: bytes, length: int, *, num_documents: int, seed: int = 0) -> Score:
    """Questions over several documents of one length in bytes."""
    rng = random.Random(f"recall {seed} {length}")
    quarters, foreign, other = [[0, 0] for _ in range(4)], 0, None
    for _ in range(num_documents):
        draft, bound = document(rng, filler, length)
        carry = after(network, draft.tokens)
        # The control: who has not read the document cannot know.
        foreign += sum(answers(network, other, bound)) if other else 0
        other = carry
        for good, (_, _, depth) in zip(answers(network, carry, bound), bound, strict=True):
            quarters[int(depth * 4)][0] += good
            quarters[int(depth * 4)][1] += 1
    by_age = tuple((right, asked) for right, asked in quarters)
    right, asked = (sum(column) for column in zip(*by_age, strict=True))
    return Score(length=length, right=right, asked=asked, by_age=by_age, foreign=foreign)
