"""Steps as transactions: what counts when the members of a cluster change in the middle of one.

A step is averaged out of place; a member *holds* it when its own result is complete, and applies it
only after learning that every member of the view holds it.  When the view changes, the members of
the next one tell each other where they stand, and all come to the same decision from the same
reports: a step that every survivor of its view holds is committed; otherwise nobody has applied it,
and it is averaged again among those who are here now.

Where a member stands is the (lineage, epoch, step) of what it has applied.  A mere number of steps
says nothing: somebody who went on alone may have made many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from potluck.vocabulary import View

__all__ = ["FRESH", "Action", "Decision", "Position", "Report", "decide"]


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
"""Where everybody begins who has not loaded anything."""


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
    """Whether it has been in this lineage from its first view on."""

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
    """Whether those who knew the state are gone, and nobody here has ever had it."""

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
    base = _authority(view, reports)
    if base == FRESH and not any(
        report.founder or report.attended[0] == view.lineage for report in reports
    ):
        reason = "those who have the state of this training are gone, and nobody here has got it"
        return Decision(base, (Action.RECEIVE,) * len(reports), reason, is_lost=True)
    attempt = _latest_attempt(view, base, reports)
    target, reason = base, f"all go on from {base}"
    if attempt is not None:
        survivors = [
            report
            for report in reports
            if report.position == base and report.attended == (attempt.lineage, attempt.epoch)
        ]
        lacking = sum(report.pending != attempt for report in survivors)
        if survivors and not lacking:
            target = attempt
            reason = f"all {len(survivors)} survivors hold {attempt}: it counts"
        else:
            reason = (
                f"{lacking} of {len(survivors)} survivors lack {attempt}, "
                "so nobody has applied it: it is averaged again"
            )
    return Decision(target, _actions(target, reports), reason)


def _authority(view: View, reports: Sequence[Report]) -> Position:
    """The last step that counts for sure.

    The view's own lineage is what its members agreed on; in a new one, what most work went into.
    """
    positions = [report.position for report in reports]
    lineages = Counter(position.lineage for position in positions)
    if view.lineage in lineages:
        chosen = view.lineage
    else:
        chosen = max(
            lineages,
            key=lambda each: (
                each != "",
                max(position.step for position in positions if position.lineage == each),
                lineages[each],
                each,
            ),
        )
    return max(position for position in positions if position.lineage == chosen)


def _latest_attempt(view: View, base: Position, reports: Sequence[Report]) -> Position | None:
    """The try of the next step that was begun last."""
    attempts = [
        report.attempt
        for report in reports
        if report.position == base
        and report.attempt is not None
        and report.attempt.step == base.step + 1
    ]
    return max(
        attempts,
        key=lambda each: (each.lineage == view.lineage, each.lineage == base.lineage, each),
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
