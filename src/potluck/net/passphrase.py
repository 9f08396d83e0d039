"""From a passphrase to the secret of a namespace, if it is worth it.

Whoever listens to discovery, or connects once, holds a value computed from the secret and can try
passphrases against it at leisure.  Two things stand in the way: every try costs 128 MiB and half a
second (scrypt), and a passphrase worth less than 64 bits is refused.

The estimate finds the cheapest way to write the passphrase down, as somebody who guesses would:
known words, words in general, runs, repetitions, years, and single characters for the rest.  It
errs on the low side; a famous quotation is the one thing it cannot see.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Iterator

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from potluck.errors import DistributedError
from potluck.net.words import KNOWN_DIGITS, KNOWN_WORDS, LITTLE_WORDS, USUAL_PAIRS

__all__ = ["MIN_BITS", "WeakPassphrase", "estimate_bits", "normalise", "stretch"]

MIN_BITS = 64
_CONSIDERED = 256  # characters; what follows adds nothing to the estimate, which takes n**2 steps

# Bits for each kind of piece.
_LITTLE_WORD = 3.0  # one of a few dozen, and often predictable from its neighbours
_KNOWN_WORD = 8.0  # among the first few hundred in every list of passwords
_ANY_WORD = 11.0  # one of 2048; lists for passphrases have more, people's vocabulary in use less
_YEAR = 7.0  # 1900 to 2099, the likely ones first
_RUN = 5.0  # where it starts and which way it goes; its length comes on top
_AGAIN = 3.0  # that something said before is said again; its length comes on top
_LETTER = math.log2(26)
_USUAL_LETTER = 1.5  # after this letter, in a word: English has about 1.5 bits a letter
_DIGIT = math.log2(10)
_SIGN = 4.0  # 32 of them, but people use few
_CHOSEN = 2.0  # that a character occurs at all
_SEPARATOR = 0.5  # the same one between all words
_CAPITAL = 1.0  # also for digits that stand for letters

_SEPARATORS = " -_.,"
_WORDLIKE = 2.7  # bits a letter: words lie near 2, random letters near 4
_WORD_LENGTH = 8  # letters; longer ones count as several words written together

_LONGEST_WORD = max(map(len, KNOWN_WORDS))
_ROWS = ("qwertyuiop", "qwertzuiop", "asdfghjkl", "zxcvbnm", "yxcvbnm", "azertyuiop", "1234567890")
_ROW_STEPS = frozenset(a + b for row in _ROWS for a, b in itertools.pairwise(row))
_PLAIN = str.maketrans("0134578@$!|", "oieastbasil")  # pa55w0rd fools nobody


class WeakPassphrase(DistributedError, ValueError):
    """A passphrase that could be guessed; ``got`` has its worth in bits."""

    def __init__(self, bits: float) -> None:
        super().__init__(
            f"This passphrase is worth about {bits:.0f} bits and could be guessed; "
            f"a namespace needs {MIN_BITS}, because anybody on the network can try at leisure",
            expected=MIN_BITS,
            got=bits,
            hint="Take six or more random words that make no sentence, or do without a passphrase: "
            "`potluck pair` joins two machines with a short one-time code.",
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
    text = normalise(passphrase)[:_CONSIDERED]
    return min(_cheapest_reading(text), _variety_bound(text))


def _cheapest_reading(text: str) -> float:
    """The sum of bits of the cheapest pieces that together make up the text."""
    pieces: list[list[tuple[int, float]]] = [[] for _ in text]  # by their last character
    for start, end, bits in _pieces(text):
        pieces[end - 1].append((start, bits))
    cheapest = [0.0]  # for the first n characters
    for ending in pieces:
        cheapest.append(min(cheapest[start] + bits for start, bits in ending))
    return cheapest[-1]


def _pieces(text: str) -> Iterator[tuple[int, int, float]]:
    """Every stretch of the text that could be guessed as one piece: start, end, bits."""
    for index in range(len(text)):
        yield index, index + 1, _character(text, index)
    yield from _words(text)
    yield from _runs(text.lower())
    yield from _repetitions(text.lower())
    yield from _constants(text)


def _character(text: str, index: int) -> float:
    character = text[index]
    if character in _SEPARATORS:
        return _SEPARATOR
    if character.isdecimal():
        return _DIGIT
    if not character.isalpha():
        return _SIGN
    pair = text[index - 1 : index + 1].lower() if index else ""
    bits = _USUAL_LETTER if pair in USUAL_PAIRS else _LETTER
    return bits + _CAPITAL * character.isupper()


def _words(text: str) -> Iterator[tuple[int, int, float]]:
    """Known words and numbers anywhere, and whatever looks like words between two separators."""
    for start in range(len(text)):
        for end in range(start + 1, min(start + _LONGEST_WORD, len(text)) + 1):
            bits = _known(text[start:end])
            if bits is not None:
                yield start, end, bits
    start = 0
    for is_word, group in itertools.groupby(text, str.isalpha):
        word = "".join(group)
        letters = sum(_character(word.lower(), index) for index in range(len(word)))
        if is_word and letters < _WORDLIKE * len(word):
            count = -(-len(word) // _WORD_LENGTH)
            yield start, start + len(word), _ANY_WORD * count + _CAPITAL * (word != word.lower())
        start += len(word)


def _known(piece: str) -> float | None:
    plain = piece.lower().translate(_PLAIN)
    extra = _CAPITAL * (piece != piece.lower()) + _CAPITAL * (plain != piece.lower())
    if plain in LITTLE_WORDS:
        return _LITTLE_WORD + extra
    if plain in KNOWN_WORDS:
        return _KNOWN_WORD + extra
    if len(piece) == 4 and piece.isdecimal() and piece[:2] in {"19", "20"}:  # noqa: PLR2004
        return _YEAR
    return None


def _runs(text: str) -> Iterator[tuple[int, int, float]]:
    """aaaa, 1234, fedc, asdf: three or more characters in the same step."""
    steps = [_steps(a, b) for a, b in itertools.pairwise(text)]
    for start in range(len(steps)):
        going = steps[start]
        for end in range(start + 1, len(steps)):
            going = going & steps[end]
            if not going:
                break
            yield start, end + 2, _RUN + math.log2(end + 2 - start)


def _steps(first: str, second: str) -> frozenset[str]:
    distance = ord(second) - ord(first)
    return frozenset(
        name
        for name, holds in (
            (f"by {distance}", abs(distance) <= 1),
            ("along a row", first + second in _ROW_STEPS),
            ("back along a row", second + first in _ROW_STEPS),
        )
        if holds
    )


def _repetitions(text: str) -> Iterator[tuple[int, int, float]]:
    """What was said before, forwards or backwards, at least two characters of it."""
    for start in range(1, len(text)):
        before = text[:start]
        for end in range(start + 2, len(text) + 1):
            piece = text[start:end]
            if piece not in before and piece[::-1] not in before:
                break
            yield start, end, _AGAIN + math.log2(end - start)


def _constants(text: str) -> Iterator[tuple[int, int, float]]:
    """Digits that people know by heart, six or more of them."""
    for start in range(len(text)):
        for end in range(start + 6, len(text) + 1):
            if not any(text[start:end] in digits for digits in KNOWN_DIGITS):
                break
            yield start, end, _KNOWN_WORD + math.log2(end - start)


def _variety_bound(text: str) -> float:
    """Few different characters carry little, however cleverly they are arranged."""
    variety = len(set(text.lower()))
    return len(text) * math.log2(max(variety, 1)) + variety * _CHOSEN
