"""`firstlight serve`: options in, a running server out. Imports what is heavy when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.spec.sizes import num_bytes

Keys = Annotated[list[str] | None, typer.Option(
    "--api-key", metavar="KEY", help="Ask clients for this key; may be repeated. Others on this machine can see it.")]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Keys, one a line; clients need one of them.")]
Names = Annotated[list[str] | None, typer.Option("--served-model-name", metavar="NAME", help="What clients call the model; may be repeated.")]
Origins = Annotated[list[str] | None, typer.Option("--cors-origin", metavar="ORIGIN", help="Let pages of this origin call; may be repeated.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a key.")]
Profile = Annotated[str, typer.Option(help="Rules for sampling parameters: openai, or kimi as the vendor's verifier wants them.")]
Queue = Annotated[int, typer.Option("--max-queue", help="Choices that may wait beyond those that run; more get 429.")]
MostTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens of an answer at most; left out: what the context leaves.")]
Body = Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Bytes of a request at most.")]
RequestTime = Annotated[float, typer.Option("--request-timeout", help="Seconds until a request is given up.")]
DrainTime = Annotated[float, typer.Option("--drain-timeout", help="Seconds that requests under way get after SIGTERM.")]
StallTime = Annotated[float, typer.Option("--stall-timeout", help="Seconds without a finished step until /health fails.")]
Strict = Annotated[bool, typer.Option(
    "--refuse-unknown-fields", help="Answer 400 to fields that are not known; else they are ignored, and listed in X-Ignored-Fields.")]
CallIds = Annotated[str, typer.Option("--tool-call-ids", help="native: as the model counts them, anew each turn; unique: in the conversation.")]
Texts = Annotated[bool, typer.Option("--log-texts", help="Let the log quote what clients sent, when it is wrong.")]
Endpoint = Annotated[str | None, typer.Option("--otlp-endpoint", metavar="URL", help="Send traces there.")]
Share = Annotated[float, typer.Option("--otlp-share", help="Share of requests that are traced.")]
ModelPath = Annotated[str, typer.Argument(metavar="PATH", help="Folder of the model; left out: the embedded model.", show_default=False)]
Backends = Annotated[str | None, typer.Option(metavar="NAMES", help="Back-ends in order of preference, as in portable,reference.")]
CacheBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the cache, as in 2GiB; left out: a quarter of the free memory.")]
Context = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together at most.")]
Sequences = Annotated[int, typer.Option(help="Choices that run at a time at most.")]
StepTokens = Annotated[int, typer.Option(help="Tokens computed in one step at most.")]
ChunkTokens = Annotated[int, typer.Option(help="Prompt tokens of one sequence computed in one step at most.")]
Snapshots = Annotated[int, typer.Option(help="Grid on which states are kept beside the usual places; 0: no grid.")]
NoPrefix = Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its beginning.")]


def serve(
    path: ModelPath = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    api_key: Keys = None, api_key_file: KeyFile = None, insecure: Insecure = False, cors_origin: Origins = None,
    served_model_name: Names = None, profile: Profile = "openai", tool_call_ids: CallIds = "native", refuse_unknown_fields: Strict = False,
    max_queue: Queue = 256, max_tokens: MostTokens = None, max_body: Body = "32MiB",
    request_timeout: RequestTime = 3600.0, drain_timeout: DrainTime = 30.0, stall_timeout: StallTime = 120.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    backends: Backends = None, cache_bytes: CacheBytes = None, max_context: Context = None, max_sequences: Sequences = 64,
    max_step_tokens: StepTokens = 2048, chunk_tokens: ChunkTokens = 512, snapshot_tokens: Snapshots = 0, no_prefix_cache: NoPrefix = False,
    verify_hits: Annotated[float, typer.Option(help="Share of prefix hits that are computed again without the cache.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Stands in for requests that bring none.")] = 0,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_texts: Texts = False, otlp_endpoint: Endpoint = None, otlp_share: Share = 1.0,
) -> None:
    """Serve a model over HTTP as OpenAI does."""
    from firstlight.serve.limits import Limits
    from firstlight.serve.profiles import PROFILES
    from firstlight.serve.run import Place, run
    from firstlight.serve.service import Settings

    chosen = _one_of(profile, PROFILES, "--profile")
    ids: Literal["native", "unique"] = _one_of(tool_call_ids, {"native": "native", "unique": "unique"}, "--tool-call-ids")
    settings = Settings(
        names=tuple(served_model_name or [path if path == "default" else Path(path).resolve().name]), keys=_keys(api_key, api_key_file),
        profile=chosen, origins=tuple(cors_origin or ()), tool_call_ids=ids, unknown_refused=refuse_unknown_fields, texts_logged=log_texts,
        limits=Limits(
            body_bytes=num_bytes(max_body, "--max-body"), num_queued=max_queue, max_tokens=max_tokens, request_s=request_timeout,
            drain_s=drain_timeout, stall_s=stall_timeout))
    options: dict[str, Any] = {
        "dtype": dtype, "backends": None if backends is None else [name.strip() for name in backends.split(",") if name.strip()],
        "cache_bytes": None if cache_bytes is None else num_bytes(cache_bytes, "--cache-bytes"), "max_context": max_context,
        "max_sequences": max_sequences, "max_step_tokens": max_step_tokens, "chunk_tokens": chunk_tokens,
        "snapshot_tokens": snapshot_tokens or "auto", "prefix_cache": not no_prefix_cache, "verify_hits": verify_hits, "seed": seed,
    }
    place = Place(host=host, port=port, insecure=insecure, log_form=log_format, log_level=log_level, otlp=otlp_endpoint, otlp_share=otlp_share)
    raise typer.Exit(run(path, options, settings, place))


def _one_of(value: str, known: dict[str, Any], option: str) -> Any:
    if value not in known:
        raise RequestError(f"{option} is {value!r}", f"Use one of {', '.join(known)}.")
    return known[value]


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Keys of the command line and of a file. Raises: ConfigError when one is empty or the file cannot be read."""
    keys = list(given or [])
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read ({error})", "Give a text file with one key a line.") from None
        if not keys:
            raise ConfigError(f"--api-key-file {file} holds no key", "Write one key a line, or leave the option out.")
    if any(not key.strip() or not key.isascii() or " " in key for key in keys):
        raise ConfigError("an API key is empty, or holds a space or a character beyond ASCII", "Use letters, digits and signs.")
    return tuple(keys)
