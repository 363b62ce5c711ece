"""Sizes as people write them."""

from __future__ import annotations

import re

from firstlight.spec.errors import RequestError


def num_bytes(text: str, name: str) -> int:
    """2GiB, 512M and 1000000 are sizes; letters count in powers of 1024. Raises: RequestError, which names the option."""
    match = re.fullmatch(r"(\d+)\s*(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or int(match.group(1)) == 0:
        raise RequestError(f"{name} is {text!r}", "Give a size above 0, as in 2GiB.")
    power = " KMGT".index((match.group(2) or " ").upper())
    return int(match.group(1)) << 10 * power
