"""Sealed frames: what the data lane speaks once TLS has authenticated both sides.

Each side contributes 32 random bytes inside TLS; :func:`derive_keys` turns them into a
:class:`Encryptor` for what this side sends and a :class:`Decryptor` for what it receives.  A sealed
frame is the ciphertext followed by a 16-byte tag; the frame's header travels in clear and is
authenticated with it.  Frame numbers are counted on both sides and never sent, so a frame that is
altered, repeated, left out, moved, reflected or taken from another connection fails to open.

Rules of this file: a number is spent before its frame is sealed and never comes back; whatever
goes wrong ends the object for good; a buffer never keeps plaintext that was not authenticated.

Limits.  Numbers are counters, so the limit of 2**32 frames for random nonces does not apply; what
remains is the confidentiality bound of the cipher for each key: an advantage of at most
blocks**2 / 2**129 for AES-GCM, and 6 * blocks**2 / 2**128 for AES-OCB.  Both sides therefore step
to a new key by HKDF after the same :class:`KeyLifetime`: 16 GiB are 2**30 blocks, hence 2**-69 and
2**-65, and a petabyte on one connection (2**16 such keys) adds up to 2**-53 and 2**-49.  An opener
accepts no second try, so a forger has one attempt for each connection: at most 2**-111 with AES-GCM
and 2**-86 with ChaCha20-Poly1305 for the largest piece, and about 2**-128 with AES-OCB.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESOCB3, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from potluck._process import on_fork
from potluck.errors import ChannelClosed, DistributedError, MalformedFrame
from potluck.net.frames import MAX_PIECE

# --------------------------------------------------------------------------------------------------
# The ciphers of the data lane, how fast this machine runs them, and which one a pair takes.
#
# Where the processor has AES instructions AES-128-OCB (RFC 7253) wins, at twice the speed of
# AES-256-GCM: it has no second pass for the tag, and fewer rounds.  Small boards without them run
# ChaCha20-Poly1305 several times faster.  Keys are random, fresh for every connection and
# direction, and replaced after some gigabytes, and nonces never repeat; so nobody breaks any of
# them, and speed alone decides.  Each side measures itself once, tells the other its figures, and
# both evaluate :func:`choose_cipher`.

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


# --------------------------------------------------------------------------------------------------

SECRET_SIZE = 32  # bytes of fresh randomness from each side
TAG_SIZE = 16  # bytes that sealing adds to a payload

_KEY_SIZE = 32  # bytes, for both ciphers
_PREFIX_SIZE = 4  # bytes of the 12-byte nonce; the frame number fills the other 8
_LAST_NUMBER = 2**64 - 1  # 580 000 years at a million frames a second
_PROTOCOL = b"potluck sealing 1"

_CLOSED = "This side closed the sealed channel"
_FORKED = "A sealed channel stays with the process that opened it; this one is its forked child"
_UNVERIFIED = (
    "it was damaged or forged on the way, came twice or out of order, follows a lost one, "
    "or belongs to another connection or epoch"
)
_HINT = "Nothing of it was delivered; close this connection and open a new one."


@dataclass(frozen=True, slots=True)
class KeyLifetime:
    """How much one key seals before both sides step to the next one.

    Both sides must hold the same values; they are bound into the keys, so a difference shows at
    the first frame and not at the first step.
    """

    frames: int = 1 << 24
    """Each frame costs one block beyond its payload; 2**24 of them are lost in 2**30 blocks."""
    max_bytes: int = 1 << 34
    """Payload bytes: 16 GiB, seconds of sealing at full speed, against less than 0.1 ms a step."""

    def __post_init__(self) -> None:
        if self.frames < 1 or self.max_bytes < 1:
            msg = f"A key must be good for at least one frame and one byte, got {self}"
            raise ValueError(msg)


_DEFAULT_LIFETIME = KeyLifetime()


class _Direction:
    """One direction of a connection: its key, its frame numbers, its ratchet.

    There is no lock inside: one thread at a time.
    """

    def __init__(self, chain: bytes, cipher: Cipher, lifetime: KeyLifetime) -> None:
        self._chain = chain
        self._cipher = cipher
        self._lifetime = lifetime
        self._ended: tuple[type[DistributedError], str, str | None] | None = None
        self._frames = 0
        self._generation = -1
        # The number goes on across keys, and `next` on a count is one step that no signal or
        # second thread can split: a bug elsewhere may break the stream but not repeat a nonce.
        self._numbers = itertools.count()
        self._aead: Aead | None = None
        self._step()
        on_fork(self)

    @property
    def cipher(self) -> Cipher:
        """The cipher both sides agreed on."""
        return self._cipher

    @property
    def frames(self) -> int:
        """How many frame numbers are spent, including frames that were then not sent."""
        return self._frames

    @property
    def generation(self) -> int:
        """How many times the key was stepped."""
        return self._generation

    def close(self) -> None:
        """Let go of the key; every later call fails."""
        self._end(ChannelClosed, _CLOSED)

    def become_forked(self) -> None:
        """Runs in a forked child, which must not reuse the numbers of its parent."""
        self._end(ChannelClosed, _FORKED)

    def __repr__(self) -> str:
        state = "" if self._ended is None else ", ended"
        name = type(self).__name__
        return f"<{name} {self._cipher}, frame {self._frames}, key {self._generation}{state}>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: two copies would use the same nonces."""
        msg = f"A {type(self).__name__} cannot be copied: both would use the same nonces"
        raise TypeError(msg)

    def _step(self) -> None:
        """Replace the key by its successor; the old one cannot be computed from the new one."""
        if self._ended is not None:
            self._raise_ended()
        size = _KEY_SIZE + _PREFIX_SIZE + _KEY_SIZE
        okm = HKDFExpand(SHA256(), size, _PROTOCOL + b" step").derive(self._chain)
        self._aead = new_aead(self._cipher, okm[:_KEY_SIZE])
        self._prefix = okm[_KEY_SIZE:-_KEY_SIZE]
        self._chain = okm[-_KEY_SIZE:]
        self._generation += 1
        self._bytes_left = self._lifetime.max_bytes
        self._frames_left = self._lifetime.frames

    def _spend_number(self, size: int) -> tuple[Aead, bytes]:
        """Key and nonce of the next frame, which carries ``size`` payload bytes."""
        if self._frames_left <= 0 or size > self._bytes_left:
            self._step()
        if self._aead is None:
            self._raise_ended()
        self._frames_left -= 1
        self._bytes_left -= size
        number = next(self._numbers)
        if number > _LAST_NUMBER:
            self._end(ChannelClosed, "All 2**64 frame numbers of this connection are used up")
            self._raise_ended()
        self._frames = number + 1
        return self._aead, self._prefix + number.to_bytes(8, "big")

    def _end(self, kind: type[DistributedError], message: str, cause: str | None = None) -> None:
        """Drop the key and remember why; the first reason stands."""
        if self._ended is None:
            self._ended = (kind, message, cause)
        self._aead = None
        self._chain = b""

    def _raise_ended(self) -> NoReturn:
        assert self._ended is not None
        kind, message, cause = self._ended
        hint = _HINT if kind is MalformedFrame else None
        raise kind(message, cause=cause, hint=hint) from None


