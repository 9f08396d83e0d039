"""First messages of TLS as a stranger may write them: any group, any list, no key behind them."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator, Sequence

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

__all__ = ["EXPENSIVE", "GROUPS", "hostile_hello", "kinds"]

GROUPS = {
    "X25519": 29,
    "P-256": 23,
    "P-384": 24,
    "P-521": 25,
    "X448": 30,
    "ffdhe2048": 256,
    "ffdhe3072": 257,
    "ffdhe4096": 258,
    "ffdhe6144": 259,
    "ffdhe8192": 260,
}
EXPENSIVE = [name for name in GROUPS if name not in {"X25519", "P-256"}]

_CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
_ED25519, _RSA = b"\x08\x07", b"\x08\x06\x08\x05\x08\x04\x06\x01\x05\x01\x04\x01"


def _prefixed(size: int, content: bytes) -> bytes:
    return len(content).to_bytes(size, "big") + content


def _extension(kind: int, content: bytes) -> bytes:
    return struct.pack(">HH", kind, len(content)) + content


@functools.cache
def _share(group: str) -> bytes:
    """A share of a key that a server can compute with."""
    if group in _CURVES:
        public = ec.generate_private_key(_CURVES[group]).public_key()
        return public.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    if group.startswith("ffdhe"):
        return b"\x01" + os.urandom(int(group.removeprefix("ffdhe")) // 8 - 1)
    return os.urandom({"X25519": 32, "X448": 56}[group])


def hostile_hello(
    group: str,
    *,
    groups: Sequence[int] | None = None,
    has_share: bool = True,
    signatures: bytes = _ED25519 + _RSA,
    extra: bytes = b"",
) -> bytes:
    """A hello that brings a share of one group, and lists this one or others."""
    number = GROUPS[group]
    listed = b"".join(struct.pack(">H", each) for each in groups or [number])
    share = struct.pack(">H", number) + _prefixed(2, _share(group)) if has_share else b""
    extensions = (
        _extension(43, _prefixed(1, b"\x03\x04"))
        + _extension(10, _prefixed(2, listed))
        + _extension(13, _prefixed(2, signatures))
        + _extension(51, _prefixed(2, share))
        + extra
    )
    body = b"\x03\x03" + os.urandom(32) + _prefixed(1, os.urandom(32))
    body += _prefixed(2, b"\x13\x02\x13\x01\x13\x03") + b"\x01\x00" + _prefixed(2, extensions)
    return b"\x16\x03\x01" + _prefixed(2, b"\x01" + _prefixed(3, body))


def in_records(hello: bytes, size: int) -> bytes:
    """The same message, cut into records of so many bytes."""
    message = hello[5:]
    pieces = (message[at : at + size] for at in range(0, len(message), size))
    return b"".join(b"\x16\x03\x01" + _prefixed(2, piece) for piece in pieces)


def kinds() -> Iterator[tuple[str, bytes]]:
    """Hellos of many kinds, with a name for each."""
    for group in GROUPS:
        yield group, hostile_hello(group)
        yield f"{group}, asking to be asked again", hostile_hello(group, has_share=False)
    everything = sorted(GROUPS.values(), reverse=True)
    for group in ("ffdhe8192", "P-521"):
        yield f"{group} first, all others too", hostile_hello(group, groups=everything)
    yield "a thousand groups", hostile_hello("X25519", groups=[*range(1000, 2000), 29])
    yield "signatures that nobody has", hostile_hello("X25519", signatures=_RSA)
    yield (
        "sixty unknown extensions",
        hostile_hello(
            "X25519", extra=b"".join(_extension(60000 + n, bytes(200)) for n in range(60))
        ),
    )
    for size in (1, 16):
        for group in ("X25519", "ffdhe8192"):
            name = f"{group}, in records of {size} bytes"
            yield name, in_records(hostile_hello(group), size)
    padding = b"".join(_extension(60000 + n, bytes(15_000)) for n in range(4))
    yield "60 kB of extensions", in_records(hostile_hello("X25519", extra=padding), 1 << 14)
    yield "noise in TLS", b"\x16\x03\x01" + _prefixed(2, os.urandom(500))
