"""DeepSeek-V3, V3.2 and GLM-5 against transformers: logits however split, rows that indexers choose, eight-bit checkpoints, draft layers.

Seeds of prompts are such that the first row that is not chosen scores clearly less than the last one that is, in every layer: where two
scores are equal to the last digits, two right implementations may choose differently, and logits differ by more than rounding.

Letters: T tokens, V vocabulary, M rows, U rows chosen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.adapt.compare import compare
from firstlight.adapt.record import Trace, record
from firstlight.layers import dsa
from firstlight.models.deepseek_v3 import MTP_REASON
from firstlight.models.registry import read
from firstlight.ops.fp8_unpack import pack
from firstlight.spec.errors import CheckpointError
from tests.engine.test_flat import calls_per_token
from tests.models.deepseek_tiny import INDEX, YARN, make_deepseek
from tests.models.hf_tiny import reference_logits, reference_trace

TOLERANCE = 1e-4
NUM_TOKENS = 130
TOP_K = INDEX["index_topk"]
ORDERS = {"portable": ("portable", "reference"), "reference": ("reference",)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}), "v3 yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3 half-split, one query matrix, one group": (
        "deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "v3.2": ("deepseek_v32", {}), "v3.2 yarn": ("deepseek_v32", {"rope_parameters": YARN}),
    "glm-5": ("glm_moe_dsa", {"indexer_types": ["full"] * 5}), "glm-5.2": ("glm_moe_dsa", {}),
}
SPLITS = {"one shot": [NUM_TOKENS], "chunks": [1, 7, 3, 16, 2, 5, 64, 1, 31], "token by token": [1] * 70, "engine's own": None}
SPARSE = ["deepseek_v32", "glm_moe_dsa"]

Made = tuple[Path, Any, list[int], Tensor]
"""Folder, transformers' model, prompt, its logits."""


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@contextmanager
def llm_for(folder: Path, order: str = "portable", **more: Any) -> Iterator[LLM]:
    options: dict[str, Any] = {"dtype": "float32", "cache_bytes": 16_000_000, "max_sequences": 4, "poison_freed": True} | more
    with LLM(folder, backends=ORDERS[order], **options) as llm:
        yield llm


def logits(folder: Path, ids: list[int], **more: Any) -> Tensor:
    with llm_for(folder, **more) as llm:
        return llm.logits(ids)


def edit(folder: Path, **keys: Any) -> None:
    """Change a config on disk; None takes a key away."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def furthest(got_TV: Tensor, want_TV: Tensor) -> float:
    assert want_TV.shape == got_TV.shape
    return float((got_TV - want_TV).abs().max())


@pytest.fixture(scope="module", params=VARIANTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, changes = VARIANTS[request.param]
    folder, ids = tmp_path_factory.mktemp(family), prompt(1, NUM_TOKENS)
    model = make_deepseek(folder, family, **changes)
    return folder, model, ids, reference_logits(model, ids)


@pytest.mark.parametrize(("order", "how"), [*(("portable", how) for how in SPLITS), ("reference", "chunks")])
def test_logits(made: Made, order: str, how: str) -> None:
    folder, _, ids, want_TV = made
    if how == "token by token":
        ids, want_TV = ids[:70], want_TV[:70]
    with llm_for(folder, order) as llm:
        assert furthest(llm.logits(ids, chunks=SPLITS[how]), want_TV) <= TOLERANCE


def test_batched_greedy_tokens_are_those_of_transformers(made: Made) -> None:
    """Unlike lengths in one batch, below and above what an indexer chooses; each token the argmax over prompt and answer."""
    folder, model, ids, _ = made
    prompts = [ids[:length] for length in (1, 6, 33, 90)]
    with llm_for(folder) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for given, out in zip(prompts, outs, strict=True):
        want_TV = reference_logits(model, [*given, *out.tokens])
        assert want_TV[len(given) - 1:-1].argmax(-1).tolist() == out.tokens


def test_every_module(made: Made) -> None:
    """Outputs by the names that the model file gives to transformers' modules; attention absorbs kv_b, and gate halves have no partner."""
    folder, model, ids, _ = made
    want = reference_trace(model, ids, "model.layers.*")
    want = Trace({name: each for name, each in want.outputs.items() if not name.endswith(("kv_b_proj", "indexer"))}, want.extra)
    with llm_for(folder) as llm, record(llm.machine.runner.decoder) as got:  # type: ignore[union-attr]
        got.extra["logits"] = llm.logits(ids)
    found = compare(got, want, read(folder).names.module, TOLERANCE)
    assert [] == list(found.unmapped) + list(found.only_want)
    assert found.first is None, str(found)
    assert len(found.compared) > 60


