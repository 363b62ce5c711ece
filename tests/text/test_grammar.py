"""Whole answers: valid always, refused in words, held token by token to what an independent validator says of the finished text."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Choice, JsonSchema, Regex, Structure
from firstlight.text import grammar as grammar_file
from firstlight.text.grammar import Grammars
from firstlight.text.grammar_schema import MAX_DEPTH, MAX_SCHEMA_BYTES
from firstlight.text.tokenizer import Tokenizer
from tests.walks import allowed, bounded, cases, follow, text_of, walk

ENDS = (257, 258)
NUM_VOCAB = 288
TEXT = {"type": "string", "maxLength": 6}
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"type": "number", "minimum": 0, "maximum": 2}},
         "required": ["x", "y"], "additionalProperties": False}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with these properties and no others, all of them required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more}


SCHEMAS: dict[str, Any] = {
    "string": TEXT,
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "boolean or null": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", "gr\u00fcn", 5, 2.5, None, True, [1, 2], {"a": "b"}, "a\"b\\c\nd\u0001"]},
    "const": closed({"kind": {"const": "circle"}, "size": {"type": "integer", "minimum": 1, "maximum": 3}}),
    "nested": closed({"a": closed({"b": closed({"c": TEXT})}), "list": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2}}),
    "optional": {
        "type": "object", "properties": {"a": TEXT, "b": {"type": "boolean"}, "c": POINT}, "required": ["b"], "additionalProperties": False},
    "definitions": {"$defs": {"p": POINT}, **closed({"from": {"$ref": "#/$defs/p"}, "to": {"$ref": "#/$defs/p"}})},
    "old definitions": {"definitions": {"p": POINT}, "type": "array", "items": {"$ref": "#/definitions/p"}, "maxItems": 2},
    "tree": {"$ref": "#/$defs/n", "$defs": {"n": {
        "type": "object", "required": ["v"], "additionalProperties": False,
        "properties": {"v": {"type": "boolean"}, "l": {"$ref": "#/$defs/n"}}}}},
    "anyOf": {"anyOf": [POINT, TEXT, {"type": "null"}]},
    "oneOf by const": {"oneOf": [closed({"k": {"const": "a"}, "v": {"type": "boolean"}}), closed({"k": {"const": "b"}, "w": TEXT})]},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]},
                        {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}}], "maxProperties": 1},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}], "items": False, "minItems": 2},
    "pattern": closed({"code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}}),
    "formats": closed({name.replace("-", "_"): {"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid")}),
    "map": {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    "odd names": closed({"": {"type": "null"}, "a b": {"type": "null"}, "\u00e9\"/\\": {"type": "null"}, "<|close|>": {"type": "null"}}),
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 3}, "minItems": 2, "maxItems": 2},
    "untyped": closed({"any": {"enum": [1, "x"]}, "deep": {"type": "object", "properties": {}, "additionalProperties": False}}),
}


@pytest.fixture(scope="module")
def small(byte_level: Tokenizer) -> Grammars:
    return Grammars(byte_level, NUM_VOCAB, ENDS)


@pytest.fixture(scope="module")
def large(kimi_k3: Tokenizer) -> Grammars:
    return Grammars(kimi_k3, 163_840, [163_586])


def valid(schema: Any, value: Any) -> bool:
    """What the library jsonschema says."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_is_valid(name: str, small: Grammars, byte_level: Tokenizer) -> None:
    """Many answers of an even draw; they are compact JSON without a line end or a tab, and not all the same."""
    grammar, texts = small.compile(JsonSchema(SCHEMAS[name])), set()
    for seed in range(12):
        tokens = walk(grammar, random.Random(f"{name}{seed}"), num_vocab=NUM_VOCAB)
        assert tokens[-1] in ENDS
        text = text_of(byte_level, tokens)
        assert valid(SCHEMAS[name], json.loads(text)), text
        assert not set("\n\r\t") & set(text) and len(text) <= 2 * len(json.dumps(json.loads(text), ensure_ascii=False))
        texts.add(text)
    assert len(texts) > 1


def test_another_schema_refuses(small: Grammars, byte_level: Tokenizer) -> None:
    """The control: answers of one schema are mostly invalid under the others, and their grammars and the validator agree on which."""
    refused = 0
    grammars = {name: small.compile(JsonSchema(schema)) for name, schema in SCHEMAS.items()}
    for name in SCHEMAS:
        tokens = walk(grammars[name], random.Random(name), num_vocab=NUM_VOCAB)
        for other, schema in SCHEMAS.items():
            taken = follow(grammars[other], tokens, NUM_VOCAB) is None
            assert not taken or valid(schema, json.loads(text_of(byte_level, tokens))), (name, other)
            refused += not taken
    assert refused > 0.9 * len(SCHEMAS) * (len(SCHEMAS) - 1)


