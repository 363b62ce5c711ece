"""What a server says of itself when it starts: the model, where memory goes, limits, what does not work, and what to try first."""

from __future__ import annotations

import json

from firstlight.serve.service import Service


def summary(service: Service) -> str:
    """A few lines for people."""
    machine, limits, settings, door = service.machine, service.limits, service.settings, service.door
    spec = machine.spec
    cached = machine.cache.explain([0, 0])
    keys = f"{len(settings.keys)} keys, one is needed" if settings.keys else "none is needed"
    lines = [
        f"model       {', '.join(settings.names)} ({spec.name}, {spec.dtype}): {spec.num_params:,} parameters, {spec.num_active_params:,} per token",
        f"memory      {_size(machine.report.memory_bytes)} of weights, {_size(machine.pool.num_bytes)} of cache: {_groups(service)}",
        f"context     {service.max_context:,} tokens of prompt and answer; {door.num_running} choices run, {door.num_queued} more may wait",
        f"prefixes    {_prefixes(service, cached['minimum_reusable_tokens'])}",
        f"limits      {_size(limits.body_bytes)}, {limits.num_choices} choices and {limits.request_s:g} s per request; {limits.drain_s:g} s to drain",
        f"keys        {keys}; sampling rules: {settings.profile.name}",
        *(f"not served  {each}" for each in _not_served(service)),
    ]
    return "\n".join(lines)


def first_request(service: Service, url: str) -> str:
    """Where the server is, and a line to try it with."""
    key = ' -H "Authorization: Bearer $KEY"' if service.settings.keys else ""
    plain = isinstance(service.chat, Exception)
    path, asked = ("completions", {"prompt": "The first light"}) if plain else (
        "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
    body = json.dumps({"model": service.name, **asked, "max_tokens": 32})
    line = f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"\nserving on {url}\n\n  {line}\n\nState: {url}/health  {url}/metrics  {url}/"


def _groups(service: Service) -> str:
    found = []
    for name, counts in service.machine.cache.counts().items():
        unit = f"blocks of {service.machine.cache.tokens_per_block} tokens" if counts["kind"] == "rows" else "states"
        found.append(f"{name} {counts['total']:,} {unit}")
    return ", ".join(found)


def _prefixes(service: Service, least: int) -> str:
    if not service.machine.cache.prefix_cache:
        return "not reused (--no-prefix-cache)"
    unit = "token" if least == 1 else "tokens"
    return f"reused from {least:,} {unit} on where a state was kept: ends of prompts and answers, and branches seen twice"


def _not_served(service: Service) -> list[str]:
    """Combinations that a client might expect, named before it asks."""
    found = ["images, audio; suffix, best_of, functions (see docs/http.md)", "echo with logprobs reuses no prefix: cached tokens have no logits"]
    if service.tokenizer is None:
        found.append("text, stop strings and response formats: the folder has no tokenizer, use token ids")
    if isinstance(service.chat, Exception):
        found.append(f"/v1/chat/completions: {service.chat}")
    if service.settings.profile.rules:
        rules = ", ".join(service.settings.profile.rules)
        found.append(f"other values than the profile {service.settings.profile.name!r} allows for {rules}")
    return found


def _size(num_bytes: int) -> str:
    for unit, width in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << width:
            return f"{num_bytes / (1 << width):.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
