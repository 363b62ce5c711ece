"""A training document under construction: token ids beside the weight of each in the loss, and the marks of K3's chat format."""

from __future__ import annotations

from collections.abc import Mapping

END_OF_MSG, OPEN, CLOSE, SEP, EOS = 258, 259, 260, 261, 257
RANDOM, TEXT, ANSWER, FOUND = 0.1, 1.0, 3.0, 8.0
"""Weights: what cannot be foreseen, plain text, what has to be recalled or computed, and its first byte, where it has to be found."""
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)


class Draft:
    """Grows at its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.weights: list[float] = []

    def add(self, text: str | bytes, weight: float = TEXT) -> Draft:
        """Bytes of a text."""
        raw = text.encode() if isinstance(text, str) else text
        self.tokens += raw
        self.weights += [weight] * len(raw)
        return self

    def answer(self, text: str) -> Draft:
        """What is recalled: its first byte is the hard one."""
        return self.add(text[:1], FOUND).add(text[1:], ANSWER)

    def mark(self, token: int, weight: float = TEXT) -> Draft:
        """One control token."""
        self.tokens.append(token)
        self.weights.append(weight)
        return self

    def open(self, name: str, weight: float = TEXT, **attributes: str) -> Draft:
        """An opening tag."""
        self.mark(OPEN, weight).add(name, weight)
        for key, value in attributes.items():
            escaped = value.replace("&", "&amp;").replace('"', "&quot;")
            self.add(f' {key}="{escaped}"', weight)
        return self.mark(SEP, weight)

    def close(self, name: str, weight: float = TEXT) -> Draft:
        """A closing tag."""
        return self.mark(CLOSE, weight).add(name, weight).mark(SEP, weight)

    def message(self, text: str, weight: float = TEXT, frame: float = RANDOM, **attributes: str) -> Draft:
        """A whole message that is not the assistant's."""
        return self.open("message", frame, **attributes).add(text, weight).close("message", frame).mark(END_OF_MSG, frame)

    def effort(self, level: str) -> Draft:
        """The system message that thinking brings with it."""
        return self.message(EFFORT.format(level), RANDOM, role="system", type="thinking-effort")

    def stub(self, channel: str) -> Draft:
        """Where generation begins: inside `think` or `response`."""
        return self.open("message", RANDOM, role="assistant").open(channel, RANDOM)

    def think(self, text: str) -> Draft:
        """Thoughts after a stub, then the response's opening tag."""
        return self.add(text, ANSWER).close("think").open("response")

    def respond(self, text: str, weight: float = ANSWER) -> Draft:
        """Text of an open response channel up to its closing tag."""
        return self.add(text, weight).close("response")

    def call(self, calls: list[tuple[str, Mapping[str, tuple[str, str]]]]) -> Draft:
        """The tools element: per call its name and key -> (type, text of the value)."""
        self.open("tools", ANSWER)
        for index, (tool, arguments) in enumerate(calls, 1):
            self.open("call", ANSWER, tool=tool, index=str(index))
            for key, (kind, value) in arguments.items():
                self.open("argument", ANSWER, key=key, type=kind).add(value, ANSWER).close("argument", ANSWER)
            self.close("call", ANSWER)
        return self.close("tools", ANSWER)

    def finish(self) -> Draft:
        """The end of the assistant's message."""
        return self.close("message").mark(END_OF_MSG)
