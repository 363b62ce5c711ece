"""Lengths: what is drawn stays inside, means what it says, and nonsense is refused."""

from __future__ import annotations

import random
import statistics

import pytest

from firstlight.bench.lengths import lengths
from firstlight.spec.errors import RequestError


def test_a_number_is_that_number() -> None:
    assert [128] * 3 == [lengths("128", "--x").draw(random.Random(0)) for _ in range(3)]


def test_uniform_reaches_both_ends() -> None:
    rng = random.Random(0)
    assert {2, 3, 4} == {lengths("uniform:2:4", "--x").draw(rng) for _ in range(100)}


def test_lognormal_has_its_median_and_its_most() -> None:
    rng = random.Random(0)
    drawn = [lengths("lognormal:100:0.8:300", "--x").draw(rng) for _ in range(4000)]
    assert 100 == pytest.approx(statistics.median(drawn), rel=0.05)
    assert 300 == max(drawn)
    assert 1 <= min(drawn)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "uniform:4:2", "uniform:1", "lognormal:5", "normal:3:2", "uniform:a:b", "lognormal:1:2:3:4", "3:4"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--input-tokens is"):
        lengths(text, "--input-tokens")
