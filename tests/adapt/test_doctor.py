"""The doctor: what it sees on a planted machine, what it says to do, and its two faces on the command line."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from firstlight.adapt import doctor
from firstlight.adapt.doctor import Sign, backends, embedded, extras, hardware, healthy, models, software, threads
from firstlight.adapt.machine import core_quota, processor
from firstlight.cli import main
from firstlight.spec.errors import CheckpointError


def planted(root: Path, **files: str) -> Path:
    """A root folder; two underscores in a name stand for a slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def named(signs: list[Sign], name: str) -> Sign:
    (found,) = [sign for sign in signs if sign.name == name]
    return found


def test_processors(tmp_path: Path) -> None:
    intel = planted(tmp_path / "intel", proc__cpuinfo="model name\t: Xeon\nflags\t\t: fpu avx2 amx_bf16 avx512f\n\nmodel name\t: Xeon\n")
    arm = planted(tmp_path / "arm", proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd sve bf16\n")
    assert ("Xeon", ("avx2", "avx512f", "amx_bf16")) == processor(intel)
    assert ("", ("asimd", "sve", "bf16")) == processor(arm)
    assert ("", ()) == processor(tmp_path / "nowhere")


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    assert None is core_quota(tmp_path)
    second = planted(tmp_path / "v2", proc__self__cgroup="0::/a/b\n")
    for folder, text in (("a/b", "max 100000"), ("a", "150000 100000"), ("", "400000 100000")):
        (second / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (second / "sys/fs/cgroup" / folder / "cpu.max").write_text(text)
    assert 1.5 == core_quota(second)
    first = planted(tmp_path / "v1", proc__self__cgroup="4:cpu,cpuacct:/x\n0::/\n")
    (first / "sys/fs/cgroup/cpu/x").mkdir(parents=True)
    (first / "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us").write_text("50000\n")
    (first / "sys/fs/cgroup/cpu/x/cpu.cfs_period_us").write_text("100000\n")
    (first / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert 0.5 == core_quota(first)


def test_little_memory_and_an_old_processor_are_noted(tmp_path: Path) -> None:
    root = planted(tmp_path, proc__cpuinfo="model name: Old\nflags: fma\n", proc__meminfo="MemAvailable: 524288 kB\n")
    signs = list(hardware(root))
    assert ("Old", "note", "0.5 GiB available to this process", "note") == (
        named(signs, "processor").found, named(signs, "instruction sets").state, named(signs, "memory").found, named(signs, "memory").state)
    assert all(sign.fix for sign in signs if sign.state != "good")


def test_more_threads_than_cores_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "num_allowed", lambda: 3)
    monkeypatch.setattr(doctor, "core_quota", lambda root: 2.5)
    for num_threads, state in ((2, "good"), (3, "note")):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda count=num_threads: count))
        sign = named(list(threads(tmp_path)), "torch threads")
        assert (state, str(num_threads)) == (sign.state, sign.found)
    assert "OMP_NUM_THREADS=2" in sign.fix


def test_packages_that_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency is bad, an optional one is a note; each with its command."""
    asked = ["torch>=2.6", "rich>=13", 'gguf>=0.17; extra == "fetch"', 'fastapi>=0.1; extra == "serve"', 'pytest; extra == "test"']

    def version(package: str) -> str:
        if package in ("rich", "fastapi"):
            raise PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(doctor, "requires", lambda name: asked)
    monkeypatch.setattr(doctor, "version", version)
    signs = [*software(), *extras()]
    assert ("bad", "pip install rich") == (named(signs, "rich").state, named(signs, "rich").fix)
    assert ("good", "1.2") == (named(signs, "torch").state, named(signs, "torch").found)
    assert ("good", "complete", "") == tuple(getattr(named(signs, "firstlight[fetch]"), key) for key in ("state", "found", "fix"))
    assert ("note", "lacks fastapi", "pip install 'firstlight[serve]'") == tuple(
        getattr(named(signs, "firstlight[serve]"), key) for key in ("state", "found", "fix"))
    assert not healthy(signs) and [] == [sign for sign in signs if "pytest" in sign.name or "[test]" in sign.name]


def test_backends_are_ready_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(list(backends()), "portable").found.startswith("ready, ")
    monkeypatch.setattr(doctor, "load_backends", lambda: {"npu": "no device"})
    assert [Sign("back-ends", "npu", "refused: no device", "note", named(list(backends()), "npu").fix)] == list(backends())


def test_the_cache_folder_and_what_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signs = list(models())
    assert f"{tmp_path}/firstlight/models: not made yet" in named(signs, "cache folder").found
    assert "firstlight fetch smollm2" in named(signs, "smollm2").fix
    source = doctor.SOURCES["smollm2"]
    source.folder().mkdir(parents=True)
    monkeypatch.setattr(type(source), "fetched", lambda self: True)
    (source.folder() / "x").write_bytes(bytes(3 << 20))
    assert "fetched, 3 MiB" in named(list(models()), "smollm2").found
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert ("note", "not writable") == (named(list(models()), "cache folder").state, named(list(models()), "cache folder").found[-12:])


def test_an_embedded_model_that_does_not_run_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    (sign,) = embedded()
    assert ("good", "generated 4 tokens") == (sign.state, sign.found[:18])

    def damaged(**options: object) -> None:
        raise CheckpointError("a shard is absent", "Fetch it.")

    monkeypatch.setattr("firstlight.engine.llm.LLM", damaged)
    (sign,) = embedded()
    assert ("bad", True, "does not run: a shard is absent. Fetch it.") == (sign.state, bool(sign.fix), sign.found)


@pytest.mark.parametrize("state", ["good", "note", "bad"])
def test_the_command_line(state: doctor.State, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    signs = [Sign("a", "first", "[bold]found[/bold]"), Sign("b", "second", "x", state, "do this")]
    monkeypatch.setattr(doctor, "examine", lambda: signs)
    code = 1 if state == "bad" else 0
    assert code == main(["doctor"])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[bold]found[/bold]", "second", "do this", state))
    assert code == main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code == 0, {"topic": "b", "name": "second", "found": "x", "state": state, "fix": "do this"}) == (report["healthy"], report["signs"][1])


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the tests run, the package does."""
    assert 0 == main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"software", "hardware", "cores", "back-ends", "models"} <= {sign["topic"] for sign in report["signs"]}
    assert all(sign["fix"] for sign in report["signs"] if sign["state"] != "good")
