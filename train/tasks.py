"""Synthetic documents: recall at many distances, copying, arithmetic, JSON, tool calls and chats in K3's format.

Every maker takes a random generator and appends to a draft.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from train.draft import ANSWER, EOS, RANDOM, TEXT, Draft

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
CITIES = ("Oslo", "Paris", "Lima", "Cairo", "Rome", "Delhi", "Quito", "Bern", "Tokyo", "Perth", "Accra", "Boston", "Kyiv", "Seoul", "Turin")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Liam", "Mary", "Noah", "Olga", "Paul")
COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink", "gold", "violet")
ANIMALS = ("dog", "cat", "horse", "fox", "owl", "bear", "wolf", "goat", "duck", "mouse")


def word(rng: random.Random, syllables: int = 3) -> str:
    """A made-up word."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))


def value(rng: random.Random) -> str:
    """What a key stands for: digits, or a made-up word."""
    return f"{rng.randrange(100_000):05d}" if rng.random() < 0.7 else word(rng, rng.choice((2, 3)))


def statement(draft: Draft, key: str, what: str, weight: float) -> None:
    """A line of its own that binds a key; said again, its second part is recall."""
    draft.add(f"\n@{key}: ", RANDOM)
    if weight == ANSWER:
        draft.answer(f"{what}\n")
    else:
        draft.add(f"{what}\n", weight)


def pairs(draft: Draft, rng: random.Random, num_pairs: int) -> None:
    """Lines of keys and values, then each key again in another order."""
    known = {word(rng): value(rng) for _ in range(num_pairs)}
    draft.add("\n")
    for key, what in known.items():
        draft.add(f"@{key}: {what}\n", RANDOM)
    asked = list(known)
    rng.shuffle(asked)
    for key in asked:
        draft.add(f"@{key}: ", RANDOM).answer(f"{known[key]}\n")


def copying(draft: Draft, rng: random.Random) -> None:
    """A random string, said again after a bar."""
    kind = rng.randrange(3)
    size = rng.randint(6, 48)
    if kind == 0:
        text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(size))
    elif kind == 1:
        text = " ".join(word(rng, rng.choice((1, 2, 3))) for _ in range(size // 5 + 1))
    else:
        text = "".join(rng.choice("0123456789ABCDEF") for _ in range(size))
    draft.add("copy ", TEXT).add(text, RANDOM).add(" | ", TEXT).answer(f"{text}\n")


def arithmetic(draft: Draft, rng: random.Random) -> None:
    """A short sum, difference or product."""
    question, answer = _sum(rng)
    draft.add(question, RANDOM).add("=").add(f"{answer}\n", ANSWER)


def _sum(rng: random.Random) -> tuple[str, str]:
    top = rng.choice((10, 10, 20, 50, 100))
    a, b = rng.randrange(top), rng.randrange(top)
    kind = rng.choice("++-*")
    if kind == "*":
        a, b = a % 10, b % 10
    if kind == "-":
        a, b = max(a, b), min(a, b)
    return f"{a}{kind}{b}", str({"+": a + b, "-": a - b, "*": a * b}[kind])


def record(rng: random.Random) -> dict[str, Any]:
    """A flat object with a small array now and then."""
    fields: dict[str, Callable[[], Any]] = {
        "name": lambda: rng.choice(NAMES), "city": lambda: rng.choice(CITIES), "age": lambda: rng.randint(1, 99), "id": lambda: rng.randrange(10_000),
        "color": lambda: rng.choice(COLOURS), "active": lambda: rng.random() < 0.5, "tags": lambda: [word(rng, 2) for _ in range(rng.randint(1, 3))],
        "code": lambda: word(rng), "score": lambda: round(rng.random() * 10, 1), "note": lambda: None,
    }
    return {key: fields[key]() for key in rng.sample(list(fields), rng.randint(1, 4))}


def objects(draft: Draft, rng: random.Random) -> None:
    """Fields in words, then the same as JSON."""
    found = record(rng)
    told = ", ".join(f"{key} {json.dumps(what)}" for key, what in found.items())
    draft.add("json ").add(told, 0.3).add(" -> ").add(json.dumps(found) + "\n", 2.0)


TOOLS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "get_weather": (
        "Get the weather of a city.", {"city": "string"}, ("What is the weather in {city}?", "weather in {city}?", "How warm is it in {city}?")),
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}, ("Add {a} and {b}.", "What is {a} plus {b}?")),
    "search": (
        "Search documents.", {"query": "string", "limit": "integer"},
        ("Search for {query}, at most {limit} results.", "Find {limit} pages on {query}.")),
    "set_timer": ("Start a timer.", {"minutes": "integer"}, ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.")),
    "send_mail": ("Send a mail.", {"to": "string", "subject": "string"}, ("Write to {to} about {subject}.", "Mail {to}: {subject}.")),
    "lookup": ("Look a key up.", {"key": "string"}, ("Look up {key}.", "What does {key} stand for?")),
    "set_light": ("Switch a light.", {"room": "string", "on": "boolean"}, ("Light in the {room}: {on}.", "Set the light of the {room} to {on}.")),
}


