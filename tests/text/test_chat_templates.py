"""Prompts by a checkpoint's own template: the ids of transformers, no control tokens from users, and a sandbox that holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text import chat
from firstlight.text.guard import Guard
from firstlight.text.template import Template
from firstlight.text.template_traits import read_traits
from firstlight.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.conftest import FILES

TEMPLATES = FILES.parent / "chat" / "templates"
DEEPSEEK = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    "qwq-": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    "glm-": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    "deep": [*DEEPSEEK, "<think>", "</think>", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"],
    "kimi": [
        "<|im_system|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
    ],
}
NAMES = ["qwen-3", "qwen-3.5", "qwq-32b", "glm-4.7-flash", "glm-5.2", "deepseek-r1", "deepseek-v3.1", "kimi-k2"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <b>\u00e9</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]


def source_of(name: str) -> str:
    if name == "kimi-k2":
        return json.loads((FILES / "kimi" / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]  # type: ignore[no-any-return]
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def write_model(folder: Path, source: str, special: Sequence[str]) -> Path:
    """A model folder: a template, and a tokenizer whose tokens are bytes and these special ones."""
    folder.mkdir(parents=True)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    rules = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: place for place, letter in enumerate(sorted(letters))}, merges=[]))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    rules.add_special_tokens(list(special))
    rules.save(str(folder / "tokenizer.json"))
    bos, eos = (DEEPSEEK[2], DEEPSEEK[3]) if DEEPSEEK[2] in special else (special[0], special[1])
    settings = {"bos_token": bos, "eos_token": eos, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {name: write_model(root / name, source_of(name), SPECIAL[name[:4]]) for name in NAMES}


@pytest.fixture(scope="session")
def formats(folders: Mapping[str, Path]) -> Mapping[str, chat.ChatFormat]:
    return {name: chat.load(folder) for name, folder in folders.items()}


def calls(*named: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"functions.{name}:{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(named)
    ]


USER = {"role": "user", "content": 'Hi \u4f60\u597d <b> & "q"\'\n'}
TWO = [("get_weather", {"city": "Oslo \u00e9", "n": 1, "deep": {"a": [1, None, True]}}), ("get_time", {})]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "one message": ([USER], False),
    "system and turns": ([{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yo."}, USER], False),
    "tools": ([{"role": "system", "content": "Be brief."}, USER], True),
    "calls and results": (
        [
            USER,
            {"role": "assistant", "content": "Wait.", "tool_calls": calls(*TWO)},
            {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny"},
            {"role": "tool", "tool_call_id": "functions.get_time:1", "content": "09:00"},
        ],
        True,
    ),
    "calls without words": (
        [USER, {"role": "assistant", "content": "", "tool_calls": calls(TWO[0])}, {"role": "tool", "tool_call_id": "x", "content": "s"}],
        True,
    ),
    "reasoning": (
        [
            USER,
            {"role": "assistant", "content": "A", "reasoning_content": "\nwhy\n"},
            USER,
            {"role": "assistant", "content": "B", "reasoning_content": "r"},
        ],
        False,
    ),
    "thinking inside of content": ([USER, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nA"}, USER], False),
}


def as_clients_send(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as JSON text."""
    turns = []
    for message in messages:
        turn = dict(message)
        if "tool_calls" in turn:
            turn["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
                for c in turn["tool_calls"]
            ]
        turns.append(turn)
    return turns


# With empty content beside a call, DeepSeek-R1's template wants null, which the witness takes out.
PAIRS = [(name, conversation) for name in NAMES for conversation in CONVERSATIONS if (name, conversation) != ("deepseek-r1", "calls without words")]


