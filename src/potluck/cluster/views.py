"""Stages: one view after the other as operations see them.

The control thread installs, stops and ends stages; callers step in.  A call runs in one stage from
its beginning to its end.  A program that has used a stage gets the error with which that ended, in
the middle of its calls or at the next one, and then those of all stages that followed, one per
call.  While a stage has stopped and its error is not decided yet, calls wait, up to their timeout.
So all ranks learn of every change, and what they do next they do among the same ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from potluck._time import read_timeout
from potluck._types import Seconds, in_seconds
from potluck.backend.operation import Operation
from potluck.cluster import events as words
from potluck.collective.call import Place, Request, Work
from potluck.collective.collectives import DistributedBackend
from potluck.collective.executor import left
from potluck.collective.group import Group
from potluck.collective.p2p import Transfer
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    Disconnected,
    DistributedError,
    MalformedFrame,
    NoQuorum,
    Timeout,
    from_os_error,
)
from potluck.logs import get_logger
from potluck.trace.dump import mention
from potluck.trace.recorder import log_of, recorder_of

if TYPE_CHECKING:
    from potluck._types import View
    from potluck.backend.base import Backend
    from potluck.collective.call import Call, Turn
    from potluck.membership.messages import Cause
    from potluck.schedule.task import CollectiveConfig
    from potluck.trace.recorder import Log


# --------------------------------------------------------------------------------------------------
# Where a program stands between its calls: what it believes of who is in, until it is told.
#
# A program that has made a call in a view, or has read its place there, is told of the end of that
# view and of every later one, in order and by one error each.  So ranks that repeat their calls get
# the same errors, though one of them was too slow to begin anything in a view that did not last.

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


# --------------------------------------------------------------------------------------------------

LONGEST = 3600.0
"""Seconds of one sleep, after which the deadline is looked at again."""


class _Pin(threading.local):
    """The call that a thread is in; it is over when nobody has it any more, come what may."""

    visit: weakref.ref[Visit] | None = None


class Stages:
    """The stages of one node: the present one, and what callers wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pin = _Pin()
        self._footing = Footing()
        self._current: Stage | None = None
        self._ready: Stage | None = None  # the present one while calls can run in it
        self._waiting_for = "it has not met anybody yet"
        self._paused: str | None = None
        self._failed: DistributedError | None = None
        self._followers: list[Callable[[Stage], None]] = []
        self.find_missing: Callable[[], Sequence[Cause]] = tuple
        """Asks membership which members of the view are out of contact; on a caller's thread."""

    # -- the control thread --------------------------------------------------------------------

    def install(
        self,
        stage: Stage,
        ending: DistributedError,
        *,
        orderly: bool,
        passed: Sequence[Stage] = (),
    ) -> Stage | None:
        """Continue with another stage; the one before ends with this error and is returned.

        Between the two were those ``passed``, which are over; this process never was in them.
        """
        stage.make_late = self.late
        with self._changed:
            before, self._current = self._current, stage
            if before is not None and before.ending is None:
                before.end(ending, orderly=orderly)
            for each in (*passed, stage):
                self._footing.add(each)
            self._settle()
        return before

    def stop(self, reason: str, *, orderly: bool = False) -> Stage | None:
        """Let nothing more begin in the present stage, which is returned; its error follows."""
        with self._changed:
            stage = self._current
            if stage is not None:
                stage.stop(reason, orderly=orderly)
            self._settle()
        return stage

    def end(self, error: DistributedError) -> Stage | None:
        """The present stage, which is returned, ends with this error, and no other follows yet."""
        with self._changed:
            stage = self._current
            if stage is not None and stage.ending is None:
                stage.end(error)
            self._settle()
        return stage

    def built(self, stage: Stage, backend: Backend, group: Group) -> bool:
        """The connections of a stage are there; False if that was too late."""
        with self._changed:
            if stage.stopped.is_set() or self._failed is not None:
                return False
            stage.backend, stage.group = backend, group
            self._settle()
            followers = list(self._followers)
        for follower in followers:
            follower(stage)
        return True

    def pause(self, reason: str | None) -> None:
        """Calls wait until this is called with None."""
        with self._changed:
            self._paused = reason
            self._settle()

    def explain(self, reason: str) -> None:
        """What a node without a view waits for, in words."""
        self._waiting_for = reason

    def fail(self, error: DistributedError) -> None:
        """Nothing runs here any more, for good."""
        with self._changed:
            self._failed = self._failed or error
            if self._current is not None:
                self._current.end(error)
            self._settle()

    def become_forked(self, error: DistributedError) -> None:
        """In a forked child, where any lock may be held by a thread that is not here."""
        self._failed, self._ready = error, None

    def _settle(self) -> None:
        stage = self._current
        is_ready = stage is not None and not stage.stopped.is_set() and stage.backend is not None
        self._ready = stage if is_ready and self._paused is None and not self._failed else None
        self._changed.notify_all()

    # -- callers -------------------------------------------------------------------------------

    @property
    def current(self) -> Stage | None:
        """The stage of this thread's call; outside of calls, the latest."""
        return self.pinned or self._current

    @property
    def pinned(self) -> Stage | None:
        """The stage of the call that this thread is in the middle of."""
        known = self._pin.visit
        visit = None if known is None else known()
        return None if visit is None else visit.stage

    @property
    def latest(self) -> Stage | None:
        """The latest one, whatever this thread is in."""
        return self._current

    @property
    def failure(self) -> DistributedError | None:
        """Why nothing runs here any more, if so."""
        return self._failed

    def visit(self, timeout: float | None) -> Visit:
        """A call: a context manager that gives the stage it runs in."""
        return Visit(self, self._pin, timeout)

    def follow(self, follower: Callable[[Stage], None]) -> None:
        """Have something called for every stage once it is built, this one included.

        It runs on the thread that built the stage, and must not wait.
        """
        with self._changed:
            self._followers.append(follower)
            stage = self._current
        if stage is not None and stage.backend is not None and not stage.stopped.is_set():
            follower(stage)

    def unfollow(self, follower: Callable[[Stage], None]) -> None:
        """No longer."""
        with self._changed:
            if follower in self._followers:
                self._followers.remove(follower)

    def accept(self) -> None:
        """The program knows of every change so far: none of them is told by an error.

        It begins anew, as after it joined: changes before its next call are not told either.
        """
        with self._changed:
            self._footing.leave()

    def told(self, stage: Stage) -> None:
        """The program has learned that a stage is over."""
        if self._failed is None:  # else the lock may be held by a thread that is not here
            with self._changed:
                self._footing.told(stage)

    def read(self, timeout: float | None) -> Stage:
        """The stage in which the program learns its place: if that changes, it is told.

        That of its last call, until it is told: results are shared by the number of those who made
        them, whoever has left since.  Else the present one; while there is none, wait for the next:
        an old place would be of no use.  Between calls.
        """
        stage, footing = self._current, self._footing
        if footing.called and footing.stage is not None:
            return footing.stage
        if stage is None or (stage.stopped.is_set() and self._failed is None):
            stage = self._wait(lambda: self._current, _is_running, timeout)
        if self._failed is None:  # else the lock may be held by a thread that is not here
            with self._changed:
                if not footing.used:
                    footing.take(stage, called=False)
                    if self._current is not stage and self._current is not None:
                        footing.add(self._current)  # it was replaced meanwhile
        return stage

    def wait_for(
        self, condition: Callable[[Stage], bool], timeout: float | None, goal: str = ""
    ) -> Stage:
        """The stage once calls can run in it and it fulfils something, which ``goal`` names."""
        return self._wait(lambda: self._ready, condition, timeout, goal)

    @property
    def is_decided(self) -> bool:
        """Whether a call can run now, or never will."""
        return self._ready is not None or self._failed is not None

    def wait_until_decided(self, seconds: float) -> bool:
        """Wait until a call can run, or never will; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_decided, seconds)

    def _wait(
        self,
        find: Callable[[], Stage | None],
        condition: Callable[[Stage], bool],
        timeout: float | None,
        goal: str = "",
    ) -> Stage:
        timeout = read_timeout(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self._failed is not None:  # before the lock: it may be nobody's in a forked child
            raise copy.copy(self._failed)
        with self._changed:
            while (remaining := deadline - time.monotonic()) > 0:
                if self._failed is not None:
                    raise copy.copy(self._failed)
                stage = find()
                if stage is not None and condition(stage):
                    return stage
                self._changed.wait(min(remaining, LONGEST))
            stage = find()
            if stage is not None and condition(stage):
                return stage
        raise self.late(timeout or 0.0, goal)  # without the lock: it asks the control thread

    def step_in(self, timeout: float | None) -> Stage:
        """Begin a call, or raise what the program has to be told first."""
        footing = self._footing
        stage = self._ready
        if stage is not None and stage is footing.stage and footing.called:
            return stage
        owed: Stage | None = None

        def take_next() -> Stage | None:
            nonlocal owed
            owed = owed or footing.owed()
            # Also if another thread was told meanwhile: this call began before.
            if owed is not None and owed.ending is not None:
                skipped = footing.skipped if footing.stage is owed else 0
                footing.told(owed)
                raise words.after_skipping(owed.ending, skipped)
            if self._ready is not None:
                footing.take(self._ready, called=True)
            return self._ready

        return self._wait(take_next, lambda _: True, timeout)

    def late(self, seconds: float, goal: str = "") -> Timeout:
        """The error of a call that waited too long.  Not for the control thread, which it asks."""
        stage = self._current
        is_open = stage is not None and stage.ending is None and stage.stopped.is_set()
        if stage is not None and (self._paused is not None or is_open):
            waited = f"Waited {seconds:g} s for {goal or 'the cluster'}"
            what = "the cluster is paused" if self._paused else "no view follows yet"
            reason = self._paused or stage.stopped_because
            missing = self.find_missing()
            return words.no_quorum(f"{waited}, but {what}", seconds, stage.view, missing, reason)
        if stage is None or stage.ending is not None:
            what, cause = "this node is in no view of its cluster", self._waiting_for
        elif stage.backend is None:
            what = f"the members of view {stage.view.epoch} are not connected yet"
            cause = str(stage.trouble) if stage.trouble else "they are being connected"
        else:
            count = stage.world_size
            what, cause = f"the cluster has {count} member{'s' * (count != 1)}", ""
        return Timeout(
            f"Waited {seconds:g} s for {goal or 'the cluster'}, but {what}",
            seconds=seconds,
            cause=cause or None,
            hint="`potluck status` shows who is here; `potluck doctor` says why others are not.",
        )


def _is_running(stage: Stage) -> bool:
    return not stage.stopped.is_set()


class Visit:
    """One call of one thread; calls within it run in the same stage."""

    __slots__ = ("__weakref__", "_begun", "_is_inner", "_pin", "_stages", "_timeout", "stage")

    def __init__(self, stages: Stages, pin: _Pin, timeout: float | None) -> None:
        self._stages = stages
        self._pin = pin
        self._timeout = timeout
        self._is_inner = False
        self._begun = time.monotonic()
        self.stage: Stage | None = None

    @property
    def _seconds(self) -> float:
        return 0.0 if self._timeout is None else self._timeout

    @property
    def _deadline(self) -> float | None:
        """Until when the call may wait for what membership decides."""
        timeout = read_timeout(self._timeout)
        return None if timeout is None else self._begun + timeout

    def __enter__(self) -> Stage:
        stage = self._stages.pinned
        self._is_inner = stage is not None
        if stage is None:
            stage = self._stages.step_in(self._timeout)
            stage.begin_use()
            self._pin.visit = weakref.ref(self)
        self.stage = stage
        return stage

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A failure that is but a symptom of the stage's end is raised as that."""
        stage = self.stage
        if self._is_inner or stage is None:
            return
        self._pin.visit = None
        stage.end_use()
        if error is None:
            return
        verdict = stage.verdict_on(error, self._deadline, self._seconds)
        if verdict is None:
            return
        if stage.ending is not None:
            self._stages.told(stage)
        if type(verdict) is not type(error) or verdict.args != error.args:
            raise verdict from error


