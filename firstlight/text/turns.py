"""The messages of a request, checked once and brought into one form, whatever the format that renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.text.brief import brief

ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGE_KINDS = ("image", "image_url")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of an earlier answer; arguments as the client sent them, JSON text or an object."""

    id: str | None
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. `parts` are texts and, as the client sent them, images; `reasoning` is None when blank.

    `tool_name` and `number` are of a tool result, once it is known which call it answers.
    """

    index: int
    role: str
    parts: tuple[str | Mapping[str, Any], ...] = ()
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    tool_name: str | None = None
    number: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    partial: bool = False

    @property
    def text(self) -> str:
        """The parts that are text, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))


def read_turns(messages: Any) -> list[Turn]:
    """Raises: RequestError naming the message that cannot be read."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"`messages` is {brief(messages)}", "Send a list with at least one message.")
    return [_turn(index, message) for index, message in enumerate(messages)]


def continued(turns: Sequence[Turn], asked: bool) -> Turn | None:
    """The last message if the answer is to go on from it: the request asks for that, or the message says `partial`.

    Raises: RequestError when it cannot be gone on from.
    """
    last = turns[-1]
    if not (asked or last.partial):
        return None
    if last.role != "assistant" or last.calls or any(not isinstance(part, str) for part in last.parts):
        raise RequestError(f"message {last.index} is to be continued, it has the role {last.role}", "End with an assistant message of text alone.")
    return last


def images(turns: Sequence[Turn]) -> list[Mapping[str, Any]]:
    """Image parts in the order in which they are read."""
    return [part for turn in turns for part in turn.parts if not isinstance(part, str)]


def _turn(index: int, message: Any) -> Turn:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is {brief(message)}", "Send an object with `role` and `content`.")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"message {index} has the role {brief(role)}", f"Use one of {', '.join(ROLES)}.")
    role = "system" if role == "developer" else role
    parts = _parts(index, message.get("content"))
    reasoning = _text(index, message, "reasoning_content") or _text(index, message, "reasoning") or ""
    return Turn(
        index=index,
        role=role,
        parts=parts,
        name=_text(index, message, "name") or None,
        reasoning=reasoning if role == "assistant" and reasoning.strip() else None,
        calls=_calls(index, message.get("tool_calls")) if role == "assistant" else (),
        call_id=_text(index, message, "tool_call_id") if role == "tool" else None,
        tools=_tools(index, role, message.get("tools"), parts),
        partial=message.get("partial") is True,
    )


def _text(index: int, message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"message {index} has the `{key}` {brief(value)}", "Send a string, or leave it out.")
    return value


def _parts(index: int, content: Any) -> tuple[str | Mapping[str, Any], ...]:
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"message {index} has the content {brief(content)}", "Send a string, a list of parts, or null.")
    return tuple(part for part in (_part(index, place, part) for place, part in enumerate(content)) if part != "")


def _part(index: int, place: int, part: Any) -> str | Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_KINDS:
        found: Mapping[str, Any] = part
        return found
    text = part.get("text") if kind == "text" else part if isinstance(part, str) else None
    if not isinstance(text, str):
        raise RequestError(f"part {place} of message {index} is {brief(part)}", f"Send parts of the types text and {' or '.join(IMAGE_KINDS)}.")
    return text


def _calls(index: int, calls: Any) -> tuple[Call, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"message {index} has the `tool_calls` {brief(calls)}", "Send a list of calls.")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"message {index} has the tool call {brief(call)}", "Send an object with `id` and `function`, which has a `name`.")
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise RequestError(f"message {index} has a tool call with the id {brief(call_id)}", "Send a string.")
        found.append(Call(id=call_id, name=name, arguments=function.get("arguments")))
    return tuple(found)


def _tools(index: int, role: str, tools: Any, parts: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Tools that a system message adds to those of the request."""
    if tools is None:
        return ()
    if role != "system":
        raise RequestError(f"message {index} has `tools` and the role {role}", "Only system messages may add tools.")
    if not isinstance(tools, list):
        raise RequestError(f"`tools` of message {index} is {brief(tools)}", "Send a list of tools.")
    if tools and parts:
        raise RequestError(f"message {index} has both content and `tools`", "Send the tools in a system message of their own.")
    return tuple(tools)

