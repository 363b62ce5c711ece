"""Schemas, patterns and chat messages as masks over a vocabulary: compiled once, then one state per answer. No torch, no numpy."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import JsonSchema, Regex, Structure
from firstlight.text.grammar_rules import Rules
from firstlight.text.grammar_schema import MAX_SCHEMA_BYTES, enforceable, refusal, sized, softened, summary
from firstlight.text.grammar_turn import Draft, Tool, Turn, draft
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.zone import Zone

MAX_GRAMMAR_BYTES = 1024 * 1024
"""All schemas of one request together, as a grammar."""

NUM_KEPT = 64
"""Compiled grammars that are kept for requests to come."""

_LARGE = "Make the schemas smaller: fewer alternatives, fewer optional properties, shorter patterns."
_PATTERN = "Correct the pattern where it is no regular expression, or make it shorter; look-around and back-references are not served."
_LIMITS = LLParserLimits(
    max_items_in_row=10_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=100_000, max_lexer_states=100_000,
    max_grammar_size=500_000, verbose_errors=False)


@dataclass(slots=True)
class _Words:
    """A vocabulary as the library reads it. Forced text is left to the mask, so nothing is ever encoded here."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return []


class Grammars:
    """Compiles for one vocabulary and keeps what it compiled; any thread may call it.

    `end_ids` end an answer: they may come exactly where the structure is complete.
    """

    def __init__(self, tokenizer: Tokenizer, num_vocab: int, end_ids: Collection[int]) -> None:
        words = [tokenizer.token_bytes(token_id) if token_id < tokenizer.num_vocab else b"" for token_id in range(num_vocab)]
        special = sorted(token_id for token_id in set(tokenizer.special_ids.values()) if token_id < num_vocab)
        self.end_ids = frozenset(token_id for token_id in end_ids if token_id < num_vocab)
        # Without an end token the library gets one beyond the vocabulary, which nobody can draw.
        ends = sorted(self.end_ids) or [num_vocab]
        self.num_vocab = num_vocab
        vocabulary = TokenizerWrapper(_Words([*words, *([] if self.end_ids else [b""])], special, ends[0]))
        self._words = LLTokenizer(vocabulary, n_vocab=max(num_vocab, ends[-1] + 1), eos_token=ends, slices=LLTokenizer.json_slices())
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = Lock()

    def compile(self, structure: Structure, *, where: str = "`structured`") -> Grammar:
        """The grammar of a whole answer. `where` names the structure in errors.

        Raises: RequestError when it cannot be enforced, with the place in a schema as a JSON pointer.
        """
        check(structure, where)
        rules = Rules()
        return self._grammar(Draft(rules.render(rules.structure(structure))), self.end_ids, where, structure)

    def compile_turn(self, zone: Zone, turn: Turn, *, where: str = "`response_format`", tools: str = "`tools`") -> Grammar:
        """The grammar of one chat message. `where` and `tools` name the structure of the body and the list of tools in errors.

        Raises: RequestError when a schema cannot be enforced, or the model cannot write calls.
        """
        if turn.body is not None:
            check(turn.body, where)
        turn = replace(turn, tools=tuple(_sound(tool, f"{tools}: `parameters` of {tool.name!r}") for tool in turn.tools))
        return self._grammar(draft(zone, turn), self.end_ids | zone.end_ids, tools if turn.calls != "none" else where, turn.body)

    def _grammar(self, words: Draft, end_ids: frozenset[int], where: str, structure: Structure | None) -> Grammar:
        key = json.dumps([words.text, sorted(words.triggers), sorted(words.banned), sorted(end_ids)])
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if len(words.text) > MAX_GRAMMAR_BYTES:
            fact = f"{where} makes a grammar of {len(words.text):,} bytes"
            raise RequestError(fact, f"Use schemas of at most {MAX_GRAMMAR_BYTES:,} bytes together.")
        # The library lets other threads run while it compiles.
        matcher = LLMatcher(self._words, LLMatcher.grammar_from_lark(words.text), log_level=0, limits=_LIMITS)
        fault = _fault(matcher)
        if fault is not None:
            if isinstance(structure, JsonSchema) and not words.triggers:
                raise refusal(structure.schema, where, fault, strict=structure.strict)
            raise RequestError(f"{where} cannot be compiled: {fault}", _PATTERN if isinstance(structure, Regex) else _LARGE)
        banned = _mask_without(words.banned, self.num_vocab) if words.banned else None
        grammar = Grammar(matcher, words.triggers, banned, end_ids)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """Compiled and at its start; as many answers as you like begin from it."""

    matcher: LLMatcher
    triggers: frozenset[int]
    asleep: bytes | None
    end_ids: frozenset[int]

    def begin(self) -> GrammarState:
        """The state of one answer; a Constraint."""
        return GrammarState(self.matcher.deep_copy(), self.end_ids, self.triggers, self.asleep)