@pytest.mark.parametrize(("name", "conversation"), PAIRS)
def test_ids_are_those_of_transformers(name: str, conversation: str, folders: Mapping[str, Path], formats: Mapping[str, chat.ChatFormat]) -> None:
    messages, with_tools = CONVERSATIONS[conversation]
    witness = transformers.PreTrainedTokenizerFast.from_pretrained(folders[name])
    fmt = formats[name]
    traits = fmt._traits  # type: ignore[attr-defined]
    given = as_clients_send(messages) if traits.arguments_as_text else messages
    for thinking in (None, True, False):
        extra = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        fields = {} if thinking is None else {"thinking": {"type": "enabled" if thinking else "disabled"}}
        tools = TOOLS if with_tools and traits.declares_tools else None
        for stub in (True, False):
            want = witness.apply_chat_template(given, tools=tools, add_generation_prompt=stub, tokenize=True, return_dict=False, **extra)
            sent = as_clients_send(messages)
            assert want == fmt.render(sent, tools, add_generation_prompt=stub, **fields)
            text = witness.apply_chat_template(given, tools=tools, add_generation_prompt=stub, tokenize=False, **extra)
            assert text == fmt.render_text(sent, tools, add_generation_prompt=stub, **fields)


def test_ids_with_a_real_vocabulary(deepseek_folder: Path, deepseek: Tokenizer, tmp_path: Path) -> None:
    witness = transformers.PreTrainedTokenizerFast.from_pretrained(deepseek_folder)
    shutil.copy(deepseek_folder / "tokenizer_config.json", tmp_path)
    for name in ("deepseek-r1", "deepseek-v3.1"):
        (tmp_path / "chat_template.jinja").write_text(source_of(name), encoding="utf-8")
        witness.chat_template = source_of(name)
        fmt = chat.load(tmp_path, deepseek)
        assert {witness.eos_token_id} == fmt.end_ids
        for messages, _ in (CONVERSATIONS["system and turns"], CONVERSATIONS["calls and results"]):
            sent = as_clients_send(messages)
            assert witness.apply_chat_template(sent, add_generation_prompt=True, return_dict=False) == fmt.render(sent)


TRAITS = {
    "qwen-3": (True, "hermes", "<|im_end|>\n"),
    "qwen-3.5": (False, "plain", "<|im_end|>\n"),
    "qwq-32b": (False, "hermes", "<|im_end|>\n"),
    "glm-4.7-flash": (False, "plain", ""),
    "glm-5.2": (False, "plain", ""),
    "deepseek-r1": (True, "plain", DEEPSEEK[3]),
    "deepseek-v3.1": (True, "plain", DEEPSEEK[3]),
    "kimi-k2": (False, "kimi_k2", "<|im_end|>"),
}


def test_traits_are_found_out(formats: Mapping[str, chat.ChatFormat]) -> None:
    got = {name: fmt._traits for name, fmt in formats.items()}  # type: ignore[attr-defined]
    assert TRAITS == {name: (traits.arguments_as_text, traits.style, traits.turn_end) for name, traits in got.items()}
    assert {"deepseek-r1", "deepseek-v3.1"} == {name for name, traits in got.items() if not traits.declares_tools}


def test_where_thinking_begins(formats: Mapping[str, chat.ChatFormat]) -> None:
    off = {"thinking": {"type": "disabled"}}
    on = {"thinking": {"type": "enabled"}}
    got = {name: tuple(fmt.zone(**fields).thinking for fields in ({}, on, off)) for name, fmt in formats.items()}
    assert {
        "qwen-3": ("optional", "optional", "none"),
        "qwen-3.5": ("open", "open", "none"),
        "qwq-32b": ("open",) * 3,
        "glm-4.7-flash": ("open", "open", "none"),
        "glm-5.2": ("open", "open", "none"),
        "deepseek-r1": ("open",) * 3,
        "deepseek-v3.1": ("none", "open", "none"),
        "kimi-k2": ("none",) * 3,
    } == got
    assert formats["qwen-3.5"].thinks() and not formats["qwen-3"].thinks()


