"""A step under way, and how a step went."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.histories import History, Position, explain
from potluck.training.elastic_averaging import Gradients
from potluck.training.elastic_record import Record

__all__ = ["DiscardedWork", "Pending", "StepOutcome", "compare_states"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step went.

    >>> StepOutcome(step=3, counted=True, world_size=2, weight=64.0, tries=1).step
    3
    """

    step: int
    """Steps that are committed now."""
    counted: bool
    """Whether this member's gradients are in it.

    If not, they were for a state it no longer has, or for samples that others have now.
    """
    world_size: int
    """How many members there are now."""
    weight: float
    """Of all gradients in it together."""
    tries: int
    """How often its averaging was begun."""


@dataclass(frozen=True, slots=True)
class DiscardedWork:
    """Committed steps of this machine that are not in the state with which the cluster continues.

    >>> apart, together = Position("a" * 32, 1, 157), Position("b" * 32, 4, 120)
    >>> lost = DiscardedWork(37, 1480, apart, together, "both sides met", 37, 1480)
    >>> str(lost).partition("made on")[0], str(lost).partition(": ")[2]
    ('37 steps (1,480 samples) ', 'the cluster continues from step 120. Reason: both sides met.')
    """

    steps: int
    samples: int
    before: Position
    """The last step that this machine had applied."""
    after: Position
    """The step from which the cluster continues."""
    reason: str
    total_steps: int
    """Steps discarded by this trainer so far, these included."""
    total_samples: int
    is_loaded: bool = False
    """Whether the steps come from a checkpoint that this machine loaded."""

    def __str__(self) -> str:
        """One sentence for people, and the reason."""
        source = "made on this machine while it was apart from the others"
        if self.is_loaded:
            source = "that this machine loaded from a checkpoint"
        return (
            f"{self.steps:,} step{'s' * (self.steps != 1)} ({self.samples:,} "
            f"sample{'s' * (self.samples != 1)}) {source} "
            f"{'is' if self.steps == 1 else 'are'} discarded: the cluster continues from "
            f"step {self.after.step}. Reason: {self.reason}."
        )


def compare_states(
    mine: History, target: History, lineage: str, last: DiscardedWork | None
) -> DiscardedWork | None:
    """What is discarded when the target replaces my state in a view of a lineage, if anything.

    ``last`` is what was discarded before.
    """
    lost = mine.discarded_by(target)
    if lost is None:
        return None
    steps, samples = lost
    reason = explain(mine, target, lineage)
    before = (0, 0) if last is None else (last.total_steps, last.total_samples)
    return DiscardedWork(
        steps,
        samples,
        mine.position,
        target.position,
        reason,
        before[0] + steps,
        before[1] + samples,
    )


@dataclass(slots=True)
class Pending:
    """A step under way: what went into it stays as it is until the step is applied."""

    gradients: Gradients
    weight: float
    tries: int = 0
    records: tuple[Record, ...] = ()
    """Of all members, for the try that this member holds."""
