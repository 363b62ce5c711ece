"""What the fields of a request ask an answer to be, and that compiling it holds nobody up."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from firstlight import LLM
from firstlight.serve import structured as structured_file
from firstlight.serve.structured import Structures, structure_of, turn_of
from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Choice, JsonSchema, Regex
from firstlight.text.grammar import Grammar
from firstlight.text.grammar_turn import Tool, Turn
from tests.serve.conftest import Client

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
PLAIN = {"thinking": {"type": "disabled"}}
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"], "additionalProperties": False}
UNLIKE = {"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    """A response_format."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def tool(name: str, parameters: Any = POINT, **more: Any) -> dict[str, Any]:
    """A tool of a request."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(("content", "want"), [
    ({}, None), ({"response_format": None}, None), ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, JsonSchema({"type": "object"})),
    ({"response_format": form(POINT)}, JsonSchema(POINT)), ({"response_format": form(POINT, strict=True)}, JsonSchema(POINT)),
    ({"response_format": form(POINT, strict=None)}, JsonSchema(POINT)),
    ({"response_format": form(POINT, strict=False)}, JsonSchema(POINT, strict=False)),
    ({"structured": {"regex": "a+"}}, Regex("a+")), ({"structured": {"choice": ["a", "b"]}}, Choice(("a", "b"))),
    ({"structured": {"json_schema": POINT}, "response_format": {"type": "text"}}, JsonSchema(POINT)),
])
def test_the_form_of_an_answer(content: dict[str, Any], want: Any) -> None:
    assert want == structure_of(content)[0]


@pytest.mark.parametrize("content", [
    {"response_format": {"type": "xml"}}, {"response_format": "json"}, {"response_format": form([])}, {"response_format": form(POINT, strict="yes")},
    {"structured": {}}, {"structured": {"regex": "a", "choice": ["a"]}}, {"structured": {"grammar": "x"}}, {"structured": {"regex": ""}},
    {"structured": {"choice": "ab"}}, {"structured": ["regex"]}, {"structured": {"regex": "a"}, "response_format": {"type": "json_object"}},
])
def test_a_form_that_is_none_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        structure_of(content)


A, B = tool("a"), tool("b", strict=True)
AS_A, AS_B = Tool(name="a", parameters=POINT), Tool(name="b", parameters=POINT, strict=True)
TURNS: list[tuple[dict[str, Any], list[dict[str, Any]], Turn | None]] = [
    ({}, [], None), ({}, [A], None), ({"tool_choice": "auto"}, [A], None), ({"tool_choice": "none"}, [A, B], None),
    ({}, [A, B], Turn(tools=(AS_A, AS_B), calls="optional")),
    ({"parallel_tool_calls": False}, [B], Turn(tools=(AS_B,), calls="optional", parallel=False)),
    ({"tool_choice": "required"}, [A, B], Turn(tools=(AS_A, AS_B), calls="required")),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [A], Turn(tools=(AS_A,), calls="required", parallel=False)),
    ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, [A, B], Turn(tools=(AS_B,), calls="required", parallel=False)),
    ({"response_format": form(POINT)}, [], Turn(body=JsonSchema(POINT))),
    ({"response_format": form(POINT)}, [A], Turn(body=JsonSchema(POINT), tools=(AS_A,), calls="optional")),
    ({"response_format": form(POINT), "tool_choice": "none"}, [A], Turn(body=JsonSchema(POINT))),
    ({"response_format": form(POINT), "tool_choice": "required"}, [A], Turn(tools=(AS_A,), calls="required")),
    ({"tool_choice": "required"}, [{"type": "function", "function": {"name": "c"}}], Turn(tools=(Tool(name="c"),), calls="required")),
]


@pytest.mark.parametrize(("content", "tools", "want"), TURNS)
def test_what_a_message_must_be(content: dict[str, Any], tools: list[dict[str, Any]], want: Turn | None) -> None:
    assert want == turn_of(content, tools)[0]


@pytest.mark.parametrize(("content", "tools"), [
    ({"tool_choice": "required"}, []), ({"tool_choice": "maybe"}, [A]), ({"tool_choice": {"type": "function", "function": {"name": "z"}}}, [A]),
    ({"tool_choice": "required"}, [tool("a", strict="yes")]),
])
def test_a_choice_that_cannot_be_is_refused(content: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="^`tool"):
        turn_of(content, tools)


def test_answers_over_http_have_their_form(serve: Serve) -> None:
    """Every way to ask; choices of one request have a state each, and both faces take the same extension."""
    async def test(client: Client) -> None:
        answer = await client.chat("x", n=3, seed=1, max_tokens=100, response_format=form(POINT), **PLAIN)
        contents = [choice["message"]["content"] for choice in answer["choices"]]
        assert 3 == len(contents)
        for content in contents:
            jsonschema.validate(json.loads(content), POINT)
        answer = await client.chat("x", max_tokens=600, seed=5, structured={"choice": ["yes", "no"]})
        message = answer["choices"][0]["message"]
        assert message["content"] in ("yes", "no") and message["reasoning_content"]
        answer = await client.complete("x", n=2, max_tokens=20, structured={"regex": "[0-9]{4}"}, seed=2)
        assert all(re.fullmatch("[0-9]{4}", choice["text"]) for choice in answer["choices"])
        named = {"type": "function", "function": {"name": "b"}}
        answer = await client.chat("x", max_tokens=300, tools=[A, B], tool_choice=named, seed=3, **PLAIN)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert "b" == call["function"]["name"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), POINT)

    serve(test)


def test_errors_over_http_name_the_place(serve: Serve) -> None:
    async def test(client: Client) -> None:
        for content, param, words in (
            ({"response_format": form(UNLIKE)}, "response_format", "#/properties/tags/uniqueItems"),
            ({"tools": [tool("f", UNLIKE, strict=True)]}, "tools", "#/properties/tags/uniqueItems"),
            ({"structured": {"regex": "("}}, "structured", "regex parse error"),
            ({"response_format": form(POINT), "continue_final_message": True, "add_generation_prompt": False, "messages": [
                {"role": "user", "content": "x"}, {"role": "assistant", "content": '{"x"'}]}, "response_format", "continue_final_message"),
        ):
            body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **PLAIN, **content}
            answer = await client.post(CHAT, body)
            assert 400 == answer.status_code, answer.text
            error = answer.json()["error"]
            assert param == error["param"] and words in error["message"]
        await client.chat("x", max_tokens=5, tools=[tool("f", UNLIKE)], tool_choice="required")
        await client.chat("x", max_tokens=5, response_format=form(UNLIKE, strict=False))

    serve(test)


@pytest.fixture
def structures(model: Callable[..., LLM]) -> Iterator[Structures]:
    found = Structures(model().grammars)
    yield found
    found.close()


@pytest.fixture
def gate(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds up the compiling of one pattern until it is set."""
    opened, compile_it = threading.Event(), structures.grammars.compile

    def compile_slowly(structure: Any, **options: Any) -> Grammar:
        if structure == Regex("slow"):
            opened.wait()
        return compile_it(structure, **options)

    monkeypatch.setattr(structures.grammars, "compile", compile_slowly)
    yield opened
    opened.set()