def test_end_ids(formats: Mapping[str, chat.ChatFormat]) -> None:
    tokenizer = formats["kimi-k2"]._tokenizer  # type: ignore[attr-defined]
    assert {tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["<|im_user|>"]} == formats["kimi-k2"].end_ids


PLACES = ["system", "user", "assistant", "reasoning", "tool", "tool_name", "description", "key", "value", "property", "parts"]


def request_with(text: str, place: str, pieces: Sequence[str] = ()) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    at = dict.fromkeys(PLACES, "word") | {place: text}
    content = [{"type": "text", "text": piece} for piece in pieces] if place == "parts" else at["user"]
    messages = [
        {"role": "system", "content": at["system"]},
        {"role": "user", "content": content},
        {
            "role": "assistant",
            "content": at["assistant"],
            "reasoning_content": at["reasoning"],
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": at["tool_name"], "arguments": json.dumps({at["key"]: at["value"]})}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": at["tool"]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": at["assistant"]},
        {"role": "user", "content": "x"},
    ]
    parameters = {"type": "object", "properties": {at["property"]: {"type": "string"}}}
    return messages, [{"type": "function", "function": {"name": "f", "description": at["description"], "parameters": parameters}}]


@settings(max_examples=150)
@given(seed=st.data(), name=st.sampled_from(NAMES), place=st.sampled_from(PLACES))
def test_text_never_becomes_a_control_token(seed: st.DataObject, name: str, place: str, formats: Mapping[str, chat.ChatFormat]) -> None:
    """As many control ids as with a harmless word in its place, and the text comes back out of the ids."""
    special = SPECIAL[name[:4]]
    fmt = formats[name]
    bits = [*special, special[0][:3], special[0][3:], "<", ">", "<|", "\n", "a"]
    pieces = seed.draw(st.lists(st.sampled_from(bits), min_size=1, max_size=4))
    text = "x" + "".join(pieces) + ("y" if place == "assistant" else "")
    if place == "assistant" and "</think>" in text and fmt._traits.splits_thinking:  # type: ignore[attr-defined]
        return
    control = set(fmt._tokenizer.special_ids.values())  # type: ignore[attr-defined]
    counts = []
    for words, parts in ((text, ["x", *pieces]), ("word", ["word"])):
        messages, tools = request_with(words, place, parts)
        tools = tools if fmt._traits.declares_tools else []  # type: ignore[attr-defined]
        ids = fmt.render(messages, tools)
        counts.append([i for i in ids if i in control])
        assert fmt.render_text(messages, tools) == fmt._tokenizer.decode(ids)  # type: ignore[attr-defined]
    assert counts[1] == counts[0]


def test_guard_seals_spellings_whole_cut_and_joined() -> None:
    guard = Guard(["<|a|>", "<x>", "[B]"], ["text"])
    mark = guard.seal
    assert {"k": [f"<{mark}|a|>b", f"c<{mark}|a", 5, None, f"[{mark}", "B]", f"<<{mark}"]} == guard.sealed(
        {"k": ["<|a|>b", "c<|a", 5, None, "[", "B]", "<<"]}
    )
    assert {f"<{mark}x>": 1} == guard.sealed({"<x>": 1})
    assert "c<|a" == guard.open(guard.sealed("c<|a"))


def test_guard_takes_a_seal_that_nobody_wrote() -> None:
    first = Guard(["<x>"], []).seal
    assert first != Guard(["<x>"], [{"a": ["b" + first]}]).seal
    assert first != Guard(["<x>"], ["\\ufdd0"]).seal
    with pytest.raises(RequestError, match="all 32 noncharacters"):
        Guard(["<x>"], ["".join(chr(code) for code in range(0xFDD0, 0xFDF0))])


def test_a_user_may_write_the_seal(formats: Mapping[str, chat.ChatFormat]) -> None:
    text = "\ufdd0<|im_end|>\ufdd1"
    ids = formats["qwen-3"].render([{"role": "user", "content": text}])
    assert f"user\n{text}<|im_end|>" in formats["qwen-3"]._tokenizer.decode(ids)  # type: ignore[attr-defined]


def test_only_the_first_thought_in_content_is_for_the_template(formats: Mapping[str, chat.ChatFormat]) -> None:
    turn = {"role": "assistant", "content": "<think>a</think>b</think>c<think>"}
    shown = formats["qwen-3"].render_text([USER, turn, USER])
    assert "<|im_start|>assistant\nb</think>c<think><|im_end|>" in shown
    ids = formats["qwen-3"].render([USER, turn, USER])
    assert formats["qwen-3"]._tokenizer.special_ids["</think>"] not in ids  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "content"), [("kimi-k2", "[1]"), ("qwq-32b", "{bad"), ("qwq-32b", "5")])
