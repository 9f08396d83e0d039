"""A stage: one view with its connections, as operations see it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from potluck.errors import Aborted, BackendUnavailable, Disconnected, DistributedError
from potluck.runtime.requests import Place

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.runtime.group import Group
    from potluck.vocabulary import View

__all__ = ["Look", "Stage"]

VERDICT = 1.0
"""Seconds an operation that lost a connection waits for what the cluster makes of it."""

Look: TypeAlias = Callable[[], None]
"""Raises when waiting makes no sense any more."""


class Stage:
    """A view with its connections, from its installation to its end."""

    def __init__(self, view: View, rank: int) -> None:
        self.view = view
        self.rank = rank
        self.world_size = len(view.members)
        self.place = Place(rank, self.world_size)
        self.backend: Backend | None = None
        """Connects the members; None until it is built."""
        self.group: Group | None = None
        self.trouble: DistributedError | None = None
        """Why the connections could not be made so far."""
        self.ending: DistributedError | None = None
        """With what its operations end; None while it lasts."""
        self.over = threading.Event()
        self.is_orderly = False
        """Whether those who are in the middle of something may try to finish it."""
        self._users = 0
        self._unused_since = time.monotonic()
        self._changed = threading.Condition()
        self.labels: Mapping[int, str] = {}
        """What the other ranks are called in metrics."""
        self.complain: Callable[[int, str], None] | None = None
        """Told of a member that operations have lost and the cluster has not."""

    def look(self) -> None:
        """Raise if the stage is over; for whoever waits for its connections."""
        if self.ending is not None:
            raise copy.copy(self.ending)

    def verdict_on(self, error: BaseException) -> DistributedError | None:
        """The error of the stage's end, if what was seen is but a symptom of it."""
        if not isinstance(error, Disconnected | Aborted | BackendUnavailable):
            return None
        is_from_here = isinstance(error, BackendUnavailable) or error.rank == self.rank
        if self.ending is None and not is_from_here and not self.over.wait(VERDICT):
            is_lost = isinstance(error, Disconnected) and error.rank is not None
            if is_lost and self.complain is not None:
                self.complain(int(error.rank or 0), str(error))
        return None if self.ending is None else copy.copy(self.ending)

    def end(self, error: DistributedError, *, orderly: bool = False) -> None:
        """The stage is over; the first error counts.  A loss leaves nothing to be finished."""
        if self.ending is None:
            self.ending = error
            self.is_orderly = orderly
            self.over.set()
        elif not orderly:
            self.is_orderly = False
            with self._changed:
                self._changed.notify_all()

    # -- who is in the middle of something -----------------------------------------------------

    def begin_use(self) -> None:
        """A call, or work that was started, begins."""
        with self._changed:
            self._users += 1

    def end_use(self) -> None:
        """It has ended."""
        with self._changed:
            self._users -= 1
            if not self._users:
                self._unused_since = time.monotonic()
                self._changed.notify_all()

    def is_quiet(self, seconds: float) -> bool:
        """Whether nobody has been in the middle of anything for so long, and it is not over."""
        is_used = self._users > 0 or self.ending is not None
        return not is_used and time.monotonic() >= self._unused_since + seconds

    def wait_until_unused(self, seconds: float) -> None:
        """Return when nobody uses the stage any more, or nobody can, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or not self.is_orderly, seconds)
