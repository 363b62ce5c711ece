"""`firstlight bench`: the commands of the room; their options are the fields of a dataclass each."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from firstlight.bench.options import Options

INTERRUPTED = 130

bench = typer.Typer(help="Measure how fast something is, with every number defined.")


def fields_of(settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as its options."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        command.__annotations__ = get_type_hints(settings, include_extras=True)
        named = inspect.signature(settings).parameters.items()
        parameters = [parameter.replace(annotation=command.__annotations__[name]) for name, parameter in named]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return give


@bench.callback()
def about() -> None:
    """Measure how fast something is, with every number defined."""


@bench.command()
@fields_of(Options)
def serve(**given: Any) -> None:
    """Load a server that speaks OpenAI's protocol and report latencies, throughput, errors and the tool's own cost."""
    from firstlight.bench.picture import picture
    from firstlight.bench.serve import measure
    from firstlight.bench.terminal import progress, show

    options = Options(**given)
    for path in (options.out, options.picture):
        if path is not None:
            path.touch()
    with progress(sys.stderr, options.num_requests) as seen:
        made, record = measure(options, seen)
    text = json.dumps(made, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    if options.picture is not None:
        options.picture.write_text(picture(made, record), encoding="utf-8")
    if options.as_json:
        sys.stdout.write(text)
    else:
        show(made, sys.stdout)
    raise typer.Exit(INTERRUPTED if record.interrupted else int(made["requests"]["failed"] > 0 or not made["requests"]["sent"]))
