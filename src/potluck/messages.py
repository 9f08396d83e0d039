"""Typed messages on the wire: what a node says before and besides moving payloads.

Encoded as MessagePack with :mod:`msgspec`, which checks types and bounds while decoding; nothing
that came from outside is ever evaluated.  A message travels in one frame, so it is small.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from potluck.errors import MalformedFrame

__all__ = ["Join", "Lane", "LaneOpened", "Peer", "Speeds", "Table", "pack", "unpack"]

Text = Annotated[str, msgspec.Meta(max_length=255)]
Hosts = Annotated[list[Text], msgspec.Meta(max_length=16)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]  # which NaN is not
Share = Annotated[bytes, msgspec.Meta(max_length=32)]
Speed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Session = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Speeds(msgspec.Struct, frozen=True):
    """How fast a machine runs each cipher, in MB/s; 0 where it cannot."""

    aes_256_gcm: Speed = 0
    chacha20_poly1305: Speed = 0


class Peer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank can be reached, best address first."""

    hosts: Hosts
    port: Port
    name: Text
    """Its machine's own name, for people."""
    node: Text = ""
    """Who it has proved to be, as rank 0 saw it; empty on connections in clear."""


class Join(msgspec.Struct, frozen=True, omit_defaults=True, tag="join"):
    """A rank asks rank 0 to be part of the group."""

    rank: RankNumber
    world_size: RankNumber
    peer: Peer
    patience: Seconds = 3600.0
    """Seconds after which it gives up; rank 0 then tells it who was missing."""


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Rank 0's answer when everybody is there: where all ranks are."""

    session: Session
    """Drawn by rank 0 for this group: a connection of another group does not know it."""
    peers: list[Peer]


class Lane(msgspec.Struct, frozen=True, omit_defaults=True, tag="lane"):
    """A rank opens a connection to another for one purpose."""

    session: Session
    rank: RankNumber
    to: RankNumber
    purpose: Text = "messages"
    share: Share = b""
    """Our half of the lane's keys; empty on connections in clear."""
    speeds: Speeds = Speeds()


class LaneOpened(msgspec.Struct, frozen=True, omit_defaults=True, tag="opened"):
    """The connection is open."""

    rank: RankNumber
    share: Share = b""
    """The other half of the lane's keys."""
    speeds: Speeds = Speeds()


Message = TypeVar("Message")


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def unpack(data: bytes | memoryview, kind: type[Message]) -> Message:
    """Decode and check a message.

    >>> unpack(pack(LaneOpened(3)), LaneOpened).rank
    3
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame("A message cannot be understood", cause=str(error)) from None
