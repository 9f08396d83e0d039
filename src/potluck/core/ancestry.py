"""Where a lineage comes from, and which of two lineages wins when they meet.

A lineage is a sequence of views.  A *child* lineage begins at one view of its parent.  Its
*ancestry* lists every such point, oldest first: the pairs (lineage, last epoch followed).  Ancestry
decides before anything else: of two lineages with a common ancestor, the one that followed that
ancestor to the later epoch wins, however many steps the other one made.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.vocabulary import Branch

__all__ = ["MAX_BRANCHES", "Branch", "Claim", "branch_off", "compare", "outranks"]

MAX_BRANCHES = 32
"""Branches that an ancestry keeps; of a longer one the newest."""


def branch_off(ancestry: tuple[Branch, ...], lineage: str, epoch: int) -> tuple[Branch, ...]:
    """The ancestry of a child that begins at an epoch of a lineage with this ancestry.

    >>> branch_off((Branch("a", 4),), "b", 2)
    (Branch(lineage='a', epoch=4), Branch(lineage='b', epoch=2))
    """
    return (*ancestry, Branch(lineage, epoch))[-MAX_BRANCHES:]


def compare(one: tuple[Branch, ...], other: tuple[Branch, ...]) -> int:
    """Which of two followed their nearest common ancestor further: 1, -1, or 0 if neither did.

    Each is an ancestry that ends with the lineage itself and its present epoch.  An ancestor that
    is still alive counts before a child that left it in the same epoch.

    >>> parent, early = (Branch("a", 5),), (Branch("a", 3), Branch("b", 90))
    >>> compare(parent, early), compare(early, parent)
    (1, -1)
    >>> compare(early, (Branch("a", 3), Branch("c", 2))), compare(parent, (Branch("d", 1),))
    (0, 0)
    """
    theirs = {branch.lineage: branch for branch in other}
    for mine in reversed(one):
        if mine.lineage in theirs:
            left = theirs[mine.lineage]
            here, there = (mine.epoch, mine is one[-1]), (left.epoch, left is other[-1])
            return (here > there) - (here < there)
    return 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides which of two lineages stays."""

    branches: tuple[Branch, ...]
    """Its ancestry, and at the end the lineage itself with its present epoch."""
    samples: int = 0
    """Committed training samples."""
    members: int = 0

    @property
    def lineage(self) -> str:
        """Which lineage this is about."""
        return self.branches[-1].lineage


def outranks(one: Claim, other: Claim) -> bool:
    """Whether the first of two lineages stays: by ancestry, samples, members, then the lower id.

    >>> parent = Claim((Branch("a", 5),), samples=10, members=3)
    >>> child = Claim((Branch("a", 3), Branch("b", 90)), samples=99, members=4)
    >>> outranks(parent, child), outranks(child, parent)
    (True, False)
    >>> outranks(Claim((Branch("c", 1),), samples=1), Claim((Branch("d", 1),), samples=2))
    False
    """
    order = compare(one.branches, other.branches)
    mine, theirs = (order, one.samples, one.members), (0, other.samples, other.members)
    return mine > theirs or (mine == theirs and one.lineage < other.lineage)
