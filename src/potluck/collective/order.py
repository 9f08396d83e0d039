"""Order: in which sequence ranks stand round a ring, so that the way round is short.

Up to 12 ranks the best order is found exactly (dynamic programming over subsets, Held and Karp).
Beyond that nearest-neighbour tours are improved, up to 64 ranks, by moving and by reversing
stretches of them (Or-opt and 2-opt) until nothing helps any more; larger rings keep the first
tour.  All numbers are whole and ties are broken alike: every machine finds the same order, and
that of the ranks themselves unless another is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["EXACT", "IMPROVED", "exact", "improved", "length", "nearest", "shortest"]

EXACT = 12
"""Up to so many ranks the order is optimal; the effort doubles with each more."""

IMPROVED = 64
"""Up to so many ranks the order is improved until no small change helps."""

STARTS = 4
"""From how many ranks a tour is tried."""

LONGEST_MOVE = 3
"""How many ranks in a row are tried elsewhere at once."""

Tour: TypeAlias = tuple[int, ...]
Distances: TypeAlias = Sequence[Sequence[int]]
"""From each (row) to each (column); there and back may differ."""


def length(tour: Tour, distances: Distances) -> int:
    """The way round.

    >>> length((0, 2, 1), [[0, 1, 2], [3, 0, 4], [5, 6, 0]])
    11
    """
    return sum(distances[a][b] for a, b in pairwise((*tour, tour[0])))


def shortest(table: npt.NDArray[np.int64]) -> Tour:
    """The best order that can be found in reasonable time; it begins with rank 0."""
    size = len(table)
    distances = table.tolist()
    if size <= EXACT:
        found = [exact(distances)]
    elif size <= IMPROVED:
        starts = range(0, size, size // STARTS)
        found = [improved(nearest(table, start), distances) for start in starts]
    else:
        found = [nearest(table)]
    return min([tuple(range(size)), *found], key=lambda tour: length(tour, distances))


def exact(distances: Distances) -> Tour:
    """The shortest way round, beyond doubt.

    >>> exact([[0, 1, 9, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 9, 1, 0]])
    (0, 1, 3, 2)
    """
    others = len(distances) - 1
    if others == 0:
        return (0,)
    # best[seen][last]: the shortest way from rank 0 through the ranks in ``seen`` to ``last``, and
    # the rank before it.  Rank r is bit r - 1 of ``seen``.
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(1 << others)]
    for last in range(1, others + 1):
        best[1 << last - 1][last] = (distances[0][last], 0)
    for seen in range(1, 1 << others):
        left = [rank for rank in range(1, others + 1) if not seen >> rank - 1 & 1]
        for last, (way, _) in best[seen].items():
            row = distances[last]
            for new in left:
                known = best[seen | 1 << new - 1]
                if new not in known or way + row[new] < known[new][0]:
                    known[new] = (way + row[new], last)
    seen = (1 << others) - 1
    ends = best[seen]
    last = min(ends, key=lambda end: (ends[end][0] + distances[end][0], end))
    backwards = []
    while last:
        backwards.append(last)
        seen, last = seen ^ 1 << last - 1, best[seen][last][1]
    return (0, *reversed(backwards))


def nearest(table: npt.NDArray[np.int64], start: int = 0) -> Tour:
    """From the start always on to the nearest that is left."""
    far = np.iinfo(np.int64).max
    left = table.copy()
    tour = [start]
    for _ in range(len(table) - 1):
        left[:, tour[-1]] = far
        tour.append(int(left[tour[-1]].argmin()))
    return tuple(tour)


def improved(tour: Tour, distances: Distances) -> Tour:
    """Change the tour for the better as long as a small change does it."""
    better: Tour | None = tour
    while better is not None:
        tour = better
        better = _move(tour, distances) or _turn(tour, distances)
    start = tour.index(0)
    return tour[start:] + tour[:start]


def _move(tour: Tour, distances: Distances) -> Tour | None:
    """A shorter tour with a few ranks in a row elsewhere."""
    size = len(tour)
    for start in range(size):
        ring = tour[start:] + tour[:start]
        head, before = ring[0], ring[-1]
        for taken in range(1, min(LONGEST_MOVE, size - 2) + 1):
            tail, rest = ring[taken - 1], ring[taken:]
            gain = distances[before][head] + distances[tail][rest[0]] - distances[before][rest[0]]
            for place, (a, b) in enumerate(pairwise(rest), start=1):
                if distances[a][head] + distances[tail][b] - distances[a][b] < gain:
                    return rest[:place] + ring[:taken] + rest[place:]
    return None


def _turn(tour: Tour, distances: Distances) -> Tour | None:
    """A shorter tour with a stretch of it reversed."""
    there = [0, *accumulate(distances[a][b] for a, b in pairwise(tour))]
    back = [0, *accumulate(distances[b][a] for a, b in pairwise(tour))]
    ring = (*tour, tour[0])
    for first in range(1, len(tour) - 1):
        before = distances[ring[first - 1]]
        for last in range(first + 1, len(tour)):
            after = ring[last + 1]
            inside = back[last] - back[first] - (there[last] - there[first])
            ends = before[ring[last]] + distances[ring[first]][after]
            if inside + ends < before[ring[first]] + distances[ring[last]][after]:
                return tour[:first] + tour[first : last + 1][::-1] + tour[last + 1 :]
    return None
