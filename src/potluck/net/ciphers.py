"""The ciphers of the data lane, how fast this machine runs them, and which one a pair takes.

Where the processor has AES instructions AES-128-OCB (RFC 7253) wins, at twice the speed of
AES-256-GCM: it has no second pass for the tag, and fewer rounds.  Small boards without them run
ChaCha20-Poly1305 several times faster.  Keys are random, fresh for every connection and direction,
and replaced after some gigabytes, and nonces never repeat; so nobody breaks any of them, and speed
alone decides.  Each side measures itself once, tells the other its figures, and both evaluate
:func:`choose_cipher`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESOCB3, ChaCha20Poly1305

__all__ = [
    "Aead",
    "Cipher",
    "CipherSpeeds",
    "choose_cipher",
    "local_speeds",
    "measure_speeds",
    "new_aead",
    "preferred_cipher",
]

Aead = AESGCM | AESOCB3 | ChaCha20Poly1305

_PIECE = 64 << 10  # bytes: past the fixed cost of a call, and still 1.3 ms on a 50 MB/s board
_ROUNDS = 5  # the best of five; with all ciphers 0.4 ms with AES instructions, ~15 ms without


class Cipher(StrEnum):
    """An authenticated cipher with a 96-bit nonce and a 128-bit tag."""

    AES_256_GCM = "aes-256-gcm"
    CHACHA20_POLY1305 = "chacha20-poly1305"
    AES_128_OCB = "aes-128-ocb"


@dataclass(frozen=True, slots=True)
class CipherSpeeds:
    """Sealing rates of one machine on one core, in whole MB/s; 0 means it cannot run the cipher.

    Integers, so that both sides compute with exactly the figures that were sent.
    """

    aes_256_gcm: int
    chacha20_poly1305: int
    aes_128_ocb: int = 0

    def __post_init__(self) -> None:
        if min(self.aes_256_gcm, self.chacha20_poly1305, self.aes_128_ocb) < 0:
            msg = f"A rate cannot be negative, got {self}"
            raise ValueError(msg)


def new_aead(cipher: Cipher, key: bytes) -> Aead:
    """The cipher's implementation, keyed with as much of 32 bytes as it needs."""
    match cipher:
        case Cipher.AES_256_GCM:
            return AESGCM(key)
        case Cipher.AES_128_OCB:
            return AESOCB3(key[:16])
        case Cipher.CHACHA20_POLY1305:
            return ChaCha20Poly1305(key)


def choose_cipher(mine: CipherSpeeds, theirs: CipherSpeeds) -> Cipher:
    """The cipher that the slower end of the connection runs faster; AES-256-GCM when equal.

    Symmetric: both sides get the same answer from the same figures.

    >>> desktop, board = CipherSpeeds(4000, 2000), CipherSpeeds(80, 250)
    >>> choose_cipher(desktop, board)
    <Cipher.CHACHA20_POLY1305: 'chacha20-poly1305'>
    """
    rates = {
        Cipher.AES_256_GCM: min(mine.aes_256_gcm, theirs.aes_256_gcm),
        Cipher.AES_128_OCB: min(mine.aes_128_ocb, theirs.aes_128_ocb),
        Cipher.CHACHA20_POLY1305: min(mine.chacha20_poly1305, theirs.chacha20_poly1305),
    }
    return max(rates, key=rates.__getitem__)  # the first of equals


def measure_speeds(clock: Callable[[], float] = time.perf_counter) -> CipherSpeeds:
    """Time the ciphers on this machine, now; ``clock`` counts seconds."""
    return CipherSpeeds(
        aes_256_gcm=_measure(Cipher.AES_256_GCM, clock),
        chacha20_poly1305=_measure(Cipher.CHACHA20_POLY1305, clock),
        aes_128_ocb=_measure(Cipher.AES_128_OCB, clock),
    )


@functools.cache
def local_speeds() -> CipherSpeeds:
    """This machine's figures, measured at the first call."""
    return measure_speeds()


def preferred_cipher() -> Cipher:
    """The cipher that is fastest here."""
    return choose_cipher(local_speeds(), local_speeds())


def _measure(cipher: Cipher, clock: Callable[[], float]) -> int:
    """MB/s of the best round: a round can only be disturbed towards slower."""
    try:
        aead = new_aead(cipher, bytes(32))  # a throw-away key that seals nothing but zeros
    except UnsupportedAlgorithm:
        return 0
    payload, out = bytes(_PIECE), bytearray(_PIECE + 16)
    best = float("inf")
    for number in range(_ROUNDS):
        started = clock()
        aead.encrypt_into(number.to_bytes(12, "big"), payload, None, out)
        best = min(best, clock() - started)
    return max(1, int(_PIECE / max(best, 1e-9) / 1e6))
