"""Stages: one view after the other as operations see them.

The control thread installs, stops and ends stages; callers step in.  A call runs in one stage from
its beginning to its end.  A program that has used a stage gets the error with which that ended, in
the middle of its calls or at the next one, and then those of all stages that followed, one per
call.  While a stage has stopped and its error is not decided yet, calls wait, up to their timeout.
So all ranks learn of every change, and what they do next they do among the same ranks.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from potluck.errors import DistributedError, Timeout
from potluck.runtime import cluster_words as words
from potluck.runtime.cluster_footing import Footing
from potluck.runtime.limits import read_timeout

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.core.cluster_messages import Cause
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.group import Group

__all__ = ["Stages", "Visit"]

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