# --------------------------------------------------------------------------------------------------
# A stage: one view with its connections, as operations see it.
#
# It runs until membership stops it: its connections are closed, and everything that waits is
# interrupted, but nothing is raised yet.  It ends when membership has decided what follows: then
# all that was interrupted raises the error made from that decision.

COMPLAIN_AFTER = 1.0
"""Seconds in which membership notices by itself why a connection of operations broke."""

HEARSAY_AFTER = 3.0
"""The same where another rank says that it lost one: that rank complains first."""

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


# --------------------------------------------------------------------------------------------------
# The collectives of one view: what ends them is what membership decided, the same on all ranks.


class ViewGroup(Group):
    """Runs collectives among the members of a view, until that is over."""

    def __init__(self, backend: Backend, stage: Stage, config: CollectiveConfig | None) -> None:
        super().__init__(backend, config)
        self._stage = stage
        vars(backend)["_collectives"] = self  # whoever asks for the backend's group gets this one

    def _execute(self, call: Call, turn: Turn) -> None:
        """A connection that broke is a symptom; membership decides what the operation ends with."""
        _, asked, deadline = turn
        seconds = 0.0 if deadline is None else deadline - asked
        self._stage.check(deadline, seconds)
        try:
            super()._execute(call, turn)
        except BaseException as error:
            verdict = self._stage.verdict_on(error, deadline, seconds)
            if verdict is None or (type(verdict), verdict.args) == (type(error), error.args):
                raise
            raise verdict from error

    def abort(self, reason: str = "aborted") -> None:
        """End the operation under way, and those that were started, on all ranks.

        One that waits for the next view ends as well, on this rank.
        """
        super().abort(reason)
        self._stage.abort(left(self.rank, reason))


