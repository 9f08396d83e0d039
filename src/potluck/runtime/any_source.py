"""Receiving from whoever sends first.

Messages wait at the receiver by sender and tag, so somebody who does not care looks at all senders
in turn and takes what is there.  Looking and taking are one step, in the order in which receives
were posted: two that look never see the same message.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck.backend.operation import Ended
from potluck.errors import DistributedError, Timeout
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds, in_seconds

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation
else:
    Buffer: TypeAlias = object

__all__ = ["AnySource", "AnyTransfer"]

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
    """A receive from whoever sends first."""

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
        """Whether it has ended, well or not; what has arrived is taken in."""
        if not self._ended.is_set():
            self._any.backend.progress(0)
            self._settle()
        return self._ended.is_set()

    def wait(self, timeout: Seconds | None = None) -> Any:
        """Return when a message is here, or raise what went wrong."""
        limit = in_seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        while not self._settle():
            left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
            if left <= 0:
                raise Timeout(
                    f"No message came from any rank within {limit:g} s", seconds=limit or 0.0
                )
            begun = time.monotonic()
            self._any.backend.progress(left)
            if time.monotonic() - begun < PAUSE:
                time.sleep(PAUSE)  # another thread moves the bytes, or there were some
        return self.result()

    def cancel(self) -> bool:
        """Give the array back without waiting; False if a message has come after all."""
        operation = self._operation
        if operation is None and self._any.forget(self):
            self.fail(Timeout("The receive was cancelled", seconds=0.0))
            return True
        operation = self._operation
        return operation is not None and operation.cancel()

    def _settle(self) -> bool:
        """Note how it has ended, once; False while it has not."""
        if self._ended.is_set():
            return True
        if self._operation is None:
            self._any.match()
        if self._operation is None and self._any.loss() is not None:
            self._any.backend.progress(0)  # what has arrived counts all the same
            self._any.match()
        with self._settling:
            if not self._ended.is_set():
                self._note()
        return self._ended.is_set()

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
            self._operation = Ended(operation.error)
            self._let_go()

    def _let_go(self) -> None:
        """Whoever keeps this keeps no array: its memory may be given away now."""
        self.into = b""
        del self._finish
