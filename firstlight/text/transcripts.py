"""An empty transcript as a request wants it: stop strings, whether calls are returned, how they are numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.spec.errors import RequestError
from firstlight.text.answer import Transcript
from firstlight.text.brief import brief
from firstlight.text.chat_fields import flag, tool_choice
from firstlight.text.turns import read_turns

_MAX_DIGITS = 9
"""A longer number is not one that was counted."""


def transcript_for(tools: Sequence[Any] | None, fields: Mapping[str, Any]) -> Transcript:
    """Reads `stop`, `include_stop`, `tool_choice`, `tool_call_ids` and `messages`; `tools` None: not known, calls are returned."""
    stop = fields.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list | tuple) or any(not isinstance(text, str) or not text for text in stops):
        raise RequestError(f"`stop` is {brief(stop)}", "Use non-empty strings.")
    ids = fields.get("tool_call_ids") or "native"
    if ids not in ("native", "unique"):
        raise RequestError(f"`tool_call_ids` is {brief(ids)}", "Use native or unique.")
    return Transcript(
        stop=stops,
        include_stop=flag(fields, "include_stop", False),
        calls_hidden=tool_choice(fields, None) == "none" or (tools is not None and not tools),
        first_number=_first_number(fields.get("messages")) if ids == "unique" else 0,
    )


def _first_number(messages: Any) -> int:
    """The lowest number so that NAME:number and all that follow are new in this conversation."""
    if messages is None:
        return 0
    ids = [call.id or "" for turn in read_turns(messages) for call in turn.calls]
    endings = [call_id.rpartition(":")[2] for call_id in ids]
    numbers = [int(ending) for ending in endings if ending.isascii() and ending.isdecimal() and len(ending) <= _MAX_DIGITS]
    return max([len(ids), *(number + 1 for number in numbers)])
