"""Who may decide: the quorum of a view, as a pure function.

Any two quorums of one view have a living member in common, or all who were in one of them are
dead; see ``docs/membership.md`` for why that is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from potluck.vocabulary import ProcessId

__all__ = ["has_quorum"]


def has_quorum(
    members: Sequence[ProcessId], present: Collection[ProcessId], gone: AbstractSet[ProcessId]
) -> bool:
    """Whether those present may decide for a view.

    ``gone`` are the members proved dead, or departed with their last word known: they never vote,
    so they are not counted as present, whoever says so.

    >>> from potluck.vocabulary import NodeId
    >>> a, b, c, d = (ProcessId(NodeId(letter), 1) for letter in "abcd")
    >>> has_quorum([a, b, c], {b, c}, set())               # a majority
    True
    >>> has_quorum([a, b, c, d], {a, d}, set())            # half of it, with the first
    True
    >>> has_quorum([a, b, c, d], {c, d}, set())            # half of it, without
    False
    >>> has_quorum([a, b, c, d], {c, d}, {a, b})           # all that are left
    True
    """
    living = set(members) - gone
    votes = living.intersection(present)
    if not votes:
        return False
    twice = 2 * len(votes)
    return (
        twice > len(members) or (twice == len(members) and members[0] in votes) or votes == living
    )
