"""Hazards: which steps of one rank touch the same cells, so that one must wait for the other.

Steps are shown one after the other, as if they ran in that order.  Cells that were treated alike so
far form one interval; each remembers the step that wrote it last and those that read it since.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Hazards"]

Cells = tuple[int | None, tuple[int, ...]]  # the last writer, and its readers

_UNTOUCHED: Cells = (None, ())


class Hazards:
    """The memory of one rank, as a line of intervals.

    >>> hazards = Hazards()
    >>> hazards.step(0, 0, 8, reads=True, writes=False)
    ((), ())
    >>> hazards.step(1, 4, 6, reads=False, writes=True)
    ((), (0,))
    >>> hazards.step(2, 0, 8, reads=True, writes=False)
    ((1,), ())
    """

    def __init__(self) -> None:
        self._starts: list[float] = [float("-inf")]  # each interval ends where the next begins
        self._cells: list[Cells] = [_UNTOUCHED]

    def step(
        self, index: int, start: int, stop: int, *, reads: bool, writes: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The steps whose values this one reads, and those whose cells it overwrites."""
        if not reads and not writes:
            return (), ()
        first, last = self._boundary(start), self._boundary(stop)
        writers: set[int] = set()
        earlier: set[int] = set()
        for place in range(first, last):
            writer, readers = self._cells[place]
            if writer is not None:
                writers.add(writer)
            earlier.update(readers)
            self._cells[place] = (index, ()) if writes else (writer, (*readers, index))
        return (
            tuple(sorted(writers)) if reads else (),
            tuple(sorted(earlier | writers)) if writes else (),
        )

    def _boundary(self, at: int) -> int:
        """The place of the interval that begins at ``at``; one is cut in two if need be."""
        place = bisect_left(self._starts, at)
        if place == len(self._starts) or self._starts[place] != at:
            self._starts.insert(place, at)
            self._cells.insert(place, self._cells[place - 1])
        return place