# --------------------------------------------------------------------------------------------------
# Calls in one view: every collective and message of a cluster runs among the same members.

Result = TypeVar("Result")

MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv")
"""Of these, what moves between two ranks."""

CALLS = (
    *("all_reduce", "reduce", "reduce_scatter"),
    *("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"),
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *MESSAGES,
)
"""What a program asks of a group."""


def _in_one_view(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(DistributedBackend, name))
    def call(self: InOneView, *arguments: Any, **options: Any) -> Any:
        run = getattr(super(InOneView, self), name)
        if self._stages.pinned is not None:
            return run(*arguments, **options)
        timeout = options.get("timeout")
        if name == "barrier" and arguments:
            timeout = arguments[0]
        try:
            with self._stages.visit(self._limit(timeout)) as stage:
                outcome = run(*arguments, **options)
                if isinstance(outcome, Transfer):
                    outcome.arbiter = StageArbiter(stage, self._stages)
                return outcome
        except DistributedError as error:
            mention(recorder_of(self), error)
            raise

    return call


class StageArbiter:
    """Lets a message that fails say what membership decided, like blocking calls do."""

    __slots__ = ("_stage", "_stages")

    def __init__(self, stage: Stage, stages: Stages) -> None:
        self._stage = stage
        self._stages = stages

    def is_open(self, error: DistributedError) -> bool:
        """Whether membership has not decided yet what the message ends with."""
        return self._stage.is_undecided(error)

    def decided(self, error: DistributedError) -> DistributedError:
        """What it ends with."""
        stage = self._stage
        if stage.ending is None or not stage.is_symptom(error):
            return error
        self._stages.told(stage)
        return copy.copy(stage.ending)

    def wait(
        self, error: DistributedError, deadline: float | None, seconds: float
    ) -> DistributedError | None:
        """Wait for the decision until a moment; the error of who waited too long, or None."""
        verdict = self._stage.verdict_on(error, deadline, seconds)
        return None if self._stage.ending is not None else verdict


