"""Launching: a request becomes a blocking call, or work under way."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import numpy as np

from potluck.arrays.base import Array
from potluck.backend.base import Backend, check_whole
from potluck.collective.task import Collective
from potluck.errors import InvalidRank
from potluck.metrics.operations import LONG
from potluck.runtime import requests
from potluck.runtime.call import Purpose
from potluck.runtime.counting import count_failure, counted, size_of
from potluck.runtime.group import Group
from potluck.runtime.requests import Place, Request
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

if TYPE_CHECKING:
    from potluck.metrics import DistributedMetrics

__all__ = ["Launching"]

Result = TypeVar("Result")


class Launching(Backend):
    """A backend with a group that runs its collectives."""

    _metrics: DistributedMetrics | None = None
    """Where they are counted, if they are."""

    @property
    def group(self) -> Group:
        """Who runs the collectives."""
        return Group.of(self)

    @property
    def _place(self) -> Place:
        return Place(self.rank, self.world_size)

    def _check_rank_of(self, root: int) -> int:
        rank = check_whole(root, "root")
        if not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size)
        return rank

    def _launch(
        self, request: Request[Result], timeout: Seconds | None, *, async_op: bool
    ) -> Result | Work[Result]:
        """Run a request, or start it; and count it, where that is wanted."""
        group, metrics = self.group, self._metrics
        if async_op and timeout is not None:
            msg = "With async_op the time-out belongs to wait(timeout)"
            raise ValueError(msg)
        if timeout is None and group.config is not None:
            timeout = group.config.timeout
        if metrics is None:
            if async_op:
                return group.start(request.call, request.finish, timeout)
            group.run(request.call, timeout)
            return request.finish()
        call, began = request.call, monotonic()
        try:  # all of it here: every frame more costs as much as counting itself
            if async_op:
                return counted(metrics, call, group.start(*request, timeout), began)
            group.run(call, timeout)
            outcome = request.finish()
        except BaseException as error:
            count_failure(metrics, call, began, error)
            raise
        nbytes = call.source.nbytes if call.source is call.target else size_of(call)
        metrics.journal.append((call.task.collective, monotonic() - began, nbytes))
        if len(metrics.journal) > LONG:
            metrics.work_off()
        return outcome

    def _tell_all(self, mine: Array, purpose: Purpose, timeout: Seconds | None) -> Array:
        """What every rank has to say, in rank order, before it can do what it was called for."""
        task = self._place.blocks(Collective.ALL_GATHER, [mine.size] * self.world_size, 1)
        told = np.empty(task.total, mine.dtype)
        self._launch(requests.part_of(purpose, task, mine, told), timeout, async_op=False)
        return told

    @overload
    def gather_records(
        self, mine: Array, timeout: Seconds | None = ..., *, async_op: Literal[False] = ...
    ) -> Array: ...

    @overload
    def gather_records(self, mine: Array, *, async_op: Literal[True]) -> Work[Array]: ...

    def gather_records(
        self, mine: Array, timeout: Seconds | None = None, *, async_op: bool = False
    ) -> Array | Work[Array]:
        """What each rank brings to a step, straight from it; for :mod:`potluck.training`."""
        task = self._place.blocks(Collective.ALL_GATHER, [mine.size] * self.world_size, 1)
        told = np.empty(task.total, mine.dtype)
        call = requests.part_of(Purpose.RECORDS, task, mine, told).call
        return self._launch(Request(call, lambda: told), timeout, async_op=async_op)
