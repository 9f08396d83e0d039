"""Launching: a request becomes a blocking call, or work under way."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from potluck.arrays.base import Array
from potluck.backend.base import Backend, check_whole
from potluck.collective.task import Collective
from potluck.errors import InvalidRank
from potluck.runtime import requests
from potluck.runtime.call import Purpose
from potluck.runtime.group import Group
from potluck.runtime.requests import Place, Request
from potluck.runtime.work import Work

__all__ = ["Launching"]

Result = TypeVar("Result")


class Launching(Backend):
    """A backend with a group that runs its collectives."""

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
        self, request: Request[Result], timeout: float | None, *, async_op: bool
    ) -> Result | Work[Result]:
        """Run a request, or start it."""
        group = self.group
        if async_op and timeout is not None:
            msg = "With async_op the time-out belongs to wait(timeout)"
            raise ValueError(msg)
        if timeout is None and group.config is not None:
            timeout = group.config.timeout
        if async_op:
            return group.start(request.call, request.finish, timeout)
        group.run(request.call, timeout)
        return request.finish()

    def _tell_all(self, mine: Array, purpose: Purpose, timeout: float | None) -> Array:
        """What every rank has to say, in rank order, before it can do what it was called for."""
        task = self._place.blocks(Collective.ALL_GATHER, [mine.size] * self.world_size, 1)
        told = np.empty(task.total, mine.dtype)
        self._launch(requests.part_of(purpose, task, mine, told), timeout, async_op=False)
        return told
