"""A step under way, and how a step went."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.training.elastic_averaging import Gradients
from potluck.training.elastic_record import Record

__all__ = ["Pending", "StepOutcome"]


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


@dataclass(slots=True)
class Pending:
    """A step under way: what went into it stays as it is until the step is applied."""

    gradients: Gradients
    weight: float
    tries: int = 0
    records: tuple[Record, ...] = ()
    """Of all members, for the try that this member holds."""
