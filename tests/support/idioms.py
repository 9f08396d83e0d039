"""Idioms that no user reads: they sound translated, and their plain English is shorter.

``idioms(text)`` finds them in a sentence, a docstring or a page, also across the end of a line.
"""

from __future__ import annotations

import re
from typing import Final

REFUSED: Final = {
    r"(?<!there )\bis no (?!longer\b|more\b|less\b|need\b)": "X is not a Y, X must be a Y",
    r"\bso many\b": "N, this many",
    r"\bwhoever\b": "the machine that, any machine that",
    r"\bsomebody\b": "a machine, a peer, another user",
    r"\bnobody\b": "no machine, no peer, no other user",
    r"\b(?:go|goes|going|went) by\b": "uses, is called",
    r"\b(?:go|goes|went|gone) on\b": "continue, resume",
    r"\b(?:say|says|said|saying) goodbye\b": "left, its script ended",
}
"""What is refused, as a pattern, and what to write instead."""

_PATTERN: Final = re.compile("|".join(f"(?:{each})" for each in REFUSED), re.IGNORECASE)
_CODE: Final = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)


def idioms(text: str) -> list[str]:
    r"""Every refused idiom of a text, with the words around it; names in backquotes do not count.

    >>> idioms("There is no file. `nobody` is a user of Unix.")
    []
    >>> idioms("RANK='x' is no whole number; so\nmany are.")
    ["RANK='x' is no whole number; so man", "'x' is no whole number; so many are."]
    """
    plain = " ".join(_CODE.sub("``", text).split())
    return [
        plain[max(0, found.start() - 24) : found.end() + 20] for found in _PATTERN.finditer(plain)
    ]
