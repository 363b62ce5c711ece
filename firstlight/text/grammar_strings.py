"""String values that are written raw, without quotes and escapes: what a schema says of them as a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from firstlight.text.grammar_rules import Rules

_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_DATE = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]{1,9}W|[0-9]{1,9}D(?:T[0-9]{1,9}[HMS])?|[0-9]{1,9}[YM](?:[0-9]{1,9}D)?|T[0-9]{1,9}[HMS])",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(?:\.[a-zA-Z0-9_+-]{{1,32}})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": f"(?:{_GROUP}:){{7}}{_GROUP}|{_GROUP}::(?:{_GROUP}:){{0,4}}{_GROUP}|::1?",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{1,15}}://{_LABEL}(?:\.{_LABEL}){{0,4}}(?::[0-9]{{1,4}})?(?:/[a-zA-Z0-9._~%-]{{0,64}}){{0,8}}(?:\?[a-zA-Z0-9._~=&-]{{0,128}})?",
}
"""Texts of each format; a part of what its standard allows, and nothing else."""

_KNOWN = frozenset({"minLength", "maxLength", "pattern", "format"})
_UNLIMITED = 2**31


def raw_string(rules: Rules, asserted: Mapping[str, Any], *, strict: bool) -> str | None:
    """A rule for raw text under the keywords of a string schema; None: they say what raw text cannot be held to."""
    if set(asserted) - _KNOWN:
        return None
    parts = []
    low, high = int(asserted.get("minLength", 0)), asserted.get("maxLength")
    if low or high is not None:
        parts.append(f"(?s:.{{{low},{min(int(high), _UNLIMITED - 1) if high is not None else ''}}})")
    if "pattern" in asserted:
        pattern = _whole(asserted["pattern"])
        if pattern is None:
            return None
        parts.append(pattern)
    if "format" in asserted:
        if asserted["format"] not in FORMATS and strict:
            return None
        parts += [FORMATS[asserted["format"]]] if asserted["format"] in FORMATS else []
    return rules.terminal(" & ".join(f"/{regex_to_lark(part, 'dw')}/" for part in parts)) if parts else rules.text()


def _whole(pattern: str) -> str | None:
    """A pattern that may match anywhere, as one that matches the whole text; None where anchors stand within."""
    inner = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern)
    begins, ends = inner.startswith("^"), inner.endswith("$")
    core = inner[begins : len(inner) - ends]
    if "^" in core or "$" in core or ((begins or ends) and _splits(core)) or re.search(r"\(\?[=!<]", core):
        return None
    body = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"


def _splits(pattern: str) -> bool:
    """Whether alternatives stand outside of parentheses."""
    depth = 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            return True
    return False
