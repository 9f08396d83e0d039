"""Frames: the fixed header in front of every payload, and nothing else.

A header says what follows (kind), for whom (group, epoch), which operation and tag it belongs to,
which piece of it this is, and how many bytes come.  All integers are little-endian.  The decoder
checks magic, version, kind and length before anybody allocates a byte; payloads never pass through
here, they go straight between the socket and their destination.

    offset  0  2  3  4      12     16  20         28   32     36
            ┌──┬──┬──┬──────┬──────┬───┬──────────┬────┬──────┐
            │PL│v │k │group │epoch │tag│operation │piece│length│  payload …
            └──┴──┴──┴──────┴──────┴───┴──────────┴────┴──────┘

The frames that open a connection, those of :data:`OPENING`, look like this in every version: they
carry in ``epoch`` and ``tag`` the newest and the oldest protocol that their sender speaks, and in
``operation`` its version of Potluck.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from potluck._version import THIS_BUILD, Build
from potluck.errors import MalformedFrame

MAGIC = b"PL"
LAYOUT = 1
"""The version of the protocol since which frames look like this; a header's third byte."""

MAX_PIECE = 1 << 20
"""Largest payload of one frame of a granted message, in bytes: keeps peers and tags interleaved."""

MAX_CONTROL = 1 << 16
"""Largest payload of every other frame, in bytes; also what a stranger may send before a hello."""

_LAYOUT = struct.Struct("<2sBBQIIQII")
HEADER_SIZE = _LAYOUT.size

NUMBERS = struct.Struct("<II")
"""The end of a header, piece and length: all that differs between the frames of an operation."""
NUMBERS_AT = HEADER_SIZE - NUMBERS.size


class FrameType(IntEnum):
    """What a frame is."""

    HELLO = 1
    """First frame of a connection: who dials, and for which lane."""
    WELCOME = 2
    """The answer that opens the connection."""
    REFUSAL = 3
    """The answer that does not; its payload is a sentence in UTF-8, in every version."""
    ROSTER = 4
    """Between hello and answer: who belongs here, where the two sides do not agree on it."""
    EAGER = 16
    """A whole small message, sent within the receiver's credit."""
    OFFER = 17
    """Announces a message; its payload is the size as an unsigned 64-bit integer."""
    GRANT = 18
    """The go-ahead for an offered message."""
    DISCARD = 19
    """The receiver wants none of an offered message's bytes; it counts as delivered."""
    DATA = 20
    """One piece of a granted message."""
    WITHDRAW = 21
    """The sender gave up an offered or half-sent message."""
    CREDIT = 22
    """Gives back credit for eager messages; ``operation`` is the number of bytes."""
    TOKEN = 32
    """One step of a barrier: ``operation`` is its number, ``piece`` the round."""
    ARRIVED = 33
    """The sender waits in barrier number ``operation``; only sent when it takes long."""
    BROKEN = 34
    """Barrier number ``operation`` cannot complete: rank ``piece`` is lost."""
    GOODBYE = 48
    """The sender closes; nothing follows."""
    COLLECTIVE = 64
    """One piece of collective number ``operation``; on streams of their own."""
    CONTROL = 80
    """A message on a control lane; ``tag`` says for whom."""


OPENING = frozenset({FrameType.HELLO, FrameType.WELCOME, FrameType.REFUSAL, FrameType.ROSTER})
"""What is sent before a connection is open; understood in every version."""

_KINDS = {int(kind): kind for kind in FrameType}
_LIMITS = {int(FrameType.DATA): MAX_PIECE, int(FrameType.COLLECTIVE): MAX_PIECE}


class Header(NamedTuple):
    """A decoded header."""

    kind: FrameType
    group: int
    epoch: int
    tag: int
    operation: int
    piece: int
    length: int


def encode(
    kind: FrameType,
    *,
    group: int = 0,
    epoch: int = 0,
    tag: int = 0,
    operation: int = 0,
    piece: int = 0,
    length: int = 0,
) -> bytes:
    """Pack one header.

    >>> len(encode(FrameType.GRANT, operation=7)) == HEADER_SIZE
    True
    """
    return _LAYOUT.pack(MAGIC, LAYOUT, kind, group, epoch, tag, operation, piece, length)


def encode_opening(kind: FrameType, *, piece: int, length: int, build: Build = THIS_BUILD) -> bytes:
    """Pack the header of a frame that opens a connection, with what its sender runs."""
    return encode(
        kind,
        epoch=build.protocol,
        tag=build.oldest,
        operation=build.number,
        piece=piece,
        length=length,
    )


def decode(buffer: bytes | bytearray | memoryview, offset: int, max_eager: int) -> Header:
    """Unpack and check the header at ``offset``; ``max_eager`` bounds an eager message.

    >>> decode(encode(FrameType.OFFER, operation=4, length=8), 0, 1024).operation
    4
    """
    magic, layout, code, group, epoch, tag, operation, piece, length = _LAYOUT.unpack_from(
        buffer, offset
    )
    kind = _KINDS.get(code)
    if magic != MAGIC:
        raise MalformedFrame(
            "These bytes are no Potluck frame",
            expected=MAGIC,
            got=bytes(magic),
            hint="Something other than Potluck is talking to this port.",
        )
    if layout != LAYOUT and kind not in OPENING:
        raise MalformedFrame(
            f"A frame has layout {layout}, and not {LAYOUT} as agreed", expected=LAYOUT, got=layout
        )
    if kind is None:
        raise MalformedFrame(f"Frame kind {code} is not known", got=code)
    limit = _LIMITS.get(code, max_eager if code == FrameType.EAGER else MAX_CONTROL)
    if length > limit:
        raise MalformedFrame(
            f"A {kind.name} frame of {length} bytes is over the limit of {limit}",
            expected=limit,
            got=length,
        )
    return Header(kind, group, epoch, tag, operation, piece, length)


def build_of(header: Header) -> Build:
    """What the sender of a frame that opens a connection runs.

    >>> build_of(decode(encode_opening(FrameType.HELLO, piece=0, length=0), 0, 0)) == THIS_BUILD
    True
    """
    return Build.read(header.operation, header.epoch, header.tag)


# --------------------------------------------------------------------------------------------------
# Frames of the connection between two agents: a message is one frame, or several pieces.
#
# A large message is cut, and pieces of several messages take turns, so none holds up another for
# longer than one piece.  The first piece says how long the whole will be; that is checked before
# anything is allocated.  All integers are little-endian::
#
#     offset 0     1     2        4        8       16      20
#            ┌─────┬─────┬────────┬────────┬───────┬───────┬──────────┐
#            │kind │flags│  zero  │ length │ number│ total │ patience │  so many bytes …
#            └─────┴─────┴────────┴────────┴───────┴───────┴──────────┘

PIECE = 256 << 10
"""Bytes of one frame at most."""
