"""Steps as transactions: what counts when the members of a cluster change in the middle of one.

A step is averaged out of place; a member *holds* it when its own result is complete, and applies it
only after learning that every member of the view holds it.  When the view changes, the members of
the next one tell each other where they stand, and all come to the same decision from the same
reports: a step that every survivor of its view holds is committed; otherwise no member has applied
it, and it is averaged again among those who are here now.

Where a member stands is the (lineage, epoch, step) of what it has applied.  Which position counts
is decided by ancestry (:mod:`potluck.training.steps`).  The number of steps says nothing: a member
that continued alone may have made many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from potluck._types import Branch, ProcessId, View
from potluck.membership.messages import MAX_BRANCHES, Count, Lineage, branch_off, compare

# --------------------------------------------------------------------------------------------------
# What a training state consists of, and which of several states counts.
#
# A *position* is the last step that was applied.  A *history* is a position with everything needed
# to compare it with another: the ancestry of its lineage, the committed samples, and the *trail*,
# which is the last step of every earlier lineage that is part of the state.  States are compared by
# what they contain and by ancestry.  A number of steps or samples decides only between states that
# have nothing to do with each other.


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
class StepHistory:
    """A position, and what led to it.

    >>> parent = StepHistory(Position("a", 3, 120), samples=1200)
    >>> child = parent.extended(Position("b", 1, 121), (Branch("a", 3),), 1210)
    >>> child.contains(parent), child.contains(StepHistory(Position("a", 3, 130)))
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

    def contains(self, other: StepHistory) -> bool:
        """Whether another state is part of this one: nothing of it would be lost."""
        if other.position == FRESH:
            return True
        shared = _shared(other, self)
        if shared is None or shared[0][:3] != other.position:
            return False
        return shared[1][:3] >= other.position and shared[1].step >= other.position.step

    def origin_of(self, lineage: str) -> tuple[Branch, ...]:
        """The ancestry of a lineage without a parent that continues from this state.

        >>> StepHistory(Position("a", 3, 120)).origin_of("b")
        (Branch(lineage='a', epoch=3),)
        """
        branches = self.ancestry if self.position.lineage == lineage else self.branches
        return () if any(each.lineage == lineage for each in branches) else branches

    def extended(
        self, position: Position, ancestry: tuple[Branch, ...], samples: int
    ) -> StepHistory:
        """This history after one more step, made in a lineage of this ancestry."""
        is_same = position.lineage == self.position.lineage
        trail = self.trail if is_same else self.chain[-MAX_BRANCHES:]
        return StepHistory(position, ancestry, samples, trail)

    def discarded_by(self, target: StepHistory) -> Discarded | None:
        """What is lost when another state replaces this one; None if that one contains it.

        >>> mine = StepHistory(Position("a", 1, 7), samples=70)
        >>> mine.discarded_by(StepHistory(Position("b", 1, 9), samples=90))
        Discarded(steps=7, samples=70)
        >>> mine.discarded_by(StepHistory(Position("a", 2, 9), samples=90)) is None
        True
        """
        if target.contains(self):
            return None
        common = self.parting(target)
        return Discarded(self.position.step - common.step, max(0, self.samples - common.samples))

    def parting(self, other: StepHistory) -> Milestone:
        """The last point that this history shares with another one.

        >>> common = Milestone("a", 3, 120, 1200)
        >>> one = StepHistory(Position("b", 1, 157), samples=2680, trail=(common,))
        >>> one.parting(StepHistory(Position("a", 5, 140), samples=2000)) == common
        True
        """
        shared = _shared(self, other)
        if shared is None:
            return Milestone(*FRESH)
        return min(shared, key=lambda each: each.step)


def best(histories: Sequence[StepHistory], ancestry: Sequence[tuple[str, int]] = ()) -> StepHistory:
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


