"""A conversation as Kimi K3 reads it: segments that are encoded one by one, so that no text of a user becomes a control token.

Source: encoding_k3.py of moonshotai/Kimi-K3 (order, tags, wording of the generated system messages).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.text.brief import brief
from firstlight.text.k3_header import CLOSE, END, OPEN, SEP, escape
from firstlight.text.turns import Call, Turn

MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
EFFORTS = ("low", "high", "max")

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), supported values include "
    "`low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

Segment = tuple[str, bool]
"""Text, and whether it is a control token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be rendered; `effort` None: without thinking. `resumed` is a last message that the answer goes on from.

    `turns` come from `answered`; one size (width, height) per image, in their order.
    """

    turns: Sequence[Turn]
    tools: Sequence[Any] = ()
    effort: str | None = "max"
    tool_choice: str = "auto"
    response_format: str = "text"
    schema: Mapping[str, Any] | None = None
    resumed: Turn | None = None
    stub: bool = True
    image_sizes: Sequence[tuple[int, int]] = ()


def segments(order: Order) -> list[Segment]:
    """The prompt in order; each text between two others is encoded on its own.

    Raises: RequestError for a message that the format cannot say.
    """
    sizes = iter(order.image_sizes)
    written: list[Segment] = []
    if order.tools:
        written += _generated("tool-declare", _TOOLS.format(_json("`tools`", list(order.tools), _compacted)))
    if order.effort is not None:
        written += _generated("thinking-effort", _EFFORT.format(order.effort))
    turns = order.turns[:-1] if order.resumed else order.turns
    for turn in turns:
        written += _message(turn, order.effort is not None, sizes)
    if order.tool_choice in _CHOICE:
        written += _generated("tool-choice", _CHOICE[order.tool_choice])
    if order.response_format != "text":
        schema = "" if order.schema is None else _SCHEMA.format(_json("`response_format`", order.schema, _compacted))
        written += _generated("response-format", _FORMAT.format(order.response_format) + schema)
    return written + (_stub(order) if order.stub else [])


def _open(name: str, /, **attributes: str) -> list[Segment]:
    written: list[Segment] = [(OPEN, True), (name, False)]
    for key, value in attributes.items():
        written += [(f" {key}", False), ('="', False), (escape(value), False), ('"', False)]
    return [*written, (SEP, True)]


def _close(name: str) -> list[Segment]:
    return [(CLOSE, True), (name, False), (SEP, True)]


def _element(name: str, body: list[Segment], /, **attributes: str) -> list[Segment]:
    return [*_open(name, **attributes), *body, *_close(name)]


def _whole(body: list[Segment], /, **attributes: str) -> list[Segment]:
    return [*_element("message", body, **attributes), (END, True)]


def _generated(kind: str, text: str) -> list[Segment]:
    return _whole([(text, False)], role="system", type=kind)


def _message(turn: Turn, thinks: bool, sizes: Iterator[tuple[int, int]]) -> list[Segment]:
    if turn.tools:
        return _generated("tool-declare", _MORE_TOOLS.format(_json(f"`tools` of message {turn.index}", list(turn.tools), _compacted)))
    body = _body(turn, sizes)
    if turn.role == "tool":
        return _whole(body, role="tool", tool=turn.tool_name or "", index=str(turn.number))
    named = {"role": turn.role, **({"name": turn.name} if turn.name else {})}
    if turn.role == "assistant":
        think = _element("think", [(turn.reasoning, False)] if turn.reasoning else []) if thinks else []
        calls = [segment for place, call in enumerate(turn.calls, 1) for segment in _call(turn.index, place, call)]
        body = [*think, *_element("response", body), *(_element("tools", calls) if calls else [])]
    return _whole(body, **named)


def _body(turn: Turn, sizes: Iterator[tuple[int, int]]) -> list[Segment]:
    """Parts stay segments of their own: two of them never join into the spelling of a control token."""
    written: list[Segment] = []
    for part in turn.parts:
        if isinstance(part, str):
            written.append((part, False))
            continue
        width, height = next(sizes)
        begin, content, pad, end = MEDIA
        written += [(begin, True), (f"image {width}x{height}", False), (content, True), (pad, True), (end, True)]
    return written


def _call(index: int, place: int, call: Call) -> list[Segment]:
    arguments = call.arguments
    if isinstance(arguments, str):
        raw, arguments = arguments, _parsed(arguments)
        if arguments is _NOT_JSON:
            return _element("call", _element("json", [(raw, False)], type="object"), tool=call.name, index=str(place))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"the arguments of call {place} in message {index} are {brief(call.arguments)}", "Send a JSON object.")
    body = []
    for key, value in arguments.items():
        text = value if _kind(value) == "string" else _json(f"the arguments of call {place} in message {index}", value)
        body += _element("argument", [(text, False)], key=str(key), type=_kind(value))
    return _element("call", body, tool=call.name, index=str(place))


class _Number(str):
    """A number as the model wrote it; to write it otherwise would miss the cache of what it stands in."""

    __slots__ = ()


_NOT_JSON = object()


def _parsed(text: str) -> Any:
    """The value of JSON text; None for blank text."""
    if not text.strip():
        return None
    constants: list[str] = []
    try:
        value = json.loads(text, parse_constant=constants.append, parse_int=_Number, parse_float=_Number)
        # What cannot be written again (too deep, lone surrogates) stays as the model wrote it: refused, it would end the conversation.
        _spelled(value).encode()
    except (ValueError, RecursionError):
        return _NOT_JSON
    return _NOT_JSON if constants else value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float | _Number):
        return "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "object" if isinstance(value, Mapping) else "array"


def _spelled(value: Any) -> str:
    """JSON with a space after comma and colon, keys in order, numbers as they were written."""
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key), ensure_ascii=False)}: {_spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_spelled(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _compacted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _json(where: str, value: Any, form: Callable[[Any], str] = _spelled) -> str:
    try:
        return form(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}", "Send JSON values, nested less than a few hundred levels deep.") from None


def answered(turns: Sequence[Turn]) -> list[Turn]:
    """Turns with every run of tool results named, and in the order of the calls that they answer.

    Raises: RequestError for a result of no call.
    """
    ordered = list(turns)
    caller: Turn | None = None
    begin = number = 0
    for place, turn in enumerate(turns):
        if turn.role == "assistant":
            caller, number = turn, 0
        if turn.role != "tool":
            begin = place + 1
        elif place + 1 == len(turns) or turns[place + 1].role != "tool":
            run = sorted(((_position(caller, result), result) for result in turns[begin : place + 1]), key=itemgetter(0))
            calls = caller.calls if caller else ()
            for target, (position, result) in enumerate(run, begin):
                number += 1
                ordered[target] = replace(result, tool_name=calls[position].name, number=number)
    return ordered


def _position(caller: Turn | None, result: Turn) -> int:
    """Which call a result answers: by its id, or by NAME:POSITION as some servers hand out."""
    calls = caller.calls if caller else ()
    if result.call_id is None:
        raise RequestError(f"message {result.index} is a tool result without `tool_call_id`", "Send the id of the call that it answers.")
    for ids in ([call.id for call in calls], [f"{call.name}:{place}" for place, call in enumerate(calls)]):
        if result.call_id in ids:
            return ids.index(result.call_id)
    raise RequestError(
        f"message {result.index} answers the call {brief(result.call_id)}, the assistant message before it has {brief([call.id for call in calls])}",
        "Send the results of a message's calls directly after it, with their ids.",
    )


def _stub(order: Order) -> list[Segment]:
    """Where the answer begins: inside of a channel."""
    written = _open("message", role="assistant")
    resumed, thinks = order.resumed, order.effort is not None
    if thinks:
        written += [*_open("think"), *([(resumed.reasoning, False)] if resumed and resumed.reasoning else [])]
    if resumed and resumed.parts and thinks:
        written += _close("think")
    if not thinks or (resumed and resumed.parts):
        written += [*_open("response"), *((part, False) for part in (resumed.parts if resumed else ()) if isinstance(part, str))]
    return written