VALUES: list[tuple[Any, list[Any]]] = [
    (POINT, [{"x": 1, "y": 0.5}, {"x": 10, "y": 0}, {"x": 1}, {"x": 1.5, "y": 1}, {"x": 1, "y": 1, "z": 1}, [], None]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3], ["1"], [None]]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "\u00e9\u00e9\u00e9", "abcd", 5]),
    ({"type": "integer", "minimum": 10, "exclusiveMaximum": 12}, [9, 10, 11, 12, "10"]),
    ({"anyOf": [{"type": "boolean"}, {"const": "x"}]}, [True, "x", "y", None, 1]),
]


@pytest.mark.parametrize(("schema", "values"), VALUES)
def test_a_grammar_takes_exactly_the_valid_values(schema: Any, values: list[Any], small: Grammars, byte_level: Tokenizer) -> None:
    grammar = small.compile(JsonSchema(schema))
    for value in values:
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            ids = [*byte_level.encode(text), ENDS[0]]
            assert valid(schema, value) == (follow(grammar, ids, NUM_VOCAB) is None), text


def test_tokens_of_a_large_vocabulary_may_hold_several_parts(large: Grammars, kimi_k3: Tokenizer) -> None:
    """The same text in any tokenization: whole words or byte by byte."""
    grammar = large.compile(JsonSchema(closed({"name": {"type": "string"}, "list": {"type": "array", "items": {"type": "integer"}}})))
    text = '{"name":"\u6797 caf\u00e9 \U0001f600","list":[1,22, 333]}'
    whole = kimi_k3.encode(text)
    letters = [token for byte in text.encode() for token in (next(t for t in range(256) if kimi_k3.token_bytes(t) == bytes([byte])),)]
    for ids in (whole, letters):
        state = grammar.begin()
        for token in [*ids, 163_586]:
            mask = state.allowed()
            assert mask is not None and mask[token >> 3] >> (token & 7) & 1
            state.accept(token)
        assert state.done
    assert len(whole) < len(letters) / 2


def test_the_end_may_come_exactly_where_the_form_is_complete(small: Grammars, byte_level: Tokenizer) -> None:
    state = small.compile(Regex("ab*")).begin()
    assert [97] == allowed(state, NUM_VOCAB) and not state.done
    state.accept(97)
    assert [98, *ENDS] == allowed(state, NUM_VOCAB)
    state.accept(98)
    state.accept(257)
    assert state.done
    state = small.compile(JsonSchema({"type": "object"})).begin()
    for token in b'{"a":[]':
        assert not set(ENDS) & set(allowed(state, NUM_VOCAB))
        state.accept(token)
    state.accept(ord("}"))
    assert list(ENDS) == allowed(state, NUM_VOCAB) and not state.done


def test_without_an_end_token_the_form_itself_is_the_end(byte_level: Tokenizer) -> None:
    grammars = Grammars(byte_level, NUM_VOCAB, [])
    state = grammars.compile(Choice(("yes", "no"))).begin()
    for token in b"no":
        assert not state.done
        assert token in allowed(state, NUM_VOCAB)
        state.accept(token)
    assert state.done


def test_control_tokens_and_ids_without_a_token_are_no_text(byte_level: Tokenizer) -> None:
    """A model whose embedding is padded, and text that may be anything."""
    grammars = Grammars(byte_level, 320, ENDS)
    state = grammars.compile(Regex("(?s:.*)")).begin()
    ascii_or_lead = [*range(0x80), *range(0xC2, 0xF5)]
    assert [*ascii_or_lead, *ENDS] == allowed(state, 320)


def test_answers_do_not_share_their_state(small: Grammars) -> None:
    grammar = small.compile(Choice(("ab", "ac")))
    one, other = grammar.begin(), grammar.begin()
    one.accept(97)
    one.accept(98)
    assert [97] == allowed(other, NUM_VOCAB) and list(ENDS) == allowed(one, NUM_VOCAB)


