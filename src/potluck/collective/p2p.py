"""Messages between two ranks, of any array."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from potluck._future import deadline_after
from potluck.backend.base import Backend
from potluck.backend.operation import DONE, Cancelled, Operation
from potluck.collective.call import Work
from potluck.errors import DistributedError, Timeout

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]


A = TypeVar("A")


class MessageErrors:
    """What a message ends with whose connection broke: as it is, unless a subclass decides."""

    def is_open(self, error: DistributedError) -> bool:
        """Whether that is not decided yet."""
        del error
        return False

    def decided(self, error: DistributedError) -> DistributedError:
        """What the message ends with."""
        return error

    def wait(
        self, error: DistributedError, deadline: float | None, seconds: float
    ) -> DistributedError | None:
        """Wait for the decision until a moment; the error of a wait that took too long, or None."""
        del error, deadline, seconds
        return None


AS_THEY_ARE = MessageErrors()


class Transfer(Work[A]):
    """A message in progress; it moves while a thread waits, asks or uses the backend otherwise."""

    is_passive = True

    def __init__(
        self,
        operation: Operation,
        progress: Callable[[float], None],
        finish: Callable[[], A],
        note: Callable[[BaseException | None], None] = lambda _: None,
        errors: MessageErrors = AS_THEY_ARE,
    ) -> None:
        super().__init__(operation.describe)
        self._note = note
        self._operation = operation
        self._progress = progress
        self._finish = finish
        self._settling = threading.RLock()  # a callback may ask how it has ended
        self._errors = errors

    @property
    def done(self) -> bool:
        """Whether it has ended, with a result or an error; what has arrived is taken in."""
        if not self.ended and not self._operation.done:
            self._progress(0)
        return self._settle()

    def cancel(self) -> bool:
        """Give the array back without waiting; False if the message has moved after all."""
        if self.ended:
            return isinstance(self.error, Cancelled)
        cancelled = self._operation.cancel()
        self._settle()
        return cancelled

    def drive(self, limit: float | None) -> bool:
        """Move the message, and wait for the decision on its error."""
        deadline = deadline_after(limit)
        if not self._operation.drive(limit):
            raise self._operation.timeout_error(limit or 0.0)
        error = self._operation.error
        while not self._settle():
            assert error is not None
            late = self._errors.wait(error, deadline, limit or 0.0)
            if late is not None:
                raise late
        return True

    def _settle(self) -> bool:
        """Note how it has ended, once; False while it has not."""
        if self.ended or not self._operation.done:
            return self.ended
        with self._settling:
            if not self.ended:
                error = self._operation.error
                if error is not None:
                    if self._errors.is_open(error):
                        return False
                    error = self._errors.decided(error)
                self._note(error)
                self.finish_first(error, self._finish() if error is None else None)
                self._let_go()
        return True

    def _let_go(self) -> None:
        """Keep no array from here on: its memory may be given away now."""
        text = self._describe()
        self._describe = lambda: text
        self._operation = DONE
        del self._finish


# --------------------------------------------------------------------------------------------------
# Receiving from whoever sends first.
#
# Messages wait at the receiver by sender and tag, so somebody who does not care looks at all
# senders in turn and takes what is there.  Looking and taking are one step, in the order in which
# receives were posted: two that look never see the same message.

LOOK = 0.02
"""Seconds of one look for bytes."""

PAUSE = 5e-4
"""Seconds between two looks while another thread moves the bytes."""


class AnySource:
    """The receives of one backend that do not say from whom.

    As PyTorch has them: a message may be shorter than the array, and fills its beginning.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._waiting: list[AnyTransfer] = []
        self._others = [rank for rank in range(backend.world_size) if rank != backend.rank]

    def post(self, into: Buffer, src: int, tag: int) -> Operation:
        """Receive from a certain rank."""
        with self._lock:  # a message that somebody has just seen is his
            return self.backend.post_recv_into(into, src, tag=tag, at_most=True)

    def wait_for_any(self, transfer: AnyTransfer) -> None:
        """Let a receive take part."""
        with self._lock:
            self._waiting.append(transfer)

    def match(self) -> None:
        """Give messages that have come to the receives that wait for them, oldest first."""
        with self._lock:
            for transfer in list(self._waiting):
                found = self._sender(transfer.tag)
                if found is not None:
                    self._waiting.remove(transfer)
                    self._others.remove(found)  # next time the others come first
                    self._others.append(found)
                    operation = self.backend.post_recv_into(
                        transfer.into, found, tag=transfer.tag, at_most=True
                    )
                    transfer.meet(found, operation)

    def _sender(self, tag: int) -> int | None:
        here = (rank for rank in self._others if self.backend.has_message(rank, tag=tag))
        return next(here, None)

    def loss(self) -> DistributedError | None:
        """Why one of the senders is gone: what is awaited might have come from it."""
        found = (self.backend.loss_of(rank) for rank in self._others)
        return next((error for error in found if error is not None), None)

    def forget(self, transfer: AnyTransfer) -> bool:
        """Take a receive out again; False if it has met a message."""
        with self._lock:
            if transfer not in self._waiting:
                return False
            self._waiting.remove(transfer)
            return True


