"""What is trained on in which order: episodes of windows, each a function of the seed, the rank and its number.

Letters: B rows, T tokens of a row in one window.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train import tasks
from train.corpus import SOURCES
from train.draft import Draft

WINDOW_TOKENS = 4096
"""Tokens of one window over all its rows, always the same: what is compiled has one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """`num_windows` windows follow each other in one document; `share` is the part of tokens that get this form."""

    row_tokens: int
    num_windows: int = 1
    share: float

    @property
    def name(self) -> str:
        """Length of a document."""
        return str(self.row_tokens * self.num_windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Forms until a step; shares of rows: English, small tasks, haystack, echo; the share of tasks that are tool calls and chats only."""

    until: int
    forms: tuple[Form, ...]
    rows: tuple[float, float, float, float]
    spacing: int
    chats: float = 0.0


def forms(**shares: float) -> tuple[Form, ...]:
    """Forms by length: w256=0.5 and so on; long ones go over several windows."""
    known = {
        "w256": (256, 1), "w512": (512, 1), "w1k": (1024, 1), "w2k": (2048, 1), "w4k": (4096, 1),
        "s4k": (2048, 2), "s8k": (4096, 2), "s16k": (4096, 4)}
    return tuple(Form(row_tokens=known[name][0], num_windows=known[name][1], share=share) for name, share in shares.items())


STAGES = (
    Stage(until=250, forms=forms(w256=1.0), rows=(0.40, 0.40, 0.15, 0.05), spacing=24),
    Stage(until=500, forms=forms(w256=0.4, w512=0.6), rows=(0.45, 0.35, 0.15, 0.05), spacing=40),
    Stage(until=800, forms=forms(w256=0.1, w512=0.3, w1k=0.3, w2k=0.3), rows=(0.5, 0.3, 0.16, 0.04), spacing=80),
    Stage(until=1100, forms=forms(w512=0.25, w1k=0.25, w2k=0.2, w4k=0.15, s4k=0.15), rows=(0.5, 0.28, 0.18, 0.04), spacing=120),
    Stage(until=2690, forms=forms(w512=0.2, w1k=0.25, w2k=0.2, w4k=0.15, s8k=0.1, s16k=0.1), rows=(0.5, 0.26, 0.2, 0.04), spacing=160),
    Stage(until=10**9, forms=forms(w1k=0.5, w2k=0.35, w4k=0.15), rows=(0.3, 0.55, 0.15, 0.0), spacing=160, chats=0.85),
)


@dataclass(frozen=True, slots=True)
class Episode:
    """Windows of tokens, targets, weights [B, T] and per row what it is made of."""

    form: Form
    kinds: tuple[str, ...]
    tokens: Tensor
    weights: Tensor

    def window(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens, targets, weights) of one window."""
        first, after = index * self.form.row_tokens, (index + 1) * self.form.row_tokens
        return self.tokens[:, first:after], self.tokens[:, first + 1 : after + 1], self.weights[:, first + 1 : after + 1]


class Sampler:
    """Draws episodes; the same seed, rank and step give the same one."""

    def __init__(self, corpus: Mapping[str, bytes], seed: int, rank: int) -> None:
        self.corpus, self.seed, self.rank = corpus, seed, rank

    def episode(self, step: int) -> Episode:
        """The one that begins at this step. All ranks get the same form."""
        shared = random.Random(f"{self.seed} {step}")
        stage = next(stage for stage in STAGES if step < stage.until)
        weights = [form.share / form.num_windows for form in stage.forms]
        form = shared.choices(stage.forms, weights)[0]
        rng = random.Random(f"{self.seed} {step} {self.rank}")
        rows = [self._row(rng, stage, form) for _ in range(WINDOW_TOKENS // form.row_tokens)]
        tokens = torch.from_numpy(np.array([draft.tokens for _, draft in rows]))
        return Episode(form, tuple(kind for kind, _ in rows), tokens, torch.tensor([draft.weights for _, draft in rows]))

    def _row(self, rng: random.Random, stage: Stage, form: Form) -> tuple[str, Draft]:
        length = form.row_tokens * form.num_windows + 1
        draft = Draft()
        kind = rng.choices(("english", "tasks", "haystack", "echo"), stage.rows)[0]
        if form.num_windows > 1 and kind != "english":
            kind = "haystack"
        while len(draft.tokens) < length:
            if kind == "english":
                draft.add(self._english(rng, length))
            elif kind == "tasks":
                tasks.small_tasks(draft, rng, length, longest=form.row_tokens, chats=stage.chats)
            elif kind == "haystack":
                tasks.haystack(draft, rng, self._english(rng, length), length, spacing=max(8, round(stage.spacing * rng.choice((0.25, 0.5, 1, 2)))))
            else:
                tasks.echo(draft, rng, self._english(rng, 1024))
        del draft.tokens[length:], draft.weights[length:]
        return kind, draft

    def _english(self, rng: random.Random, length: int) -> bytes:
        source = rng.choices(SOURCES, [source.weight for source in SOURCES])[0]
        text = self.corpus[source.name]
        first = rng.randrange(len(text) - length)
        return text[first : first + length]
