"""A group: the ranks of a backend as partners in collectives.

Operations start in the order of the calls.  One that is waited for runs on the thread that waits,
unless others are before it; the rest run on a thread of the group, which ends when there is nothing
to do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from potluck import _process
from potluck._platform import call_in_children
from potluck._process import Closing, ForkSafeLock
from potluck._time import read_timeout
from potluck._types import Seconds
from potluck.collective.call import Call, QueuedCall, Work
from potluck.collective.executor import Executor, left
from potluck.collective.fingerprint import FOR_EVER
from potluck.errors import Aborted, BackendUnavailable, ChannelClosed, DistributedError, Timeout
from potluck.logs import get_logger
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Task
from potluck.trace.dump import install, mention
from potluck.trace.recorder import Entry, Label, OperationFailure, Track, log_of

if TYPE_CHECKING:
    from potluck._types import LinkMatrix
    from potluck.backend.base import Backend
    from potluck.collective.call import Turn
    from potluck.schedule.planner import CollectiveConfig
    from potluck.trace.recorder import GroupLog


# --------------------------------------------------------------------------------------------------
# What the flight recorder keeps of messages.


class MessageNote:
    """A send or receive, from its beginning to its end; around it, what goes wrong is kept too."""

    __slots__ = ("_began", "_log", "_nbytes", "_number", "_way")

    def __init__(self, log: GroupLog, what: str, peer: int, tag: int, nbytes: int) -> None:
        self._way = way = (what, peer, tag)
        counts = log.counts
        self._number = counts[way] = counts.get(way, 0) + 1
        self._log, self._nbytes = log, nbytes
        self._began = time.monotonic()
        log.recorder.open[id(self)] = self

    def end(self, error: BaseException | None) -> None:
        """It is over; only the first end counts."""
        log = self._log
        if log.recorder.open.pop(id(self), None) is None:
            return
        failure = None if error is None else OperationFailure.of(error)
        log.append(self._entry(time.monotonic(), failure))
        if error is not None:
            mention(log.recorder, error)

    def under_way(self) -> Entry:
        """As it is now."""
        return self._entry(0.0, None)

    def _entry(self, ended: float, failure: OperationFailure | None) -> Entry:
        way, number, label = self._way, self._number, self._log.messages
        return (way[0], self._began, ended, number, self._nbytes, 0, label, failure, way)

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over."""
        self.end(error)


# --------------------------------------------------------------------------------------------------
# How often Python lets another thread run, while something in the background wants to.

INTERVAL = 1e-4
"""Seconds between two switches while asynchronous operations run.

Beside a busy loop in pure Python a sending thread gets the interpreter once per interval; at the
usual 5 ms it would move a few pieces in a second.
"""


class ShortSwitchInterval:
    """A context with a short interval.  Any number of threads may be in it; the last restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        """Shorten the interval, unless it is short already."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, INTERVAL))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the interval, unless another thread needs it short."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)

    def become_forked(self) -> None:
        """In a forked child: the threads that were inside are not here."""
        if self._inside:
            sys.setswitchinterval(self._usual)
        self._lock, self._inside = threading.Lock(), 0


BRISK = ShortSwitchInterval()
"""The one of this process: the interval is the same for all threads."""

call_in_children(BRISK.become_forked)


# --------------------------------------------------------------------------------------------------
# The group: its calls start in order.  The thread that runs one has the turn; what others want of
# the group meanwhile, such as an abort, is done at the latest when the turn is yielded.

logger = get_logger(__name__)

IDLE = 5.0
"""Seconds after which the group's thread ends when there is nothing to do."""

ENDING = 5.0
"""Seconds to wait for a thread that was told to end what it does."""


Result = TypeVar("Result")

_finding = ForkSafeLock()


