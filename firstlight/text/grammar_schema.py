"""JSON schemas before they become a grammar: limits, options of the compiler, and where the fault of a refused one lies."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from firstlight.spec.errors import RequestError

log = logging.getLogger("firstlight")

MAX_SCHEMA_BYTES = 128 * 1024
MAX_DEPTH = 100
"""Nesting of objects and lists in the text of a schema."""

MAX_PROBED_BYTES = 256 * 1024
"""Subschemas that are compiled on their own, at most, to find the one at fault."""

MAX_SOFTENED = 8
"""Places in a schema that is not strict which may stay free before all of it does."""

_ONE_EACH = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_FORMATS = "date-time, date, time, duration, email, hostname, ipv4, ipv6, uuid or uri"
_SOFTER = "or set `strict` to false, which leaves it out"
_REPAIRS: tuple[tuple[str, str, str], ...] = (
    (r"Invalid type", "/type", "Use one of string, number, integer, boolean, null, object and array."),
    (r"Unknown format", "/format", f"Use {_FORMATS}, {_SOFTER}."),
    (r"regex parse error", "/pattern", "Write it without look-around and back-references, in the syntax of RE2."),
    (r"Pointer '|Resource '|[Uu]nresolvable|circular references", "/$ref", "Refer to a place inside of this schema, such as #/$defs/name."),
    (r"oneOf", "/oneOf", f"Use anyOf, or branches that differ in the const of one property, {_SOFTER}."),
    (r"min/maxProperties", "/minProperties", f"Require all listed properties, {_SOFTER}."),
    (r"Unsatisfiable|no value|invalid multiple", "", "Change it so that at least one value is valid."),
    (r"too large|fuel|too complex|too many|Unable to determine|recursion limit|items; max", "", "Make it smaller: fewer or shorter parts."),
)
_REFERRED = r" while processing json-schema:///(#\S*)$"
_UNKNOWN_REPAIR = "Write this part in another way, with the keywords of JSON Schema 2020-12."


def sized(schema: Any, where: str) -> None:
    """Refuse what is no schema, or too large to look at. Raises: RequestError."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{where} is {_short(schema)}, not a JSON schema", "Use an object.")
    depth = _depth(schema)
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} nests {depth} levels deep", f"Use at most {MAX_DEPTH} levels, with $ref for what repeats.")
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where} is no JSON: {error}", "Use objects, lists, strings, numbers, true, false and null.") from None
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{where} has {size:,} bytes", f"Use at most {MAX_SCHEMA_BYTES:,}.")


def enforceable(schema: Any, where: str, *, strict: bool) -> None:
    """Refuse a schema that is too large or cannot be compiled. `where` says which part of the request it is.

    Raises: RequestError that names the place in the schema as a JSON pointer, and what to change.
    """
    sized(schema, where)
    message = verdict(schema, strict=strict)
    if message is not None:
        raise refusal(schema, where, message, strict=strict)


def verdict(schema: Any, *, strict: bool) -> str | None:
    """Why the library cannot compile a schema; None: it can."""
    grammar = LLMatcher.grammar_from_lark(f"start: value\nvalue: %json {embedded(schema, strict=strict)}\n")
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return summary(messages[0]) if failed else None


def summary(message: str) -> str:
    """The library's words without its own line numbers and listings."""
    message = re.split(r"\n\s+\d+ \| |\n<", message)[0]
    message = re.sub(r"^.*?(?:failed to compile JSON schema|failed to parse \"%json\"|invalid regex \".*?\" \(in regex\)): ", "", message, flags=re.S)
    lines = [line.strip() for line in message.splitlines()]
    text = " ".join(line for line in lines if line and set(line) != {"^"})[:300]
    return "no value is valid" if text.startswith("NoExtension") else text