def explain(work: Work[Any], stage: Stage, stages: Stages, timeout: float | None) -> None:
    """Let a collective under way that fails say what membership decided, as blocking calls do."""
    fail = work.fail
    deadline = None if timeout is None else time.monotonic() + timeout

    def explained(error: BaseException) -> None:
        verdict = stage.verdict_on(error, deadline, timeout or 0.0)
        if verdict is not None and stage.ending is not None:
            stages.told(stage)
        fail(verdict or error)

    work.fail = explained  # type: ignore[method-assign]
    work.make_late = _late_in(stage)


def _late_in(stage: Stage) -> Callable[[float], Timeout | None]:
    """The error of a wait for something that a stopped view holds up; None if it does not."""
    return lambda seconds: (
        stage.late(seconds) if stage.stopped.is_set() and stage.ending is None else None
    )


class Posted(Operation):
    """An operation of a view that was started by itself; it ends with what the view ends with."""

    __slots__ = ("_arbiter", "_operation")

    def __init__(self, operation: Operation, stage: Stage, stages: Stages) -> None:
        self._operation = operation
        self._arbiter = StageArbiter(stage, stages)

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Whether it has ended, well or not."""
        error = self._operation.error
        return self._operation.done and (error is None or not self._arbiter.is_open(error))

    @property
    def error(self) -> DistributedError | None:  # type: ignore[override]
        """What went wrong, once it is done."""
        error = self._operation.error
        return None if error is None else self._arbiter.decided(error)

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return self._operation.describe()

    def wait(self, timeout: Seconds | None = None) -> None:
        """Return when done, raise what went wrong, or raise :class:`Timeout`."""
        self._raise_decision(self._operation.wait, in_seconds(timeout))

    def finish_within(self, timeout: float | None) -> None:
        """Like :meth:`wait`, but a time-out gives the buffer back."""
        self._raise_decision(self._operation.finish_within, timeout)

    def _raise_decision(self, wait: Callable[[float | None], None], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            wait(timeout)
        except DistributedError as error:
            if self._operation.error is None:
                raise  # the time-out of this wait
            while self._arbiter.is_open(error):
                late = self._arbiter.wait(error, deadline, timeout or 0.0)
                if late is not None:
                    raise late from error
            raise self._arbiter.decided(error) from None

    def cancel(self) -> bool:
        """Give the buffer back without waiting; False if the operation was done after all."""
        return self._operation.cancel()


class InOneView(DistributedBackend):
    """Everything a group can do, each call in the view of its beginning."""

    _stages: Stages

    if not TYPE_CHECKING:  # for type checkers they are the inherited ones
        locals().update({name: _in_one_view(name) for name in CALLS})

    @property
    def rank(self) -> int:
        """This process's place in the view, from 0; the leader is 0.

        After a call it is the place in that call, until the next one: should it change in between,
        that raises, so that nobody works with an old one.  Before the first call, and after one
        that raised so, it is the place in the present view; while that changes this waits.
        :attr:`view` is always the present one.
        """
        return self._stage.rank

    @property
    def world_size(self) -> int:
        """How many members the view has: as for :attr:`rank`, that of the last call."""
        return self._stage.world_size

    @property
    def _stage(self) -> Stage:
        return self._stages.pinned or self._stages.read(self.timeout)

    @property
    def _place(self) -> Place:
        return self._stage.place

    @property
    def _messages(self) -> Log:
        stage = self._stages.pinned
        return log_of(self if stage is None or stage.backend is None else stage.backend)

    @property
    def group(self) -> Group:
        """Who runs the collectives of the present view; waits until its members are connected."""
        pinned = self._stages.pinned
        if pinned is not None and pinned.group is not None:
            return pinned.group
        with self._stages.visit(self.timeout) as stage:
            assert stage.group is not None
            return stage.group

    def _launch(
        self, request: Request[Result], timeout: Seconds | None, *, async_op: bool
    ) -> Result | Work[Result]:
        stages = self._stages
        if not async_op and stages.pinned is not None:
            return super()._launch(request, timeout, async_op=False)
        with stages.visit(self._limit(timeout)) as stage:
            outcome = super()._launch(request, timeout, async_op=async_op)
            if isinstance(outcome, Work):
                work = outcome
                work.make_late = _late_in(stage)
                stage.begin_use()

                def end() -> None:
                    stage.end_use()
                    if stage.ending is not None and work.exception() is not None:
                        stages.told(stage)  # whoever waits for it learns that the view is over

                work.add_done_callback(end)
        return outcome


# --------------------------------------------------------------------------------------------------
# Building the connections of a view, on a thread of its own, for as long as they are wanted.

logger = get_logger(__name__)

BUILD_WITHIN, BUILD_EACH = 10.0, 0.5
"""Seconds for one attempt to connect all members of a view, and more for each of them.

