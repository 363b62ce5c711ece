"""One chat message as a grammar: thinking stays free, then the body and the tool calls follow their schemas inside the marks of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Structure
from firstlight.text.grammar_arguments import arguments
from firstlight.text.grammar_rules import Rules, empty, joined, literal, marks, one_of, token
from firstlight.text.zone import CallForm, Pieces, Zone

MAX_CALLS = 64
"""Calls in one message, at most, where each call carries its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that may be called. `strict`: its schema is enforced in full, or refused."""

    name: str
    parameters: Any = None
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one message must be. `body` None: any text, and no text at all where calls are required; `parallel`: more than one call."""

    body: Structure | None = None
    tools: tuple[Tool, ...] = ()
    calls: Literal["none", "optional", "required"] = "none"
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Draft:
    """A grammar in words. It is asleep until one of `triggers` comes, which is its first token; `banned` may not come while it sleeps."""

    text: str
    triggers: frozenset[int] = frozenset()
    banned: frozenset[int] = frozenset()


def draft(zone: Zone, turn: Turn) -> Draft:
    """The grammar of a message. Raises: RequestError when calls are wanted from a model that writes none."""
    rules = Rules()
    end = token(zone.end_ids) if zone.end_ids else ""
    answer = joined(_answer(rules, zone, turn), end)
    if zone.thinking == "none":
        return Draft(rules.render(joined(marks(zone.body_open), answer)))
    first, after = zone.think_close[0], marks((*zone.think_close[1:], *zone.body_open))
    if zone.thinking == "open" and isinstance(first, int):
        return Draft(rules.render(joined(marks((first,)), after, answer)), frozenset({first}), zone.banned_thinking | zone.end_ids)
    thought = joined(rules.text_up_to(first) if isinstance(first, str) else joined(rules.text(), marks((first,))), after)
    if zone.thinking == "optional":
        thought = f"({joined(marks(zone.think_open), thought)})?"
    return Draft(rules.render(joined(thought, answer)))


def _answer(rules: Rules, zone: Zone, turn: Turn) -> str:
    """Body and calls with the marks between and after them."""
    if turn.calls == "none":
        return joined(rules.text() if turn.body is None else rules.structure(turn.body), marks(zone.body_close))
    if zone.calls is None:
        raise RequestError("`tools` are to be called, but this model writes no calls", "Leave tools out, or use tool_choice none.")
    form = zone.calls
    calls = _Calls(rules, form, turn)
    after = joined(marks(form.section_close), marks(zone.message_close))
    opened = (*form.content_close, *form.section_open)
    if turn.calls == "required":
        return joined(marks(opened), calls.all(), after)
    if turn.body is not None:
        body = rules.structure(turn.body)
        return one_of([joined(body, marks(zone.body_close)), joined(f"{rules.rule(body)}?", marks(opened), calls.all(), after)])
    mark = opened[0] if opened else calls.shared
    if isinstance(mark, int):
        return joined(rules.text(), one_of([marks(zone.body_close), joined(marks(opened), calls.all(), after)]))
    rest = joined(marks(opened[1:]), calls.all()) if opened else calls.all(begun=True)
    return one_of([joined(rules.text(), marks(zone.body_close)), joined(rules.text_up_to(mark), rest, after)])


class _Calls:
    """One or more calls of the tools of a turn."""

    def __init__(self, rules: Rules, form: CallForm, turn: Turn) -> None:
        self._rules, self._form, self._tools = rules, form, turn.tools
        given = [arguments(rules, form, tool.parameters, strict=tool.strict) for tool in turn.tools]
        self._rests = [rules.rule(joined(rule, marks(form.end)) or empty()) for rule in given]
        names = [tool.name for tool in turn.tools]
        self._numbered = any(form.begin(name, 0) != form.begin(name, 1) for name in names)
        self._num_calls = 1 if not turn.parallel else MAX_CALLS if self._numbered else None
        self.shared = _shared([form.begin(name, 0) for name in names])

    def all(self, *, begun: bool = False) -> str:
        """The calls; `begun`: what the first one has in common whatever its tool is there already."""
        first = self._call(0, len(self.shared) if begun and isinstance(self.shared, str) else 0)
        between = literal(self._form.separator) if self._form.separator else ""
        if self._num_calls is None:
            return joined(first, f"({joined(between, self._call(1))})*")
        more = ""
        for index in range(self._num_calls - 1, 0, -1):
            more = self._rules.rule(joined(between, self._call(index), more)) + "?"
        return joined(first, more)

    def _call(self, index: int, num_given: int = 0) -> str:
        """Call number `index`, of any tool."""
        choices = []
        for tool, rest in zip(self._tools, self._rests, strict=True):
            begin = self._form.begin(tool.name, index)
            if num_given:
                assert isinstance(begin[0], str)
                begin = (begin[0][num_given:], *begin[1:])
            choices.append(joined(marks(begin), rest))
        return self._rules.rule(one_of(choices))


def _shared(begins: Sequence[Pieces]) -> int | str:
    """What every call begins with: a control token, or text."""
    firsts = [begin[0] for begin in begins]
    if isinstance(firsts[0], int):
        return firsts[0]
    texts = [first for first in firsts if isinstance(first, str)]
    low, high = min(texts), max(texts)
    return low[: next((place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]
