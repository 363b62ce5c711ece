"""How tokens are drawn and when a sequence ends; checked once, where a request enters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.spec.structured import Choice, JsonSchema, Regex, Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` switch a filter off.

    `prompt_logprobs`: as `logprobs`, for the tokens of the prompt; such a request resumes from no prefix, as cached tokens yield no logits.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    structured: Structure | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, (list, tuple, set, frozenset)):
                raise RequestError(f"`{name}` is {value!r}", "Use a list.")
            object.__setattr__(self, name, tuple(value))
        for name, low, high in _RANGES:
            _check_number(name, getattr(self, name), low, high)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"`ignore_eos` is {self.ignore_eos!r}", "Use true or false.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"`stop` holds {list(self.stop)!r}", "Use non-empty strings.")
        if any(not _is_id(token_id) for token_id in self.stop_token_ids):
            raise RequestError(f"`stop_token_ids` holds {list(self.stop_token_ids)!r}", "Use token ids: whole numbers from 0.")
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        if self.structured is not None and not isinstance(self.structured, (JsonSchema, Regex, Choice)):
            raise RequestError(f"`structured` is {self.structured!r}", "Use JsonSchema, Regex or Choice.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0, 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, 2**31 - 1),
    ("prompt_logprobs", 0, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 1e-6, 100),
)

_MAX_BIAS = 1e30
_WHOLE = frozenset({"max_tokens", "top_k", "min_tokens", "logprobs", "prompt_logprobs", "seed"})
_OPTIONAL = frozenset({"logprobs", "prompt_logprobs", "seed"})


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if value is None and name in _OPTIONAL:
        return
    kinds = (int,) if name in _WHOLE else (int, float)
    # Not a number is in no range, so the comparison refuses it.
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise RequestError(f"`{name}` is {value!r}", f"Use a {'whole ' if name in _WHOLE else ''}number from {low} to {high}.")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_bias(biases: Any) -> None:
    if not isinstance(biases, Mapping) or any(not _is_id(token_id) for token_id in biases):
        raise RequestError(f"`logit_bias` is {biases!r}", "Use an object from token ids to numbers.")
    for token_id, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise RequestError(f"`logit_bias` of token {token_id} is {bias!r}", f"Use a number from {-_MAX_BIAS:g} to {_MAX_BIAS:g}.")
