"""Log probabilities of a prompt: the logits' own, once per token, however the prompt is cut, cached, crowded or preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from firstlight import LLM, AsyncEngine, SamplingParams
from firstlight.spec.errors import CapacityError, PeerError, RequestError

PROMPT = [(7 * place + 3) % 250 for place in range(50)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("default", dtype="float32", cache_bytes=64 << 20, chunk_tokens=16, max_context=256) as made:
        yield made


def rated(llm: LLM, prompt: list[int], **more: int) -> list[float]:
    """One value per token of a prompt but the first."""
    (out,) = llm.generate([prompt], SamplingParams(prompt_logprobs=2, temperature=0, ignore_eos=True, **{"max_tokens": 3, **more}))
    assert out.prompt_logprobs is not None
    first, *others = out.prompt_logprobs
    assert first is None
    assert prompt[1:] == [entry.token for entry in others if entry is not None]
    assert {2} <= {len(entry.top) for entry in others if entry is not None} | {2}
    return [entry.logprob for entry in others if entry is not None]


def expected(llm: LLM, prompt: list[int]) -> list[float]:
    logprobs_TV = llm.logits(prompt).double().log_softmax(-1)
    return [float(logprobs_TV[place, token]) for place, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 50])
def test_they_are_those_of_the_logits(llm: LLM, length: int) -> None:
    prompt = PROMPT[:length]
    assert expected(llm, prompt) == pytest.approx(rated(llm, prompt), abs=1e-4)


def test_a_cached_prompt_has_all_of_them(llm: LLM) -> None:
    """They are computed, not found: the request resumes from nothing, and what follows is not changed by asking."""
    cold = rated(llm, PROMPT)
    (warm,) = llm.generate([PROMPT], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert 49 == warm.num_cached_tokens
    (again,) = llm.generate([PROMPT], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=0))
    assert 0 == again.num_cached_tokens
    assert warm.tokens == again.tokens
    assert cold == pytest.approx(rated(llm, PROMPT), abs=1e-4)
    assert warm.prompt_logprobs is None


def test_company_and_preemption_change_nothing(llm: LLM) -> None:
    """In the middle of the prompt and in the middle of the answer; the values that are known stay, none comes twice."""
    alone = rated(llm, PROMPT, max_tokens=8)
    for steps in (1, 2, 5, 7):
        params = SamplingParams(prompt_logprobs=0, max_tokens=8, temperature=0, ignore_eos=True)
        other = llm.engine.submit(PROMPT[::-1], params)
        seq_id = llm.engine.submit(PROMPT, params)
        found: dict[int, float] = {}
        for step in range(200):
            for event in llm.engine.step():
                if event.seq_id == seq_id and event.prompt_logprobs is not None:
                    for place, entry in enumerate(event.prompt_logprobs, event.begin + 1):
                        found.setdefault(place, entry.logprob)
            if step == steps:
                llm.engine.preempt(seq_id)
            if llm.engine.idle():
                break
        assert [*range(1, 50)] == sorted(found)
        assert alone == pytest.approx([found[place] for place in range(1, 50)], abs=1e-4)
        assert other != seq_id


def test_collecting_rates_the_prompt_and_samples_nothing(llm: LLM) -> None:
    seq_id = llm.engine.submit(PROMPT, SamplingParams(prompt_logprobs=1, max_tokens=1), collect=True)
    events = []
    while not llm.engine.idle():
        events += llm.engine.step()
    assert {seq_id} == {event.seq_id for event in events}
    assert 49 == sum(len(event.prompt_logprobs) for event in events if event.prompt_logprobs is not None)
    assert ({None}, "length") == ({event.token for event in events}, events[-1].finish)


def test_checking_refuses_what_submitting_refuses(llm: LLM) -> None:
    """And leaves nothing behind."""
    before = llm.engine.counts()
    for tokens, more, error in [
        ([], {}, RequestError), ([999], {}, RequestError), ([1] * 500, {}, CapacityError), ([1], {"priority": "urgent"}, RequestError),
    ]:
        with pytest.raises(error):
            llm.engine.check(tokens, SamplingParams(), **more)  # type: ignore[arg-type]
    llm.engine.check([1], SamplingParams())
    assert before == llm.engine.counts()
    assert llm.engine.idle()


def test_asking_between_steps(llm: LLM) -> None:
    """A call is made by the stepping thread, its error goes to the asker, and after the end nobody answers."""

    async def work() -> None:
        engine = AsyncEngine(llm.engine)
        running = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)).__anext__())
        name = await engine.ask(lambda: __import__("threading").current_thread().name)
        assert "firstlight-engine" == name
        with pytest.raises(ZeroDivisionError):
            await engine.ask(lambda: 1 // 0)
        await running
        await engine.close(drain=False)
        with pytest.raises(PeerError):
            await engine.ask(lambda: 1)

    asyncio.run(work())
