"""Frames of the connection between two agents: a message is one frame, or several pieces.

A large message is cut, and pieces of several messages take turns, so none holds up another for
longer than one piece.  The first piece says how long the whole will be; that is checked before
anything is allocated.  All integers are little-endian::

    offset 0     1     2        4        8       16      20
           ┌─────┬─────┬────────┬────────┬───────┬───────┬──────────┐
           │kind │flags│  zero  │ length │ number│ total │ patience │  so many bytes …
           └─────┴─────┴────────┴────────┴───────┴───────┴──────────┘
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from potluck.core.calls_encoding import REQUEST_OVERHEAD, RESPONSE_OVERHEAD, Octets
from potluck.core.calls_errors import RpcInvalidMessage, RpcTooLarge

__all__ = [
    "HEADER_SIZE",
    "HELLO_SIZE",
    "PIECE",
    "SHORT",
    "Frame",
    "FrameKind",
    "Hello",
    "Mark",
    "pack_frame",
    "read_frame",
    "short_request",
    "short_response",
]

SHORT = 32 << 10
"""Bytes up to which a message travels in one frame and before longer ones."""

PIECE = 256 << 10
"""Bytes of one frame at most."""

MAX_PATIENCE = (1 << 32) - 1
"""Milliseconds, the longest time that can be carried: 49 days."""

_LAYOUT = struct.Struct("<BBHIQII")
HEADER_SIZE = _LAYOUT.size

_HELLO = struct.Struct("<8sIIQI")
_MAGIC = b"PLrpc\x00\x00\x02"  # the last byte is the version
HELLO_SIZE = _HELLO.size


class FrameKind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """The first frame of either side: what it allows the other."""
    REQUEST = 2
    RESPONSE = 3
    CANCEL = 4
    """Nobody waits for the answer to this call any more; it is answered all the same."""
    GOODBYE = 5
    """The sender's agent closes; nothing follows."""


class Mark(IntEnum):
    """Bits of a frame's flags."""

    MORE = 1
    """Further pieces of this message follow."""
    LATER = 2
    """This is not the first piece."""
    TYPED = 4
    """The payload holds values, not bytes of the caller's own."""
    NESTED = 8
    """The caller is itself a function that somebody waits for."""


KNOWN_MARKS = Mark.MORE | Mark.LATER | Mark.TYPED | Mark.NESTED


class Frame(NamedTuple):
    """A decoded header."""

    kind: FrameKind
    marks: int
    length: int
    number: int
    total: int
    """Bytes of the whole message."""
    patience: int
    """Milliseconds the caller is willing to wait."""


def pack_frame(
    kind: int, number: int, length: int, *, marks: int = 0, total: int = 0, patience: int = 0
) -> bytes:
    """One header; of a message in one piece the length is the total.

    >>> pack_frame(FrameKind.CANCEL, 5, 0).hex(" ")
    '04 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00'
    """
    return _LAYOUT.pack(kind, marks, 0, length, number, total or length, patience)


_REQUEST = struct.Struct("<BBHIQIIBQI")
_RESPONSE = struct.Struct("<BBHIQIIBQBI")


def short_request(number: int, name: bytes, payload: Octets, marks: int, patience: int) -> bytes:
    """A request in one frame, header and all: the way that most go, in as few steps as can be."""
    total = REQUEST_OVERHEAD + len(name) + len(payload)
    head = _REQUEST.pack(2, marks, 0, total, number, total, patience, 1, number, len(name))
    return b"".join((head, name, len(payload).to_bytes(4, "little"), payload))


def short_response(number: int, payload: Octets, marks: int) -> bytes:
    """A response with a value in one frame, header and all."""
    total = RESPONSE_OVERHEAD + len(payload)
    head = _RESPONSE.pack(3, marks, 0, total, number, total, 0, 2, number, 0, len(payload))
    return head + payload


_KINDS = {int(kind): kind for kind in FrameKind}
_EMPTY = frozenset({FrameKind.CANCEL, FrameKind.GOODBYE})


def read_frame(data: bytes | bytearray | memoryview, offset: int, limit: int) -> Frame:
    """The header at ``offset``, if it is one; ``limit`` is for the whole message."""
    code, marks, zero, length, number, total, patience = _LAYOUT.unpack_from(data, offset)
    kind = _KINDS.get(code)
    if kind is None or zero or marks & ~KNOWN_MARKS:
        raise RpcInvalidMessage(f"no frame begins with {bytes(data[offset : offset + 4]).hex()}")
    if total > limit:
        raise RpcTooLarge(total, limit)
    if length > PIECE or length > total:
        raise RpcInvalidMessage(f"a piece of {length} bytes of a message of {total}")
    is_part = marks & (Mark.MORE | Mark.LATER)
    if kind is FrameKind.HELLO or kind in _EMPTY:
        expected = 0 if kind in _EMPTY else HELLO_SIZE
        if is_part or length != expected or total != expected:
            raise RpcInvalidMessage(f"a {kind.name} frame of {length} bytes")
    elif (not is_part and length != total) or not length:
        raise RpcInvalidMessage(f"a whole message of {length} bytes where {total} were announced")
    return Frame(kind, marks, length, number, total, patience)


class Hello(NamedTuple):
    """What an agent allows each of its peers."""

    calls: int
    """Calls that may be unanswered at a time."""
    octets: int
    """Bytes of messages that may be under way at a time; a single one may have more."""
    max_message: int
    """Bytes of one message."""
    generation: int = 1
    """How many agents its rank has made on this group, this one included."""

    def pack(self) -> bytes:
        """As bytes."""
        return _HELLO.pack(_MAGIC, self.calls, self.max_message, self.octets, self.generation)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Hello:
        """From the bytes of a peer.

        >>> Hello.unpack(Hello(8, 1 << 20, 1 << 30).pack())
        Hello(calls=8, octets=1048576, max_message=1073741824, generation=1)
        """
        magic, calls, max_message, octets, generation = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise RpcInvalidMessage(
                "the other side speaks another protocol",
                hint="Install the same version of potluck on every machine.",
            )
        if not calls:
            raise RpcInvalidMessage("the other side allows no call at all")
        return cls(calls, octets, max_message, generation)