def test_compiling_holds_up_neither_the_event_loop_nor_others(structures: Structures, gate: threading.Event) -> None:
    async def main() -> None:
        slow = asyncio.create_task(structures.completion({"structured": {"regex": "slow"}}))
        assert await structures.completion({"structured": {"regex": "quick"}}) is not None
        assert not slow.done()
        gate.set()
        assert await slow is not None

    asyncio.run(main())


def test_a_form_that_takes_too_long_is_that_request_s_error(structures: Structures, gate: threading.Event) -> None:
    structures.timeout_s = 0.05
    with pytest.raises(RequestError, match=r"^`structured` takes longer than 0\.05 s to compile"):
        asyncio.run(_refused_in_time(structures, gate))


async def _refused_in_time(structures: Structures, gate: threading.Event) -> None:
    try:
        await structures.completion({"structured": {"regex": "slow"}})
    finally:
        gate.set()


def test_nothing_is_compiled_where_nothing_is_asked(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_file.Structures, "_compiled", None)

    class NoFormat:
        def tools(self, messages: Any, tools: Any = None) -> list[Any]:
            return tools or []

    for content in ({}, {"tools": [A], "tool_choice": "auto"}, {"tools": [A, B], "tool_choice": "none"}, {"response_format": {"type": "text"}}):
        assert asyncio.run(structures.chat(content, NoFormat())) is None  # type: ignore[arg-type]
        assert asyncio.run(structures.completion(content)) is None
