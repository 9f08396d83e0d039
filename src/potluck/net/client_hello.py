"""What a caller asks for in the first record of TLS, before TLS looks at it.

A caller names the tag of the secret it has, in the field where browsers name a host, so that it can
be answered under that secret.  It also lists the groups in which it can agree on keys; which of
them is used is decided here, because the cheapest costs a thousandth of the dearest.  None of it
proves anything: that is left to the handshake.  What is unusual here is treated as not said, and
TLS itself reports what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClientHello", "first_record_size", "read_hello"]

_HEADER = 5  # kind, version, length
_LARGEST = 1 << 14  # bytes of a record that is not encrypted
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_SUPPORTED_GROUPS = 10
_MOST_EXTENSIONS, _MOST_GROUPS = 64, 64  # of which we take notice; ours has about ten of either


def first_record_size(data: bytes | bytearray) -> int:
    r"""How many bytes the first record has with its header, as far as that is known yet.

    >>> first_record_size(b"\x16\x03\x01\x02\x00")
    517
    """
    if len(data) < _HEADER:
        return _HEADER
    length = int.from_bytes(data[3:5], "big")
    return _HEADER if length > _LARGEST else _HEADER + length


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What matters to us of the first message of a caller."""

    server: str = ""
    """The name of the server that is called; empty if there is none that we could have written."""
    groups: tuple[int, ...] = ()
    """The numbers of the groups that the caller supports, as IANA assigns them."""


def read_hello(record: bytes | bytearray) -> ClientHello:
    """Read a complete first record; anything unusual in it counts as not said."""
    reader = _Reader(bytes(record))
    server = ""
    groups: tuple[int, ...] = ()
    try:
        if reader.number(1) != _HANDSHAKE:
            return ClientHello()
        reader.skip(2 + 2)  # version, length of the record
        if reader.number(1) != _CLIENT_HELLO:
            return ClientHello()
        reader.skip(3 + 2 + 32)  # length, version, random
        reader.skip(reader.number(1))  # session
        reader.skip(reader.number(2))  # ciphers
        reader.skip(reader.number(1))  # compression
        extensions = _Reader(reader.take(reader.number(2)))
        for _ in range(_MOST_EXTENSIONS):
            if not extensions.rest:
                break
            kind = extensions.number(2)
            content = extensions.take(extensions.number(2))
            if kind == _SERVER_NAME:
                server = _name(_Reader(content))
            elif kind == _SUPPORTED_GROUPS:
                groups = _groups(content)
    except EOFError:
        pass
    return ClientHello(server, groups)


def _name(content: _Reader) -> str:
    content.skip(2)  # length of the list
    if content.number(1) != _HOST_NAME:
        return ""
    name = content.take(content.number(2))
    return name.decode("ascii") if name.isascii() else ""


def _groups(content: bytes) -> tuple[int, ...]:
    listed = content[2 : 2 + 2 * _MOST_GROUPS]
    return tuple(int.from_bytes(listed[at : at + 2], "big") for at in range(0, len(listed) - 1, 2))


class _Reader:
    """Takes numbers and spans off the front of some bytes; EOFError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.rest:
            raise EOFError
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int) -> None:
        self.take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")
