"""From checkpoint names to parameter names: rules as data, tried in order, no tensor touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    _memo: dict[str, Rename | Skip | None] = field(default_factory=dict, compare=False, repr=False)

    def nested(self, prefix: str) -> NameMap:
        """The same rules for a checkpoint that puts `prefix` in front of every name."""
        return NameMap(
            tuple(replace(rule, source=prefix + rule.source) for rule in self.renames),
            tuple(replace(rule, source=prefix + rule.source) for rule in self.skips),
            tuple((prefix + theirs, ours) for theirs, ours in self.modules),
        )

    def moved(self, place: str, to: str) -> NameMap:
        """The same rules for a checkpoint in which what begins with `place` begins with `to`; other names stay."""

        def new(name: str) -> str:
            return to + name.removeprefix(place) if name.startswith(place) else name

        return NameMap(
            tuple(replace(rule, source=new(rule.source)) for rule in self.renames),
            tuple(replace(rule, source=new(rule.source)) for rule in self.skips),
            tuple((new(theirs), ours) for theirs, ours in self.modules),
        )

    def with_skips(self, *skips: Skip) -> NameMap:
        """These rules and more skips."""
        return NameMap(self.renames, self.skips + skips, self.modules)

    def module(self, theirs: str) -> str | None:
        """Our name of a module of the reference; None: it has no counterpart."""
        for source, target in self.modules:
            match = _pattern(source).fullmatch(theirs)
            if match:
                return _filled(target, match.groupdict())
        return None

    def find(self, name: str) -> Landing | Skip | None:
        """What becomes of a checkpoint tensor; None: no rule knows it."""
        rule = self._rule(name)
        if not isinstance(rule, Rename):
            return rule
        match = _pattern(rule.source).fullmatch(name)
        assert match is not None, "names that differ in digits only meet the same rule"
        fields = match.groupdict()
        expert = fields.get("e")
        return Landing(_filled(rule.target, fields), None if expert is None else int(expert), rule.fit)

    def origins(self, param: str, expert: int | None = None) -> tuple[str, ...]:
        """Checkpoint names that would land on a parameter, for messages about tensors that are not there."""
        found = []
        for rule in self.renames:
            match = _pattern(rule.target).fullmatch(param)
            if match and (expert is not None) == ("{e}" in rule.source):
                name = _filled(rule.source, {**match.groupdict(), "e": str(expert)})
                landing = self.find(name)
                if isinstance(landing, Landing) and (landing.param, landing.expert) == (param, expert):
                    found.append(name)
        return tuple(found)

    def _rule(self, name: str) -> Rename | Skip | None:
        """The first rule that fits; found once for all names that differ in their numbers only, of which there are many."""
        rules: tuple[Rename | Skip, ...] = (*self.skips, *self.renames)
        form = _NUMBER.sub(".0.", name)
        if form not in self._memo and any(_NUMBER.search(rule.source) for rule in rules):
            return next((rule for rule in rules if _pattern(rule.source).fullmatch(name)), None)  # a rule tells numbers apart
        if form not in self._memo:
            self._memo[form] = next((rule for rule in rules if _pattern(rule.source).fullmatch(form)), None)
        return self._memo[form]


_NUMBER = re.compile(r"\.\d+\.")


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return re.sub(r"\{([^}*]+)\*?\}", lambda hole: fields.get(hole.group(1), "0"), template)


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
