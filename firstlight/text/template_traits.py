"""What a chat template expects of its messages, found out by rendering small ones; templates do not say it otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text.tag_parser import Style
from firstlight.text.template import Template

_PROBE = "probe value"
_TEXT = '{"probe_key": "probe value"}'
_OBJECT = {"probe_key": _PROBE}
_WRONG = ('\\"probe_key', "'probe_key'", "None")
_SPLITS_THINKING = re.compile(r"""['"]</think>['"]\s+in\b|split\(\s*['"]</think>['"]""")

# A mark of its own: some models write it with something in front.
_HERMES = re.compile(r'(?<![^\s>])<tool_call>\s*\{\s*"name"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """`arguments_as_text`: of tool calls, else as an object. `null_content`, `empty_content`: which of the two a message with calls may have.

    `content_parts`: content may be a list. `declares_tools`: it writes the tools of a request. `turn_end`: the text after an assistant's content.
    `splits_thinking`: it looks for `</think>` in content. `thinks`: the model marks thinking so.
    """

    arguments_as_text: bool = True
    null_content: bool = True
    empty_content: bool = True
    content_parts: bool = False
    declares_tools: bool = True
    turn_end: str = ""
    splits_thinking: bool = False
    thinks: bool = True
    style: Style = "plain"


def read_traits(template: Template, **names: Any) -> Traits:
    """Traits of a template, with the names of special tokens that it may use."""

    def shown(*messages: dict[str, Any], tools: Any = None) -> str | None:
        try:
            return template.render(messages=list(messages), tools=tools, documents=None, add_generation_prompt=False, **names)
        except (RequestError, ConfigError):
            return None

    def calls(content: str | None, arguments: Any) -> str:
        call = {"id": "functions.probe_tool:0", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        text = shown({"role": "user", "content": "x"}, answer, {"role": "tool", "tool_call_id": call["id"], "content": "x"}) or ""
        right = all(word in text for word in ("probe_tool", "probe_key", _PROBE)) and not any(word in text for word in _WRONG)
        return text if right else ""

    as_text = [calls(content, _TEXT) for content in (None, "")]
    as_object = [calls(content, _OBJECT) for content in (None, "")]
    found = as_text if any(as_text) or not any(as_object) else as_object
    answered = shown({"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}) or ""
    tool = {"type": "function", "function": {"name": "probe_tool", "description": "x", "parameters": {"type": "object", "properties": {}}}}
    declared = shown({"role": "user", "content": "x"}, tools=[tool]) or ""
    parts = shown({"role": "user", "content": [{"type": "text", "text": _PROBE}]}) or ""
    return Traits(
        arguments_as_text=found is as_text,
        null_content=bool(found[0]) or not any(found),
        empty_content=bool(found[1]) or not any(found),
        content_parts=_PROBE in parts and "'type'" not in parts and '"type"' not in parts,
        declares_tools="probe_tool" in declared,
        turn_end=answered.rpartition(_PROBE)[2],
        splits_thinking=_SPLITS_THINKING.search(template.source) is not None,
        thinks="</think>" in template.source,
        style=_style(found[0] or found[1]),
    )


def _style(text: str) -> Style:
    """How the model writes calls, by what the template writes; forms that are not parsed here count as plain text."""
    if "<|tool_calls_section_begin|>" in text:
        return "kimi_k2"
    return "hermes" if _HERMES.search(text) else "plain"