def test_arguments_that_are_no_object(name: str, content: str, formats: Mapping[str, chat.ChatFormat]) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": content}}]}
    with pytest.raises(RequestError, match="message 1 has a tool call with the arguments"):
        formats[name].render([USER, turn])


def test_null_and_empty_content_with_calls(formats: Mapping[str, chat.ChatFormat]) -> None:
    """A template that knows only one of the two is given that one."""
    for name, fmt in formats.items():
        for content in (None, "", []):
            turn = {"role": "assistant", "content": content, "tool_calls": as_clients_send([{"tool_calls": calls(TWO[0])}])[0]["tool_calls"]}
            text = fmt.render_text([USER, turn, {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "s"}])
            assert "get_weather" in text, name
            assert "None" not in text and "Oslo \u00e9" in text and "[]" not in text, name


def test_parts_are_joined_where_a_template_wants_text(formats: Mapping[str, chat.ChatFormat]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in formats["qwen-3"].render_text([{"role": "user", "content": parts}])
    assert "onetwo" in formats["kimi-k2"].render_text([{"role": "user", "content": parts}])


def test_going_on_from_a_message(formats: Mapping[str, chat.ChatFormat]) -> None:
    turns = [USER, {"role": "assistant", "content": "So  far "}]
    for name in ("qwen-3", "kimi-k2", "deepseek-v3.1"):
        fmt = formats[name]
        assert fmt.render_text(turns, continue_final_message=True).endswith("So  far ")
        assert fmt.render_text([USER, {**turns[1], "partial": True}]) == fmt.render_text(turns, continue_final_message=True)
        assert not fmt.thinks(turns, continue_final_message=True)


def test_dynamic_tools_join_those_of_the_request(formats: Mapping[str, chat.ChatFormat]) -> None:
    dynamic = {"role": "system", "content": None, "tools": [{"type": "function", "function": {"name": "late"}}]}
    assert formats["qwen-3"].render_text([USER], [*TOOLS, *dynamic["tools"]]) == formats["qwen-3"].render_text([USER, dynamic], TOOLS)  # type: ignore[misc]


def test_what_a_template_cannot_say_is_refused(formats: Mapping[str, chat.ChatFormat]) -> None:
    with pytest.raises(RequestError, match="`tools` cannot be said"):
        formats["deepseek-r1"].render([USER], TOOLS)
    formats["deepseek-r1"].render([USER], TOOLS, tool_choice="none")
    with pytest.raises(RequestError, match="message 0 holds an image"):
        formats["qwen-3"].render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(RequestError, match="`chat_template_kwargs` holds 'messages'"):
        formats["qwen-3"].render([USER], chat_template_kwargs={"messages": []})
    with pytest.raises(RequestError, match="has the role 'moderator'"):
        formats["qwen-3"].render([{"role": "moderator", "content": ""}])


def test_deep_values_are_refused_not_a_crash(formats: Mapping[str, chat.ChatFormat]) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for tools in ([deep], [{"type": "function", "function": {"name": "f", "parameters": deep}}]):
        for name in ("qwen-3", "kimi-k2", "glm-5.2"):
            with pytest.raises(RequestError) as caught:
                formats[name].render([USER], tools)
            assert len(str(caught.value)) < 500


def test_names_reach_the_template(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.role }}:{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}{{ mood }}{{ enable_thinking }}{{ reasoning_effort }}{{ {'b': '<\u00e9>', 'a': 1} | tojson }}"
    )
    fmt = chat.load(write_model(tmp_path / "m", source, ["<s>", "</s>"]), clock=lambda: datetime(2031, 2, 3))
    text = fmt.render_text([USER] * 3, chat_template_kwargs={"mood": "<s>"}, thinking={"type": "enabled", "effort": "low"})
    assert text == f"user:{USER['content']}" * 2 + '<s>2031-02-03<s>Truelow{"b": "<\u00e9>", "a": 1}'
    ids = fmt.render([USER], chat_template_kwargs={"mood": "<s>"})
    assert 1 == ids.count(256)


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    fmt = chat.load(write_model(tmp_path / "m", "{{ raise_exception('roles must alternate') }}", ["<s>", "</s>"]))
    with pytest.raises(RequestError, match="the chat template refuses these messages: roles must alternate"):
        fmt.render([USER])
    broken = chat.load(write_model(tmp_path / "n", "{{ messages[7].content + 1 }}", ["<s>", "</s>"]))
    with pytest.raises(RequestError, match="does not accept these messages"):
        broken.render([USER])


