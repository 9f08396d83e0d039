"""The algorithms there are.  A new one is one file that declares it, and its name in this list."""

from __future__ import annotations

from potluck.collective.algorithm import Algorithm
from potluck.collective.central import CENTRAL
from potluck.collective.direct import DIRECT
from potluck.collective.doubling import DOUBLING
from potluck.collective.ring import RING
from potluck.collective.schedule import Schedule
from potluck.collective.task import Collective, Layout, Task
from potluck.collective.tree import TREE
from potluck.errors import UnsupportedOperation

__all__ = ["ALGORITHMS", "find", "offering", "schedule"]

# Those that come first are preferred where they cost the same.
ALGORITHMS = {each.name: each for each in (DIRECT, DOUBLING, RING, TREE, CENTRAL)}


def find(name: str) -> Algorithm:
    """The algorithm of this name.

    >>> find("ring").idea
    'each rank hears its left neighbour and tells its right one'
    """
    if name not in ALGORITHMS:
        raise UnsupportedOperation(
            f"No algorithm is called {name!r}", hint=f"There are {', '.join(ALGORITHMS)}."
        )
    return ALGORITHMS[name]


def offering(collective: Collective) -> list[Algorithm]:
    """The algorithms that can do this.

    >>> [each.name for each in offering(Collective.BARRIER)]
    ['doubling', 'tree', 'central']
    """
    return [each for each in ALGORITHMS.values() if collective in each.offers]


def schedule(algorithm: str, task: Task, layout: Layout | None = None) -> Schedule:
    """The schedule of a task by the algorithm of this name."""
    return find(algorithm).schedule(task, layout)
