"""A stage: one view with its connections, as operations see it.

It runs until membership stops it: its connections are closed, and everything that waits is
interrupted, but nothing is raised yet.  It ends when membership has decided what follows: then all
that was interrupted raises the error made from that decision.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    Disconnected,
    DistributedError,
    MalformedFrame,
    NoQuorum,
    Timeout,
)
from potluck.runtime.requests import Place

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.runtime.group import Group
    from potluck.vocabulary import View

__all__ = ["Look", "Stage"]

COMPLAIN_AFTER = 1.0
"""Seconds in which membership notices by itself why a connection of operations broke."""

HEARSAY_AFTER = 3.0
"""The same where another rank says that it lost one: that rank complains first."""

LONGEST = 3600.0
"""Seconds of one sleep, after which the deadline is looked at again."""

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
        """With what its operations end; None until that is decided."""
        self.stopped = threading.Event()
        """Set when no operation runs in it any more, though it may not be decided what follows."""
        self.over = threading.Event()
        """Set together with ``ending``."""
        self.is_orderly = False
        """Whether those who are in the middle of something may try to finish it."""
        self.stopped_because = ""
        self._users = 0
        self._bystanders = 0  # users that only wait for the ending
        self._broken: dict[int | None, float] = {}  # since when operations miss a rank
        self._aborts: list[Aborted] = []  # by this program, while it waited for the ending
        self._unused_since = time.monotonic()
        self._changed = threading.Condition()
        self.labels: Mapping[int, str] = {}
        """What the other ranks are called in metrics."""
        self.complain: Callable[[int, str], None] | None = None
        """Told of a member that operations have lost and membership has not."""
        self.accuse: Callable[[int, str], None] | None = None
        """Told of a member that sent what no correct process sends, and what that was."""
        self.make_late: Callable[[float], Timeout] | None = None
        """Makes the error of a call whose time is up before it is decided what follows."""

    @property
    def stop_error(self) -> DistributedError:
        """What interrupts operations; those who run them wait for the ending instead."""
        return ChannelClosed(
            f"View {self.view.epoch} has stopped", cause=self.stopped_because or None
        )

    def look(self) -> None:
        """Raise if the stage has stopped; for those who wait for its connections."""
        if self.ending is not None:
            raise copy.copy(self.ending)
        if self.stopped.is_set():
            raise self.stop_error

    def check(self, deadline: float | None, seconds: float) -> None:
        """Before an operation begins: raise what the stage has ended with, once that is decided."""
        if self.stopped.is_set():
            raise self._decision(deadline, seconds)

    def late(self, seconds: float) -> Timeout:
        """The error of a call whose time is up before it is decided what follows."""
        if self.make_late is not None:
            return self.make_late(seconds)
        return NoQuorum(f"Waited {seconds:g} s for the next view", seconds=seconds)

    # -- what membership decided -----------------------------------------------------------------

    def is_misdeed(self, error: BaseException) -> bool:
        """Whether another member has sent what no correct process sends."""
        is_foreign = isinstance(error, MalformedFrame) and error.rank not in {None, self.rank}
        return is_foreign and self.accuse is not None

    def is_symptom(self, error: BaseException) -> bool:
        """Whether what an operation has seen is to be decided upon by membership."""
        if self.is_misdeed(error):
            return True
        if self.ending is not None:
            return isinstance(error, Disconnected | Aborted | BackendUnavailable)
        if isinstance(error, Aborted) and error.rank != self.rank:
            return error.is_final or self.stopped.is_set()  # else a program has ended it
        return isinstance(error, Disconnected)

    def verdict_on(
        self, error: BaseException, deadline: float | None, seconds: float = 0.0
    ) -> DistributedError | None:
        """What membership decided, if the error is a symptom of that; None if it is not.

        Waits for it until the deadline; the error is then that of :meth:`late`.
        """
        if not self.is_symptom(error):
            if type(error) is Timeout and self.stopped.is_set() and self.ending is None:
                return self.late(seconds)
            return None
        assert isinstance(error, DistributedError)
        if self.is_misdeed(error):
            self._accuse(error)
        elif not self.stopped.is_set() and not self._make_it_stop(error, deadline):
            return None
        return self._decision(deadline, seconds)

    def _accuse(self, error: DistributedError) -> None:
        """Have membership remove the member at fault; once is enough, twice does no harm."""
        assert error.rank is not None
        assert self.accuse is not None
        why = f"{error.message}: {error.cause}" if error.cause else error.message
        self.accuse(error.rank, why)

    def _make_it_stop(self, error: DistributedError, deadline: float | None) -> bool:
        """Let membership notice what broke a connection; if it does not, have it look there."""
        due = self._complaint_due(error)
        self._wait(self.stopped, due if deadline is None else min(due, deadline))
        return self._has_member_to_blame(error)

    def _complaint_due(self, error: DistributedError) -> float:
        patience = COMPLAIN_AFTER if self._is_lost_here(error) else HEARSAY_AFTER
        return self._broken.setdefault(error.rank, time.monotonic()) + patience

    def _has_member_to_blame(self, error: DistributedError) -> bool:
        """Have membership look at the member, if it had time to by itself; False if there is none.

        Without one, an error that stops nothing stays what it is.
        """
        rank = error.rank
        if self.stopped.is_set() or (rank is None or rank == self.rank):
            return self.stopped.is_set()
        if time.monotonic() >= self._complaint_due(error) and self.complain is not None:
            del self._broken[rank]
            self.complain(rank, str(error))
        return True

    def is_undecided(self, error: DistributedError) -> bool:
        """Whether the error is a symptom on which membership has not decided; waits for nothing."""
        if self.ending is not None or not self.is_symptom(error):
            return False
        if self.is_misdeed(error):
            self._accuse(error)
            return True
        is_early = time.monotonic() < self._complaint_due(error)
        return self._has_member_to_blame(error) or is_early

    def _decision(self, deadline: float | None, seconds: float) -> DistributedError:
        """What the stage ends with, once that is decided; or the error of who waited too long."""
        with self._changed:
            self._bystanders += 1
            self._changed.notify_all()
        try:
            aborted = self._wait(self.over, deadline)
        finally:
            with self._changed:
                self._bystanders -= 1
        if self.ending is not None:
            return copy.copy(self.ending)
        return aborted or self.late(seconds)

    def _wait(self, event: threading.Event, deadline: float | None) -> Aborted | None:
        """Wait for an event until a moment; None is never.  If the program aborts: with what."""
        with self._changed:
            before = len(self._aborts)
            while not event.is_set() and len(self._aborts) == before:
                remaining = LONGEST if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, LONGEST))
            return copy.copy(self._aborts[-1]) if len(self._aborts) > before else None

    def abort(self, error: Aborted) -> None:
        """The program ends what waits for the ending here."""
        with self._changed:
            self._aborts.append(error)
            self._changed.notify_all()

    def _is_lost_here(self, error: DistributedError) -> bool:
        if error.rank is None or self.backend is None:
            return True
        return self.backend.loss_of(error.rank) is not None

    def stop(self, reason: str, *, orderly: bool = False) -> None:
        """Let nothing begin here; what follows is not decided yet.  The first call counts."""
        if not self.stopped.is_set():
            self.is_orderly, self.stopped_because = orderly, reason
            self.stopped.set()
            with self._changed:
                self._changed.notify_all()

    def end(self, error: DistributedError, *, orderly: bool = False) -> None:
        """The stage is over; the first error counts.  A loss leaves nothing to be finished."""
        is_first = not self.stopped.is_set()
        if self.ending is None:
            self.ending = error
        self.is_orderly = orderly and (is_first or self.is_orderly)
        self.stopped.set()
        self.over.set()
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
        """Whether nothing was under way for this many seconds, and it has not stopped."""
        is_used = self._users > 0 or self.stopped.is_set()
        return not is_used and time.monotonic() >= self._unused_since + seconds

    def wait_until_unused(self, seconds: float) -> None:
        """Return when nothing is under way any more, or cannot be, or time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._users <= self._bystanders or not self.is_orderly, seconds
            )