class Group(Closing):
    """Runs collectives among the ranks of a backend.  Any number of threads may use it."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        self.backend = backend
        self.config = config
        self._executor = executor = Executor(backend, config)
        self._monitor = executor.vigil
        self._plans = executor.plans
        self._lock = threading.RLock()  # a signal's handler may abort or close at any moment
        self._changed = threading.Condition(self._lock)
        self._queue: deque[QueuedCall] = deque()
        self._running: QueuedCall | None = None  # the one that was taken from the queue
        self._calls = 0
        self._aborted_at = -1
        self._aborted_idle = False  # whether the last abort found nothing under way
        self._runner = 0  # the thread whose turn it is
        self._worker: threading.Thread | None = None
        self._closed = False
        self._closer = 0  # the thread that was interrupted to close the group
        self._failed_call = 0
        self._epoch = 0  # up to which call the last recorded failure had ended them
        self._open_log(backend)
        self._forked: DistributedError | None = None
        self._is_finished = False
        self._afterwards: list[Callable[[], None]] = []
        _process.on_fork(self)
        backend.on_close(self.close)

    @classmethod
    def of(cls, backend: Backend, config: CollectiveConfig | None = None) -> Group:
        """The group of a backend: always the same one."""
        with _finding:
            group = backend.services.get(Group)
            if group is None or group.is_closed:
                group = cls(backend, config)
                backend.services.put(Group, group)
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
        return self._monitor.epoch

    @property
    def links(self) -> LinkMatrix:
        """The links as the ranks agreed on them; zero where a link was not measured."""
        return self._plans.links

    def count_waiting(self) -> dict[int, float]:
        """Count from now on for whom operations sleep: seconds for each rank, in what is returned.

        One for all who ask: a group has one thread at a time that waits.
        """
        if self._monitor.slept is None:
            self._monitor.slept = {}
        return self._monitor.slept

    def ask_around(self) -> None:
        """From now on, find out after a disagreement what most ranks believe."""
        self._monitor.asks_around = True

    # -- calls ---------------------------------------------------------------------------------

    def run(self, call: Call, timeout: Seconds | None = None) -> None:
        """Do a call and return when it is done here; after those that were started before."""
        limit = read_timeout(self.backend.timeout if timeout is None else timeout)
        me, asked = threading.get_ident(), time.monotonic()
        deadline = None if limit is None else asked + limit
        job, turn, is_mine = None, (0, asked, deadline), False
        try:
            with self._lock:
                if self._closed:
                    raise self._refusal()
                if self._runner == me:
                    raise _nested()
                number = self._calls = self._calls + 1
                turn = (number, asked, deadline)
                if self._runner or self._queue:
                    job = self._enqueue(
                        QueuedCall(number, call, limit, None, _work_of(call), asked)
                    )
                else:
                    is_mine = True
                    self._runner = me
            if job is None:
                self._begin(turn)
                self._executor.execute(call, turn)
                self._record(call, number, asked)
        except BaseException as error:
            if is_mine:
                self._fail(call, turn, asked, error)
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
            if self._closed:
                raise self._refusal()
            self._calls += 1
            self._enqueue(QueuedCall(self._calls, call, limit, finish, work))
        return work

    def barrier(self, timeout: Seconds | None = None) -> None:
        """Return when every rank has called this."""
        byte = np.zeros(1, np.uint8)
        task = Task.whole(Collective.BARRIER, self.world_size, 1)
        self.run(Call(task, byte, byte, Reducer.of(ReduceOp.BIT_OR, np.uint8)), timeout)

    def _refusal(self) -> DistributedError:
        """The error of a call after the end."""
        if self._forked is not None:
            return copy.copy(self._forked)
        return ChannelClosed(f"Rank {self.rank} has closed this group")

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
            waiting, self._queue = self._queue, deque()
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
        """In a forked child: refuse all further use, and replace locks that other threads held."""
        self._forked = _forked(self.rank)
        self._closed = True
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._worker = None
        if self._runner != threading.get_ident():
            self._runner = 0
        jobs = [*self._queue, *([] if self._running is None else [self._running])]
        self._queue = deque()
        for job in jobs:
            job.work.become_forked(self._forked)

    def _begin(self, turn: Turn) -> None:
        """The turn of a call has come; raises if it must not run."""

    def _decide(self, error: BaseException, turn: Turn) -> BaseException:
        """What a call ends with that failed with this error."""
        del turn
        return error

    def _fail(self, call: Call, turn: Turn, began: float, error: BaseException) -> None:
        """A call has failed: record with what it ends, and raise that if it is another error."""
        outcome = self._decide(error, turn)
        self._record_failure(call, turn[0], began, outcome)
        if outcome is not error:
            raise outcome from error

    # -- the flight recorder ----------------------------------------------------------------------

    def _open_log(self, backend: Backend) -> None:
        self._log: GroupLog = log_of(backend)
        self._append = self._log.append
        label, instance = self._log.collectives, self._monitor.instance
        if instance:  # another group of the same ranks was before
            name = f"{label.group} ({instance + 1})"[-255:]
            label = Label(Track.COLLECTIVES, name, label.view, label.rank, label.members)
        self._label = label
        self._log.recorder.watch(self)
        install()

    def _record(self, call: Call, number: int, began: float) -> None:
        """A call is done; here every nanosecond counts."""
        monitor = self._monitor
        self._append(
            (
                call.task,
                began,
                time.monotonic(),
                number,
                call.target.itemsize,
                monitor.epoch,
                self._label,
                None,
                monitor.waited or None,
            )
        )

    def _record_failure(self, call: Call, number: int, began: float, error: BaseException) -> None:
        """A call has failed: keep that, and write down what came before if it helps."""
        monitor, now = self._monitor, time.monotonic()
        failure = OperationFailure.of(error)
        # The failure has begun another epoch already; this call was in the one before.
        epoch = monitor.epoch if monitor.epoch < number else self._epoch
        self._failed_call, self._epoch = number, min(monitor.epoch, number)
        entry = (call.task, began, now, number, call.target.itemsize, epoch)
        self._append((*entry, self._label, failure, monitor.waited or None))
        mention(self._log.recorder, error)

    def under_way(self) -> Entry | None:
        """The call that runs now, as far as it is known."""
        monitor = self._monitor
        if not self._runner or monitor.call in (0, self._failed_call):
            return None
        what = monitor.description.partition("(")[0]
        waited = dict(monitor.waited) or None
        return (what, monitor.asked, 0.0, monitor.call, 0, monitor.epoch, self._label, None, waited)

    # -- the queue --------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._runner != 0

    def _enqueue(self, job: QueuedCall) -> QueuedCall:
        self._queue.append(job)
        if self._worker is None:
            self._worker = threading.Thread(
                target=self._work, name="potluck-collectives", daemon=True
            )
            self._worker.start()
        self._changed.notify_all()
        return job

    def _await(self, job: QueuedCall) -> None:
        """Wait for a call that others are before; who gives up gets its memory back."""
        work, me = job.work, self._executor.rank
        try:
            self._help(work)
            if not work.sleep_until(job.begin()[2]):
                text = f"{work} was still waiting for earlier operations of rank {me}"
                self._withdraw(job, Timeout(text, seconds=job.limit or 0.0))
        except BaseException as error:  # Ctrl-C
            reason = f"a blocking call was interrupted ({type(error).__name__})"
            self._withdraw(job, Aborted(f"On rank {me} {reason}", rank=me))
            raise
        work.result()

    def _withdraw(self, job: QueuedCall, error: DistributedError) -> None:
        """Withdraw a call; return when its memory is no longer in use."""
        with self._lock:
            if job in self._queue:
                job.withdraw(error)
                job.work.fail(error)
                return
            if not job.work.done and not isinstance(error, Timeout):  # which it knows by itself
                self._executor.abort(error, job.number)
        job.work.sleep_until(time.monotonic() + ENDING)

    # -- turns ---------------------------------------------------------------------------------

    def _yield_turn(self) -> None:
        """Let others run; what came too late for the operation is done first."""
        me = threading.get_ident()
        while True:
            with self._lock:
                self._runner = 0
                if self._monitor.aborted is None:
                    if self._queue or self._closed:
                        self._changed.notify_all()
                    break
                self._runner = me
            try:
                self._leave(self._monitor.aborted[1])
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
                while self._runner or not self._queue:
                    if waited and not self._queue and not self._runner:
                        self._worker = None
                        return
                    waited = not self._changed.wait(IDLE) or self._closed
            try:
                self._serve()
            except Exception:
                # Not of the call, which has its own: those behind it must not wait for ever.
                logger.exception(
                    "Rank %d could not clean up after an operation", self._executor.rank
                )

    def _help(self, work: Work[Any]) -> None:
        """If this is the thread that runs works, in a callback of one: run those before this."""
        while threading.current_thread() is self._worker and not work.done:
            with self._lock:
                if not self._queue:
                    return
                if self._runner:
                    self._changed.wait(IDLE)
                    continue
            self._serve()

    def _serve(self) -> None:
        """Run the first call that waits, unless another thread is running one."""
        with self._lock:
            if self._runner or not self._queue:
                return
            self._runner = threading.get_ident()
            job = self._running = self._queue.popleft()
        work = job.work
        try:
            with BRISK:
                result = self._perform(job)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome: Callable[[], None] = _ending(work, error)
        else:
            outcome = _succeeding(work, result)
        self._running = None
        del job  # while this thread waits, the arrays belong to their owners alone
        try:
            self._yield_turn()
        finally:  # whoever waits must hear of it, whatever goes wrong between two turns
            outcome()

    def _perform(self, job: QueuedCall) -> Any:
        if job.error is not None or job.call is None:
            self._executor.give_up(job.number, job.error or left(self._executor.rank, "it gave up"))
        else:
            self._execute_job(job.call, job)
        return job.finish() if job.finish is not None else None

    def _execute_job(self, call: Call, job: QueuedCall) -> None:
        began, turn = time.monotonic(), job.begin()
        try:
            self._begin(turn)
            self._executor.execute(call, turn)
        except BaseException as error:
            self._fail(call, turn, began, error)
            raise
        self._record(call, job.number, began)

    def _leave(self, last_call: int) -> None:
        """End calls between two operations; ranks still in the last one are not interrupted."""
        with self._lock:
            if last_call <= self._monitor.epoch and not self._aborted_idle:
                self._monitor.aborted = None  # another failure was quicker: all ranks know of that
                return
            if last_call <= self._monitor.call:  # all that it was to end was over
                last_call = self._calls = self._calls + 1  # so it ends the next, on all ranks
        self._executor.leave(last_call)
        self._aborted_at = last_call


def _ending(work: Work[Any], error: BaseException) -> Callable[[], None]:
    return lambda: work.fail(error)


def _succeeding(work: Work[Any], result: object) -> Callable[[], None]:
    return lambda: work.succeed(result)


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
