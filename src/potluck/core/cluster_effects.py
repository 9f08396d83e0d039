"""What a :class:`~potluck.core.cluster.ClusterCore` wants done, in the order in which to do it.

A core decides and nothing else; whoever drives it carries these out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from potluck.core.cluster_cards import ProcessCard
from potluck.core.cluster_events import MembershipEvent
from potluck.core.cluster_messages import ClusterMessage, Commit
from potluck.core.election_events import ElectionEvent
from potluck.core.health_records import HealthEvent
from potluck.vocabulary import ProcessId, View

__all__ = [
    "Abort",
    "Disconnect",
    "Effect",
    "Installed",
    "Meet",
    "Note",
    "Paused",
    "Probe",
    "Removed",
    "Resumed",
    "Send",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the control lane to a connected process; drop it if there is none."""

    to: ProcessId
    message: ClusterMessage


@dataclass(frozen=True, slots=True)
class Meet:
    """Connect to this process, of which an acquaintance told; nothing is lost if it fails."""

    card: ProcessCard


@dataclass(frozen=True, slots=True)
class Probe:
    """Try the port of a process whose connection ended.

    Answer with ``refused()`` if a directly attached network refused the connection and the link
    address is unchanged, otherwise with ``unreachable()``, or ``connected()`` if it is there.
    """

    peer: ProcessId


@dataclass(frozen=True, slots=True)
class Installed:
    """A view was agreed, and we are in it."""

    view: View
    reason: str
    commits: tuple[Commit, ...] = ()
    """What followed the view we were in before, as far as known, oldest first; the last one
    installs ``view``.  Operations of the view before end with an error made from the first."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Do nothing that counts until ``Resumed``, ``Installed`` or ``Removed``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The view we have holds again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the operations of this view's epoch at once, for good.

    Nothing is raised yet: the error is made from the commit that follows.
    """

    epoch: int
    lost: ProcessId | None
    """The member for which they stop, as seen here; None where it is not known."""
    reason: str
    orderly: bool = False
    """Whether it left, so that what it had begun may be finished."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close all connections to a process and accept none."""

    peer: ProcessId
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """We are in no view any more; entering one again begins by itself."""

    reason: str
    commit: Commit | None = None
    """What followed the view we were in: it leaves us out, or ends the lineage in another one."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something happened that people want to know."""

    event: HealthEvent | ElectionEvent | MembershipEvent


Effect: TypeAlias = (
    Send | Meet | Probe | Installed | Paused | Resumed | Abort | Disconnect | Removed | Note
)
