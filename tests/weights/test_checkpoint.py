"""Opening a folder: what is found, in which file, from headers alone; and that our reader is never laxer than the format's own."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from firstlight.spec.errors import CheckpointError
from firstlight.weights.checkpoint import Checkpoint
from tests.weights.damage import FIRST, INDEX, SECOND, SOUND, copy_sound, read_index, write_index
from tests.weights.tiny import write_file

TRACE = SOUND.parent / "kimi_k3_text_trace"


def test_entries_are_those_of_the_index() -> None:
    checkpoint = Checkpoint.open(SOUND)
    assert read_index(SOUND) == {name: entry.file.name for name, entry in checkpoint.entries.items()}
    assert [SOUND / FIRST, SOUND / SECOND] == list(checkpoint.files)


def test_entries_say_what_the_format_s_own_reader_says() -> None:
    checkpoint = Checkpoint.open(SOUND)
    with checkpoint:
        for file in (FIRST, SECOND):
            for name, value in load_file(SOUND / file).items():
                entry = checkpoint.entries[name]
                assert tuple(value.shape) == entry.shape
                assert str(value.dtype) == f"torch.{entry.dtype}"
                assert value.numel() * value.element_size() == entry.num_bytes
                assert torch.equal(value, checkpoint.tensor(name))
                whole = (SOUND / file).read_bytes()
                assert whole[entry.offset : entry.offset + entry.num_bytes] == bytes(value.contiguous().view(-1).view(torch.uint8).numpy())


def test_single_file_wins_over_other_files_of_the_folder() -> None:
    """The trace beside the model is not a part of it."""
    checkpoint = Checkpoint.open(TRACE)
    assert [TRACE / "model.safetensors"] == list(checkpoint.files)


def test_any_safetensors_without_an_index(tmp_path: Path) -> None:
    for letter in "ba":
        write_file(tmp_path / f"{letter}.safetensors", {letter: ("U8", (2,), b"xy")})
    checkpoint = Checkpoint.open(tmp_path)
    assert ["a", "b"] == list(checkpoint.entries)
    assert 4 == checkpoint.num_bytes


def test_numbered_files_without_an_index_must_be_complete(tmp_path: Path) -> None:
    for k in (1, 3):
        write_file(tmp_path / f"model-{k:05d}-of-00004.safetensors", {f"t{k}": ("U8", (1,), b"x")})
    with pytest.raises(CheckpointError, match=r"absent shard \(2\): model-00002-of-00004.safetensors, model-00004-of-00004.safetensors"):
        Checkpoint.open(tmp_path)


def test_shards_may_be_links(tmp_path: Path) -> None:
    """Download caches keep files elsewhere and link to them."""
    for file in (INDEX, FIRST, SECOND):
        (tmp_path / file).symlink_to(SOUND / file)
    assert read_index(SOUND).keys() == Checkpoint.open(tmp_path).entries.keys()


def test_all_files_are_judged_before_the_error(tmp_path: Path) -> None:
    folder = copy_sound(tmp_path)
    (folder / FIRST).write_bytes(b"\0" * 4)
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"2 problems: damaged \(1\): {FIRST}.*absent shard \(1\): {SECOND}"):
        Checkpoint.open(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_unreadable_file(tmp_path: Path) -> None:
    """A folder under the name of a shard cannot be read as a file, whoever we are."""
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"unreadable \(1\): a.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [[], {}, {"a": 1}, "a", None])
def test_index_of_the_wrong_form(tmp_path: Path, weight_map: object) -> None:
    copy_sound(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index \(1\)"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", ["/etc/passwd", "../x.safetensors", "model.bin", "a/../../x.safetensors"])
def test_index_may_not_lead_outside(tmp_path: Path, shard: str) -> None:
    copy_sound(tmp_path)
    write_index(tmp_path, read_index(SOUND) | {"x": shard})
    with pytest.raises(CheckpointError, match=f"{shard} is no safetensors file inside the folder"):
        Checkpoint.open(tmp_path)


def raw(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


HEADERS = {
    "not an object": raw(b"[]"),
    "twice": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "no dtype": raw(b'{"a":{"shape":[1],"data_offsets":[0,1]}}', b"x"),
    "negative": raw(b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"x"),
    "backwards": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}', b"x"),
    "fraction": raw(b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"x"),
    "true": raw(b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"x"),
    "list": raw(b'{"a":[1]}', b"x"),
    "dtype list": raw(b'{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', b"x"),
    "rest": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"xyz"),
    "hole": raw(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"xy"),
    "half a byte": raw(b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', b"xy"),
    "remarks": raw(b'{"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "deep": raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"x"),
    "huge": raw(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', b"x"),
    "wide": raw(b'{"a":{"dtype":"U8","shape":[' + b",".join([b"9" * 100] * 60) + b'],"data_offsets":[0,1]}}', b"x"),
    "far": raw(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[' + b"9" * 4000 + b"," + b"9" * 4000 + b']}}', b"x"),
    "name": raw(b'{"a\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_cannot_be_believed(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[case])
    with pytest.raises(CheckpointError, match=r"damaged \(1\).* model.safetensors") as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


SMALL = raw(
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"U8","shape":[],"data_offsets":[24,25]}}',
    bytes(range(25)))
PLACES = st.integers(0, len(SMALL) - 1)


@given(st.lists(st.tuples(PLACES, st.binary(min_size=1, max_size=3)), max_size=3), st.integers(-30, 3))
def test_never_laxer_than_the_format_s_own_reader(changes: list[tuple[int, bytes]], cut: int) -> None:
    """Whatever bytes stand in a file: we refuse it by our own error, or every tensor can be mapped."""
    content = bytearray(SMALL)
    for place, put in changes:
        content[place : place + len(put)] = put
    content = content[:cut] if cut < 0 else content + b"\0" * cut
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(content)
        try:
            checkpoint = Checkpoint.open(folder)
        except CheckpointError:
            if content == SMALL:
                raise
            return
        for name, entry in checkpoint.entries.items():
            assert entry.shape == tuple(checkpoint.tensor(name).shape)


def test_the_intact_small_file_is_read(tmp_path: Path) -> None:
    """The property above is empty without this."""
    (tmp_path / "model.safetensors").write_bytes(SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    assert {"a": (2, 3), "b": ()} == {name: entry.shape for name, entry in checkpoint.entries.items()}
    assert 24 == checkpoint.tensor("b").item()


def test_a_file_that_changes_after_opening(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SMALL)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"gone")
    with pytest.raises((SafetensorError, OSError)):
        safe_open(tmp_path / "model.safetensors", framework="pt")
    with pytest.raises(CheckpointError, match=r"a in .*model.safetensors cannot be mapped"):
        checkpoint.tensor("a")


def test_read_ahead_ends_by_itself_and_when_closed(tmp_path: Path) -> None:
    copy_sound(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    thread = checkpoint.read_ahead()
    thread.join(10)
    assert not thread.is_alive()
    os.remove(tmp_path / FIRST)
    checkpoint.close()
    late = checkpoint.read_ahead()
    late.join(10)
    assert not late.is_alive()


def test_tensors_outlive_the_checkpoint() -> None:
    with Checkpoint.open(SOUND) as checkpoint:
        name = next(iter(checkpoint.entries))
        entry, value = checkpoint.entries[name], checkpoint.tensor(name)
    again = load_file(entry.file)[name]
    assert torch.equal(again, value)
