"""From a passphrase to the secret of a namespace, if it is worth it.

Whoever listens to discovery, or connects once, holds a value computed from the secret and can try
passphrases against it at leisure.  Two things stand in the way: every try costs 128 MiB and half a
second (scrypt), and a passphrase worth less than 64 bits is refused.

The worth is estimated by zxcvbn, which knows words, names, dates, patterns of keyboards,
repetitions and the passwords that people use.  It takes the words of a passphrase for independent
of each other.  Those of a quotation or a line of a song are not: a text with as many small words as
a sentence has is worth no more than a place in a long list of sentences.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from potluck.errors import DistributedError
from potluck.net.words import KNOWN_DIGITS, LITTLE_WORDS

__all__ = ["MIN_BITS", "WeakPassphrase", "estimate_bits", "normalise", "stretch"]

MIN_BITS = 64
_CONSIDERED = 100  # characters; what follows adds nothing to the estimate, which takes n**2 steps
_AGAIN = 3.0  # bits: that something said before is said again
_CHOSEN = 2.0  # bits: that a character occurs at all
_SENTENCE = 36.0  # bits: all lines of all books and songs are fewer than 2**36
_SMALL_WORD = 250  # the rank of a word in use; half of all that is said is made of these
_SENTENCES_HAVE = 0.3  # of their words, at least; lists for passphrases hardly have any
_LONGEST_WORD = 20  # letters
_BITS_OF_LETTER = 3.0  # in a sentence; letters drawn by chance are worth 4.7
_KNOWN_FROM = 8  # digits
_SEPARATORS = re.compile(r"[\s\-_.,;:!?'\"]+")


class WeakPassphrase(DistributedError, ValueError):
    """A passphrase that could be guessed; ``got`` has its worth in bits."""

    def __init__(self, bits: float) -> None:
        super().__init__(
            f"This passphrase is worth about {bits:.0f} bits and could be guessed; "
            f"a namespace needs {MIN_BITS}, because anybody on the network can try at leisure",
            expected=MIN_BITS,
            got=bits,
            hint="Take six or more random words that make no sentence, or 24 random characters. "
            "Or do without one: `potluck pair` joins two machines with a short one-time code.",
        )


def normalise(passphrase: str) -> str:
    """One spelling for what looks the same: composed characters, single spaces, trimmed."""
    return " ".join(unicodedata.normalize("NFKC", passphrase).split())


def stretch(passphrase: str, salt: bytes) -> bytes:
    """32 bytes that take 128 MiB and about half a second to compute; the same everywhere.

    n = 2**17, r = 8 is the strongest of the commonly advised settings that a board with 1 GiB of
    memory can still run.  It adds about 17 bits to the attacker's bill, on top of the 64.
    """
    kdf = Scrypt(salt=salt, length=32, n=2**17, r=8, p=1)
    return kdf.derive(normalise(passphrase).encode())


def estimate_bits(passphrase: str) -> float:
    """How many bits a passphrase is worth to somebody who knows how people choose them.

    >>> estimate_bits("Pa55word123") < 20 < 64 < estimate_bits("k9Fw2-xQv7r-Zp4Lm-t8Bc")
    True
    """
    from zxcvbn import zxcvbn  # large lists of words, so only when a passphrase is checked

    text = normalise(passphrase)[:_CONSIDERED]
    words = [word for word in _SEPARATORS.split(text) if word]
    if not words:
        return 0.0
    # Between words a separator is no secret; in what was drawn by chance it is.
    compact = "".join(words) if all(map(str.isalpha, words)) else text.replace(" ", "")
    estimates = [zxcvbn(each, max_length=_CONSIDERED) for each in {text, compact}]
    return min(
        *(math.log2(each["guesses"]) for each in estimates),
        *(_sum_of_pieces(each["sequence"]) for each in estimates),
        _as_sentence(words),
        _as_sentence(_parted(compact)),
        _as_digits(compact),
        _variety_bound(text),
    )


def _bits(piece: dict[str, Any]) -> float:
    return math.log2(max(1, piece["guesses"]))


def _sum_of_pieces(sequence: list[dict[str, Any]]) -> float:
    """What the pieces are worth one by one; zxcvbn adds that nobody knows how many there are."""
    seen: set[str] = set()
    bits = 0.0
    for piece in sequence:
        token = piece["token"].lower()
        bits += _AGAIN if token in seen else _bits(piece)
        seen.add(token)
    return bits


def _as_sentence(words: list[str]) -> float:
    """What a text is worth whose words follow from each other, and what is not a word beside."""
    from zxcvbn import zxcvbn
    from zxcvbn.matching import RANKED_DICTIONARIES

    ranks = RANKED_DICTIONARIES["english_wikipedia"], RANKED_DICTIONARIES["us_tv_and_film"]
    plain = [word.lower() for word in words if word.isalpha()]
    small = [
        word
        for word in plain
        if word in LITTLE_WORDS or any(r.get(word, _SMALL_WORD) < _SMALL_WORD for r in ranks)
    ]
    if len(plain) < 4 or len(small) < _SENTENCES_HAVE * len(plain):  # noqa: PLR2004 - words
        return math.inf
    others = "".join(word for word in words if not word.isalpha())
    return _SENTENCE + (math.log2(zxcvbn(others)["guesses"]) if others else 0.0)


def _parted(text: str) -> list[str]:
    """The words of a sentence without spaces; none if words hardly say its letters any shorter."""
    from zxcvbn.matching import RANKED_DICTIONARIES

    text = text.lower()
    if not text.isalpha():
        return []
    ranks = RANKED_DICTIONARIES["english_wikipedia"], RANKED_DICTIONARIES["us_tv_and_film"]
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        options = [(math.inf, [""])]
        for start in range(max(0, end - _LONGEST_WORD), end):
            word = text[start:end]
            rank = min(each.get(word, math.inf) for each in ranks)
            if rank < math.inf and (len(word) > 1 or word in "ai"):
                bits, before = best[start]
                options.append((bits + math.log2(rank + 1), [*before, word]))
        best.append(min(options))
    bits, words = best[-1]
    return words if bits < _BITS_OF_LETTER * len(text) else []


def _as_digits(text: str) -> float:
    """Few bits for digits that people know by heart, else no bound."""
    digits = "".join(letter for letter in text if letter.isdecimal())
    is_known = any(digits[:_KNOWN_FROM] in known for known in KNOWN_DIGITS)
    is_all = len(digits) >= _KNOWN_FROM and len(text) - len(digits) <= 2  # noqa: PLR2004 - 3.14
    return _AGAIN * _KNOWN_FROM if is_known and is_all else math.inf


def _variety_bound(text: str) -> float:
    """Few different characters carry little, however they are arranged."""
    variety = len(set(text.lower()))
    return len(text) * math.log2(variety) + _CHOSEN * variety
