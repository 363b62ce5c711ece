"""Reading a config.json without silence: every key is taken, or ignored with a reason, or reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from firstlight.spec.errors import ConfigError

T = TypeVar("T")

FRAMEWORK_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        ("_name_or_path", "architectures", "auto_map", "transformers_version", "tokenizer_class", "prefix", "task_specific_params", "id2label",
         "label2id", "problem_type", "finetuning_task", "_attn_implementation", "is_decoder", "is_encoder_decoder", "use_cache", "torchscript",
         "return_dict", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_router_logits",
         "tie_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "chunk_size_feed_forward", "pruned_heads", "use_bfloat16",
         "tf_legacy_loss", "remove_invalid_values", "_commit_hash", "is_llama_config", "ignore_index"),
        "bookkeeping of the framework that wrote the file, no part of the network"),
    **dict.fromkeys(
        ("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping",
         "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
         "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "repetition_penalty",
         "temperature", "top_k", "top_p", "typical_p", "sep_token_id"),
        "class default of text generation; generation_config.json is what counts"),
    **dict.fromkeys(
        ("initializer_range", "attention_dropout", "hidden_dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "pretraining_tp"),
        "matters in training only"),
}
"""Keys that frameworks write into every config, with the reason why they change nothing here."""
_REQUIRED: Any = object()
LARGEST = 2**31 - 1
"""No count or width of a network comes near it."""


class ConfigReader:
    """A view on one JSON object that remembers which keys were read.

    A null counts as absent. Raises ConfigError with path, key and value.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "config.json") -> None:
        self.path = path
        self._values = values
        self._read: set[str] = set()
        self._ignored: dict[str, str] = {}
        self._children: dict[str, ConfigReader] = {}

    @classmethod
    def open(cls, path: str | Path) -> ConfigReader:
        """Read a file, or config.json inside a folder."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist", "Give a folder that holds config.json, or the file itself.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read as JSON: {error}", "Restore the file from the model's release.") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{file} holds a {type(values).__name__}, not an object", "Restore the file from the model's release.")
        return cls(values, str(file))

    def has(self, key: str) -> bool:
        """Whether the key is there and not null; does not count as reading it."""
        return self._values.get(key) is not None

    @overload
    def take(self, key: str, kind: type[T]) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def take(self, key: str, kind: type[T], default: T) -> T: ...

    def take(self, key: str, kind: type[T], default: Any = _REQUIRED) -> Any:
        """The value of a key, checked to be of `kind`; ints pass as floats."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.path}: `{key}` is missing", f"Add `{key}` ({kind.__name__}) as the model's release has it.")
            return default
        return self._checked(key, value, kind)

    def take_list(self, key: str, kind: type[T]) -> list[T]:
        """A list whose items are all of `kind`."""
        values: list[Any] = self.take(key, list)
        return [self._checked(f"{key}[{i}]", value, kind) for i, value in enumerate(values)]

    def expect(self, key: str, allowed: Iterable[Any], why: str, default: Any = None) -> Any:
        """A key that must have one of the supported values; `why` says what another value would mean."""
        self._read.add(key)
        value = self._values.get(key)
        value = default if value is None else value
        options = list(allowed)
        if value not in options:
            shown = " or ".join(repr(option) for option in options)
            raise ConfigError(f"{self.path}: `{key}` is {value!r}, only {shown} is supported", why)
        return value

    @overload
    def positive(self, key: str, default: int = ...) -> int: ...
    @overload
    def positive(self, key: str, default: None) -> int | None: ...

    def positive(self, key: str, default: Any = _REQUIRED) -> int | None:
        """An int above zero."""
        value: int | None = self.take(key, int, default)
        if value is not None and not 0 < value <= LARGEST:
            bound = "above 0" if value <= 0 else f"at most {LARGEST}"
            raise ConfigError(f"{self.path}: `{key}` is {value}, it must be {bound}", "Restore the value of the model's release.")
        return value

    def natural(self, key: str, default: int) -> int:
        """An int that may be zero."""
        value = self.take(key, int, default)
        if not 0 <= value <= LARGEST:
            raise ConfigError(f"{self.path}: `{key}` is {value}, it must be from 0 to {LARGEST}", "Restore the value of the model's release.")
        return value

    def above_zero(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self.take(key, float, default)
        if not 0 < value < math.inf:
            raise ConfigError(f"{self.path}: `{key}` is {value}, it must be finite and above 0", "Restore the value of the model's release.")
        return value

    def take_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or none."""
        value = self.take(key, object, None)
        found: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            fact = f"{self.path}: `{key}` is {value!r}, an int or a list of ints is needed"
            raise ConfigError(fact, "Restore the value of the model's release.")
        return tuple(found)

    def take_dtype(self) -> str:
        """The dtype of the weights, in either of the two spellings of its key."""
        key, other = ("dtype", "torch_dtype") if self.has("dtype") else ("torch_dtype", "dtype")
        self.ignore(other, "the other of two spellings was read")
        return str(self.expect(key, ("bfloat16", "float32", "float16"), "Convert the checkpoint to one of these.", "bfloat16"))

    def ignore(self, key: str, why: str) -> None:
        """Set a key aside; the reason is shown by inspect."""
        assert why, "an ignored key needs a reason"
        if key in self._values:
            self._ignored[key] = why

    def ignore_framework_keys(self) -> None:
        """Set aside what frameworks write into every config."""
        for key, why in FRAMEWORK_KEYS.items():
            self.ignore(key, why)

    def child(self, key: str) -> ConfigReader:
        """The reader of a nested object; its unread keys are reported with ours."""
        if key not in self._children:
            value = self.take(key, dict)
            self._children[key] = ConfigReader(value, f"{self.path}: {key}")
        return self._children[key]

    def unread(self) -> list[str]:
        """Keys nobody took or ignored, dotted, in file order."""
        own = [key for key in self._values if key not in self._read and key not in self._ignored]
        nested = [f"{name}.{key}" for name, reader in self._children.items() for key in reader.unread()]
        return own + nested

    def active_unread(self) -> list[str]:
        """Unread keys whose value could change the result: not null, false, empty or zero."""
        own = [key for key in self.unread() if "." not in key and self._values[key]]
        nested = [f"{name}.{key}" for name, reader in self._children.items() for key in reader.active_unread()]
        return own + nested

    def ignored(self) -> dict[str, str]:
        """Dotted key -> reason."""
        found = dict(self._ignored)
        for name, reader in self._children.items():
            found.update({f"{name}.{key}": why for key, why in reader.ignored().items()})
        return found

    def _checked(self, key: str, value: Any, kind: type[T]) -> Any:
        right = isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not right:
            raise ConfigError(f"{self.path}: `{key}` is {value!r}, a {kind.__name__} is needed", "Restore the value of the model's release.")
        return value
