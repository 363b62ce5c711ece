"""How long prompts and answers are: a fixed number, or a distribution to draw from."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from firstlight.spec.errors import RequestError

FORMS = "128, uniform:64:256, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:MOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts; `low` = `high` is a fixed number, `sigma` makes it lognormal around `median`."""

    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    def draw(self, random: random.Random) -> int:
        """One length, at least `low` and at most `high`."""
        if self.sigma:
            return max(self.low, min(self.high, round(random.lognormvariate(math.log(self.median), self.sigma))))
        return random.randint(self.low, self.high)


def lengths(text: str, option: str) -> Lengths:
    """Read one of the forms that FORMS lists.

    Raises:
        RequestError: the text is none of them, or a number is not above zero.
    """
    kind, *given = text.split(":")
    numbers = [float(part) for part in given if re.fullmatch(r"\d+(\.\d+)?", part)]
    if kind.isdecimal() and kind.isascii() and not given and int(kind) > 0:
        return Lengths(low=int(kind), high=int(kind))
    if len(numbers) == len(given) and all(number > 0 for number in numbers):
        if kind == "uniform" and len(numbers) == 2 and numbers[0] <= numbers[1]:
            return Lengths(low=math.ceil(numbers[0]), high=int(numbers[1]))
        if kind == "lognormal" and len(numbers) in (2, 3):
            most = int(numbers[2]) if len(numbers) == 3 else 1 << 30
            return Lengths(low=1, high=max(1, most), median=numbers[0], sigma=numbers[1])
    raise RequestError(f"{option} is {text!r}", f"Give token counts above 0 as {FORMS}.")
