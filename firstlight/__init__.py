"""The public names of firstlight, each imported when first asked for: `import firstlight` costs no torch."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.async_engine import AsyncEngine
    from firstlight.engine.llm import LLM, Output
    from firstlight.engine.loop import Engine
    from firstlight.sched.limits import Fairness
    from firstlight.sched.sequence import Priority
    from firstlight.spec.errors import FirstlightError
    from firstlight.spec.model import CacheSpec, LayerSpec, ModelSpec
    from firstlight.spec.sampling import SamplingParams
    from firstlight.spec.structured import Choice, JsonSchema, Regex
    from firstlight.text import chat

    __version__: str

__all__ = [
    "LLM", "Output", "Engine", "AsyncEngine", "SamplingParams", "JsonSchema", "Regex", "Choice", "Priority", "Fairness", "ModelSpec", "LayerSpec",
    "CacheSpec", "FirstlightError", "chat", "__version__",
]

_HOMES = {
    "LLM": "firstlight.engine.llm",
    "Output": "firstlight.engine.llm",
    "Engine": "firstlight.engine.loop",
    "AsyncEngine": "firstlight.engine.async_engine",
    "SamplingParams": "firstlight.spec.sampling",
    "JsonSchema": "firstlight.spec.structured",
    "Regex": "firstlight.spec.structured",
    "Choice": "firstlight.spec.structured",
    "Priority": "firstlight.sched.sequence",
    "Fairness": "firstlight.sched.limits",
    "ModelSpec": "firstlight.spec.model",
    "LayerSpec": "firstlight.spec.model",
    "CacheSpec": "firstlight.spec.model",
    "FirstlightError": "firstlight.spec.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room and keep it."""
    if name == "__version__":
        found: Any = version("firstlight")
    elif name == "chat":
        found = import_module("firstlight.text.chat")
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'firstlight' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