class AnyTransfer(Work[Any]):
    """A receive from the rank that sends first."""

    is_passive = True

    def __init__(
        self, source: AnySource, into: Buffer, tag: int, finish: Callable[[], Any]
    ) -> None:
        super().__init__(lambda: "A message from any rank")
        self.into, self.tag = into, tag
        self.source = -1
        """The rank whose message it is; -1 while there is none."""
        self._any = source
        self._finish = finish
        self._operation: Operation | None = None
        self._settling = threading.RLock()  # a callback may ask how it has ended
        source.wait_for_any(self)

    def meet(self, source: int, operation: Operation) -> None:
        """Take the message of a rank."""
        self.source, self._operation = source, operation

    @property
    def done(self) -> bool:
        """Whether it has ended, with a result or an error; what has arrived is taken in."""
        if not self.ended:
            self._any.backend.progress(0)
            self._settle()
        return self.ended

    def timeout_error(self, seconds: float) -> Timeout:
        """The error of a wait that took too long."""
        return Timeout(f"No message arrived from any rank within {seconds:g} s", seconds=seconds)

    def drive(self, limit: float | None) -> bool:
        """Look for a message again and again."""
        deadline = deadline_after(limit)
        while not self._settle():
            left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
            if left <= 0:
                return False
            begun = time.monotonic()
            self._any.backend.progress(left)
            if time.monotonic() - begun < PAUSE:
                time.sleep(PAUSE)  # another thread moves the bytes, or there were some
        return True

    def cancel(self) -> bool:
        """Give the array back without waiting; False if a message has come after all."""
        if self.ended:
            return isinstance(self.error, Cancelled)
        if self._operation is None and self._any.forget(self):
            self.fail(Timeout("The receive was cancelled", seconds=0.0))
            return True
        operation = self._operation
        return operation is not None and operation.cancel()

    def _settle(self) -> bool:
        """Note how it has ended, once; False while it has not."""
        if self.ended:
            return True
        if self._operation is None:
            self._any.match()
        if self._operation is None and self._any.loss() is not None:
            self._any.backend.progress(0)  # what has arrived counts all the same
            self._any.match()
        with self._settling:
            if not self.ended:
                self._note()
        return self.ended

    def _note(self) -> None:
        operation = self._operation
        if operation is None:
            loss = self._any.loss()
            if loss is not None and self._any.forget(self):
                self.fail(copy.copy(loss))
                self._let_go()
        elif operation.done:
            if operation.error is not None:
                self.fail(operation.error)
            else:
                self.succeed(self._finish())
            self._operation = DONE
            self._let_go()

    def _let_go(self) -> None:
        """Keep no array from here on: its memory may be given away now."""
        self.into = b""
        del self._finish


# --------------------------------------------------------------------------------------------------
# The courier: moves messages that were posted and for which nobody waits.
#
# A mesh has no thread of its own, so a message that was posted moves while somebody uses the
# backend. Programs that post sends and receives and then compute expect them to be under way
# meanwhile.  The courier gives whoever waits himself a moment, and then pumps as long as something
# is not done.

MOMENT = 0.002
"""Seconds that the thread that posted a message has to start waiting for it itself."""

TAKEN = 1e-4
"""A look that was shorter found another thread at the pump."""

IDLE = 5.0
"""Seconds after which the courier's thread ends when there is nothing to do."""


class BackgroundTask(Protocol):
    """Something under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended; asking may bring that about."""


class ProgressThread:
    """A thread that is there while errands are."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress = progress
        self._errands: list[BackgroundTask] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._changed = threading.Condition()

    def carry(self, errand: BackgroundTask) -> None:
        """See to it that something gets done, whether anybody waits for it or not."""
        with self._changed:
            if self._closed:
                return
            self._errands.append(errand)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-courier", daemon=True
                )
                self._thread.start()
            elif len(self._errands) == 1:
                self._changed.notify_all()

    def _run(self) -> None:
        pause = MOMENT
        while self._has_work():
            with self._changed:
                if not self._closed:
                    self._changed.wait(pause)
                errands = list(self._errands)
            pause = MOMENT
            with contextlib.suppress(DistributedError):  # the backend is closed: all have ended
                pause = LOOK if self._pump(errands) else MOMENT
            ended = {id(errand) for errand in errands if _is_done(errand)}
            del errands  # while this thread waits, the arrays belong to their owners alone
            with self._changed:
                self._errands = [each for each in self._errands if id(each) not in ended]

    def _has_work(self) -> bool:
        with self._changed:
            if not self._errands and not self._closed:
                self._changed.wait(IDLE)
            if not self._errands or self._closed:
                self._thread = None
                return False
            return True

    def _pump(self, errands: list[BackgroundTask]) -> bool:
        """Move bytes until something is done, or another thread does (True)."""
        while not self._closed and not any(map(_is_done, errands)):
            begun = time.monotonic()
            self._progress(LOOK)
            if time.monotonic() - begun < TAKEN:
                return True
        return False

    def close(self) -> None:
        """End; what is under way is left to those who wait for it."""
        with self._changed:
            self._closed = True
            self._errands.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _is_done(errand: BackgroundTask) -> bool:
    try:
        return errand.done
    except DistributedError:
        return True  # its owner finds out what is wrong
