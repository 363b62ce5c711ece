"""OpenAI's published API description as a judge of what the server says.

The copy in tests/data/specs is the part on chat, completions and models of version 2.3.0 (MIT). Its `nullable` is older than JSON Schema and
is put into words that a validator knows. What it forgets is added: the first token of an echoed prompt has no log probability, and completions
can be streamed, in chunks that have not ended yet. Events of a stream are checked here, one by one: where the description gives a chunk as the
schema of text/event-stream, other validators expect the schema of the event around it.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

STREAMS = {"/completions": "CreateCompletionStreamResponse", "/chat/completions": "CreateChatCompletionStreamResponse"}
"""Path -> the component that describes a chunk."""
FILE = Path(__file__).parent.parent / "data" / "specs" / "openai-chat-subset.yaml"


@cache
def description() -> dict[str, Any]:
    """The whole document."""
    found: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    lists = found["components"]["schemas"]["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]["logprobs"]["anyOf"][0]
    for name in ("token_logprobs", "top_logprobs"):
        lists["properties"][name]["items"]["nullable"] = True
    schemas = found["components"]["schemas"]
    schemas["CreateCompletionStreamResponse"] = copy.deepcopy(schemas["CreateCompletionResponse"])
    schemas["CreateCompletionStreamResponse"]["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
    for path in STREAMS:
        found["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {}
    return found


def _plain(schema: Any) -> Any:
    """Without `nullable`; objects that are described completely allow what is listed, and our own named extensions."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _plain(each) for name, each in schema.items() if name not in ("nullable", "discriminator")}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


@cache
def validator(name: str) -> Draft202012Validator:
    """For one component of the description."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": _plain(description()["components"])})


def check_stream(path: str, text: str) -> int:
    """Assert that a stream of one of the paths is whole and its events are as described; how many there are."""
    *events, last = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert "[DONE]" == last
    for event in events:
        check(STREAMS[path], json.loads(event))
    return len(events)


def check(name: str, content: Any) -> None:
    """Assert that something is as its component says."""
    errors = [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in validator(name).iter_errors(content)]
    assert [] == errors, f"{name}: {content}"
