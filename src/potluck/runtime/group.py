"""A group: the ranks of a backend as partners in collectives.

Operations start in the order of the calls.  One that is waited for runs on the thread that waits,
unless others are before it; those that nobody waits for run on a thread of the group, which ends
when there is nothing to do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from potluck.closing import Closing
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.errors import BackendUnavailable, ChannelClosed, DistributedError
from potluck.forking import ForkSafeLock
from potluck.net import descriptors
from potluck.runtime.call import Call
from potluck.runtime.executor import Executor, left
from potluck.runtime.job import Job
from potluck.runtime.limits import read_timeout
from potluck.runtime.notices import FOR_EVER
from potluck.runtime.queueing import ENDING, Queue
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.vocabulary import LinkMatrix

__all__ = ["Group"]

Result = TypeVar("Result")

_finding = ForkSafeLock()


class Group(Queue, Closing):
    """Runs collectives among the ranks of a backend.  Any number of threads may use it."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        self.backend = backend
        self.config = config
        super().__init__(Executor(backend, config))
        self._plans = self._executor.plans
        self._open_log(backend)
        self._forked: DistributedError | None = None
        self._is_finished = False
        self._afterwards: list[Callable[[], None]] = []
        descriptors.on_fork(self)
        backend.on_close(self.close)

    @classmethod
    def of(cls, backend: Backend, config: CollectiveConfig | None = None) -> Group:
        """The group of a backend: always the same one."""
        with _finding:
            group = vars(backend).get("_collectives")
            if not isinstance(group, Group) or group.is_closed:
                group = vars(backend)["_collectives"] = cls(backend, config)
            return group

    @property
    def is_closed(self) -> bool:
        """Whether this rank has left."""
        return self._closed

    @property
    def rank(self) -> int:
        """This process's place, from 0."""
        return self.backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.backend.world_size

    @property
    def epoch(self) -> int:
        """Grows with every failure after which this group began anew; the same on all ranks."""
        return self._vigil.epoch

    @property
    def links(self) -> LinkMatrix:
        """The links as the ranks agreed on them; zero where nobody has measured."""
        return self._plans.links

    def count_waiting(self) -> dict[int, float]:
        """Count from now on for whom operations sleep: seconds for each rank, in what is returned.

        One for all who ask: a group has one thread at a time that waits.
        """
        if self._vigil.slept is None:
            self._vigil.slept = {}
        return self._vigil.slept

    def ask_around(self) -> None:
        """From now on, find out after a disagreement what most ranks believe."""
        self._vigil.asks_around = True

    # -- calls ---------------------------------------------------------------------------------

    def run(self, call: Call, timeout: Seconds | None = None) -> None:
        """Do a call and return when it is done here; after those that were started before."""
        limit = read_timeout(self.backend.timeout if timeout is None else timeout)
        me, asked = threading.get_ident(), time.monotonic()
        job, number, is_mine = None, 0, False
        try:
            with self._lock:
                self._check_open()
                if self._runner == me:
                    raise _nested()
                number = self._calls = self._calls + 1
                if self._runner or self._jobs:
                    job = self._enqueue(Job(number, call, limit, None, _work_of(call), asked))
                else:
                    is_mine = True
                    self._runner = me
            if job is None:
                self._execute(call, (number, asked, None if limit is None else asked + limit))
                self._record(call, number, asked)
        except BaseException as error:
            if is_mine:
                self._record_failure(call, number, asked, error)
            raise
        finally:
            if is_mine and self._runner == me:
                self._yield_turn()
        if job is not None:
            self._await(job)

    def start(
        self,
        call: Call,
        finish: Callable[[], Result] | None = None,
        timeout: Seconds | None = None,
    ) -> Work[Result]:
        """Begin a call; ``finish`` runs after its success and gives the result."""
        work: Work[Result] = _work_of(call, self._help)
        limit = read_timeout(self.backend.timeout if timeout is None else timeout)
        with self._lock:
            self._check_open()
            self._calls += 1
            self._enqueue(Job(self._calls, call, limit, finish, work))
        return work

    def barrier(self, timeout: Seconds | None = None) -> None:
        """Return when every rank has called this."""
        byte = np.zeros(1, np.uint8)
        task = Task.whole(Collective.BARRIER, self.world_size, 1)
        self.run(Call(task, byte, byte, Reducer.of(ReduceOp.BIT_OR, np.uint8)), timeout)

    def _check_open(self) -> None:
        if self._forked is not None:
            raise copy.copy(self._forked)
        if self._closed:
            raise ChannelClosed(f"Rank {self.rank} has closed this group")

    # -- endings -------------------------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """End the operation under way, and those that were started, on all ranks.

        Each of them raises :class:`~potluck.errors.Aborted`; the group can be used again.  If there
        is none, the next call of every other rank does.
        """
        if not self._closed:
            self._stop(reason)

    def _stop(self, reason: str, last_call: int | None = None) -> None:
        error = left(self.rank, reason)
        with self._lock:
            waiting, self._jobs = self._jobs, deque()
            is_idle = not self._runner
            if is_idle and last_call is None and self._aborted_at == self._calls:
                return  # they have been told
            self._aborted_idle = is_idle
            self._executor.abort(error, self._calls if last_call is None else last_call)
            if is_idle:
                self._runner = threading.get_ident()
        if is_idle:
            self._yield_turn()
        for job in waiting:
            job.work.fail(error)

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Leave; the backend stays open.  May be called twice.

        A signal's handler may close the group whose operation it interrupts: that ends when the
        handler returns, and then ``then`` is called; otherwise at once.
        """
        if self._forked is not None:
            return
        if then is not None:
            self._afterwards.append(then)
        if not self._closed:
            self._closed = True
            self._stop("it left the group", FOR_EVER)
        me = threading.get_ident()
        if self._runner == me:
            self._closer = me
            return
        with self._lock:
            self._changed.wait_for(lambda: not self._runner, ENDING)
            worker = self._worker
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join(ENDING)
        self._finish_closing()

    def _finish_closing(self) -> None:
        with self._lock:
            is_first, self._is_finished = not self._is_finished, True
        if is_first:
            self.backend.forget(self.close)
            self._executor.close()
        with contextlib.suppress(IndexError):
            while True:
                self._afterwards.pop()()

    def become_forked(self) -> None:
        """In a forked child: refuse all further use; locks that others held are nobody's."""
        self._forked = _forked(self.rank)
        self._closed = True
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._worker = None
        if self._runner != threading.get_ident():
            self._runner = 0
        jobs = [*self._jobs, *([] if self._job is None else [self._job])]
        self._jobs = deque()
        for job in jobs:
            job.work.become_forked(self._forked)


def _work_of(call: Call, help_with: Callable[[Work[Any]], None] | None = None) -> Work[Any]:
    name = call.task.collective.value  # not the call: works may be kept, their arrays need not
    return Work(lambda: name, help_with)


def _forked(rank: int) -> BackendUnavailable:
    return BackendUnavailable(
        f"This group belongs to the parent process (pid {os.getppid()})",
        rank=rank,
        hint="Create a new group in the child process if it needs one.",
    )


def _nested() -> BackendUnavailable:
    return BackendUnavailable(
        "This thread is in the middle of an operation of this group",
        cause="a signal handler or finalizer that interrupted it uses the group as well",
        hint="Abort or close the group there, or use it afterwards.",
    )
