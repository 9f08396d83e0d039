"""Who leads, in which term, and why: the state of an election and what happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from potluck.vocabulary import ProcessId, settle_seconds

__all__ = ["ElectionConfig", "ElectionEvent", "ElectionKind", "ElectionRole", "ElectionState"]


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
    """Somebody else leads."""
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
