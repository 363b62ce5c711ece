"""Tokenizers of real models, and small ones that show what real ones seldom do."""

from __future__ import annotations

import json
import shutil
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from firstlight.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "data" / "tokenizers"
K3_CONTROLS = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>", 163589: "<|sep|>",
    163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]", 163602: "<|media_begin|>", 163603: "<|media_content|>",
    163604: "<|media_end|>", 163605: "<|media_pad|>", 163838: "[UNK]", 163839: "[PAD]",
}
K3_SHOWN = {"<|open|>", "<|close|>", "<|sep|>"}


def loaded(folder: Path) -> Tokenizer:
    """A tokenizer that must be there."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def kimi() -> Tokenizer:
    return loaded(FILES / "kimi")


@pytest.fixture(scope="session")
def kimi_k3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The ranks of the Kimi models with the control tokens of K3."""
    folder = tmp_path_factory.mktemp("k3")
    shutil.copy(FILES / "kimi" / "tiktoken.model", folder)
    added = {str(token_id): {"content": text, "special": text not in K3_SHOWN} for token_id, text in K3_CONTROLS.items()}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}, "tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return loaded(folder)


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    with zipfile.ZipFile(FILES / "deepseek-v3.2" / "tokenizer.json.zip") as archive:
        archive.extractall(folder)
    shutil.copy(FILES / "deepseek-v3.2" / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def deepseek(deepseek_folder: Path) -> Tokenizer:
    return loaded(deepseek_folder)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the embedded model, made by the script that makes it."""
    spec = spec_from_file_location("make_byte_tokenizer", ROOT / "train" / "make_byte_tokenizer.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("bytes")
    script.write(folder, 288)
    return loaded(folder)


@pytest.fixture(params=["kimi", "kimi_k3", "deepseek", "byte_level"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of them in turn."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
