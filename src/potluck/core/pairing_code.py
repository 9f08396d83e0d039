"""One-time pairing codes such as ``7-guitar-harbor``: made, shown, typed and forgiven.

The number is a slot: it finds the right listener when two people pair at once.  The two words are
the password, 18 bits.  That is enough because a guess costs one of three tries: whoever guesses
gets in with a chance of 3 in 262,144.  The whole code is hashed into the key, so a slot mistyped
fails too.  Typing is forgiving: capitals, any separators, and four letters of a word are enough.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from potluck.core.words import WORDS
from potluck.errors import DistributedError

__all__ = ["SLOTS", "InvalidCode", "PairingCode", "new_code", "parse_code"]

SLOTS = 99  # two digits are easy to say
_EXAMPLE = "7-guitar-harbor"
_PREFIX = 3  # letters: fewer would make slips of the finger look like words
_LONGEST = 100  # characters anybody could mean as a code
_CUTOFF = 0.7  # similarity from which a word is worth suggesting: one slip in three letters


class InvalidCode(DistributedError, ValueError):
    """What was typed is not a pairing code; the text says what it could have been."""


@dataclass(frozen=True, slots=True, repr=False)
class PairingCode:
    """A slot and two words; ``str()`` is what a person sees and types."""

    slot: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.slot}-{self.first}-{self.second}"

    def __repr__(self) -> str:
        return f"PairingCode({self.slot}-…)"  # the words are a password: they stay out of logs

    @property
    def password(self) -> bytes:
        """What both sides feed into the key exchange."""
        return str(self).encode()


def new_code(entropy: Callable[[int], bytes], taken: Collection[int] = ()) -> PairingCode:
    """A fresh code; ``taken`` are slots that other listeners in the network show already."""
    free = [slot for slot in range(1, SLOTS + 1) if slot not in taken] or [SLOTS]
    number = int.from_bytes(entropy(8), "big")
    first, number = number % len(WORDS), number // len(WORDS)
    second, number = number % len(WORDS), number // len(WORDS)
    return PairingCode(free[number % len(free)], WORDS[first], WORDS[second])


def parse_code(text: str) -> PairingCode:
    """The code somebody typed.

    >>> str(parse_code(" 7 Guitar HARB "))
    '7-guitar-harbor'
    >>> try:
    ...     parse_code("7-gitar-harbor")
    ... except InvalidCode as error:
    ...     print(error)
    There is no code word "gitar". Did you mean 7-guitar-harbor?
    """
    parts = re.findall(r"[0-9]+|[^\W\d_]+", text[:_LONGEST].casefold())
    numbers = [part for part in parts if part.isdecimal()]
    if len(text) > _LONGEST or len(parts) != len(("slot", "first", "second")) or len(numbers) != 1:
        raise InvalidCode(
            "A pairing code is a number and two words",
            got=text[:_LONGEST],
            hint=f"It looks like {_EXAMPLE}.",
        )
    slot = int(numbers[0])
    if not 1 <= slot <= SLOTS:
        raise InvalidCode(
            f"A pairing code starts with a number from 1 to {SLOTS}, not {slot}", got=slot
        )
    words = [part for part in parts if not part.isdecimal()]
    found = [_candidates(word) for word in words]
    for word, candidates in zip(words, found, strict=True):
        if len(candidates) != 1 or not candidates[0].startswith(word):
            raise _unknown(word, slot, found)
    return PairingCode(slot, found[0][0], found[1][0])


def _candidates(word: str) -> list[str]:
    """The words that may be meant: itself, those it begins, or those it resembles; best first."""
    if word in WORDS:
        return [word]
    begun = [known for known in WORDS if len(word) >= _PREFIX and known.startswith(word)]
    return begun or difflib.get_close_matches(word, WORDS, n=3, cutoff=_CUTOFF)


def _unknown(word: str, slot: int, found: list[list[str]]) -> InvalidCode:
    """The error for a word, with every code that could be meant (at most three for each word)."""
    codes = [f"{slot}-{first}-{second}" for first in found[0][:3] for second in found[1][:3]]
    hint = f"Did you mean {' or '.join(codes[:3])}?" if codes else "Read the code once more."
    return InvalidCode(f'There is no code word "{word}"', got=word, hint=hint)
