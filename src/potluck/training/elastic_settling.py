"""Settling: the first thing the members of a new view do together.

They tell each other where they stand, decide the step that was under way, bring the state to those
who lack it, and share out what is left of the batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from potluck.core.cluster_bounds import Ancestry, Count, Label, Lineage, Message
from potluck.core.histories import Trail
from potluck.core.steps import FRESH, Action, Decision, Position, Report, decide
from potluck.errors import BackendUnavailable
from potluck.runtime.distributed import DistributedBackend
from potluck.training.peer_messages import Shares, check_intervals, gather, malformed
from potluck.training.sampler_intervals import Intervals, overlap
from potluck.training.shares import Condition
from potluck.vocabulary import ProcessId, View

__all__ = ["Settlement", "Standing", "pieces", "settle"]

WHAT = "its report of where it stands"

Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z]{0,64}\Z")]
"""A mark, which becomes part of the name of a file: nothing that could lead elsewhere."""


_Place = tuple[Lineage, Count, Count]
_LARGEST = (1 << 62) - 1
_MANY_STEPS = 1 << 40  # a thousand a second for 34 years
_NEAR = 1 << 20  # steps
_MOST_MISSING = 32  # processes that a report names


class _Told(Message, frozen=True):
    """What a member reports, as it travels."""

    position: _Place
    attended: tuple[Lineage, Count]
    attempt: _Place | None
    holds: bool
    founder: bool
    ancestry: Ancestry
    samples: Count
    trail: Trail
    samples_held: Count
    missing: Annotated[tuple[tuple[ProcessId, Label], ...], msgspec.Meta(max_length=_MOST_MISSING)]
    insists: bool
    ended: Annotated[tuple[ProcessId, ...], msgspec.Meta(max_length=_MOST_MISSING)]
    taken: Shares
    speed: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    condition: Condition
    waits: bool
    token: Token


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member reports."""

    report: Report
    taken: Intervals
    """Samples it has in hand for its next step."""
    speed: int
    condition: Condition
    waits: bool = False
    """Whether it has computed, and waits for the others."""
    token: str = ""
    """The mark it has left in its folder for checkpoints."""

    def message(self) -> _Told:
        """As it travels."""
        report = self.report
        return _Told(
            report.position,
            report.attended,
            report.attempt,
            report.holds,
            report.founder,
            report.ancestry,
            min(report.samples, _LARGEST),
            report.trail,
            min(report.samples_held, _LARGEST),
            report.missing[:_MOST_MISSING],
            report.insists,
            report.ended[:_MOST_MISSING],
            self.taken,
            self.speed,
            self.condition,
            self.waits,
            self.token,
        )

    @classmethod
    def of(cls, told: _Told) -> Standing:
        """From what another member sent."""
        report = Report(
            Position(*told.position),
            told.attended,
            None if told.attempt is None else Position(*told.attempt),
            told.holds,
            told.founder,
            told.ancestry,
            told.samples,
            told.trail,
            told.samples_held,
            told.missing,
            told.insists,
            told.ended,
        )
        return cls(report, told.taken, told.speed, told.condition, told.waits, told.token)


def _check(rank: int, standing: Standing, view: View, size: int | None) -> None:
    """Raise if a report contradicts what all members know."""
    report = standing.report
    wrong = check_intervals(standing.taken, size)
    for position in (report.position, report.attempt):
        if position is not None and position[0] == view.lineage and position[1] > view.epoch:
            wrong = f"{position}, while view {view.epoch} is the latest"
    if wrong:
        raise malformed(rank, WHAT, wrong)


def _check_steps(steps: Sequence[int]) -> None:
    """Raise if a member alone claims a step that no training reaches.

    The others would follow it, and their own next step could be one that no message can tell.
    """
    for rank, step in enumerate(steps):
        near = sum(each >= step - _NEAR for each in steps)
        if step >= _MANY_STEPS and 2 * near <= len(steps):
            raise malformed(rank, WHAT, f"step {step}, which no training reaches")


@dataclass(frozen=True, slots=True)
class Settlement:
    """What the members of a view have found out."""

    decision: Decision
    action: Action
    """What this member has to do."""
    taken: tuple[Intervals, ...]
    """In rank order: samples that members had in hand."""
    speeds: tuple[int, ...]
    conditions: tuple[Condition, ...]
    waiting: tuple[int, ...]
    """Ranks that have computed the next step already."""
    tokens: tuple[str, ...] = ()
    """In rank order: the marks they have left in their folders."""
    trained: tuple[int, ...] = ()
    """Ranks that had made a step before."""

    def kept(self, alike: Container[int]) -> list[Intervals | None]:
        """In rank order, what members still have in hand; None for what does not count.

        ``alike`` are the ranks that had the state before anything was sent.
        """
        kept: list[Intervals | None] = [None] * len(self.taken)
        for rank in (*self.decision.sources, *self.decision.receivers):
            action = self.decision.actions[rank]
            others = pieces([share for share in kept if share])
            if action is Action.APPLY:
                kept[rank] = ()
            elif action is Action.RECEIVE and rank not in alike:
                continue
            # Two who began apart, or of whom one was away while its samples were handed out anew,
            # may have taken the same: what the first one has counts.
            elif not overlap(self.taken[rank], others):
                kept[rank] = self.taken[rank]
        return kept


def settle(
    group: DistributedBackend, view: View, mine: Standing, size: int | None = None
) -> Settlement:
    """Ask everybody, and decide; all members call this first in a view.

    ``size`` is the number of samples that there are, if they are handed out.
    """
    told = [Standing.of(each) for each in gather(group, mine.message(), _Told, WHAT)]
    for rank, each in enumerate(told):
        _check(rank, each, view, size)
    _check_steps([each.report.position.step for each in told])
    decision = decide(view, [each.report for each in told])
    if decision.is_lost:
        raise BackendUnavailable(
            "This member has never had the state of the training",
            cause=decision.reason,
            hint="Start it again: it then begins anew, or from a checkpoint.",
        )
    return Settlement(
        decision,
        decision.actions[group.rank],
        tuple(each.taken for each in told),
        tuple(each.speed for each in told),
        tuple(each.condition for each in told),
        tuple(
            rank
            for rank, each in enumerate(told)
            if each.waits and decision.actions[rank] is Action.KEEP
        ),
        tuple(each.token for each in told),
        tuple(rank for rank, each in enumerate(told) if each.report.position != FRESH),
    )


def pieces(shares: Sequence[Intervals]) -> list[tuple[int, int]]:
    """All intervals of several shares.

    >>> pieces([((0, 2),), (), ((5, 7), (9, 10))])
    [(0, 2), (5, 7), (9, 10)]
    """
    return [piece for share in shares for piece in share]
