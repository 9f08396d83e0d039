"""Where a program stands between its calls: what it believes of who is in, until it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.runtime.cluster_stage import Stage

__all__ = ["Footing"]


class Footing:
    """Where the program stands: all its threads, for their calls are one sequence."""

    __slots__ = ("called", "stage", "used")

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.used = False  # something was begun there: it must be told when that is over
        self.called = False  # and that was a call, whose result is one of these members

    def take(self, stage: Stage, *, called: bool) -> None:
        """The program stands here."""
        self.stage, self.used, self.called = stage, True, called

    def leave(self) -> None:
        """It knows that this is over, if it is."""
        self.used = self.called = False

    def told(self, stage: Stage) -> None:
        """The program has learned that a stage is over."""
        if self.stage is stage:
            self.leave()