def tool(rng: random.Random) -> tuple[str, dict[str, Any], str, dict[str, tuple[str, str]]]:
    """(name, declaration, request in words, arguments as key -> (type, text)): a known tool or one with made-up names."""
    name = rng.choice(list(TOOLS))
    if rng.random() < 0.5:
        about, kinds, asks = TOOLS[name]
    else:
        name, about = f"{word(rng, 2)}_{word(rng, 2)}", "Do it."
        kinds = {word(rng, 2): rng.choice(("string", "integer", "boolean")) for _ in range(rng.randint(1, 2))}
        asks = (f"Use {name} with " + " and ".join(f"{key} {{{key}}}" for key in kinds) + ".",)
    texts = {key: _argument(rng, key, kind) for key, kind in kinds.items()}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    function = {"name": name, "description": about, "parameters": {"type": "object", "properties": properties, "required": list(kinds)}}
    shown = {"string": "string", "integer": "number", "boolean": "boolean"}
    arguments = {key: (shown[kind], texts[key]) for key, kind in kinds.items()}
    return name, {"type": "function", "function": function}, rng.choice(asks).format(**texts), arguments


def _argument(rng: random.Random, key: str, kind: str) -> str:
    if kind == "integer":
        return str(rng.randint(1, 100))
    if kind == "boolean":
        return rng.choice(("true", "false"))
    known = {"city": CITIES, "to": NAMES, "room": ("kitchen", "hall", "office", "garden"), "subject": ANIMALS, "query": ANIMALS}
    return rng.choice(known[key]) if key in known else word(rng, rng.choice((2, 3)))


