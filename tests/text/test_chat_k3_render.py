"""Prompts of Kimi K3, id by id, and that no text of a user becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text import chat
from firstlight.text.tokenizer import Tokenizer
from tests.text.conftest import FILES, K3_CONTROLS

CASES = json.loads((FILES.parent / "chat" / "k3_render_cases.json").read_text(encoding="utf-8"))
FIRST_CONTROL = 163584
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(name: str, call_id: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="session")
def k3(kimi_k3: Tokenizer) -> chat.ChatFormat:
    return chat.load("kimi_k3", kimi_k3)


def text_of(**request: Any) -> str:
    return chat.load("kimi_k3").render_text(**request)


def body(**request: Any) -> str:
    """The prompt without thinking, up to the generation stub."""
    whole = text_of(thinking={"type": "disabled"}, **request)
    assert whole.endswith(STUB)
    return whole.removesuffix(STUB)


STUB = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


def message(attributes: str, inner: str) -> str:
    return f"<|open|>message {attributes}<|sep|>{inner}<|close|>message<|sep|><|end_of_msg|>"


def answer(inner: str) -> str:
    return message('role="assistant"', f"<|open|>response<|sep|>{inner}<|close|>response<|sep|>")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_examples(case: Mapping[str, Any], k3: chat.ChatFormat) -> None:
    assert case["text"] == k3.render_text(**case["request"])
    assert case["ids"] == k3.render(**case["request"])


def test_an_older_table_of_control_tokens_over_the_same_ranks(kimi: Tokenizer) -> None:
    """The ranks of all Kimi models are the same file; the control tokens of K3 are known by id."""
    older = chat.load("kimi_k3", kimi)
    assert [case["ids"] for case in CASES] == [older.render(**case["request"]) for case in CASES]
    assert {163585, 163586, 163593} == older.end_ids


def test_a_tokenizer_can_be_named_by_folder_or_file() -> None:
    folder = FILES / "kimi"
    for place in (folder, str(folder / "tiktoken.model")):
        assert CASES[0]["ids"] == chat.load("kimi_k3", place).render(**CASES[0]["request"])


def test_small_vocabularies_have_their_own_ids(byte_level: Tokenizer) -> None:
    small = chat.load("kimi_k3", byte_level)
    ids = small.render([USER])
    assert byte_level.encode(small.render_text([USER]), special=True) == ids
    assert {257, 258, 265} == small.end_ids


def test_a_tokenizer_without_the_marks_is_refused(deepseek: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no token <\|open\|> .* Use the tokenizer files"):
        chat.load("kimi_k3", deepseek)


def test_ids_need_a_tokenizer() -> None:
    fmt = chat.load("kimi_k3")
    with pytest.raises(ConfigError, match="without a tokenizer"):
        fmt.render([USER])
    with pytest.raises(ConfigError, match="without a tokenizer"):
        fmt.reader()


def test_pending_ids_open_the_channel(k3: chat.ChatFormat) -> None:
    ids = k3.render([USER])
    assert [163587, 39964, 163589] == ids[-k3.num_pending :]


@settings(max_examples=60)
@given(
    pieces=st.lists(
        st.one_of(st.sampled_from([*K3_CONTROLS.values(), "<|op", "en|>", "<|", "|>", "<|kimi_image_placeholder|>"]), st.text(max_size=8))
    ),
    place=st.sampled_from(["system", "user", "assistant", "reasoning", "tool", "name", "tool_name", "description", "key", "value", "parts", "json"]),
)
def test_text_never_becomes_a_control_token(k3: chat.ChatFormat, pieces: list[str], place: str) -> None:
    """As many control ids as with a harmless word in its place, and the text comes back out of the ids."""
    harmless = k3.render(**request_with("word", ["word"], place))
    text = "x" + "".join(pieces)
    ids = k3.render(**request_with(text, ["x", *pieces], place))
    assert [token_id for token_id in harmless if token_id >= FIRST_CONTROL] == [token_id for token_id in ids if token_id >= FIRST_CONTROL]
    decoder = k3._tokenizer  # type: ignore[attr-defined]
    assert k3.render_text(**request_with(text, ["x", *pieces], place)) == decoder.decode(ids)


def request_with(text: str, pieces: list[str], place: str) -> dict[str, Any]:
    """A request with a text in one of the places that a client fills."""
    at = dict.fromkeys(("system", "user", "assistant", "reasoning", "tool", "name", "tool_name", "description", "key", "value"), "word")
    at[place] = text
    parts = [{"type": "text", "text": piece} for piece in pieces] if place == "parts" else at["user"]
    arguments = text if place == "json" else json.dumps({at["key"]: at["value"]})
    if place == "json" and text == "word":
        arguments = "[word"
    elif place == "json":
        arguments = "[" + text
    messages = [
        {"role": "system", "content": at["system"]},
        {"role": "user", "content": parts, "name": at["name"]},
        {
            "role": "assistant",
            "content": at["assistant"],
            "reasoning_content": at["reasoning"],
            "tool_calls": [call(at["tool_name"], "1", arguments)],
        },
        {"role": "tool", "tool_call_id": "1", "content": at["tool"]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": at["description"], "parameters": {"type": "object"}}}]
    return {"messages": messages, "tools": tools}


def test_parts_do_not_join(k3: chat.ChatFormat) -> None:
    split = k3.render([{"role": "user", "content": [{"type": "text", "text": "<|op"}, {"type": "text", "text": "en|>"}]}])
    assert "<|open|>" in k3.render_text([{"role": "user", "content": "<|op" + "en|>"}])
    assert [i for i in k3.render([USER]) if i >= FIRST_CONTROL] == [i for i in split if i >= FIRST_CONTROL]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content(content: Any) -> None:
    assert message('role="user"', "") == body(messages=[{"role": "user", "content": content}])
    assert answer("") == body(messages=[{"role": "assistant", "content": content}])


def test_missing_content_is_empty() -> None:
    assert message('role="user"', "") == body(messages=[{"role": "user"}])


def test_developer_is_system_and_content_is_verbatim() -> None:
    assert message('role="system"', "  a\n ") == body(messages=[{"role": "developer", "content": "  a\n "}])


def test_attributes_are_escaped_and_text_is_not() -> None:
    assert message('role="user" name="a&amp;quot; &quot;b&quot;"', 'c & "d"') == body(
        messages=[{"role": "user", "name": 'a&quot; "b"', "content": 'c & "d"'}]
    )


def test_reasoning_under_either_name_and_only_when_thinking() -> None:
    for key in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "b", key: " a "}
        assert answer("b") == body(messages=[turn])
        assert "<|open|>think<|sep|> a <|close|>think<|sep|><|open|>response<|sep|>b" in text_of(messages=[turn])
    for first, used in ((" \n", ""), ("", "r"), (None, "r")):
        both = {"role": "assistant", "content": "b", "reasoning_content": first, "reasoning": "r"}
        assert f"<|open|>think<|sep|>{used}<|close|>think<|sep|>" in text_of(messages=[both])


def arguments(inner: str, name: str = "f", index: int = 1) -> str:
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'


def with_calls(inner: str) -> str:
    tools = f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"
    return message('role="assistant"', f"<|open|>response<|sep|><|close|>response<|sep|>{tools}")


def element(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("given", "inner"),
    [
        ("", ""),
        ("  ", ""),
        (None, ""),
        ("null", ""),
        ("{}", ""),
        ({}, ""),
        (
            '{"a": 1e2, "b": 1.50, "c": 12345678901234567890}',
            element("a", "number", "1e2") + element("b", "number", "1.50") + element("c", "number", "12345678901234567890"),
        ),
        ('{"a":{"x":1.0,"y":[1e5,"\\u00e9"]}}', element("a", "object", '{"x": 1.0, "y": [1e5, "\u00e9"]}')),
        ({"a": [True, None, "b", 2, 2.5]}, element("a", "array", '[true, null, "b", 2, 2.5]')),
        ('{"a": "1", "b": " <x> "}', element("a", "string", "1") + element("b", "string", " <x> ")),
        ('{"a": tru', '<|open|>json type="object"<|sep|>{"a": tru<|close|>json<|sep|>'),
        ('{"a": NaN}', '<|open|>json type="object"<|sep|>{"a": NaN}<|close|>json<|sep|>'),
        ("[" * 5000, f'<|open|>json type="object"<|sep|>{"[" * 5000}<|close|>json<|sep|>'),
    ],
)
def test_arguments(given: Any, inner: str) -> None:
    assert with_calls(arguments(inner)) == body(messages=[{"role": "assistant", "content": None, "tool_calls": [call("f", "1", given)]}])


def test_unknown_keys_of_calls_are_not_rendered() -> None:
    dirty = {**call("f", "1"), "_xtml_json_block": True, "function": {"name": "f", "arguments": "{}", "_xtml_json_block": "x"}}
    assert with_calls(arguments("")) == body(messages=[{"role": "assistant", "tool_calls": [dirty]}])


def result(call_id: str | None, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id}), **more}


def test_results_are_sorted_per_run_and_counted_per_answer() -> None:
    calls = {"role": "assistant", "tool_calls": [call("f", "a"), call("g", "b"), call("h", "c")]}
    turns = [calls, result("c", "3"), result("a", "1"), USER, result("b", "2", name="wrong")]
    whole = body(messages=turns)
    shown = [message(f'role="tool" tool="{tool}" index="{index}"', text) for tool, index, text in (("f", 1, "1"), ("h", 2, "3"))]
    assert whole.endswith("".join([*shown, message('role="user"', "Hi"), message('role="tool" tool="g" index="3"', "2")]))


def test_results_belong_to_the_answer_before_them() -> None:
    """Ids may repeat from turn to turn, the first of two equal ones wins, and NAME:POSITION is an alias."""
    first = {"role": "assistant", "tool_calls": [call("f", "x"), call("g", "x")]}
    second = {"role": "assistant", "tool_calls": [call("h", "x"), call("i", "y")]}
    whole = body(messages=[first, result("x", "1"), second, result("i:1", "3"), result("x", "2")])
    assert message('role="tool" tool="f" index="1"', "1") in whole
    assert whole.endswith(message('role="tool" tool="h" index="1"', "2") + message('role="tool" tool="i" index="2"', "3"))


def test_images_stand_as_one_placeholder_in_prompt_order(k3: chat.ChatFormat) -> None:
    picture = {"type": "image_url", "image_url": {"url": "one"}}
    other = {"type": "image", "image": "two"}
    calls = {"role": "assistant", "tool_calls": [call("f", "a"), call("g", "b")]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b<|kimi_image_placeholder|>"}]},
        calls,
        {"role": "tool", "tool_call_id": "b", "content": [picture]},
        {"role": "tool", "tool_call_id": "a", "content": [other]},
    ]
    assert [picture, other, picture] == k3.images(turns)
    ids = k3.render(turns, image_sizes=[(640, 480), (1, 2), (3, 4)])
    assert 3 == ids.count(163605)
    text = k3.render_text(turns, image_sizes=[(640, 480), (1, 2), (3, 4)])
    shown = "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
    assert f"a{shown}b<|kimi_image_placeholder|><|close|>message" in text
    assert text.index("image 1x2") < text.index("image 3x4")
    decoder = k3._tokenizer  # type: ignore[attr-defined]
    begin = ids.index(163602)
    assert [163602, *decoder.encode("image 640x480"), 163603, 163605, 163604] == ids[begin : ids.index(163604) + 1]
    with pytest.raises(RequestError, match="message 0 holds an image, and this model reads text only"):
        k3.render(turns)
    with pytest.raises(RequestError, match="3 images, 1 sizes"):
        k3.render(turns, image_sizes=[(1, 1)])


def test_an_answer_is_gone_on_with() -> None:
    begun = {"role": "assistant", "reasoning_content": "r", "content": "So"}
    opened = '<|open|>message role="assistant"<|sep|>'
    for turn, fields in ((begun, {"continue_final_message": True}), ({**begun, "partial": True}, {})):
        whole = text_of(messages=[USER, turn], **fields)
        assert whole.endswith(f"{opened}<|open|>think<|sep|>r<|close|>think<|sep|><|open|>response<|sep|>So")
        assert 1 == whole.count(opened)
        assert not chat.load("kimi_k3").thinks([USER, turn], **fields)
    only = {"role": "assistant", "reasoning_content": "r", "partial": True}
    assert text_of(messages=[USER, only]).endswith(f"{opened}<|open|>think<|sep|>r")
    assert chat.load("kimi_k3").thinks([USER, only])
    assert text_of(messages=[USER, begun], continue_final_message=True, thinking={"type": "disabled"}).endswith(f"{STUB}So")
    assert text_of(messages=[USER], add_generation_prompt=False).endswith("<|end_of_msg|>")


def effort_of(**fields: Any) -> str | None:
    """The effort that a prompt names, None when it does not think."""
    text = text_of(messages=[USER], **fields)
    thinks = text.endswith("<|open|>think<|sep|>")
    assert thinks == chat.load("kimi_k3").thinks(**fields)
    return text.partition("thinking_effort=")[2].partition("`")[0] if thinks else None


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "max"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": None, "thinking": None}, "max"),
        ({"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "high"}, "low"),
        ({"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "nonsense"}, "low"),
        ({"thinking": {"type": "enabled", "keep": "all"}, "reasoning_effort": "high"}, "high"),
        ({"chat_template_kwargs": {"thinking_effort": "high"}, "reasoning_effort": "low"}, "high"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"chat_template_kwargs": {"thinking": False}}, None),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "max"),
        ({"thinking": {"type": "disabled", "effort": "nonsense", "keep": "some"}}, None),
    ],
)
def test_thinking(fields: dict[str, Any], effort: str | None) -> None:
    assert effort == effort_of(**fields)


def test_tool_choice_and_formats_stand_behind_the_messages() -> None:
    none = message(
        'role="system" type="tool-choice"', "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
    )
    assert message('role="user"', "Hi") + none == body(messages=[USER], tool_choice="none")
    shown = body(messages=[USER], response_format={"type": "json_object"})
    assert shown.endswith("without markdown code blocks (```json) or any additional formatting.<|close|>message<|sep|><|end_of_msg|>")
    for choice in ("auto", None, {"type": "function", "function": {"name": "f"}}):
        assert "tool-choice" not in body(messages=[USER], tools=[TOOL], tool_choice=choice)
    assert message('role="user"', "Hi") == body(messages=[USER], response_format={"type": "text"})


def test_keys_of_tools_are_sorted_by_code_point() -> None:
    tool = {"type": "function", "strict": False, "function": {"name": "f", "parameters": {"b": 1, "B": 2, "a": "\u00e9", "\u00e9": 3}}}
    assert '[{"function":{"name":"f","parameters":{"B":2,"a":"\u00e9","b":1,"\u00e9":3}},"strict":false,"type":"function"}]' in body(
        messages=[USER], tools=[tool]
    )


def system_tools(*tools: Any, content: Any = None, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content, "tools": list(tools)}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_dynamic_tools_stand_anywhere_and_count_for_required() -> None:
    fmt = chat.load("kimi_k3")
    turns = [USER, system_tools(named("g")), USER, system_tools(named("h"), content=[])]
    assert ["f", "g", "h"] == [tool["function"]["name"] for tool in fmt.tools(turns, [TOOL])]
    assert 2 == fmt.render_text(turns, tool_choice="required").count("## New Tools Available")
    assert [] == fmt.tools([USER])


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (r"`messages` is \[\]", {"messages": []}),
    ("`messages` is 'text'", {"messages": "text"}),
    ("message 1 is 5", {"messages": [USER, 5]}),
    ("message 0 has the role 'function'", {"messages": [{"role": "function", "content": ""}]}),
    ("message 0 has the role None", {"messages": [{"content": ""}]}),
    ("message 0 has the content 5", {"messages": [{"role": "user", "content": 5}]}),
    ("part 1 of message 0 is", {"messages": [{"role": "user", "content": ["a", {"type": "video"}]}]}),
    ("part 0 of message 0 is", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("message 0 has the `name` 5", {"messages": [{**USER, "name": 5}]}),
    ("message 1 is a tool result without `tool_call_id`", {"messages": [USER, result(None, "x")]}),
    (r"message 1 answers the call 'a', .* has \[\]", {"messages": [USER, result("a", "x")]}),
    (r"message 1 answers the call 'b', .* has \['a'\]", {"messages": [{"role": "assistant", "tool_calls": [call("f", "a")]}, result("b", "x")]}),
    ("the arguments of call 1 in message 0 are", {"messages": [{"role": "assistant", "tool_calls": [call("f", "a", "[1]")]}]}),
    ("the arguments of call 1 in message 0 are", {"messages": [{"role": "assistant", "tool_calls": [call("f", "a", "5")]}]}),
    ("cannot be written as JSON", {"messages": [{"role": "assistant", "tool_calls": [call("f", "a", {"x": float("nan")})]}]}),
    ("message 0 has the tool call", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
    ("lone surrogate", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("message 0 is to be continued", {"messages": [USER], "continue_final_message": True}),
    ("`continue_final_message` is 5", {"messages": [USER], "continue_final_message": 5}),
    ("`tools` is", {"messages": [USER], "tools": "f"}),
    (r"`tools`\[0\] is None", {"messages": [USER], "tools": [None]}),
    (r"`tools`\[1\] is", {"messages": [USER], "tools": [TOOL, {"type": "web_search", "function": {"name": "x"}}]}),
    (r"`tools`\[0\] is", {"messages": [USER], "tools": [{"function": {"name": "x"}}]}),
    (r"`tools`\[0\] has the name None", {"messages": [USER], "tools": [{"type": "function"}]}),
    *((rf"`tools`\[0\] has the name '{name[:3]}", {"messages": [USER], "tools": [named(name)]}) for name in ("", "1f", "@f", "f" * 257)),
    ("declares 'f' a second time", {"messages": [USER], "tools": [TOOL, TOOL]}),
    ("`tools` of message 0.0. declares 'f' a second time", {"messages": [system_tools(named("f")), USER], "tools": [TOOL]}),
    ("`tools` of message 1.0. declares 'g' a second time", {"messages": [system_tools(named("g")), system_tools(named("g"))]}),
    ("message 0 has `tools` and the role user", {"messages": [system_tools(TOOL, role="user")]}),
    ("message 0 has both content and `tools`", {"messages": [system_tools(TOOL, content="x")]}),
    ("`tools` of message 0 is", {"messages": [{"role": "system", "tools": {"f": 1}}]}),
    ("`tool_choice` is 'required' without any tool", {"messages": [USER], "tool_choice": "required"}),
    ("`tool_choice` is 'any'", {"messages": [USER], "tool_choice": "any"}),
    ("`tool_choice` names 'g'", {"messages": [USER], "tools": [TOOL], "tool_choice": named("g")}),
    ("`response_format` is", {"messages": [USER], "response_format": {"type": "xml"}}),
    ("`response_format` is", {"messages": [USER], "response_format": "json"}),
    ("`response_format` has the json_schema None", {"messages": [USER], "response_format": {"type": "json_schema"}}),
    ("`response_format` has the json_schema", {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
    ("`response_format` has the schema None", {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    (
        "`response_format` has strict 1",
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
    ),
    ("effort is 'medium'", {"messages": [USER], "reasoning_effort": "medium"}),
    ("`thinking` is", {"messages": [USER], "thinking": {"type": "maybe"}}),
    ("`thinking` is True", {"messages": [USER], "thinking": True}),
    ("`thinking` has keep 'last'", {"messages": [USER], "thinking": {"type": "enabled", "keep": "last"}}),
    ("disagree: True and False", {"messages": [USER], "thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}),
    ("disagree: effort 'low' and 'max'", {"messages": [USER], "thinking": {"effort": "low"}, "chat_template_kwargs": {"thinking_effort": "max"}}),
    ("preserve_thinking false", {"messages": [USER], "chat_template_kwargs": {"preserve_thinking": False}}),
    ("`chat_template_kwargs` is 5", {"messages": [USER], "chat_template_kwargs": 5}),
    ("`chat_template_kwargs` has thinking 'yes'", {"messages": [USER], "chat_template_kwargs": {"thinking": "yes"}}),
]


@pytest.mark.parametrize(("fact", "request_"), REFUSED, ids=[str(place) for place in range(len(REFUSED))])
def test_what_cannot_be_rendered_is_refused_in_words(k3: chat.ChatFormat, fact: str, request_: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=fact) as caught:
        k3.render(**request_)
    assert len(str(caught.value)) < 500
    assert caught.value.fix


def test_deep_tools_are_refused_not_a_crash(k3: chat.ChatFormat) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for tools in ([deep], deep, [{"type": "function", "function": {"name": "f", "parameters": deep}}]):
        with pytest.raises(RequestError) as caught:
            k3.render([USER], tools)
        assert len(str(caught.value)) < 500
    for turn in ({"role": "user", "content": deep}, deep, {"role": "assistant", "tool_calls": [call("f", "1", {"a": deep})]}):
        with pytest.raises(RequestError):
            k3.render([turn])


def test_formats_are_found_by_name_or_folder(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="there is no chat format and no folder 'nothing'"):
        chat.load("nothing")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}', encoding="utf-8")
    assert "kimi_k3" == chat.load(tmp_path).name
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        chat.load("kimi_k3", tmp_path)
