"""Chat templates of checkpoints: programs of others, run in a sandbox that lets them build text and nothing else.

Source: the conventions of transformers (names given to a template, `{% generation %}`, JSON that stays as it is).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firstlight.spec.errors import ConfigError, RequestError

MAX_CHARS = 64 * 1024 * 1024
_MAX_BITS = 4096
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"})
"""Methods whose result can be far longer than what they are given."""
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
_OUTSIDE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
_REPLACE = "Put a template without it into chat_template.jinja of the model folder."


class Template:
    """One template, compiled; `clock` answers `strftime_now`.

    Raises: ConfigError when it has a mistake, or reaches for what a template must not have.
    """

    def __init__(self, source: str, where: str, *, clock: Callable[[], datetime] = datetime.now, max_chars: int = MAX_CHARS) -> None:
        self.source = source
        self._where = where
        environment = _Sandbox(where, max_chars, clock)
        try:
            tree = environment.parse(source)
            _check(where, tree)
            self._compiled = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", "?")
            raise ConfigError(f"{where} cannot be compiled: {error} (line {line})", "Restore the file from the model's release.") from None

    def render(self, **names: Any) -> str:
        """The text that the template makes of these names.

        Raises: RequestError when the template does not accept them, ConfigError when it is caught at what it must not do.
        """
        try:
            return self._compiled.render(**names)
        except SecurityError as error:
            raise ConfigError(f"{self._where} is not safe: {error}", _REPLACE) from None
        except _FAILURES as error:
            raise RequestError(
                f"the chat template does not accept these messages: {error}", "Send the roles and contents that the model's template knows."
            ) from None


def _check(where: str, tree: nodes.Template) -> None:
    """Refuse at once what the sandbox would only refuse when it is reached."""
    for node in tree.find_all((*_OUTSIDE, nodes.Getattr, nodes.Getitem, nodes.NSRef)):
        name = getattr(node, "attr", None)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            name = node.arg.value
        if isinstance(node, _OUTSIDE) or (isinstance(name, str) and name.startswith("__")):
            what = name or type(node).__name__.lower()
            raise ConfigError(f"{where} is not safe: it uses {what} in line {node.lineno}", _REPLACE)


class _Generation(ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind are jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        """A block with a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Joins(CodeGenerator):
    """Compiles `~` to a call that minds the limit."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 finds it by this name
        """Write `environment.joined((a, b, ...))`."""
        self.write("environment.joined((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """What a template may do: build text, within a limit."""

    code_generator_class = _Joins
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, where: str, max_chars: int, clock: Callable[[], datetime]) -> None:
        # Constant folding would run a template before anybody renders it.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols], optimized=False)
        self._where = where
        self._max_chars = max_chars
        self.concat = self.joined  # type: ignore[method-assign]
        self.filters["tojson"] = to_json
        for name in ("center", "format", "indent", "wordwrap", "urlize", "pprint"):
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["dict"] = _make_dict
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def joined(self, pieces: Iterable[Any]) -> str:
        """All pieces as one text."""
        texts = []
        num_chars = 0
        for piece in pieces:
            texts.append(str(piece))
            num_chars += len(texts[-1])
            self._within(num_chars)
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Beyond jinja2's rules: no method that can blow a text up."""
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse a result that is too large before it is made."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
        if operator == "+" and None not in sizes:
            self._within(sum(size or 0 for size in sizes))
        elif operator == "*" and (sizes[0] is None) != (sizes[1] is None):
            count = right if sizes[1] is None else left
            self._within((sizes[0] or sizes[1] or 0) * (count if isinstance(count, int) else 0))
        elif operator in ("*", "**"):
            bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
            if (bits[0] * right if operator == "**" and isinstance(right, int) else sum(bits)) > _MAX_BITS:
                raise ConfigError(f"{self._where} is not safe: it makes a number of more than {_MAX_BITS} bits", _REPLACE)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise ConfigError(f"{self._where} is not safe: it formats with {left!r:.80}", _REPLACE)
        return super().call_binop(context, operator, left, right)

    def _within(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise RequestError(f"the chat template makes more than {self._max_chars:,} characters of these messages", "Send less.")


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON as templates expect it: nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*values: Any, **named: Any) -> dict[Any, Any]:
    """`dict` for templates: a function, where jinja2 has the class itself and with it all that hangs on a class."""
    return dict(*values, **named)


def _refuse(message: str) -> None:
    """What a template calls on messages that it was not made for."""
    raise RequestError(f"the chat template refuses these messages: {message}", "Send messages as the model's template expects them.")
