"""The front door: options that stay, text that arrives whole and at once, exit codes, silence where silence is due."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer.main

from firstlight.cli import app, main

ROOT = Path(__file__).resolve().parent.parent
FAMILY = "x\U0001F469\u200D\U0001F469\u200D\U0001F467 \u65E5\u672C \u00F1"
EOS = 258

OPTIONS = {
    "": ["--version"],
    "generate": [
        "PATH", "--prompt", "--tokens", "--image", "--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--dtype",
        "--backends", "--cache-bytes", "--max-context", "--chunk-tokens", "--ignore-eos", "--json",
    ],
    "serve": [
        "PATH", "--host", "--port", "--api-key", "--api-key-file", "--insecure", "--cors-origin", "--served-model-name", "--profile",
        "--tool-call-ids", "--refuse-unknown-fields", "--max-queue", "--max-tokens", "--max-body", "--request-timeout", "--drain-timeout",
        "--stall-timeout", "--dtype", "--backends", "--cache-bytes", "--max-context", "--max-sequences", "--max-step-tokens", "--chunk-tokens",
        "--snapshot-tokens", "--no-prefix-cache", "--verify-hits", "--seed", "--log-format", "--log-level", "--log-texts", "--otlp-endpoint",
        "--otlp-share",
    ],
    "bench serve": [
        "--url", "--api-key", "--model", "--endpoint", "--concurrency", "--rate", "--arrivals", "--requests", "--duration", "--trace", "--speed",
        "--scale-lengths", "--longest", "--max-output", "--input-tokens", "--output-tokens", "--prefix-tokens", "--prefix-groups", "--turns",
        "--think", "--token-ids", "--temperature", "--ignore-eos", "--body", "--seed", "--warmup", "--timeout", "--retries", "--slo", "--details",
        "--json", "--out", "--picture",
    ],
    "fetch": ["NAME", "--cache"],
    "doctor": ["--json"],
}
"""Command -> its arguments and options. They are a promise: renaming or dropping one needs an ADR and a changelog entry."""
REPEATED = {"--image", "--stop", "--api-key", "--served-model-name", "--cors-origin"}
FLAGS = {"--ignore-eos", "--json", "--version", "--details", "--insecure", "--refuse-unknown-fields", "--no-prefix-cache", "--log-texts"}


def loaded(name: str, path: Path) -> ModuleType:
    """A script as a module."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scripted_llm = loaded("scripted_llm", ROOT / "tests" / "scripted_llm.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the byte-level tokenizer."""
    made: Path = tmp_path_factory.mktemp("model")
    loaded("make_byte_tokenizer", ROOT / "train" / "make_byte_tokenizer.py").write(made, 288)
    return made


class Say:
    """Runs the command line in this process on a scripted LLM."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.made: list[Any] = []

    def __call__(self, reply: list[int], *arguments: str, error: str | None = None) -> SimpleNamespace:
        llm = scripted_llm.scripted(self.folder, reply, error=error, made=self.made)
        self.monkeypatch.setitem(sys.modules, "firstlight.engine.llm", scripted_llm.installed(llm))
        code = main(["generate", *arguments])
        captured = self.capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, llm=self.made[-1] if self.made else None)


