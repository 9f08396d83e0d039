"""Sets of whole numbers as intervals: which samples counted, which are taken, which are left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["Intervals", "overlap", "subtract", "take", "total", "union"]

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open, ascending, with gaps between them: ``((0, 4), (6, 9))`` is 0 to 3 and 6 to 8."""


def union(*sets: Iterable[tuple[int, int]]) -> Intervals:
    """Everything that is in any of them; also puts a single one in order.

    >>> union([(4, 6)], [(0, 4), (9, 9)], [(8, 9)])
    ((0, 6), (8, 9))
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(each for one in sets for each in one if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(these: Iterable[tuple[int, int]], those: Iterable[tuple[int, int]]) -> Intervals:
    """What is in the first and not in the second.

    >>> subtract([(0, 10)], [(2, 3), (8, 12)])
    ((0, 2), (3, 8))
    """
    left: list[tuple[int, int]] = []
    holes = union(those)
    for start, stop in union(these):
        begin = start
        for low, high in holes:
            if high <= begin or low >= stop:
                continue
            if low > begin:
                left.append((begin, low))
            begin = high
        if begin < stop:
            left.append((begin, stop))
    return tuple(left)


def overlap(these: Iterable[tuple[int, int]], those: Iterable[tuple[int, int]]) -> Intervals:
    """What is in both.

    >>> overlap([(0, 10)], [(2, 3), (8, 12)])
    ((2, 3), (8, 10))
    """
    first = union(these)
    return subtract(first, subtract(first, those))


def total(intervals: Iterable[tuple[int, int]]) -> int:
    """How many numbers.

    >>> total([(0, 4), (6, 9)])
    7
    """
    return sum(stop - start for start, stop in intervals)


def take(
    pool: Sequence[tuple[int, int]], count: int, pieces: int | None = None
) -> tuple[Intervals, Intervals]:
    """The first ``count`` numbers of a pool, in at most ``pieces`` intervals, and the rest.

    >>> take(((0, 4), (6, 9)), 5)
    (((0, 4), (6, 7)), ((7, 9),))
    """
    taken: list[tuple[int, int]] = []
    for place, (start, stop) in enumerate(pool):
        if count <= 0 or len(taken) == pieces:
            return tuple(taken), tuple(pool[place:])
        end = min(stop, start + count)
        taken.append((start, end))
        count -= end - start
        if end < stop:
            return tuple(taken), ((end, stop), *pool[place + 1 :])
    return tuple(taken), ()
