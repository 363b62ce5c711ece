"""Rules of a model's vendor for sampling parameters; a table, chosen when the server starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from firstlight.serve.refusal import bad


@dataclass(frozen=True, slots=True)
class Rule:
    """A parameter may be from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Profile:
    """`defaults` go before those of the model's files; `rules` narrow what a request may say."""

    name: str
    rules: Mapping[str, Rule] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)

    def check(self, given: Mapping[str, float | None]) -> None:
        """Raises: Refusal for the first parameter that breaks its rule."""
        for name, rule in self.rules.items():
            value = given.get(name)
            if value is None or rule.low <= value <= rule.high:
                continue
            allowed = f"{rule.low:g}" if rule.low == rule.high else f"{rule.low:g} to {rule.high:g}"
            raise bad(f"`{name}` is {value:g}, the profile {self.name!r} allows {allowed}", f"Use {allowed}, or leave it out.", name)


PROFILES = {
    "openai": Profile("openai"),
    "kimi": Profile(
        "kimi",
        rules={
            "temperature": Rule(0, 1), "top_p": Rule(0.95, 0.95), "presence_penalty": Rule(0, 0), "frequency_penalty": Rule(0, 0), "n": Rule(1, 1),
        },
        defaults={"temperature": 1.0, "top_p": 0.95},
    ),
}
"""Source: tests/params of MoonshotAI/Kimi-Vendor-Verifier for "kimi"; "openai" keeps the ranges of OpenAI's API."""
