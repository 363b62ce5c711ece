"""Find the model file for a config by its model_type. Nothing to register: a model is found by its file name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import firstlight.models as rooms
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import ModelSpec
from firstlight.spec.weights import NameMap, Reading

Inner = Callable[[ConfigReader, str], Reading]
"""Reads a nested config by its own model_type (or a default one), and a model's own config as the family that is named."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A config read to the end: facts, names, and what was not understood."""

    spec: ModelSpec
    names: NameMap
    model_type: str
    unread: tuple[str, ...]
    active_unread: tuple[str, ...]
    ignored: Mapping[str, str]


def model_types() -> dict[str, str]:
    """model_type (aliases too) -> module name."""
    found: dict[str, str] = {}
    for entry in pkgutil.iter_modules(rooms.__path__):
        if entry.name == "registry":
            continue
        module = f"{rooms.__name__}.{entry.name}"
        for name in (entry.name, *getattr(importlib.import_module(module), "ALIASES", ())):
            found[name] = module
    return found


def read(source: str | Path | Mapping[str, Any]) -> ModelFile:
    """Read a folder, a config.json or its parsed content. Raises ConfigError; unread keys are returned, not raised."""
    config = ConfigReader(source) if isinstance(source, Mapping) else ConfigReader.open(source)
    model_type = config.take("model_type", str)
    reading = _read(config, model_type)
    return ModelFile(reading.spec, reading.names, model_type, tuple(config.unread()), tuple(config.active_unread()), config.ignored())


def _read(config: ConfigReader, named: str, outer: ConfigReader | None = None) -> Reading:
    """`outer` is the config of the model file that asks: given back, it is read as the type that is named, whatever its own says."""
    model_type = named if config is outer else config.take("model_type", str, named)
    reading: Reading = _module(model_type, config.path).read(config, partial(_read, outer=config))
    return reading


def _module(model_type: str, path: str) -> ModuleType:
    known = model_types()
    if model_type not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{path}: model_type {model_type!r} is not known (known: {names})", "Write firstlight/models/<model_type>.py for it.")
    return importlib.import_module(known[model_type])
