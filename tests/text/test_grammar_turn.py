"""Chat messages: drawn evenly from the grammar, read back by the format's own reader, and valid; thinking stays free."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Choice, JsonSchema
from firstlight.text.grammar import Grammars
from firstlight.text.grammar_turn import MAX_CALLS, Tool, Turn
from firstlight.text.k3_format import KimiK3Format
from firstlight.text.reader import Reader
from firstlight.text.tag_calls import HermesCalls, KimiK2Calls
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.zone import Zone
from tests.walks import allowed, bounded, cases, follow, walk

NUM_VOCAB = 288
ENDS = (257, 258)
END, OPEN, CLOSE, SEP = 258, 259, 260, 261
SHORT = {"type": "string", "maxLength": 5}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
MESSAGES = [{"role": "user", "content": "x"}]
OFF = {"thinking": {"type": "disabled"}}
TAIL = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
TOOLS_OPEN = "<|close|>response<|sep|><|open|>tools<|sep|>"
TOOLS_CLOSE = "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


def parameters(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """Parameters of a tool."""
    return {"type": "object", "properties": properties, "required": list(required), **more}


PARAMETERS: dict[str, Any] = {
    "none": None,
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "strings": parameters({"a": SHORT, "b": {"type": "string", "enum": ["x", "", "a\"b\\<|close|>"]}, "c": {"const": "only"}}, "a", "c"),
    "numbers": parameters({"i": SMALL, "n": {"type": "number", "minimum": 0, "maximum": 1}, "e": {"enum": [1, 2.5]}}, "i", "n", "e"),
    "booleans": parameters({"t": {"type": "boolean"}, "z": {"type": "null"}}, "t"),
    "containers": parameters({"o": {"type": "object", "properties": {"s": SHORT}, "required": ["s"], "additionalProperties": False},
                              "l": {"type": "array", "items": SHORT, "maxItems": 2}}, "o", "l"),
    "types": parameters({
        "a": {"type": ["string", "null"], "maxLength": 3}, "b": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 9}}, "a", "b"),
    "anyOf": parameters({"a": {"anyOf": [SHORT, SMALL, {"type": "null"}]}}, "a"),
    "oneOf": parameters({"a": {"oneOf": [SHORT, {"type": "boolean"}]}}, "a"),
    "mixed enum": parameters({"a": {"enum": ["x", 1, None, True, [1], {"k": "v"}]}}, "a"),
    "enum of a type": parameters({"a": {"type": "string", "enum": ["x", 1]}, "b": {"type": ["integer", "null"], "enum": [1, 1.5, None]}}, "a", "b"),
    "pattern": parameters({"a": {"type": "string", "pattern": "^[a-c]{2,4}$"}, "b": {"type": "string", "pattern": "\\d", "maxLength": 3}}, "a", "b"),
    "formats": parameters({name: {"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid")}, "date", "uuid"),
    "references": parameters({"a": {"$ref": "#/$defs/s"}, "b": {"type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2}}, "a", "b",
                             **{"$defs": {"s": SHORT}}),
    "extra": parameters({"a": SMALL}, additionalProperties=SMALL),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "odd keys": parameters({"a&b": SMALL, "q\"k\"": SMALL, "\u00e9 ": SMALL}, "a&b", "q\"k\"", "\u00e9 "),
    "root reference": {"$ref": "#/$defs/r", "$defs": {"r": parameters({"a": SMALL}, "a", additionalProperties=False)}},
    "required unlisted": parameters({"a": SMALL}, "a", "b", additionalProperties=SMALL),
    "alternatives": {"anyOf": [parameters({"a": SMALL}, "a", additionalProperties=False), parameters({"b": SHORT}, "b", additionalProperties=False)]},
    "counted": {"type": "object", "additionalProperties": SMALL, "minProperties": 1, "maxProperties": 2},
    "self": parameters({"a": {"type": "boolean"}, "next": {"$ref": "#"}}, "a", additionalProperties=False),
    "anchors within": parameters({"a": {"type": "string", "pattern": "^a|b$", "maxLength": 3}}, "a"),
}
WHOLE = {"alternatives", "counted", "self", "anchors within"}
"""Those that the elements of single arguments cannot express; they come as one object."""


@pytest.fixture(scope="module")
def small(byte_level: Tokenizer) -> Grammars:
    return Grammars(byte_level, NUM_VOCAB, ENDS)


@pytest.fixture(scope="module")
def k3(byte_level: Tokenizer) -> KimiK3Format:
    return KimiK3Format(byte_level)


def read(reader: Reader, tokens: list[int]) -> Any:
    """The message that tokens make."""
    reader.push(tokens)
    reader.finish("stop")
    return reader.message


def tool_list(tools: dict[str, Any]) -> list[dict[str, Any]]:
    """As a request sends them."""
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]


def checked_call(call: Any, tools: dict[str, Any]) -> None:
    """Arguments of a call, by a validator that knows nothing of grammars."""
    jsonschema.Draft202012Validator(tools[call.name] or {"type": "object"}).validate(json.loads(call.arguments))


@pytest.mark.parametrize("name", PARAMETERS)
def test_calls_are_read_back_and_valid(name: str, small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    tools = {"f": PARAMETERS[name]}
    # A tool without parameters takes any object, which no even draw completes soon.
    turn = Turn(tools=(Tool(name="f", parameters=PARAMETERS[name] or PARAMETERS["no properties"], strict=True),), calls="required")
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **OFF), turn)
    seen = set()
    for seed in range(8):
        tokens = walk(grammar, random.Random(f"{name}{seed}"), num_vocab=NUM_VOCAB)
        message = read(k3.reader(tool_list(tools), messages=MESSAGES, **OFF), tokens)
        assert ("tool_calls", None, None) == (message.finish_reason, message.content, message.reasoning)
        assert message.tool_calls and {"f"} == {call.name for call in message.tool_calls}
        for call in message.tool_calls:
            checked_call(call, tools)
        text = byte_level.decode(tokens)
        assert (name in WHOLE) == ('json type="object"' in text), text
        seen.add(text)
    assert len(seen) > 1


def said(name: str, number: int, *arguments: tuple[str, str, str]) -> str:
    """A call as Kimi K3 writes it."""
    written = "".join(f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>' for key, kind, value in arguments)
    return f'<|open|>call tool="{name}" index="{number}"<|sep|>{written}<|close|>call<|sep|>'


BOTH = (Tool(name="f", parameters=parameters({"s": SHORT, "n": SMALL, "o": {"type": "boolean"}}, "s", "n"), strict=True), Tool(name="g"))
F = said("f", 1, ("s", "string", "hi"), ("n", "number", "3"))

TAKEN = {
    "one": F,
    "optional argument": said("f", 1, ("s", "string", "hi"), ("n", "number", "3"), ("o", "boolean", "true")),
    "empty string": said("f", 1, ("s", "string", ""), ("n", "number", "3")),
    "markup in a string": said("f", 1, ("s", "string", "<|x|"), ("n", "number", "3")),
    "two": F + said("g", 2),
    "same tool again": F + said("f", 2, ("s", "string", ""), ("n", "number", "0")),
    "free arguments": said("g", 1, ("any", "array", '[1, {"a": null}]'), ("other", "string", "text")),
}
REFUSED = {
    "nothing": "",
    "required argument missing": said("f", 1, ("s", "string", "hi")),
    "order": said("f", 1, ("n", "number", "3"), ("s", "string", "hi")),
    "type": said("f", 1, ("s", "number", "3"), ("n", "number", "3")),
    "value": said("f", 1, ("s", "string", "hi"), ("n", "number", "10")),
    "too long": said("f", 1, ("s", "string", "123456"), ("n", "number", "3")),
    "unknown argument": said("f", 1, ("s", "string", "hi"), ("n", "number", "3"), ("q", "null", "null")),
    "twice": said("f", 1, ("s", "string", "hi"), ("s", "string", "hi"), ("n", "number", "3")),
    "unknown tool": said("h", 1),
    "first number": said("g", 2),
    "next number": said("g", 1) + said("g", 3),
    "white space": " " + F,
    "between calls": F + "\n" + said("g", 2),
    "not closed": F.removesuffix("<|close|>call<|sep|>"),
    "line end in JSON": said("g", 1, ("any", "array", "[\n1]")),
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_required_calls_have_exactly_the_model_s_form(name: str, small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    text = {**TAKEN, **REFUSED}[name]
    for thinks in (True, False):
        zone = k3.zone(messages=MESSAGES, **({} if thinks else OFF))
        grammar = small.compile_turn(zone, Turn(tools=BOTH, calls="required"))
        head = "Let me see.<|close|>think<|sep|><|open|>response<|sep|>" if thinks else ""
        ids = byte_level.encode(head + TOOLS_OPEN + text + TOOLS_CLOSE, special=True)
        assert (name in TAKEN) == (follow(grammar, ids, NUM_VOCAB) is None)


def test_one_call_where_calls_are_not_parallel(small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    zone = k3.zone(messages=MESSAGES, **OFF)
    two = byte_level.encode(TOOLS_OPEN + F + said("g", 2) + TOOLS_CLOSE, special=True)
    assert follow(small.compile_turn(zone, Turn(tools=BOTH, calls="required")), two, NUM_VOCAB) is None
    assert follow(small.compile_turn(zone, Turn(tools=BOTH, calls="required", parallel=False)), two, NUM_VOCAB) is not None


def test_numbered_calls_end_somewhere(small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **OFF), Turn(tools=(Tool(name="g"),), calls="required"))
    for count, fits in ((MAX_CALLS, True), (MAX_CALLS + 1, False)):
        text = TOOLS_OPEN + "".join(said("g", number + 1) for number in range(count)) + TOOLS_CLOSE
        assert fits == (follow(grammar, byte_level.encode(text, special=True), NUM_VOCAB) is None)


def test_thinking_is_free_but_for_ends_and_marks(small: Grammars, k3: KimiK3Format) -> None:
    """Any bytes, valid text or not; the mark that closes it wakes the grammar."""
    zone = k3.zone(messages=MESSAGES)
    grammar = small.compile_turn(zone, Turn(body=JsonSchema({"type": "object"})))
    state = grammar.begin()
    assert not state.active
    rng = random.Random(5)
    for token in [0xFF, 0xC3, *(rng.randrange(256) for _ in range(200)), ord("{")]:
        assert [*range(256), CLOSE] == allowed(state, NUM_VOCAB)
        state.accept(token)
    state.accept(CLOSE)
    assert state.active and not state.done
    for token in [*b"think", SEP, OPEN, *b"response", SEP, ord("{")]:
        assert [token] == allowed(state, NUM_VOCAB)
        state.accept(token)
    assert [ord('"'), ord("}")] == allowed(state, NUM_VOCAB)


@pytest.mark.parametrize("thinks", [True, False])
def test_a_body_follows_its_form_and_then_the_message_ends(thinks: bool, small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    fields = {} if thinks else OFF
    schema = parameters({"a": SHORT, "n": SMALL}, "a", "n", additionalProperties=False)
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **fields), Turn(body=JsonSchema(schema)))
    head = byte_level.encode("Hm\u00e9.<|close|>think<|sep|><|open|>response<|sep|>" if thinks else "", special=True)
    for seed in range(6):
        state, tokens, rng = grammar.begin(), list(head), random.Random(seed)
        for token in head:
            state.accept(token)
        while not state.done:
            tokens.append(rng.choice(allowed(state, NUM_VOCAB)))
            state.accept(tokens[-1])
        message = read(k3.reader(messages=MESSAGES, **fields), tokens)
        assert ("stop", "Hm\u00e9." if thinks else None, ()) == (message.finish_reason, message.reasoning, message.tool_calls)
        jsonschema.validate(json.loads(message.content), schema)
    for wrong in ("x{", "<|close|>", "<|end_of_msg|>", "```json\n{", " {"):
        assert len(head) == follow(grammar, [*head, *byte_level.encode(wrong, special=True)], NUM_VOCAB)


def test_an_answer_may_be_text_or_strict_calls(small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    """tool_choice auto: text is free, what opens the tools follows the schemas."""
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **OFF), Turn(tools=BOTH, calls="optional"))
    for text, taken in (
        ("Hello {[<|x" + TAIL, True), ("" + TAIL, True), ("On it." + TOOLS_OPEN + F + TOOLS_CLOSE, True),
        (TOOLS_OPEN + F + said("g", 2) + TOOLS_CLOSE, True), ("On it." + TOOLS_OPEN + said("h", 1) + TOOLS_CLOSE, False),
        ("On it." + TOOLS_OPEN + REFUSED["value"] + TOOLS_CLOSE, False), ("Hello<|end_of_msg|>", False), ("Hello<|open|>tools", False),
    ):
        assert taken == (follow(grammar, byte_level.encode(text, special=True), NUM_VOCAB) is None), text


def test_a_form_and_tools_together(small: Grammars, k3: KimiK3Format, byte_level: Tokenizer) -> None:
    """The body has its form, or calls come in its place."""
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **OFF), Turn(body=Choice(("yes", "no")), tools=BOTH, calls="optional"))
    for text, taken in (
        ("yes" + TAIL, True), ("perhaps" + TAIL, False), (TAIL, False), (TOOLS_OPEN + F + TOOLS_CLOSE, True),
        ("no" + TOOLS_OPEN + F + TOOLS_CLOSE, True), ("On it." + TOOLS_OPEN + F + TOOLS_CLOSE, False),
    ):
        assert taken == (follow(grammar, byte_level.encode(text, special=True), NUM_VOCAB) is None), text


def plain_zone(**changes: Any) -> Zone:
    """A format whose calls are JSON."""
    found = Zone(
        thinking="none", think_open=(), think_close=(), banned_thinking=frozenset(), body_open=(), body_close=(), message_close=(),
        banned_body=frozenset(), end_ids=frozenset({END}), calls=HermesCalls({}))
    return replace(found, **changes)


IDS = {"<tool_call>": 270, "</tool_call>": 271, "<|tool_calls_section_begin|>": 272, "<|tool_calls_section_end|>": 273, "<|tool_call_begin|>": 274,
       "<|tool_call_argument_begin|>": 275, "<|tool_call_end|>": 276}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "a", "n": 1}}\n</tool_call>'
K2 = ('<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s":"a","n":1}<|tool_call_end|>'
      '<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>')


def spelled(text: str, ids: dict[str, int]) -> list[int]:
    """Bytes as ids, and marks by their ids where they have some."""
    found: list[int] = []
    while text:
        mark = next((mark for mark in ids if text.startswith(mark)), None)
        found += [ids[mark]] if mark else list(text[0].encode())
        text = text[len(mark) if mark else 1 :]
    return [*found, END]


@pytest.mark.parametrize("ids", [{}, IDS], ids=["marks as text", "marks as tokens"])
def test_calls_as_json(ids: dict[str, int], small: Grammars) -> None:
    """Forced and strict calls of formats with JSON arguments, whether or not the vocabulary has their marks as tokens."""
    forms = {"hermes": HermesCalls(ids), "k2": KimiK2Calls(ids)}
    good = {"hermes": [HERMES, HERMES + "\n" + HERMES.replace('"f"', '"g"').replace('{"s": "a", "n": 1}', "{}")], "k2": [K2]}
    for name, form in forms.items():
        forced = small.compile_turn(plain_zone(calls=form), Turn(tools=BOTH, calls="required"))
        free = small.compile_turn(plain_zone(calls=form), Turn(tools=BOTH, calls="optional"))
        for text in good[name]:
            assert follow(forced, spelled(text, ids), NUM_VOCAB) is None
            assert follow(free, spelled("Sure: " + text, ids), NUM_VOCAB) is None
            for wrong in (text.replace('"n": 1', '"n": 11').replace('"n":1', '"n":11'), text.replace("f", "h"), text + "x", "x" + text):
                assert follow(forced, spelled(wrong, ids), NUM_VOCAB) is not None
            assert follow(free, spelled("Sure: " + text.replace('"n": 1', '"n": 11').replace('"n":1', '"n":11'), ids), NUM_VOCAB) is not None
        assert follow(free, spelled("Just text < { ", ids), NUM_VOCAB) is None
        assert follow(forced, spelled("Just text", ids), NUM_VOCAB) == 0


def test_optional_and_open_thinking_in_text_marks(small: Grammars) -> None:
    """Models that begin to think on their own, or whose mark is no token: the form starts after the mark, wherever it is."""
    body = Turn(body=Choice(("yes", "no")))
    optional = small.compile_turn(plain_zone(thinking="optional", think_open=("<think>",), think_close=("</think>",), body_open=("\n\n",)), body)
    opened = small.compile_turn(plain_zone(thinking="open", think_close=("</think>",), body_open=("\n\n",)), body)
    as_ids = small.compile_turn(plain_zone(thinking="optional", think_open=(270,), think_close=(271,), body_open=("\n\n",)), body)
    for grammar, ids, taken, refused in (
        (optional, {}, ["yes", "<think>yes or</thinx></think>\n\nno"], ["<think>no", "<think></think>no", "maybe", "thinking</think>\n\nyes"]),
        (opened, {}, ["so</think>\n\nyes", "</think>\n\nno"], ["yes", "so</think>\n\nmaybe", "so</think>yes"]),
        (as_ids, {"<think>": 270, "</think>": 271}, ["no", "<think>a</think>\n\nyes"], ["<think>yes", "<think><think></think>\n\nyes"]),
    ):
        for text in taken:
            assert follow(grammar, spelled(text, ids), NUM_VOCAB) is None, text
        for text in refused:
            assert follow(grammar, spelled(text, ids), NUM_VOCAB) is not None, text


def test_a_model_without_calls_says_so(small: Grammars) -> None:
    with pytest.raises(RequestError, match="writes no calls"):
        small.compile_turn(plain_zone(calls=None), Turn(tools=BOTH, calls="required"))


def test_a_strict_tool_that_cannot_be_enforced_is_named(small: Grammars, k3: KimiK3Format) -> None:
    bad = parameters({"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}, "tags")
    with pytest.raises(RequestError, match=r"`tools`: `parameters` of 'f' uses `uniqueItems` at #/properties/tags/uniqueItems"):
        small.compile_turn(k3.zone(messages=MESSAGES), Turn(tools=(Tool(name="f", parameters=bad, strict=True),), calls="optional"))


def test_a_tool_that_is_not_strict_keeps_what_can_be_enforced(
    small: Grammars, k3: KimiK3Format, byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Schemas that others wrote come with patterns and enums that nothing can satisfy; the call is forced all the same, and the log says it."""
    schema = parameters({
        "n": SMALL, "p": {"type": "string", "pattern": "^(?=a)"}, "e": {"type": "array", "items": SHORT, "enum": ["a", "b"]}}, "n", "p", "e")
    grammar = small.compile_turn(k3.zone(messages=MESSAGES, **OFF), Turn(tools=(Tool(name="f", parameters=schema),), calls="required"))
    assert {"#/properties/p", "#/properties/e"} == {record.args[1] for record in caplog.records if isinstance(record.args, tuple)}
    for number, taken in (("3", True), ("30", False)):
        call = said("f", 1, ("n", "number", number), ("p", "string", "any"), ("e", "string", "a"))
        assert taken == (follow(grammar, byte_level.encode(TOOLS_OPEN + call + TOOLS_CLOSE, special=True), NUM_VOCAB) is None)