Members may share one busy machine, and their handshakes with it.
"""

GRACE = 3.0
"""Seconds for what is under way when a view ends in good order.

A member that is slow needs them.  Who waits for one that has left is told at once; members that
wait for each other in vain are told after this time.
"""

PAUSE = 0.2
"""Seconds between two attempts."""


Make: TypeAlias = "Callable[[Stage, float, Look], Backend]"
"""Connects the members of a stage by a deadline; ``look`` raises when that is not wanted."""


class Builders:
    """Builds one stage after the other, and clears away those that are over."""

    def __init__(self, stages: Stages, make: Make, config: CollectiveConfig | None) -> None:
        self._stages = stages
        self._make = make
        self._config = config
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def build(self, stage: Stage, before: Stage | None) -> None:
        """Connect the members of a stage; afterwards clear away the one before it."""

        def work() -> None:
            try:
                self._build(stage)
            finally:
                if before is not None:
                    if before.is_orderly:
                        before.wait_until_unused(GRACE)
                    clear_away(before)

        self.start(work, f"potluck-view-{stage.view.epoch}")

    def abort(self, stage: Stage) -> None:
        """Interrupt what runs in a stage that has stopped, on a thread of its own.

        At once, unless no member was lost: then what is under way gets a moment to finish.  A rank
        with nothing under way ends its connections at once, so that no rank waits for it in vain.
        """

        def work() -> None:
            if stage.is_orderly:
                stage.wait_until_unused(GRACE)
            abort_stage(stage)

        if stage.backend is not None:
            self.start(work, f"potluck-abort-{stage.view.epoch}")

    def start(self, task: Callable[[], None], name: str) -> None:
        """Have something done on a short-lived thread; what goes wrong is logged."""

        def work() -> None:
            try:
                task()
            except Exception:
                logger.exception("%s failed", name)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:  # whoever closes waits for those that have started
            self._threads.add(thread)
            thread.start()

    def _build(self, stage: Stage) -> None:
        while not stage.stopped.is_set():
            try:
                within = BUILD_WITHIN + BUILD_EACH * stage.world_size
                backend = self._make(stage, time.monotonic() + within, stage.look)
            except (DistributedError, OSError) as error:
                words = error if isinstance(error, DistributedError) else _in_words(error)
                if not stage.stopped.is_set():
                    is_known, stage.trouble = str(stage.trouble) == str(words), words
                    level = logging.DEBUG if is_known else logging.INFO
                    logger.log(level, "view %d is not connected yet: %s", stage.view.epoch, words)
                stage.stopped.wait(PAUSE)
                continue
            group = ViewGroup(backend, stage, self._config)
            if not self._stages.built(stage, backend, group):
                stage.backend, stage.group = backend, group
                abort_stage(stage)
                clear_away(stage)
            return

    def close(self, within: float) -> None:
        """Wait for those at work; their stages must be over."""
        deadline = time.monotonic() + within
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def abort_stage(stage: Stage) -> None:
    """Interrupt what runs in a stage that has stopped."""
    backend = stage.backend
    if backend is None:
        return
    error = stage.ending or stage.stop_error
    abort: Callable[[DistributedError], None] | None = getattr(backend, "abort", None)
    if abort is not None:
        abort(error)


def clear_away(stage: Stage) -> None:
    """Close what a stage that is over had opened."""
    with contextlib.suppress(DistributedError, OSError):
        if stage.group is not None:
            stage.group.close()
    with contextlib.suppress(DistributedError, OSError):
        if stage.backend is not None:
            stage.backend.close()


def _in_words(error: OSError) -> DistributedError:
    return from_os_error("The members of the view could not be connected", error)
