"""The fields of a request: which are read, which are set aside and why, which are refused and what to use instead."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from firstlight.serve.refusal import Refusal, bad

M = TypeVar("M", bound=BaseModel)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number; JSON has one kind of numbers, so 5.0 is one."""

IGNORED: dict[str, str] = {
    "user": "no accounts are kept here",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "safety_identifier": "no accounts are kept here",
    "service_tier": "there is one tier; `priority` orders requests",
    "moderation": "nothing is moderated",
    "prompt_cache_key": "every prefix is found by its content; `cache_salt` keeps namespaces apart",
    "prompt_cache_retention": "blocks stay as long as there is room",
    "prompt_cache_options": "blocks stay as long as there is room",
    "prediction": "a guess at the answer changes its speed only, and is not used",
    "verbosity": "the model has no such control",
    "request_id": "the header X-Request-Id names a request",
    "spaces_between_special_tokens": "none are ever put in",
}
"""Known fields that have no effect on the answer, each with its reason."""

REFUSED: dict[str, str] = {
    "suffix": "Text cannot be filled in before a suffix; put all context into `prompt`.",
    "audio": "Leave it out; answers are text.",
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
    "web_search_options": "Leave it out; there is no search, declare a tool instead.",
    "guided_json": "Use `response_format` of type json_schema.",
    "guided_regex": 'Use `structured`: {"regex": ...}.',
    "guided_choice": 'Use `structured`: {"choice": [...]}.',
    "guided_grammar": "Use `response_format` or `structured`.",
    "structured_outputs": "Use `structured`.",
    "use_beam_search": "Leave it out; tokens are sampled or greedy.",
    "prompt_embeds": "Use `prompt`.",
    "prompt_logprobs": "Use `echo` with `logprobs` on /v1/completions.",
    "allowed_token_ids": "Use `logit_bias`.",
    "bad_words": "Use `logit_bias`.",
    "logits_processors": "Leave it out.",
    "truncate_prompt_tokens": "Shorten the prompt yourself, so that what is dropped is your choice.",
}
"""Known fields that would change the answer and are not served, each with what to do instead."""

_FIXES = {
    "messages": "Send a list with at least one message, each an object.",
    "priority": "Use interactive, standard or background.",
    "stop": "Use a string, or a list of strings.",
    "stream_options": 'Use an object such as {"include_usage": true}.',
    "logit_bias": "Use an object from token ids, as strings, to numbers from -100 to 100.",
}

MOST_UNKNOWN = 100
"""Fields that nobody knows in one body; each is compared with all known ones, which takes time."""
_LONGEST_SLIP = 40


class StreamOptions(BaseModel):
    """What a stream says beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(BaseModel):
    """Fields that both kinds of completion share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    n: Annotated[Whole, Field(ge=1, le=128)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[Whole, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "standard", "background"] | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class CompletionFields(Sampled):
    """The body of /v1/completions."""

    prompt: Any
    max_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    best_of: Annotated[Whole, Field(ge=0, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None


class ChatFields(Sampled):
    """The body of /v1/chat/completions; the chat format checks messages, tools and thinking itself."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None


def read(kind: type[M], content: Mapping[str, Any], *, unknown_refused: bool = False) -> tuple[M, list[str]]:
    """The fields of a body, and the names of those that were set aside. Raises: Refusal."""
    refused = next((name for name in REFUSED if content.get(name) is not None and name not in kind.model_fields), None)
    if refused is not None:
        raise bad(f"`{refused}` is given, which this server does not do", REFUSED[refused], refused, code="unsupported_parameter")
    try:
        fields = kind.model_validate(content)
    except ValidationError as error:
        raise _refusal(error) from None
    extra = [name for name in (fields.model_extra or {}) if name not in REFUSED]
    num_unknown = sum(name not in IGNORED for name in extra)
    if num_unknown > MOST_UNKNOWN:
        raise bad(f"the request has {num_unknown} fields that are not known", f"Leave them out; {MOST_UNKNOWN} are set aside at most.",
                  code="unknown_parameter")
    for name in extra:
        _check_unknown(name, kind, unknown_refused)
    return fields, [name for name in extra if content[name] is not None]


def _check_unknown(name: str, kind: type[BaseModel], refused: bool) -> None:
    if name in IGNORED:
        return
    near = get_close_matches(name, kind.model_fields, 1, 0.85) if len(name) <= _LONGEST_SLIP else []
    if near or refused:
        fix = f"Did you mean `{near[0]}`?" if near else "Leave it out."
        raise bad(f"`{name[:100]}` is not a field of this request", fix, name[:100], code="unknown_parameter")


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False)[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        return bad(f"`{param}` is missing", "Give it.", param, code="missing_required_parameter")
    said = first["msg"].removeprefix("Input ").rstrip(".")
    fix = _FIXES.get(param or "", f"It {said[0].lower()}{said[1:]}.")
    place = "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    return bad(f"`{param}{place}` is {_short.repr(first['input'])}", fix, param, code="invalid_value")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
