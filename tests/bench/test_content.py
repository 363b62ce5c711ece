"""Contents: one name is one text, other names part at once, and what would blur them is refused."""

from __future__ import annotations

import itertools

import pytest

from firstlight.bench.content import WORDS, Content
from firstlight.spec.errors import RequestError


def test_the_words_are_what_they_promise() -> None:
    assert 256 == len(set(WORDS)) == len(WORDS)
    assert {4} == {len(word) for word in WORDS}


def test_a_name_is_one_text_in_every_process_and_another_with_another_seed() -> None:
    assert Content(3, None).piece(77, 40) == Content(3, None).piece(77, 40)
    assert Content(3, None).piece(77, 40)[:2] != Content(4, None).piece(77, 40)[:2]


@pytest.mark.parametrize("ids", [None, range(7), range(1000, 200_000)])
def test_names_differ_from_the_first_symbols_on(ids: range | None) -> None:
    content = Content(0, ids)
    digits = 5 if ids == range(7) else 3
    made = [tuple(content.piece(name, 5)[:digits]) for name in range(3000)]
    assert len(made) == len(set(made))
    assert all(first[0] != second[0] for first, second in itertools.pairwise(made))


def test_a_shorter_piece_is_the_beginning_of_a_longer_one() -> None:
    content = Content(0, range(50))
    assert content.piece(9, 200_000)[:300] == content.piece(9, 300)
    assert 200_000 == len(content.piece(9, 200_000))


def test_lengths_follow_the_tokens_of_a_symbol() -> None:
    content = Content(0, None, tokens_per_symbol=5.0)
    text = content.joined([(1, 100.0), (2, 50.0)])
    assert isinstance(text, str)
    assert (30, " ") == (len(text.split()), text[0])


def test_ids_stay_in_their_range() -> None:
    made = Content(0, range(1000, 1100)).joined([(5, 500.0)])
    assert isinstance(made, list)
    assert set(made) <= set(range(1000, 1100))
    assert 500 == len(made)


def test_too_short_blocks_are_refused() -> None:
    content = Content(0, range(10))
    content.check(99, 2)
    with pytest.raises(RequestError, match="too few to tell 100 blocks apart"):
        content.check(100, 2)