@pytest.fixture
def say(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    return Say(folder, monkeypatch, capsys)


@pytest.fixture
def say_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """The same on a folder without a tokenizer."""
    return Say(tmp_path, monkeypatch, capsys)


def start(folder: Path, reply: list[int], wait_s: float, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, on a scripted LLM."""
    command = [sys.executable, str(ROOT / "tests" / "scripted_llm.py"), json.dumps(reply), str(wait_s), str(folder), "generate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, **streams)


# What stays.


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """Full name -> command, those of groups included."""
    found = {f"{prefix}{name}": command for name, command in group.commands.items()}
    for name, command in list(found.items()):
        found |= commands_of(command, f"{name} ") if hasattr(command, "commands") else {}
    return found


def test_options_are_frozen() -> None:
    commands = {"": typer.main.get_command(app), **commands_of(typer.main.get_command(app))}
    found = {
        name: [parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper() for parameter in command.params
               if parameter.name != "help"]
        for name, command in commands.items() if name in OPTIONS
    }
    assert OPTIONS == found
    options = [parameter for name in OPTIONS for parameter in commands[name].params if parameter.param_type_name == "option"]
    assert REPEATED == {parameter.opts[0] for parameter in options if parameter.multiple}
    assert FLAGS == {parameter.opts[0] for parameter in options if parameter.is_flag}


def test_kernels_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says how many; both before torch is there."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    for given, want in ((None, "64"), ("7", "7")):
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
        assert 0 == main(["--version"])
        assert want == os.environ[name]


def test_the_package_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "firstlight", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("firstlight ")
    assert 2 == subprocess.run([sys.executable, "-m", "firstlight", "nonsense"], capture_output=True).returncode


def test_every_option_is_explained() -> None:
    for command in commands_of(typer.main.get_command(app)).values():
        assert command.help
        assert all(getattr(parameter, "help", None) for parameter in command.params)


@pytest.mark.parametrize("arguments", [
    [], ["--help"], ["--version"], *([*name.split(), "--help"] for name in ("generate", "serve", "bench serve", "fetch", "doctor"))])
def test_help_and_version_load_nothing(arguments: list[str]) -> None:
    program = (
        "import sys; from firstlight.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or int(any(name in sys.modules for name in ('torch', 'numpy', 'tiktoken', 'tokenizers'))) * 99)"
    )
    run = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (0, "") == (run.returncode, run.stderr)
    assert "firstlight" in run.stdout


# Text and numbers.


def test_text_goes_to_stdout_and_numbers_to_stderr(say: Say) -> None:
    run = say([*FAMILY.encode(), EOS], "--prompt", "hi")
    assert (0, FAMILY) == (run.code, run.out)
    assert run.err.startswith("\n2 prompt tokens, 3 of them cached, first token after ")
    assert f"{len(FAMILY.encode()) + 1} tokens, " in run.err
    assert run.err.endswith("tokens/s, ended by stop\n") and 2 == run.err.count("\n")
    assert [([104, 105], "default", True)] == [(run.llm.engine.submitted[0][0], run.llm.path, run.llm.closed)]


def test_options_reach_the_model(say: Say) -> None:
    run = say(
        [97], "--tokens", "5, 6,7", "--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--min-p", "0.1", "--seed", "-3",
        "--stop", "x", "--stop", "yy", "--dtype", "float32", "--backends", "cpu, reference", "--cache-bytes", "3MiB", "--max-context", "99",
        "--chunk-tokens", "8", "--ignore-eos", str(say.folder))
    tokens, params, _ = run.llm.engine.submitted[0]
    assert [5, 6, 7] == tokens
    assert (9, 0.5, 0.9, 4, 0.1, -3, ("x", "yy"), True) == (
        params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.stop, params.ignore_eos)
    assert {"dtype": "float32", "backends": ("cpu", "reference"), "cache_bytes": 3 * 2**20, "max_context": 99, "chunk_tokens": 8} == run.llm.options
    assert str(say.folder) == run.llm.path


def test_what_is_left_out_is_the_model_s_choice(say: Say, tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((say.folder / name).read_bytes())
    say.folder = tmp_path
    assert 256 == say([97], "--prompt", "a").llm.engine.submitted[0][1].max_tokens
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 11}')
    params = say([97], "--prompt", "a").llm.engine.submitted[0][1]
    assert (0.25, 11) == (params.temperature, params.max_tokens)
    params = say([97], "--prompt", "a", "--temperature", "0", "--max-tokens", "2").llm.engine.submitted[0][1]
    assert (0, 2) == (params.temperature, params.max_tokens)


@pytest.mark.parametrize(("size", "num_bytes"), [("1000", 1000), ("5B", 5), ("2k", 2048), ("3 MiB", 3 * 2**20), ("2GB", 2**31), ("1T", 2**40)])
def test_sizes(say: Say, size: str, num_bytes: int) -> None:
    assert num_bytes == say([97], "--prompt", "a", "--cache-bytes", size).llm.options["cache_bytes"]


def test_stop_string_ends_the_sequence(say: Say) -> None:
    run = say([*b"one<|", *b"end|>two", EOS], "--prompt", "a", "--stop", "<|end|>")
    assert (0, "one") == (run.code, run.out)
    assert [7] == run.llm.engine.cancelled
    assert len(b"one<|end|>") == run.llm.engine.num_steps
    assert "ended by stop" in run.err


def test_held_text_comes_when_the_sequence_ends(say: Say) -> None:
    run = say([*b"one<|en"], "--prompt", "a", "--stop", "<|end|>")
    assert (0, "one<|en", []) == (run.code, run.out, run.llm.engine.cancelled)
    assert "ended by length" in run.err


def test_a_cut_character_is_shown_as_one(say: Say) -> None:
    assert "a\ufffd" == say([*b"a\xf0\x9f\x91"], "--prompt", "a").out


def test_end_token_is_not_text(say: Say) -> None:
    """Without --ignore-eos it ends the text; with it, it is a hidden token among others."""
    assert "ab" == say([97, 98, EOS, 99], "--prompt", "a").out
    assert "abc" == say([97, 98, EOS, 99], "--prompt", "a", "--ignore-eos").out


def test_json_is_one_object_and_nothing_else(say: Say) -> None:
    run = say([*"\u65e5 ".encode(), EOS], "--prompt", "hi", "--json")
    assert (0, "") == (run.code, run.err)
    report = json.loads(run.out)
    assert 1 == run.out.count("\n")
    assert {
        "prompt_tokens": 2, "num_cached_tokens": 3, "tokens": [0xE6, 0x97, 0xA5, 32, EOS], "text": "\u65e5 ", "finish_reason": "stop",
    } == {key: value for key, value in report.items() if not key.endswith("_s")}
    assert report["first_token_s"] > 0 and report["tokens_per_s"] > 0


def test_ids_without_a_tokenizer(say_ids: Say) -> None:
    run = say_ids([11, 12, EOS], "--tokens", "5,6", str(say_ids.folder))
    assert (0, f"11,12,{EOS}\n") == (run.code, run.out)
    assert None is json.loads(say_ids([11], "--tokens", "5,6", "--json").out)["text"]


def test_prompt_from_standard_input(say: Say) -> None:
    say.monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("\u65e5\n".encode())))
    assert [*"\u65e5\n".encode()] == say([97], "--prompt", "-").llm.engine.submitted[0][0]


def test_the_embedded_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing, streamed, whole and through the Python face: the same tokens."""
    from firstlight import LLM, SamplingParams

    arguments = ["generate", "--prompt", "The first light", "--temperature", "0", "--max-tokens", "12"]
    assert 0 == main(arguments)
    shown = capsys.readouterr()
    assert 0 == main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    with LLM() as llm:
        output = llm.generate("The first light", SamplingParams(temperature=0, max_tokens=12))[0]
    assert (output.tokens, output.text, output.finish_reason) == (report["tokens"], report["text"], report["finish_reason"])
    assert output.text == shown.out
    assert shown.err.startswith("\n15 prompt tokens, 0 of them cached")


# What is refused.


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "neither of --prompt and --tokens given. Give exactly one of them."),
    (["--prompt", "a", "--tokens", "1"], "both of --prompt and --tokens given"),
    (["--tokens", "1,x"], "--tokens holds 'x'"),
    (["--tokens", ""], "--tokens holds ''"),
    (["--tokens", "1,-2"], "--tokens holds '-2'"),
    (["--prompt", "a", "--image", "cat.png"], "--image cat.png was given, generate takes text only"),
    (["--prompt", "a", "--temperature", "nan"], "`temperature` is nan"),
    (["--prompt", "a", "--top-p", "1.5"], "`top_p` is 1.5"),
    (["--prompt", "a", "--top-k", "-1"], "`top_k` is -1"),
    (["--prompt", "a", "--max-tokens", "0"], "`max_tokens` is 0"),
    (["--prompt", "a", "--stop", ""], "`stop` holds ['']"),
    (["--prompt", "a", "--cache-bytes", "0"], "--cache-bytes is '0'"),
    (["--prompt", "a", "--cache-bytes", "2 apples"], "--cache-bytes is '2 apples'"),
    (["--prompt", "a", "--seed", "x"], "Invalid value for '--seed'"),
    (["--prompt", "a", "--nonsense"], "No such option"),
    (["--prompt", "a\ud800"], "lone surrogate U+D800"),
])
def test_wrong_input(say: Say, arguments: list[str], message: str) -> None:
    run = say([97], *arguments)
    assert (2, "") == (run.code, run.out)
    assert message in run.err
    assert "Traceback" not in run.err
    assert run.llm is None or run.llm.closed