def order(one: StepHistory, other: StepHistory) -> int:
    """Which of two states followed their nearest common ancestor further: 1, -1, or 0.

    First by the epoch in which each left it, then by the step.  A state that continues from the
    very state that the other one is counts before it.

    >>> parent = StepHistory(Position("a", 3, 130))
    >>> early = StepHistory(Position("b", 1, 900), trail=(Milestone("a", 3, 120),))
    >>> late = StepHistory(Position("c", 1, 131), trail=(Milestone("a", 3, 130),))
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


def _shared(one: StepHistory, other: StepHistory) -> tuple[Milestone, Milestone] | None:
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


def _begun(history: StepHistory) -> list[tuple[Position | None, Milestone]]:
    """The last step of each lineage, and the one from which it began; None where not kept."""
    chain = history.chain
    first = FRESH if len(history.trail) < MAX_BRANCHES else None
    befores = [first, *(Position(*each[:3]) for each in chain)]
    return list(zip(befores, chain, strict=False))


def _left(history: StepHistory, milestone: Milestone) -> int:
    """The epoch to which a state followed a lineage: views without a step count as well."""
    epochs = [each.epoch for each in history.branches if each.lineage == milestone.lineage]
    return max([milestone.epoch, *epochs])


def _furthest(histories: Iterable[StepHistory]) -> list[StepHistory]:
    """Of each lineage the furthest; nothing that has not begun, unless there is nothing else."""
    found: dict[str, StepHistory] = {}
    for each in histories:
        known = found.get(each.position.lineage)
        if known is None or _reach(each) > _reach(known):
            found[each.position.lineage] = each
    begun = [each for each in found.values() if each.position != FRESH]
    return begun or [StepHistory()]


def _reach(history: StepHistory) -> tuple[object, ...]:
    """How far a history goes within its lineage; the rest makes the order total."""
    return history.position, history.samples, history.ancestry, history.trail


def ranked(histories: Iterable[StepHistory]) -> list[str]:
    """The lineages of these histories, best first.

    >>> old = StepHistory(Position("a", 1, 9), samples=9)
    >>> new = StepHistory(Position("b", 1, 3), samples=3)
    >>> ranked([new, old])
    ['a', 'b']
    """
    left, found = list(histories), []
    while left:
        lineage = best(left).position.lineage
        found.append(lineage)
        left = [each for each in left if each.position.lineage != lineage]
    return found


def explain(mine: StepHistory, target: StepHistory, lineage: str) -> str:
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


def _longer(mine: StepHistory, target: StepHistory) -> str:
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


# --------------------------------------------------------------------------------------------------

Missing = tuple[tuple[ProcessId, str], ...]
"""Processes and their names."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Where a member stands."""

    position: Position = FRESH
    """The last step it has applied."""
    attended: tuple[str, int] = ("", 0)
    """Lineage and epoch of the view in which it last took part in a decision."""
    attempt: Position | None = None
    """The step that it began to average last, and in which view."""
    holds: bool = False
    """Whether it has the complete result of that."""
    founder: bool = False
    """Whether it was in every view of this lineage and of all its ancestors: it missed no step."""
    ancestry: tuple[Branch, ...] = ()
    """Of the lineage of its position."""
    samples: int = 0
    """Committed samples at its position."""
    trail: tuple[Milestone, ...] = ()
    """The last step of each earlier lineage that is part of its state."""
    samples_held: int = 0
    """Committed samples once it has applied the result that it holds."""
    missing: Missing = ()
    """Processes that the lineage left out, and that may be alive."""
    insists: bool = False
    """Whether it continues without them, because a person said so or ``quorum`` allows it."""
    ended: tuple[ProcessId, ...] = ()
    """Processes that the lineage left out, and that this member knows to have ended."""

    @property
    def history(self) -> StepHistory:
        """Its position and what led to it."""
        return StepHistory(self.position, self.ancestry, self.samples, self.trail)

    def at(self, history: StepHistory) -> StepReport:
        """The same member, with another state."""
        return replace(
            self,
            position=history.position,
            ancestry=history.ancestry,
            samples=history.samples,
            trail=history.trail,
        )

    @property
    def pending(self) -> Position | None:
        """The step it could apply now."""
        is_next = self.attempt is not None and self.attempt.step == self.position.step + 1
        return self.attempt if self.holds and is_next else None


