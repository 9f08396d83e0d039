"""A group: the ranks of a backend as partners in collectives.

Operations start in the order of the calls.  One that is waited for runs on the thread that waits,
unless others are before it; those that nobody waits for run on a thread of the group, which ends
when there is nothing to do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.errors import Aborted, ChannelClosed
from potluck.runtime.call import Call
from potluck.runtime.memory import Pool
from potluck.runtime.plans import Plans
from potluck.runtime.session import Session
from potluck.runtime.surveyor import LARGE, Surveyor
from potluck.runtime.switching import BRISK
from potluck.runtime.vigil import Vigil
from potluck.runtime.work import Work

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.vocabulary import LinkMatrix

__all__ = ["Group"]

Result = TypeVar("Result")
Job = tuple["Call", float | None, Callable[[], Any] | None, Work[Any]]

IDLE = 5.0
"""Seconds after which the group's thread ends when there is nothing to do."""

_finding = threading.Lock()


class Group:
    """Runs collectives among the ranks of a backend.  Any number of threads may use it."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        self.backend = backend
        self.config = config
        self._plans = Plans(backend.rank, backend.world_size, config)
        self._vigil = Vigil(backend)
        self._pool = Pool()
        self._session: Session | None = None
        self._surveyor = Surveyor(self._plans, self.rank, self.world_size)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._is_busy = False
        self._worker: threading.Thread | None = None
        self._closed = False
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
        """Counts the failures after which this group began anew; the same on all ranks."""
        return self._vigil.epoch

    @property
    def links(self) -> LinkMatrix:
        """The links as the ranks agreed on them; zero where nobody has measured."""
        return self._plans.links

    # -- calls ---------------------------------------------------------------------------------

    def run(self, call: Call, timeout: float | None = None) -> None:
        """Do a call and return when it is done here; after those that were started before."""
        limit = self.backend.timeout if timeout is None else timeout
        with self._lock:
            self._check_open()
            is_mine = not self._is_busy and not self._jobs
            if is_mine:
                self._is_busy = True
        if is_mine:
            try:
                self._execute(call, limit)
            finally:
                self._yield_turn()
        else:
            self.start(call, timeout=limit).wait()

    def start(
        self,
        call: Call,
        finish: Callable[[], Result] | None = None,
        timeout: float | None = None,
    ) -> Work[Result]:
        """Begin a call; ``finish`` runs after its success and gives the result."""
        work: Work[Result] = Work(lambda: f"{call.task.collective.value}")
        limit = self.backend.timeout if timeout is None else timeout
        with self._lock:
            self._check_open()
            self._jobs.append((call, limit, finish, work))
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._work, name="potluck-collectives", daemon=True
                )
                self._worker.start()
            self._changed.notify_all()
        return work

    def barrier(self, timeout: float | None = None) -> None:
        """Return when every rank has called this."""
        byte = np.zeros(1, np.uint8)
        task = Task.whole(Collective.BARRIER, self.world_size, 1)
        self.run(Call(task, byte, byte, Reducer.of(ReduceOp.BIT_OR, np.uint8)), timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"Rank {self.rank} has closed this group")

    def _yield_turn(self) -> None:
        with self._lock:
            self._is_busy = False
            if self._jobs or self._closed:
                self._changed.notify_all()

    def _work(self) -> None:
        """Run what was started, in order."""
        while True:
            with self._lock:
                while self._is_busy or not self._jobs:
                    waited = not self._changed.wait(IDLE) or self._closed
                    if waited and not self._jobs and not self._is_busy:
                        self._worker = None
                        return
                self._is_busy = True
                job = self._jobs.popleft()
            self._serve(job)
            del job  # while this thread waits, the arrays belong to their owners alone

    def _serve(self, job: Job) -> None:
        call, limit, finish, work = job
        try:
            with BRISK:
                self._execute(call, limit)
            result = finish() if finish is not None else None
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome: Callable[[], None] = _ending(work, error)
        else:
            outcome = _succeeding(work, result)
        self._yield_turn()
        outcome()

    def _execute(self, call: Call, limit: float | None) -> None:
        compiled = self._plans.compiled(call)  # what cannot be done is refused before it begins
        deadline = None if limit is None else time.monotonic() + limit
        try:
            if self._session is None:
                self._session = Session(self.backend, self._vigil, self._pool)
            if compiled.nbytes < LARGE or self.world_size == 1:
                self._session.run(call, compiled, deadline)
            else:
                self._surveyor.run(call, self._session, deadline)
        except BaseException as error:
            self._end_session(error)
            raise

    # -- endings -------------------------------------------------------------------------------

    def _end_session(self, error: BaseException) -> None:
        """Tell the others, close all streams, go on with the next epoch."""
        session, self._session = self._session, None
        if session is not None:
            self._vigil.tell(error)
            session.close()
            self._begin_epoch()

    def _leave_session(self, reason: str) -> None:
        """The same between two operations: whoever is still in the last one is not disturbed."""
        session, self._session = self._session, None
        if session is not None:
            self._vigil.leave(reason)
            session.finish()
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._vigil.renew()
        self._plans.forget()
        self._surveyor = Surveyor(self._plans, self.rank, self.world_size)

    def abort(self, reason: str = "aborted") -> None:
        """End the operation under way, and those that were started, on all ranks.

        Each of them raises :class:`~potluck.errors.Aborted`; the group can be used again.
        """
        error = Aborted(f"Rank {self.rank} ended the operation: {reason}", rank=self.rank)
        with self._lock:
            waiting, self._jobs = list(self._jobs), deque()
            is_idle = not self._is_busy
            if is_idle:
                self._is_busy = True
            else:
                self._vigil.abort(error)
                session = self._session
                if session is not None:
                    session.wake()
        if is_idle:
            self._leave_session(reason)
            self._yield_turn()
        for _, _, _, work in waiting:
            work.fail(error)

    def close(self) -> None:
        """Leave; the backend stays open.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.abort("it left the group")
        with self._lock:
            while self._is_busy:
                self._changed.wait(IDLE)
            worker = self._worker
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        self._vigil.close()

    def __enter__(self) -> Self:
        """Leave at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _ending(work: Work[Any], error: BaseException) -> Callable[[], None]:
    return lambda: work.fail(error)


def _succeeding(work: Work[Any], result: object) -> Callable[[], None]:
    return lambda: work.succeed(result)