def test_unknown_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["generte"])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert "generte" in captured.err


@pytest.mark.parametrize("arguments", [["--prompt", "a"], ["--tokens", "1", "--stop", "x"]])
def test_text_without_a_tokenizer_is_refused_before_loading(say_ids: Say, arguments: list[str]) -> None:
    run = say_ids([97], *arguments, str(say_ids.folder))
    assert (2, "", None) == (run.code, run.out, run.llm)
    assert "has neither tiktoken.model nor tokenizer.json. Use --tokens 5,6,7" in run.err


def test_standard_input_that_is_no_text(say: Say) -> None:
    say.monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    run = say([97], "--prompt", "-")
    assert (2, "") == (run.code, run.out)
    assert "standard input is not UTF-8 at byte 2" in run.err


def test_a_sequence_that_fails(say: Say) -> None:
    run = say([*b"abcdef"], "--prompt", "a", "--json", error="logits at position 3 are not finite")
    assert (2, "", True) == (run.code, run.out, run.llm.closed)
    assert "generation ended after 2 tokens: logits at position 3 are not finite. Compare the checkpoint" in run.err


# A process of its own.


def test_every_piece_arrives_at_once(folder: Path) -> None:
    """The first character is read while the process still generates, and no read cuts one."""
    process = start(folder, list(FAMILY.encode()) * 3, 0.02, "--prompt", "a")
    assert process.stdout is not None
    pieces = []
    while piece := os.read(process.stdout.fileno(), 65536):
        pieces.append(piece.decode())
        running = process.poll() is None
        assert running or len(pieces) > 5
    assert FAMILY * 3 == "".join(pieces)
    assert len(pieces) > 10
    _, errors = process.communicate()
    assert 0 == process.returncode, errors


