"""The offline face: who fails fails alone, what is invalid runs nothing, and several drivers of one engine lose no event."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight import LLM, SamplingParams
from firstlight.engine.faulty import Fault, FaultyRunner
from firstlight.engine.llm import Output
from firstlight.sched.sequence import Batch, Event, StepResult
from firstlight.spec.errors import CapacityError, ConfigError, FirstlightError, RequestError

K3 = Path(__file__).parents[1] / "data/kimi_k3_tiny"
PROMPTS = [[3 + (31 * number + 7 * position) % 290 for position in range(length)] for number, length in enumerate((5, 17, 1, 40, 9))]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM(K3, dtype="float32", cache_bytes=2_000_000, max_sequences=3, chunk_tokens=16, tokens_per_block=4) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """A model at rest, before and after."""
    assert shared.engine.idle()
    yield shared
    assert shared.machine is not None
    shared.engine.runner = shared.machine.runner
    while not shared.engine.idle():
        shared.engine.step()
    shared.machine.cache.check()
    assert {0} == {group["used"] for group in shared.stats()["groups"].values()}


@pytest.fixture(scope="module")
def alone(shared: LLM) -> list[list[int]]:
    """What each prompt yields alone."""
    return [shared.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]


def faulty(llm: LLM, *faults: Fault) -> FaultyRunner:
    """Let something go wrong from now on."""
    runner = llm.engine.runner = FaultyRunner(llm.engine.runner, faults)
    return runner


def next_id(llm: LLM) -> int:
    """The id that the next request will have."""
    seq_id = llm.engine.submit([1], GREEDY)
    llm.engine.cancel(seq_id)
    llm.engine.step()
    return seq_id + 1


def drained(llm: LLM) -> dict[int, list[Event]]:
    """Steps by hand until idle."""
    events: dict[int, list[Event]] = {}
    for _ in range(200):
        if llm.engine.idle():
            return events
        for event in llm.engine.step():
            events.setdefault(event.seq_id, []).append(event)
    raise AssertionError("not idle after 200 steps")


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def test_params_and_priorities_per_prompt(llm: LLM, alone: list[list[int]]) -> None:
    each = [SamplingParams(max_tokens=number + 1, temperature=0, ignore_eos=True) for number in range(5)]
    outs = llm.generate(PROMPTS, each, priority=["background", "interactive", "standard", "background", "interactive"])
    assert [tokens[: number + 1] for number, tokens in enumerate(alone)] == [out.tokens for out in outs]
    assert PROMPTS == [out.prompt_tokens for out in outs]
    assert {("length", None, None)} == {(out.finish_reason, out.error, out.logprobs) for out in outs}
    assert all(out.first_token_s is not None and out.first_token_s >= 0 for out in outs)


def test_priority_decides_who_goes_first(llm: LLM) -> None:
    ends: list[int] = []
    llm.generate(
        [[5, 6]] * 6, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), priority=["background"] * 3 + ["interactive"] * 3,
        progress=lambda done, total: ends.append(done))
    assert 6 * 7 == ends[-1]
    first = llm.engine.submit([5, 6], GREEDY, priority="background")
    others = [llm.engine.submit([5, 6], GREEDY, priority="interactive") for _ in range(3)]
    order = [seq_id for seq_id, events in drained(llm).items() if events]
    assert [*others, first] == order


def test_one_request_that_fails_stops_no_other(llm: LLM, alone: list[list[int]]) -> None:
    faulty(llm, Fault(kind="fail", seq_id=next_id(llm) + 1, position=len(PROMPTS[1]) + 2))
    outs = llm.generate(PROMPTS, GREEDY)
    assert ["length", "error", "length", "length", "length"] == [out.finish_reason for out in outs]
    assert [alone[0], alone[1][:3], *alone[2:]] == [out.tokens for out in outs]
    assert "as the fault script says" in str(outs[1].error)
    assert [None] * 4 == [out.error for out in outs if out is not outs[1]]


def test_a_step_that_fails_ends_those_in_it(llm: LLM, alone: list[list[int]]) -> None:
    """Three have slots; the two that wait go on."""
    faulty(llm, Fault(kind="break", step=3))
    outs = llm.generate(PROMPTS, GREEDY)
    assert [3, 2] == [[out.finish_reason for out in outs].count(reason) for reason in ("error", "length")]
    assert all(alone[number][: len(out.tokens)] == out.tokens for number, out in enumerate(outs))


INVALID: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "no tokens"),
    ([1, 2, 512], {}, "token id 512 is outside"),
    ([1, -1], {}, "token id -1 is outside"),
    ("text", {}, "has no tokenizer"),
    (b"bytes", {}, "a prompt is b'bytes'"),
    ([1.5, 2.5], {}, "a prompt is"),
    (7, {}, "a prompt is 7"),
    (None, {}, "a prompt is None"),
    ({"tokens": [1], "text": "a"}, {}, "keys"),
    ({}, {}, "keys"),
    ({"tokens": [1], "images": [b""]}, {}, "1 images"),
    ([1], {"params": SamplingParams(stop=("a",))}, "no tokenizer"),
    ([1], {"params": SamplingParams(logit_bias={512: 1.0})}, "names token 512"),
    ([1], {"params": SamplingParams(max_tokens=10**6)}, "needs"),
    ([1] * 10**5, {}, "context|needs"),
    ([1], {"params": {"max_tokens": 3}}, "`params` is"),
    ([1], {"priority": "urgent"}, "`priority` is 'urgent'"),
    ([1], {"priority": 1}, "`priority` is"),
    ([1], {"salt": 5}, "`salt` is 5"),
]


@pytest.mark.parametrize(("prompt", "given", "said"), INVALID, ids=lambda item: str(item)[:20])
def test_an_invalid_prompt_raises_before_anything_runs(llm: LLM, prompt: Any, given: dict[str, Any], said: str) -> None:
    before = llm.stats()["computed_tokens"]
    whole = {"params": GREEDY, **given}
    params = whole.pop("params")
    with pytest.raises(FirstlightError, match=said) as caught:
        llm.generate([PROMPTS[0], prompt, PROMPTS[1]], [GREEDY, params, GREEDY], **whole)
    assert isinstance(caught.value, (RequestError, CapacityError))
    assert before == llm.stats()["computed_tokens"]
    assert {} == drained(llm), "the hand hears of requests that were never its own"


@pytest.mark.parametrize("name", ["params", "priority"])
def test_one_for_all_or_one_per_prompt(llm: LLM, name: str) -> None:
    given: dict[str, Any] = {"params": GREEDY, name: [{"params": GREEDY, "priority": "standard"}[name]] * 2}
    with pytest.raises(RequestError, match=f"2 {name} for 5 prompts"):
        llm.generate(PROMPTS, **given)


def test_forms_of_prompts(llm: LLM, alone: list[list[int]]) -> None:
    """A lone prompt is a batch of one; arrays and tensors count as lists."""
    prompt = PROMPTS[1]
    array, short = np.array(prompt), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for form in (prompt, tuple(prompt), [prompt], {"tokens": prompt}, [{"tokens": prompt}], array, [array], [torch.tensor(prompt)]):
        (out,) = llm.generate(form, short)  # type: ignore[arg-type]
        assert (prompt, alone[1][:2]) == (out.prompt_tokens, out.tokens)
        json.dumps(out.prompt_tokens)
    assert [] == llm.generate([], GREEDY)
    assert alone == [out.tokens for out in llm.generate((prompt for prompt in PROMPTS), GREEDY)]  # type: ignore[arg-type]


def test_progress_ends_at_the_whole(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    outs = llm.generate(PROMPTS, GREEDY, progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, PROMPTS)) + 6 * 5
    assert {total} == {of for _, of in told}
    assert sorted(done for done, _ in told) == [done for done, _ in told]
    assert (total, total) == told[-1]
    assert 5 == len(outs) and len(told) > 6 and 0 < told[3][0] < total


class Interrupting:
    """A runner that is interrupted in a step, as by Ctrl-C."""

    def __init__(self, inner: Any, step: int) -> None:
        self.inner, self.left = inner, step

    def run(self, batch: Batch) -> StepResult:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        result: StepResult = self.inner.run(batch)
        return result

    def close(self) -> None:
        """Nothing of its own."""


@pytest.mark.parametrize("step", [1, 4])
def test_an_interruption_cancels_the_batch(llm: LLM, alone: list[list[int]], step: int) -> None:
    """All of it, and nothing else: a request by hand that was not in the step goes on."""
    llm.engine.runner = Interrupting(llm.engine.runner, step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.runner = llm.engine.runner.inner
    assert (0, 0) == (llm.stats()["running"], llm.stats()["waiting"])
    late = llm.engine.submit(PROMPTS[4], GREEDY)
    assert alone == [out.tokens for out in llm.generate(PROMPTS, GREEDY)]
    events = drained(llm)
    assert [late] == [*events]
    assert alone[4] == tokens_of(events[late])


def test_what_progress_raises_cancels_the_batch(llm: LLM, alone: list[list[int]]) -> None:
    def stop(done: int, total: int) -> None:
        if done > 30:
            raise KeyError(done)

    with pytest.raises(KeyError):
        llm.generate(PROMPTS, GREEDY, progress=stop)
    assert (0, 0) == (llm.stats()["running"], llm.stats()["waiting"])
    assert {} == drained(llm)
    assert alone == [out.tokens for out in llm.generate(PROMPTS, GREEDY)]


def test_events_of_the_hand_are_kept(llm: LLM, alone: list[list[int]]) -> None:
    """Whatever steps the engine meanwhile: generate, logits, one inside of the other."""
    hand = [llm.engine.submit(PROMPTS[0], GREEDY), llm.engine.submit(PROMPTS[1], GREEDY)]
    got: dict[int, list[Event]] = {seq_id: [] for seq_id in hand}

    def step() -> None:
        for event in llm.engine.step():
            got[event.seq_id].append(event)

    step()
    llm.logits(PROMPTS[2])
    inner: list[list[int]] = []

    def nested(done: int, total: int) -> None:
        if not inner:
            inner.append(llm.generate([PROMPTS[4]], GREEDY)[0].tokens)
            step()

    assert [alone[3]] == [out.tokens for out in llm.generate([PROMPTS[3]], GREEDY, progress=nested)]
    assert [alone[4]] == inner
    while not llm.engine.idle():
        step()
    assert [alone[0], alone[1]] == [tokens_of(got[seq_id]) for seq_id in hand]
    assert ["length", "length"] == [got[seq_id][-1].finish for seq_id in hand]
    assert [] == llm.engine.step()
    late = llm.engine.submit(PROMPTS[2], GREEDY)
    llm.generate([PROMPTS[1]], GREEDY)
    assert 0 == llm.stats()["running"] and not llm.engine.idle(), "what is kept must still be told"
    events = llm.engine.step()
    assert {late} == {event.seq_id for event in events}
    assert (alone[2], "length") == (tokens_of(events), events[-1].finish)
    assert llm.engine.idle()


def test_logits_return_when_they_are_there(llm: LLM, alone: list[list[int]]) -> None:
    want_TV = llm.logits(PROMPTS[3])
    seq_id = llm.engine.submit(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    before = llm.stats()["computed_tokens"]
    got_TV = llm.logits(PROMPTS[3], chunks=[1, 7, 32])
    assert float((got_TV - want_TV).abs().max()) < 1e-4
    assert llm.stats()["computed_tokens"] - before < len(PROMPTS[0]) + len(PROMPTS[3]) + 10
    llm.engine.cancel(seq_id)
    events = drained(llm)
    assert [seq_id] == [*events]
    assert alone[0][: len(events[seq_id]) - 1] == tokens_of(events[seq_id])[:6]


@pytest.mark.parametrize(("tokens", "given", "said"), [
    ([], {}, "no tokens"), ([512], {}, "512"), ([1, 2], {"chunks": [1]}, "sum to 1"), ([1, 2], {"chunks": [3, -1]}, "positive"),
    ([1, 2], {"chunks": "ab"}, "whole numbers"), ([1, 2], {"chunks": [1.5]}, "whole numbers"), ([1, 2], {"chunks": 2}, "whole numbers"),
    ([1, 2], {"images": [b""]}, "1 images"), ([1] * 10**5, {}, "context|needs")], ids=lambda item: str(item)[:20])
def test_invalid_logits(llm: LLM, tokens: list[int], given: dict[str, Any], said: str) -> None:
    with pytest.raises(FirstlightError, match=said):
        llm.logits(tokens, **given)
    assert llm.engine.idle()


@pytest.mark.parametrize("beside", [0, 3], ids=["running", "waiting"])
def test_an_interruption_cancels_logits(llm: LLM, beside: int) -> None:
    """In its own step, or in one of others while it waits for a slot."""
    ids = [llm.engine.submit(PROMPTS[0], GREEDY) for _ in range(beside)]
    llm.engine.runner = Interrupting(llm.engine.runner, 2)
    with pytest.raises(KeyboardInterrupt):
        llm.logits(PROMPTS[3])
    assert (0, 0) == (llm.stats()["running"], llm.stats()["waiting"])
    assert ids == [*drained(llm)]


def test_stats(llm: LLM) -> None:
    llm.reset_prefix_cache()
    rest = llm.stats()
    assert {"groups", "running", "waiting", "preemptions", "computed_tokens", "prompt_tokens", "recomputed_tokens", "fallbacks"} <= rest.keys()
    ids = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    busy = llm.stats()
    assert (3, 2) == (busy["running"], busy["waiting"])
    for name, group in busy["groups"].items():
        assert group["total"] == group["free"] + group["used"] + group["cached"] and group["used"] > 0
        assert rest["groups"][name] == {**group, "free": group["total"], "used": 0, "cached": 0}
        assert group["kind"] in ("rows", "state")
    for seq_id in ids:
        llm.engine.cancel(seq_id)
    assert sum(map(len, PROMPTS)) == busy["prompt_tokens"] - rest["prompt_tokens"]


def test_a_text_ends_before_its_stop_string() -> None:
    """The engine stops as well, the hand hears nothing of it, and tokens up to the match are returned."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(dtype="float32", cache_bytes=2_000_000, max_sequences=3) as llm:
        whole = llm.generate("The first light", params)[0]
        assert whole.text is not None and len(whole.text) > 12
        stop = whole.text[5:8]
        at = whole.text.index(stop)
        out, other = llm.generate(["The first light"] * 2, [replace(params, stop=(stop,)), params])
        assert (whole.text[:at], "stop") == (out.text, out.finish_reason)
        assert whole.tokens[: len(out.tokens)] == out.tokens and len(out.tokens) < 40
        assert (whole.text, "length") == (other.text, other.finish_reason)
        assert {} == drained(llm)
        assert out == replace(llm.generate("The first light", replace(params, stop=(stop,)))[0], first_token_s=out.first_token_s)
        assert 0 == llm.stats()["running"], "the engine goes on after the stop string"


