"""Steps as transactions: what counts when the members of a cluster change in the middle of one.

A step is averaged out of place; a member *holds* it when its own result is complete, and applies it
only after learning that every member of the view holds it.  When the view changes, the members of
the next one tell each other where they stand, and all come to the same decision from the same
reports: a step that every survivor of its view holds is committed; otherwise nobody has applied it,
and it is averaged again among those who are here now.

Where a member stands is the (lineage, epoch, step) of what it has applied.  Which position counts
is decided by ancestry (:mod:`potluck.core.histories`).  The number of steps says nothing: a member
that continued alone may have made many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from potluck.core.ancestry import Branch
from potluck.core.histories import FRESH, History, Milestone, Position, best
from potluck.vocabulary import ProcessId, View

__all__ = ["FRESH", "Action", "Decision", "Position", "Report", "ancestry_in", "decide"]


Missing = tuple[tuple[ProcessId, str], ...]
"""Processes and their names."""


@dataclass(frozen=True, slots=True)
class Report:
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
    """Whether it has been in this lineage, and in all its ancestors, from their first view on."""
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
    def history(self) -> History:
        """Its position and what led to it."""
        return History(self.position, self.ancestry, self.samples, self.trail)

    def at(self, history: History) -> Report:
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


class Action(Enum):
    """What a member has to do."""

    KEEP = "keep"
    """It stands where all will stand."""
    APPLY = "apply"
    """Apply the result that it holds."""
    RECEIVE = "receive"
    """Get the state from those who have it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all members of a view do before they go on."""

    target: Position
    """Where all stand afterwards."""
    actions: tuple[Action, ...]
    """In rank order."""
    reason: str
    is_lost: bool = False
    """Whether the members that had the state are gone, and no member here ever had it."""
    missing: Missing = ()
    """Processes to wait for: one of them may have the state, and no member has it."""
    history: History = field(default_factory=History)
    """The target and what led to it."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks that have the state once they have applied what they hold."""
        return tuple(
            rank for rank, action in enumerate(self.actions) if action is not Action.RECEIVE
        )

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that need it."""
        return tuple(rank for rank, action in enumerate(self.actions) if action is Action.RECEIVE)


def decide(view: View, reports: Sequence[Report]) -> Decision:
    """What the members of a view do, given what each reports, in rank order.

    >>> view = View("f" * 32, 2, ())
    >>> three = Position("f" * 32, 1, 3)
    >>> held = Report(three, ("f" * 32, 1), three._replace(step=4), holds=True)
    >>> decide(view, [held, held]).target.step
    4
    >>> lacking = Report(three, ("f" * 32, 1), three._replace(step=4))
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
        return Decision(base, (Action.RECEIVE,) * len(reports), reason, missing=missing)
    if base == FRESH and not any(_has_begun(view, report) for report in reports):
        reason = "the members that have the state of this training are gone, and no member has it"
        return Decision(base, (Action.RECEIVE,) * len(reports), reason, is_lost=True)
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
    return Decision(target, _actions(target, reports), reason, history=history)


def ancestry_in(view: View, position: Position, base: History) -> tuple[Branch, ...]:
    """The ancestry of the lineage of a step that follows a base, as a view knows it.

    A lineage that was founded without a parent is a child of the state that it began with.

    >>> loaded = History(Position("a" * 32, 3, 120))
    >>> ancestry_in(View("b" * 32, 1, ()), Position("b" * 32, 1, 121), loaded)[0].epoch
    3
    """
    known = tuple(Branch(lineage, epoch) for lineage, epoch in view.ancestry)
    for place, branch in enumerate((*known, Branch(view.lineage, view.epoch))):
        if place and branch.lineage == position.lineage:
            return known[:place]
    return base.ancestry if position.lineage == base.position.lineage else base.branches


def _missing(view: View, reports: Sequence[Report]) -> Missing:
    """Whom to wait for: nobody, if a member has been where the state of this lineage was.

    Members that came in by a merge, or joined, have it only after they have settled once.
    """
    if view.epoch == 1 or any(report.insists for report in reports):
        return ()
    for report in reports:
        has_settled = view.lineage in {report.attended[0], report.position.lineage}
        if report.founder or has_settled:
            return ()
    found = {process: name for report in reports for process, name in report.missing}
    others = {*view.members, *(process for report in reports for process in report.ended)}
    return tuple(sorted((who, name) for who, name in found.items() if who not in others))


def _has_begun(view: View, report: Report) -> bool:
    """Whether what a member begins with can be what this training begins with."""
    lineages = {view.lineage, *(lineage for lineage, _ in view.ancestry)}
    return report.founder or report.attended[0] in lineages


def _authority(view: View, reports: Sequence[Report]) -> History:
    """The last step that counts for sure.

    The view's own lineage is what its members agreed on; in a new one ancestry decides.
    """
    histories = [report.history for report in reports]
    own = [each for each in histories if each.position.lineage == view.lineage]
    return best(own or histories, view.ancestry)


def _latest_attempt(view: View, base: Position, reports: Sequence[Report]) -> Position | None:
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


def _actions(target: Position, reports: Sequence[Report]) -> tuple[Action, ...]:
    actions = []
    for report in reports:
        if report.position == target:
            # Before the first step equal positions mean no equal weights: the first one's count.
            begins = target == FRESH and Action.KEEP in actions
            actions.append(Action.RECEIVE if begins else Action.KEEP)
        elif report.pending == target:
            actions.append(Action.APPLY)
        else:
            actions.append(Action.RECEIVE)
    return tuple(actions)
