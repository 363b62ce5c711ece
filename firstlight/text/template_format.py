"""The chat format of a checkpoint that brings a jinja template: prompts by the template, answers by the marks that it shows."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text import chat_fields
from firstlight.text.brief import brief
from firstlight.text.guard import Guard
from firstlight.text.reader import Parser, Reader
from firstlight.text.tag_calls import HermesCalls, KimiK2Calls
from firstlight.text.tag_parser import END_THINK, THINK, TagMachine, marks_of
from firstlight.text.template import Template
from firstlight.text.template_traits import Traits, read_traits
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.transcripts import transcript_for
from firstlight.text.turns import Turn, continued, images, read_turns
from firstlight.text.zone import CallForm, Pieces, Zone

_RESUME = "\u2060RESUME\u2060"
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_ANYTHING = [{"role": "user", "content": "x"}]

Thought = Literal["open", "optional", "none"]


class TemplateFormat:
    """Prompts and answers by a template. Without one it only parses, in the style that its traits name; without a tokenizer likewise.

    `names`: special tokens as the template calls them (`bos_token`). `end_ids`: what the model's files say ends a text.
    """

    num_pending = 0

    def __init__(
        self,
        name: str,
        template: Template | None,
        tokenizer: Tokenizer | None,
        *,
        names: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
        traits: Traits | None = None,
    ) -> None:
        self.name = name
        self._template = template
        self._tokenizer = tokenizer
        self._names = dict(names or {})
        self._traits = traits or (read_traits(template, **self._names) if template else Traits())
        self._special = tokenizer.special_ids if tokenizer else {}
        self._end_ids = frozenset(end_ids)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer; the one that the template writes after an answer is among them."""
        if self._tokenizer is None:
            return self._end_ids
        first = next((piece for piece in self._tokenizer.pieces(self._traits.turn_end.lstrip()) if piece != ""), None)
        ends = {self._tokenizer.eos_id, first} - {None}
        return self._end_ids | frozenset(end for end in ends if isinstance(end, int))

    def images(self, messages: Any) -> list[Mapping[str, Any]]:
        """Image parts as the client sent them, in the order of the prompt."""
        return images(read_turns(messages))

    def tools(self, messages: Any, tools: Any = None) -> list[Mapping[str, Any]]:
        """Tools of the request, then those that its messages add."""
        return chat_fields.declared_tools(read_turns(messages), tools)

    def render(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> list[int]:
        """Ids of the prompt; control tokens come from the template alone.

        Raises: RequestError for whatever is wrong with the request or refused by the template, ConfigError without template or tokenizer.
        """
        tokenizer = self._known_tokenizer()
        text, guard = self._rendered(messages, tools, image_sizes, fields)
        ids: list[int] = []
        for piece in tokenizer.pieces(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += tokenizer.encode(guard.open(piece))
        return ids

    def render_text(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> str:
        """The prompt for people to read; its ids cannot be had from it, as text may look like a control token."""
        text, guard = self._rendered(messages, tools, image_sizes, fields)
        return guard.open(text)

    def thinks(self, messages: Any = None, **fields: Any) -> bool:
        """Whether the answer begins inside of thinking."""
        return self._thought(messages, fields) == "open"

    def parser(self, tools: Sequence[Any] | None = None, **fields: Any) -> Parser:
        """Reads one answer from text in which control tokens are spelled out."""
        return Parser(self._machine(tools, fields), self._marks)

    def reader(self, tools: Sequence[Any] | None = None, **fields: Any) -> Reader:
        """Reads one answer from token ids; ids of calls that the model writes itself are kept."""
        tokenizer = self._known_tokenizer()
        marks = {self._special[text]: text for text in self._marks if text in self._special}
        spelled = [text for text in self._marks if text not in self._special]
        hidden = (tokenizer.hidden_ids | self.end_ids) - frozenset(marks)
        return Reader(self._machine(tools, fields), tokenizer, marks, hidden, spelled)

    def zone(self, tools: Sequence[Any] | None = None, *, messages: Any = None, **fields: Any) -> Zone:
        """Where a grammar can hold in an answer."""
        thought = self._thought(messages, fields)
        control = frozenset(self._known_tokenizer().special_ids.values())
        close = self._piece(END_THINK)
        return Zone(
            thinking=thought,
            think_open=self._piece(THINK) if thought == "optional" else (),
            think_close=close,
            banned_thinking=control - frozenset(piece for piece in close if isinstance(piece, int)),
            body_open=("\n\n",) if self._trims and thought != "none" else (),
            body_close=(),
            message_close=(),
            banned_body=control,
            end_ids=self.end_ids,
            calls=self._calls(),
        )

    @property
    def _marks(self) -> tuple[str, ...]:
        return marks_of(self._traits.style, thinks=self._thinking_known)

    @property
    def _thinking_known(self) -> bool:
        return self._traits.thinks or END_THINK in self._special

    @property
    def _trims(self) -> bool:
        return self._traits.style != "kimi_k2"

    def _piece(self, spelling: str) -> Pieces:
        return (self._special.get(spelling, spelling),)

    def _calls(self) -> CallForm | None:
        if self._traits.style == "plain":
            return None
        return HermesCalls(self._special) if self._traits.style == "hermes" else KimiK2Calls(self._special)

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(f"the chat format {self.name} was loaded without a tokenizer, it can only parse text", "Give it a tokenizer.")
        return self._tokenizer

    def _machine(self, tools: Sequence[Any] | None, fields: Mapping[str, Any]) -> TagMachine:
        return TagMachine(transcript_for(tools, fields), thinking=self._thought(fields.get("messages"), fields), trims=self._trims)

    def _thought(self, messages: Any, fields: Mapping[str, Any]) -> Thought:
        """How the prompt leaves thinking: inside of it, behind it, or up to the model."""
        if not self._thinking_known:
            return "none"
        if self._template is None:
            on = chat_fields.thinking(fields).on
            return "optional" if on is None else "open" if on else "none"
        turns = None if messages is None else read_turns(messages)
        resumed = turns is not None and continued(turns, chat_fields.flag(fields, "continue_final_message", False)) is not None
        text, guard = self._rendered(messages if resumed else _ANYTHING, None, None, {**fields, "tool_choice": None})
        if resumed:
            begun, ended = text.rfind(THINK), text.rfind(END_THINK)
            return "open" if begun > ended else "none"
        text = guard.open(text).rstrip()
        return "open" if text.endswith(THINK) else "none" if text.endswith(END_THINK) else "optional"

    def _rendered(
        self, messages: Any, tools: Any, image_sizes: Sequence[tuple[int, int]] | None, fields: Mapping[str, Any]
    ) -> tuple[str, Guard]:
        """The prompt as one string in which text of users is sealed, and what opens the seals."""
        if self._template is None:
            raise ConfigError(f"the chat format {self.name} has no template, it can only parse", "Load it from a model folder that brings one.")
        turns = read_turns(messages)
        declared = chat_fields.declared_tools(turns, tools)
        choice = chat_fields.tool_choice(fields, declared)
        if declared and choice != "none" and not self._traits.declares_tools:
            raise RequestError("`tools` cannot be said in the chat template of this model", "Send none, or tool_choice 'none'.")
        chat_fields.response_format(fields)
        if image_sizes is None:
            chat_fields.refuse_images(turns)
        resumed = continued(turns, chat_fields.flag(fields, "continue_final_message", False))
        stub = chat_fields.flag(fields, "add_generation_prompt", True) and resumed is None
        plain = [self._plain(turn, message) for turn, message in zip(turns, messages, strict=True) if not turn.tools]
        if resumed is not None:
            plain[-1]["content"] = resumed.text + _RESUME
        given = {"messages": plain, "tools": declared or None, **self._extra(fields)}
        try:
            guard = Guard(self._special, given)
            sealed = guard.sealed(given)
        except RecursionError:
            raise RequestError("the messages or tools are nested too deeply", "Nest values less than a few hundred levels deep.") from None
        if self._traits.splits_thinking:
            for message in sealed["messages"]:
                _reopen_thinking(guard, message)
        text = self._template.render(documents=None, add_generation_prompt=stub, **{**self._names, **sealed})
        return (text if resumed is None else _up_to_resume(text)), guard

    def _extra(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Names beside the messages: how to think, under the names that templates know, and whatever the client adds."""
        thinking = chat_fields.thinking(fields)
        extra = chat_fields.template_fields(fields)
        taken = [name for name in _RESERVED if name in extra]
        if taken:
            raise RequestError(f"`chat_template_kwargs` holds {taken[0]!r}", "Send it as a field of the request.")
        on = {} if thinking.on is None else {"enable_thinking": thinking.on, "thinking": thinking.on}
        effort = {} if thinking.effort is None else {"reasoning_effort": thinking.effort, "thinking_effort": thinking.effort}
        return {**on, **effort, **extra}

    def _plain(self, turn: Turn, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in the form that this template reads."""
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tools", "reasoning", "partial")}
        assert self._template is not None
        plain["role"] = "developer" if message["role"] == "developer" and "developer" in self._template.source else turn.role
        content = message.get("content")
        if isinstance(content, list | tuple) and not (self._traits.content_parts or images([turn])):
            content = "\n".join(part for part in turn.parts if isinstance(part, str))
        if turn.calls:
            plain["tool_calls"] = [self._call(turn.index, call) for call in message["tool_calls"]]
            if content in (None, "", []):
                content = None if not self._traits.empty_content or (content is None and self._traits.null_content) else ""
        plain["content"] = "" if content is None and not turn.calls else content
        if turn.reasoning is not None:
            plain["reasoning_content"] = turn.reasoning
        elif "reasoning_content" in plain:
            del plain["reasoning_content"]
        return plain

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str) and not arguments.strip():
            arguments = None
        if self._traits.arguments_as_text:
            written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        else:
            written = _read_object(index, arguments)
        return {"type": "function", **call, "function": {**call["function"], "arguments": written}}


def _read_object(index: int, arguments: Any) -> Any:
    """Arguments as an object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise RequestError(f"message {index} has a tool call with the arguments {brief(arguments)}", "Send a JSON object.")
    return value


def _reopen_thinking(guard: Guard, message: dict[str, Any]) -> None:
    """Thinking that a client sent back inside of the content is for the template to find: the first pair of marks is unsealed."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or "reasoning_content" in message:
        return
    begin, end = guard.sealed(THINK), guard.sealed(END_THINK)
    before, found, after = content.partition(end)
    if found:
        if before.lstrip().startswith(begin):
            before = before.replace(begin, THINK, 1)
        message["content"] = before + END_THINK + after


def _up_to_resume(text: str) -> str:
    if _RESUME not in text:
        raise RequestError("the chat template leaves the message out that is to be continued", "Send it without continue_final_message.")
    return text[: text.rindex(_RESUME)]