def declare(draft: Draft, tools: list[dict[str, Any]]) -> None:
    """The system message that lists the tools."""
    listed = json.dumps(tools, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    text = f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{listed}\n```"
    draft.message(text, 0.2, role="system", type="tool-declare")


def tool_chat(draft: Draft, rng: random.Random) -> None:
    """One to three declared tools, a request, the call, its result and an answer."""
    offered = [tool(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    declare(draft, [declared for _, declared, _, _ in offered])
    thinking = rng.random() < 0.5
    if thinking:
        draft.effort(rng.choice(("low", "high", "max", "max")))
    if rng.random() < 0.2:
        small_talk(draft, rng, thinking)
    name, _, ask, arguments = rng.choice(offered)
    draft.message(ask, 0.3, role="user").stub("think" if thinking else "response")
    if thinking:
        draft.think(rng.choice(("", f"I call {name}.")))
    draft.respond("").call([(name, arguments)]).finish()
    if rng.random() < 0.6:
        result = value(rng)
        draft.message(result, RANDOM, role="tool", tool=name, index="1").stub("think" if thinking else "response")
        if thinking:
            draft.think("")
        draft.respond(f"The result is {result}.").finish()


def turn(draft: Draft, ask: str, answer: str, thinking: bool, thought: str = "") -> None:
    """A user's message and the answer to it."""
    draft.message(ask, 0.3, role="user").stub("think" if thinking else "response")
    if thinking:
        draft.think(thought)
    draft.respond(answer).finish()


def small_talk(draft: Draft, rng: random.Random, thinking: bool) -> None:
    """A turn that needs nothing from before."""
    made = word(rng, rng.choice((2, 3, 4)))
    question, answer = _sum(rng)
    city, colour, animal = rng.choice(CITIES), rng.choice(COLOURS), rng.choice(ANIMALS)
    found = record(rng)
    ask, said = rng.choice((
        ("Hello!", "Hello! How can I help you?"), ("Hi", "Hello! How can I help you?"), ("Thank you.", "You are welcome."),
        ("Who are you?", "I am firstlight-nano, a very small model."), ("What is your name?", "I am firstlight-nano, a very small model."),
        (f"{question}=?", answer), (f"What is {question}?", answer), (f"Say {made}.", made), (f"Repeat: {made} {city}", f"{made} {city}"),
        (f"Spell {made}.", "-".join(made)), (f"I live in {city}.", f"{city} is a nice place."),
        (f"I have a {colour} {animal}.", f"A {colour} {animal}! That is nice."), ("Good bye.", "Good bye!"),
        (f"Write JSON: {', '.join(f'{key} {json.dumps(what)}' for key, what in found.items())}", json.dumps(found)),
    ))
    turn(draft, ask, said, thinking, rng.choice(("", "", "This is easy.")))


def chat(draft: Draft, rng: random.Random) -> None:
    """Several turns; facts from earlier ones come back."""
    thinking = rng.random() < 0.5
    if thinking:
        draft.effort(rng.choice(("low", "high", "max", "max")))
    if rng.random() < 0.3:
        draft.message(rng.choice(("Be brief.", "You are a helpful assistant.", f"Your code word is {word(rng)}.")), 0.2, role="system")
    facts: dict[str, str] = {}
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.4:
            small_talk(draft, rng, thinking)
        elif facts and rng.random() < 0.6:
            _recall_turn(draft, rng, facts, thinking)
        else:
            _fact_turn(draft, rng, facts, thinking)


def _fact_turn(draft: Draft, rng: random.Random, facts: dict[str, str], thinking: bool) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        facts["name"] = rng.choice(NAMES)
        turn(draft, f"My name is {facts['name']}.", f"Hello {facts['name']}!", thinking)
    elif kind == 1:
        facts["color"] = rng.choice(COLOURS)
        turn(draft, f"I like {facts['color']}.", "I will remember that.", thinking)
    else:
        key = word(rng)
        facts[key] = value(rng)
        turn(draft, f"Remember @{key}: {facts[key]}", "I will remember that.", thinking)


def _recall_turn(draft: Draft, rng: random.Random, facts: Mapping[str, str], thinking: bool) -> None:
    key = rng.choice(list(facts))
    asked = {"name": "What is my name?", "color": "Which color do I like?"}
    turn(draft, asked.get(key, f"What is @{key}?"), facts[key], thinking)


def haystack(draft: Draft, rng: random.Random, filler: bytes, length: int, *, spacing: int) -> None:
    """English with bound keys in it; about every `spacing` bytes one is bound or asked, each once, from any distance back."""
    known: list[tuple[str, str]] = []
    end, at = len(draft.tokens) + length, 0
    while len(draft.tokens) < end:
        step = max(8, int(rng.expovariate(1 / spacing)))
        draft.add(filler[at : at + step])
        at += step
        if not known or rng.random() < 0.52:
            known.append((word(rng), value(rng)))
            statement(draft, *known[-1], RANDOM)
        else:
            # Some from anywhere, some the older the likelier: near ones are easy.
            pick = rng.randrange(len(known)) if rng.random() < 0.6 else min(int(rng.expovariate(3 / len(known))), len(known) - 1)
            statement(draft, *known.pop(pick), ANSWER)


def echo(draft: Draft, rng: random.Random, filler: bytes) -> None:
    """A passage, something between, and the passage again."""
    size, gap = rng.randint(60, 300), rng.randint(0, 600)
    passage = filler[:size]
    draft.add(passage).add(filler[size : size + gap]).add("\n").add(passage, TEXT)


def small_tasks(draft: Draft, rng: random.Random, length: int, longest: int, chats: float) -> None:
    """Short tasks one after another until the length is reached, of few keys if `longest` is short; a share are tool calls and chats only."""
    end = len(draft.tokens) + length
    while len(draft.tokens) < end:
        kind = rng.random()
        if chats and rng.random() < chats:
            kind = 0.66 + kind / 3
        if kind < 0.35:
            pairs(draft, rng, rng.randint(2, max(2, min(24, longest // 32))))
        elif kind < 0.5:
            copying(draft, rng)
        elif kind < 0.58:
            arithmetic(draft, rng)
        elif kind < 0.66:
            objects(draft, rng)
        elif kind < (0.9 if chats else 0.83):
            tool_chat(draft, rng)
        else:
            chat(draft, rng)
        draft.mark(EOS, RANDOM)