def answered(case: dict[str, Any], small: Grammars, k3: KimiK3Format, calls: str) -> int:
    """Calls of one case of the leaderboard, all read back and valid."""
    tools = {function["name"]: bounded(function["parameters"]) for function in case["functions"]}
    turn = Turn(tools=tuple(Tool(name=name, parameters=schema, strict=True) for name, schema in tools.items()), calls="required")
    fields = {**OFF, "tool_choice": "required"}
    grammar = small.compile_turn(k3.zone(tool_list(tools), messages=MESSAGES, **fields), turn)
    tokens = walk(grammar, random.Random(calls + case["id"]), num_vocab=NUM_VOCAB)
    message = read(k3.reader(tool_list(tools), messages=MESSAGES, **fields), tokens)
    assert "tool_calls" == message.finish_reason
    for call in message.tool_calls:
        checked_call(call, tools)
    return len(message.tool_calls)


@pytest.mark.parametrize("case", cases()[5::12], ids=lambda case: str(case["id"]))
def test_functions_of_a_leaderboard_are_called_well(case: dict[str, Any], small: Grammars, k3: KimiK3Format) -> None:
    assert answered(case, small, k3, "a") >= 1


@pytest.mark.slow
def test_all_functions_of_a_leaderboard_are_called_well(small: Grammars, k3: KimiK3Format) -> None:
    counts = [answered(case, small, k3, "b") for case in cases()]
    assert 200 == len(counts) and sum(counts) > 300
