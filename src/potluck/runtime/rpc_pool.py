"""Workers: a bounded number of threads that run functions for other ranks, fair among them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from potluck.core.calls import Stall
from potluck.core.calls_fair import FairQueue
from potluck.core.calls_frames import Mark
from potluck.runtime.rpc_calls import Incoming, Replier

__all__ = ["Workers"]

STALE = 64
"""Calls without interest that may stay in the queue, unless they are half of it."""

IDLE = 5.0
"""Seconds after which a worker without work ends."""

STALLED_AFTER = 0.5
"""Seconds in which all workers wait for calls of their own, and none gets its answer."""


class Workers:
    """Threads that are started when there is work, and the queue before them."""

    def __init__(self, count: int, run: Callable[[Incoming], None]) -> None:
        self.count = count
        self._run = run
        self._queue: FairQueue[Incoming] = FairQueue()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stale = 0  # calls without interest that may be in the queue
        self._stall = Stall(count, STALLED_AFTER)
        self._closed = False
        self._earliest = math.inf  # no call in the queue is to be answered before this

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._queue)

    def add(self, call: Incoming) -> None:
        """Have a call answered when a worker is free."""
        with self._changed:
            if self._closed:
                return
            self._queue.add(call.origin, call)
            self._earliest = min(self._earliest, call.reply_by)
            if self._idle > 0:
                self._idle -= 1  # here, not where it wakes: two calls shall not wake one worker
                self._changed.notify()
            elif len(self._threads) < self.count:
                thread = threading.Thread(target=self._work, name="potluck-rpc-work", daemon=True)
                self._threads.add(thread)
                thread.start()

    def nudge(self) -> None:
        """Look again: a rank that could take no answers can."""
        with self._changed:
            self._idle = 0
            self._changed.notify_all()

    def forget(self, count: int = 1) -> list[Incoming]:
        """So many calls have lost their callers; those that are taken out of the queue for it.

        One that stays is passed over when its turn comes.  All are looked at only when they are
        many, so that each costs little, and the queue is at most twice as long as it should be.
        """
        with self._changed:
            self._stale += count
            if self._stale < max(STALE, len(self._queue) / 2):
                return []
            self._stale = 0
            return self._queue.take_out(lambda call: call.cancelled and _takes_answers(call.origin))

    def overdue(self, now: float) -> list[Incoming]:
        """Calls that were to be answered by now, and have not begun; taken out of the queue."""
        with self._changed:
            if now < self._earliest:
                return []
            late = self._queue.take_out(
                lambda call: call.reply_by <= now and _takes_answers(call.origin)
            )
            # A lower bound is enough: the next look is at the next moment that could be one.
            self._earliest = now if self._queue else math.inf
            return late

    def hopeless(self, now: float) -> list[Incoming]:
        """Calls from within others that have no worker to hope for; taken out of the queue."""
        with self._changed:
            if not self._queue or not self._stall.is_stalled(now):
                return []
            return self._queue.take_out(
                lambda call: bool(call.marks & Mark.NESTED) and _takes_answers(call.origin)
            )

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """A worker waits for a call of its own."""
        with self._changed:
            self._stall.begin_waiting(time.monotonic())
        try:
            wait()
        finally:
            with self._changed:
                self._stall.end_waiting()

    def close(self, deadline: float) -> None:
        """Start nothing more; wait for what runs until the deadline."""
        with self._changed:
            self._closed = True
            self._queue.take_out(lambda _: True)
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                self._run(call)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> Incoming | None:
        with self._changed:
            while (call := self._queue.take(_takes_answers)) is None:
                if self._closed:
                    return None
                self._idle += 1
                if self._changed.wait(IDLE):
                    continue
                self._idle = max(0, self._idle - 1)
                if not self._queue:
                    # Leave the list under the lock, or work could be left to nobody.
                    self._threads.discard(threading.current_thread())
                    return None
            return call


def _takes_answers(origin: Replier) -> bool:
    """Whether functions for somebody may run, and calls of theirs be refused."""
    return not origin.is_congested
