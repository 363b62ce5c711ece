"""Answers held to a form by the real model: valid always, the same in any company, and the mask is nothing but a mask.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from firstlight import LLM, AsyncEngine, Choice, JsonSchema, Regex, SamplingParams
from firstlight.engine.sampler import Sampler, banned_tokens, describe
from firstlight.sched.sequence import Event, Sequence
from firstlight.spec.errors import RequestError
from firstlight.text.grammar_turn import Tool, Turn
from firstlight.text.k3_format import KimiK3Format
from tests.text.test_grammar import SCHEMAS
from tests.walks import bounded, cases, text_of

K3 = Path(__file__).parents[1] / "data/kimi_k3_tiny"
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                   "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3}},
}
HELD = SamplingParams(max_tokens=300, structured=JsonSchema(PERSON), seed=3)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("default", dtype="float32", max_sequences=32) as found:
        yield found


def valid(text: str | None, schema: Any) -> bool:
    """Whether an answer is JSON and valid, as the library jsonschema sees it."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_every_answer_is_valid_and_none_is_without_a_form(llm: LLM) -> None:
    """All schemas in one batch at temperature 1; the same seeds without a form give no valid answer."""
    names = list(SCHEMAS)
    held = [SamplingParams(max_tokens=600, structured=JsonSchema(SCHEMAS[name]), seed=index) for index, name in enumerate(names)]
    free = [SamplingParams(max_tokens=60, seed=index) for index in range(len(names))]
    outs = llm.generate([f"prompt {name}" for name in names], held)
    for name, out in zip(names, outs, strict=True):
        assert ("stop", None) == (out.finish_reason, out.error), name
        assert valid(out.text, SCHEMAS[name]), out.text
    frees = llm.generate([f"prompt {name}" for name in names], free)
    assert not any(valid(out.text, SCHEMAS[name]) for name, out in zip(names, frees, strict=True))
    assert len({out.text for out in outs}) > len(names) // 2


@pytest.mark.parametrize("given", [
    {"temperature": 0}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.0}, {"top_p": 0.5}, {"min_p": 1.0},
    {"repetition_penalty": 5.0}, {"presence_penalty": 2.0, "frequency_penalty": -2.0}, {"logit_bias": {ord("}"): -1e30, ord("z"): 1e30}},
    {"logit_bias": {257: 1e30, 258: 1e30}}, {"logprobs": 3},
], ids=str)
def test_no_other_parameter_breaks_a_form(given: dict[str, Any], llm: LLM) -> None:
    params = SamplingParams(**{"max_tokens": 400, "structured": JsonSchema(PERSON), "seed": 1, **given})
    (out,) = llm.generate(["x"], params)
    assert "stop" == out.finish_reason
    assert valid(out.text, PERSON), out.text


def test_a_pattern_and_a_choice(llm: LLM) -> None:
    import re

    outs = llm.generate(["x"] * 8, [SamplingParams(max_tokens=40, structured=Regex("[A-F]{2}-\\d{3}"), seed=seed) for seed in range(8)])
    assert all(re.fullmatch("[A-F]{2}-[0-9]{3}", out.text or "") for out in outs) and len({out.text for out in outs}) > 4
    outs = llm.generate(["x"] * 8, [SamplingParams(max_tokens=40, structured=Choice(("red", "green")), seed=seed) for seed in range(8)])
    assert {"red", "green"} >= {out.text for out in outs}


