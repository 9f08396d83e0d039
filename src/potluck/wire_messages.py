"""Typed messages on the wire: what a node says before and besides moving payloads.

Encoded as MessagePack with :mod:`msgspec`, which checks types and bounds while decoding; nothing
that came from outside is ever evaluated.  A message travels in one frame, so it is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from potluck._decode import decode_msgpack
from potluck.errors import MalformedFrame

__all__ = [
    "CipherRates",
    "ControlReply",
    "ControlRequest",
    "Hello",
    "Introduction",
    "Join",
    "OpenReply",
    "OpenRequest",
    "RankEndpoint",
    "Sync",
    "Table",
    "Told",
    "UnixSocketHint",
    "pack",
    "unpack",
]

Text = Annotated[str, msgspec.Meta(max_length=255)]
Hosts = Annotated[list[Text], msgspec.Meta(max_length=16)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]  # which NaN is not
Share = Annotated[bytes, msgspec.Meta(max_length=32)]
Speed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Session = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


Tag = Annotated[str, msgspec.Meta(max_length=32)]
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
RosterBytes = Annotated[bytes, msgspec.Meta(max_length=56 << 10)]
CardBytes = Annotated[bytes, msgspec.Meta(max_length=16 << 10)]
ProfileBytes = Annotated[bytes, msgspec.Meta(max_length=8 << 10)]


class Introduction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every hello says about the process behind it; empty on unencrypted connections."""

    roster: Digest = b""
    """The hash of its roster; empty if it has none."""
    machine: Tag = ""
    """Which machine it runs on, as a hash that reveals nothing else."""
    boot: Tag = ""
    """The same until that machine's next reboot."""
    slot: Count = 0
    """Its place among the processes of that machine, its own while it lives."""
    incarnation: Count = 0
    """Grows with every start on that machine."""


class Opening(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the first messages of all connections have in common."""

    introduction: Introduction = Introduction()


class Sync(Opening, frozen=True, omit_defaults=True, tag="sync"):
    """The two sides only agree on who belongs; nothing else is asked for."""


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """Between hello and answer: a roster, or the secret that follows from the one just told."""

    roster: RosterBytes = b""
    secret: Share = b""
    """Only for a member that used an earlier one."""


class CipherRates(msgspec.Struct, frozen=True):
    """How fast a machine runs each cipher, in MB/s; 0 where it cannot."""

    aes_256_gcm: Speed = 0
    chacha20_poly1305: Speed = 0
    aes_128_ocb: Speed = 0


class RankEndpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank can be reached, best address first."""

    hosts: Hosts
    port: Port
    name: Text
    """Its machine's own name, for people."""
    node: Text = ""
    """The node id that it proved to rank 0; empty on unencrypted connections."""
    process: Text = ""
    """Which process it says it is, as node id and incarnation, for those who look on."""


class Join(Opening, frozen=True, omit_defaults=True, tag="join"):
    """A rank asks rank 0 to be part of the group."""

    rank: RankNumber
    world_size: RankNumber
    peer: RankEndpoint
    patience: Seconds = 3600.0
    """Seconds after which it gives up; rank 0 then tells it who was missing."""


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Rank 0's answer when everybody is there: where all ranks are, or those of a part."""

    session: Session
    """Drawn by rank 0 for this group: a connection of another group does not know it."""
    peers: list[RankEndpoint]

    def parts(self, limit: int) -> Iterator[Table]:
        """The same in tables of about ``limit`` bytes: a large group's does not fit one frame."""
        peers: list[RankEndpoint] = []
        size = 0
        for peer in self.peers:
            size += len(pack(peer))
            if peers and size > limit:
                yield Table(self.session, peers)
                peers, size = [], len(pack(peer))
            peers.append(peer)
        yield Table(self.session, peers)


class UnixSocketHint(msgspec.Struct, frozen=True):
    """Where the dialler of a connection listens for a peer on its own machine."""

    name: Share
    """An abstract name of a local socket."""
    token: Share
    ends: Annotated[list[Text], msgspec.Meta(max_length=2)]
    """The two ends of the connection that carries the hello, as the dialler sees them."""


class OpenRequest(Opening, frozen=True, omit_defaults=True, tag="lane"):
    """A rank opens a connection to another for one purpose."""

    session: Session
    rank: RankNumber
    to: RankNumber
    purpose: Text = "messages"
    share: Share = b""
    """Our half of the connection's keys; empty on unencrypted connections."""
    speeds: CipherRates = CipherRates()
    shortcut: UnixSocketHint | None = None
    shares_memory: bool = False
    """On the shortcut, large pieces may travel in shared memory."""


class OpenReply(msgspec.Struct, frozen=True, omit_defaults=True, tag="opened"):
    """The connection is open."""

    rank: RankNumber
    share: Share = b""
    """The other half of the connection's keys."""
    speeds: CipherRates = CipherRates()
    by_shortcut: bool = False
    """The connection continues over the Unix socket that was offered."""
    shares_memory: bool = False
    """Both try to share memory there."""
    clock: Seconds = 0.0
    """The time of day there, in seconds since 1970, for one who only looks; 0 if not told."""


class ControlRequest(Opening, frozen=True, omit_defaults=True, tag="control"):
    """A process opens its control connection to another: who it is, and what it is part of."""

    job: Text
    """The tag of its job; only processes of one job become a group."""
    card: CardBytes = b""
    """What it says of itself, packed; the owner of the connection reads it."""
    profile: ProfileBytes = b""
    """What its machine can do, packed."""


class ControlReply(Opening, frozen=True, omit_defaults=True, tag="control-opened"):
    """The control connection is open; the same from the side that was called."""

    job: Text
    card: CardBytes = b""
    profile: ProfileBytes = b""


Hello: TypeAlias = Join | OpenRequest | Sync | ControlRequest
"""What a connection may begin with."""

Message = TypeVar("Message")


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def unpack(data: bytes | memoryview, kind: type[Message]) -> Message:
    """Decode and check a message.

    >>> unpack(pack(OpenReply(3)), OpenReply).rank
    3
    """
    try:
        return decode_msgpack(data, kind)
    except msgspec.DecodeError as error:
        raise MalformedFrame("A message cannot be understood", cause=str(error)) from None