class Encryptor(_Direction):
    """Seals what this side sends.  One thread at a time; there is no lock inside."""

    def seal_into(
        self, header: bytes | bytearray | memoryview, payload: memoryview, out: memoryview
    ) -> int:
        """Write ciphertext and tag of ``payload`` to the front of ``out``; return their length.

        Views are of bytes (``cast("B")``) and contiguous.  ``out`` may start at the payload's own
        first byte or lie apart from it, nothing in between.  The frame must be sent whole and
        before the next one: a number spent on a frame that was not sent ends the stream.
        """
        size = payload.nbytes
        total = size + TAG_SIZE
        if size > MAX_PIECE:
            msg = f"A piece may have {MAX_PIECE} bytes, not {size}"
            raise ValueError(msg)
        if out.nbytes < total:
            msg = f"A piece of {size} bytes needs room for {total}, not {out.nbytes}"
            raise ValueError(msg)
        aead, nonce = self._spend_number(size)
        target = out if out.nbytes == total else out[:total]
        try:
            return aead.encrypt_into(nonce, payload, header, target)
        except BaseException:
            self._end(ChannelClosed, "A frame could not be sealed, and its number is spent")
            raise

    def seal_record(self, header: bytes, payload: memoryview, out: memoryview) -> memoryview:
        """Write header, ciphertext and tag to the front of ``out``; return that part of it.

        The payload may lie in ``out`` behind the header, or apart from it.
        """
        start = len(header)
        record = out[: start + payload.nbytes + TAG_SIZE]
        record[:start] = header
        self.seal_into(header, payload, record[start:])
        return record


