"""Stages: one view after the other as operations see them.

The control thread installs and ends stages; callers step in.  A call runs in one stage from its
beginning to its end.  A program that has used a stage which is over is told so by the error with
which that ended: in the middle of its calls, or at the next one.  So all ranks learn of every
change, and what they do next they do among the same ranks.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from potluck.errors import DistributedError, Timeout, ViewChanged
from potluck.runtime.cluster_footing import Footing
from potluck.runtime.limits import read_timeout

if TYPE_CHECKING:
    from potluck.backend.base import Backend
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

    # -- the control thread --------------------------------------------------------------------

    def install(self, stage: Stage, ending: DistributedError, *, orderly: bool) -> Stage | None:
        """Go on with another stage; the one before ends with this error and is returned."""
        with self._changed:
            before, self._current = self._current, stage
            if before is not None:
                before.end(ending, orderly=orderly)
            self._settle()
        return before

    def end(
        self, error: DistributedError, *, orderly: bool = False, stage: Stage | None = None
    ) -> None:
        """The present stage, or the one given, ends with this error; the next one follows."""
        with self._changed:
            ending = stage or self._current
            if ending is not None:
                ending.end(error, orderly=orderly)
            self._settle()

    def built(self, stage: Stage, backend: Backend, group: Group) -> bool:
        """The connections of a stage are there; False if that was too late."""
        with self._changed:
            if stage.ending is not None or self._failed is not None:
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
        is_ready = stage is not None and stage.ending is None and stage.backend is not None
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
        if stage is not None and stage.backend is not None and stage.ending is None:
            follower(stage)

    def unfollow(self, follower: Callable[[Stage], None]) -> None:
        """No longer."""
        with self._changed:
            if follower in self._followers:
                self._followers.remove(follower)

    def accept(self) -> None:
        """The program knows of every change so far: none of them is told by an error."""
        self._footing.leave()

    def told(self, stage: Stage) -> None:
        """The program has learned that a stage is over."""
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
        if stage is None or (stage.ending is not None and self._failed is None):
            stage = self._wait(lambda: self._current, lambda each: each.ending is None, timeout)
        if not footing.used:
            footing.take(stage, called=False)
        return stage

    def wait_for(
        self, condition: Callable[[Stage], bool], timeout: float | None, goal: str = ""
    ) -> Stage:
        """The stage once calls can run in it and it fulfils something, which ``goal`` names."""
        return self._wait(lambda: self._ready, condition, timeout, goal)

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
            while True:
                if self._failed is not None:
                    raise copy.copy(self._failed)
                stage = find()
                if stage is not None and condition(stage):
                    return stage
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._late(timeout or 0.0, goal)
                self._changed.wait(min(remaining, LONGEST))

    def step_in(self, timeout: float | None) -> Stage:
        """Begin a call, or raise what the program has to be told first."""
        footing = self._footing
        stage, before = self._ready, footing.stage
        if stage is None or stage is not before or not footing.called:
            if footing.used and before is not None and before.ending is not None:
                footing.told(before)
                raise copy.copy(before.ending)
            if stage is None:
                stage = self.wait_for(lambda _: True, timeout)
            if footing.used and before is not None and before is not stage:
                footing.told(before)  # it was replaced while we waited
                raise copy.copy(before.ending or _CHANGED)
            footing.take(stage, called=True)
        return stage

    def _late(self, seconds: float, goal: str) -> Timeout:
        stage = self._current
        if self._paused is not None:
            what, cause = "the cluster is paused", self._paused
        elif stage is None or stage.ending is not None:
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


_CHANGED = ViewChanged("The cluster has changed")


class Visit:
    """One call of one thread; calls within it run in the same stage."""

    __slots__ = ("__weakref__", "_is_inner", "_pin", "_stages", "_timeout", "stage")

    def __init__(self, stages: Stages, pin: _Pin, timeout: float | None) -> None:
        self._stages = stages
        self._pin = pin
        self._timeout = timeout
        self._is_inner = False
        self.stage: Stage | None = None

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
        verdict = None if error is None else stage.verdict_on(error)
        if verdict is None or error is None:
            return
        self._stages.told(stage)
        if type(verdict) is not type(error) or verdict.args != error.args:
            raise verdict from error
