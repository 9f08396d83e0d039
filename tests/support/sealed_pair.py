"""Both ends of a sealed connection, and frames that check themselves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from potluck.errors import MalformedFrame
from potluck.net import aead
from potluck.net.aead import (
    SECRET_SIZE,
    TAG_SIZE,
    Aead,
    Cipher,
    Decryptor,
    Encryptor,
    KeyLifetime,
    derive_keys,
    new_aead,
    seal_context,
)
from potluck.net.memory import pipe
from potluck.net.records import BufferedStream, buffered

HEADER = b"PL header"
PAYLOAD = b"a gradient of great value"
MARK = 0xA5  # what a buffer holds before anything is opened into it


@dataclass
class Pair:
    """Both ends of one connection."""

    a_seals: Encryptor
    a_opens: Decryptor
    b_seals: Encryptor
    b_opens: Decryptor


def connect(
    seed: int = 0,
    *,
    epoch: int = 1,
    connection: bytes = b"c1",
    lane: str = "collectives",
    cipher: Cipher = Cipher.AES_256_GCM,
    lifetime: KeyLifetime | None = None,
) -> Pair:
    """A connection whose two secrets come from ``seed``."""
    draw = random.Random(seed)
    secrets = draw.randbytes(SECRET_SIZE), draw.randbytes(SECRET_SIZE)
    context = seal_context(
        connection=connection, epoch=epoch, initiator="ada", responder="bob", lane=lane
    )
    life = lifetime or KeyLifetime()
    a, b = (
        derive_keys(*secrets, context=context, initiator=side, cipher=cipher, lifetime=life)
        for side in (True, False)
    )
    return Pair(*a, *b)


def record_keys(patch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that is made from now on for a connection, by whichever end."""
    aead.local_speeds()  # the first call makes keys to measure with
    keys: list[bytes] = []

    def note(cipher: Cipher, key: bytes) -> Aead:
        keys.append(key)
        return new_aead(cipher, key)

    patch.setattr(aead, "new_aead", note)
    return keys


def seal(sealer: Encryptor, payload: bytes = PAYLOAD, header: bytes = HEADER) -> bytes:
    """One sealed frame, without its header."""
    out = bytearray(len(payload) + TAG_SIZE)
    assert sealer.seal_into(header, memoryview(payload), memoryview(out)) == len(out)
    return bytes(out)


def unseal(opener: Decryptor, sealed: bytes, header: bytes = HEADER) -> bytes:
    """What the frame carries; on failure, check that it left nothing behind."""
    room = len(sealed) + 8
    out = bytearray([MARK]) * room
    try:
        size = opener.open_into(header, memoryview(sealed), memoryview(out))
    except MalformedFrame:
        assert set(out) <= {0, MARK}
        raise
    assert set(out[size:]) == {MARK}
    return bytes(out[:size])


def assert_refused(opener: Decryptor, sealed: bytes, header: bytes = HEADER) -> None:
    """The frame is refused, and so is everything after it."""
    with pytest.raises(MalformedFrame, match="cannot be trusted"):
        unseal(opener, sealed, header)
    with pytest.raises(MalformedFrame, match="close this connection"):
        unseal(opener, sealed, header)


def wires(
    *, sealed: bool, capacity: int = 1 << 16, first: bytes = b""
) -> tuple[BufferedStream, BufferedStream]:
    """Two ends of a pipe that takes so many bytes; the right one begins with what came early."""
    left, right = pipe(("left", "right"), capacity=capacity)
    pair = connect()
    keys = ((pair.a_seals, pair.a_opens), (pair.b_seals, pair.b_opens)) if sealed else (None, None)
    return buffered(left, keys[0]), buffered(right, keys[1], first)
