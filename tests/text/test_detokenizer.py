"""Text as it comes: final pieces only, stop strings wherever tokens are cut, the same work for the last token as for the first."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.spec.errors import RequestError
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.tokenizer import Tokenizer

FAMILY = "x\U0001F469\u200D\U0001F469\u200D\U0001F467 \u65E5\u672C \u00F1"


class Pieces:
    """A tokenizer whose token i is piece i."""

    bos_id = eos_id = None
    prefix_ids: tuple[int, ...] = ()

    def __init__(self, pieces: Sequence[bytes | str], hidden: Iterable[int] = ()) -> None:
        self.spellings = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.hidden_ids = frozenset(hidden)
        self.special_ids: Mapping[str, int] = {}
        self.num_vocab = len(self.spellings)
        self.num_spelled = 0

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raise AssertionError("a detokenizer never encodes")

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        raise AssertionError("a detokenizer never decodes a whole sequence")

    def token_bytes(self, token_id: int) -> bytes:
        self.num_spelled += 1
        return self.spellings[token_id]


def stream(pieces: Sequence[bytes | str], *, stop: Sequence[str] = (), **options: Any) -> tuple[list[str], str | None]:
    """Deltas of all pieces and of the end, and the stop string that was met."""
    detokenizer = Detokenizer(Pieces(pieces), stop=stop, **options)
    deltas = [detokenizer.feed(token_id) for token_id in range(len(pieces))]
    return [*deltas, detokenizer.finish()], detokenizer.stopped


def splits(whole: bytes, draw: random.Random) -> list[bytes]:
    """The bytes cut at random places."""
    cuts = sorted(draw.sample(range(len(whole) + 1), draw.randint(0, min(len(whole), 12))))
    return [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def test_byte_by_byte() -> None:
    deltas, _ = stream([bytes([byte]) for byte in FAMILY.encode()])
    assert FAMILY == "".join(deltas)
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(FAMILY) == sum(map(bool, deltas))


def test_every_split_in_two_and_three() -> None:
    whole = FAMILY.encode()
    for first in range(len(whole) + 1):
        for second in range(first, len(whole) + 1):
            deltas, _ = stream([whole[:first], whole[first:second], whole[second:]])
            assert FAMILY == "".join(deltas)
            assert not any("\ufffd" in delta for delta in deltas)
            assert whole[:first].decode(errors="ignore") == deltas[0], "what is complete is not held back"


def test_random_splits() -> None:
    draw = random.Random(5)
    for _ in range(500):
        deltas, _ = stream(splits(FAMILY.encode(), draw))
        assert FAMILY == "".join(deltas)
        assert not any("\ufffd" in delta for delta in deltas)


def test_real_tokenizers(tokenizer: Tokenizer) -> None:
    for text in (FAMILY, "你好世界 \U0001f600" * 20, "<|open|>\ufffd literal \ufffd"):
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        deltas = [*map(detokenizer.feed, ids), detokenizer.finish()]
        assert text == "".join(deltas)
        assert text.count("\ufffd") == sum(delta.count("\ufffd") for delta in deltas)


def test_random_ids_equal_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(11)
    for skip_special in (False, True):
        for _ in range(100):
            ids = [draw.randrange(tokenizer.num_vocab) for _ in range(draw.randint(0, 60))]
            detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
            assert tokenizer.decode(ids, skip_special=skip_special) == "".join([*map(detokenizer.feed, ids), detokenizer.finish()])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=5), st.sampled_from([b"\xf0\x9f", b"\xe6\x97", b"\xed\xa0", b"\xf4\x90", b"\xc0\x80", b"\xff", b"a"]))))
def test_random_bytes_equal_the_whole(pieces: list[bytes]) -> None:
    whole = b"".join(pieces).decode("utf-8", "replace")
    deltas, _ = stream(pieces)
    assert whole == "".join(deltas)


def test_a_cut_character_is_told_at_the_end_only() -> None:
    assert (["a", "", "", "\ufffd"], None) == stream([b"a", b"\xf0\x9f", b"\x91"])
    assert (["a", "", "\ufffdb", ""], None) == stream([b"a", b"\xf0\x9f", b"b"]), "certain as soon as it cannot go on"
    assert (["\ufffd\ufffd", ""], None) == stream([b"\xff\xfe"])


def test_hidden_tokens_leave_no_trace() -> None:
    pieces = Pieces([b"\xe6", b"<|end|>", b"\x97\xa5"], hidden=[1])
    detokenizer = Detokenizer(pieces)
    assert ["", "", "\u65e5"] == [detokenizer.feed(token_id) for token_id in range(3)]
    shown = Detokenizer(pieces, skip_special=False)
    assert ["", "\ufffd<|end|>", "\ufffd\ufffd"] == [shown.feed(token_id) for token_id in range(3)]


def test_unknown_ids_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="token id 288"):
        Detokenizer(byte_level).feed(288)


# Stop strings.


@pytest.mark.parametrize(("pieces", "stop", "text", "stopped"), [
    (["Hello ", "wo", "rld", "!"], ["world"], "Hello ", "world"),
    (["a", "<", "|e", "nd|", "> tail"], ["<|end|>"], "a", "<|end|>"),
    (["ab", "c"], ["abc"], "", "abc"),
    (["one\n", "\ntwo"], ["\n\n"], "one", "\n\n"),
    (["a STOP b STOP"], ["STOP"], "a ", "STOP"),
    (["never"], ["STOP"], "never", None),
    (["STO"], ["STOP"], "STO", None),
    (["x"], [], "x", None),
])
def test_stop_strings(pieces: list[str], stop: list[str], text: str, stopped: str | None) -> None:
    deltas, met = stream(pieces, stop=stop)
    assert (text, stopped) == ("".join(deltas), met)


def test_what_cannot_match_any_more_is_released() -> None:
    deltas, _ = stream(["a<", "|", "x", "<|e", "nd", "<", "|end|>"], stop=["<|end|>"])
    assert ["a", "", "<|x", "", "", "<|end", "", ""] == deltas


def test_a_match_may_begin_inside_a_failed_one() -> None:
    assert (["", "a", "", ""], "aab") == stream(["aa", "a", "b"], stop=["aab"])
    assert (["na", "na", "", ""], "nanano") == stream(["nanana", "nan", "o"], stop=["nanano"])


def test_leftmost_match_wins() -> None:
    for pieces in (["say hello world now"], ["say hel", "lo wor", "ld now"], list("say hello world now")):
        deltas, met = stream(pieces, stop=["world", "hello world"])
        assert ("say ", "hello world") == ("".join(deltas), met)
    for pieces in (["xabcdefg"], list("xabcdefg"), ["xab", "cd", "efg"]):
        deltas, met = stream(pieces, stop=["bcd", "abcde"])
        assert ("x", "abcde") == ("".join(deltas), met), "the match that ended first began later"
    for pieces in (["xabcdX"], list("xabcdX")):
        deltas, met = stream(pieces, stop=["bcd", "abcde"])
        assert ("xa", "bcd") == ("".join(deltas), met), "the match that began first was none"
    assert (["x", "a"], "bcd") == stream(["xabcd"], stop=["bcd", "abcde"]), "nothing follows that could complete the longer one"


def test_nothing_after_a_stop() -> None:
    detokenizer = Detokenizer(Pieces(["ab", "STOP", "more"]), stop=["STOP"])
    assert ["ab", "", "", ""] == [*map(detokenizer.feed, range(3)), detokenizer.finish()]
    assert "STOP" == detokenizer.stopped


def test_include_stop() -> None:
    for pieces in (["ab STOP cd"], list("ab STOP cd")):
        assert "ab STOP" == "".join(stream(pieces, stop=["STOP"], include_stop=True)[0])


def test_stop_at_a_cut_character() -> None:
    assert (["a", "", "", ""], "\u65e5") == stream([b"a\xe6", b"\x97", b"\xa5b"], stop=["\u65e5"])
    assert ["", "\ufffd"] == stream([b"\xe6\x97"], stop=["\u65e5"])[0]


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4), st.booleans(),
)
def test_any_split_equals_the_whole(pieces: list[str], stop: list[str], include_stop: bool) -> None:
    """The oracle looks at the whole text: the smallest place where any stop string stands, the shortest one there."""
    whole = "".join(pieces)
    places = sorted((whole.find(item), len(item)) for item in stop if item in whole)
    want = whole[: places[0][0] + (places[0][1] if include_stop else 0)] if places else whole
    deltas, met = stream(pieces, stop=stop, include_stop=include_stop)
    assert want == "".join(deltas)
    assert (whole[places[0][0] : sum(places[0])] if places else None) == met


# Work per token.


def calls_of(work: Any) -> int:
    """Function calls made by some work, C functions included."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("stop", [[], ["<|end|>", "\n\n\n", "ababab"]], ids=["plain", "stops"])
