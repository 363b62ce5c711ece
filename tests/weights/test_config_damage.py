"""A config.json that is wrong is refused at the command line by the name of the key or file, before a tensor is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstlight.cli import main
from firstlight.engine import boot
from tests.weights.damage import copy_sound

Config = dict[str, Any]


def text(**values: Any) -> Callable[[Config], None]:
    """Set keys of the text model."""
    return lambda config: config["text_config"].update(values)


def linear(**values: Any) -> Callable[[Config], None]:
    """Set keys of the linear attention."""
    return lambda config: config["text_config"]["linear_attn_config"].update(values)


EDITS: dict[str, tuple[Callable[[Config], object], str]] = {
    "missing key": (lambda config: config["text_config"].pop("hidden_size"), "text_config: `hidden_size` is missing"),
    "null for a key": (text(kv_lora_rank=None), "text_config: `kv_lora_rank` is missing"),
    "text for a number": (text(hidden_size="128"), "`hidden_size` is '128', a int is needed"),
    "truth for a number": (text(num_hidden_layers=True), "`num_hidden_layers` is True, a int is needed"),
    "fraction for a count": (text(num_experts=8.0), "`num_experts` is 8.0, a int is needed"),
    "zero": (text(vocab_size=0), "`vocab_size` is 0, it must be above 0"),
    "below zero": (text(moe_intermediate_size=-4), "`moe_intermediate_size` is -4, it must be above 0"),
    "text for a list": (linear(kda_layers="1,2"), "linear_attn_config: `kda_layers` is '1,2', a list is needed"),
    "text in a list": (linear(kda_layers=[1, 2, "3", 5, 6]), "`kda_layers[2]` is '3', a int is needed"),
    "layer in both lists": (linear(full_attn_layers=[1, 4, 7, 8]), "twice [1], absent [], beyond []"),
    "layer in no list": (linear(full_attn_layers=[4, 8]), "twice [], absent [7], beyond []"),
    "layer beyond the last": (linear(full_attn_layers=[4, 7, 8, 9]), "twice [], absent [], beyond [9]"),
    "layers counted from 0": (linear(full_attn_layers=[3, 6, 7], kda_layers=[0, 1, 2, 4, 5]), "absent [8], beyond [0]"),
    "no text model": (lambda config: config.pop("text_config"), "`text_config` is missing"),
    "list for an object": (lambda config: config.update(text_config=[]), "`text_config` is [], a dict is needed"),
    "unknown model_type": (lambda config: config.update(model_type="kimi_k9"), "model_type 'kimi_k9' is not known (known: "),
    "unknown inner model_type": (text(model_type="no_such_model"), "text_config: model_type 'no_such_model' is not known"),
    "no model_type": (lambda config: config.pop("model_type"), "`model_type` is missing"),
    "unknown active key": (text(attn_sink=True), "does not read: text_config.attn_sink"),
    "unknown active key outside": (lambda config: config.update(attn_sink=[1]), "does not read: attn_sink"),
    "unknown activation": (text(hidden_act="gelu"), "`hidden_act` is 'gelu', only 'silu' or 'situ' is supported"),
    "unknown dtype": (text(dtype="float8"), "`dtype` is 'float8', only 'bfloat16' or 'float32' or 'float16' is supported"),
    "unknown quantisation": (text(quantization_config={"quant_method": "gptq"}), "`quant_method` is 'gptq', only 'compressed-tensors' is supported"),
    "decay bound above zero": (linear(gate_lower_bound=3.0), "`gate_lower_bound` is 3.0, it must be in [-5, 0)"),
    "more chosen than there are": (text(num_experts_per_token=9), "top 9 of 8 experts"),
    "end token in words": (text(eos_token_id=["end"]), "`eos_token_id` is ['end']"),
}
FILES: dict[str, tuple[bytes | None, str]] = {
    "no config.json": (None, "config.json does not exist"),
    "empty": (b"", "config.json cannot be read as JSON"),
    "broken JSON": (b'{"model_type": ', "config.json cannot be read as JSON"),
    "no UTF-8": (b'{"model_type": "\xff"}', "config.json cannot be read as JSON"),
    "list": (b"[]", "config.json holds a list, not an object"),
}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Run the command line on a folder that must be refused without opening its weights; gives what stderr says."""

    def run(folder: Path) -> str:
        monkeypatch.setattr(boot, "Checkpoint", None)
        code = main(["generate", str(folder), "--tokens", "5,6,7", "--max-tokens", "1"])
        captured = capsys.readouterr()
        assert (2, "") == (code, captured.out)
        assert captured.err.startswith("firstlight: ")
        assert 1 == captured.err.count("\n")
        return captured.err

    return run


@pytest.mark.parametrize("case", EDITS)
def test_edited_config(tmp_path: Path, case: str, refused: Callable[[Path], str]) -> None:
    folder = copy_sound(tmp_path / "model")
    change, named = EDITS[case]
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    assert named in refused(folder)


@pytest.mark.parametrize("case", FILES)
def test_damaged_file(tmp_path: Path, case: str, refused: Callable[[Path], str]) -> None:
    folder = copy_sound(tmp_path / "model")
    content, named = FILES[case]
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    said = refused(folder)
    assert f"{folder}/config.json" in said
    assert named in said


def test_a_folder_that_is_not_there(tmp_path: Path, refused: Callable[[Path], str]) -> None:
    assert f"{tmp_path}/nowhere is not a folder" in refused(tmp_path / "nowhere")


def test_an_unread_key_that_is_off_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals above are for what the key says, not for its presence: this one goes on to the weights."""
    folder = copy_sound(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attn_sink"] = False
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(boot, "Checkpoint", None)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'open'"):
        main(["generate", str(folder), "--tokens", "5", "--max-tokens", "1"])