def test_what_a_form_allows_is_drawn_as_without_it(llm: LLM) -> None:
    """Two drawings of the same logits: a mask that allows all tokens changes nothing, and one that bans some leaves the ratios of the rest."""
    logits_RV = torch.randn(4, 288, generator=torch.Generator().manual_seed(0)) * 3
    seqs = [Sequence(index, [1, 2], 2, SamplingParams(seed=index, temperature=0.8)) for index in range(4)]
    before_RV = logits_RV.clone()
    plain = Sampler().draw(logits_RV, seqs)
    assert plain == Sampler().draw(logits_RV, seqs, dict.fromkeys(range(4), b"\xff" * 36))
    kept = sorted(random.Random(0).sample(range(288), 40))
    mask = bytes(sum(1 << (token & 7) for token in kept if token >> 3 == place) for place in range(36))
    drawn, _ = Sampler().draw(logits_RV, seqs, {1: mask, 3: mask})
    assert drawn[0] == plain[0][0] and drawn[2] == plain[0][2] and {drawn[1], drawn[3]} <= set(kept)
    for row in (1, 3):
        alone_V = torch.full((288,), -torch.inf)
        alone_V[kept] = logits_RV[row, kept]
        assert Sampler().draw(alone_V[None], [seqs[row]])[0] == [drawn[row]]
    assert torch.equal(before_RV, logits_RV)


