"""From the fields of a request to what its answer is held to: response_format, tool_choice, strict tools, and our own `structured`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Choice, JsonSchema, Regex, Structure
from firstlight.text import chat_fields
from firstlight.text.chat import ChatFormat
from firstlight.text.grammar import Grammar, Grammars
from firstlight.text.grammar_turn import Tool, Turn

NUM_THREADS = 2
_CHAT_OWN = frozenset({"messages", "tools", "model"})


class Structures:
    """Compiles beside the event loop. What compiles too long costs its own request an error and holds up only others that compile."""

    def __init__(self, grammars: Grammars, *, timeout_s: float = 10.0) -> None:
        self.grammars, self.timeout_s = grammars, timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="firstlight-grammar")

    async def chat(self, content: Mapping[str, Any], chat: ChatFormat) -> Grammar | None:
        """The grammar of a chat message; None: it may be anything.

        Raises: RequestError, whose fact begins with the field and names the place in its schema.
        """
        turn, where = turn_of(content, chat.tools(content.get("messages"), content.get("tools")))
        if turn is None:
            return None
        if turn.body is not None and content.get("continue_final_message"):
            raise RequestError(f"{where} asks for a structure, and `continue_final_message` begins it elsewhere", "Leave one of the two out.")
        fields = {key: value for key, value in content.items() if key not in _CHAT_OWN and value is not None}
        zone = chat.zone(content.get("tools"), messages=content.get("messages"), **fields)
        return await self._compiled(lambda: self.grammars.compile_turn(zone, turn, where=where), where)

    async def completion(self, content: Mapping[str, Any]) -> Grammar | None:
        """The grammar of a plain completion; None: it may be anything. Raises: RequestError."""
        structure, where = structure_of(content)
        if structure is None:
            return None
        return await self._compiled(lambda: self.grammars.compile(structure, where=where), where)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, compile_it: Callable[[], Grammar], where: str) -> Grammar:
        task = asyncio.get_running_loop().run_in_executor(self._threads, compile_it)
        try:
            return await asyncio.wait_for(task, self.timeout_s)
        except TimeoutError:
            fact = f"{where} takes longer than {self.timeout_s:g} s to compile"
            raise RequestError(fact, "Make the schemas smaller, or send the request again when the server is less busy.") from None


def structure_of(content: Mapping[str, Any]) -> tuple[Structure | None, str]:
    """What a whole answer, or the body of a message, must be, and the field that says so. Raises: RequestError."""
    kind, schema = chat_fields.response_format(content)
    own = content.get("structured")
    if own is not None and kind != "text":
        raise RequestError("`structured` and `response_format` both ask for a structure", "Send one of them.")
    if own is not None:
        return _own(own), "`structured`"
    if kind == "json_object":
        return JsonSchema({"type": "object"}), "`response_format`"
    if schema is None:
        return None, "`response_format`"
    strict = content["response_format"]["json_schema"].get("strict")
    return JsonSchema(schema, strict=strict is not False), "`response_format`"


def turn_of(content: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> tuple[Turn | None, str]:
    """What a message must be, and the field that says so; None: it may be anything. Raises: RequestError."""
    body, where = structure_of(content)
    choice = chat_fields.tool_choice(content, tools)
    callable_tools = [] if choice == "none" else tools
    if choice == "named":
        callable_tools = [tool for tool in tools if tool["function"]["name"] == content["tool_choice"]["function"]["name"]]
    listed = tuple(_tool(tool["function"]) for tool in callable_tools)
    parallel = content.get("parallel_tool_calls") is not False
    if choice in ("required", "named"):
        # One tool that was named is called once; its content would say nothing.
        return Turn(tools=listed, calls="required", parallel=parallel and choice == "required"), "`tool_choice`"
    if body is None and not any(tool.strict for tool in listed):
        return None, where
    return Turn(body=body, tools=listed, calls="optional" if listed else "none", parallel=parallel), where if body is not None else "`tools`"


def _tool(function: Mapping[str, Any]) -> Tool:
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"`tools`: {function['name']!r} has strict {strict!r:.80}", "Use true or false.")
    return Tool(name=function["name"], parameters=function.get("parameters"), strict=strict is True)


def _own(value: Any) -> Structure:
    """Our extension: one of three keys."""
    kinds: dict[str, Callable[[Any], Structure]] = {"json_schema": JsonSchema, "regex": Regex, "choice": Choice}
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in kinds:
        raise RequestError(f"`structured` is {value!r:.80}", "Send an object with one of json_schema, regex and choice.")
    (kind, given), = value.items()
    try:
        return kinds[kind](given)
    except RequestError as error:
        raise RequestError(f"`structured`: {error.fact}", error.fix) from None
