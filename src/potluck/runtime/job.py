"""Jobs: calls of a group that wait for their turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from potluck.runtime.call import Call
    from potluck.runtime.work import Work

__all__ = ["Job", "Turn"]


Turn: TypeAlias = tuple[int, float, float | None]
"""The number of a call, when it was made, and when it must be done."""


@dataclass(slots=True)
class Job:
    """A call, its place among those of its group, and who waits for it."""

    number: int
    """Counted from the group's beginning, on all ranks alike."""
    call: Call | None
    """None once the caller has it back."""
    limit: float | None
    """Seconds; None for as long as it takes."""
    finish: Callable[[], Any] | None
    work: Work[Any]
    asked: float | None = None
    """When it was called, if the limit counts from there: unless, from when its turn comes."""
    error: BaseException | None = None
    """Why nobody waits for it any more."""

    def begin(self) -> Turn:
        """Its turn, now."""
        asked = time.monotonic() if self.asked is None else self.asked
        return self.number, asked, None if self.limit is None else asked + self.limit

    def withdraw(self, error: BaseException) -> None:
        """Its caller has given up and takes its memory back; it fails when its turn comes."""
        self.error, self.call, self.finish = error, None, None
