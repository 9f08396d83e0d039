"""What a training state consists of, and which of several states counts.

A *position* is the last step that was applied.  A *history* is a position with everything needed to
compare it with another: the ancestry of its lineage, the committed samples, and the *trail*, which
is the last step of every earlier lineage that is part of the state.  States are compared by what
they contain and by ancestry.  A number of steps or samples decides only between states that have
nothing to do with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from potluck.core.ancestry import MAX_BRANCHES, Branch, branch_off, compare
from potluck.core.cluster_bounds import Count, Lineage

__all__ = [
    "FRESH",
    "Discarded",
    "History",
    "Milestone",
    "Position",
    "Trail",
    "best",
    "explain",
    "order",
    "ranked",
]


class Position(NamedTuple):
    """A step, and the view in which it was averaged.

    >>> str(Position("f" * 32, 3, 120))
    'step 120 (view 3 of ffffffff)'
    """

    lineage: str
    epoch: int
    step: int

    def __str__(self) -> str:
        """For people."""
        where = f"view {self.epoch} of {self.lineage[:8]}" if self.lineage else "not begun"
        return f"step {self.step} ({where})"


FRESH = Position("", 0, 0)
"""The position of every member that has neither trained nor loaded anything."""


class Milestone(NamedTuple):
    """The last step of a lineage that is part of a state, and the samples up to it."""

    lineage: Lineage
    epoch: Count
    step: Count
    samples: Count = 0


class Discarded(NamedTuple):
    """Committed steps and samples that a state lacks."""

    steps: int
    samples: int


Trail = Annotated[tuple[Milestone, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
"""The last step of each of several lineages, oldest first."""


@dataclass(frozen=True, slots=True)
class History:
    """A position, and what led to it.

    >>> parent = History(Position("a", 3, 120), samples=1200)
    >>> child = parent.extended(Position("b", 1, 121), (Branch("a", 3),), 1210)
    >>> child.contains(parent), child.contains(History(Position("a", 3, 130)))
    (True, False)
    """

    position: Position = FRESH
    ancestry: tuple[Branch, ...] = ()
    """Of the lineage of the position."""
    samples: int = 0
    """Committed samples, of all epochs of the data."""
    trail: tuple[Milestone, ...] = ()
    """The last step of each earlier lineage that is part of the state, oldest first."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The ancestry, and at the end the lineage itself with the epoch of the last step."""
        lineage, epoch, _ = self.position
        return branch_off(self.ancestry, lineage, epoch) if lineage else ()

    @property
    def chain(self) -> tuple[Milestone, ...]:
        """The trail, and at the end the position; empty if nothing has begun."""
        if self.position == FRESH:
            return ()
        return (*self.trail, Milestone(*self.position, self.samples))

    def contains(self, other: History) -> bool:
        """Whether another state is part of this one: nothing of it would be lost."""
        if other.position == FRESH:
            return True
        shared = _shared(other, self)
        if shared is None or shared[0][:3] != other.position:
            return False
        return shared[1][:3] >= other.position and shared[1].step >= other.position.step

    def origin_of(self, lineage: str) -> tuple[Branch, ...]:
        """The ancestry of a lineage without a parent that continues from this state.

        >>> History(Position("a", 3, 120)).origin_of("b")
        (Branch(lineage='a', epoch=3),)
        """
        branches = self.ancestry if self.position.lineage == lineage else self.branches
        return () if any(each.lineage == lineage for each in branches) else branches

    def extended(self, position: Position, ancestry: tuple[Branch, ...], samples: int) -> History:
        """This history after one more step, made in a lineage of this ancestry."""
        is_same = position.lineage == self.position.lineage
        trail = self.trail if is_same else self.chain[-MAX_BRANCHES:]
        return History(position, ancestry, samples, trail)

    def discarded_by(self, target: History) -> Discarded | None:
        """What is lost when another state replaces this one; None if that one contains it.

        >>> mine = History(Position("a", 1, 7), samples=70)
        >>> mine.discarded_by(History(Position("b", 1, 9), samples=90))
        Discarded(steps=7, samples=70)
        >>> mine.discarded_by(History(Position("a", 2, 9), samples=90)) is None
        True
        """
        if target.contains(self):
            return None
        common = self.parting(target)
        return Discarded(self.position.step - common.step, max(0, self.samples - common.samples))

    def parting(self, other: History) -> Milestone:
        """The last point that this history shares with another one.

        >>> common = Milestone("a", 3, 120, 1200)
        >>> one = History(Position("b", 1, 157), samples=2680, trail=(common,))
        >>> one.parting(History(Position("a", 5, 140), samples=2000)) == common
        True
        """
        shared = _shared(self, other)
        if shared is None:
            return Milestone(*FRESH)
        return min(shared, key=lambda each: each.step)


