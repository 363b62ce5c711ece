"""From a folder to a machine that can run: config, operators, weights, cache, scheduler, runner, in this order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from firstlight.cache.budget import default_bytes, split
from firstlight.cache.manager import CacheManager
from firstlight.cache.pool import CachePool
from firstlight.engine.canary import TOLERANCES, Canary
from firstlight.engine.runner import TorchRunner
from firstlight.engine.sampler import Sampler
from firstlight.engine.shared import SharedEngine
from firstlight.fetch.catalogue import SOURCES
from firstlight.layers.decoder import Decoder
from firstlight.models.registry import ModelFile, read
from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.registry import REFERENCE, Binder, load_backends
from firstlight.parallel.mesh import Mesh
from firstlight.sched.limits import Fairness, Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.spec.errors import CapacityError, ConfigError
from firstlight.spec.model import ModelSpec
from firstlight.text.generation import GenerationDefaults
from firstlight.text.tokenizer import Tokenizer, load_tokenizer
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.ledger import Report
from firstlight.weights.load import load
from firstlight.weights.memory import available_bytes

log = logging.getLogger("firstlight")
DEFAULT = "default"
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run a model; the meaning of each field is that of the LLM argument of the same name."""

    device: str = "cpu"
    dtype: str = "auto"
    backends: tuple[str, ...] | None = None
    seed: int = 0
    cache_bytes: int | None = None
    tokens_per_block: int = 16
    max_step_tokens: int = 2048
    chunk_tokens: int = 512
    max_sequences: int = 64
    max_context: int | None = None
    fairness: Fairness = field(default_factory=Fairness)
    prefix_cache: bool = True
    snapshot_tokens: int | str = "auto"
    verify_hits: float = 0.0
    poison_freed: bool = False
    allow_unread: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens_per_block", "max_step_tokens", "chunk_tokens", "max_sequences", "max_context", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"`{name}` is {value!r}", "Use an integer above 0.")
        for name in ("prefix_cache", "poison_freed", "allow_unread"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"`{name}` is {getattr(self, name)!r}", "Use True or False.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"`seed` is {self.seed!r}", "Use an integer.")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"`seed` is {self.seed}", "Use an integer of 64 bits.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"`dtype` is {self.dtype!r}", f"Use one of {', '.join(DTYPES)}.")
        if self.snapshot_tokens != "auto" and (not isinstance(self.snapshot_tokens, int) or self.snapshot_tokens < 1):
            raise ConfigError(f"`snapshot_tokens` is {self.snapshot_tokens!r}", "Use 'auto' or an integer above 0.")
        if not isinstance(self.fairness, Fairness):
            raise ConfigError(f"`fairness` is {self.fairness!r}", "Use firstlight.Fairness.")
        if self.device != "cpu":
            raise ConfigError(f"`device` is {self.device!r}, this version computes on the CPU only", "Use device='cpu'.")


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that stands once a model is up."""

    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    engine: SharedEngine
    cache: CacheManager
    pool: CachePool
    runner: TorchRunner
    binder: Binder
    report: Report


def boot(model: str | os.PathLike[str], options: Options, progress: Callable[[int, int], None] | None = None) -> Machine:
    """Bring a model up. Raises ConfigError, CheckpointError, CoverageError or CapacityError before any cache is allocated."""
    folder = locate(model)
    found = read(folder)
    spec = _spec(found, options)
    defaults, tokenizer = GenerationDefaults.read(folder), load_tokenizer(folder)
    binder = Binder(_order(options.backends))
    decoder = Decoder(spec, Mesh(), binder)
    checkpoint = Checkpoint.open(folder)
    loaded = load(checkpoint, spec, found.names, progress=progress)
    decoder.fill(loaded.tensors, loaded.banks)
    log.info("%s", loaded.report.summary())
    groups = split(
        spec, cache_bytes=_cache_bytes(spec, options), tokens_per_block=options.tokens_per_block,
        max_sequences=options.max_sequences, max_context=spec.max_context, prefix_cache=options.prefix_cache)
    same = identity(spec, checkpoint.fingerprint())
    pool = CachePool(spec, groups, device=options.device, poison=options.poison_freed, identity=same)
    cache = CacheManager(
        groups, identity=same, prefix_cache=options.prefix_cache,
        snapshot_tokens=options.snapshot_tokens if isinstance(options.snapshot_tokens, int) else 0)
    runner = TorchRunner(decoder, pool, Sampler(options.seed), device=options.device)
    limits = Limits(
        tokens_per_step=options.max_step_tokens, sequences_per_step=options.max_sequences, chunk_tokens=options.chunk_tokens,
        fairness=_fairness(spec, options))
    scheduler = Scheduler(limits, cache, max_context=spec.max_context)
    stop_ids = _stop_ids(spec, defaults)
    canary = Canary(options.verify_hits, TOLERANCES[spec.dtype], options.seed) if options.verify_hits else None
    engine = SharedEngine(scheduler, runner, num_vocab=spec.num_vocab, stop_ids=stop_ids, canary=canary)
    return Machine(folder, spec, tokenizer, defaults, engine, cache, pool, runner, binder, loaded.report)


def identity(spec: ModelSpec, fingerprint: bytes) -> bytes:
    """What must be equal for a cached block to be usable: weights, dtype and layout of the caches."""
    layout = [(name, [repr(cache) for _, cache in members]) for name, members in spec.groups().items()]
    return blake2b(fingerprint + repr((spec.name, spec.dtype, layout)).encode(), digest_size=16).digest()


def locate(model: str | os.PathLike[str]) -> Path:
    """The folder of a model: a path, "default" for the embedded one, or the name of one that can be fetched (./name is a path)."""
    if str(model) == DEFAULT:
        return Path(__file__).parents[1] / "assets" / "default"
    if isinstance(model, str) and model in SOURCES:
        source = SOURCES[model]
        if not source.fetched():
            raise ConfigError(f"{model} has not been fetched: {source.folder()} is not there", f"Fetch it once: firstlight fetch {model}.")
        return source.folder()
    if not model or not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"the model is {model!r}", "Give a folder, or 'default' for the embedded model.")
    folder = Path(model)
    if not folder.is_dir():
        names = ", ".join((DEFAULT, *SOURCES))
        raise ConfigError(f"{folder} is not a folder", f"Give a folder with config.json and *.safetensors, or one of the names {names}.")
    return folder


def _stop_ids(spec: ModelSpec, defaults: GenerationDefaults) -> frozenset[int]:
    """Ids that end a text; those that the model cannot produce are left out, and said."""
    ids = frozenset(spec.stop_ids) | frozenset(defaults.eos_ids)
    beyond = sorted(token for token in ids if not 0 <= token < spec.num_vocab)
    if beyond:
        log.warning("end tokens %s are outside of the vocabulary of %d and left out", beyond[:8], spec.num_vocab)
    return ids - frozenset(beyond)


def _spec(found: ModelFile, options: Options) -> ModelSpec:
    if found.active_unread and not options.allow_unread:
        raise ConfigError(
            f"config.json sets keys that the model file {found.spec.name!r} does not read: {', '.join(found.active_unread)}",
            "Read or ignore them with a reason in the model file, or pass allow_unread=True to run without them.")
    if found.unread:
        log.warning("config keys that nobody reads: %s", ", ".join(found.unread))
    spec = found.spec if options.dtype == "auto" else found.spec.with_dtype(options.dtype)
    if options.max_context is None:
        return spec
    if options.max_context > spec.max_context:
        fact = f"max_context is {options.max_context:,}, the model was made for {spec.max_context:,}"
        raise ConfigError(fact, f"Use at most {spec.max_context:,}.")
    return spec.with_context(options.max_context)


def _fairness(spec: ModelSpec, options: Options) -> Fairness:
    """Where nobody says how context prices a token, the model's flops do; up to a few steps, what a step costs anyway hides it."""
    start, far = spec.flops(1, 0), spec.flops(1, spec.max_context)
    if options.fairness.double_tokens is not None or far == start:
        return options.fairness
    return replace(options.fairness, double_tokens=max(8 * options.max_step_tokens, start * spec.max_context // (far - start)))


def _order(backends: Sequence[str] | None) -> tuple[str, ...]:
    """The order of back-ends: all that are ready, references last; or what was asked for, which must be ready."""
    ready = load_backends(backends)
    if backends is None:
        return (*(name for name, refusal in ready.items() if refusal is None), REFERENCE)
    refused = {name: refusal for name, refusal in ready.items() if refusal is not None}
    if refused or not backends:
        said = "; ".join(f"{name}: {refusal}" for name, refusal in refused.items()) or "the list is empty"
        raise ConfigError(f"back-ends {list(backends)} cannot be used ({said})", "Name installed back-ends, or leave `backends` out.")
    return tuple(backends)


def _cache_bytes(spec: ModelSpec, options: Options) -> int:
    if options.cache_bytes is not None:
        return options.cache_bytes
    free_bytes = available_bytes()
    if free_bytes is None:
        raise CapacityError("this system does not say how much memory is free", "Give cache_bytes.")
    chosen = default_bytes(spec, free_bytes=free_bytes, max_sequences=options.max_sequences, max_context=spec.max_context)
    log.info("cache_bytes=%d (chosen from %d bytes of free memory)", chosen, free_bytes)
    return chosen
