"""Sessions: one view after the other as operations see them.

The control thread installs, stops and ends sessions; callers step in.  A call runs in one session
from its beginning to its end.  A program that has used a session gets the error with which that
ended, in the middle of its calls or at the next one, and then those of all sessions that followed,
one per call.  While a session has stopped and its error is not decided yet, calls wait, up to their
timeout.  So all ranks learn of every change, and what they do next they do among the same ranks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from potluck._future import deadline_after
from potluck._time import read_timeout
from potluck._types import Seconds
from potluck.backend.operation import Operation
from potluck.cluster import events as words
from potluck.collective.call import CallSite, Work
from potluck.collective.collectives import CallScope, DistributedBackend
from potluck.collective.executor import left
from potluck.collective.group import Group
from potluck.collective.p2p import AS_THEY_ARE, MessageErrors
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
    from potluck.backend.mesh import MeshBackend
    from potluck.collective.call import Turn
    from potluck.membership.messages import Cause
    from potluck.schedule.planner import CollectiveConfig
    from potluck.trace.recorder import GroupLog


# --------------------------------------------------------------------------------------------------
# Where a program stands between its calls: what it believes of who is in, until it is told.
#
# A program that has made a call in a view, or has read its place there, is told of the end of that
# view and of every later one, in order and by one error each.  So ranks that repeat their calls get
# the same errors, though one of them was too slow to begin anything in a view that did not last.

MAX_UNTOLD = 16
"""Views that a program has yet to be told of; beyond that, the oldest are forgotten."""


class CallerState:
    """Where the program stands: all its threads, for their calls are one sequence.

    Not safe by itself: ``ViewSessions`` holds its lock, except where a flag is set or read.
    """

    __slots__ = ("called", "dropped", "is_told", "later", "session", "skipped", "used")

    def __init__(self) -> None:
        self.session: ViewSession | None = None
        self.used = False  # the program is told of the end of this session and of all later ones
        self.called = False  # and it made a call, whose result is one of these members
        self.is_told = False  # it knows that this session is over; the next one follows
        self.later: deque[ViewSession] = deque()  # that were installed since
        self.dropped = 0  # sessions after this one that are forgotten
        self.skipped = 0  # sessions before this one that were forgotten

    def take(self, session: ViewSession, *, called: bool) -> None:
        """The program stands here."""
        self.leave()
        self.session, self.used, self.called = session, True, called

    def leave(self) -> None:
        """It knows of every change so far, and of those until it stands somewhere again."""
        self.used = self.called = self.is_told = False
        self.later.clear()
        self.dropped = self.skipped = 0

    def told(self, session: ViewSession) -> None:
        """The program has learned that a session is over."""
        if self.session is session and self.used:
            self.called, self.is_told = False, True

    def add(self, session: ViewSession) -> None:
        """Another session was installed."""
        if not self.used:
            return
        self.later.append(session)
        if len(self.later) > MAX_UNTOLD:
            self.later.popleft()
            self.dropped += 1

    def owed(self) -> ViewSession | None:
        """The session of whose end the program is to be told next; None if there is none so far."""
        if not self.used:
            return None
        if self.is_told:
            if not self.later:
                return None
            self.session, self.is_told = self.later.popleft(), False
            self.skipped, self.dropped = self.dropped, 0
        return self.session


# --------------------------------------------------------------------------------------------------

LONGEST = 3600.0
"""Seconds of one sleep, after which the deadline is looked at again."""


class _Pin(threading.local):
    """The call that a thread is in; it is over when no reference to it is left."""

    visit: weakref.ref[ViewCall] | None = None


class ViewSessions:
    """The sessions of one node: the present one, and what callers wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.pin = _Pin()
        self._caller = CallerState()
        self._current: ViewSession | None = None
        self._ready: ViewSession | None = None  # the present one while calls can run in it
        self._waiting_for = "no other machine has joined yet"
        self._paused: str | None = None
        self._failed: DistributedError | None = None
        self._followers: list[Callable[[ViewSession], None]] = []
        self.find_missing: Callable[[], Sequence[Cause]] = tuple
        """Asks membership which members of the view are out of contact; on a caller's thread."""

    # -- the control thread --------------------------------------------------------------------

    def install(
        self,
        session: ViewSession,
        ending: DistributedError,
        *,
        orderly: bool,
        passed: Sequence[ViewSession] = (),
    ) -> ViewSession | None:
        """Continue with another session; the one before ends with this error and is returned.

        Between the two were those ``passed``, which are over; this process never was in them.
        """
        session.make_late = self.late
        with self._changed:
            before, self._current = self._current, session
            if before is not None and before.ending is None:
                before.end(ending, orderly=orderly)
            for each in (*passed, session):
                self._caller.add(each)
            self._settle()
        return before

    def stop(self, reason: str, *, orderly: bool = False) -> ViewSession | None:
        """Let nothing more begin in the present session, which is returned; its error follows."""
        with self._changed:
            session = self._current
            if session is not None:
                session.stop(reason, orderly=orderly)
            self._settle()
        return session

    def end(self, error: DistributedError) -> ViewSession | None:
        """The present session ends with this error, and none follows yet; returns that session."""
        with self._changed:
            session = self._current
            if session is not None and session.ending is None:
                session.end(error)
            self._settle()
        return session

    def built(self, session: ViewSession, backend: MeshBackend, group: Group) -> bool:
        """The connections of a session are there; False if that was too late."""
        with self._changed:
            if session.stopped.is_set() or self._failed is not None:
                return False
            session.backend, session.group = backend, group
            self._settle()
            followers = list(self._followers)
        for follower in followers:
            follower(session)
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
        session = self._current
        is_ready = (
            session is not None and not session.stopped.is_set() and session.backend is not None
        )
        self._ready = session if is_ready and self._paused is None and not self._failed else None
        self._changed.notify_all()

    # -- callers -------------------------------------------------------------------------------

    @property
    def current(self) -> ViewSession | None:
        """The session of this thread's call; outside of calls, the latest."""
        return self.pinned or self._current

    @property
    def pinned(self) -> ViewSession | None:
        """The session of the call that this thread is in the middle of."""
        known = self.pin.visit
        visit = None if known is None else known()
        return None if visit is None else visit.session

    @property
    def latest(self) -> ViewSession | None:
        """The latest one, whatever this thread is in."""
        return self._current

    @property
    def failure(self) -> DistributedError | None:
        """Why nothing runs here any more, if so."""
        return self._failed

    def visit(self, timeout: float | None) -> ViewCall:
        """A call: a context manager that gives the session it runs in."""
        return ViewCall(self, timeout)

    def follow(self, follower: Callable[[ViewSession], None]) -> None:
        """Have something called for every session once it is built, this one included.

        It runs on the thread that built the session, and must not wait.
        """
        with self._changed:
            self._followers.append(follower)
            session = self._current
        if session is not None and session.backend is not None and not session.stopped.is_set():
            follower(session)

    def unfollow(self, follower: Callable[[ViewSession], None]) -> None:
        """No longer."""
        with self._changed:
            if follower in self._followers:
                self._followers.remove(follower)

    def accept(self) -> None:
        """The program knows of every change so far: none of them is told by an error.

        It begins anew, as after it joined: changes before its next call are not told either.
        """
        with self._changed:
            self._caller.leave()

    def told(self, session: ViewSession) -> None:
        """The program has learned that a session is over."""
        if self._failed is None:  # else the lock may be held by a thread that is not here
            with self._changed:
                self._caller.told(session)

    def read(self, timeout: float | None) -> ViewSession:
        """The session in which the program learns its place: if that changes, it is told.

        That of its last call, until it is told: results are shared by the number of those who made
        them, whichever have left since.  Else the present one; while there is none, wait for the
        next: an old place would be of no use.  Between calls.
        """
        session, caller = self._current, self._caller
        if caller.called and caller.session is not None:
            return caller.session
        if session is None or (session.stopped.is_set() and self._failed is None):
            session = self._wait(lambda: self._current, _is_running, timeout)
        if self._failed is None:  # else the lock may be held by a thread that is not here
            with self._changed:
                if not caller.used:
                    caller.take(session, called=False)
                    if self._current is not session and self._current is not None:
                        caller.add(self._current)  # it was replaced meanwhile
        return session

    def wait_for(
        self, condition: Callable[[ViewSession], bool], timeout: float | None, goal: str = ""
    ) -> ViewSession:
        """The session once calls can run in it and it fulfils something, which ``goal`` names."""
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
        find: Callable[[], ViewSession | None],
        condition: Callable[[ViewSession], bool],
        timeout: float | None,
        goal: str = "",
    ) -> ViewSession:
        timeout = read_timeout(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self._failed is not None:  # before the lock: it may have no owner in a forked child
            raise copy.copy(self._failed)
        with self._changed:
            while (remaining := deadline - time.monotonic()) > 0:
                if self._failed is not None:
                    raise copy.copy(self._failed)
                session = find()
                if session is not None and condition(session):
                    return session
                self._changed.wait(min(remaining, LONGEST))
            session = find()
            if session is not None and condition(session):
                return session
        raise self.late(timeout or 0.0, goal)  # without the lock: it asks the control thread

    @property
    def settled(self) -> ViewSession | None:
        """The session of the last call, if the next one can run there: nothing has changed."""
        session, caller = self._ready, self._caller
        return session if session is caller.session and caller.called else None

    def step_in(self, timeout: float | None) -> ViewSession:
        """Begin a call, or raise what the program has to be told first."""
        caller = self._caller
        owed: ViewSession | None = None

        def take_next() -> ViewSession | None:
            nonlocal owed
            owed = owed or caller.owed()
            # Also if another thread was told meanwhile: this call began before.
            if owed is not None and owed.ending is not None:
                skipped = caller.skipped if caller.session is owed else 0
                caller.told(owed)
                raise words.after_skipping(owed.ending, skipped)
            if self._ready is not None:
                caller.take(self._ready, called=True)
            return self._ready

        return self._wait(take_next, lambda _: True, timeout)

    def late(self, seconds: float, goal: str = "") -> Timeout:
        """The error of a call that waited too long.  Not for the control thread, which it asks."""
        session = self._current
        waited = f"Waited {seconds:g} s for {goal or 'the cluster'}"
        is_open = session is not None and session.ending is None and session.stopped.is_set()
        if session is not None and (self._paused is not None or is_open):
            what = "the cluster is paused" if self._paused else "no view follows yet"
            reason = self._paused or session.stopped_because
            missing = self.find_missing()
            return words.no_quorum(f"{waited}, but {what}", seconds, session.view, missing, reason)
        if session is None:
            what, cause = "this machine has not joined a group yet", self._waiting_for
        elif session.ending is not None:
            what, cause = "this machine is in no view now", self._waiting_for
            missing = self.find_missing()
            if missing:
                reason = "they may be at work without this machine"
                return words.no_quorum(
                    f"{waited}, but {what}", seconds, session.view, missing, reason
                )
        elif session.backend is None:
            what = f"the members of view {session.view.epoch} are not connected yet"
            cause = str(session.trouble) if session.trouble else "they are being connected"
        else:
            count = session.world_size
            what, cause = f"the cluster has {count} member{'s' * (count != 1)}", ""
        return Timeout(
            f"{waited}, but {what}",
            seconds=seconds,
            cause=cause or None,
            hint="`potluck status` shows who is here; `potluck doctor` says why others are not.",
        )


def _is_running(session: ViewSession) -> bool:
    return not session.stopped.is_set()


class ViewCall(CallScope):
    """One call of one thread: it runs in one view, and raises what membership decided.

    Calls within it run in the same view.  A call of a cluster that fails is counted, and what came
    before is written down where that helps.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_cluster",
        "_is_inner",
        "_sessions",
        "_timeout",
        "session",
    )

    def __init__(
        self,
        sessions: ViewSessions,
        timeout: Seconds | None,
        cluster: InOneView | None = None,
        name: str = "",
    ) -> None:
        metrics = None if cluster is None else cluster._metrics  # noqa: SLF001 - of our own kind
        super().__init__(metrics, name)
        self._sessions = sessions
        self._timeout = timeout
        self._cluster = cluster
        self._is_inner = False
        self._begun = time.monotonic()
        self.session: ViewSession | None = None

    @property
    def _limit(self) -> float | None:
        """Seconds that the call may wait for what membership decides; None for no limit."""
        given, cluster = self._timeout, self._cluster
        return read_timeout(cluster.timeout if given is None and cluster is not None else given)

    def __enter__(self) -> ViewSession:
        sessions = self._sessions
        session = sessions.pinned
        self._is_inner = session is not None
        if session is None:
            try:
                session = sessions.settled or sessions.step_in(self._limit)
            except DistributedError as error:
                self._mention(error)
                raise
            session.begin_use()
            sessions.pin.visit = weakref.ref(self)
        self.session = session
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A failure that is but a symptom of the session's end is raised as that."""
        session = self.session
        assert session is not None
        if not self._is_inner:
            self._sessions.pin.visit = None
            session.end_use()
        if error is None:
            return
        super().__exit__(kind, error, trace)
        if self._is_inner:
            return
        limit = self._limit
        deadline = None if limit is None else self._begun + limit
        decided = session.decided_error(error, deadline, limit or 0.0)
        if decided is not None and session.ending is not None:
            self._sessions.told(session)
        if decided is None or (type(decided), decided.args) == (type(error), error.args):
            self._mention(error)
            return
        self._mention(decided)
        raise decided from error

    def _mention(self, error: BaseException) -> None:
        if self._cluster is not None and isinstance(error, DistributedError):
            mention(recorder_of(self._cluster), error)

    @property
    def message_errors(self) -> MessageErrors:
        """Messages of this call end with what membership decided."""
        if self._is_inner or self.session is None:
            return AS_THEY_ARE
        return ViewMessageErrors(self.session, self._sessions)


# --------------------------------------------------------------------------------------------------
# A session: one view with its connections, as operations see it.
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


class ViewSession:
    """A view with its connections, from its installation to its end."""

    def __init__(self, view: View, rank: int) -> None:
        self.view = view
        self.rank = rank
        self.world_size = len(view.members)
        self.place = CallSite(rank, self.world_size)
        self.backend: MeshBackend | None = None
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
        self._successors = 0  # threads that wait until nobody uses it
        self._broken: dict[int | None, float] = {}  # since when operations miss a rank
        self._aborts: list[Aborted] = []  # by this program, while it waited for the ending
        self._unused_since = time.monotonic()
        self._lock = threading.RLock()  # a signal's handler may use the session as well
        self._changed = threading.Condition(self._lock)
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
        """Raise if the session has stopped; for those who wait for its connections."""
        if self.ending is not None:
            raise copy.copy(self.ending)
        if self.stopped.is_set():
            raise self.stop_error

    def check(self, deadline: float | None, seconds: float) -> None:
        """Before an operation begins: raise what the session ended with, once that is decided."""
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

    def decided_error(
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
        """What the session ends with, once that is decided; or the error of who waited too long."""
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
        """The session is over; the first error counts.  A loss leaves nothing to be finished."""
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
        with self._lock:
            self._users += 1

    def end_use(self) -> None:
        """It has ended."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._unused_since = time.monotonic()
            if self._successors:
                self._changed.notify_all()

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing was under way for this many seconds, and it has not stopped."""
        is_used = self._users > 0 or self.stopped.is_set()
        return not is_used and time.monotonic() >= self._unused_since + seconds

    def wait_until_unused(self, seconds: float) -> None:
        """Return when nothing is under way any more, or cannot be, or time is up."""
        with self._changed:
            self._successors += 1
            try:
                self._changed.wait_for(
                    lambda: self._users <= self._bystanders or not self.is_orderly, seconds
                )
            finally:
                self._successors -= 1


# --------------------------------------------------------------------------------------------------
# The collectives of one view: what ends them is what membership decided, the same on all ranks.


def _seconds(turn: Turn) -> float:
    return 0.0 if turn[2] is None else turn[2] - turn[1]


class ViewGroup(Group):
    """Runs collectives among the members of a view, until that is over."""

    def __init__(
        self, backend: Backend, session: ViewSession, config: CollectiveConfig | None
    ) -> None:
        super().__init__(backend, config)
        self._session = session
        backend.services.put(Group, self)  # Group.of() returns this one

    def _begin(self, turn: Turn) -> None:
        """Nothing begins in a view that is over."""
        if self._session.stopped.is_set():
            self._session.check(turn[2], _seconds(turn))

    def _decide(self, error: BaseException, turn: Turn) -> BaseException:
        """A connection that broke is a symptom; membership decides what the operation ends with."""
        decision = self._session.decided_error(error, turn[2], _seconds(turn))
        if decision is None or (type(decision), decision.args) == (type(error), error.args):
            return error
        return decision

    def abort(self, reason: str = "aborted") -> None:
        """End the operation under way, and those that were started, on all ranks.

        One that waits for the next view ends as well, on this rank.
        """
        super().abort(reason)
        self._session.abort(left(self.rank, reason))


# --------------------------------------------------------------------------------------------------
# Calls in one view: every collective and message of a cluster runs among the same members.

Result = TypeVar("Result")


class ViewMessageErrors(MessageErrors):
    """Lets a message that fails say what membership decided, like blocking calls do."""

    __slots__ = ("_session", "_sessions")

    def __init__(self, session: ViewSession, sessions: ViewSessions) -> None:
        self._session = session
        self._sessions = sessions

    def is_open(self, error: DistributedError) -> bool:
        """Whether membership has not decided yet what the message ends with."""
        return self._session.is_undecided(error)

    def decided(self, error: DistributedError) -> DistributedError:
        """What it ends with."""
        session = self._session
        if session.ending is None or not session.is_symptom(error):
            return error
        self._sessions.told(session)
        return copy.copy(session.ending)

    def wait(
        self, error: DistributedError, deadline: float | None, seconds: float
    ) -> DistributedError | None:
        """Wait for the decision until a moment; the error of who waited too long, or None."""
        decided = self._session.decided_error(error, deadline, seconds)
        return None if self._session.ending is not None else decided


def explain(
    work: Work[Any], session: ViewSession, sessions: ViewSessions, timeout: float | None
) -> None:
    """Let a collective under way that fails say what membership decided, as blocking calls do."""
    fail = work.fail
    deadline = None if timeout is None else time.monotonic() + timeout

    def explained(error: BaseException) -> None:
        decided = session.decided_error(error, deadline, timeout or 0.0)
        if decided is not None and session.ending is not None:
            sessions.told(session)
        fail(decided or error)

    work.fail = explained  # type: ignore[method-assign]
    work.make_late = _late_in(session)


def _late_in(session: ViewSession) -> Callable[[float], Timeout | None]:
    """The error of a wait for something that a stopped view holds up; None if it does not."""
    return lambda seconds: (
        session.late(seconds) if session.stopped.is_set() and session.ending is None else None
    )


class ViewOperation(Operation):
    """An operation of a view that was started by itself; it ends with what the view ends with."""

    __slots__ = ("_arbiter", "_operation")

    def __init__(self, operation: Operation, session: ViewSession, sessions: ViewSessions) -> None:
        super().__init__(operation.pump)
        self._operation = operation
        self._arbiter = ViewMessageErrors(session, sessions)

    @property
    def done(self) -> bool:
        """Whether it has ended, and membership has decided with what."""
        if not self.ended and self._operation.done:
            error = self._operation.error
            if error is None or not self._arbiter.is_open(error):
                self.finish_first(error and self._arbiter.decided(error), None)
        return self.ended

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return self._operation.describe()

    def timeout_error(self, seconds: float) -> Timeout:
        """The error of a wait that took too long."""
        return self._operation.timeout_error(seconds)

    def drive(self, limit: float | None) -> bool:
        """Wait for the operation, and for the decision of membership on its error."""
        deadline = deadline_after(limit)
        if not self._operation.drive(limit):
            return False
        while not self.done:
            error = self._operation.error
            assert error is not None
            late = self._arbiter.wait(error, deadline, limit or 0.0)
            if late is not None:
                raise late from error
        return True

    def _give_up(self) -> None:
        self._operation.cancel()
        _ = self.done


class InOneView(DistributedBackend):
    """Everything a group can do, each call in the view of its beginning."""

    _sessions: ViewSessions

    def _scope(self, name: str, timeout: Seconds | None) -> CallScope:
        return ViewCall(self._sessions, timeout, self, name)

    @property
    def rank(self) -> int:
        """This process's place in the view, from 0; the leader is 0.

        After a call it is the place in that call, until the next one: should it change in between,
        that raises, so that no caller works with an old one.  Before the first call, and after one
        that raised so, it is the place in the present view; while that changes this waits.
        :attr:`view` is always the present one.
        """
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many members the view has: as for :attr:`rank`, that of the last call."""
        return self._session.world_size

    @property
    def _session(self) -> ViewSession:
        return self._sessions.pinned or self._sessions.read(self.timeout)

    @property
    def _place(self) -> CallSite:
        return self._session.place

    @property
    def _messages(self) -> GroupLog:
        session = self._sessions.pinned
        return log_of(self if session is None or session.backend is None else session.backend)

    @property
    def group(self) -> Group:
        """Who runs the collectives of the present view; waits until its members are connected."""
        pinned = self._sessions.pinned
        if pinned is not None and pinned.group is not None:
            return pinned.group
        with self._sessions.visit(self.timeout) as session:
            assert session.group is not None
            return session.group

    def _follow(self, work: Work[Result], timeout: Seconds | None) -> Work[Result]:
        """The view is in use until the work is done."""
        del timeout
        session, sessions = self._session, self._sessions
        work.make_late = _late_in(session)
        session.begin_use()

        def end() -> None:
            session.end_use()
            if session.ending is not None and work.exception() is not None:
                sessions.told(session)  # a thread that waits for it learns that the view is over

        work.add_done_callback(end)
        return work


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


Make: TypeAlias = "Callable[[ViewSession, float, Look], MeshBackend]"
"""Connects the members of a session by a deadline; ``look`` raises when that is not wanted."""


class ViewConnector:
    """Builds one session after the other, and clears away those that are over."""

    def __init__(self, sessions: ViewSessions, make: Make, config: CollectiveConfig | None) -> None:
        self._sessions = sessions
        self._make = make
        self._config = config
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def build(self, session: ViewSession, before: ViewSession | None) -> None:
        """Connect the members of a session; afterwards clear away the one before it."""

        def work() -> None:
            try:
                self._build(session)
            finally:
                if before is not None:
                    if before.is_orderly:
                        before.wait_until_unused(GRACE)
                    clear_away(before)

        self.start(work, f"potluck-view-{session.view.epoch}")

    def abort(self, session: ViewSession) -> None:
        """Interrupt what runs in a session that has stopped, on a thread of its own.

        At once, unless no member was lost: then what is under way gets a moment to finish.  A rank
        with nothing under way ends its connections at once, so that no rank waits for it in vain.
        """

        def work() -> None:
            if session.is_orderly:
                session.wait_until_unused(GRACE)
            abort_session(session)

        if session.backend is not None:
            self.start(work, f"potluck-abort-{session.view.epoch}")

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
        with self._lock:  # closing waits for those that have started
            self._threads.add(thread)
            thread.start()

    def _build(self, session: ViewSession) -> None:
        while not session.stopped.is_set():
            try:
                within = BUILD_WITHIN + BUILD_EACH * session.world_size
                backend = self._make(session, time.monotonic() + within, session.look)
            except (DistributedError, OSError) as error:
                words = error if isinstance(error, DistributedError) else _in_words(error)
                if not session.stopped.is_set():
                    is_known, session.trouble = str(session.trouble) == str(words), words
                    level = logging.DEBUG if is_known else logging.INFO
                    logger.log(level, "view %d is not connected yet: %s", session.view.epoch, words)
                session.stopped.wait(PAUSE)
                continue
            group = ViewGroup(backend, session, self._config)
            if not self._sessions.built(session, backend, group):
                session.backend, session.group = backend, group
                abort_session(session)
                clear_away(session)
            return

    def close(self, within: float) -> None:
        """Wait for those at work; their sessions must be over."""
        deadline = time.monotonic() + within
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def abort_session(session: ViewSession) -> None:
    """Interrupt what runs in a session that has stopped."""
    if session.backend is not None:
        session.backend.abort(session.ending or session.stop_error)


def clear_away(session: ViewSession) -> None:
    """Close what a session that is over had opened."""
    with contextlib.suppress(DistributedError, OSError):
        if session.group is not None:
            session.group.close()
    with contextlib.suppress(DistributedError, OSError):
        if session.backend is not None:
            session.backend.close()


def _in_words(error: OSError) -> DistributedError:
    return from_os_error("The members of the view could not be connected", error)