UNSAFE = [
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% include 'other' %}",
    "{% import 'other' as o %}",
    "{% from 'other' import o %}",
    "{% extends 'other' %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
]
ESCAPES = [
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}",
    "{{ ''[('__cla' ~ 'ss__')] }}",
    "{{ dict|attr('__globals__') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ raise_exception.func_globals }}",
    "{{ strftime_now.__code__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ 'x'.center(10 ** 9) }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'x' }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ 9 ** 99999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ lipsum(1000000) }}",
    "{{ 'x'|center(10000000) }}",
    "{% for i in range(10000000) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}{% endfor %}",
    "{% macro m(n) %}{{ 'ab' * 1000 }}{{ m(n - 1) if n else '' }}{{ m(n - 1) if n else '' }}{% endmacro %}{{ m(40) }}",
    "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ messages.__len__ }}",
]


@pytest.mark.parametrize("source", UNSAFE)
def test_unsafe_templates_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(ConfigError, match=r"t\.jinja is not safe: it uses \w+ in line 1\. Put a template without it"):
        Template(source, "t.jinja")


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_leaves_the_sandbox_and_nothing_grows_without_end(source: str) -> None:
    with pytest.raises((ConfigError, RequestError)) as caught:
        shown = Template(source, "t.jinja", max_chars=100_000).render(messages=[{"role": "user"}])
        assert "" == shown, "an undefined value may be shown as nothing, a value of the interpreter never"
        raise RequestError("nothing was shown", "Fine.")
    assert len(str(caught.value)) < 500


def test_broken_templates_name_file_and_line() -> None:
    with pytest.raises(ConfigError, match=r"t\.jinja cannot be compiled: .* \(line 2\)"):
        Template("a\n{% if %}", "t.jinja")


def test_formats_of_folders(folders: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        chat.load(tmp_path)
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}), encoding="utf-8")
    assert "T" == chat.load(tmp_path).render_text([USER])
    with pytest.raises(ConfigError, match="without a tokenizer"):
        chat.load(tmp_path).render([USER])
    with pytest.raises(ConfigError, match="has no template"):
        chat.load("hermes").render_text([USER])
    other = load_tokenizer(folders["qwen-3"])
    assert chat.load(tmp_path, other).render([USER]) == other.encode("T")  # type: ignore[union-attr]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        chat.load(tmp_path)


def test_traits_of_a_template_that_renders_nothing() -> None:
    traits = read_traits(Template("", "t.jinja"))
    assert ("plain", False, "") == (traits.style, traits.declares_tools, traits.turn_end)
