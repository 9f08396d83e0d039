"""What happened in a cluster, for logs, screens and callbacks: each event is a sentence.

The same words serve the log, the command and the dashboard.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from potluck.vocabulary import ProcessId, View

__all__ = ["ClusterState", "MembershipChange", "MembershipEvent"]


class ClusterState(Enum):
    """Where this process stands."""

    JOINING = "joining"
    """Without a view: it looks for others, and for a cluster to enter."""
    ACTIVE = "active"
    """A member of a view, with a quorum of it in contact."""
    PAUSED = "paused"
    """A member of a view without a quorum in contact: somebody else may be going on."""
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
    """A member said goodbye."""
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
    """Why we, or somebody who wants to enter, are not in a view yet."""
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
