"""Chat formats: messages to prompt ids, generated tokens to reasoning, content and tool calls. `from firstlight import chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.text.answer import Delta, Message, ToolCall, ToolCallDelta
from firstlight.text.generation import GenerationDefaults
from firstlight.text.k3_format import KimiK3Format
from firstlight.text.reader import Parser, Reader
from firstlight.text.tag_parser import Style
from firstlight.text.template import Template
from firstlight.text.template_format import TemplateFormat
from firstlight.text.template_traits import Traits
from firstlight.text.tokenizer import Tokenizer, load_tokenizer
from firstlight.text.zone import Zone

__all__ = ["ChatFormat", "Delta", "Message", "Parser", "Reader", "ToolCall", "ToolCallDelta", "Zone", "load"]

_STYLES: tuple[Style, ...] = ("hermes", "kimi_k2", "plain")
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADD = "Put the model's chat_template.jinja into the folder, or use prompts of plain text."


class ChatFormat(Protocol):
    """How one family of models is spoken to. `fields` are those of an OpenAI request; what does not concern a prompt or an answer is ignored."""

    name: str
    num_pending: int

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def images(self, messages: Any) -> list[Mapping[str, Any]]:
        """Image parts as the client sent them, in the order of the prompt."""

    def tools(self, messages: Any, tools: Any = None) -> list[Mapping[str, Any]]:
        """Tools of the request, then those that its messages add."""

    def render(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> list[int]:
        """Ids of the prompt; each image is one placeholder. `image_sizes` None: the model sees no images."""

    def render_text(self, messages: Any, tools: Any = None, *, image_sizes: Sequence[tuple[int, int]] | None = None, **fields: Any) -> str:
        """The prompt for people to read."""

    def thinks(self, messages: Any = None, **fields: Any) -> bool:
        """Whether the answer begins inside of thinking."""

    def parser(self, tools: Sequence[Any] | None = None, **fields: Any) -> Parser:
        """Reads one answer from text. `tools` None: not known, calls are returned; none: they are left out.

        Beside the fields of a request: `include_stop` shows the stop string; `tool_call_ids` is "native", counted from 0 in each message,
        or "unique", counted on from `messages`, which also say whether the answer goes on from the last one.
        """

    def reader(self, tools: Sequence[Any] | None = None, **fields: Any) -> Reader:
        """Reads one answer from token ids, with the options of `parser`."""

    def zone(self, tools: Sequence[Any] | None = None, *, messages: Any = None, **fields: Any) -> Zone:
        """Where a grammar can hold in an answer."""


def load(
    name_or_model_path: str | Path, tokenizer: Tokenizer | str | Path | None = None, *, clock: Callable[[], datetime] = datetime.now
) -> ChatFormat:
    """A format by its name (kimi_k3, kimi_k2, hermes, plain), or the one of a model folder.

    `tokenizer`: a tokenizer, its folder or its file; without one, a folder's own is used and a name parses text only.

    Raises: ConfigError when there is no such format, or the folder's template is damaged or unsafe.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = _opened(Path(tokenizer))
    folder = Path(name_or_model_path)
    if not folder.is_dir():
        if name_or_model_path == "kimi_k3":
            return KimiK3Format(tokenizer)
        style = next((style for style in _STYLES if style == name_or_model_path), None)
        if style is None:
            known = ", ".join(("kimi_k3", *_STYLES))
            raise ConfigError(f"there is no chat format and no folder {str(name_or_model_path)!r}", f"Use a model folder, or one of {known}.")
        return TemplateFormat(style, None, tokenizer, traits=Traits(style=style))
    tokenizer = tokenizer or load_tokenizer(folder)
    if _model_type(folder) == "kimi_k3":
        return KimiK3Format(tokenizer)
    return _by_template(folder, tokenizer, clock)


def _opened(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path.parent if path.is_file() else path)
    if tokenizer is None:
        raise ConfigError(f"{path} holds no tokenizer", "Name a folder with tiktoken.model or tokenizer.json.")
    return tokenizer


def _model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return ConfigReader.open(file).take("model_type", str, None) if file.is_file() else None


def _by_template(folder: Path, tokenizer: Tokenizer | None, clock: Callable[[], datetime]) -> ChatFormat:
    file = folder / "tokenizer_config.json"
    settings = ConfigReader.open(file) if file.is_file() else ConfigReader({}, str(file))
    source, where = _template_source(folder, settings)
    names = {name: text for name in _TOKENS if (text := _token_text(settings, name)) is not None}
    defaults = GenerationDefaults.read(folder)
    return TemplateFormat("template", Template(source, where, clock=clock), tokenizer, names=names, end_ids=defaults.eos_ids)


def _template_source(folder: Path, settings: ConfigReader) -> tuple[str, str]:
    """The template and the file that holds it: its own file, else tokenizer_config.json, where several may have names."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8"), str(own)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{own} cannot be read: {error}", "Restore the file from the model's release.") from None
    given = settings.take("chat_template", object, None)
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("tool_use", named.get("default"))
    if not isinstance(given, str):
        raise ConfigError(f"{folder} has no chat template", _ADD)
    return given, settings.path


def _token_text(settings: ConfigReader, name: str) -> str | None:
    value: Any = settings.take(name, object, None)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
