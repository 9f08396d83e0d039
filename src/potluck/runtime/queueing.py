"""The queue of a group: whose turn it is, and the thread that runs what nobody waits for.

Operations start in the order of the calls.  Whoever runs one has the turn; what others want of the
group meanwhile, such as an abort, is done at the latest when the turn is yielded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from potluck.errors import Aborted, DistributedError, Timeout
from potluck.logs import get_logger
from potluck.runtime.executor import left
from potluck.runtime.recording import Recording
from potluck.runtime.switching import BRISK

if TYPE_CHECKING:
    from potluck.runtime.call import Call
    from potluck.runtime.executor import Executor
    from potluck.runtime.job import Job, Turn
    from potluck.runtime.work import Work

__all__ = ["ENDING", "Queue"]

logger = get_logger(__name__)

IDLE = 5.0
"""Seconds after which the group's thread ends when there is nothing to do."""

ENDING = 5.0
"""Seconds to wait for a thread that was told to end what it does."""


class Queue(Recording):
    """Calls of one group that wait for their turn."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._vigil = executor.vigil
        self._lock = threading.RLock()  # a signal's handler may abort or close at any moment
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._job: Job | None = None
        self._calls = 0
        self._aborted_at = -1
        self._aborted_idle = False  # whether the last abort found nothing under way
        self._runner = 0  # the thread whose turn it is
        self._worker: threading.Thread | None = None
        self._closed = False
        self._closer = 0  # the thread that was interrupted to close the group

    @property
    def _is_busy(self) -> bool:
        return self._runner != 0

    def _finish_closing(self) -> None:
        """Called at the end of the last turn of a group that is closed."""
        raise NotImplementedError

    def _enqueue(self, job: Job) -> Job:
        self._jobs.append(job)
        if self._worker is None:
            self._worker = threading.Thread(
                target=self._work, name="potluck-collectives", daemon=True
            )
            self._worker.start()
        self._changed.notify_all()
        return job

    def _await(self, job: Job) -> None:
        """Wait for a call that others are before; who gives up gets its memory back."""
        work, me = job.work, self._executor.rank
        try:
            self._help(work)
            if not work.ends_within(job.begin()[2]):
                text = f"{work} was still behind operations that rank {me} had started before"
                self._withdraw(job, Timeout(text, seconds=job.limit or 0.0))
        except BaseException as error:  # Ctrl-C
            reason = f"a blocking call was interrupted ({type(error).__name__})"
            self._withdraw(job, Aborted(f"On rank {me} {reason}", rank=me))
            raise
        work.result()

    def _withdraw(self, job: Job, error: DistributedError) -> None:
        """Return when nobody uses the memory of a call any more."""
        with self._lock:
            if job in self._jobs:
                job.withdraw(error)
                job.work.fail(error)
                return
            if not job.work.done and not isinstance(error, Timeout):  # which it knows by itself
                self._executor.abort(error, job.number)
        job.work.ends_within(time.monotonic() + ENDING)

    # -- turns ---------------------------------------------------------------------------------

    def _yield_turn(self) -> None:
        """Let others run; what came too late for the operation is done first."""
        me = threading.get_ident()
        while True:
            with self._lock:
                self._runner = 0
                if self._vigil.aborted is None:
                    if self._jobs or self._closed:
                        self._changed.notify_all()
                    break
                self._runner = me
            try:
                self._leave(self._vigil.aborted[1])
            except BaseException:  # Ctrl-C: the next call begins with what is left to do
                with self._lock:
                    self._runner = 0
                    self._changed.notify_all()
                raise
        if self._closer == me:
            self._closer = 0
            self._finish_closing()

    def _work(self) -> None:
        """Run what was started, in order."""
        while True:
            with self._lock:
                waited = self._closed
                while self._runner or not self._jobs:
                    if waited and not self._jobs and not self._runner:
                        self._worker = None
                        return
                    waited = not self._changed.wait(IDLE) or self._closed
            try:
                self._serve()
            except Exception:
                # Not of the call, which has its own: those behind it must not wait for ever.
                logger.exception("Rank %d could not end an operation well", self._executor.rank)

    def _help(self, work: Work[Any]) -> None:
        """If this is the thread that runs works, in a callback of one: run those before this."""
        while threading.current_thread() is self._worker and not work.done:
            with self._lock:
                if not self._jobs:
                    return
                if self._runner:
                    self._changed.wait(IDLE)
                    continue
            self._serve()

    def _serve(self) -> None:
        """Run the first of those that wait, if nobody runs one."""
        with self._lock:
            if self._runner or not self._jobs:
                return
            self._runner = threading.get_ident()
            job = self._job = self._jobs.popleft()
        work = job.work
        try:
            with BRISK:
                result = self._perform(job)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome: Callable[[], None] = _ending(work, error)
        else:
            outcome = _succeeding(work, result)
        self._job = None
        del job  # while this thread waits, the arrays belong to their owners alone
        try:
            self._yield_turn()
        finally:  # whoever waits must hear of it, whatever goes wrong between two turns
            outcome()

    def _perform(self, job: Job) -> Any:
        if job.error is not None or job.call is None:
            self._executor.give_up(job.number, job.error or left(self._executor.rank, "it gave up"))
        else:
            self._execute_job(job.call, job)
        return job.finish() if job.finish is not None else None

    def _execute_job(self, call: Call, job: Job) -> None:
        began = time.monotonic()
        try:
            self._execute(call, job.begin())
        except BaseException as error:
            self._record_failure(call, job.number, began, error)
            raise
        self._record(call, job.number, began)

    def _execute(self, call: Call, turn: Turn) -> None:
        """Do a call whose turn it is, on this thread."""
        self._executor.execute(call, turn)

    def _leave(self, last_call: int) -> None:
        """End calls between two operations: whoever is still in the last one is not disturbed."""
        with self._lock:
            if last_call <= self._vigil.epoch and not self._aborted_idle:
                self._vigil.aborted = None  # another failure was quicker: all ranks know of that
                return
            if last_call <= self._vigil.call:  # all that it was to end was over
                last_call = self._calls = self._calls + 1  # so it ends the next, on all ranks
        self._executor.leave(last_call)
        self._aborted_at = last_call


def _ending(work: Work[Any], error: BaseException) -> Callable[[], None]:
    return lambda: work.fail(error)


def _succeeding(work: Work[Any], result: object) -> Callable[[], None]:
    return lambda: work.succeed(result)
