"""The courier: moves messages that were posted and for which nobody waits.

A mesh has no thread of its own, so a message that was posted moves while somebody uses the backend.
Programs that post sends and receives and then compute expect them to be under way meanwhile.  The
courier gives whoever waits himself a moment, and then pumps as long as something is not done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

from potluck.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Courier", "Errand"]

MOMENT = 0.002
"""Seconds in which whoever has posted a message may come and wait for it himself."""

LOOK = 0.02
"""Seconds of one look for bytes; a thread that comes to wait takes over after that."""

TAKEN = 1e-4
"""A look that was shorter found another thread at the pump."""

IDLE = 5.0
"""Seconds after which the courier's thread ends when there is nothing to do."""


class Errand(Protocol):
    """Something under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended; asking may bring that about."""


class Courier:
    """A thread that is there while errands are."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress = progress
        self._errands: list[Errand] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._changed = threading.Condition()

    def carry(self, errand: Errand) -> None:
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

    def _pump(self, errands: list[Errand]) -> bool:
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


def _is_done(errand: Errand) -> bool:
    try:
        return errand.done
    except DistributedError:
        return True  # its owner finds out what is wrong
