"""What is kept of calls that we make: the flight recorder's entry, and what metrics count."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.metrics import OperationMetrics
    from potluck.runtime.recorder import Log, RemoteCall

__all__ = ["Notes"]


class Notes:
    """Where the calls of one office are taken down, and counted if somebody counts."""

    __slots__ = ("_log", "counts")

    def __init__(self, log: Log) -> None:
        self._log = log
        self.counts: OperationMetrics | None = None

    def end(self, call: RemoteCall, error: BaseException | None) -> None:
        """A call is over."""
        now = time.monotonic()
        self._log.note_call(call, now, error)
        if self.counts is not None:
            name = "" if error is None else type(error).__name__
            self.counts.note(now - call.began, call.size, name)
