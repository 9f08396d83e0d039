"""Settling: the first thing the members of a new view do together.

They tell each other where they stand, decide the step that was under way, bring the state to those
who lack it, and share out what is left of the batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import msgspec

from potluck.core.cluster_bounds import Ancestry, Count, Lineage
from potluck.core.histories import Trail
from potluck.core.steps import Action, Decision, Position, Report, decide
from potluck.errors import BackendUnavailable, MalformedFrame
from potluck.runtime.distributed import DistributedBackend
from potluck.training.sampler_intervals import Intervals, overlap
from potluck.training.shares import Condition
from potluck.vocabulary import View

__all__ = ["Settlement", "Standing", "pieces", "settle"]

MAX_TOKEN = 64
"""Characters of a mark, which becomes the name of a file."""


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

    def encode(self) -> tuple[Any, ...]:
        """As plain values."""
        report = self.report
        attempt = None if report.attempt is None else tuple(report.attempt)
        place = tuple(report.position), report.attended, attempt, report.holds, report.founder
        past = (
            tuple(map(tuple, report.ancestry)),
            report.samples,
            tuple(map(tuple, report.trail)),
            report.samples_held,
        )
        return (
            (*place, *past),
            self.taken,
            self.speed,
            astuple(self.condition),
            self.waits,
            self.token,
        )

    @classmethod
    def decode(cls, value: Any) -> Standing:
        """From what another member sent."""
        try:
            place, taken, speed, condition, waits, token = value
            report = _report(place)
            load, on_battery, heat, link = condition
            known = Condition(int(load), bool(on_battery), int(heat), int(link))
            pairs = tuple((int(a), int(b)) for a, b in taken)
            if token != "" and not (token.isalnum() and len(token) <= MAX_TOKEN):
                raise ValueError("its mark would be an odd name of a file")
            return cls(report, pairs, int(speed), known, bool(waits), token)
        except (
            TypeError,
            ValueError,
            OverflowError,
            AttributeError,
            msgspec.ValidationError,
        ) as error:
            raise MalformedFrame("A member's report makes no sense", cause=str(error)) from None


_Place = tuple[Lineage, Count, Count]
_Report = tuple[
    _Place, tuple[Lineage, Count], _Place | None, bool, bool, Ancestry, Count, Trail, Count
]
"""The fields of a report, in the order in which they travel."""


def _report(value: Any) -> Report:
    fields = msgspec.convert(value, _Report)
    position, attended, attempt, holds, founder, ancestry, samples, trail, samples_held = fields
    return Report(
        Position(*position),
        attended,
        None if attempt is None else Position(*attempt),
        holds,
        founder,
        ancestry,
        samples,
        trail,
        samples_held,
    )


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


def settle(group: DistributedBackend, view: View, mine: Standing) -> Settlement:
    """Ask everybody, and decide; all members call this first in a view."""
    told = [Standing.decode(value) for value in group.all_gather_object(mine.encode())]
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
    )


def pieces(shares: Sequence[Intervals]) -> list[tuple[int, int]]:
    """All intervals of several shares.

    >>> pieces([((0, 2),), (), ((5, 7), (9, 10))])
    [(0, 2), (5, 7), (9, 10)]
    """
    return [piece for share in shares for piece in share]
