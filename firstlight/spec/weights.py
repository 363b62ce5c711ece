"""From checkpoint names to parameter names: rules as data, tried in order, no tensor touched."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from firstlight.spec.model import ModelSpec

Fit = Literal["exact", "squeeze", "pad"]


@dataclass(frozen=True, slots=True)
class Rename:
    """`model.layers.{i}.self_attn.{rest*}` -> `layers.{i}.mixer.{rest*}`.

    `{i}` (one letter) matches digits, `{name}` one component, `{name*}` any rest. `{e}` is the index in a bank of experts
    and stands in the source only. `fit`: exact, squeeze (dims of size 1 may differ), pad (extra zeros at the end of dim 0).
    """

    source: str
    target: str
    fit: Fit = "exact"


@dataclass(frozen=True, slots=True)
class Skip:
    """Tensors left out on purpose, with the reason that the load report shows."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one checkpoint tensor goes; `expert` is its place in a bank."""

    param: str
    expert: int | None
    fit: Fit


@dataclass(frozen=True, slots=True)
class NameMap:
    """All rules of a model. `modules` pairs (their module prefix, ours), for comparing traces by name."""

    renames: tuple[Rename, ...]
    skips: tuple[Skip, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()

    def nested(self, prefix: str) -> NameMap:
        """The same rules for a checkpoint that puts `prefix` in front of every name."""
        return NameMap(
            tuple(replace(rule, source=prefix + rule.source) for rule in self.renames),
            tuple(replace(rule, source=prefix + rule.source) for rule in self.skips),
            tuple((prefix + theirs, ours) for theirs, ours in self.modules),
        )

    def with_skips(self, *skips: Skip) -> NameMap:
        """These rules and more skips."""
        return replace(self, skips=self.skips + skips)

    def module(self, theirs: str) -> str | None:
        """Our name of a module of the reference; None: it has no counterpart."""
        for source, target in self.modules:
            match = _pattern(source).fullmatch(theirs)
            if match:
                fields = match.groupdict()
                return re.sub(r"\{([^}*]+)\*?\}", lambda hole: fields[hole.group(1)], target)
        return None

    def find(self, name: str) -> Landing | Skip | None:
        """What becomes of a checkpoint tensor; None: no rule knows it."""
        for skip in self.skips:
            if _pattern(skip.source).fullmatch(name):
                return skip
        for rule in self.renames:
            match = _pattern(rule.source).fullmatch(name)
            if match:
                fields = {f"{key}*" if f"{{{key}*}}" in rule.source else key: value for key, value in match.groupdict().items()}
                expert = fields.pop("e", None)
                target = re.sub(r"\{([^}]+)\}", lambda hole: fields[hole.group(1)], rule.target)
                return Landing(target, None if expert is None else int(expert), rule.fit)
        return None

    def origin(self, param: str, expert: int | None = None) -> str | None:
        """A checkpoint name that lands on a parameter, for messages about tensors that are not there; None: no rule makes one."""
        for rule in self.renames:
            match = _pattern(rule.target).fullmatch(param)
            if match:
                fields = {**match.groupdict(), "e": "0" if expert is None else str(expert)}
                name = re.sub(r"\{([^}*]+)\*?\}", lambda hole: fields.get(hole.group(1), "0"), rule.source)
                found = self.find(name)
                if isinstance(found, Landing) and found.param == param:
                    return name
        return None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model file makes of a config: the facts and the names."""

    spec: ModelSpec
    names: NameMap


@lru_cache(maxsize=4096)
def _pattern(source: str) -> re.Pattern[str]:
    out = []
    for piece in re.split(r"(\{[^}]+\})", source):
        if not piece.startswith("{"):
            out.append(re.escape(piece))
        elif piece.endswith("*}"):
            out.append(f"(?P<{piece[1:-2]}>.+)")
        elif len(piece) == 3:
            out.append(f"(?P<{piece[1:-1]}>\\d+)")
        else:
            out.append(f"(?P<{piece[1:-1]}>[^.]+)")
    return re.compile("".join(out))
