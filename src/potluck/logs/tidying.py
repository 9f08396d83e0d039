"""Tidying: a logger's lines are lines, and no kind of them floods the others."""

from __future__ import annotations

import logging
import threading
import time

from potluck.forking import call_in_children
from potluck.logs.lines import escaped

__all__ = ["BURST", "PERIOD", "Tidy", "tidy"]

BURST = 10
"""Lines of one kind that are written within :data:`PERIOD`; more are counted."""

PERIOD = 10.0
"""Seconds."""

MAX_KINDS = 256
"""Kinds of lines that are told apart at once."""


class _Kind:
    """How often lines of one kind came lately."""

    __slots__ = ("count", "dropped", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.count = 0
        self.dropped = 0


class Tidy(logging.Filter):
    """Makes a line of every event, and lets no kind of line flood the others."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; what stands in for those that were not is added."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a fault of ours, which logging shows in its own way
            return True
        # Where the text is all that a caller gives, equal texts are of one kind.
        template = message if record.msg == "%s" else str(record.msg)
        dropped = self._admit((record.name, template))
        if dropped is None:
            return False
        if dropped:
            message = f"{message} (and {dropped} more like this before)"
        if dropped or not message.isprintable():
            record.msg, record.args = escaped(message), None
        return True

    def _admit(self, key: tuple[str, str]) -> int | None:
        """How many of its kind were left out before it; None if it is left out as well."""
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(key)
            dropped = 0
            if kind is None or now - kind.since >= PERIOD:
                dropped = 0 if kind is None else kind.dropped
                self._kinds.pop(key, None)
                kind = self._kinds[key] = _Kind(now)
                if len(self._kinds) > MAX_KINDS:
                    del self._kinds[next(iter(self._kinds))]  # the one that began first
            kind.count += 1
            if kind.count > BURST:
                kind.dropped += 1
                return None
            return dropped

    def forget(self) -> None:
        """Begin anew; in a forked child another thread may have held the lock."""
        self._lock = threading.Lock()
        self._kinds = {}


tidy = Tidy()
call_in_children(tidy.forget)
