"""Every kind of damage is refused, with a message that names what is damaged and says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.cli import main
from firstlight.engine import boot
from firstlight.models.registry import read
from firstlight.spec.errors import CheckpointError
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import Loaded, load
from tests.tree import ROOT
from tests.weights.damage import FIRST, KINDS, copy_sound

EXPECTED = {
    "missing_tensor": "missing (1)", "extra_tensor": "unexpected (1)", "layer_too_many": "unexpected (1)", "in_two_shards": "duplicated (1)",
    "transposed": "misshapen (1)", "wrong_dtype": "wrong dtype (1)", "float8_without_scale": "unpaired (1)", "truncated": "damaged",
    "truncated_header": "damaged (1)", "empty_file": "damaged (1)", "header_garbage": "damaged (1)", "header_length_garbage": "damaged (1)",
    "header_beyond_the_file": f"damaged (1): {FIRST} is cut off", "unknown_dtype": "damaged (1)", "sizes_disagree": "damaged (1)",
    "overlapping": "damaged (2)",
    "beyond_the_end": "damaged (1)",
    "pointer": "pointer (1)", "absent_shard": "absent shard (1)", "absent_shard_without_index": "absent shard (1)",
    "index_lacks_a_tensor": "index (1)", "shard_lacks_a_tensor": "index (1)", "index_names_the_other_shard": "index (1)",
    "index_leaves_the_folder": "index", "index_garbage": "index (1)", "two_checkpoints": "ambiguous (1)", "pickle_only": "pickled (1)",
    "empty_folder": "no weights (1)", "nan_weight": "not finite (1)", "nan_norm": "not finite (1)", "infinite_a_log": "not finite (1)",
    "infinite_bias": "not finite (1)", "nan_scale": "not finite (1)",
    "padding_not_zero": "padding (1)", "packed_without_scale": "unpaired (1)", "scale_without_packed": "unpaired (1)",
    "scale_shape": "misshapen (1)", "scale_as_float": "wrong dtype (1)", "expert_gap": "expert gap (1)", "expert_too_many": "unexpected (1)",
    "expert_twice": "duplicated (1)", "mixed_formats": "mixed formats (1)", "packed_and_plain": "mixed formats (1)",
    "two_names_for_one": "duplicated (1)",
}


def load_folder(folder: Path) -> Loaded:
    model = read(folder)
    return load(Checkpoint.open(folder), model.spec, model.names)


def test_the_copy_is_sound(tmp_path: Path) -> None:
    """Else every other test here would pass for the wrong reason."""
    loaded = load_folder(copy_sound(tmp_path / "model"))
    assert 227 - 7 * 3 == len(loaded.tensors)
    assert 7 == len(loaded.banks)


def test_every_kind_is_expected() -> None:
    assert set(EXPECTED) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    folder = copy_sound(tmp_path / "model")
    named = KINDS[kind](folder)
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    assert named in caught.value.fact
    assert EXPECTED[kind] in caught.value.fact
    assert str(folder) in caught.value.fact
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    """Three unlike ones are each named; of many alike the first are shown and all are counted."""
    folder = copy_sound(tmp_path / "model")
    names = [KINDS[kind](folder) for kind in ("missing_tensor", "transposed", "expert_gap")]
    with pytest.raises(CheckpointError, match=r"3 problems: missing \(1\).*misshapen \(1\).*expert gap \(1\)") as caught:
        load_folder(folder)
    assert [] == [name for name in names if name not in caught.value.fact]


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    """A config of another model: hundreds of tensors do not fit, the message stays readable."""
    folder = copy_sound(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 96'))
    with pytest.raises(CheckpointError, match=r"misshapen \([\d,]+\).*, and [\d,]+ more") as caught:
        load_folder(folder)
    assert len(str(caught.value)) < 2500


class CacheAllocatedError(BaseException):
    """Nobody on the way may swallow it."""


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CacheAllocatedError

    monkeypatch.setattr(boot, "CachePool", refuse)


def arguments(folder: Path) -> list[str]:
    return ["generate", str(folder), "--tokens", "5,6,7", "--max-tokens", "1"]


def test_the_sound_copy_comes_to_the_cache(tmp_path: Path, no_cache: None) -> None:
    """The alarm of the next test does ring."""
    with pytest.raises(CacheAllocatedError):
        main(arguments(copy_sound(tmp_path / "model")))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_at_the_command_line(tmp_path: Path, kind: str, no_cache: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one message on stderr, nothing on stdout, no cache allocated."""
    folder = copy_sound(tmp_path / "model")
    named = KINDS[kind](folder)
    code = main(arguments(folder))
    captured = capsys.readouterr()
    assert (2, "") == (code, captured.out)
    assert captured.err.startswith(f"firstlight: {folder}: ")
    assert named in captured.err
    assert EXPECTED[kind] in captured.err
    assert 1 == captured.err.count("\n")


@pytest.mark.parametrize("kind", ["truncated", "nan_scale"])
def test_damage_in_a_process_of_its_own(tmp_path: Path, kind: str) -> None:
    """One found in a header, one in the numbers."""
    folder = copy_sound(tmp_path / "model")
    named = KINDS[kind](folder)
    program = "import sys; from firstlight.cli import main; sys.exit(main())"
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments(folder)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120)
    assert (2, "") == (run.returncode, run.stdout), run.stderr
    assert run.stderr.startswith(f"firstlight: {folder}: ")
    assert named in run.stderr
    assert "Traceback" not in run.stderr
