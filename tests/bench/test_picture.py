"""Pictures: well-formed whatever the numbers are, with every request in them."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from array import array
from typing import Any

import pytest

from firstlight.bench.client import Server
from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Record
from firstlight.bench.options import Options
from firstlight.bench.picture import FAILED, MOST_BARS, STREAM, WAIT, Frame, picture
from firstlight.bench.report import Run, report
from firstlight.bench.wire import Fault

SVG = "{http://www.w3.org/2000/svg}"


def drawn(exchanges: list[Exchange], model: str = "m", **options: Any) -> ElementTree.Element:
    """The picture of a run, parsed; all its numbers are finite and inside."""
    record = Record(0.0, max((exchange.end_s for exchange in exchanges), default=0.0), exchanges)
    made = report(Run(options=Options(**options), server=Server(model), record=record, begun="now", cpu_s=0.1))
    text = picture(made, record)
    assert not {"nan", "inf"} & set(text.replace('"', " ").replace(",", " ").split())
    root = ElementTree.fromstring(text)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for item in root.iter(f"{SVG}rect"):
        x, y = float(item.get("x", 0)), float(item.get("y", 0))
        assert 0 <= x <= x + float(item.attrib["width"]) <= width + 1
        assert 0 <= y <= y + float(item.attrib["height"]) <= height + 1
    return root


def some(count: int, fails: int = 0) -> list[Exchange]:
    """Random requests, the first of them failed."""
    rng, found = random.Random(count), []
    for number in range(count):
        due_s = rng.uniform(0, 10)
        marks_s = sorted(due_s + rng.lognormvariate(-2, 1.5) for _ in range(5))
        fault = Fault("disconnect", "x") if number < fails else None
        found.append(Exchange(due_s, due_s, marks_s=array("d", marks_s), end_s=marks_s[-1], num_output=5, fault=fault))
    return found


def bars(root: ElementTree.Element, color: str) -> int:
    """Bars of a colour; those of the legend have no title."""
    return sum(item.get("fill") == color and item.find(f"{SVG}title") is not None for item in root.iter(f"{SVG}rect"))


def test_every_request_has_its_bar() -> None:
    root = drawn(some(60, fails=7))
    assert (53, 53, 7) == (bars(root, WAIT), bars(root, STREAM), bars(root, FAILED))
    assert 5 == len(root.findall(f"{SVG}path"))


@pytest.mark.parametrize(
    "exchanges",
    [[], some(1), some(3, fails=3), [Exchange(0.0, 0.0)], [Exchange(1.0, 1.0, marks_s=array("d", [2.0]), end_s=2.0)] * 3,
     [Exchange(0.0, 0.0, marks_s=array("d", [0.0, 0.0]), end_s=0.0, num_output=3)]],
)
def test_few_and_flat_numbers_are_drawn(exchanges: list[Exchange]) -> None:
    drawn(exchanges)
    drawn(exchanges, rate=2.0)


def test_names_are_escaped() -> None:
    texts = [item.text for item in drawn(some(2), model="<b>&\"'").iter(f"{SVG}text")]
    assert any("<b>&\"'" in (text or "") for text in texts)


def test_very_many_requests_are_thinned_and_it_is_said() -> None:
    root = drawn(some(MOST_BARS + 10))
    assert 0 < bars(root, STREAM) <= MOST_BARS
    assert any("of 4010 shown" in (item.text or "") for item in root.iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.0, 1.0, False), (0.013, 0.0131, False), (0.001, 5.0, True), (1e-6, 1e3, True), (0.0, 86_400.0, False)]
)
def test_axes_have_a_handful_of_ticks_in_order(low: float, high: float, log: bool) -> None:
    frame = Frame(10, 0, 100, 50, low, high, log)
    ticks = frame.ticks()
    places = [frame.x(value) for value in ticks]
    assert 2 <= len(ticks) <= 14
    assert places == sorted(places)
    assert 10 - 1e-6 <= places[0] <= places[-1] <= 110 + 1e-6