class SyncAction(Enum):
    """What a member has to do."""

    KEEP = "keep"
    """It stands where all will stand."""
    APPLY = "apply"
    """Apply the result that it holds."""
    RECEIVE = "receive"
    """Get the state from those who have it."""


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """What all members of a view do before they continue."""

    target: Position
    """Where all stand afterwards."""
    actions: tuple[SyncAction, ...]
    """In rank order."""
    reason: str
    is_lost: bool = False
    """Whether the members that had the state are gone, and no member here ever had it."""
    missing: Missing = ()
    """Processes to wait for: one of them may have the state, and no member has it."""
    history: StepHistory = field(default_factory=StepHistory)
    """The target and what led to it."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks that have the state once they have applied what they hold."""
        return tuple(
            rank for rank, action in enumerate(self.actions) if action is not SyncAction.RECEIVE
        )

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that need it."""
        return tuple(
            rank for rank, action in enumerate(self.actions) if action is SyncAction.RECEIVE
        )


def decide(view: View, reports: Sequence[StepReport]) -> SyncDecision:
    """What the members of a view do, given what each reports, in rank order.

    >>> view = View("f" * 32, 2, ())
    >>> three = Position("f" * 32, 1, 3)
    >>> held = StepReport(three, ("f" * 32, 1), three._replace(step=4), holds=True)
    >>> decide(view, [held, held]).target.step
    4
    >>> lacking = StepReport(three, ("f" * 32, 1), three._replace(step=4))
    >>> decide(view, [held, lacking]).target.step
    3
    """
    history = _authority(view, reports)
    base = history.position
    missing = _missing(view, reports)
    if missing:
        names = ", ".join(name or str(process) for process, name in missing)
        reason = (
            f"no member here has the state of this training; {names} may have it, and is not known "
            "to have ended"
        )
        return SyncDecision(base, (SyncAction.RECEIVE,) * len(reports), reason, missing=missing)
    if base == FRESH and not any(_has_begun(view, report) for report in reports):
        reason = "no member has the state of this training, and those that had it are not here"
        return SyncDecision(base, (SyncAction.RECEIVE,) * len(reports), reason, is_lost=True)
    attempt = _latest_attempt(view, base, reports)
    target, reason = base, f"all continue from {base}"
    if attempt is not None:
        survivors = [
            report
            for report in reports
            if report.position == base and report.attended == (attempt.lineage, attempt.epoch)
        ]
        lacking = sum(report.pending != attempt for report in survivors)
        if survivors and not lacking:
            target = attempt
            samples = max(report.samples_held for report in survivors)
            history = history.extended(attempt, ancestry_in(view, attempt, history), samples)
            reason = f"all {len(survivors)} survivors hold {attempt}: it counts"
        else:
            reason = (
                f"{lacking} of {len(survivors)} survivors lack {attempt}, "
                "so no member has applied it: it is averaged again"
            )
    return SyncDecision(target, _actions(target, reports), reason, history=history)


def ancestry_in(view: View, position: Position, base: StepHistory) -> tuple[Branch, ...]:
    """The ancestry of the lineage of a step that follows a base, as a view knows it.

    A lineage that was founded without a parent is a child of the state that it began with.

    >>> loaded = StepHistory(Position("a" * 32, 3, 120))
    >>> ancestry_in(View("b" * 32, 1, ()), Position("b" * 32, 1, 121), loaded)[0].epoch
    3
    """
    known = tuple(Branch(lineage, epoch) for lineage, epoch in view.ancestry)
    for place, branch in enumerate((*known, Branch(view.lineage, view.epoch))):
        if place and branch.lineage == position.lineage:
            return known[:place]
    return base.ancestry if position.lineage == base.position.lineage else base.branches


def _missing(view: View, reports: Sequence[StepReport]) -> Missing:
    """Whom to wait for: no member, if a member has been where the state of this lineage was.

    Members that came in by a merge, or joined, have it only after they have settled once.  A
    state of this lineage from a checkpoint is not enough: a process that was left out may have
    later steps.
    """
    if view.epoch == 1 or any(report.insists for report in reports):
        return ()
    for report in reports:
        if report.founder or report.attended[0] == view.lineage:
            return ()
    found = {process: name for report in reports for process, name in report.missing}
    others = {*view.members, *(process for report in reports for process in report.ended)}
    return tuple(sorted((who, name) for who, name in found.items() if who not in others))


def _has_begun(view: View, report: StepReport) -> bool:
    """Whether what a member begins with can be what this training begins with."""
    lineages = {view.lineage, *(lineage for lineage, _ in view.ancestry)}
    return report.founder or report.attended[0] in lineages


def _authority(view: View, reports: Sequence[StepReport]) -> StepHistory:
    """The last step that counts for sure.

    The view's own lineage is what its members agreed on, also if the one that has its state has
    made steps elsewhere since; in a new lineage ancestry decides.
    """
    histories = [report.history for report in reports]
    own = [each for each in histories if each.position.lineage == view.lineage]
    own = own or [each for each in histories if _has_step_of(each, view.lineage)]
    return best(own or histories, view.ancestry)


def _has_step_of(history: StepHistory, lineage: str) -> bool:
    return any(milestone.lineage == lineage for milestone in history.trail)


def _latest_attempt(view: View, base: Position, reports: Sequence[StepReport]) -> Position | None:
    """The try of the next step that was begun last: of the nearest lineage, in the last epoch."""
    order = [base.lineage, *(lineage for lineage, _ in view.ancestry), view.lineage]
    nearness = {lineage: place for place, lineage in enumerate(order)}
    attempts = [
        report.attempt
        for report in reports
        if report.position == base
        and report.attempt is not None
        and report.attempt.step == base.step + 1
    ]
    return max(
        attempts,
        key=lambda each: (nearness.get(each.lineage, -1), each.epoch, each),
        default=None,
    )


def _actions(target: Position, reports: Sequence[StepReport]) -> tuple[SyncAction, ...]:
    actions = []
    for report in reports:
        if report.position == target:
            # Before the first step equal positions mean no equal weights: the first one's count.
            begins = target == FRESH and SyncAction.KEEP in actions
            actions.append(SyncAction.RECEIVE if begins else SyncAction.KEEP)
        elif report.pending == target:
            actions.append(SyncAction.APPLY)
        else:
            actions.append(SyncAction.RECEIVE)
    return tuple(actions)