@dataclass(slots=True, eq=False)
class GrammarState:
    """Where one answer stands in its grammar. While it sleeps, only what would end the answer too early is banned."""

    matcher: LLMatcher
    end_ids: frozenset[int]
    triggers: frozenset[int] = frozenset()
    asleep: bytes | None = None
    done: bool = False
    _lost: RequestError | None = field(default=None, init=False)

    @property
    def active(self) -> bool:
        """Whether the grammar decides, and not the model alone."""
        return not self.triggers

    def allowed(self) -> bytes | None:
        """The mask of the next token; see Constraint."""
        if self.triggers:
            return self.asleep
        if self._lost is not None:
            raise self._lost
        mask = self.matcher.compute_bitmask()
        fault = None if self.done else _fault(self.matcher, mask)
        if fault is not None:
            raise RequestError(f"the answer cannot go on in its structure: {fault}", _LARGE)
        return mask

    def accept(self, token: int) -> None:
        """Move on by a token."""
        if self.triggers and token not in self.triggers:
            return
        self.triggers = frozenset()
        if self._lost is None and not self.matcher.consume_token(token):
            self._lost = _lost(token, summary(self.matcher.get_error()))
        self.done = self._lost is None and self.matcher.is_stopped() and (token in self.end_ids or not self.end_ids)


def _lost(token: int, fault: str) -> RequestError:
    if "satisfy the grammar" in fault:
        return RequestError(f"the answer left its structure with token {token}: {fault}", "Whoever chose the token did not heed the mask.")
    return RequestError(f"the answer cannot go on in its structure: {fault}", _LARGE)


def check(structure: Structure, where: str) -> None:
    """Refuse a schema that cannot be enforced, or a pattern or choice that is too large."""
    if isinstance(structure, JsonSchema):
        enforceable(structure.schema, where, strict=structure.strict)
        return
    size = len(str(structure))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(f"{where} has {size:,} characters", f"Use at most {MAX_SCHEMA_BYTES:,}.")


def _sound(tool: Tool, where: str) -> Tool:
    """The tool with a schema that compiles: its own, or of one that is not strict what can be enforced."""
    if tool.parameters is None:
        return tool
    if tool.strict:
        enforceable(tool.parameters, where, strict=True)
        return tool
    sized(tool.parameters, where)
    return replace(tool, parameters=softened(tool.parameters, where))


def _fault(matcher: LLMatcher, mask: bytes | None = None) -> str | None:
    """Why nothing can come from here, or the matcher gave up."""
    if not matcher.is_error() and mask is None:
        mask = matcher.compute_bitmask()
    if matcher.is_error():
        return summary(matcher.get_error())
    return None if mask is None or any(mask) else "no token fits"


def _mask_without(banned: frozenset[int], num_vocab: int) -> bytes:
    """A mask that allows all tokens but some."""
    mask = bytearray(b"\xff" * (-(-num_vocab // 32) * 4))
    for token_id in banned:
        mask[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(mask)