def test_interrupt_is_quiet(folder: Path) -> None:
    process = start(folder, [97] * 3000, 0.01, "--prompt", "a")
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (130, b"") == (process.returncode, errors)


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    process = start(folder, [97] * 3000, 0.001, "--prompt", "a")
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert b"" == process.stderr.read()
    assert 141 == process.wait(timeout=30)
    process.stderr.close()


def test_a_narrow_terminal_encoding(folder: Path) -> None:
    process = start(folder, list(FAMILY.encode()), 0.0, "--prompt", "a", environment={"PYTHONIOENCODING": "ascii"})
    out, errors = process.communicate(timeout=30)
    assert (0, b"x????? ?? ?") == (process.returncode, out), errors


def test_bytes_of_the_prompt_that_are_no_text(folder: Path) -> None:
    process = start(folder, [97], 0.0, "--prompt", b"a\xff")  # type: ignore[arg-type]
    out, errors = process.communicate(timeout=30)
    assert (2, b"") == (process.returncode, out)
    assert b"lone surrogate" in errors and b"Traceback" not in errors


def watched(folder: Path, reply: list[int], *arguments: str) -> tuple[bytes, bytes]:
    """Standard output, and what a terminal shows of standard error."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = start(folder, reply, 0.05, *arguments, stderr=theirs, environment={"TERM": "xterm"})
    os.close(theirs)
    assert process.stdout is not None
    out = process.stdout.read()
    seen, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert 0 == process.wait(timeout=30)
    return out, seen


def test_the_bar_shows_on_a_terminal_only(folder: Path) -> None:
    out, seen = watched(folder, [97], "--prompt", "a")
    assert b"a" == out
    assert b"loading" in seen and b"1 prompt tokens" in seen
    assert b"generating" not in seen, "a bar beside text that streams"
    quiet = start(folder, [97], 0.0, "--prompt", "a")
    assert b"loading" not in quiet.communicate(timeout=30)[1]


def test_work_without_a_word_shows_a_bar(folder: Path) -> None:
    out, seen = watched(folder, [97, 98, 99], "--prompt", "a", "--json")
    assert "abc" == json.loads(out)["text"]
    assert b"generating" in seen
    quiet = start(folder, [97], 0.0, "--prompt", "a", "--json")
    assert b"" == quiet.communicate(timeout=30)[1]