@pytest.mark.parametrize("num_vocab", [1, 7, 8, 9, 288, 1001])
def test_bits_are_tokens(num_vocab: int) -> None:
    rng = random.Random(num_vocab)
    masks = {row: rng.randbytes(-(-num_vocab // 32) * 4) for row in (5, 0, 2)}
    masks[9] = masks[5][: num_vocab // 16]
    found = banned_tokens(masks, torch.zeros(10, num_vocab))
    assert list(masks) == list(found)
    for row, mask in masks.items():
        want = [not (token >> 3 < len(mask) and mask[token >> 3] >> (token & 7) & 1) for token in range(num_vocab)]
        assert want == found[row].tolist()


def test_log_probabilities_are_the_model_s_own(llm: LLM) -> None:
    """Those of the distribution before the mask, for the token that was forced and for the likeliest ones that were banned."""
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=300, structured=JsonSchema(PERSON), seed=3, logprobs=2))
    assert out.logprobs is not None and len(out.tokens) == len(out.logprobs)
    logits_TV: Tensor = llm.logits([5, 6, 7, *out.tokens])
    for place, (token, found) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        want = describe(logits_TV[2 + place], token, 2)
        assert token == found.token and abs(want.logprob - found.logprob) < 1e-4
        assert [pair[0] for pair in want.top] == [pair[0] for pair in found.top]
    assert out.tokens[0] == ord("{") != out.logprobs[0].top[0][0]


def steps(llm: LLM, jobs: list[tuple[list[int], SamplingParams]], preempt: tuple[int, ...] = ()) -> list[tuple[list[int], Event]]:
    """Run by hand; all running requests are preempted before the steps that are listed. Tokens and last event per job."""
    engine = llm.engine
    ids = []
    for tokens, params in jobs:
        form = None if params.structured is None else llm.grammars.compile(params.structured).begin()
        ids.append(engine.submit(tokens, params, constraint=form))
    told: dict[int, list[Event]] = {seq_id: [] for seq_id in ids}
    count = 0
    while not engine.idle():
        if count in preempt:
            for seq_id in ids:
                engine.preempt(seq_id)
        for event in engine.step():
            told[event.seq_id].append(event)
        count += 1
    return [([event.token for event in told[seq_id] if event.token is not None], told[seq_id][-1]) for seq_id in ids]


def test_company_and_preemption_change_nothing(llm: LLM) -> None:
    """Held and free requests in one batch, alone, and preempted again and again: the same tokens."""
    rng = random.Random(1)
    jobs = []
    for index in range(6):
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        structured = JsonSchema(PERSON) if index % 2 else None
        jobs.append((tokens, SamplingParams(max_tokens=300 if structured else 40, seed=index, structured=structured)))
    together = steps(llm, jobs)
    alone = [steps(llm, [job])[0] for job in jobs]
    interrupted = steps(llm, jobs, preempt=(3, 4, 9, 20, 21, 22, 40))
    assert interrupted[1][1].num_preemptions > 3
    for job, one, many, again in zip(jobs, alone, together, interrupted, strict=True):
        assert one[0] == many[0] == again[0]
        if job[1].structured is not None:
            assert "stop" == again[1].finish and valid(text_of(llm.tokenizer, again[0]), PERSON)  # type: ignore[arg-type]


def test_streamed_is_whole(llm: LLM) -> None:
    """Through the asynchronous face, several choices of one grammar with their own states at the same time."""
    grammar = llm.grammars.compile(JsonSchema(PERSON))

    async def talk(engine: AsyncEngine, seed: int) -> list[int]:
        params = SamplingParams(max_tokens=300, seed=seed)
        return [event.token async for event in engine.generate([1, 2, 3], params, constraint=grammar.begin()) if event.token is not None]

    async def main() -> list[list[int]]:
        with LLM("default", dtype="float32") as other:
            async with AsyncEngine(other.engine) as engine:
                return list(await asyncio.gather(*(talk(engine, seed) for seed in range(4))))

    streamed = asyncio.run(main())
    outs = llm.generate([[1, 2, 3]] * 4, [SamplingParams(max_tokens=300, seed=seed, structured=JsonSchema(PERSON)) for seed in range(4)])
    assert [out.tokens for out in outs] == streamed
    assert len({tuple(tokens) for tokens in streamed}) > 1


def test_too_few_tokens_end_with_length(llm: LLM) -> None:
    (out,) = llm.generate(["x"], SamplingParams(max_tokens=9, structured=JsonSchema(PERSON)))
    assert "length" == out.finish_reason and '{"name":'.startswith((out.text or "?")[:8]) and not valid(out.text, PERSON)


def test_a_form_that_is_complete_ends_before_min_tokens(llm: LLM) -> None:
    """Where more may come, the end is held back; where nothing may, it is not."""
    (out,) = llm.generate(["x"], SamplingParams(max_tokens=60, min_tokens=50, structured=Choice(("yes",))))
    assert ("stop", "yes", 4) == (out.finish_reason, out.text, len(out.tokens))
    held_back = [SamplingParams(max_tokens=300, min_tokens=30, structured=Regex("[ab]*"), seed=seed) for seed in range(4)]
    for out in llm.generate(["x"] * 4, held_back):
        assert len(out.tokens) > 30 and "stop" == out.finish_reason


def test_a_form_without_a_constraint_is_refused(llm: LLM) -> None:
    """Never dropped in silence."""
    for call in (llm.engine.submit, llm.engine.check):
        with pytest.raises(RequestError, match="no constraint came with it"):
            call([1], HELD)
    with pytest.raises(RequestError, match="`ignore_eos`"):
        llm.generate(["x"], SamplingParams(structured=Choice(("a",)), ignore_eos=True))
    with pytest.raises(RequestError, match="`structured`"):
        SamplingParams(structured={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="#/type"):
        llm.generate(["x"], SamplingParams(structured=JsonSchema({"type": "strin"})))


def test_a_model_without_a_tokenizer_says_so() -> None:
    with LLM(K3, dtype="float32") as bare, pytest.raises(RequestError, match="no tokenizer"):
        bare.generate([[1, 2]], HELD)


class DeadEnd:
    """Allows one token, then nothing, or everything but in words that it cannot go on."""

    done = False

    def __init__(self, words: str | None) -> None:
        self.words, self.count = words, 0

    def allowed(self) -> bytes | None:
        if self.count and self.words is not None:
            raise RequestError(self.words, "Do something else.")
        return bytes([0, 1]) if not self.count else b""

    def accept(self, token: int) -> None:
        self.count += 1


def test_a_dead_end_fails_one_request_in_words_and_nobody_else(llm: LLM) -> None:
    engine = llm.engine
    wrong = engine.submit([1, 2], SamplingParams(max_tokens=10, seed=0), constraint=DeadEnd("the grammar ran out of road"))
    neighbour = engine.submit([1, 2], SamplingParams(max_tokens=10, seed=0))
    events = []
    while not engine.idle():
        events += engine.step()
    ends = {event.seq_id: event for event in events if event.finish is not None}
    assert ("error", "the grammar ran out of road. Do something else.") == (ends[wrong].finish, ends[wrong].error)
    assert [8] == [event.token for event in events if event.seq_id == wrong and event.token is not None]
    (alone,) = llm.generate([[1, 2]], SamplingParams(max_tokens=10, seed=0))
    assert "length" == ends[neighbour].finish
    assert alone.tokens == [event.token for event in events if event.seq_id == neighbour]


def test_logits_that_are_no_numbers_fail_before_the_form_is_asked(llm: LLM) -> None:
    from firstlight.engine.runner import finite_rows, held

    asked = DeadEnd("asked")
    asked.count = 1
    rows: list[tuple[int, Sequence]] = [(0, Sequence(4, [1], 1, SamplingParams(), constraint=asked)), (1, Sequence(5, [1], 1, SamplingParams()))]
    errors: dict[int, str] = {}
    kept, masks = held(rows, errors)
    assert ([rows[1]], {}, {4: "asked. Do something else."}) == (kept, masks, errors)
    assert [False, True] == finite_rows(torch.tensor([[0.0, torch.nan], [0.0, 1.0]]))


def called(llm: LLM, asked: list[dict[str, Any]], **fields: Any) -> list[Any]:
    """Forced calls by the model itself, one request per set of tools, read back."""
    assert llm.tokenizer is not None
    form, fields = KimiK3Format(llm.tokenizer), {"tool_choice": "required", **fields}
    jobs, readers = [], []
    for index, tools in enumerate(asked):
        listed = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
        turn = Turn(
            tools=tuple(Tool(name=name, parameters=schema, strict=True) for name, schema in tools.items()), calls="required",
            parallel=fields.get("parallel_tool_calls", True))
        grammar = llm.grammars.compile_turn(form.zone(listed, messages=MESSAGES, **fields), turn)
        params = SamplingParams(max_tokens=2500, seed=index, stop_token_ids=tuple(form.end_ids))
        jobs.append(llm.engine.submit(form.render(MESSAGES, listed, **fields), params, constraint=grammar.begin()))
        readers.append(form.reader(listed, messages=MESSAGES, **fields))
    while not llm.engine.idle():
        for event in llm.engine.step():
            reader = readers[jobs.index(event.seq_id)]
            reader.push([event.token] if event.token is not None else [])
            if event.finish is not None:
                reader.finish(event.finish)  # type: ignore[arg-type]
    return [reader.message for reader in readers]


def check_calls(message: Any, tools: dict[str, Any]) -> None:
    """A message of valid calls and nothing else."""
    assert ("tool_calls", None) == (message.finish_reason, message.content)
    for call in message.tool_calls:
        assert valid(call.arguments, tools[call.name]), call


@pytest.mark.parametrize("thinks", [True, False])
def test_the_model_itself_calls_tools(thinks: bool, llm: LLM) -> None:
    asked = [{function["name"]: bounded(function["parameters"], length=3, items=1) for function in case["functions"]} for case in cases()[:1]]
    messages = called(llm, asked, **({} if thinks else {"thinking": {"type": "disabled"}}))
    for message, tools in zip(messages, asked, strict=True):
        check_calls(message, tools)
        assert (message.reasoning is not None) == thinks


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_functions_are_answered_and_called_by_the_model(part: int, llm: LLM) -> None:
    """The leaderboard's functions as response formats and as forced calls, 25 at a time."""
    chosen = cases()[part::8]
    assert 25 == len(chosen)
    schemas = [bounded(case["functions"][0]["parameters"], length=4, items=1) for case in chosen]
    outs = llm.generate(["x"] * 25, [SamplingParams(max_tokens=2500, structured=JsonSchema(schema), seed=part) for schema in schemas])
    assert [True] * 25 == [valid(out.text, schema) for out, schema in zip(outs, schemas, strict=True)]
    asked = [{function["name"]: bounded(function["parameters"], length=3, items=1) for function in case["functions"]} for case in chosen]
    for message, tools in zip(called(llm, asked, thinking={"type": "disabled"}, parallel_tool_calls=False), asked, strict=True):
        check_calls(message, tools)
