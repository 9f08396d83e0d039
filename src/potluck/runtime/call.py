"""A call: one collective on one rank, as the executor sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from potluck.collective.compression.strategy import QuantizationType
    from potluck.collective.reduce import Array, Reducer
    from potluck.collective.strategies import Strategy
    from potluck.collective.task import Task

__all__ = ["Call", "Purpose", "Routine"]

Routine: TypeAlias = "Callable[[Callable[[Call], None]], None]"
"""Does several calls one after the other, by the function that it is given."""


class Purpose(IntEnum):
    """What a collective is part of: nobody may take one for another that looks the same."""

    OWN = 0
    """Of nothing else: somebody called it by its name."""
    MEASURE_LINKS = 1
    AGREE_ON_LINKS = 2
    BROADCAST_OBJECT = 3
    ALL_GATHER_OBJECT = 4
    GATHER_OBJECT = 5
    SCATTER_OBJECT = 6
    ALL_GATHER_COUNTS = 7
    GATHER_COUNTS = 8
    ALL_TO_ALL_COUNTS = 9
    AUTO_COMPRESSION = 10
    TOP_K = 11
    RANDOM_K = 12
    POWER_SGD = 13
    ALL_REDUCE_TREE = 14
    BROADCAST_TREE = 15
    RECORDS = 16
    """What each member of a training brings to a step."""


@dataclass(slots=True, eq=False)  # frozen, it would take five times as long to make
class Call:
    """What to do, and the memory to do it on.  Nobody changes one.

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
    routine: Routine | None = None
    """What is done instead, in one turn; this call then only says what comes of it."""
    purpose: Purpose = Purpose.OWN
