"""How operations of a view end, in words: the same sentence on every rank."""

from __future__ import annotations

from potluck.core.cluster_cards import ProcessCard
from potluck.errors import BackendUnavailable, DistributedError, PeerLost, ViewChanged

__all__ = ["belongs_to_parent", "changed", "ended_for_good", "lost", "removed"]

_CALL_AGAIN = "The others go on without it: call again, and the operation runs among them."


def lost(card: ProcessCard, rank: int | None, reason: str) -> DistributedError:
    """A member is gone."""
    where = f"{card.name} at {card.hosts[0]}" if card.hosts else card.name
    who = f"Rank {rank}" if rank is not None else "A member"
    return PeerLost(
        f"{who} ({where or card.process}) is gone",
        rank=rank,
        node=card.node,
        host=card.name or None,
        cause=reason,
        hint=_CALL_AGAIN,
    )


def changed(reason: str) -> DistributedError:
    """Somebody came, or the view changed for another reason than a loss."""
    return ViewChanged(
        "The members of the cluster have changed",
        cause=reason,
        hint="Call again: the operation runs among those who are here now.",
    )


def removed(reason: str) -> DistributedError:
    """The others go on without us; we join them again."""
    return ViewChanged(
        "The cluster went on without this node",
        cause=reason,
        hint="It joins again by itself; a call waits for that.",
    )


def ended_for_good(reason: str) -> DistributedError:
    """Nothing runs here any more."""
    return BackendUnavailable(
        "This node has left its cluster",
        cause=reason,
        hint="Join anew: potluck.join().",
    )


def belongs_to_parent(pid: int) -> DistributedError:
    """For a forked child."""
    return BackendUnavailable(
        f"This cluster belongs to the parent process (pid {pid})",
        hint="Join anew in the child process if it has to take part.",
    )