def best(histories: Sequence[History], ancestry: Sequence[tuple[str, int]] = ()) -> History:
    """The history that counts in a view of this ancestry; the same whatever their order.

    A state that contains another one counts before it.  Then the nearest ancestor of the view
    counts, then the one that followed a common ancestor longer.  Between states that share nothing:
    committed samples, then the number of members that have it, then the lower id.  What has not
    begun counts last.
    """
    counts = Counter(each.position for each in histories)
    lines = _furthest(histories)
    left = [
        each
        for each in lines
        if not any(other is not each and other.contains(each) for other in lines)
    ]
    left = left or lines  # members that contradict each other still come to one result
    for lineage, _ in reversed(ancestry):
        for each in left:
            if each.position.lineage == lineage:
                return each
    top = [each for each in left if not any(order(other, each) > 0 for other in lines)]
    return min(
        top or left,
        key=lambda each: (-each.samples, -counts[each.position], each.position.lineage),
    )


def order(one: History, other: History) -> int:
    """Which of two states followed their nearest common ancestor further: 1, -1, or 0.

    First by the epoch in which each left it, then by the step.  A state that continues from the
    very state that the other one is counts before it.

    >>> parent = History(Position("a", 3, 130))
    >>> early = History(Position("b", 1, 900), trail=(Milestone("a", 3, 120),))
    >>> late = History(Position("c", 1, 131), trail=(Milestone("a", 3, 130),))
    >>> order(parent, early), order(late, parent), order(late, early)
    (1, 1, 1)
    """
    shared = _shared(one, other)
    if shared is not None:
        mine, theirs = shared
        here, there = (_left(one, mine), mine.step), (_left(other, theirs), theirs.step)
        if here != there:
            return 1 if here > there else -1
        ends, ended = mine == one.chain[-1], theirs == other.chain[-1]
        if ends != ended:
            return 1 if ended else -1
    return compare(one.branches, other.branches)


def _shared(one: History, other: History) -> tuple[Milestone, Milestone] | None:
    """The last steps that two states have of their nearest common lineage.

    When all that had the state of a lineage have ended, its members continue with another state.
    So a lineage is common only to states that began it from the same step.
    """
    theirs = _begun(other)[::-1]
    for begun, mine in reversed(_begun(one)):
        for start, each in theirs:
            if each.lineage == mine.lineage and (begun == start or None in (begun, start)):
                return mine, each
    return None


def _begun(history: History) -> list[tuple[Position | None, Milestone]]:
    """The last step of each lineage, and the one from which it began; None where not kept."""
    chain = history.chain
    first = FRESH if len(history.trail) < MAX_BRANCHES else None
    befores = [first, *(Position(*each[:3]) for each in chain)]
    return list(zip(befores, chain, strict=False))


def _left(history: History, milestone: Milestone) -> int:
    """The epoch to which a state followed a lineage: views without a step count as well."""
    epochs = [each.epoch for each in history.branches if each.lineage == milestone.lineage]
    return max([milestone.epoch, *epochs])


def _furthest(histories: Iterable[History]) -> list[History]:
    """Of each lineage the furthest; nothing that has not begun, unless there is nothing else."""
    found: dict[str, History] = {}
    for each in histories:
        known = found.get(each.position.lineage)
        if known is None or _reach(each) > _reach(known):
            found[each.position.lineage] = each
    begun = [each for each in found.values() if each.position != FRESH]
    return begun or [History()]


def _reach(history: History) -> tuple[object, ...]:
    """How far a history goes within its lineage; the rest makes the order total."""
    return history.position, history.samples, history.ancestry, history.trail


def ranked(histories: Iterable[History]) -> list[str]:
    """The lineages of these histories, best first.

    >>> old, new = History(Position("a", 1, 9), samples=9), History(Position("b", 1, 3), samples=3)
    >>> ranked([new, old])
    ['a', 'b']
    """
    left, found = list(histories), []
    while left:
        lineage = best(left).position.lineage
        found.append(lineage)
        left = [each for each in left if each.position.lineage != lineage]
    return found


def explain(mine: History, target: History, lineage: str) -> str:
    """Why a view of this lineage continues from the target and not from mine, in words."""
    if mine.position.lineage == target.position.lineage:
        return "the other members of this lineage continued without these steps"
    if order(target, mine) > 0:
        return f"both sides have a common past, which {_longer(mine, target)}"
    if target.position.lineage == lineage:
        return "the cluster continues the lineage that it belongs to"
    if target.samples != mine.samples:
        return (
            f"the others have {target.samples:,} committed samples, this machine {mine.samples:,}"
        )
    return (
        "both sides have equally many committed samples; then the number of members decides, "
        "then the lower id of the lineage"
    )


def _longer(mine: History, target: History) -> str:
    left = {each.lineage: each.epoch for each in mine.branches}
    for branch in reversed(target.branches):
        if branch.epoch > left.get(branch.lineage, branch.epoch):
            epochs = branch.epoch, left[branch.lineage]
            return "the others followed to view {} and this machine to view {}".format(*epochs)
    shared = _shared(target, mine)
    if shared is not None and shared[0].step > shared[1].step:
        steps = shared[0].step, shared[1].step
        return "the others followed to step {} and this machine to step {}".format(*steps)
    return "the others continued"
