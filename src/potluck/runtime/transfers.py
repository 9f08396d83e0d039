"""Messages between two ranks, of any array."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.backend.base import Backend
from potluck.backend.operation import Ended, Operation
from potluck.errors import DistributedError
from potluck.runtime.limits import read_timeout
from potluck.runtime.recorder import Log
from potluck.runtime.recorder_logs import log_of
from potluck.runtime.recording import MessageNote
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

__all__ = ["Arbiter", "Transfer", "Transfers"]

A = TypeVar("A")


class Arbiter(Protocol):
    """Decides what a message ends with whose connection broke, where that is not known at once."""

    def is_open(self, error: DistributedError) -> bool:
        """Whether that is not decided yet."""

    def decided(self, error: DistributedError) -> DistributedError:
        """What the message ends with."""

    def wait(
        self, error: DistributedError, deadline: float | None, seconds: float
    ) -> DistributedError | None:
        """Wait for the decision until a moment; the error of who waited too long, or None."""


class Transfer(Work[A], Generic[A]):
    """A message under way; it moves while somebody waits, asks or uses the backend otherwise."""

    def __init__(
        self,
        operation: Operation,
        progress: Callable[[float], None],
        finish: Callable[[], A],
        note: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        super().__init__(operation.describe)
        self._note = note
        self._operation = operation
        self._progress = progress
        self._finish = finish
        self._settling = threading.RLock()  # a callback may ask how it has ended
        self.arbiter: Arbiter | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; what has arrived is taken in."""
        if not self._operation.done:
            self._progress(0)
        return self._settle()

    def wait(self, timeout: Seconds | None = None) -> A:
        """Return the array when the message has moved, or raise what went wrong."""
        limit = read_timeout(timeout)
        if not self._settle():
            self._drive(limit)
        return super().result()

    def cancel(self) -> bool:
        """Give the array back without waiting; False if the message has moved after all."""
        cancelled = self._operation.cancel()
        self._settle()
        return cancelled

    def _drive(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._operation.wait(timeout)
        except DistributedError:
            if not self._operation.done:
                raise  # the time-out of this wait, not an error of the message
        error = self._operation.error
        while not self._settle():
            assert self.arbiter is not None
            assert error is not None
            late = self.arbiter.wait(error, deadline, timeout or 0.0)
            if late is not None:
                raise late

    def _settle(self) -> bool:
        """Note how it has ended, once; False while it has not."""
        if not self._operation.done:
            return False
        with self._settling:
            if not self._ended.is_set():
                error = self._operation.error
                if error is not None and self.arbiter is not None:
                    if self.arbiter.is_open(error):
                        return False
                    error = self.arbiter.decided(error)
                self._note(error)
                if error is not None:
                    self.fail(error)
                else:
                    self.succeed(self._finish())
                self._let_go()
        return True

    def _let_go(self) -> None:
        """Whoever keeps this keeps no array: its memory may be given away now."""
        text = self._describe()
        self._describe = lambda: text
        self._operation = Ended(self._operation.error)
        del self._finish

    def __await__(self) -> Generator[Any, None, A]:
        """Wait without blocking the event loop: a thread moves the message meanwhile."""
        if not self.done:
            threading.Thread(
                target=self._drive, args=(None,), name="potluck-transfer", daemon=True
            ).start()
        return (yield from super().__await__())


class Transfers(Backend):
    """Sends and receives that take arrays of any library; a receive fills its array in place."""

    @property
    def _messages(self) -> Log:
        """Where messages are taken down."""
        return log_of(self)

    def _taking_down(self, what: str, peer: int, tag: int, nbytes: int) -> MessageNote:
        return MessageNote(self._messages, what, peer, tag, nbytes)

    def send(self, data: Any, dst: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Send an array to rank ``dst``; return when it may be changed again."""
        octets = lend(data, Access.READ).flat.view("u1")
        limit = read_timeout(self._limit(timeout))
        with self._taking_down("send", dst, tag, octets.nbytes):
            self.post_send(octets, dst, tag=tag).finish_within(limit)

    def recv(self, into: Any, src: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Receive from rank ``src`` into an array, which has the exact size of what was sent."""
        lease = lend(into, Access.WRITE)
        octets = lease.flat.view("u1")
        limit = read_timeout(self._limit(timeout))
        with self._taking_down("recv", src, tag, octets.nbytes):
            self.post_recv_into(octets, src, tag=tag).finish_within(limit)
        lease.give_back()

    def isend(self, data: A, dst: int, *, tag: int = 0) -> Transfer[A]:
        """Start sending; the array must not change until the work is done."""
        octets = lend(data, Access.READ).flat.view("u1")
        operation = self.post_send(octets, dst, tag=tag)
        taken = self._taking_down("send", dst, tag, octets.nbytes)
        return Transfer(operation, self.progress, lambda: data, taken.end)

    def irecv(self, into: A, src: int, *, tag: int = 0) -> Transfer[A]:
        """Start receiving into an array; it must not be used until the work is done."""
        lease = lend(into, Access.WRITE)
        octets = lease.flat.view("u1")
        operation = self.post_recv_into(octets, src, tag=tag)
        taken = self._taking_down("recv", src, tag, octets.nbytes)
        return Transfer(operation, self.progress, lease.give_back, taken.end)

    def sendrecv(
        self,
        data: Any,
        dst: int,
        into: Any,
        src: int,
        *,
        tag: int = 0,
        timeout: Seconds | None = None,
    ) -> None:
        """Send to one rank while receiving from another, or from the same."""
        sending = self.isend(data, dst, tag=tag)
        try:
            self.recv(into, src, tag=tag, timeout=timeout)
            sending.wait(self._limit(timeout))
        except BaseException:
            sending.cancel()
            raise
