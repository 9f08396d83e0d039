"""A call: one collective on one rank, as the executor sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.collective.compression.strategy import QuantizationType
    from potluck.collective.reduce import Array, Reducer
    from potluck.collective.strategies import Strategy
    from potluck.collective.task import Task

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """What to do, and the memory to do it on.

    ``source`` has the elements of ``task.input(rank)`` and is only read; ``target`` those of
    ``task.output(rank)``.  Both are one-dimensional, contiguous and of one type.  Where the task
    may work in place they may be the same memory, each cell at the same coordinate.
    """

    task: Task
    source: Array
    target: Array
    reducer: Reducer | None = None
    """None unless the collective reduces."""
    strategy: Strategy | None = None
    """None leaves the choice to the configuration, and then to the planner."""
    codec: QuantizationType | None = None
    """The number format in which values travel; only for a sum or mean of float32 by all."""
    residual: Array | None = None
    """Where what that format leaves behind is written, if somebody wants it."""
