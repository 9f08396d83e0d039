"""Calls in one view: every collective and message of a cluster runs among the same members."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from potluck.errors import DistributedError
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.recorder_files import mention
from potluck.runtime.recorder_logs import log_of, recorder_of
from potluck.runtime.requests import Place, Request
from potluck.runtime.transfers import Transfer
from potluck.runtime.work import Work

if TYPE_CHECKING:
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.cluster_stages import Stages
    from potluck.runtime.group import Group
    from potluck.runtime.recorder import Log

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
        try:
            with self._stages.visit(self._limit(timeout)) as stage:
                outcome = run(*arguments, **options)
                if isinstance(outcome, Transfer):
                    explain(outcome, stage, self._stages)
                return outcome
        except DistributedError as error:
            mention(recorder_of(self), error)
            raise

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
        """This process's place in the view, from 0; the leader is 0.

        After a call it is the place in that call, until the next one: should it change in between,
        that raises, so that nobody works with an old one.  Before the first call, and after one
        that raised so, it is the place in the present view; while that changes this waits.
        :attr:`view` is always the present one.
        """
        return self._stage.rank

    @property
    def world_size(self) -> int:
        """How many members the view has: as for :attr:`rank`, that of the last call."""
        return self._stage.world_size

    @property
    def _stage(self) -> Stage:
        return self._stages.pinned or self._stages.read(self.timeout)

    @property
    def _place(self) -> Place:
        return self._stage.place

    @property
    def _messages(self) -> Log:
        stage = self._stages.pinned
        return log_of(self if stage is None or stage.backend is None else stage.backend)

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