def test_defaults_of_the_model_hold_when_no_params_are_given(tmp_path: Path) -> None:
    shutil.copytree(K3, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"do_sample": False, "max_new_tokens": 3}))
    with LLM(tmp_path / "model", dtype="float32", cache_bytes=1_000_000, max_sequences=2) as llm:
        likeliest = llm.logits(PROMPTS[0])[-1].argmax()
        outs = [llm.generate([PROMPTS[0]])[0] for _ in range(3)]
        assert {3} == {len(out.tokens) for out in outs} and {int(likeliest)} == {out.tokens[0] for out in outs}
        given = [llm.generate([PROMPTS[0]], SamplingParams(max_tokens=5, ignore_eos=True, seed=seed))[0] for seed in range(4)]
        assert {5} == {len(out.tokens) for out in given}
        assert 1 < len({tuple(out.tokens) for out in given}), "params that were given must not turn greedy"


def test_logprobs_are_per_token(llm: LLM) -> None:
    with_them, without, failed = PROMPTS[:3]
    faulty(llm, Fault(kind="fail", seq_id=next_id(llm) + 2))
    each = [SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2), GREEDY, SamplingParams(logprobs=1)]
    outs: list[Output] = llm.generate([with_them, without, failed], each)
    assert outs[0].logprobs is not None
    assert outs[0].tokens == [entry.token for entry in outs[0].logprobs] == [entry.top[0][0] for entry in outs[0].logprobs]
    assert {2} == {len(entry.top) for entry in outs[0].logprobs}
    assert (None, []) == (outs[1].logprobs, outs[2].logprobs)


def test_closing() -> None:
    llm = LLM(K3, dtype="float32", cache_bytes=1_000_000, max_sequences=2)
    llm.engine.submit([1, 2], GREEDY)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate([[1]], GREEDY), lambda: llm.logits([1]), lambda: llm.engine, lambda: llm.stats(), lambda: llm.generate("a")):
        with pytest.raises(RequestError, match=r"this LLM is closed\. Make a new one"):
            use()
    with pytest.raises(RequestError, match="closed"), llm:
        llm.generate([[1]], GREEDY)


def test_options_are_checked_before_anything_is_read() -> None:
    for given in ({"max_sequences": 0}, {"dtype": "int8"}, {"device": "cuda"}, {"cache_bytes": 1.5}):
        with pytest.raises(ConfigError):
            LLM("/nowhere", **given)  # type: ignore[arg-type]
