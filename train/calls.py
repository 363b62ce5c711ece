"""Do generated tool calls parse? A strict reader of the assistant's message over token ids, and prompts that ask for a call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from train import tasks
from train.draft import CLOSE, END_OF_MSG, OPEN, SEP, Draft

Call = tuple[str, dict[str, tuple[str, str]]]
KINDS = {"string": str, "number": (int, float), "boolean": bool, "null": type(None), "object": dict, "array": list}


@dataclass(frozen=True, slots=True)
class Wrong(Exception):
    """Where a message leaves the format."""

    at: int
    what: str


class Reader:
    """Walks over ids; text between control tokens is bytes."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.at = list(tokens), 0

    def text(self) -> str:
        """Bytes up to the next control token."""
        first = self.at
        while self.at < len(self.tokens) and self.tokens[self.at] < 256:
            self.at += 1
        return bytes(self.tokens[first : self.at]).decode("utf-8", "replace")

    def control(self, token: int) -> None:
        """Step over one control token. Raises Wrong when another stands there."""
        if self.at >= len(self.tokens) or self.tokens[self.at] != token:
            raise Wrong(self.at, f"no control token {token}")
        self.at += 1

    def peek(self, token: int) -> bool:
        """Whether this control token comes next."""
        return self.at < len(self.tokens) and self.tokens[self.at] == token

    def open(self) -> tuple[str, dict[str, str]]:
        """(name, attributes) of an opening tag."""
        self.control(OPEN)
        found = re.fullmatch(r'(\w+)((?: \w+="[^"]*")*)', self.text())
        self.control(SEP)
        if found is None:
            raise Wrong(self.at, "a tag that is not one")
        return found[1], dict(re.findall(r'(\w+)="([^"]*)"', found[2]))

    def close(self, name: str) -> None:
        """A closing tag of this name."""
        self.control(CLOSE)
        if self.text() != name:
            raise Wrong(self.at, f"{name} is not closed")
        self.control(SEP)


def read_message(tokens: Sequence[int], channel: str) -> list[Call]:
    """Calls of a generated message that began inside `channel`. Raises Wrong."""
    reader = Reader(tokens)
    reader.text()
    reader.close(channel)
    if channel == "think":
        _expect(reader.open()[0], "response", reader)
        reader.text()
        reader.close("response")
    calls = _tools(reader) if reader.peek(OPEN) else []
    reader.close("message")
    reader.control(END_OF_MSG)
    return calls


def _expect(found: str, wanted: str, reader: Reader) -> None:
    if found != wanted:
        raise Wrong(reader.at, f"{found} where {wanted} belongs")


def _tools(reader: Reader) -> list[Call]:
    _expect(reader.open()[0], "tools", reader)
    calls: list[Call] = []
    while reader.peek(OPEN):
        name, attributes = reader.open()
        _expect(name, "call", reader)
        if set(attributes) != {"tool", "index"} or attributes["index"] != str(len(calls) + 1):
            raise Wrong(reader.at, f"call with {attributes}")
        calls.append((attributes["tool"], _arguments(reader)))
        reader.close("call")
    reader.close("tools")
    return calls


def _arguments(reader: Reader) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    while reader.peek(OPEN):
        name, attributes = reader.open()
        _expect(name, "argument", reader)
        if set(attributes) != {"key", "type"} or attributes["type"] not in KINDS:
            raise Wrong(reader.at, f"argument with {attributes}")
        if attributes["key"] in found:
            raise Wrong(reader.at, f"argument {attributes['key']} twice")
        text = reader.text()
        reader.close("argument")
        if attributes["type"] != "string" and not _is_json(text, attributes["type"]):
            raise Wrong(reader.at, f"{text!r} is no {attributes['type']}")
        found[attributes["key"]] = attributes["type"], text
    return found


def _is_json(text: str, kind: str) -> bool:
    try:
        return isinstance(json.loads(text), KINDS[kind])
    except ValueError:
        return False


def prompts(count: int, seed: int) -> list[tuple[list[int], str, Call]]:
    """(prompt ids, channel that it ends in, call that is asked for)."""
    rng = random.Random(f"calls {seed}")
    found = []
    for number in range(count):
        draft, channel = Draft(), ("response", "think")[number % 2]
        offered = [tasks.tool(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        tasks.declare(draft, [declared for _, declared, _, _ in offered])
        if channel == "think":
            draft.effort("max")
        name, _, ask, arguments = rng.choice(offered)
        draft.message(ask, role="user").stub(channel)
        found.append((draft.tokens, channel, (name, arguments)))
    return found