def test_another_prompt_differs(made: Made) -> None:
    folder, _, ids, want_TV = made
    assert furthest(logits(folder, [(ids[0] + 1) % 300, *ids[1:]]), want_TV) > 10 * TOLERANCE


@pytest.fixture(scope="module", params=SPARSE)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, ids = tmp_path_factory.mktemp(request.param), prompt(4, 4 * TOP_K)
    model = make_deepseek(folder, request.param, seed=1)
    return folder, model, ids, reference_logits(model, ids)


@pytest.mark.parametrize("length", [TOP_K - 1, TOP_K, TOP_K + 1, 4 * TOP_K])
def test_contexts_around_what_is_chosen(sparse: Made, length: int) -> None:
    """And every way to cross the border: at once, and with the last token alone."""
    folder, model, ids, _ = sparse
    want_TV = reference_logits(model, ids[:length])
    with llm_for(folder) as llm:
        for chunks in ([length], [length - 1, 1], [3, length - 3], [1] * length):
            assert furthest(llm.logits(ids[:length], chunks=chunks), want_TV) <= TOLERANCE


def as_dense(folder: Path, sparse_folder: Path) -> Path:
    """The same weights as DeepSeek-V3 has them, without indexers."""
    tensors = load_file(sparse_folder / "model.safetensors")
    config = json.loads((sparse_folder / "config.json").read_text())
    dropped = {key: None for key in config if key.startswith("index") or key == "layer_types"}
    (folder / "config.json").write_text(json.dumps(config))
    edit(folder, model_type="deepseek_v3", **dropped)
    save_file({name: tensor for name, tensor in tensors.items() if ".indexer." not in name}, folder / "model.safetensors")
    return folder


def test_with_room_for_all_rows_it_is_dense_attention(sparse: Made, tmp_path: Path) -> None:
    """To the last bit up to top_k rows; with one row less it is not."""
    folder, _, ids, _ = sparse
    dense = as_dense(tmp_path, folder)
    want_TV = logits(dense, ids)
    assert torch.equal(logits(dense, ids[:TOP_K]), logits(folder, ids[:TOP_K]))
    edit(folder, index_topk=len(ids))
    assert torch.equal(want_TV, logits(folder, ids))
    edit(folder, index_topk=len(ids) - 1)
    nearly_TV = logits(folder, ids)
    assert furthest(nearly_TV[:-1], want_TV[:-1]) <= TOLERANCE, "tokens that still see everything, by the sparse form"
    assert float((nearly_TV[-1] - want_TV[-1]).abs().max()) > 10 * TOLERANCE
    edit(folder, index_topk=TOP_K)
    assert furthest(logits(folder, ids), want_TV) > 100 * TOLERANCE


def test_indexers_choose_the_same_rows(sparse: Made) -> None:
    """As sets, of every token in every layer that chooses; a difference may stand only where two scores are equal to the last digits."""
    folder, model, _, _ = sparse
    ids, theirs = prompt(2, NUM_TOKENS), dict[str, Tensor]()
    for name, module in model.named_modules():
        if name.endswith("indexer"):
            module.register_forward_hook(lambda module, inputs, output, name=name: theirs.update({name: output[0]}))
    reference_logits(model, ids)
    ours, scores = chosen_rows(folder, ids)
    assert len(theirs) == len(ours) == {"deepseek_v32": 5, "glm_moe_dsa": 3}[model.config.model_type]
    for rows_TU, scores_TM, want_TU in zip(ours, scores, theirs.values(), strict=True):
        for token in range(NUM_TOKENS):
            got, want = ({row for row in rows[token].tolist() if 0 <= row <= token} for rows in (rows_TU, want_TU))
            assert min(TOP_K, token + 1) == len(got)
            if got != want:
                apart = scores_TM[token, sorted(got ^ want)]
                assert float(apart.max() - apart.min()) < 1e-5, f"token {token} chose {sorted(got)}, not {sorted(want)}"


