"""Collectives in which every rank has something for every other: all-to-all, and the barrier."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, TypeVar, overload

import numpy as np

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.runtime import requests
from potluck.runtime.call import Purpose
from potluck.runtime.limits import Countdown
from potluck.runtime.moving import Moving
from potluck.runtime.requests import Request
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

__all__ = ["Exchanging"]

A = TypeVar("A")

_BARRIER = Reducer.of(ReduceOp.BIT_OR, np.uint8)  # as the group's own, so that the two can meet


class Exchanging(Moving):
    """What a group can exchange, and how it meets."""

    @overload
    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = ...,
        counts: Sequence[Sequence[int]] | None = ...,
        out: A | None = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = ...,
        counts: Sequence[Sequence[int]] | None = ...,
        out: A | None = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = None,
        counts: Sequence[Sequence[int]] | None = None,
        out: A | None = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give each rank its rows of every rank's array, one after the other in rank order.

        Unless told otherwise all ranks have equally many rows and divide them evenly, the first
        parts one row longer where that does not come out.  ``send_counts`` says how many rows this
        rank has for each; the ranks then tell each other first.  ``counts`` says it for all: row
        *i* of it is what rank *i* sends.
        """
        reads = lend(array, Access.READ)
        rows, row = requests.rows_of(reads)
        countdown = Countdown(timeout)
        matrix = self._matrix(rows, send_counts, counts, timeout)
        task = Task.exchange([[operator.index(each) * row for each in line] for line in matrix])
        requests.check_size("array", reads, sum(task.sends(self.rank)))
        shape = requests.shape_with(sum(line[self.rank] for line in matrix), reads)
        into = requests.output(out, array, shape, reads)
        made: Request[A] = requests.request(
            self._place, task, (reads.flat, into.flat), into.give_back
        )
        return self._launch(made, countdown.left, async_op=async_op)

    def _matrix(
        self,
        rows: int,
        send_counts: Sequence[int] | None,
        counts: Sequence[Sequence[int]] | None,
        timeout: Seconds | None,
    ) -> Sequence[Sequence[int]]:
        size = self.world_size
        if send_counts is not None and counts is not None:
            msg = "send_counts is this rank's row of counts: pass one of them"
            raise TypeError(msg)
        if counts is None and send_counts is None:
            return [requests.rows_for(rows, size)] * size
        if counts is not None:
            if len(counts) != size or any(len(line) != size for line in counts):
                msg = f"counts needs {size} rows of {size} numbers"
                raise ValueError(msg)
            return counts
        assert send_counts is not None
        mine = np.array([operator.index(each) for each in send_counts], np.int64)
        if mine.shape != (size,) or (mine < 0).any():
            msg = f"send_counts needs {size} numbers of zero or more, not {send_counts!r}"
            raise ValueError(msg)
        told = self._tell_all(mine, Purpose.ALL_TO_ALL_COUNTS, timeout)
        lines: list[list[int]] = told.reshape(size, size).tolist()
        return lines

    @overload
    def barrier(self, timeout: Seconds | None = ..., *, async_op: Literal[False] = ...) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work[None]: ...

    def barrier(
        self, timeout: Seconds | None = None, *, async_op: bool = False
    ) -> Work[None] | None:
        """Return when every rank has called this, and so all earlier collectives have been."""
        cell = np.zeros(1, np.uint8)
        task = self._place.whole(Collective.BARRIER, 1)
        made: Request[None] = requests.request(
            self._place, task, (cell, cell), _none, reducer=_BARRIER
        )
        return self._launch(made, timeout, async_op=async_op)


def _none() -> None:
    return None