def test_work_does_not_grow_with_the_text(stop: list[str]) -> None:
    """Same calls, same bytes asked for, nothing kept: token 100,000 costs what token 1,000 cost."""
    pieces = Pieces(["ab", " <|en", "\u65e5", b"\xf0\x9f", b"\x91\xa9", "\n\n", "d"])
    detokenizer = Detokenizer(pieces, stop=stop)
    period = [*range(len(pieces.spellings))] * 20
    feed = lambda: [detokenizer.feed(token_id) for token_id in period]  # noqa: E731
    counts, held = [], []
    for num_tokens in range(0, 100_000, len(period)):
        if num_tokens in (0, 980, 49_980, 99_960):
            pieces.num_spelled = 0
            counts.append(calls_of(feed))
            assert len(period) == pieces.num_spelled
            held.append(sum(len(getattr(part, "_held", "")) for part in (detokenizer._stops,) if part))
        else:
            feed()
    assert 4 == len(counts)
    assert 1 == len(set(counts)), counts
    assert max(held) < 8


@pytest.mark.slow
def test_time_does_not_grow_with_the_text(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=["\n\n", "<|end|>"])
    ids = list("The light of the first hour. \u65e5\u672c ".encode()) * 30
    times_s = []
    for _ in range(120):
        begun_s = time.process_time()
        for token_id in ids:
            detokenizer.feed(token_id)
        times_s.append(time.process_time() - begun_s)
    assert min(times_s[-20:]) < 1.5 * min(times_s[:20])
