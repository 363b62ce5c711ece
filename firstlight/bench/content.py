"""What prompts say: nothing, in a way that two prompts share exactly what the plan says they share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from firstlight.spec.errors import RequestError

LISTED = """
also army belt best bill blow blue boat body bond book boom born both bowl bush busy call calm came card case cast chat chip coal coat
come cool core cost crew crop date days deal dean dear debt deny desk dial diet disc disk dose dual duty earn else even ever exit fact
fail fall fast fate feed fell fine fire firm fish flat flow foot four from fuel full game gave gear gene girl glad goal gold good gray
grew grow half hand hang harm head hear heat held hero high hill hire home hope hour hung hunt hurt into item jump jury kick king knew
lack lady land lane last less like link list load loan logo long look lose luck main make male many mean meat mere mind mine near news
next nice none nose note okay open oral pair palm part pass past peak pick pink play plot port post pull push race rail rank read real
rear rely rent rest rice ride ring rise risk road role roll rose rule rush said salt same seek send sent ship shot show side sign site
skin slip slow sole some song soon sort soul spot step suit sure take tale talk team tech tell tend term test text than that them
thin this thus till time told toll tone took tree trip turn type vice vote wage wait wake walk ward warm wash ways wear week well went
were whom wide will wind wing wire wise wish with wore yard your zone
"""
WORDS = tuple(LISTED.split())
"""Four letters each. Behind a space each is one token of the usual large vocabularies, and five of a byte-level one."""

RING = 1 << 16
NUM_DIGITS = 5


class Content:
    """Pieces of prompts by name: the same name is the same piece, other names differ from the first symbols on.

    A piece begins with its name as digits, lowest first, in an alphabet that the seed shuffles; then it takes whatever comes next.
    """

    def __init__(self, seed: int, ids: range | None, tokens_per_symbol: float = 1.0) -> None:
        self.ids = ids
        self.tokens_per_symbol = tokens_per_symbol
        rng = random.Random(f"content {seed}")
        self._symbols: list[int | str] = rng.sample(ids, min(len(ids), RING)) if ids else rng.sample([f" {word}" for word in WORDS], len(WORDS))
        self._ring = rng.choices(self._symbols, k=2 * RING)

    def length(self, num_tokens: float) -> int:
        """Symbols of a piece of about so many tokens."""
        return max(1, round(num_tokens / self.tokens_per_symbol))

    def piece(self, name: int, num_tokens: float) -> list[int | str]:
        """The symbols of a piece; a shorter one of the same name is its beginning."""
        length = self.length(num_tokens)
        symbols: list[int | str] = []
        rest = name
        for _ in range(min(NUM_DIGITS, length)):
            rest, digit = divmod(rest, len(self._symbols))
            symbols.append(self._symbols[digit])
        begin = name * 7919 % RING
        while len(symbols) < length:
            symbols += self._ring[begin : begin + min(RING, length - len(symbols))]
        return symbols

    def joined(self, pieces: Sequence[tuple[int, float]]) -> str | list[int]:
        """Pieces in a row, as text or as ids."""
        symbols = [symbol for name, num_tokens in pieces for symbol in self.piece(name, num_tokens)]
        return [int(symbol) for symbol in symbols] if self.ids else "".join(map(str, symbols))

    def check(self, name: int, num_tokens: float) -> None:
        """Refuse pieces that are too short to tell so many names apart."""
        length = min(NUM_DIGITS, self.length(num_tokens))
        if name >= len(self._symbols)**length:
            raise RequestError(
                f"shared blocks of {num_tokens:g} tokens are {length} symbols here, too few to tell {name} blocks apart",
                "Raise --scale-lengths, or give a wider range of --token-ids.",
            )
