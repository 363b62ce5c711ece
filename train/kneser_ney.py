"""Interpolated Kneser-Ney model over bytes: the yardstick for bits per byte.

Source: Kneser and Ney 1995; interpolated form of Chen and Goodman 1998, one discount per order, n1 / (n1 + 2 n2).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ORDER = 5
Counts = NDArray[np.int64]


def _grams(text: bytes, order: int) -> Counts:
    """Every n-gram as one number, the oldest byte in the highest place."""
    raw = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    length = max(len(raw) - order + 1, 0)
    found = np.zeros(length, dtype=np.int64)
    for at in range(order):
        found = found << 8 | raw[at : at + length]
    return found


class _Level:
    """N-grams of one length with their counts; grams with one history follow each other because they are sorted."""

    def __init__(self, grams: Counts, counts: Counts) -> None:
        self.grams, self.counts = grams, counts
        ones, twos = (int((counts == wanted).sum()) for wanted in (1, 2))
        self.discount = ones / (ones + 2 * twos) if ones else 0.5
        self.histories, first = np.unique(grams >> 8, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        self.kinds = np.diff(np.append(first, len(grams)))

    def mix(self, grams: Counts, below: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of the last byte of each n-gram, given that of the next shorter one."""
        count = _lookup(self.grams, self.counts, grams)
        total, kinds = (_lookup(self.histories, values, grams >> 8) for values in (self.totals, self.kinds))
        seen = total > 0
        safe = np.where(seen, total, 1)
        mixed = (np.maximum(count - self.discount, 0) + self.discount * kinds * below) / safe
        return np.where(seen, mixed, below)


def _lookup(keys: Counts, values: Counts, wanted: Counts) -> Counts:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


class KneserNey:
    """`texts` are counted apart, so that no n-gram crosses from one into the next."""

    def __init__(self, texts: Iterable[bytes], order: int = ORDER) -> None:
        grams, counts = np.unique(np.concatenate([_grams(text, order) for text in texts]), return_counts=True)
        self.levels = [_Level(grams, counts.astype(np.int64))]
        for length in range(order - 1, 0, -1):
            # Below the top a gram counts once for every byte that was seen before it.
            grams, counts = np.unique(self.levels[-1].grams & ((1 << 8 * length) - 1), return_counts=True)
            self.levels.append(_Level(grams, counts.astype(np.int64)))
        self.levels.reverse()

    def bits(self, text: bytes) -> float:
        """Bits per byte of a text, all of its bytes counted; the first ones have short histories."""
        below = np.full(len(text), 1 / 256)
        for length, level in enumerate(self.levels, 1):
            mixed = level.mix(_grams(text, length), below[length - 1 :])
            below = np.concatenate([below[: length - 1], mixed])
        return float(-np.log2(below).mean())
