"""The state of a simulated training as a value: each step is a node that knows what it followed.

Two members have the same state if they have the same node.  A state also says which samples of the
present pass over the data went into it, so that none counts twice.
"""

from __future__ import annotations

from potluck.core.steps import FRESH, Position
from potluck.testing.violation import Violation

__all__ = ["DATASET", "Share", "States", "TrainingValue"]

DATASET = 24
"""Samples of one pass over the data."""
_ALL = (1 << DATASET) - 1

Share = tuple[int, ...]


class TrainingValue:
    """What a member's training consists of after one step."""

    __slots__ = ("depth", "mask", "parent", "passes", "position", "samples")

    def __init__(
        self, parent: TrainingValue | None, position: Position, mask: int, passes: int, samples: int
    ) -> None:
        self.parent = parent
        self.position = position
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.mask = mask
        """The samples of the present pass that are in it, one bit each."""
        self.passes = passes
        self.samples = samples
        """All samples that ever went into it."""

    def contains(self, other: TrainingValue) -> bool:
        """Whether a step is part of this state."""
        value: TrainingValue | None = self
        while value is not None and value.depth > other.depth:
            value = value.parent
        return value is other

    def parting(self, other: TrainingValue) -> TrainingValue:
        """The last state that is part of this one and of another; what this began with if none."""
        value = self
        while value.parent is not None and not other.contains(value):
            value = value.parent
        return value

    def free(self, taken: set[int]) -> list[int]:
        """Samples of this pass that are neither in it nor taken by a member."""
        return [n for n in range(DATASET) if not self.mask >> n & 1 and n not in taken]


class States:
    """All states of one simulated cluster; the same step on the same state is the same value."""

    def __init__(self) -> None:
        self._made: dict[tuple[TrainingValue, Position, tuple[Share, ...]], TrainingValue] = {}

    def fresh(self) -> TrainingValue:
        """The state of a process that has loaded nothing; no two are alike."""
        return TrainingValue(None, FRESH, 0, 0, 0)

    def after(
        self, base: TrainingValue, position: Position, shares: tuple[Share, ...]
    ) -> TrainingValue:
        """The state after a step in which these samples were used."""
        key = base, position, shares
        value = self._made.get(key)
        if value is None:
            value = self._made[key] = self._make(base, position, shares)
        return value

    def _make(
        self, base: TrainingValue, position: Position, shares: tuple[Share, ...]
    ) -> TrainingValue:
        mask, count = base.mask, 0
        for sample in (sample for share in shares for sample in share):
            if mask >> sample & 1:
                raise Violation(f"Sample {sample} is used twice in pass {base.passes}: {position}")
            mask |= 1 << sample
            count += 1
        is_full = mask == _ALL
        return TrainingValue(
            base, position, 0 if is_full else mask, base.passes + is_full, base.samples + count
        )