def chosen_rows(folder: Path, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What each indexer of ours chose in one shot, and its scores."""
    ours: list[Tensor] = []
    scores: list[Tensor] = []
    with llm_for(folder) as llm:
        assert llm.machine is not None
        for module in llm.machine.runner.decoder.modules():
            if isinstance(module, dsa.Indexer):
                module.register_forward_hook(lambda module, inputs, output: ours.append(output))
                score = module.score
                module.score = lambda *args, score=score, **kwargs: scores.append(score(*args, **kwargs)) or scores[-1]
        llm.logits(ids, chunks=[len(ids)])
    return ours, scores


def test_scores_in_pieces(sparse: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sequences in a step whose scores do not fit at once."""
    folder, _, ids, _ = sparse
    others = [ids[:20], ids[5:12], ids[3:30], ids]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with llm_for(folder) as llm:
        want = [out.tokens for out in llm.generate(others, params)]
    monkeypatch.setattr(dsa, "SCORE_ELEMENTS", 5 * len(ids))
    with llm_for(folder) as llm:
        assert want == [out.tokens for out in llm.generate(others, params)]
        assert furthest(llm.logits(ids, chunks=[4, 28]), logits(folder, ids)) <= TOLERANCE


def test_pairs_of_the_indexer_lie_as_each_family_says(tmp_path: Path) -> None:
    """DeepSeek-V3.2 turns halves, GLM-5 neighbours; its config key decides here, and transformers does not read it."""
    ids = prompt(6, 60)
    model = make_deepseek(tmp_path, "deepseek_v32")
    want_TV = reference_logits(model, ids)
    edit(tmp_path, model_type="glm_moe_dsa", indexer_rope_interleave=False)
    assert furthest(logits(tmp_path, ids), want_TV) <= TOLERANCE
    edit(tmp_path, indexer_rope_interleave=None)
    assert furthest(logits(tmp_path, ids), want_TV) > 100 * TOLERANCE
    glm = make_deepseek(tmp_path, "glm_moe_dsa", indexer_rope_interleave=False)
    assert furthest(logits(tmp_path, ids), reference_logits(glm, ids)) > 100 * TOLERANCE
    edit(tmp_path, indexer_rope_interleave=True)
    assert furthest(logits(tmp_path, ids), reference_logits(glm, ids)) <= TOLERANCE


def test_shared_choices_matter(tmp_path: Path) -> None:
    """A layer that shares has no indexer of its own, and sees what the one before it chose: with own ones logits differ."""
    ids = prompt(14, 60)
    shared = make_deepseek(tmp_path, "glm_moe_dsa")
    full = make_deepseek(None, "glm_moe_dsa", indexer_types=["full"] * 5)
    full.load_state_dict(shared.state_dict(), strict=False)
    assert furthest(reference_logits(full, ids), reference_logits(shared, ids)) > 100 * TOLERANCE
    assert furthest(logits(tmp_path, ids), reference_logits(shared, ids)) <= TOLERANCE
    edit(tmp_path, indexer_types=["full"] * 5)
    with pytest.raises(CheckpointError, match=r"missing \(10\)"):
        logits(tmp_path, ids)


def test_the_policy_of_precision_holds_in_sixteen_bits(sparse: Made) -> None:
    """Weights that are exact stay fp32, scores are fp32, keys are the model's dtype, and logits stay near."""
    folder, _, ids, want_TV = sparse
    seen: list[torch.dtype] = []
    with llm_for(folder, dtype="bfloat16") as llm:
        assert llm.machine is not None
        indexers = [module for module in llm.machine.runner.decoder.modules() if isinstance(module, dsa.Indexer)]
        for indexer in indexers:
            assert {torch.float32} == {indexer.weights_proj.weight.dtype, indexer.k_norm.weight.dtype, indexer.k_norm.bias.dtype}
            assert torch.bfloat16 == indexer.wk.weight.dtype == indexer.wq_b.weight.dtype
            score = indexer.score
            indexer.score = lambda *args, score=score, **kwargs: seen.append(args[1].dtype) or score(*args, **kwargs)
        got_TV = llm.logits(ids).float()
        assert torch.bfloat16 == llm.machine.pool.layer(0)["index_key"].dtype
    assert len(indexers) == len(seen) and {torch.float32} == set(seen)
    alike_T = torch.nn.functional.cosine_similarity(got_TV, want_TV)
    assert float(alike_T[:TOP_K].median()) > 0.999, "before any row is left out, only rounding differs"
    assert float(alike_T.mean()) > 0.8


@pytest.mark.parametrize("family", ["deepseek_v3", *SPARSE])
def test_eight_bit_checkpoints(tmp_path: Path, family: str) -> None:
    """Blocks of 128 x 128, cut off at the edges, attention and experts: what transformers computes with the numbers they stand for."""
    shape = {"hidden_size": 136, "intermediate_size": 200, "moe_intermediate_size": 40, "num_hidden_layers": 3, "q_lora_rank": 140}
    model = make_deepseek(tmp_path, family, **shape, **({"indexer_types": ["full", "shared", "full"]} if family == "glm_moe_dsa" else {}))
    tensors, num_packed = load_file(tmp_path / "model.safetensors"), 0
    for name, tensor in list(tensors.items()):
        exact = ("mlp.gate.", "norm", "embed_tokens", "lm_head", "weights_proj", "bias")
        if not any(part in name for part in exact):
            codes, scale = pack(tensor)
            tensors[name], tensors[f"{name}_scale_inv"] = codes.view(torch.float8_e4m3fn), scale
            num_packed += 1
    assert num_packed > 60
    meant = {name: value(tensors, name) for name in tensors if not name.endswith("_scale_inv")}
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    want_TV = reference_logits(same, prompt(14, 40))
    save_file(tensors, tmp_path / "model.safetensors")
    edit(tmp_path, quantization_config={
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})
    with llm_for(tmp_path) as llm:
        assert llm.machine is not None
        report = llm.machine.report
        assert furthest(llm.logits(prompt(14, 40)), want_TV) <= TOLERANCE
    assert (len(tensors), {"fp8"}) == (report.num_tensors, set(report.expert_formats.values()))
    assert furthest(reference_logits(model, prompt(14, 40)), want_TV) > 10 * TOLERANCE, "eight bits are not the original"
    some = "model.layers.1.self_attn.kv_b_proj.weight"
    for damage, told in ({f"{some}_scale_inv": None}, f"unpaired (1): {some} has no scale"), (
            {f"{some}_scale_inv": torch.ones(1, 2)}, "misshapen (1)"), ({some: tensors[some].float()}, "unpaired (1)"):
        broken = {name: tensor for name, tensor in (tensors | damage).items() if tensor is not None}
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            logits(tmp_path, [5])
        assert told in caught.value.fact


def value(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The numbers that codes stand for, block by block."""
    if f"{name}_scale_inv" not in tensors:
        return tensors[name]
    found, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            found[128 * row:128 * row + 128, 128 * column:128 * column + 128] *= scale[row, column]
    return found


def test_draft_layers_are_set_aside_with_a_reason(tmp_path: Path) -> None:
    model, ids = make_deepseek(tmp_path, "deepseek_v32"), prompt(10, 30)
    tensors = load_file(tmp_path / "model.safetensors")
    draft = {name.replace("layers.4.", "layers.5."): tensor for name, tensor in tensors.items() if "layers.4." in name}
    draft |= {f"model.layers.5.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    draft |= {"model.layers.5.eh_proj.weight": torch.ones(64, 128), "model.layers.5.embed_tokens.weight": torch.ones(320, 64)}
    save_file({**tensors, **{name: tensor.clone() for name, tensor in draft.items()}}, tmp_path / "model.safetensors")
    edit(tmp_path, num_nextn_predict_layers=1)
    with llm_for(tmp_path) as llm:
        assert llm.machine is not None
        assert {MTP_REASON: len(draft)} == llm.machine.report.num_skipped
        assert furthest(llm.logits(ids), reference_logits(model, ids)) <= TOLERANCE
    edit(tmp_path, num_nextn_predict_layers=None)
    with pytest.raises(CheckpointError, match=r"unexpected"):
        logits(tmp_path, ids)


def test_calls_per_decoded_token_are_flat(tmp_path: Path) -> None:
    """What grows with the context is inside of one call, index_scores (and the choice among them): 2 H (K + 1) flops per row and indexer."""
    make_deepseek(tmp_path, "deepseek_v32", num_hidden_layers=2)
    with llm_for(tmp_path, max_sequences=2) as llm:
        short, long = calls_per_token(llm, 200), calls_per_token(llm, 3_600)
        spec = llm.machine.spec  # type: ignore[union-attr]
    assert short > 100, "nothing was counted"
    assert abs(long - short) <= 0.02 * short, f"{short:.0f} calls at 200, {long:.0f} at 3,600"
    assert 2 * 2 * 16 * (20 + 1) * 3_400 == spec.flops(1, 3_600) - spec.flops(1, 200)
