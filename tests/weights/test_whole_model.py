"""Whole checkpoints: what the report says, who decides about packing, tied embeddings, and the refusal of what is too large."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight import LLM
from firstlight.engine import boot
from firstlight.models.kimi_k3 import VISION_REASON
from firstlight.models.registry import read
from firstlight.spec.errors import CapacityError, CheckpointError
from firstlight.weights import load as loading
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import Loaded, load
from tests.weights.damage import SOUND, copy_sound, edit, read_index

TRACE, LONG = SOUND.parent / "kimi_k3_text_trace", SOUND.parent / "kimi_k3_long"
EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
TOKENS = [5, 6, 7, 300, 11]


def load_folder(folder: Path, progress: Callable[[int, int], None] | None = None) -> Loaded:
    model = read(folder)
    return load(Checkpoint.open(folder), model.spec, model.names, progress=progress)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config.get("text_config", config))
    (folder / "config.json").write_text(json.dumps(config))


def logits(folder: Path) -> Tensor:
    with LLM(folder, cache_bytes=1 << 24, max_context=64) as llm:
        found: Tensor = llm.logits(TOKENS)
    assert (len(TOKENS), 512) == tuple(found.shape)
    assert bool(torch.isfinite(found).all())
    return found


def count(folder: Path) -> tuple[int, int, int]:
    """Tensors, text parameters and image tensors, from the bare files: two codes a byte, scales are none, four heads of A_log are real."""
    found = {name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()}
    vision = [name for name in found if name.startswith(("vision_tower.", "mm_projector."))]
    num_params = 0
    for name in found.keys() - set(vision):
        if name.endswith("A_log"):
            num_params += 4
        elif not name.endswith("weight_scale"):
            num_params += found[name].numel() * (2 if name.endswith("weight_packed") else 1)
    return len(found), num_params, len(vision)


@pytest.mark.parametrize(("folder", "form"), [(SOUND, "mxfp4"), (LONG, "mxfp4"), (TRACE, "dense")])
def test_report(folder: Path, form: str) -> None:
    """Every number of the report against the bare files, and against what was handed out."""
    loaded, (num_tensors, num_params, num_vision) = load_folder(folder), count(folder)
    report = loaded.report
    assert (0 if folder == TRACE else 18) == num_vision
    assert (num_tensors, num_params) == (report.num_tensors, report.num_params)
    assert ({VISION_REASON: num_vision} if num_vision else {}) == report.num_skipped
    assert {form} == set(report.expert_formats.values())
    assert not any("vision" in name or "projector" in name for name in loaded.tensors)
    held = sum(each.numel() for each in loaded.tensors.values())
    for bank in loaded.banks.values():
        assert form == bank.format
        held += (2 if form == "mxfp4" else 1) * sum(each.numel() for leaf in (bank.gate, bank.up, bank.down) for each in leaf)
    assert num_params == held


def test_progress_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_folder(LONG, lambda done, total: seen.append((done, total)))
    dones, totals = [done for done, _ in seen], {total for _, total in seen}
    assert {loaded.report.num_tensors - sum(loaded.report.num_skipped.values())} == totals
    assert list(range(1, len(seen) + 1)) == dones
    assert seen[-1][0] == seen[-1][1]


SETS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing left out": lambda text: text["quantization_config"].update(ignore=[]),
    "all left out": lambda text: text["quantization_config"].update(ignore=["re:.*"]),
    "not announced": lambda text: text.pop("quantization_config"),
}


@pytest.mark.parametrize("case", SETS)
def test_packed_tensors_stay_packed_whatever_the_config_says(tmp_path: Path, case: str) -> None:
    """Published ignore lists miss residual and latent projections, which are plain in the checkpoint."""
    folder = copy_sound(tmp_path / "model")
    edit_config(folder, SETS[case])
    loaded = load_folder(folder)
    assert {"mxfp4"} == set(loaded.report.expert_formats.values())
    assert torch.bfloat16 is loaded.tensors["layers.1.ffn.routed_expert_down_proj.weight"].dtype
    assert torch.equal(logits(SOUND), logits(folder))


def test_plain_tensors_stay_plain_whatever_the_config_says(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TRACE, folder, ignore=shutil.ignore_patterns("trace*"))
    announced = json.loads((SOUND / "config.json").read_text())["text_config"]["quantization_config"]
    edit_config(folder, lambda text: text.update(quantization_config=announced))
    assert {"dense"} == set(load_folder(folder).report.expert_formats.values())
    assert torch.equal(logits(TRACE), logits(folder))


def tie(folder: Path) -> Path:
    edit_config(folder, lambda text: text.update(tie_word_embeddings=True))
    return folder


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    """The same logits as a checkpoint that holds the embedding twice, and not those of its former head."""
    embed = load_file(SOUND / read_index(SOUND)[EMBED])[EMBED]
    twice, tied = copy_sound(tmp_path / "twice"), tie(copy_sound(tmp_path / "tied"))
    edit(twice, HEAD, lambda tensors: tensors.update({HEAD: embed.clone()}))
    edit(tied, HEAD, lambda tensors: tensors.pop(HEAD))
    loaded = load_folder(tied)
    assert "head.weight" not in loaded.tensors
    assert load_folder(twice).report.num_params - embed.numel() == loaded.report.num_params
    assert torch.equal(logits(twice), logits(tied))
    assert not torch.allclose(logits(SOUND), logits(tied), atol=1.0)


def test_a_head_is_there_exactly_when_the_config_says(tmp_path: Path) -> None:
    headless = copy_sound(tmp_path / "headless")
    edit(headless, HEAD, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {HEAD} for head.weight"):
        load_folder(headless)
    with pytest.raises(CheckpointError, match=rf"untied \(1\): {HEAD} and .*embed_tokens.weight differ in"):
        load_folder(tie(copy_sound(tmp_path / "both")))


def test_too_large_is_refused_before_a_cache_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the front door, with both numbers; one byte more would do."""
    need = load_folder(SOUND).report.memory_bytes
    monkeypatch.setattr(loading, "available_bytes", lambda: need - 1)
    monkeypatch.setattr(boot, "CachePool", None)
    with pytest.raises(CapacityError, match=re.escape(f"need {need:,} bytes") + ".*" + re.escape(f"{need - 1:,} bytes")) as caught:
        LLM(SOUND)
    assert caught.value.fix
    monkeypatch.setattr(loading, "available_bytes", lambda: need)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        LLM(SOUND, cache_bytes=1 << 24, max_context=64)
