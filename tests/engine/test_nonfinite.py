"""One value that is not finite ends one request, in the step in which it appears; neighbours and the next owner of its memory see nothing.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.engine.loop import Runner
from firstlight.engine.runner import finite_rows
from firstlight.sched.sequence import Batch, Chunk, Event, StepResult
from firstlight.spec.errors import RequestError
from tests.models.hf_tiny import make_hf

DATA = Path(__file__).parents[1] / "data"
NUM_TOKENS = 7
LENGTHS = (5, 29, 12, 17)
PROMPTS = [[3 + (31 * number + 7 * position) % 290 for position in range(length)] for number, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
VICTIM, NEXT = 1, 3
NAN, INF = math.nan, math.inf

# (layer, what of it, value); 3, 6 and 7 are MLA, the others KDA, in both models.
PLACES = [
    (0, "recurrent", NAN), (0, "conv_v", INF), (5, "recurrent", -INF), (5, "conv_k", NAN), (3, "latent", NAN), (6, "latent", INF),
    (0, "mixer", NAN), (3, "ffn", INF), (7, "ffn", NAN),
]
ALL_PLACES = [
    (layer, what, value)
    for layer in range(8)
    for what in ("mixer", "ffn", *(("latent",) if layer in (3, 6, 7) else ("recurrent", "conv_q", "conv_k", "conv_v")))
    for value in (NAN, INF, -INF)
]


class Spoiler:
    """Runs batches, and once, before the one that computes `position` of a sequence, ruins a single value."""

    def __init__(self, inner: Runner, seq_id: int, position: int, ruin: Callable[[Chunk, int], Callable[[], None]]) -> None:
        self.inner, self.seq_id, self.position, self.ruin = inner, seq_id, position, ruin
        self.hit: Chunk | None = None

    def run(self, batch: Batch) -> StepResult:
        row = 0
        for chunk in batch.chunks:
            if chunk.seq.seq_id == self.seq_id and chunk.begin <= self.position < chunk.end and self.hit is None:
                self.hit = chunk
                undo = self.ruin(chunk, row + self.position - chunk.begin)
                try:
                    return self.inner.run(batch)
                finally:
                    undo()
            row += chunk.end - chunk.begin
        return self.inner.run(batch)

    def close(self) -> None:
        self.inner.close()


def spoiler(llm: LLM, seq_id: int, position: int, place: tuple[int, str, float]) -> Spoiler:
    """Ruins one element: of a state, of one cached row, or of the output of a mixer or feed-forward for one token."""
    assert llm.machine is not None
    layer, what, value = place
    pool, decoder = llm.machine.pool, llm.machine.runner.decoder

    def output(chunk: Chunk, row: int) -> Callable[[], None]:
        def hook(module: Any, args: Any, result: Tensor) -> Tensor:
            result = result.clone()
            result[row, 3] = value
            return result

        return getattr(decoder.layers[layer], what).register_forward_hook(hook).remove  # type: ignore[no-any-return]

    def memory(chunk: Chunk, row: int) -> Callable[[], None]:
        assert chunk.continues, "there is nothing to ruin yet"
        tensor = pool.layer(layer)[what]
        group = next(group for group in pool.groups.values() if group.num_blocks == len(tensor) and (group.kind == "rows") == (what == "latent"))
        blocks = chunk.table.blocks[group.name]
        target = tensor[blocks[0]]
        if group.kind == "rows":
            at = chunk.begin // 2
            target = tensor[blocks[at // group.tokens_per_block], at % group.tokens_per_block]
        target.view(-1)[1] = value
        return lambda: None

    return Spoiler(llm.machine.runner, seq_id, position, output if what in ("mixer", "ffn") else memory)


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder, and what each prompt yields alone."""
    folder = DATA / "kimi_k3_tiny"
    if request.param == "kimi_linear":
        folder = tmp_path_factory.mktemp("kimi_linear")
        make_hf(folder)
    with crowded(folder) as llm:
        return folder, [llm.generate([prompt], GREEDY)[0].tokens for prompt in PROMPTS]


def crowded(folder: Path, **more: Any) -> LLM:
    return LLM(folder, dtype="float32", cache_bytes=2_000_000, max_sequences=3, chunk_tokens=8, tokens_per_block=4, **more)