class Decryptor(_Direction):
    """Opens what the other side sealed.  One thread at a time; there is no lock inside."""

    def open_into(
        self, header: bytes | bytearray | memoryview, sealed: memoryview, out: memoryview
    ) -> int:
        """Write the payload of ``sealed`` to the front of ``out``; return its length.

        Views as in :meth:`Encryptor.seal_into`.  The cipher writes before it has verified: do not
        read ``out`` before this returns.  On failure that part of ``out`` is zeroed,
        :class:`~potluck.errors.MalformedFrame` is raised, and every later call fails too.
        """
        size = sealed.nbytes - TAG_SIZE
        if not 0 <= size <= MAX_PIECE or size > out.nbytes:
            cause = f"it has {sealed.nbytes} bytes, of which {TAG_SIZE} are its tag, "
            self._refuse(cause + f"and the payload may have {min(out.nbytes, MAX_PIECE)}")
        aead, nonce = self._spend_number(size)
        target = out if out.nbytes == size else out[:size]
        try:
            return aead.decrypt_into(nonce, sealed, header, target)
        except InvalidTag:
            _wipe(target)
            self._refuse(_UNVERIFIED)
        except BaseException:
            _wipe(target)
            self._end(ChannelClosed, "A frame could not be opened, and its number is spent")
            raise

    def _refuse(self, cause: str) -> NoReturn:
        self._end(MalformedFrame, "A sealed frame cannot be trusted", cause)
        self._raise_ended()


def derive_keys(
    initiator_secret: bytes,
    responder_secret: bytes,
    *,
    context: bytes,
    initiator: bool,
    cipher: Cipher = Cipher.AES_256_GCM,
    lifetime: KeyLifetime = _DEFAULT_LIFETIME,
) -> tuple[Encryptor, Decryptor]:
    """The two ends of this side of a connection, fresh for this connection and direction.

    Both sides pass the two secrets in the same order and the same ``context``
    (:func:`seal_context`); only ``initiator`` differs.
    """
    if len(initiator_secret) != SECRET_SIZE or len(responder_secret) != SECRET_SIZE:
        msg = f"Each side must contribute {SECRET_SIZE} bytes"
        raise ValueError(msg)
    agreed = (cipher.value.encode(), b"%d %d" % (lifetime.frames, lifetime.max_bytes), context)

    def chain(direction: bytes) -> bytes:
        info = _join(direction, *agreed)
        hkdf = HKDF(SHA256(), _KEY_SIZE, salt=_PROTOCOL, info=info)
        return hkdf.derive(initiator_secret + responder_secret)

    out, back = chain(b"initiator to responder"), chain(b"responder to initiator")
    if not initiator:
        out, back = back, out
    return Encryptor(out, cipher, lifetime), Decryptor(back, cipher, lifetime)


def seal_context(
    *, connection: bytes, epoch: int, initiator: str, responder: str, lane: str
) -> bytes:
    """Everything a connection's keys are bound to, encoded so that no two contexts look alike."""
    names = (initiator.encode(), responder.encode(), lane.encode())
    return _join(connection, b"%d" % epoch, *names)


def _join(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _wipe(view: memoryview) -> None:
    """Zero what a cipher may have written; it refuses every other kind of view untouched."""
    if view.format in ("B", "c") and view.c_contiguous and not view.readonly:
        view.cast("B")[:] = bytes(view.nbytes)
