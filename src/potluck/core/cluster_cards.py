"""The card of a process: what it says about itself when it opens a control lane.

A card travels in the first message of a control lane and is passed on among acquaintances, so it
is typed and bounded.  The node id in it is proved by the connection; the rest is the word of an
authenticated member.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Annotated, Literal

import msgspec

from potluck.core.cards import NAME_LIMIT
from potluck.vocabulary import NodeId, ProcessId

__all__ = ["ProcessCard", "Role", "mark"]

MAX_HOSTS = 16
_HOST_LIMIT = 255  # characters, as long as a host name may be

_Node = Annotated[NodeId, msgspec.Meta(min_length=1, max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Tag = Annotated[str, msgspec.Meta(max_length=64)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Role(Enum):
    """What a process is there for."""

    MEMBER = "member"
    OBSERVER = "observer"
    """Looks on; never counted, never a member."""


class ProcessCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who a process is and where it can be reached.

    >>> card = ProcessCard(node=NodeId("a" * 32), incarnation=7, name="attic")
    >>> card.process, str(card)
    (ProcessId(node='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', incarnation=7), 'attic (aaaaaaaa/7)')
    """

    node: _Node
    incarnation: _Count
    slot: _Count = 0
    """Its place among the processes of its machine, its own while it lives."""
    machine: _Tag = ""
    """Which machine it runs on; two machines never show the same."""
    boot: _Tag = ""
    """The same until that machine's next reboot; empty where that is not known."""
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)] = ""
    """The machine's name, for people."""
    hosts: Annotated[tuple[_Host, ...], msgspec.Meta(max_length=MAX_HOSTS)] = ()
    """Its addresses, best first."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    role: Role = Role.MEMBER
    schema: _Tag = ""
    """Names the shape of the state it trains; only equal ones become one cluster."""
    pause_after: _Seconds = 1.0
    """Seconds without contact after which it pauses itself; see ``HealthConfig.pause_after``."""
    quorum: Literal["majority", "any"] = "majority"
    """Its setting; only processes with the same one become one cluster."""
    place: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 20)] = -1
    """The rank that a launcher wishes for it in the first view; -1 where none has a wish."""

    @property
    def process(self) -> ProcessId:
        """Its id."""
        return ProcessId(self.node, self.incarnation)

    def succeeds(self, other: ProcessCard) -> bool:
        """Whether this is a later start in the same place, so that the other must have ended."""
        return (
            self.node == other.node
            and self.machine == other.machine
            and self.slot == other.slot
            and self.incarnation > other.incarnation
        )

    def __str__(self) -> str:
        """Name and short id, for sentences."""
        return f"{self.name} ({self.process})" if self.name else str(self.process)


def mark(process: ProcessId) -> int:
    """A process id in 63 bits, for lists in heartbeats; equal marks mean equal ids in practice.

    >>> mark(ProcessId(NodeId("a" * 32), 7)) == mark(ProcessId(NodeId("a" * 32), 7))
    True
    """
    digest = hashlib.sha256(f"{process.node}/{process.incarnation}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
