"""Answers of Kimi K3: streamed is whole, for every way to cut the text; marks that models leave out; stop strings; ids."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.spec.errors import RequestError
from firstlight.text import chat
from firstlight.text.chat import Delta, Message
from firstlight.text.tokenizer import Tokenizer
from tests.text.conftest import FILES

CASES = json.loads((FILES.parent / "chat" / "k3_parser_cases.json").read_text(encoding="utf-8"))
MARKS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
BY_MARK = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")
K3 = chat.load("kimi_k3")


def o(name: str, /, **attributes: str) -> str:
    return f"<|open|>{name}{''.join(f' {key}={chr(34)}{value}{chr(34)}' for key, value in attributes.items())}<|sep|>"


def c(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def call(name: str, inner: str = "", index: int = 1) -> str:
    return o("call", tool=name, index=str(index)) + inner + c("call")


def arg(key: str, value: str, kind: str = "string") -> str:
    return o("argument", key=key, type=kind) + value + c("argument")


END = c("message") + "<|end_of_msg|>"
ANSWER = c("think") + o("response") + c("response")


def parse(pieces: Iterable[str], reason: str = "stop", fmt: chat.ChatFormat = K3, **fields: Any) -> Message:
    """The message, after checking that the deltas add up to it."""
    parser = fmt.parser(**fields)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(reason)  # type: ignore[arg-type]
    return checked(deltas, parser.message)


def checked(deltas: Sequence[Delta], message: Message, *, replayed: bool = False) -> Message:
    """The message, when the deltas say the same; calls that were cut may have deltas, but only as the last ones."""
    for delta in deltas:
        given = [value for value in (delta.reasoning, delta.content, delta.tool_call) if value is not None]
        assert 1 == len(given)
        assert given[0] != ""
    if not replayed:
        assert message.reasoning == ("".join(delta.reasoning or "" for delta in deltas) or None)
    assert message.content == ("".join(delta.content or "" for delta in deltas) or None)
    calls: list[dict[str, str]] = []
    for delta in (delta.tool_call for delta in deltas if delta.tool_call):
        if delta.id is not None:
            assert (len(calls), "") == (delta.index, delta.arguments)
            calls.append({"id": delta.id, "name": delta.name or "", "arguments": ""})
        else:
            assert (len(calls) - 1, None) == (delta.index, delta.name)
            assert delta.arguments
            calls[-1]["arguments"] += delta.arguments
    kept = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    assert kept == calls[: len(kept)]
    assert len(calls) - len(kept) <= 1
    return message


def plain(message: Message) -> dict[str, Any]:
    """A message with the arguments of its calls as values."""
    calls = [{"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
    return {"reasoning": message.reasoning, "content": message.content, "tool_calls": calls, "finish_reason": message.finish_reason}


def expected(case: Mapping[str, Any]) -> dict[str, Any]:
    calls = [{**call, "arguments": json.loads(call["arguments"])} for call in case["expected"]["tool_calls"]]
    return {**case["expected"], "tool_calls": calls}


def fields_of(case: Mapping[str, Any]) -> dict[str, Any]:
    thinking = {} if case["start"] == "think" else {"thinking": {"type": "disabled"}}
    return {"reason": {"eos": "stop"}.get(case["end"], case["end"]), "tool_choice": case["tool_choice"], **thinking}


def items(raw: str) -> list[str]:
    """Control tokens whole, everything else letter by letter."""
    return [item for piece in BY_MARK.split(raw) for item in ([piece] if piece in MARKS else piece)]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_cases_whole_and_in_every_split(case: Mapping[str, Any]) -> None:
    raw, fields = case["raw"], fields_of(case)
    assert expected(case) == plain(parse([raw], **fields))
    assert expected(case) == plain(parse(items(raw), **fields))
    assert expected(case) == plain(parse(raw, **fields))
    for cut in range(1, len(raw)):
        assert expected(case) == plain(parse([raw[:cut], raw[cut:]], **fields))
    draw = random.Random(7)
    for _ in range(20):
        assert expected(case) == plain(parse(chunks(items(raw), draw), **fields))


def chunks(whole: Sequence[str], draw: random.Random) -> list[str]:
    """Joined pieces of 1 to 8 items."""
    pieces, begin = [], 0
    while begin < len(whole):
        end = begin + draw.randint(1, 8)
        pieces.append("".join(whole[begin:end]))
        begin = end
    return pieces


Expected = tuple[str | None, str | None, list[tuple[str, str]]]


def called(*pieces: str) -> str:
    """An answer that thinks nothing, says nothing and calls tools."""
    return ANSWER + o("tools") + "".join(pieces) + END


def made(**calls: str) -> Expected:
    """Nothing but calls, by name with their arguments."""
    return None, None, list(calls.items())


DEVIANT: dict[str, tuple[str, Expected]] = {
    "thinking was skipped": (f"Hello{c('response')}{END}", (None, "Hello", [])),
    "a response cannot be skipped thinking twice": (f"a{c('think')}{o('think')}b{c('response')}c{END}", ("abc", None, [])),
    "think opened again": (f"{o('think')}a{c('think')}{o('response')}b{o('think')}c{c('think')}{o('response')}d{END}", ("ac", "bd", [])),
    "message closed inside think": (f"a{END}", ("a", None, [])),
    "response closed by the end token alone": (f"a{c('think')}{o('response')}b<|end_of_msg|>", ("a", "b", [])),
    "blank text between elements": (f"a{c('think')}\n\n{o('response')}b{c('response')} \n{END}", ("a", "b", [])),
    "text after think without a response": (f"a{c('think')} \n b{END}", ("a", " \n b", [])),
    "blank text after think": (f"a{c('think')} \n{END}", ("a", None, [])),
    "the frame is repeated": (o("message", role="assistant") + o("think") + f"a{c('think')}{o('response')}b{END}", ("a", "b", [])),
    "another message begins": (f"a{c('think')}{o('response')}b{o('message', role='user')}c", ("a", "b", [])),
    "nothing is read after the end": (f"a{c('think')}{o('response')}b{END}c{o('response')}d", ("a", "b", [])),
    "stray marks": (f"a<|sep|>b{c('call')}{c('tools')}{c('argument')}c{END}", ("abc", None, [])),
    "a tag that nobody knows": (f"a{o('audio', x='1')}b{c('video')}c{o('th')}d{END}", ("abcd", None, [])),
    "blanks around names": (f"a<|close|> think\n<|sep|><|open|>  response <|sep|>b{END}", ("a", "b", [])),
    "a bare mark is no tag": ("a<|open|>, b <|close|>!", ("a, b !", None, [])),
    "marks without their end": (f"a<|close|>think<|open|>response<|close|>response{c('message')}", ("a", None, [])),
    "text follows at once": (f"a<|close|>think<|open|>responseYes<|close|>response{END}", ("a", "Yes", [])),
    "unfinished headers": (f"a{c('think')}{o('response')}b<|open|>call tool=<|close|>response<|open|>tool", ("a", "b", [])),
    "blank content beside a call": (f"a{c('think')}{o('response')} \n{c('response')}{o('tools')}{call('f')}{END}", ("a", None, [("f", "{}")])),
    "blank content alone": (f"{c('think')}{o('response')} \n{END}", (None, " \n", [])),
    "a call without tools": (f"a{call('f', arg('k', 'v'))}{END}", ("a", None, [("f", '{"k": "v"}')])),
    "calls that are not closed": (
        called(o("call", tool="f"), arg("k", "1", "number"), call("g", arg("k", "v")), c("tools")),
        made(f='{"k": 1}', g='{"k": "v"}'),
    ),
    "values that are not closed": (
        called(
            o("call", tool="f"),
            o("argument", key="a"),
            "x",
            o("argument", key="b", type="number"),
            "2",
            c("call"),
            o("call", tool="g"),
            o("argument", key="c"),
            "y",
            call("h"),
        ),
        made(f='{"a": "x", "b": 2}', g='{"c": "y"}', h="{}"),
    ),
    "the message ends inside a call": (called(o("call", tool="f"), arg("k", "v")), made(f='{"k": "v"}')),
    "the tools end inside a value": (called(call("e"), o("call", tool="f"), o("argument", key="k"), "v", c("tools"), call("g")), made(e="{}")),
    "a call without a name": (called(o("call"), arg("k", "v"), c("call"), call("g")), made(g="{}")),
    "an argument without a key": (called(call("f", o("argument") + "x" + c("argument") + arg("k", "v"))), made(f='{"k": "v"}')),
    "attributes in any order, type left out": (
        called(
            '<|open|>call index="1"  tool="f" <|sep|>',
            o("argument", type="number", key="k"),
            "1",
            c("argument"),
            o("argument", key="l"),
            "1",
            c("json"),
            c("call"),
        ),
        made(f='{"k": 1, "l": "1"}'),
    ),
    "values that are no JSON": (
        called(call("f", arg("a", "NaN", "number") + arg("b", "tru", "boolean") + arg("c", "", "object") + arg("d", "[" * 9999, "array"))),
        made(f=json.dumps({"a": "NaN", "b": "tru", "c": "", "d": "[" * 9999})),
    ),
    "literals stay": (
        called(call("f", arg("a", " 1e2 ", "number") + arg("b", "9" * 5000, "number"))),
        made(f='{"a":  1e2 , "b": ' + "9" * 5000 + "}"),
    ),
    "a key twice": (called(call("f", arg("a", "1") + arg("a", "2"))), made(f='{"a": "1", "a": "2"}')),
    "arguments in one": (
        called(call("f", o("json", type="object") + ' {"a":1}' + c("json")), call("g", o("json") + " " + c("json"))),
        made(f=' {"a":1}', g=" {}"),
    ),
    "arguments in one that are a value of another kind": (
        called(*(call("f", o("json") + raw + c("json")) for raw in ("[1]", ' "x"', "5", "null", "[1", "NaN", ""))),
        (None, None, [("f", raw) for raw in ('{"json": [1]}', '{"json":  "x"}', '{"json": 5}', "{}", "[1", "NaN", "{}")]),
    ),
    "arguments in one and one by one": (
        called(call("f", o("json") + "{}" + c("json") + arg("a", "1")), call("g", arg("a", "1") + o("json") + "{}" + c("json"))),
        made(f="{}", g='{"a": "1"}'),
    ),
    "text between calls": (called(" one ", call("f", " x " + arg("a", "1") + "y"), " two "), made(f='{"a": "1"}')),
    "channels inside a value": (called(call("f", arg("a", "x" + o("think") + c("response") + o("tools") + "y"))), made(f='{"a": "xy"}')),
}


@pytest.mark.parametrize("name", DEVIANT)
def test_deviant_answers(name: str) -> None:
    raw, (reasoning, content, calls) = DEVIANT[name]
    finish = "tool_calls" if calls else "stop"
    replayed = name == "thinking was skipped"
    short = [""] if len(raw) > 2000 else raw
    for pieces in ([raw], items(raw), *([raw[:cut], raw[cut:]] for cut in range(1, len(short)))):
        parser = K3.parser()
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish("stop")
        message = checked(deltas, parser.message, replayed=replayed)
        got = (message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls], message.finish_reason)
        assert (reasoning, content, calls, finish) == got
        assert [f"{call.name}:{place}" for place, call in enumerate(message.tool_calls)] == [call.id for call in message.tool_calls]
        if replayed:
            assert "Hello" == "".join(delta.reasoning or "" for delta in deltas)


@pytest.mark.parametrize(
    ("raw", "reason", "calls", "finish"),
    [
        (f"{ANSWER}{o('tools')}{call('f')}", "length", ["f"], "length"),
        (f"{ANSWER}{o('tools')}{call('f')}", "abort", ["f"], "stop"),
        (f"{ANSWER}{o('tools')}{call('f')}", "error", ["f"], "stop"),
        (f"{ANSWER}{o('tools')}{call('f')}", "stop", ["f"], "tool_calls"),
        (f'{ANSWER}{o("tools")}{call("f")}<|open|>call tool="g"<|sep|>', "length", ["f"], "length"),
        (f'{ANSWER}{o("tools")}{call("f")}<|open|>call tool="g"<|sep|>', "stop", ["f", "g"], "tool_calls"),
        (f'{ANSWER}{o("tools")}<|open|>call tool="g"<|sep|><|close|>call', "length", ["g"], "length"),
        (f'{ANSWER}{o("tools")}<|open|>call tool="g"<|sep|>{o("argument", key="k")}v', "stop", [], "stop"),
    ],
)
def test_how_the_engine_ended(raw: str, reason: str, calls: list[str], finish: str) -> None:
    message = parse([raw], reason)
    assert (calls, finish) == ([call.name for call in message.tool_calls], message.finish_reason)


def test_no_tools_or_none_wanted_hides_calls() -> None:
    raw = f"{ANSWER}{o('tools')}{call('f')}{END}"
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        parser = K3.parser(**fields)
        assert [] == parser.feed(raw) + parser.finish("stop")
        assert ((), "stop") == (parser.message.tool_calls, parser.message.finish_reason)
    assert 1 == len(parse([raw]).tool_calls) == len(parse([raw], tools=[{}]).tool_calls)


def test_options_are_checked() -> None:
    for fields, fact in (
        ({"stop": [""]}, "`stop` is"),
        ({"stop": 5}, "`stop` is 5"),
        ({"tool_call_ids": "odd"}, "`tool_call_ids` is 'odd'"),
        ({"include_stop": 1}, "`include_stop` is 1"),
    ):
        with pytest.raises(RequestError, match=fact):
            K3.parser(**fields)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="an answer ended with 'eos'. Use one of stop, length, abort, error"):
        K3.parser().finish("eos")  # type: ignore[arg-type]


def test_stop_strings_in_text() -> None:
    for stop in ("two", ["two", "x"]):
        parser = K3.parser(stop=stop)
        assert [Delta(reasoning="one ")] == parser.feed("one two three") + parser.finish("stop")
        assert "two" == parser.stopped


def test_before_the_end_a_message_has_no_reason() -> None:
    parser = K3.parser()
    parser.feed("abc")
    assert Message(reasoning="abc", content=None, tool_calls=(), finish_reason=None) == parser.message


def test_strings_stream_and_other_values_wait() -> None:
    parser = K3.parser()
    opened = parser.feed(f'{ANSWER}{o("tools")}<|open|>call tool="f"<|sep|>')
    assert [("f:0", "f", "")] == [(d.tool_call.id, d.tool_call.name, d.tool_call.arguments) for d in opened if d.tool_call]
    shown = parser.feed('<|open|>argument key="k"<|sep|>')
    for letter in 'a"\n\u00e9':
        shown += parser.feed(letter)
    assert ['{"k": "', "a", '\\"', "\\n", "\u00e9"] == [delta.tool_call.arguments for delta in shown if delta.tool_call]
    assert ['"'] == [delta.tool_call.arguments for delta in parser.feed(c("argument")) if delta.tool_call]
    assert [] == parser.feed('<|open|>argument key="n" type="number"<|sep|>12')
    assert [', "n": 12'] == [delta.tool_call.arguments for delta in parser.feed(c("argument")) if delta.tool_call]


def test_nothing_is_held_back_without_need() -> None:
    parser = K3.parser()
    for letter in "reasoning \n":
        assert [Delta(reasoning=letter)] == parser.feed(letter)
    parser.feed(c("think") + o("response"))
    assert [] == parser.feed(" ") + parser.feed("\n")
    assert [Delta(content=" \na")] == parser.feed("a")
    for letter in " b\n<x|":
        parser.feed(letter)
    assert [] == parser.feed("<")
    assert [Delta(content="<y")] == parser.feed("y")


SOUP = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *MARKS,
                "think",
                "response",
                "tools",
                "call",
                "argument",
                "json",
                "message",
                ' tool="f"',
                ' key="k"',
                ' type="number"',
                " ",
                "\n",
                "1",
                '"',
            ]
        ),
        st.text(max_size=5),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(soup=SOUP, seed=st.integers(0, 2**32), thinks=st.booleans(), reason=st.sampled_from(["stop", "length", "abort"]))
def test_any_text_parses_alike_in_any_split(soup: list[str], seed: int, thinks: bool, reason: str) -> None:
    raw = "".join(soup)
    fields: dict[str, Any] = {} if thinks else {"thinking": {"type": "disabled"}}
    results = []
    for pieces in ([raw], list(raw), items(raw), chunks(list(raw), random.Random(seed)), soup):
        parser = K3.parser(**fields)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(reason)  # type: ignore[arg-type]
        results.append(checked(deltas, parser.message, replayed=True))
    assert results == results[:1] * len(results)
    shown = [results[0].reasoning or "", results[0].content or "", *(call.arguments for call in results[0].tool_calls)]
    assert not any(mark in text for mark in MARKS for text in shown)


@settings(max_examples=200)
@given(soup=SOUP, names=st.lists(st.text(min_size=1, max_size=6), max_size=2), values=st.lists(st.text(max_size=12), max_size=3))
def test_what_was_rendered_is_parsed_again(soup: list[str], names: list[str], values: list[str]) -> None:
    """The format's own writing of an answer gives the same answer back; marks inside of text are left out, as text cannot hold them here."""
    clean = [BY_MARK.sub("", text) for text in ("".join(soup), *names, *values)]
    text, names, values = clean[0], clean[1 : 1 + len(names)], clean[1 + len(names) :]
    arguments = {f"k{place}": value for place, value in enumerate(values)} | {"n": 1.5, "o": {"a": [None, True]}}
    calls = [{"id": "x", "function": {"name": name, "arguments": arguments}} for name in names if name]
    turn = {"role": "assistant", "reasoning_content": text, "content": text, "tool_calls": calls}
    whole = K3.render_text([turn], add_generation_prompt=False)
    raw = whole.partition(o("message", role="assistant") + o("think"))[2]
    if "<|" in text or any("<|" in value for value in (*names, *values)):
        return
    message = parse([raw])
    assert (text if text.strip() else None) == message.reasoning
    assert (text or None) == message.content or (not text.strip() and calls)
    assert [(call["function"]["name"], arguments) for call in calls] == [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def ids_of(tokenizer: Tokenizer, raw: str) -> list[int]:
    return [i for piece in BY_MARK.split(raw) for i in ([tokenizer.special_ids[piece]] if piece in MARKS else tokenizer.encode(piece))]


def read(fmt: chat.ChatFormat, pieces: Iterable[Sequence[int]], reason: str = "stop", **options: Any) -> tuple[Message, str | None]:
    reader = fmt.reader(**options)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish(reason)  # type: ignore[arg-type]
    return checked(deltas, reader.message, replayed=True), reader.stopped


@pytest.mark.parametrize("name", ["kimi_k3", "byte_level"])
def test_cases_from_ids(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    fmt = chat.load("kimi_k3", tokenizer)
    draw = random.Random(11)
    for case in CASES:
        fields = fields_of(case)
        ids = ids_of(tokenizer, case["raw"])
        splits = [[ids], [[i] for i in ids], *([ids[:cut], ids[cut:]] for cut in range(1, len(ids), 7))]
        steps = [draw.randint(1, 8) for _ in ids]
        splits.append([ids[sum(steps[:place]) : sum(steps[: place + 1])] for place in range(len(steps))])
        for pieces in splits:
            assert expected(case) == plain(read(fmt, pieces, **fields)[0])


@pytest.mark.parametrize("name", ["P01", "P03", "P04", "P13"])
def test_an_answer_sent_back_renders_to_the_same_ids(name: str, kimi_k3: Tokenizer) -> None:
    """So the next turn finds prompt and answer in the prefix cache."""
    fmt = chat.load("kimi_k3", kimi_k3)
    user = {"role": "user", "content": "x"}
    ids = ids_of(kimi_k3, next(case["raw"] for case in CASES if case["name"] == name))
    message, _ = read(fmt, [ids])
    calls = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls]
    sent = {"role": "assistant", "reasoning_content": message.reasoning, "content": message.content, "tool_calls": calls}
    before = fmt.render([user])
    after = fmt.render([user, sent, user])
    assert [*before, *ids] == after[: len(before) + len(ids)]


UNWRITTEN = [
    "[1]", '"x"', "5", "null", "", '{"a":1', '{"a":NaN}', '{"a":"\\ud800"}', '"\\ud800"', '{"a":' * 900 + "1" + "}" * 900, "[" * 900 + "]" * 900,
]
"""Values of a json element that are no object, no JSON, or cannot be written again."""


@pytest.mark.parametrize("raw", UNWRITTEN, ids=range(len(UNWRITTEN)))
def test_whatever_a_call_holds_can_be_sent_back(raw: str, kimi_k3: Tokenizer) -> None:
    """Refused in the history, it would end the conversation; text that goes out unchanged is rendered unchanged."""
    fmt = chat.load("kimi_k3", kimi_k3)
    typed = arg("k", raw, "object")
    for inner in (o("json", type="object") + raw + c("json"), typed):
        ids = ids_of(kimi_k3, called(call("f", inner)))
        message = read(fmt, [ids])[0]
        assert message == read(fmt, [[token] for token in ids])[0]
        (made_call,) = message.tool_calls
        function = {"name": made_call.name, "arguments": made_call.arguments}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": made_call.id, "function": function}]}]
        shown = fmt.render_text(turns, add_generation_prompt=False)
        assert fmt.render(turns)
        if inner != typed and made_call.arguments == raw:
            assert inner in shown


def test_the_end_token_may_be_kept_back_by_the_engine(kimi_k3: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", kimi_k3)
    for case in CASES:
        ids = [i for i in ids_of(kimi_k3, case["raw"]) if i not in fmt.end_ids]
        assert expected(case) == plain(read(fmt, [ids], **fields_of(case))[0])


def test_only_ids_are_marks(kimi_k3: Tokenizer) -> None:
    """The same letters made of ordinary tokens are text, so that a model can write about its format."""
    fmt = chat.load("kimi_k3", kimi_k3)
    typed = f"It writes {o('tools')}{call('f')} and {c('think')}<|end_of_msg|>"
    ids = [*kimi_k3.encode(typed), *ids_of(kimi_k3, c("think") + o("response")), *kimi_k3.encode(typed)]
    message, _ = read(fmt, [[i] for i in ids])
    assert (typed, typed, ()) == (message.reasoning, message.content, message.tool_calls)


def test_marks_are_told_from_text(kimi_k3: Tokenizer) -> None:
    """Who ends an answer at a token of their own leaves it out, unless the format reads it."""
    reader = chat.load("kimi_k3", kimi_k3).reader()
    assert all(reader.marks(kimi_k3.special_ids[mark]) for mark in MARKS)
    assert not any(reader.marks(token) for token in kimi_k3.encode("Hello, world"))


def test_control_tokens_of_other_kinds_show_nothing(kimi_k3: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", kimi_k3)
    others = [i for text, i in kimi_k3.special_ids.items() if text not in MARKS and i not in fmt.end_ids]
    message, _ = read(fmt, [[*kimi_k3.encode("a"), *others, *kimi_k3.encode("b")]])
    assert "ab" == message.reasoning
    ended, _ = read(fmt, [[*kimi_k3.encode("a"), kimi_k3.special_ids["[EOS]"], *kimi_k3.encode("b")]])
    assert "a" == ended.reasoning


def test_characters_come_whole(byte_level: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", byte_level)
    text = "x\U0001f469\u200d\U0001f467 \u65e5\u672c \u00f1"
    reader = fmt.reader()
    deltas = [delta for i in byte_level.encode(text) for delta in reader.push([i])]
    assert list(text) == [delta.reasoning for delta in deltas]
    cut = fmt.reader()
    cut.push(byte_level.encode("a\u65e5")[:-1])
    cut.push([byte_level.special_ids["<|close|>"]])
    cut.finish("length")
    assert "a\ufffd" == cut.message.reasoning


@pytest.mark.parametrize(
    ("raw", "stop", "found", "result"),
    [
        ("one two three", ["two"], "two", ("one ", None, ())),
        ("one two three", ["e t", "two"], "e t", ("on", None, ())),
        ("one two three", ["x", "two thr", "wo t"], "two thr", ("one ", None, ())),
        (f"one{c('think')}{o('response')}two{END}", ["think", "response", "onetwo", "<|", "sep"], None, ("one", "two", ())),
        (f"one{c('think')}{o('response')}two three{END}", ["three"], "three", ("one", "two ", ())),
        (f"one{c('think')}{o('response')}two{c('response')}{o('tools')}{call('f')}{END}", ["two"], "two", ("one", None, ())),
        (f"{ANSWER}{o('tools')}{call('f')}{call('g', arg('k', 'abc'))}{call('h')}{END}", ["b"], "b", (None, None, ("f",))),
        (f"{ANSWER}{o('tools')}{call('f')}{call('g', arg('k', 'abc'))}{END}", ["f", "g", "k", "call"], None, (None, None, ("f", "g"))),
        (f"a{c('think')}{o('response')}b{END}", ["a<|close|>", "ab"], None, ("a", "b", ())),
        (f"ab{c('think')}{o('response')}b{END}", ["abc", "ab"], "ab", (None, None, ())),
    ],
)
def test_stop_strings_act_on_visible_text(raw: str, stop: list[str], found: str | None, result: Any, byte_level: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", byte_level)
    ids = ids_of(byte_level, raw)
    for pieces in ([ids], [[i] for i in ids]):
        message, stopped = read(fmt, pieces, stop=stop)
        assert found == stopped
        assert result == (message.reasoning, message.content, tuple(call.name for call in message.tool_calls))
        assert ("tool_calls" if result[2] and found is None else "stop") == message.finish_reason
        if found:
            shown, _ = read(fmt, pieces, stop=stop, include_stop=True)
            assert found in (shown.reasoning or "") + (shown.content or "") or result[2]


def test_text_that_might_have_been_a_stop_is_released(byte_level: Tokenizer) -> None:
    reader = chat.load("kimi_k3", byte_level).reader(stop=["stop it"])
    assert [Delta(reasoning="please ")] == reader.push(byte_level.encode("please stop "))
    assert [Delta(reasoning="stop n")] == reader.push(byte_level.encode("n"))
    assert [] == reader.push(byte_level.encode("stop i"))
    assert [Delta(reasoning="stop i")] == reader.finish("length")


def test_ids_are_of_the_turn_or_of_the_conversation(kimi_k3: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", kimi_k3)
    ids = ids_of(kimi_k3, f"{ANSWER}{o('tools')}{call('f')}{call('f', index=2)}{END}")

    def turn(*call_ids: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in call_ids]}

    for messages, unique in (([turn("f:0", "f:1")], ["f:2", "f:3"]), ([turn("a"), turn("f:7", "f:x")], ["f:8", "f:9"]), (None, ["f:0", "f:1"])):
        got = {kind: [call.id for call in read(fmt, [ids], messages=messages, tool_call_ids=kind)[0].tool_calls] for kind in ("native", "unique")}
        assert {"native": ["f:0", "f:1"], "unique": unique} == got


def test_going_on_from_a_message_begins_in_its_channel(kimi_k3: Tokenizer) -> None:
    fmt = chat.load("kimi_k3", kimi_k3)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So", "partial": True}]
    reader = fmt.reader(messages=turns)
    assert reader.answering
    reader.push(kimi_k3.encode(" far"))
    assert " far" == reader.message.content
    assert not fmt.reader(messages=turns[:1]).answering


def test_answering_says_when_thinking_is_over(kimi_k3: Tokenizer) -> None:
    reader = chat.load("kimi_k3", kimi_k3).reader()
    states = []
    for raw in ("a", c("think"), o("response"), "b"):
        reader.push(ids_of(kimi_k3, raw))
        states.append(reader.answering)
    assert [False, False, True, True] == states


def steps_of(run: Any) -> int:
    """Lines of ours and calls that a run takes; a count, because clocks of busy machines lie."""
    num = 0

    def tracer(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num
        num += 1
        return tracer

    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(None)
    return num


@pytest.mark.parametrize("place", ["think", "response", "string", "typed", "blank"])
def test_work_per_token_is_flat(place: str, byte_level: Tokenizer) -> None:
    """As many steps for the last thousand tokens of 100,000 as for the second thousand, and no text that grows is touched again."""
    fmt = chat.load("kimi_k3", byte_level)
    reader = fmt.reader(stop=["never seen"])
    begin = {
        "think": "",
        "response": c("think") + o("response"),
        "blank": c("think"),
        "string": f'{ANSWER}{o("tools")}<|open|>call tool="f"<|sep|><|open|>argument key="k"<|sep|>',
        "typed": f'{ANSWER}{o("tools")}<|open|>call tool="f"<|sep|><|open|>argument key="k" type="array"<|sep|>',
    }[place]
    reader.push(ids_of(byte_level, begin))
    token = byte_level.encode(" " if place == "blank" else "e")

    def thousand() -> None:
        for _ in range(1000):
            reader.push(token)

    thousand()
    early = steps_of(thousand)
    for _ in range(97):
        reader.push(token * 1000)
    late = steps_of(thousand)
    assert early == late
    assert early < 200_000


def test_the_example_of_the_document_runs() -> None:
    document = (FILES.parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/chat.md", "exec"), {})
