"""Where a program stands between its calls: what it believes of who is in, until it is told.

A program that has made a call in a view, or has read its place there, is told of the end of that
view and of every later one, in order and by one error each.  So ranks that repeat their calls get
the same errors, though one of them was too slow to begin anything in a view that did not last.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.runtime.cluster_stage import Stage

__all__ = ["MAX_UNTOLD", "Footing"]

MAX_UNTOLD = 16
"""Views that a program has yet to be told of; beyond that, the oldest are forgotten."""


class Footing:
    """Where the program stands: all its threads, for their calls are one sequence.

    Not safe by itself: ``Stages`` holds its lock, except where a flag is set or read.
    """

    __slots__ = ("called", "dropped", "is_told", "later", "skipped", "stage", "used")

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.used = False  # the program is told of the end of this stage and of all later ones
        self.called = False  # and it made a call, whose result is one of these members
        self.is_told = False  # it knows that this stage is over; the next one follows
        self.later: deque[Stage] = deque()  # that were installed since
        self.dropped = 0  # stages after this one that are forgotten
        self.skipped = 0  # stages before this one that were forgotten

    def take(self, stage: Stage, *, called: bool) -> None:
        """The program stands here."""
        self.leave()
        self.stage, self.used, self.called = stage, True, called

    def leave(self) -> None:
        """It knows of every change so far, and of those until it stands somewhere again."""
        self.used = self.called = self.is_told = False
        self.later.clear()
        self.dropped = self.skipped = 0

    def told(self, stage: Stage) -> None:
        """The program has learned that a stage is over."""
        if self.stage is stage and self.used:
            self.called, self.is_told = False, True

    def add(self, stage: Stage) -> None:
        """Another stage was installed."""
        if not self.used:
            return
        self.later.append(stage)
        if len(self.later) > MAX_UNTOLD:
            self.later.popleft()
            self.dropped += 1

    def owed(self) -> Stage | None:
        """The stage of whose end the program is to be told next; None if there is none so far."""
        if not self.used:
            return None
        if self.is_told:
            if not self.later:
                return None
            self.stage, self.is_told = self.later.popleft(), False
            self.skipped, self.dropped = self.dropped, 0
        return self.stage
