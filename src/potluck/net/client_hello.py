"""Which server a caller names in the first record of TLS, before TLS looks at it.

A caller names the tag of the secret it has, in the field where browsers name a host, so that it can
be answered under that secret.  The name proves nothing: what it leads to still has to be proved by
the handshake.  So whatever is unusual here is no name, and TLS itself says what is wrong with it.
"""

from __future__ import annotations

__all__ = ["first_record_size", "named_server"]

_HEADER = 5  # kind, version, length
_LARGEST = 1 << 14  # bytes of a record that is not encrypted
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


def first_record_size(data: bytes | bytearray) -> int:
    r"""How many bytes the first record has with its header, as far as that is known yet.

    >>> first_record_size(b"\x16\x03\x01\x02\x00")
    517
    """
    if len(data) < _HEADER:
        return _HEADER
    length = int.from_bytes(data[3:5], "big")
    return _HEADER if length > _LARGEST else _HEADER + length


def named_server(record: bytes | bytearray) -> str | None:
    """The name in a complete first record; None if there is none that we could have written."""
    reader = _Reader(bytes(record))
    try:
        if reader.number(1) != _HANDSHAKE:
            return None
        reader.skip(2 + 2)  # version, length of the record
        if reader.number(1) != _CLIENT_HELLO:
            return None
        reader.skip(3 + 2 + 32)  # length, version, random
        reader.skip(reader.number(1))  # session
        reader.skip(reader.number(2))  # ciphers
        reader.skip(reader.number(1))  # compression
        extensions = _Reader(reader.take(reader.number(2)))
        while extensions.rest:
            kind = extensions.number(2)
            content = extensions.take(extensions.number(2))
            if kind == _SERVER_NAME:
                return _name(_Reader(content))
    except EOFError:
        pass
    return None


def _name(content: _Reader) -> str | None:
    content.skip(2)  # length of the list
    if content.number(1) != _HOST_NAME:
        return None
    name = content.take(content.number(2))
    return name.decode("ascii") if name.isascii() else None


class _Reader:
    """Takes numbers and spans off the front of some bytes; EOFError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, size: int) -> bytes:
        if size > len(self.rest):
            raise EOFError
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def skip(self, size: int) -> None:
        self.take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")
