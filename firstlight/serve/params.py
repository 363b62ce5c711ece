"""From the fields of a request to sampling parameters: defaults of the model, rules of the vendor, limits of the server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from firstlight.serve.fields import Sampled
from firstlight.serve.limits import Limits
from firstlight.serve.profiles import Profile
from firstlight.serve.refusal import bad
from firstlight.spec.sampling import SamplingParams
from firstlight.text.generation import GenerationDefaults

_SAME = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "min_tokens",
    "stop_token_ids",
)
_SEEDS = 2**64


def sampling(
    fields: Sampled, defaults: GenerationDefaults, profile: Profile, limits: Limits, *, max_tokens: int, also_stop: tuple[int, ...] = (), **more: Any
) -> SamplingParams:
    """Parameters of the first choice; `also_stop`: tokens that end it beside those of the request. Raises: Refusal, RequestError."""
    profile.check(fields.model_dump(include=set(profile.rules)))
    given = {name: getattr(fields, name) for name in _SAME}
    given = {**profile.defaults, **{name: value for name, value in given.items() if value is not None}}
    if also_stop:
        given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *also_stop)
    top_k = None if fields.top_k is None else max(fields.top_k, 0)
    if limits.max_tokens is not None and max_tokens > limits.max_tokens:
        raise bad(f"`max_tokens` is {max_tokens}", f"Use at most {limits.max_tokens}; this server makes no longer answers.", "max_tokens")
    return defaults.params(**given, top_k=top_k, logit_bias=_biases(fields), max_tokens=max_tokens, **more)


def stops_of(fields: Sampled, limits: Limits) -> tuple[str, ...]:
    """The stop strings. Raises: Refusal when they are too many, too long or empty."""
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(stops) > limits.num_stops:
        raise bad(f"`stop` holds {len(stops)} strings", f"Use at most {limits.num_stops}.", "stop")
    longest = max(map(len, stops), default=0)
    if longest > limits.stop_chars:
        raise bad(f"`stop` holds a string of {longest} characters", f"Use at most {limits.stop_chars}.", "stop")
    if not all(stops):
        raise bad("`stop` holds an empty string", "Leave it out.", "stop")
    return stops


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of a further choice: the same with the next seed, so that it equals a request of its own with that seed."""
    if params.seed is None or not index:
        return params
    seed = params.seed + index
    return replace(params, seed=seed - _SEEDS if seed >= _SEEDS else seed)


def _biases(fields: Sampled) -> dict[int, float] | None:
    if not fields.logit_bias:
        return None
    wrong = next((key for key in fields.logit_bias if not (key.isascii() and key.isdecimal() and len(key) < 20)), None)
    if wrong is not None:
        raise bad(f"`logit_bias` has the key {wrong[:60]!r}", "Use token ids, as strings.", "logit_bias")
    return {int(key): bias for key, bias in fields.logit_bias.items()}
