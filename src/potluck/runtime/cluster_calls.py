"""Calls in one view: every collective and message of a cluster runs among the same members."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from potluck.backend.operation import Operation
from potluck.errors import DistributedError, Timeout
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.recorder_files import mention
from potluck.runtime.recorder_logs import log_of, recorder_of
from potluck.runtime.requests import Place, Request
from potluck.runtime.transfers import Transfer
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds, in_seconds

if TYPE_CHECKING:
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.cluster_stages import Stages
    from potluck.runtime.group import Group
    from potluck.runtime.recorder import Log

__all__ = ["MESSAGES", "InOneView", "Posted", "StageArbiter", "explain"]

Result = TypeVar("Result")

MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv")
"""Of these, what moves between two ranks."""

CALLS = (
    *("all_reduce", "reduce", "reduce_scatter"),
    *("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"),
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *MESSAGES,
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
                    outcome.arbiter = StageArbiter(stage, self._stages)
                return outcome
        except DistributedError as error:
            mention(recorder_of(self), error)
            raise

    return call


class StageArbiter:
    """Lets a message that fails say what membership decided, like blocking calls do."""

    __slots__ = ("_stage", "_stages")

    def __init__(self, stage: Stage, stages: Stages) -> None:
        self._stage = stage
        self._stages = stages

    def is_open(self, error: DistributedError) -> bool:
        """Whether membership has not decided yet what the message ends with."""
        return self._stage.is_undecided(error)

    def decided(self, error: DistributedError) -> DistributedError:
        """What it ends with."""
        stage = self._stage
        if stage.ending is None or not stage.is_symptom(error):
            return error
        self._stages.told(stage)
        return copy.copy(stage.ending)

    def wait(
        self, error: DistributedError, deadline: float | None, seconds: float
    ) -> DistributedError | None:
        """Wait for the decision until a moment; the error of who waited too long, or None."""
        verdict = self._stage.verdict_on(error, deadline, seconds)
        return None if self._stage.ending is not None else verdict


def explain(work: Work[Any], stage: Stage, stages: Stages, timeout: float | None) -> None:
    """Let a collective under way that fails say what membership decided, as blocking calls do."""
    fail = work.fail
    deadline = None if timeout is None else time.monotonic() + timeout

    def explained(error: BaseException) -> None:
        verdict = stage.verdict_on(error, deadline, timeout or 0.0)
        if verdict is not None and stage.ending is not None:
            stages.told(stage)
        fail(verdict or error)

    work.fail = explained  # type: ignore[method-assign]
    work.make_late = _late_in(stage)


def _late_in(stage: Stage) -> Callable[[float], Timeout | None]:
    """The error of a wait for something that a stopped view holds up; None if it does not."""
    return lambda seconds: (
        stage.late(seconds) if stage.stopped.is_set() and stage.ending is None else None
    )


class Posted(Operation):
    """An operation of a view that was started by itself; it ends with what the view ends with."""

    __slots__ = ("_arbiter", "_operation")

    def __init__(self, operation: Operation, stage: Stage, stages: Stages) -> None:
        self._operation = operation
        self._arbiter = StageArbiter(stage, stages)

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Whether it has ended, well or not."""
        error = self._operation.error
        return self._operation.done and (error is None or not self._arbiter.is_open(error))

    @property
    def error(self) -> DistributedError | None:  # type: ignore[override]
        """What went wrong, once it is done."""
        error = self._operation.error
        return None if error is None else self._arbiter.decided(error)

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return self._operation.describe()

    def wait(self, timeout: Seconds | None = None) -> None:
        """Return when done, raise what went wrong, or raise :class:`Timeout`."""
        self._raise_decision(self._operation.wait, in_seconds(timeout))

    def finish_within(self, timeout: float | None) -> None:
        """Like :meth:`wait`, but a time-out gives the buffer back."""
        self._raise_decision(self._operation.finish_within, timeout)

    def _raise_decision(self, wait: Callable[[float | None], None], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            wait(timeout)
        except DistributedError as error:
            if self._operation.error is None:
                raise  # the time-out of this wait
            while self._arbiter.is_open(error):
                late = self._arbiter.wait(error, deadline, timeout or 0.0)
                if late is not None:
                    raise late from error
            raise self._arbiter.decided(error) from None

    def cancel(self) -> bool:
        """Give the buffer back without waiting; False if the operation was done after all."""
        return self._operation.cancel()


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
        self, request: Request[Result], timeout: Seconds | None, *, async_op: bool
    ) -> Result | Work[Result]:
        stages = self._stages
        if not async_op and stages.pinned is not None:
            return super()._launch(request, timeout, async_op=False)
        with stages.visit(self._limit(timeout)) as stage:
            outcome = super()._launch(request, timeout, async_op=async_op)
            if isinstance(outcome, Work):
                work = outcome
                work.make_late = _late_in(stage)
                stage.begin_use()

                def end() -> None:
                    stage.end_use()
                    if stage.ending is not None and work.exception() is not None:
                        stages.told(stage)  # whoever waits for it learns that the view is over

                work.add_done_callback(end)
        return outcome
