"""Planted mistakes of the kinds that users of other engines suffered: the suite must notice them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = (
    "tests/sched", "tests/cache", "tests/engine/test_loop.py", "tests/engine/test_equal.py", "tests/engine/test_nonfinite.py",
    "tests/engine/test_prefix.py",
)
SECONDS = 400


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant("release forgotten in preempt", "sched/scheduler.py",
           "        self.cache.release(seq.seq_id, tokens=seq.tokens)\n        self._totals", "        self._totals"),
    Mutant("release forgotten in cancel", "sched/scheduler.py",
           "        self.cache.release(seq.seq_id, scrub=scrub, tokens=seq.tokens if keep else None)\n",
           "        if finish != \"abort\":\n            self.cache.release(seq.seq_id, scrub=scrub, tokens=seq.tokens if keep else None)\n"),
    Mutant("state not zeroed for a new owner", "backends/portable/gated_delta.py",
           "        if contexts[n] == 0:\n            state_HKV.zero_()\n", ""),
    Mutant("chunk of one token taken for a decode", "backends/portable/gated_delta.py",
           "            if contexts[n] == 0:\n                state_1HKV.zero_()\n", ""),
    Mutant("conv window from the wrong side", "backends/portable/short_conv.py",
           "rows_PD[window_NW + lengths_N.to(x_TD.device)[:, None]]", "rows_PD[window_NW + num_kept]"),
    Mutant("conv window of a decode not moved on", "backends/portable/short_conv.py",
           "rows_NWD[:, 1:].to(window_SWD.dtype)", "rows_NWD[:, :-1].to(window_SWD.dtype)"),
    Mutant("reserve not atomic", "cache/manager.py",
           "        match = prefix.match if prefix is not None and held is None else Match()\n",
           "        match = prefix.match if prefix is not None and held is None else Match()\n"
           "        held = held or self._open(seq_id, prefix or Prefix())\n"),
    Mutant("rows written at chunk-relative places", "engine/runner.py",
           "_row_slots(tables[name], positions_T, starts,", "_row_slots(tables[name], positions_T - positions_T.min(), starts,"),
    Mutant("goes on one token late after a preemption", "sched/scheduler.py",
           "        seq.num_computed = prefix.num_tokens\n", "        seq.num_computed = prefix.num_tokens + (seq.num_preemptions > 0)\n"),
    Mutant("logits of a neighbour's row", "engine/runner.py",
           "wanted.append(torch.arange(starts[-1] - num_rows(chunk), starts[-1]))",
           "wanted.append(torch.arange(num_rows(chunk)) + max(0, starts[-1] - num_rows(chunk) - (len(starts) > 2)))"),
    Mutant("spoiled blocks not scrubbed", "engine/runner.py", "        self.pool.scrub(batch.scrub)\n", ""),
    Mutant("one block handed out twice", "cache/blocks.py",
           "        del self.free[-count:]\n", "        del self.free[len(self.free) - count + 1 :]\n"),
    Mutant("a hit writes into the stored snapshot", "cache/manager.py",
           "            held.transfers.append(Transfer(group.name, slot, held.table.blocks[group.name][0]))\n",
           "            held.table.blocks[group.name][0] = slot\n"),
    Mutant("salt left out of the key", "cache/keys.py", '"little") + identity + salt', '"little") + identity'),
)
MAY_SURVIVE = 1


@pytest.mark.slow
def test_mutants_are_killed(tmp_path: Path) -> None:
    assert [] == suite_failures(tmp_path / "intact", None), "the suite fails without any mutant"
    survivors = [mutant.name for i, mutant in enumerate(MUTANTS) if not suite_failures(tmp_path / str(i), mutant)]
    assert len(survivors) <= MAY_SURVIVE, f"survivors: {survivors}"


def suite_failures(folder: Path, mutant: Mutant | None) -> list[str]:
    """Closing lines of a failed run of the suite over a changed copy; empty when it passed."""
    folder.mkdir()
    for name in ("firstlight", "tests", "pyproject.toml", "train"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("data", "__pycache__"))
        else:
            shutil.copy(source, folder / name)
    (folder / "tests/data").symlink_to(ROOT / "tests/data")
    if mutant is not None:
        file = folder / "firstlight" / mutant.file
        text = file.read_text()
        assert 1 == text.count(mutant.old), f"{mutant.name}: its place in {mutant.file} has changed"
        file.write_text(text.replace(mutant.old, mutant.new))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *SUITE]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ["timeout"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [] if done.returncode == 0 else done.stdout.splitlines()[-3:]
