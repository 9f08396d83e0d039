"""What happened in a cluster, for logs, screens and callbacks: each event is a sentence.

The same words serve the log, the command and the dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from potluck._types import ProcessId, View, settle_seconds
from potluck.membership.health import HealthConfig, HealthEvent
from potluck.membership.messages import MAX_MEMBERS, ClusterMessage, Commit, ProcessInfo


class ClusterState(Enum):
    """Where this process stands."""

    JOINING = "joining"
    """Without a view: it looks for others, and for a cluster to enter."""
    ACTIVE = "active"
    """A member of a view, with a quorum of it in contact."""
    PAUSED = "paused"
    """A member of a view without a quorum in contact: the others may continue without it."""
    LEFT = "left"
    """Gone for good."""


class MembershipChange(Enum):
    """What kind of thing happened."""

    MET = "met"
    """A process is connected."""
    LOST = "lost"
    """A member of our view is lost to us, or to another member."""
    PROVED_DEAD = "proved dead"
    RETRACTED = "retracted"
    """A proof of death was wrong: the process is there."""
    DEPARTED = "departed"
    """A member left the job."""
    EXPELLED = "expelled"
    """A process was removed for what it sent; the sentence says what that was."""
    REFUSED = "refused"
    """A process may not take part."""
    PROPOSED = "proposed"
    INSTALLED = "installed"
    REMOVED = "removed"
    PAUSED = "paused"
    RESUMED = "resumed"
    WAITING = "waiting"
    """Why we, or a process that wants to enter, are not in a view yet."""
    MERGING = "merging"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """Something about who is in."""

    change: MembershipChange
    sentence: str
    process: ProcessId | None = None
    """Whom it is about, where it is about one."""
    view: View | None = None
    """The view it happened in, or that it brought."""

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


# --------------------------------------------------------------------------------------------------
# Who leads, in which term, and why: the state of an election and what happens in it.


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """How elections run.  Times in seconds.

    >>> ElectionConfig(election_timeout=1.0).connection_delay
    0.1
    """

    election_timeout: float = 0.3
    """A campaign, a founding or a merge that has no answer by then is begun anew."""
    connection_delay: float = 0.1
    """From a newcomer's being ready until it is admitted, so that several come in together."""
    auto_elect_on_peer_loss: bool = True
    """Whether a lost leader is replaced without being asked to."""

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        settle_seconds(self)
        if not (0 < self.election_timeout < float("inf") and self.connection_delay >= 0):
            msg = (
                "An election needs a positive election_timeout and a connection_delay of 0 or "
                f"more; got {self.election_timeout} and {self.connection_delay}"
            )
            raise ValueError(msg)


class ElectionRole(Enum):
    """What this process does in the current term.

    >>> ElectionRole("leading") is ElectionRole.LEADING
    True
    """

    IDLE = "idle"
    """Without a view."""
    FOLLOWING = "following"
    CANVASSING = "canvassing"
    """Asks whether a campaign would have a quorum; the term has not risen."""
    CAMPAIGNING = "campaigning"
    """Asks for votes in a new term."""
    LEADING = "leading"


@dataclass(frozen=True, slots=True)
class ElectionState:
    """Who leads in which term.  A term is named by lineage, epoch and number.

    >>> print(ElectionState(ElectionRole.LEADING, "f" * 32, 3, 1, None, "all have voted"))
    leading in term 3.1: all have voted
    """

    role: ElectionRole
    lineage: str
    epoch: int
    term: int
    leader: ProcessId | None
    reason: str

    def __str__(self) -> str:
        """One sentence for the log, the command and the dashboard."""
        return f"{self.role.value} in term {self.epoch}.{self.term}: {self.reason}"


class ElectionKind(Enum):
    """What happened in an election.

    >>> ElectionKind.NEW_LEADER.value
    'new leader'
    """

    STARTED = "started"
    ELECTED = "elected"
    """We lead."""
    NEW_LEADER = "new leader"
    """Another member leads."""
    TIMEOUT = "timeout"
    STEPPED_DOWN = "stepped down"
    SPLIT_BRAIN = "split brain"
    """Two leaders of one term, or two views of one number: one of our assumptions was broken."""


@dataclass(frozen=True, slots=True)
class ElectionEvent:
    """Something about who leads.

    >>> print(ElectionEvent(ElectionKind.ELECTED, 3, 1, None, "this process leads"))
    this process leads
    """

    kind: ElectionKind
    epoch: int
    term: int
    leader: ProcessId | None
    sentence: str

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


# --------------------------------------------------------------------------------------------------
# What a :class:`~potluck.membership.core.ClusterCore` wants done, in the order in which to do it.
#
# A core decides and nothing else; its driver carries these out.


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message on the control connection to a connected process; drop it if there is none."""

    to: ProcessId
    message: ClusterMessage


@dataclass(frozen=True, slots=True)
class ConnectTo:
    """Connect to this process, of which an acquaintance told; nothing is lost if it fails."""

    card: ProcessInfo


@dataclass(frozen=True, slots=True)
class ProbePort:
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
    """Do nothing that counts until ``ViewResumed``, ``Installed`` or ``Removed``."""

    reason: str


@dataclass(frozen=True, slots=True)
class ViewResumed:
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
    orderly: bool
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
    SendMessage
    | ConnectTo
    | ProbePort
    | Installed
    | Paused
    | ViewResumed
    | Abort
    | Disconnect
    | Removed
    | Note
)


# --------------------------------------------------------------------------------------------------
# How a cluster forms and decides: one frozen record, the same on all its members.


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a cluster forms and decides.  Times in seconds."""

    min_nodes: int = 1
    """With fewer processes no cluster is founded.  It says nothing about later losses."""
    quorum: Literal["majority", "any"] = "majority"
    """With "any", members that are cut off from the quorum continue alone, as a new lineage."""
    solo_delay: float = 1.0
    """How long a process that finds no other one looks around before it founds a cluster of one."""
    health: HealthConfig = field(default_factory=HealthConfig)
    election: ElectionConfig = field(default_factory=ElectionConfig)

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        if type(self.min_nodes) is not int:
            msg = f"min_nodes must be an integer, got {self.min_nodes!r}"
            raise TypeError(msg)
        if not 1 <= self.min_nodes <= MAX_MEMBERS:
            msg = f"min_nodes must be between 1 and {MAX_MEMBERS}, got {self.min_nodes}"
            raise ValueError(msg)
        if self.quorum not in {"majority", "any"}:
            msg = f'quorum must be "majority" or "any", got {self.quorum!r}'
            raise ValueError(msg)
        if not 0 <= self.solo_delay < float("inf"):
            msg = f"solo_delay must be a number of seconds, got {self.solo_delay}"
            raise ValueError(msg)
