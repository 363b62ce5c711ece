"""Fields of a chat request that change its prompt or how its answer is read, each checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.text.brief import brief
from firstlight.text.turns import Turn

MAX_TOOL_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Whether to think, and how much; None: the client did not say."""

    on: bool | None = None
    effort: str | None = None


def declared_tools(turns: Sequence[Turn], tools: Any) -> list[Mapping[str, Any]]:
    """Tools of the request, then those that system messages add; all have the same standing.

    Raises: RequestError for a tool without type, function or usable name, and for a name that stands twice.
    """
    if tools is not None and not isinstance(tools, list | tuple):
        raise RequestError(f"`tools` is {brief(tools)}", "Send a list of tools.")
    places = [("`tools`", list(tools or ())), *((f"`tools` of message {turn.index}", list(turn.tools)) for turn in turns if turn.tools)]
    seen: set[str] = set()
    for where, listed in places:
        for place, tool in enumerate(listed):
            name = _tool_name(f"{where}[{place}]", tool)
            if name in seen:
                raise RequestError(f"{where}[{place}] declares {name!r} a second time", "Give each tool a name of its own.")
            seen.add(name)
    return [tool for _, listed in places for tool in listed]


def _tool_name(where: str, tool: Any) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise RequestError(f"{where} is {brief(tool)}", 'Send {"type": "function", "function": {"name": ...}}.')
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOOL_NAME or name[0] == "@" or name[0].isdigit():
        raise RequestError(f"{where} has the name {brief(name)}", f"Use 1 to {MAX_TOOL_NAME} characters, the first neither a digit nor @.")
    return name


def tool_choice(fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """ "auto", "none", "required", or "named" when the request names one tool; `tools` None: they are not known here."""
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if choice == "required":
        if tools is not None and not tools:
            raise RequestError("`tool_choice` is 'required' without any tool", "Send `tools`, or 'auto'.")
        return "required"
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise RequestError(f"`tool_choice` is {brief(choice)}", "Use 'auto', 'none', 'required', or an object that names one function.")
    if tools is not None and all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(f"`tool_choice` names {name!r}, which is not among the tools", "Name a tool of the request.")
    return "named"


def response_format(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The type, and the schema of "json_schema"."""
    value = fields.get("response_format")
    if value is None:
        return "text", None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("text", "json_object"):
        return kind, None
    if kind != "json_schema":
        raise RequestError(f"`response_format` is {brief(value)}", "Use the type text, json_object or json_schema.")
    given = value.get("json_schema")
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str) or not given["name"]:
        raise RequestError(f"`response_format` has the json_schema {brief(given)}", "Send an object with `name` and `schema`.")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"`response_format` has the schema {brief(schema)}", "Send a JSON schema as an object.")
    if not isinstance(given.get("strict"), bool | None):
        raise RequestError(f"`response_format` has strict {brief(given['strict'])}", "Use true or false.")
    return "json_schema", schema


def template_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """`chat_template_kwargs`, an object or absent."""
    value = fields.get("chat_template_kwargs")
    if value is not None and not isinstance(value, Mapping):
        raise RequestError(f"`chat_template_kwargs` is {brief(value)}", "Send an object.")
    return value or {}


def thinking(fields: Mapping[str, Any]) -> Thinking:
    """What the three ways of asking for thought say together: `thinking`, `chat_template_kwargs`, `reasoning_effort`.

    Raises: RequestError where they contradict each other.
    """
    given = _thinking_object(fields.get("thinking"))
    extra = template_fields(fields)
    for key in ("thinking", "enable_thinking", "preserve_thinking"):
        if not isinstance(extra.get(key), bool | None):
            raise RequestError(f"`chat_template_kwargs` has {key} {brief(extra[key])}", "Use true or false.")
    wanted = extra.get("thinking", extra.get("enable_thinking"))
    if None not in (given.on, wanted) and given.on != wanted:
        raise RequestError(f"`thinking` and `chat_template_kwargs` disagree: {given.on} and {wanted}", "Send one of them.")
    on = wanted if given.on is None else given.on
    effort, word = extra.get("thinking_effort"), fields.get("reasoning_effort")
    if None not in (given.effort, effort) and given.effort != effort:
        raise RequestError(f"`thinking` and `chat_template_kwargs` disagree: effort {given.effort!r} and {effort!r}", "Send one of them.")
    if on is None and word == "none":
        on = False
    if word == "":
        raise RequestError("`reasoning_effort` is an empty string", "Say how much, or leave it out.")
    chosen = given.effort or effort or (None if word == "none" else word)
    if not isinstance(chosen, str | None):
        raise RequestError(f"the thinking effort is {brief(chosen)}", "Send a string.")
    return Thinking(on=on, effort=chosen)


def _thinking_object(value: Any) -> Thinking:
    if value is None:
        return Thinking()
    kind = value.get("type", "enabled") if isinstance(value, Mapping) else None
    if kind == "disabled":
        return Thinking(on=False)
    if kind != "enabled":
        raise RequestError(f"`thinking` is {brief(value)}", "Send an object of the type enabled or disabled.")
    if value.get("keep") not in (None, "all"):
        raise RequestError(f"`thinking` has keep {brief(value['keep'])}", "Reasoning of earlier answers is always kept: use 'all'.")
    if not isinstance(value.get("effort"), str | None):
        raise RequestError(f"`thinking` has effort {brief(value['effort'])}", "Send a string.")
    return Thinking(on=True, effort=value.get("effort"))


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"`{name}` is {brief(value)}", "Use true or false.")
    return value


def refuse_images(turns: Sequence[Turn]) -> None:
    """Raises: RequestError naming the message that holds an image."""
    seen = next((turn.index for turn in turns if any(not isinstance(part, str) for part in turn.parts)), None)
    if seen is not None:
        raise RequestError(f"message {seen} holds an image, and this model reads text only", "Send text, or serve a model with an image tower.")
