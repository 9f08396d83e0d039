"""Actions on threads of their own that report back: a failure there is a failure of the test."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Result = TypeVar("Result")

PATIENCE = 30.0
"""Seconds after which something that should have happened counts as a hang."""


class Background(Generic[Result]):
    """An action under way.  Its thread is a daemon: one that hangs fails its test and no other."""

    def __init__(self, action: Callable[[], Result]) -> None:
        self._action = action
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._action())
        except BaseException as error:  # noqa: BLE001 - raised again in result()
            self._error = error

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def result(self, within: float = PATIENCE) -> Result:
        """What it returned; raises what it raised, or fails if it does not end."""
        self._thread.join(within)
        assert self.ended, f"still running after {within:g} s"
        if self._error is not None:
            raise self._error
        return self._results[0]


def together(*actions: Callable[[], Result], within: float = PATIENCE) -> list[Result]:
    """Run actions at once and return their results; the first failure is raised."""
    running = [Background(action) for action in actions]
    deadline = time.monotonic() + within
    return [one.result(max(0.0, deadline - time.monotonic())) for one in running]


def eventually(condition: Callable[[], bool], within: float = PATIENCE) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {within:g} s"
        time.sleep(0.001)


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt once in this thread, the main one, when something has come true."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with signalled_when(condition, interrupt):
        yield


@contextlib.contextmanager
def signalled_when(condition: Callable[[], bool], action: Callable[[], None]) -> Iterator[None]:
    """Interrupt this thread, the main one, by an action once something has come true.

    The signal is sent until it is noticed: one that comes in the instant before a thread falls
    asleep does not wake it.
    """
    main = threading.get_ident()
    armed = threading.Event()
    armed.set()

    def strike(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            action()

    def is_struck() -> bool:
        if armed.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
        return not armed.is_set()

    def watch() -> None:
        eventually(condition)
        eventually(is_struck)

    before = signal.signal(signal.SIGUSR1, strike)
    watching = Background(watch)
    try:
        yield
    finally:
        watching.result()
        signal.signal(signal.SIGUSR1, before)
