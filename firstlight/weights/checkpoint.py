"""A folder of safetensors: which tensors it holds, from headers alone, and each one mapped when asked for.

Nothing here imports torch; safetensors does when the first tensor is asked for.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import Any

from safetensors import SafetensorError, safe_open

from firstlight.spec.errors import CheckpointError
from firstlight.weights.header import Entry, read_header
from firstlight.weights.problems import Problems

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READAHEAD_BYTES = 64 * 1024 * 1024
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Places and bytes of each file that tell one checkpoint from another of the same shape."""


class Checkpoint:
    """All tensors of a model on disk. Opening reads headers only; `tensor` maps without a copy."""

    def __init__(self, folder: Path, files: tuple[Path, ...], entries: dict[str, Entry]) -> None:
        self.folder = folder
        self.files = files
        self.entries = entries
        self._mapped: dict[Path, Any] = {}
        self._closed = Event()

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read every header of a folder. Raises CheckpointError with all that is wrong with its files."""
        folder = Path(folder)
        problems = Problems()
        files, weight_map = _find(folder, problems)
        entries: dict[str, Entry] = {}
        sound: set[Path] = set()
        for file in files:
            before = len(problems)
            read = read_header(file, problems)
            if len(problems) == before:
                sound.add(file)
            for entry in read:
                if entry.name in entries:
                    problems.add("duplicated", f"{entry.name} in {entries[entry.name].file.name} and in {file.name}")
                entries.setdefault(entry.name, entry)
        if weight_map:
            _compare(folder, weight_map, entries, sound, problems)
        problems.raise_if_any(str(folder))
        return cls(folder, files, entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def fingerprint(self) -> bytes:
        """A digest of names, shapes, dtypes, places and of a sample of every file's bytes: equal for equal checkpoints, wherever they lie."""
        digest = blake2b(digest_size=16)
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(repr((name, entry.shape, entry.dtype, entry.offset)).encode())
        for file in sorted(self.files):
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                for place in range(SAMPLES):
                    stream.seek(max(0, size - SAMPLE_BYTES) * place // max(1, SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
        return digest.digest()

    def tensor(self, name: str) -> Any:
        """A torch.Tensor over the mapped bytes; it keeps its mapping alive by itself, and writing to it never reaches the disk."""
        file = self.entries[name].file
        try:
            if file not in self._mapped:
                self._mapped[file] = safe_open(file, framework="pt", device="cpu")
            return self._mapped[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} in {file} cannot be mapped: {error}", "Fetch the file again, or check permissions and disk.") from None

    def read_ahead(self) -> Thread:
        """Ask the system to read all files in order behind the caller's back; ends early when closed."""
        thread = Thread(target=self._read_ahead, name="read_ahead", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid."""
        self._closed.set()
        self._mapped.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _read_ahead(self) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # a hint only: whoever needs the bytes will meet the error
            for file in self.files:
                with file.open("rb") as stream:
                    for begin in range(0, os.fstat(stream.fileno()).st_size, READAHEAD_BYTES):
                        if self._closed.is_set():
                            return
                        os.posix_fadvise(stream.fileno(), begin, READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)


def _find(folder: Path, problems: Problems) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The files of a checkpoint, and what the index says if there is one."""
    if not folder.is_dir():
        problems.add("no weights", f"{folder} is not a folder")
        return (), None
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        weight_map = _read_index(index, problems)
        shards = sorted(set(weight_map.values()))
        if single.is_file() and SINGLE not in shards:
            problems.add("ambiguous", f"{SINGLE} is not one of the shards that {INDEX} names")
        return _shards(folder, shards, weight_map, problems), weight_map
    if single.is_file():
        return (single,), None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_folder(folder, problems)
    _check_numbers(files, problems)
    return tuple(files), None


def _read_index(index: Path, problems: Problems) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        problems.add("unreadable", f"{index.name} ({error.strerror})")
        return {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problems.add("index", f"{index.name} is no JSON object with a weight_map ({type(error).__name__}: {error})")
        return {}
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        problems.add("index", f"{index.name} has a weight_map that does not pair tensor names with file names")
        return {}
    return weight_map


def _shards(folder: Path, shards: list[str], weight_map: dict[str, str], problems: Problems) -> tuple[Path, ...]:
    found = []
    for shard in shards:
        path = PurePosixPath(shard)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            problems.add("index", f"{shard} is no safetensors file inside the folder")
        elif not (folder / shard).is_file():
            count = sum(file == shard for file in weight_map.values())
            problems.add("absent shard", f"{shard} ({count:,} tensors)")
        else:
            found.append(folder / shard)
    return tuple(found)


def _refuse_folder(folder: Path, problems: Problems) -> None:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        problems.add("pickled", f"{folder.name} holds no safetensors but {', '.join(pickles[:3])}")
    else:
        problems.add("no weights", f"{folder.name} holds no *.safetensors file")


def _check_numbers(files: list[Path], problems: Problems) -> None:
    """Without an index, files that are numbered 'k of n' must be complete."""
    numbered = [match for file in files if (match := _NUMBERED.fullmatch(file.name))]
    present = {match.string for match in numbered}
    for stem, total in sorted({(match[1], match[3]) for match in numbered}):
        width = len(total)
        for k in range(1, int(total) + 1):
            name = f"{stem}-{k:0{width}d}-of-{total}.safetensors"
            if name not in present:
                problems.add("absent shard", name)


def _compare(folder: Path, weight_map: dict[str, str], entries: dict[str, Entry], sound: set[Path], problems: Problems) -> None:
    """Index and shards must tell the same story; shards that could not be read have been reported."""
    for name, shard in weight_map.items():
        file = folder / shard
        if name not in entries and file in sound:
            problems.add("index", f"{name} is not in {shard}")
        elif name in entries and entries[name].file != file:
            problems.add("index", f"{name} is in {entries[name].file.name}, not in {shard}")
    for name, entry in entries.items():
        if name not in weight_map:
            problems.add("index", f"{name} in {entry.file.name} is not in the index")
