"""The arguments of a tool call as a grammar: one JSON object, or an element with a type per argument and string values as raw text.

A schema that says more than which argument has which values (alternatives of required keys, numbers of keys ...) is kept whole: then all
arguments are written as one JSON object, which every format can.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from firstlight.text.grammar_rules import Rules, joined, literal, marks, one_of
from firstlight.text.grammar_schema import at, verdict
from firstlight.text.grammar_strings import raw_string
from firstlight.text.zone import CallForm, Pieces

_KINDS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null", "object": "object", "array": "array"}
_ALL_TYPES = ("string", "number", "boolean", "null", "object", "array")
_SPLIT_ROOT = frozenset({"type", "properties", "required", "additionalProperties"})
_WORDS = frozenset({
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "properties", "patternProperties",
    "additionalProperties", "required", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
})
"""Keywords that a value can violate; any other one is a note."""

_MAX_HOPS = 16
_ANY_KEY = "any-key"


class _WholeOnly(Exception):
    """The schema cannot be told argument by argument."""


def arguments(rules: Rules, form: CallForm, schema: Any, *, strict: bool) -> str:
    """A rule for all arguments of one call under the schema of its parameters."""
    schema = _closed(schema)
    if form.style == "elements":
        before = rules.count
        try:
            return _Elements(rules, form, schema, strict).all()
        except _WholeOnly:
            rules.forget(before)
    whole = rules.json(schema, strict=strict)
    return whole if form.style == "json" else rules.rule(joined(marks(form.raw_begin), whole, marks(form.raw_end)))


def _closed(schema: Any) -> Any:
    """An object schema; arguments that it neither lists nor speaks of do not come."""
    if not isinstance(schema, Mapping):
        return {"type": "object"} if schema is None or schema is True else schema
    if "$ref" in schema:
        return schema
    types = schema.get("type", "object")
    schema = {**schema, "type": "object" if isinstance(types, list) and "object" in types else types}
    listed = schema.get("properties")
    plain = not _asserted(schema) - {"type", "properties", "required"}
    if plain and isinstance(listed, Mapping) and listed and all(name in listed for name in schema.get("required", [])):
        return {**schema, "additionalProperties": False}
    return schema


class _Elements:
    """One call's arguments, element by element, in the order in which the schema lists them."""

    def __init__(self, rules: Rules, form: CallForm, schema: Any, strict: bool) -> None:
        self._rules, self._form, self._root, self._strict = rules, form, schema, strict

    def all(self) -> str:
        schema = self._resolved(self._root)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", not properties)
        if schema.get("type") != "object" or _asserted(schema) - _SPLIT_ROOT:
            raise _WholeOnly
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _WholeOnly
        unlisted = {name: True if others is False else others for name in required if name not in properties}
        parts = []
        for name, value in [*properties.items(), *unlisted.items()]:
            choices = self._choices(name, value)
            if not choices and name in required:
                raise _WholeOnly
            if choices:
                element = self._rules.rule(one_of(choices))
                parts.append(element if name in required else f"{element}?")
        if others is not False:
            parts.append(f"{self._others(others, [*properties, *unlisted])}*")
        return self._rules.rule(joined(*parts) or '""')

    def _choices(self, name: str, value: Any) -> list[str]:
        """The element of one argument, once for every type that its value may have."""
        return [
            joined(marks(self._form.argument_begin(name, kind)), rule, marks(self._form.argument_end)) for kind, rule in self._values(value)
        ]

    def _others(self, value: Any, listed: Iterable[str]) -> str:
        """An argument that the schema does not list; its key needs no escapes."""
        excluded = "|".join(f"(?:{''.join(_plain(letter) for letter in name)})" for name in listed)
        key = self._rules.terminal('/[^"&<>\\x00-\\x1f]{1,64}/' + (f" & ~/(?:{excluded})/" if excluded else ""))
        end = marks(self._form.argument_end)
        elements = [joined(_around(self._form.argument_begin(_ANY_KEY, kind), key), rule, end) for kind, rule in self._values(value)]
        return self._rules.rule(one_of(elements))

    def _values(self, value: Any) -> list[tuple[str, str]]:
        """Kinds of a value, with a rule for each.

        Raises: _WholeOnly when the kinds cannot be told apart.
        """
        schema = self._resolved({} if value is True else {"enum": []} if value is False else value)
        asserted = _asserted(schema)
        if asserted & {"enum", "const"}:
            return self._listed(schema, asserted)
        for key in ("anyOf", "oneOf"):
            if asserted == {key} and isinstance(schema[key], list):
                found = [pair for branch in schema[key] for pair in self._values(branch)]
                if key == "oneOf" and len({kind for kind, _ in found}) < len(found):
                    raise _WholeOnly
                return found
        if asserted == {"allOf"} and len(schema["allOf"]) == 1:
            return self._values(schema["allOf"][0])
        types = schema.get("type", _ALL_TYPES)
        names: list[str] = [types] if isinstance(types, str) else list(types)
        if any(name not in _KINDS for name in names):
            raise _WholeOnly
        return [pair for name in names for pair in self._typed(name, schema, alone=len(names) == 1)]

    def _typed(self, name: str, schema: Mapping[str, Any], *, alone: bool) -> list[tuple[str, str]]:
        if name == "string":
            rule = raw_string(self._rules, {key: schema[key] for key in _asserted(schema) - {"type"}}, strict=self._strict)
            if rule is None:
                raise _WholeOnly
            return [(name, rule)]
        narrowed = self._with_definitions({**schema, "type": name})
        if not alone and verdict(narrowed, strict=self._strict) is not None:
            return []
        return [(_KINDS[name], self._rules.json(narrowed, strict=self._strict))]

    def _listed(self, schema: Mapping[str, Any], asserted: frozenset[str]) -> list[tuple[str, str]]:
        """Values that are listed one by one; other keywords beside the list must not say more than the type."""
        if asserted - {"type", "enum", "const"}:
            raise _WholeOnly
        values = [value for value in (schema["enum"] if "enum" in schema else [schema["const"]]) if "const" not in schema or value == schema["const"]]
        types = schema.get("type", _ALL_TYPES)
        by_kind: dict[str, list[Any]] = {}
        for value in values:
            kind = _kind(value)
            names = {types} if isinstance(types, str) else set(types)
            if kind in names or (kind == "number" and "integer" in names and value == int(value)):
                by_kind.setdefault(kind, []).append(value)
        return [
            (kind, self._rules.rule(one_of(map(literal, found))) if kind == "string" else self._rules.json({"enum": found}, strict=self._strict))
            for kind, found in by_kind.items()
        ]

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a lone reference stands for."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, Mapping):
                raise _WholeOnly
            if "$ref" not in schema:
                return schema
            if _asserted(schema) != {"$ref"}:
                raise _WholeOnly
            schema = self._at(schema["$ref"])
        raise _WholeOnly

    def _at(self, reference: Any) -> Any:
        """The place that a JSON pointer names, and nothing else."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _WholeOnly
        return at(self._root, reference)

    def _with_definitions(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the definitions of the root, if it refers to any; references to other places cannot move."""
        text = json.dumps(schema)
        if '"$ref"' not in text:
            return schema
        if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(schema)):
            raise _WholeOnly
        return {**{key: self._root[key] for key in ("$defs", "definitions") if key in self._root}, **schema}


def _asserted(schema: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(key for key in schema if key in _WORDS)


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for child in schema.values():
            yield from _references(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from _references(child)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return {str: "string", type(None): "null", list: "array"}.get(type(value), "object")


def _around(pieces: Pieces, key: str) -> str:
    """Pieces with a rule in place of the key that they were made with."""
    parts = []
    for piece in pieces:
        if isinstance(piece, str) and _ANY_KEY in piece:
            before, after = piece.split(_ANY_KEY)
            parts += [marks((before,)), key, marks((after,))]
        else:
            parts.append(marks((piece,)))
    return joined(*parts)


def _plain(letter: str) -> str:
    return letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}"