def refusal(schema: Any, where: str, message: str, *, strict: bool) -> RequestError:
    """The error for a schema that the library refused with `message`."""
    pointer = _fault(schema, message, strict=strict)
    keys = re.match(r"Unimplemented keys: \[(.*?)\]", message)
    if keys is not None:
        names = json.loads(f"[{keys.group(1)}]")
        fact = f"{where} uses {', '.join(f'`{name}`' for name in names)} at {pointer}/{_escaped(names[0])}, which cannot be enforced"
        return RequestError(fact, f"Leave it out, {_SOFTER}.")
    place, repair = next(((place, repair) for pattern, place, repair in _REPAIRS if re.search(pattern, message)), ("", _UNKNOWN_REPAIR))
    return RequestError(f"{where} cannot be enforced at {pointer}{place}: {re.sub(_REFERRED, '', message)}", repair)


def embedded(schema: Any, *, strict: bool) -> str:
    """The schema as JSON text with the compiler's options: no white space but one optional space after a comma or a colon."""
    options = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False, "lenient": not strict}
    body = {} if schema is True else {"anyOf": []} if schema is False else schema
    return json.dumps({**body, "x-guidance": options})


def _fault(schema: Any, message: str, *, strict: bool) -> str:
    """JSON pointer to the deepest subschema that is refused with the same words on its own."""
    pointer, num_bytes = "#", 0
    referred = re.search(_REFERRED, message)
    if referred is not None:
        pointer, message = referred.group(1), message[: referred.start()]
    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema}
    schema = at(schema, pointer)
    while True:
        for step, child in _children(schema):
            whole = {**definitions, **child} if isinstance(child, Mapping) else child
            num_bytes += len(json.dumps(whole))
            if num_bytes > MAX_PROBED_BYTES:
                return pointer
            if verdict(whole, strict=strict) == message:
                pointer, schema = pointer + step, child
                break
        else:
            return _unsatisfied(schema, pointer, message)


def _unsatisfied(schema: Any, pointer: str, message: str) -> str:
    """The property that the library names when a required one has no value."""
    named = re.search(r"required property '(.*)' is unsatisfiable", message)
    inner = "" if named is None else f"/properties/{_escaped(named.group(1))}"
    return pointer + (inner if at(schema, "#" + inner) is not None else "")


def softened(schema: Any, where: str) -> Any:
    """A schema that compiles when it is not strict: what cannot be enforced lets any value pass, and the log says so."""
    for _ in range(MAX_SOFTENED):
        message = verdict(schema, strict=False)
        if message is None:
            return schema
        pointer = _fault(schema, message, strict=False)
        log.warning("%s is not enforced at %s: %s", where, pointer, message)
        if pointer == "#":
            break
        schema = _with(schema, pointer[1:].split("/")[1:], {})
    return {"type": "object"}


def _with(schema: Any, steps: list[str], value: Any) -> Any:
    """A copy with another value at a place that exists."""
    if not steps:
        return value
    name = steps[0].replace("~1", "/").replace("~0", "~")
    if isinstance(schema, list):
        return [_with(child, steps[1:], value) if place == int(name) else child for place, child in enumerate(schema)]
    return {**schema, name: _with(schema[name], steps[1:], value)}


def at(schema: Any, pointer: str) -> Any:
    """The place that a JSON pointer within a schema names; None where there is none."""
    for step in pointer[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, Mapping) and name in schema:
            schema = schema[name]
        else:
            return None
    return schema


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _ONE_EACH:
        if isinstance(schema.get(key), (Mapping, bool)):
            yield f"/{key}", schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{place}", child) for place, child in enumerate(schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"/{key}/{_escaped(name)}", child) for name, child in schema[key].items())


def _escaped(name: str) -> str:
    """A name as a step of a JSON pointer. Source: RFC 6901, section 3."""
    return str(name).replace("~", "~0").replace("/", "~1")


def _depth(schema: Any) -> int:
    deepest, waiting = 0, [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, (Mapping, list)):
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                return deepest
            waiting += [(child, depth + 1) for child in (value.values() if isinstance(value, Mapping) else value)]
    return deepest


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
