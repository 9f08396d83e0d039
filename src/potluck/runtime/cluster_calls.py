"""Calls in one view: every collective and message of a cluster runs among the same members."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.requests import Place, Request
from potluck.runtime.transfers import Transfer
from potluck.runtime.work import Work

if TYPE_CHECKING:
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.cluster_stages import Stages
    from potluck.runtime.group import Group

__all__ = ["InOneView", "explain"]

Result = TypeVar("Result")

CALLS = (
    *("all_reduce", "reduce", "reduce_scatter"),
    *("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"),
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("send", "recv", "isend", "irecv", "sendrecv"),
)
"""What a program asks of a group."""


def _in_one_view(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(DistributedBackend, name))
    def call(self: InOneView, *arguments: Any, **options: Any) -> Any:
        run = getattr(super(InOneView, self), name)
        if self._stages.pinned is not None:
            return run(*arguments, **options)
        timeout = options.get("timeout")
        if name == "barrier" and arguments:
            timeout = arguments[0]
        with self._stages.visit(self._limit(timeout)) as stage:
            outcome = run(*arguments, **options)
            if isinstance(outcome, Transfer):
                explain(outcome, stage, self._stages)
            return outcome

    return call


def explain(work: Work[Any], stage: Stage, stages: Stages) -> None:
    """Let something under way that fails say what the cluster says, like blocking calls do."""
    fail = work.fail

    def explained(error: BaseException) -> None:
        verdict = stage.verdict_on(error)
        if verdict is not None:
            stages.told(stage)
        fail(verdict or error)

    work.fail = explained  # type: ignore[method-assign]


class InOneView(DistributedBackend):
    """Everything a group can do, each call in the view of its beginning."""

    _stages: Stages

    if not TYPE_CHECKING:  # for type checkers they are the inherited ones
        locals().update({name: _in_one_view(name) for name in CALLS})

    @property
    def rank(self) -> int:
        """This process's place in the present view, from 0; the leader is 0.

        Should it change before the next call, that raises, so that nobody works with an old one.
        While the view changes this waits, as calls do.
        """
        return self._stage.rank

    @property
    def world_size(self) -> int:
        """How many members the present view has."""
        return self._stage.world_size

    @property
    def _stage(self) -> Stage:
        return self._stages.pinned or self._stages.read(self.timeout)

    @property
    def _place(self) -> Place:
        return self._stage.place

    @property
    def group(self) -> Group:
        """Who runs the collectives of the present view; waits until its members are connected."""
        pinned = self._stages.pinned
        if pinned is not None and pinned.group is not None:
            return pinned.group
        with self._stages.visit(self.timeout) as stage:
            assert stage.group is not None
            return stage.group

    def _launch(
        self, request: Request[Result], timeout: float | None, *, async_op: bool
    ) -> Result | Work[Result]:
        stages = self._stages
        if not async_op and stages.pinned is not None:
            return super()._launch(request, timeout, async_op=False)
        with stages.visit(self._limit(timeout)) as stage:
            outcome = super()._launch(request, timeout, async_op=async_op)
            if isinstance(outcome, Work):
                work = outcome
                stage.begin_use()

                def end() -> None:
                    stage.end_use()
                    if stage.ending is not None and work.exception() is not None:
                        stages.told(stage)  # whoever waits for it learns that the view is over

                work.add_done_callback(end)
        return outcome
