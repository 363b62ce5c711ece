"""How a model wants to be sampled and where it ends: generation_config.json, with config.json behind it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError, RequestError
from firstlight.spec.sampling import SamplingParams

_RESTORE = "Restore the value of the model's release."
_SET_ASIDE = {
    "transformers_version": "says which program wrote the file",
    "_from_model_config": "says how the file was made",
    "pad_token_id": "nothing is padded here",
    "use_cache": "the cache is always used",
    "max_length": "the context is limited by config.json",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """None: the model says nothing, the default of SamplingParams holds. `unread` are keys that have no effect here."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    unread: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> GenerationDefaults:
        """Defaults of a model folder; ids that end a text are those of both files together.

        Raises: ConfigError when a file is there but damaged, or a value cannot be.
        """
        own = _open(Path(folder) / "generation_config.json")
        model = _open(Path(folder) / "config.json")
        places = [own, model, *([model.child("text_config")] if model.has("text_config") else [])]
        eos_ids = [token_id for place in places for token_id in _ids(place, "eos_token_id")]
        bos_ids = [token_id for place in places for token_id in _ids(place, "bos_token_id")]
        defaults = cls(eos_ids=tuple(dict.fromkeys(eos_ids)), bos_id=bos_ids[0] if bos_ids else None, **_sampling(own))
        try:
            defaults.params()
        except RequestError as error:
            raise ConfigError(f"{own.path}: {error.fact}", error.fix) from None
        return defaults

    def params(self, **given: Any) -> SamplingParams:
        """Parameters of a request: what is given and not None, then these defaults."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("eos_ids", "bos_id", "unread")}
        chosen.update({name: value for name, value in given.items() if value is not None})
        return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


def _open(file: Path) -> ConfigReader:
    return ConfigReader.open(file) if file.is_file() else ConfigReader({}, str(file))


def _sampling(reader: ConfigReader) -> dict[str, Any]:
    """Fields of GenerationDefaults; a model that says `do_sample: false` wants the likeliest token."""
    for key, why in _SET_ASIDE.items():
        reader.ignore(key, why)
    values: dict[str, Any] = {key: reader.take(key, float, None) for key in ("temperature", "top_p", "min_p", "repetition_penalty")}
    # Some files write -1 for "off".
    top_k = reader.take("top_k", int, None)
    values["top_k"] = None if top_k is None else max(top_k, 0)
    values["max_tokens"] = reader.take("max_new_tokens", int, None)
    if reader.take("do_sample", bool, None) is False:
        values["temperature"] = 0.0
    return {**values, "unread": tuple(reader.unread())}


def _ids(reader: ConfigReader, key: str) -> list[int]:
    """One id, a list of ids, or nothing."""
    value: Any = reader.take(key, object, None)
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0 for token_id in ids):
        raise ConfigError(f"{reader.path}: `{key}` is {value!r}, neither an id nor a list of ids", _RESTORE)
    return ids