@pytest.fixture(scope="module")
def crowd(model: tuple[Path, list[list[int]]]) -> Iterator[LLM]:
    with crowded(model[0]) as llm:
        yield llm


def finite_memory(llm: LLM) -> bool:
    assert llm.machine is not None
    return all(bool(tensor.isfinite().all()) for layer in llm.spec.layers for tensor in llm.machine.pool.layer(layer.index).values())


class Run:
    """Three requests in three slots, one of which gets ruined; a fourth waits for its slot."""

    def __init__(self, llm: LLM, position: int, place: tuple[int, str, float], *, again: bool = False) -> None:
        assert llm.machine is not None
        self.machine = llm.machine
        llm.reset_prefix_cache()
        self.ids = [llm.engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        if again:
            self.ids.append(llm.engine.submit(PROMPTS[VICTIM], GREEDY))
        self.spoiler = spoiler(llm, self.ids[VICTIM], position, place)
        self.tokens: dict[int, list[int]] = {seq_id: [] for seq_id in self.ids}
        self.ends: dict[int, Event] = {}
        self.late = True
        self.drive(llm)

    def drive(self, llm: LLM) -> None:
        llm.engine.runner = self.spoiler
        for _ in range(80):
            fresh = self.spoiler.hit is None
            events = llm.engine.step()
            self.machine.cache.check()
            if fresh and self.spoiler.hit is not None:
                self.late = (self.ids[VICTIM], "error") not in [(event.seq_id, event.finish) for event in events]
            for event in events:
                if event.token is not None:
                    self.tokens[event.seq_id].append(event.token)
                if event.finish is not None:
                    self.ends[event.seq_id] = event
            if llm.engine.idle():
                break
        llm.engine.runner = self.machine.runner
        assert llm.engine.idle(), "80 steps were not enough"
        assert {0} == {group["used"] for group in llm.stats()["groups"].values()}


def check(run: Run, lone: list[list[int]], num_before: int) -> None:
    """The victim ends in the step of its ruin with what it had; all others equal their lone runs."""
    victim = run.ids[VICTIM]
    assert run.spoiler.hit is not None
    assert not run.late, "a value that is not finite outlived its step"
    end = run.ends[victim]
    assert ("error", None) == (end.finish, end.token)
    assert f"logits at position {run.spoiler.hit.end - 1} are not finite" == end.error
    assert lone[VICTIM][:num_before] == run.tokens[victim]
    for number, seq_id in enumerate(run.ids):
        if seq_id != victim:
            assert (lone[number if number < len(lone) else VICTIM], "length") == (run.tokens[seq_id], run.ends[seq_id].finish)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_ruin_while_decoding(model: tuple[Path, list[list[int]]], crowd: LLM, place: tuple[int, str, float]) -> None:
    run = Run(crowd, LENGTHS[VICTIM] + 2, place)
    check(run, model[1], 3)
    assert finite_memory(crowd), "what was ruined still lies in the pool"


@pytest.mark.slow
@pytest.mark.parametrize("place", ALL_PLACES, ids=str)
def test_ruin_anywhere(model: tuple[Path, list[list[int]]], crowd: LLM, place: tuple[int, str, float]) -> None:
    check(Run(crowd, LENGTHS[VICTIM] + 2, place), model[1], 3)
    check(Run(crowd, LENGTHS[VICTIM] - 1, place), model[1], 0)
    assert finite_memory(crowd)


@pytest.mark.parametrize("position", [18, 26], ids=["inside", "before a snapshot"])
@pytest.mark.parametrize("place", [PLACES[0], PLACES[3], PLACES[4], PLACES[7]], ids=str)
def test_ruin_in_a_chunk_that_samples_nothing(
    model: tuple[Path, list[list[int]]], crowd: LLM, place: tuple[int, str, float], position: int
) -> None:
    """Caught before anybody may build on it: a later request with the same prompt equals its lone run."""
    run = Run(crowd, position, place, again=True)
    assert run.spoiler.hit is not None and run.spoiler.hit.end < LENGTHS[VICTIM]
    check(run, model[1], 0)
    assert finite_memory(crowd)


def test_ruin_that_touches_nothing(model: tuple[Path, list[list[int]]], crowd: LLM) -> None:
    """The last layer's output for a token inside of a chunk is not used by anybody: all go on, and nothing is in the pool."""
    run = Run(crowd, 18, (7, "ffn", NAN))
    assert run.spoiler.hit is not None
    assert [*model[1]] == [run.tokens[seq_id] for seq_id in run.ids]
    assert finite_memory(crowd)


def test_the_next_owner_has_the_slot(crowd: LLM) -> None:
    """Control of the tests above: the request that waited gets the very state slot and row blocks that were ruined."""
    assert crowd.machine is not None
    tables: dict[int, dict[str, list[int]]] = {}
    inner = crowd.machine.runner.run

    def watch(batch: Batch) -> StepResult:
        tables.update({chunk.seq.seq_id: {name: list(ids) for name, ids in chunk.table.blocks.items()} for chunk in batch.chunks})
        return inner(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowd.machine.runner, "run", watch)
        run = Run(crowd, LENGTHS[VICTIM] + 2, (0, "recurrent", NAN))
    victim, after = tables[run.ids[VICTIM]], tables[run.ids[NEXT]]
    assert all(set(victim[name]) & set(after[name]) for name in victim)


def test_without_scrubbing_the_ruin_stays(model: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: it is the scrubbing that cleans the pool."""
    with crowded(model[0]) as llm:
        assert llm.machine is not None
        monkeypatch.setattr(llm.machine.pool, "scrub", lambda spoiled: None)
        Run(llm, LENGTHS[VICTIM] + 2, (3, "latent", NAN))
        assert not finite_memory(llm)


def test_ruin_among_poisoned_memory(model: tuple[Path, list[list[int]]]) -> None:
    with crowded(model[0], poison_freed=True) as llm:
        for place in (PLACES[0], PLACES[4]):
            check(Run(llm, LENGTHS[VICTIM] + 2, place), model[1], 3)


@pytest.mark.parametrize("what", ["latent", "recurrent"])
def test_ruin_in_a_cached_prefix(model: tuple[Path, list[list[int]]], crowd: LLM, what: str) -> None:
    """Whoever builds on it fails, once: nobody finds it any more, so the same prompt then yields what it should."""
    assert crowd.machine is not None
    crowd.reset_prefix_cache()
    crowd.generate([PROMPTS[VICTIM]], GREEDY)
    tensor = crowd.machine.pool.layer(3 if what == "latent" else 0)[what]
    tensor.masked_fill_(tensor != 0, NAN)
    first = crowd.generate([PROMPTS[VICTIM]], GREEDY)[0]
    assert first.num_cached_tokens > 0 and first.error is not None and [] == first.tokens
    again, other = crowd.generate([PROMPTS[VICTIM], PROMPTS[0]], GREEDY)
    assert (model[1][VICTIM], model[1][0]) == (again.tokens, other.tokens)


def test_logits_say_why(model: tuple[Path, list[list[int]]], crowd: LLM) -> None:
    """A collecting request fails in the caller; the one beside it goes on to its lone end."""
    assert crowd.machine is not None
    beside = crowd.engine.submit(PROMPTS[0], GREEDY)
    crowd.engine.runner = spoiler(crowd, beside + 1, 9, (0, "mixer", NAN))
    with pytest.raises(RequestError, match=r"logits of 29 tokens failed: logits at position 15 are not finite\. Compare the checkpoint"):
        crowd.logits(PROMPTS[VICTIM])
    crowd.engine.runner = crowd.machine.runner
    tokens = []
    while not crowd.engine.idle():
        tokens += [event.token for event in crowd.engine.step() if event.token is not None]
    assert model[1][0] == tokens


def test_which_rows_are_finite() -> None:
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert [True] * 6 == finite_rows(logits_RV)
    logits_RV[1, 4], logits_RV[2, 0], logits_RV[4, 49] = NAN, INF, -INF
    logits_RV[2, 7] = -INF
    logits_RV[5] = 3e38
    assert [True, False, False, True, False, True] == finite_rows(logits_RV)
    assert [True] == finite_rows(logits_RV[5:])