def test_equal_forms_are_compiled_once_and_few_are_kept(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(byte_level, NUM_VOCAB, ENDS)
    monkeypatch.setattr(grammar_file, "NUM_KEPT", 2)
    first = grammars.compile(Choice(("a",)))
    assert first is grammars.compile(Choice(["a"])) is grammars.compile(Choice(("a",)))  # type: ignore[arg-type]
    grammars.compile(Choice(("b",)))
    grammars.compile(Choice(("a",)))
    grammars.compile(Choice(("c",)))
    assert first is grammars.compile(Choice(("a",)))
    grammars.compile(Choice(("d",)))
    grammars.compile(Choice(("e",)))
    assert first is not grammars.compile(Choice(("a",)))


BAD: list[tuple[Any, str, str]] = [
    ({"type": "strin"}, "#/type", "string, number"),
    ({"type": "object", "properties": {"a/b": {"items": {"type": "string", "format": "phone"}}}}, "#/properties/a~1b/items/format", "uuid"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#/uniqueItems", "Leave it out"),
    ({"properties": {"x": {"not": {"type": "string"}}}}, "#/properties/x/not", "Leave it out"),
    ({"anyOf": [{"type": "integer"}, {"if": {}, "then": {}}]}, "#/anyOf/1/if", "Leave it out"),
    ({"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}, "#/properties/x/pattern", "look-around"),
    ({"type": "string", "pattern": "["}, "#/pattern", "RE2"),
    ({"items": {"$ref": "#/$defs/q"}, "$defs": {"q": {"items": {"type": "string", "pattern": "a(?!b)"}}}}, "#/$defs/q/items/pattern", "RE2"),
    ({"items": {"$ref": "#/$defs/gone"}}, "#/items/$ref", "#/$defs/name"),
    ({"$ref": "https://example.com/schema.json"}, "#/$ref", "inside of this schema"),
    ({"properties": {"x": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "#/properties/x/oneOf", "anyOf"),
    ({"type": "object", "properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}, "required": ["a"]}, "#/properties/a", "valid"),
    ({"enum": []}, "#", "valid"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "#", "valid"),
    (False, "#", "valid"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "valid"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#", "valid"),
    ({"type": "object", "minProperties": 2, "properties": {"a": {"type": "string"}}}, "#/minProperties", "Require all"),
    ({"type": "object", "properties": {"a": {"dependentRequired": {"b": ["c"]}}}}, "#/properties/a/dependentRequired", "Leave it out"),
    ({"type": "integer", "multipleOf": 999_983, "minimum": 1, "maximum": 10**15}, "#", "smaller"),
]


@pytest.mark.parametrize(("schema", "pointer", "fix"), BAD)
def test_what_cannot_be_enforced_is_named_with_its_place(schema: Any, pointer: str, fix: str, small: Grammars) -> None:
    with pytest.raises(RequestError) as caught:
        small.compile(JsonSchema(schema), where="`response_format`")
    assert caught.value.fact.startswith("`response_format` ") and f" at {pointer}" in caught.value.fact
    assert f"{pointer}," in caught.value.fact or f"{pointer}:" in caught.value.fact
    assert fix in caught.value.fix
    assert "%json" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_schema_that_is_not_strict_leaves_out_what_it_cannot_enforce(small: Grammars, byte_level: Tokenizer) -> None:
    """The rest is enforced; what no value can satisfy is refused all the same."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    grammar = small.compile(JsonSchema(schema, strict=False))
    assert follow(grammar, [*byte_level.encode("[1,1]"), 257], NUM_VOCAB) is None
    assert follow(grammar, [*byte_level.encode("[1,2]"), 257], NUM_VOCAB) == 3
    with pytest.raises(RequestError, match="minItems"):
        small.compile(JsonSchema({**schema, "minItems": 3}, strict=False))


def test_options_of_the_library_are_not_the_client_s(small: Grammars, byte_level: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert follow(small.compile(JsonSchema(schema)), byte_level.encode("[\n"), NUM_VOCAB) == 1
    with pytest.raises(RequestError, match="uniqueItems"):
        small.compile(JsonSchema({**schema, "uniqueItems": True}))


@pytest.mark.parametrize(("given", "fix"), [
    (lambda: JsonSchema([]), "object"), (lambda: Regex(""), "non-empty"), (lambda: Regex(5), "non-empty"), (lambda: Choice(()), "list"),
    (lambda: Choice("ab"), "list"), (lambda: Choice(("a", "")), "list"),
])
def test_a_structure_is_checked_where_it_is_made(given: Any, fix: str) -> None:
    with pytest.raises(RequestError) as caught:
        given()
    assert fix in caught.value.fix


@pytest.mark.parametrize("pattern", ["(?=a)b", "[", "a{5,2}", "(", r"(a)\1"])
def test_a_pattern_that_is_none_is_refused(pattern: str, small: Grammars) -> None:
    with pytest.raises(RequestError, match="`structured`"):
        small.compile(Regex(pattern))


@pytest.mark.parametrize("text", ['a"b\\c/d', "// # <[12]> %json", "tab\tline\n", "\u00e9\U0001f600\u2028", "<|close|>", "'", "start: r0"])
def test_any_text_can_be_an_option_or_a_pattern(text: str, small: Grammars, byte_level: Tokenizer) -> None:
    import re

    ids = [*byte_level.encode(text), 257]
    for structure in (Choice((text, "other")), Regex("".join(f"\\x{{{ord(letter):x}}}" for letter in text)), Regex(re.escape(text))):
        grammar = small.compile(structure)
        assert follow(grammar, ids, NUM_VOCAB) is None
        assert follow(grammar, [*byte_level.encode(text + "x")], NUM_VOCAB) == len(ids) - 1


def nested(depth: int, leaf: Any) -> Any:
    """An object inside of an object and so on."""
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf}, "required": ["a"]}
    return leaf


def chained(count: int) -> dict[str, Any]:
    """Definitions that double with every step when they are written out."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for index in range(1, count):
        before = {"$ref": f"#/$defs/d{index - 1}"}
        defs[f"d{index}"] = {"allOf": [{"anyOf": [before, {"type": "null"}]}, {"anyOf": [before, {"type": "integer"}]}]}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": defs}


HOSTILE: dict[str, Any] = {
    "deep": nested(400, {"type": "string"}),
    "deeper than Python": {"a": None},
    "large": {"enum": ["x" * 1000 + str(index) for index in range(200)]},
    "long": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9},
    "many items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "repeats": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"},
    "states": {"type": "string", "pattern": "^(.*a.{40}){8}$"},
    "intersections": {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]},
    "products": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)]},
    "chained": chained(30),
    "wide": {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}},
    "wide and wrong": {"properties": {f"p{index}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for index in range(1500)}, "not": {}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_bounded(name: str, small: Grammars) -> None:
    """Refused in words, or compiled and then walked without an endless step; either way within the default timeout many times over."""
    schema: Any = HOSTILE[name]
    if name == "deeper than Python":
        for _ in range(5000):
            schema = {"items": schema}
    begun_s = time.perf_counter()
    try:
        state = small.compile(JsonSchema(schema)).begin()
        rng = random.Random(name)
        for _ in range(40):
            if state.done:
                break
            state.accept(rng.choice(allowed(state, NUM_VOCAB)))
    except RequestError as error:
        assert len(str(error)) < 600
    print(f"{name}: {time.perf_counter() - begun_s:.2f} s")


def test_limits_say_what_they_are(small: Grammars) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_DEPTH} levels"):
        small.compile(JsonSchema(HOSTILE["deep"]))
    with pytest.raises(RequestError, match=f"at most {MAX_SCHEMA_BYTES:,}"):
        small.compile(JsonSchema(HOSTILE["large"]))
    with pytest.raises(RequestError, match=f"at most {MAX_SCHEMA_BYTES:,}"):
        small.compile(Regex("a" * (MAX_SCHEMA_BYTES + 1)))
    with pytest.raises(RequestError, match="no JSON"):
        small.compile(JsonSchema({"enum": [object()]}))


def test_a_dead_end_is_an_error_in_words(small: Grammars) -> None:
    """Reached by whoever chose a token that was not allowed; only that answer is lost."""
    grammar = small.compile(Choice(("ab",)))
    state, other = grammar.begin(), grammar.begin()
    state.accept(98)
    with pytest.raises(RequestError, match="left its structure with token 98"):
        state.allowed()
    state.accept(97)
    assert not state.done
    assert [97] == allowed(other, NUM_VOCAB)


def test_a_step_that_costs_too_much_is_an_error_in_words(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammar_file, "_LIMITS", LLParserLimits(max_items_in_row=40, verbose_errors=False))
    grammars = Grammars(byte_level, NUM_VOCAB, ENDS)
    structure: Structure = JsonSchema({"type": "object", "properties": {f"p{index}": {"type": "null"} for index in range(200)}})
    with pytest.raises(RequestError, match=r"(cannot be enforced|cannot go on).*max is 40"):
        state = grammars.compile(structure).begin()
        for token in b'{"p0":null':
            state.allowed()
            state.accept(token)


@pytest.mark.parametrize("case", cases()[::10], ids=lambda case: str(case["id"]))
def test_functions_of_a_leaderboard_are_always_answered_well(case: dict[str, Any], small: Grammars, byte_level: Tokenizer) -> None:
    rng = random.Random(case["id"])
    for function in case["functions"]:
        schema = bounded(function["parameters"])
        text = text_of(byte_level, walk(small.compile(JsonSchema(schema)), rng, num_vocab=NUM_VOCAB))
        assert valid(schema, json.loads(text)), text
