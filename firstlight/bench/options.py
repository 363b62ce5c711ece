"""What a run of `bench serve` may be told: the fields are the options of the command and the settings in its report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from firstlight.bench.lengths import Lengths, lengths
from firstlight.spec.errors import RequestError

ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}
ARRIVALS = ("poisson", "constant")
LIMITS = ("ttft", "tpot", "e2e")
USUAL_REQUESTS, USUAL_CONCURRENCY = 32, 4
LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run: which server, what is asked, when, and what becomes of the numbers."""

    url: Annotated[str, typer.Option(help="Where the API begins, /v1 included.")] = "http://127.0.0.1:8000/v1"
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Sent as a bearer token, never written; others on this machine see it.")] = None
    model: Annotated[str | None, typer.Option(help="Left out: the first that the server lists.")] = None
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions"
    concurrency: Annotated[int | None, typer.Option(help=f"Closed loop: so many clients, each waiting for its answer; {USUAL_CONCURRENCY} unless "
                                                         "--rate or --trace says when to ask.", show_default=False)] = None
    rate: Annotated[float | None, typer.Option(help="Open loop: arrivals per second, whatever the server does.")] = None
    arrivals: Annotated[str, typer.Option(help="Gaps of the open loop: poisson or constant.")] = "poisson"
    requests: Annotated[int | None, typer.Option("--requests", "--limit", help=f"Requests in all; {USUAL_REQUESTS} unless --duration or --trace ends "
                                                                               "the run.", show_default=False)] = None
    duration: Annotated[float | None, typer.Option(metavar="SECONDS", help="Ask nothing new after this; answers under way are waited for.")] = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay lengths, shared prefixes and times of a trace in Mooncake's format, "
                                                                    ".jsonl or .jsonl.gz.")] = None
    speed: Annotated[float, typer.Option(help="Replay the times of the trace so many times as fast.")] = 1.0
    scale_lengths: Annotated[float, typer.Option(metavar="FACTOR", help="Multiply the lengths of the trace, for small models.")] = 1.0
    longest: Annotated[int | None, typer.Option(metavar="TOKENS", help="Leave out requests of the trace with longer prompts (after scaling).")] = None
    max_output: Annotated[int | None, typer.Option(metavar="TOKENS", help="Ask for no more tokens than this in any answer.")] = None
    input_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help=f"New prompt tokens of each request: {LENGTHS}.")] = "128"
    output_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens of each answer, in the same forms.")] = "32"
    prefix_tokens: Annotated[int, typer.Option(help="Tokens in front of each prompt that it shares with others.")] = 0
    prefix_groups: Annotated[int, typer.Option(help="How many different shared prefixes there are, in turn.")] = 1
    turns: Annotated[int, typer.Option(help="Requests of one conversation; each repeats what was said before it.")] = 1
    think: Annotated[float, typer.Option(metavar="SECONDS", help="Pause between an answer and the next turn.")] = 0.0
    token_ids: Annotated[str | None, typer.Option(metavar="LOW:HIGH", help="Send prompts as ids from this range instead of words.")] = None
    temperature: Annotated[float, typer.Option(help="Of every request.")] = 0.0
    ignore_eos: Annotated[bool, typer.Option(help="Ask servers that know it to go on after an end token.")] = True
    body: Annotated[str, typer.Option(metavar="JSON", help="An object whose fields are added to every request.")] = "{}"
    seed: Annotated[int, typer.Option(help="Of contents, lengths and arrivals; another seed is another text for the server's cache.")] = 0
    warmup: Annotated[int, typer.Option(help="Requests before the measured ones, with contents of their own.")] = 2
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Of one request, from its start to its last byte.")] = 600.0
    retries: Annotated[int, typer.Option(help="Ask again, as Retry-After says, after 429 and 503; each is counted.")] = 0
    slo: Annotated[str, typer.Option(metavar="LIMITS", help="Limits in seconds of a good request, as in ttft=0.5,tpot=0.05,e2e=10.")] = ""
    details: Annotated[bool, typer.Option("--details", help="One line per request in the report.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="The report as one JSON object on standard output.")] = False
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The same report in a file.")] = None
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Distributions and a timeline as one SVG file.")] = None

    def __post_init__(self) -> None:
        found = list(self._problems())
        if found:
            raise RequestError("; ".join(found), "See `firstlight bench serve --help`.")

    def _problems(self) -> Iterator[str]:
        """Everything that cannot be, each as a fact with its value."""
        least = {"concurrency": 1, "requests": 1, "max_output": 1, "longest": 1, "prefix_groups": 1, "turns": 1, "prefix_tokens": 0, "warmup": 0,
                 "retries": 0, "think": 0, "temperature": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value < math.inf:
                yield f"--{name.replace('_', '-')} is {value}, less than {lowest} or endless"
        for name in ("rate", "duration", "speed", "scale_lengths", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                yield f"--{name.replace('_', '-')} is {value}, not above 0"
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            yield f"--url is {self.url!r}, not an address that begins with http:// or https://"
        if "@" in urlsplit(self.url).netloc:
            yield "--url holds a name or password, which would stand in the report: a key goes into --api-key"
        if self.endpoint not in ENDPOINTS:
            yield f"--endpoint is {self.endpoint!r}, neither of {' and '.join(ENDPOINTS)}"
        if self.arrivals not in ARRIVALS:
            yield f"--arrivals is {self.arrivals!r}, neither of {' and '.join(ARRIVALS)}"
        if self.concurrency is not None and self.rate is not None:
            yield "both --concurrency (wait for answers) and --rate (do not wait) are given"
        if self.token_ids is not None and (self.endpoint == "chat" or self.turns > 1):
            yield "--token-ids is given, but chat and further turns are made of text"
        if self.trace is not None and (self.turns > 1 or self.prefix_tokens):
            yield "--trace is given, which says itself what is shared: --turns and --prefix-tokens do not go with it"

    @property
    def closed(self) -> bool:
        """Clients that wait for their answers, rather than arrivals that do not."""
        return self.concurrency is not None or (self.rate is None and self.trace is None)

    @property
    def num_clients(self) -> int:
        """Of the closed loop."""
        return self.concurrency or USUAL_CONCURRENCY

    @property
    def num_requests(self) -> int | None:
        """The most that are sent; None: until the duration or the trace is over."""
        return self.requests or (None if self.duration or self.trace else USUAL_REQUESTS)

    @property
    def inputs(self) -> Lengths:
        """Of the new part of each prompt."""
        return lengths(self.input_tokens, "--input-tokens")

    @property
    def outputs(self) -> Lengths:
        """Of each answer."""
        return lengths(self.output_tokens, "--output-tokens")

    @property
    def id_range(self) -> range | None:
        """Ids of token prompts; None: prompts are words."""
        if self.token_ids is None:
            return None
        match = re.fullmatch(r"(\d+):(\d+)", self.token_ids, re.ASCII)
        found = range(int(match[1]), int(match[2])) if match else range(0)
        if len(found) < 2:
            raise RequestError(f"--token-ids is {self.token_ids!r}", "Give two ids with a colon, the second not included, as in 1000:30000.")
        return found

    @property
    def fields(self) -> dict[str, Any]:
        """What --body adds to every request."""
        try:
            found = json.loads(self.body)
        except json.JSONDecodeError as error:
            raise RequestError(f"--body is not JSON at character {error.pos}: {self.body!r}", "Give an object, as in '{\"top_p\": 0.9}'.") from None
        if not isinstance(found, dict):
            raise RequestError(f"--body is {self.body!r}, not an object", "Give an object, as in '{\"top_p\": 0.9}'.")
        return found

    @property
    def limits(self) -> dict[str, float]:
        """Name -> seconds of --slo."""
        found = {}
        for part in filter(None, self.slo.split(",")):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d*\.?\d+)\s*", part, re.ASCII)
            if match is None or match[1] not in LIMITS:
                raise RequestError(f"--slo holds {part!r}", f"Give {', '.join(LIMITS)} in seconds, as in ttft=0.5,tpot=0.05.")
            found[match[1]] = float(match[2])
        return found
