"""Answers with `<think>` and the two common forms of tool calls, from text and from ids, in every split."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.text import chat
from firstlight.text.chat import Delta
from firstlight.text.tag_parser import marks_of
from firstlight.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.test_chat_k3_parser import checked, chunks, steps_of

HERMES, K2, PLAIN = (chat.load(name) for name in ("hermes", "kimi_k2", "plain"))
FORMATS = {"hermes": HERMES, "kimi_k2": K2, "plain": PLAIN}
Expected = tuple[str | None, str | None, list[tuple[str, str, str]], str]
S, E, C, A, X = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def k2(call_id: str, arguments: str) -> str:
    return f"{C}{call_id}{A}{arguments}{X}"


CASES: dict[str, tuple[str, str, str, Expected]] = {
    "plain text": ("plain", "a \n b\n", "stop", (None, "a \n b\n", [], "stop")),
    "thinking": ("hermes", "<think>\nwhy\n\nso\n</think>\n\nYes.\n", "stop", ("why\n\nso", "Yes.\n", [], "stop")),
    "blank before thinking": ("hermes", " \n<think>a</think>b", "stop", ("a", "b", [], "stop")),
    "no thinking": ("hermes", "\nYes", "stop", (None, "\nYes", [], "stop")),
    "cut inside of thinking": ("hermes", "<think>\nwhy\n", "length", ("why\n", None, [], "length")),
    "thinking ended twice": ("plain", "<think>a</think>b</think>c", "stop", ("a", "bc", [], "stop")),
    "thinking later": ("plain", "a<think>b</think>c", "stop", ("b", "ac", [], "stop")),
    "one call": ("hermes", hermes("f", '{"a": {"b": [1, "}"]}}'), "stop", (None, None, [("f:0", "f", '{"a": {"b": [1, "}"]}}')], "tool_calls")),
    "words and two calls": (
        "hermes",
        f"On it.\n{hermes('f', '{}')}\n{hermes('g', '{}')}",
        "stop",
        (None, "On it.", [("f:0", "f", "{}"), ("g:1", "g", "{}")], "tool_calls"),
    ),
    "call inside of thinking": ("hermes", f"<think>a\n{hermes('f', '{}')}", "stop", ("a", None, [("f:0", "f", "{}")], "tool_calls")),
    "arguments before the name": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1} , "id": {"x": [","]}, "name": "f"}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", '{"a": 1}')], "tool_calls"),
    ),
    "parameters, escapes, no line ends": (
        "hermes",
        '<tool_call>{"name":"\\u0066","parameters":{"a":"\\"\\\\"}}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", '{"a":"\\"\\\\"}')], "tool_calls"),
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", '{"a": 1}')], "tool_calls"),
    ),
    "no arguments": (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": null}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", "{}"), ("g:1", "g", "{}")], "tool_calls"),
    ),
    "arguments that are no object": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1, 2 ] }</tool_call>',
        "stop",
        (None, None, [("f:0", "f", "[1, 2 ]")], "tool_calls"),
    ),
    "arguments twice": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "f", "name": "g"}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", '{"a": 1}')], "tool_calls"),
    ),
    "marks inside of a string": (
        "hermes",
        hermes("f", '{"a": "<think></tool_call><tool_call>"}'),
        "stop",
        (None, None, [("f:0", "f", '{"a": "<think></tool_call><tool_call>"}')], "tool_calls"),
    ),
    "the last brace is missing": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", '{"a": 1}')], "tool_calls"),
    ),
    "the end mark is missing": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        "stop",
        (None, None, [("f:0", "f", '{"a": 1}')], "tool_calls"),
    ),
    "a call begins inside of a call": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", "{}"), ("g:1", "g", "{}")], "tool_calls"),
    ),
    "cut inside of a call": (
        "hermes",
        f'{hermes("f", "{}")}\n<tool_call>{{"name": "g", "arguments": {{"a": ',
        "length",
        (None, None, [("f:0", "f", "{}")], "length"),
    ),
    "stopped inside of a call": ("hermes", '<tool_call>{"name": "g", "arguments": {"a": [</tool_call>b', "stop", (None, "b", [], "stop")),
    "no call after all": ("hermes", "a <tool_call>what?</tool_call> b", "stop", (None, "a what? b", [], "stop")),
    "no object": ("hermes", '<tool_call>[{"name": "f"}]</tool_call>', "stop", (None, '[{"name": "f"}]', [], "stop")),
    "text behind the object": (
        "hermes",
        '<tool_call>{"name": "f"} {"name": "g"}</tool_call>',
        "stop",
        (None, None, [("f:0", "f", "{}")], "tool_calls"),
    ),
    "a mark without a call": ("hermes", "a</tool_call>b", "stop", (None, "ab", [], "stop")),
    "a section": (
        "kimi_k2",
        f"<think>why</think>\n\nOk{S}{k2('functions.f:3', ' {}')}{k2(' functions.a.b:4 ', '')}{E}",
        "stop",
        ("why", "\n\nOk", [("functions.f:3", "f", " {}"), ("functions.a.b:4", "a.b", "{}")], "tool_calls"),
    ),
    "a section inside of thinking": (
        "kimi_k2",
        f"<think>why{S} {k2('functions.f:0', '{}')} {E}",
        "stop",
        ("why", None, [("functions.f:0", "f", "{}")], "tool_calls"),
    ),
    "ids of other forms": (
        "kimi_k2",
        f"{S}{k2('f', '{}')}{k2('g:x', '{}')}{k2('', '{}')}{E}",
        "stop",
        (None, None, [("f:0", "f", "{}"), ("g:x:1", "g:x", "{}")], "tool_calls"),
    ),
    "calls without a section": ("kimi_k2", f"a{k2('functions.f:0', '{}')}", "stop", (None, "a", [("functions.f:0", "f", "{}")], "tool_calls")),
    "calls that are not closed": (
        "kimi_k2",
        f'{S}{C}functions.f:0{A}{{"a": 1}}{C}functions.g:1{A}{{"b{C}functions.h:2{A}{E}',
        "stop",
        (None, None, [("functions.f:0", "f", '{"a": 1}'), ("functions.h:2", "h", "{}")], "tool_calls"),
    ),
    "a call without arguments": ("kimi_k2", f"{S}{C}functions.f:0{X}{E}", "stop", (None, None, [("functions.f:0", "f", "{}")], "tool_calls")),
    "cut inside of arguments": (
        "kimi_k2",
        f"{S}{k2('functions.f:0', '{}')}{C}functions.g:1{A}{{}}",
        "length",
        (None, None, [("functions.f:0", "f", "{}")], "length"),
    ),
    "ended inside of arguments": ("kimi_k2", f"{S}{C}functions.g:1{A}{{}}", "stop", (None, None, [("functions.g:1", "g", "{}")], "tool_calls")),
    "text after a section": (
        "kimi_k2",
        f"{S}{k2('functions.f:0', '{}')}{E}more",
        "stop",
        (None, "more", [("functions.f:0", "f", "{}")], "tool_calls"),
    ),
    "stray marks": ("kimi_k2", f"<think>a{E}{X}{A}b</think>c{X}{A}{E}d", "stop", ("ab", "cd", [], "stop")),
    "the other form": ("kimi_k2", hermes("f", "{}"), "stop", (None, hermes("f", "{}"), [], "stop")),
}


def parse(fmt: chat.ChatFormat, pieces: Iterable[str], reason: str, **fields: Any) -> Expected:
    parser = fmt.parser(**fields)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(reason)  # type: ignore[arg-type]
    return result(deltas, parser.message)


def result(deltas: Sequence[Delta], message: chat.Message) -> Expected:
    if all(delta.tool_call is None for delta in deltas):
        checked(deltas, message)
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    for place, (call_id, _, arguments) in enumerate(calls):
        opened = next(delta.tool_call.index for delta in deltas if delta.tool_call and delta.tool_call.id == call_id)
        shown = [delta.tool_call.arguments for delta in deltas if delta.tool_call and delta.tool_call.index == opened]
        assert arguments == "".join(shown), place
    assert message.reasoning == ("".join(delta.reasoning or "" for delta in deltas) or None)
    assert message.content == ("".join(delta.content or "" for delta in deltas) or None)
    return message.reasoning, message.content, calls, message.finish_reason or ""


@pytest.mark.parametrize("name", CASES)
def test_cases_in_every_split(name: str) -> None:
    style, raw, reason, want = CASES[name]
    fmt = FORMATS[style]
    assert want == parse(fmt, [raw], reason)
    assert want == parse(fmt, raw, reason)
    for cut in range(1, len(raw)):
        assert want == parse(fmt, [raw[:cut], raw[cut:]], reason)


def test_thinking_that_the_prompt_opened_or_closed() -> None:
    assert ("why", "b", [], "stop") == parse(HERMES, ["\nwhy\n</think>\n\nb"], "stop", thinking={"type": "enabled"})
    assert (None, " b", [], "stop") == parse(HERMES, [" b"], "stop", thinking={"type": "disabled"})


def test_hidden_calls() -> None:
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        assert (None, "a", [], "stop") == parse(HERMES, [f"a{hermes('f', '{}')}"], "stop", **fields)
        assert (None, "a", [], "stop") == parse(K2, [f"a{S}{k2('functions.f:0', '{}')}{E}"], "stop", **fields)


def test_arguments_stream() -> None:
    parser = HERMES.parser()
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')
    shown = [[delta.tool_call.arguments for delta in parser.feed(letter) if delta.tool_call] for letter in '{"a": "x y"}']
    assert [[letter] for letter in '{"a": "x y"}'] == shown
    assert [] == parser.feed("}\n</tool_call>") + parser.finish("stop")
    assert "tool_calls" == parser.message.finish_reason


@pytest.fixture(scope="session")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and the marks of both forms as tokens; only the last two are hidden."""
    folder = tmp_path_factory.mktemp("marked")
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: place for place, letter in enumerate(sorted(letters))}, merges=[]))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    rules.add_tokens(
        [tokenizers.AddedToken(text, special=False) for text in (*marks_of("hermes", thinks=True), *marks_of("kimi_k2", thinks=False), "<shown>")]
    )
    rules.add_special_tokens(["<|hidden|>", "<|end|>"])
    rules.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    found = load_tokenizer(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("style", ["hermes", "kimi_k2"])
def test_cases_from_ids(style: str, marked: Tokenizer) -> None:
    fmt = chat.load(style, marked)
    draw = random.Random(3)
    for raw, reason, want in ((raw, reason, want) for kind, raw, reason, want in CASES.values() if kind == style):
        if style == "kimi_k2" and "<tool_call>" in raw:
            continue
        ids = marked.encode(raw, special=True)
        steps = [draw.randint(1, 8) for _ in ids]
        for pieces in ([ids], [[i] for i in ids], [ids[sum(steps[:place]) : sum(steps[: place + 1])] for place in range(len(steps))]):
            reader = fmt.reader()
            deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish(reason)  # type: ignore[arg-type]
            assert want == result(deltas, reader.message)


def test_only_ids_are_marks_where_the_vocabulary_has_them(marked: Tokenizer, byte_level: Tokenizer) -> None:
    typed = f"a<think>b{hermes('f', '{}')}"
    for tokenizer, shown in ((marked, typed), (byte_level, "a")):
        reader = chat.load("hermes", tokenizer).reader()
        reader.push(tokenizer.encode(typed))
        reader.finish("stop")
        assert shown == reader.message.content


def test_hidden_tokens_show_nothing_others_do(marked: Tokenizer) -> None:
    reader = chat.load("hermes", marked).reader()
    reader.push(marked.encode("a<|hidden|>b<shown>c<|end|>", special=True))
    assert "ab<shown>c" == reader.message.content


@pytest.mark.parametrize(
    ("raw", "stop", "found", "want"),
    [
        (f"a b{hermes('f', '{}')}", ["b"], "b", (None, "a ", [], "stop")),
        (hermes("f", '{"k": "abc"}'), ["name", "f", "arguments", "tool_call"], None, (None, None, [("f:0", "f", '{"k": "abc"}')], "tool_calls")),
        (hermes("f", "{}") + hermes("g", '{"k": "abc"}'), ["b"], "b", (None, None, [("f:0", "f", "{}")], "stop")),
        ("<think>ab</think>cd", ["bc", "think"], None, ("ab", "cd", [], "stop")),
        ("<think>abc</think>d", ["b"], "b", ("a", None, [], "stop")),
        ('<tool_call>{"arguments": {"k": "abc"}, "name": "g"}</tool_call>', ["b"], "b", (None, None, [], "stop")),
    ],
)
def test_stop_strings(raw: str, stop: list[str], found: str | None, want: Expected, marked: Tokenizer) -> None:
    ids = marked.encode(raw, special=True)
    for pieces in ([ids], [[i] for i in ids]):
        reader = chat.load("hermes", marked).reader(stop=stop)
        for piece in pieces:
            reader.push(piece)
        reader.finish("stop")
        message = reader.message
        assert (found, want) == (
            reader.stopped,
            (message.reasoning, message.content, [(call.id, call.name, call.arguments) for call in message.tool_calls], message.finish_reason),
        )


SOUP = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *marks_of("hermes", thinks=True),
                *marks_of("kimi_k2", thinks=False),
                '{"name": "f"',
                '"arguments": ',
                "{",
                "}",
                '"',
                "[",
                "]",
                ",",
                ":",
                "\\",
                "\n",
                "functions.f:0",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(soup=SOUP, seed=st.integers(0, 2**32), style=st.sampled_from(["hermes", "kimi_k2", "plain"]), reason=st.sampled_from(["stop", "length"]))
def test_any_text_parses_alike_in_any_split(soup: list[str], seed: int, style: str, reason: str) -> None:
    raw = "".join(soup)
    results = []
    for pieces in ([raw], list(raw), soup, chunks(list(raw), random.Random(seed))):
        parser = FORMATS[style].parser()
        for piece in pieces:
            parser.feed(piece)
        parser.finish(reason)  # type: ignore[arg-type]
        results.append(parser.message)
    assert results == results[:1] * len(results)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@settings(max_examples=150)
@given(
    name=st.text(min_size=1, max_size=6),
    arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_json_is_read(name: str, arguments: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    whole = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only, indent=indent)
    _, content, calls, finish = parse(HERMES, f"<tool_call>{whole}</tool_call>", "stop")
    assert (None, "tool_calls", [(name, arguments)]) == (content, finish, [(name, json.loads(text)) for _, name, text in calls])


def test_work_per_token_is_flat(marked: Tokenizer) -> None:
    for style, begin in (("hermes", '<tool_call>{"name": "f", "arguments": {"k": "'), ("kimi_k2", f"{S}{C}functions.f:0{A}"), ("hermes", "<think>")):
        reader = chat.load(style, marked).reader(stop=["never seen"])
        reader.push(marked.encode(begin, special=True))
        token = marked.encode("e")

        def thousand(reader: chat.Reader = reader, token: list[int] = token) -> None:
            for _ in range(1000):
                reader.push(token)

        thousand()
        early = steps_of(thousand)
        for _ in range(50):
            reader.push(token * 1000)
        assert early == steps_of(thousand)
