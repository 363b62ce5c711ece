"""Kimi K3's chat format as a whole: its control tokens by id, prompts from messages, answers from tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text import chat_fields, k3_render
from firstlight.text.brief import brief
from firstlight.text.k3_header import CLOSE, END, OPEN, SEP, escape
from firstlight.text.k3_parser import KimiK3Machine
from firstlight.text.reader import Parser, Reader
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.transcripts import transcript_for
from firstlight.text.turns import Turn, continued, images, read_turns
from firstlight.text.zone import Pieces, Zone

MARKS = (OPEN, CLOSE, SEP, END)
_ENDS = (END, "[EOS]", "[EOT]")
_RELEASED_SIZE = 163_840
_RELEASED = {
    "[BOS]": 163584, "[EOS]": 163585, END: 163586, OPEN: 163587, CLOSE: 163588, SEP: 163589, "[EOT]": 163593,
    "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605,
}
"""Control tokens of the released vocabulary, for tokenizer files that name those of an older Kimi model over the same ranks."""


class KimiK3Format:
    """Prompts and answers of Kimi K3; without a tokenizer it parses text and renders none."""

    name = "kimi_k3"
    num_pending = 3
    """Ids at the end of a prompt that its reported length leaves out: the tag that opens the answer's channel."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids = _marks_of(tokenizer) if tokenizer else {}

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._ids[text] for text in _ENDS if text in self._ids)

    def images(self, messages: Any) -> list[Mapping[str, Any]]:
        """Image parts as the client sent them, in the order of the prompt."""
        return images(k3_render.answered(read_turns(messages)))

    def tools(self, messages: Any, tools: Any = None) -> list[Mapping[str, Any]]:
        """Tools of the request, then those that its messages add."""
        return chat_fields.declared_tools(read_turns(messages), tools)

    def render(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> list[int]:
        """Ids of the prompt; each image is one placeholder.

        Raises: RequestError for whatever is wrong with the request, ConfigError without a tokenizer.
        """
        tokenizer = self._known_tokenizer()
        ids: list[int] = []
        for text, control in self._segments(messages, tools, image_sizes, fields):
            if control:
                ids.append(self._ids[text])
            else:
                ids += tokenizer.encode(text)
        return ids

    def render_text(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> str:
        """The prompt for people to read; its ids cannot be had from it, as text may look like a control token."""
        return "".join(text for text, _ in self._segments(messages, tools, image_sizes, fields))

    def thinks(self, messages: Any = None, **fields: Any) -> bool:
        """Whether the answer begins inside of thinking."""
        resumed = _resumed(messages, fields)
        return _effort(fields) is not None and not (resumed and resumed.parts)

    def parser(self, tools: Sequence[Any] | None = None, **fields: Any) -> Parser:
        """Reads one answer from text in which control tokens are spelled out."""
        return Parser(self._machine(tools, fields), MARKS)

    def reader(self, tools: Sequence[Any] | None = None, **fields: Any) -> Reader:
        """Reads one answer from token ids."""
        tokenizer = self._known_tokenizer()
        marks = {self._ids[text]: text for text in MARKS} | dict.fromkeys(self.end_ids, END)
        return Reader(self._machine(tools, fields), tokenizer, marks, self._control_ids(tokenizer) - frozenset(marks))

    def zone(self, tools: Sequence[Any] | None = None, *, messages: Any = None, **fields: Any) -> Zone:
        """Where a grammar can hold in an answer, in ids."""
        tokenizer = self._known_tokenizer()
        control = self._control_ids(tokenizer)
        form = KimiK3Calls(open_id=self._ids[OPEN], close_id=self._ids[CLOSE], sep_id=self._ids[SEP])
        thinks = self.thinks(messages, **fields)
        return Zone(
            thinking="open" if thinks else "none",
            think_open=(),
            think_close=form.close("think"),
            banned_thinking=control - {form.close_id},
            body_open=form.open("response") if thinks else (),
            body_close=(*form.content_close, *form.close("message")),
            message_close=form.close("message"),
            banned_body=control,
            end_ids=self.end_ids,
            calls=form,
        )

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("the chat format kimi_k3 was loaded without a tokenizer, it can only parse text", "Give it a tokenizer.")
        return self._tokenizer

    def _machine(self, tools: Sequence[Any] | None, fields: Mapping[str, Any]) -> KimiK3Machine:
        return KimiK3Machine(transcript_for(tools, fields), thinking=self.thinks(**fields))

    def _control_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        return frozenset(tokenizer.special_ids.values()) | frozenset(self._ids.values())

    def _segments(
        self, messages: Any, tools: Any, image_sizes: Sequence[tuple[int, int]] | None, fields: Mapping[str, Any]
    ) -> list[k3_render.Segment]:
        turns = k3_render.answered(read_turns(messages))
        declared = chat_fields.declared_tools(turns, tools)
        num_images = len(images(turns))
        if image_sizes is None:
            chat_fields.refuse_images(turns)
        if num_images != len(image_sizes or ()):
            raise RequestError(f"the messages hold {num_images} images, {len(image_sizes or ())} sizes were given", "Give one size per image.")
        kind, schema = chat_fields.response_format(fields)
        order = k3_render.Order(
            turns=turns,
            tools=list(tools or ()),
            effort=_effort(fields),
            tool_choice=chat_fields.tool_choice(fields, declared),
            response_format=kind,
            schema=schema,
            resumed=_resumed(messages, fields),
            stub=chat_fields.flag(fields, "add_generation_prompt", True),
            image_sizes=image_sizes or (),
        )
        return k3_render.segments(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Calls:
    """Calls as elements of the tools element, with typed arguments."""

    open_id: int
    close_id: int
    sep_id: int
    style: Literal["elements"] = "elements"
    separator: str = ""

    def open(self, name: str, /, **attributes: str) -> Pieces:
        """An opening tag."""
        written = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
        return (self.open_id, name + written, self.sep_id)

    def close(self, name: str) -> Pieces:
        """A closing tag."""
        return (self.close_id, name, self.sep_id)

    @property
    def content_close(self) -> Pieces:
        """The response element ends before the tools element begins."""
        return self.close("response")

    @property
    def section_open(self) -> Pieces:
        """The tools element."""
        return self.open("tools")

    @property
    def section_close(self) -> Pieces:
        """The end of the tools element."""
        return self.close("tools")

    @property
    def end(self) -> Pieces:
        """The end of a call element."""
        return self.close("call")

    @property
    def argument_end(self) -> Pieces:
        """The end of an argument element."""
        return self.close("argument")

    @property
    def raw_begin(self) -> Pieces:
        """One element with all arguments as an object."""
        return self.open("json", type="object")

    @property
    def raw_end(self) -> Pieces:
        """The end of that element."""
        return self.close("json")

    def begin(self, name: str, index: int) -> Pieces:
        """A call element; the format counts from 1."""
        return self.open("call", tool=name, index=str(index + 1))

    def argument_begin(self, key: str, kind: str) -> Pieces:
        """An argument element."""
        return self.open("argument", key=key, type=kind)


def _marks_of(tokenizer: Tokenizer) -> Mapping[str, int]:
    missing = [text for text in MARKS if text not in tokenizer.special_ids]
    if not missing:
        return tokenizer.special_ids
    if tokenizer.num_vocab == _RELEASED_SIZE:
        return _RELEASED
    raise ConfigError(
        f"the tokenizer has no token {missing[0]} among {len(tokenizer.special_ids)} control tokens",
        "Use the tokenizer files of the Kimi K3 release.",
    )


def _effort(fields: Mapping[str, Any]) -> str | None:
    """How much to think; None: not at all."""
    thinking = chat_fields.thinking(fields)
    if chat_fields.template_fields(fields).get("preserve_thinking") is False:
        raise RequestError("`chat_template_kwargs` has preserve_thinking false", "This model keeps the reasoning of earlier answers: leave it out.")
    if thinking.on is False:
        return None
    effort = thinking.effort or "max"
    if effort not in k3_render.EFFORTS:
        raise RequestError(f"`reasoning_effort` or the thinking effort is {brief(effort)}", f"Use one of {', '.join(k3_render.EFFORTS)}.")
    return effort


def _resumed(messages: Any, fields: Mapping[str, Any]) -> Turn | None:
    return None if messages is None else continued(read_turns(messages), chat_fields.flag(fields, "continue_final_message", False))

