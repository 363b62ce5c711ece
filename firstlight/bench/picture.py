"""A run as one SVG file that needs nothing else: how latencies are distributed, and what was under way when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Record
from firstlight.bench.report import asked_when, gaps, percentile

WIDTH, MARGIN, GAP = 1040, 30, 24
PANEL_HEIGHT, LANES_HEIGHT, RATE_HEIGHT = 190, 220, 110
INK, FAINT, GRID = "#1b2733", "#64748b", "#e2e8f0"
WAIT, STREAM, FAILED, CURVE = "#f2b134", "#2b6cb0", "#c53030", "#2b6cb0"
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Gap between chunks", "e2e": "End to end"}
MOST_BARS = 4000
MOST_POINTS = 300
NUM_BINS = 120
LOG_SPAN = 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A rectangle with an axis of values along its lower edge."""

    left: float
    top: float
    width: float
    height: float
    low: float
    high: float
    log: bool = False

    def x(self, value: float) -> float:
        """Where a value is."""
        if self.log:
            return self.left + self.width * math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.left + self.width * (value - self.low) / (self.high - self.low)

    def y(self, share: float) -> float:
        """Where a share of the height is, from below."""
        return self.top + self.height * (1 - share)

    def ticks(self) -> list[float]:
        """Values to write at the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1000 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
        else:
            rough = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(rough))
            step = power * next(size for size in (1, 2, 5, 10) if size * power >= rough)
            found = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in found if self.low <= value <= self.high]


def picture(made: Mapping[str, Any], record: Record) -> str:
    """The whole file."""
    sound = [exchange for exchange in record.exchanges if exchange.fault is None]
    values: dict[str, Sequence[float | None]] = {
        "ttft": [exchange.ttft_s for exchange in sound], "tpot": [exchange.tpot_s for exchange in sound],
        "itl": [gap for exchange in sound for gap in gaps(exchange)], "e2e": [exchange.e2e_s for exchange in sound],
    }
    lines, top = list(_heading(made)), 96.0
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    for number, (name, found) in enumerate(values.items()):
        left, above = MARGIN + (number % 2) * (width + GAP), top + (number // 2) * (PANEL_HEIGHT + 58)
        lines += _distribution(TITLES[name], sorted(value for value in found if value is not None), left, above, width)
    top += 2 * (PANEL_HEIGHT + 58) + 6
    span_s = max(record.end_s - record.begun_s, 1e-9)
    lines += _lanes(record, Frame(MARGIN, top, WIDTH - 2 * MARGIN, LANES_HEIGHT, 0.0, span_s))
    top += LANES_HEIGHT + 44
    lines += _rate(record, Frame(MARGIN, top, WIDTH - 2 * MARGIN, RATE_HEIGHT, 0.0, span_s))
    height = top + RATE_HEIGHT + 34
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>', *lines, "</svg>", "",
    ])


def _heading(made: Mapping[str, Any]) -> Iterator[str]:
    asked, settings, speed = made["requests"], made["settings"], made["throughput"]
    yield _text(MARGIN, 34, f"{made['server']['model']} - {asked_when(made)}", size=20)
    yield _text(MARGIN, 54, f"{made['server']['url']}, {made['begun']}, seed {settings['seed']}, asked from {made['tool']['machine']['cpu']}", FAINT)
    yield _text(
        MARGIN, 72,
        f"{asked['succeeded']} of {asked['sent']} requests in {made['duration_s']:.2f} s: {speed['requests_per_s']:.2f} requests/s, "
        f"{speed['output_tokens_per_s']:.1f} output tokens/s, {speed['input_tokens_per_s']:.1f} input tokens/s", FAINT,
    )


def _distribution(title: str, ordered: Sequence[float], left: float, top: float, width: float) -> Iterator[str]:
    """The share of values up to each value, with the median and the 99th percentile written beside it."""
    yield _text(left, top + 12, title, size=13)
    if not ordered:
        yield _text(left, top + 40, "no values", FAINT)
        return
    low, high = ordered[0], ordered[-1]
    if high <= low:
        low, high = low * 0.9, high * 1.1 or 1.0
    frame = Frame(left, top + 22, width, PANEL_HEIGHT - 22, low, high, log=low > 0 and high / low > LOG_SPAN)
    yield from _axis(frame, _seconds)
    for share in (0.5, 0.9, 0.99):
        yield f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{frame.y(share):.1f}" y2="{frame.y(share):.1f}" stroke="{GRID}"/>'
        yield _text(left + 3, frame.y(share) + 10, f"{share:.0%}", FAINT, size=8)
    points = [(frame.x(low), frame.y(0))]
    for number in range(min(len(ordered), MOST_POINTS)):
        place = (number + 1) * len(ordered) // min(len(ordered), MOST_POINTS)
        points += [(frame.x(ordered[place - 1]), points[-1][1]), (frame.x(ordered[place - 1]), frame.y(place / len(ordered)))]
    yield _path(points, CURVE)
    said = ", ".join(f"p{percent} {_seconds(percentile(ordered, percent))}" for percent in (50, 90, 99))
    yield _text(left + width, top + 12, f"{said}, n {len(ordered)}", FAINT, anchor="end")


def _lanes(record: Record, frame: Frame) -> Iterator[str]:
    """Every request as a bar: waiting, streaming, or failed; a lane is taken again once it is free."""
    exchanges = sorted(record.exchanges, key=lambda exchange: exchange.begun_s)
    shown = exchanges[:: -(-len(exchanges) // MOST_BARS) or 1]
    free_s: list[float] = []
    placed: list[tuple[int, Exchange]] = []
    for exchange in shown:
        lane = next((number for number, end_s in enumerate(free_s) if end_s <= exchange.begun_s), len(free_s))
        free_s[lane:lane + 1] = [exchange.end_s]
        placed.append((lane, exchange))
    part = "" if len(shown) == len(exchanges) else f" ({len(shown)} of {len(exchanges)} shown)"
    yield _text(frame.left, frame.top - 8, f"Requests under way{part}", size=13)
    for place, (color, name) in enumerate(((WAIT, "waiting for the first token"), (STREAM, "streaming"), (FAILED, "failed"))):
        x = frame.left + frame.width - 310 + (0, 160, 240)[place]
        yield f'<rect x="{x:.1f}" y="{frame.top - 17:.1f}" width="10" height="10" fill="{color}"/>'
        yield _text(x + 14, frame.top - 8, name, FAINT)
    yield from _axis(frame, lambda value: f"{value:g} s")
    height = frame.height / max(len(free_s), 1)
    for lane, exchange in placed:
        yield from _bar(exchange, record.begun_s, frame, frame.top + lane * height, min(height * 0.85, 16))


def _bar(exchange: Exchange, begun_s: float, frame: Frame, y: float, height: float) -> Iterator[str]:
    begin, end = exchange.begun_s - begun_s, exchange.end_s - begun_s
    first = exchange.marks_s[0] - begun_s if exchange.marks_s else end
    parts = [(begin, end, FAILED)] if exchange.fault else [(begin, first, WAIT), (first, end, STREAM)]
    went = f"{exchange.num_input} in, {exchange.num_tokens} out, first token after {_seconds(exchange.ttft_s or 0)}"
    said = exchange.fault.kind if exchange.fault else went
    for left, right, color in parts:
        width = max(frame.x(right) - frame.x(left), 0.4)
        yield (f'<rect x="{frame.x(left):.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}">'
               f"<title>{escape(said)}</title></rect>")


def _rate(record: Record, frame: Frame) -> Iterator[str]:
    """Tokens of answers per second, in bins; those of failed requests came too."""
    bins = [0.0] * NUM_BINS
    for exchange in record.exchanges:
        each = exchange.num_tokens / len(exchange.marks_s) if exchange.marks_s else 0.0
        for number, at_s in enumerate(exchange.marks_s):
            count = exchange.counts[number] - (exchange.counts[number - 1] if number else 0) if number < len(exchange.counts) else each
            place = int((at_s - record.begun_s) / frame.high * NUM_BINS)
            bins[max(0, min(place, NUM_BINS - 1))] += count
    rates = [count / (frame.high / NUM_BINS) for count in bins]
    most = max(rates) or 1.0
    yield _text(frame.left, frame.top - 8, f"Output tokens per second (most {most:.0f})", size=13)
    yield from _axis(frame, lambda value: f"{value:g} s")
    points = [(frame.left, frame.y(0))]
    for number, rate in enumerate(rates):
        points += [(frame.left + frame.width * edge / NUM_BINS, frame.y(rate / most)) for edge in (number, number + 1)]
    yield _path([*points, (frame.left + frame.width, frame.y(0))], STREAM, fill="#2b6cb033")


def _axis(frame: Frame, said: Callable[[float], str]) -> Iterator[str]:
    bottom = frame.top + frame.height
    yield f'<line x1="{frame.left:.1f}" x2="{frame.left + frame.width:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}" stroke="{FAINT}"/>'
    for value in frame.ticks():
        x = frame.x(value)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top:.1f}" y2="{bottom + 4:.1f}" stroke="{GRID}"/>'
        yield _text(x, bottom + 16, said(value), FAINT, anchor="middle")


def _path(points: Sequence[tuple[float, float]], color: str, fill: str = "none") -> str:
    steps = " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return f'<path d="M{steps}" fill="{fill}" stroke="{color}" stroke-width="1.6"/>'


def _text(x: float, y: float, text: str, color: str = INK, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _seconds(value: float) -> str:
    """A time with the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"
