"""Who works behind the demo: starts the nodes, passes on orders, listens, and ends everybody.

Every wait has a deadline, and a process that ends unasked ends the demo with an error that says so.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from potluck.apps.cli.demo_messages import Failed, News, Order, Setup
from potluck.apps.cli.demo_process import Event, NodeProcess, signals_held
from potluck.apps.cli.demo_scene import Actor, Scene, words
from potluck.closing import Closing
from potluck.errors import Timeout

__all__ = ["Audience", "Crew", "Settings"]

NAMES = "basil thyme sage mint dill chive fennel cumin anise clove ginger sesame".split()

LASTING, SLOWEST, FASTEST = 8.0, 10.0, 30.0
"""Seconds that the story should last if nothing happens, so that people can watch, and the steps
per second that this may mean; the undisturbed run has no such limit."""

REFRESH = 0.05
"""Seconds between two looks of the audience."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for."""

    nodes: int = 3
    steps: int = 240
    seed: int = 0
    kill: int | None = None
    """The rank in the first view; None kills nobody."""
    seconds: float = 110.0
    """The demo gives up after that time."""
    multicast: bool = True


class Audience(Protocol):
    """Who watches."""

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Something happened, so many seconds after the beginning."""

    def show(self, scene: Scene) -> None:
        """This is how things stand; called often."""


class Crew(Closing):
    """The processes of one demo; a context manager that leaves none of them and no file behind."""

    def __init__(self, settings: Settings, audience: Audience) -> None:
        self.settings = settings
        self.scene = Scene([], settings.steps)
        self.addresses: list[str] = []
        """Where the nodes are, once they had to be told."""
        self._audience = audience
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._secret = secrets.token_hex(32)
        self._processes: list[NodeProcess] = []
        self._may_end: set[NodeProcess] = set()
        # Keys and notes of its own, for a moment: nothing of this machine's user is touched.
        self._home = tempfile.TemporaryDirectory(prefix="potluck-demo-", ignore_cleanup_errors=True)
        self._deadline = self.scene.began + settings.seconds

    def __enter__(self) -> Self:
        """Start the nodes."""
        try:
            for number in range(self.settings.nodes):
                name = NAMES[number] if number < len(NAMES) else f"node-{number}"
                actor = Actor(name, self._start(name), started_at=time.monotonic())
                self.scene.actors.append(actor)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every process."""
        with signals_held():  # of two Ctrl-C in a row the second does not stop this
            for process in self._processes:
                process.kill()  # all of them first: no other waits for one that is slow to go
            for process in self._processes:
                process.close()
            self._home.cleanup()

    # -- processes -----------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Of all processes that were started."""
        return [process.pid for process in self._processes]

    def _start(self, name: str) -> NodeProcess:
        settings = self.settings
        with signals_held():
            process = NodeProcess(name, Path(self._home.name, name), self._events)
            self._processes.append(process)
        process.order(
            Setup(
                name=name,
                secret=self._secret,
                nodes=settings.nodes,
                seed=settings.seed,
                steps=settings.steps,
                pace=1 / min(FASTEST, max(SLOWEST, settings.steps / LASTING)),
                multicast=settings.multicast,
                peers=self.addresses,
            )
        )
        return process

    def kill(self, actor: Actor) -> float:
        """End a node without a warning; when that was."""
        self._may_end.add(actor.process)
        actor.state = "killed"
        now = time.monotonic()
        actor.process.kill()
        return now

    def restart(self, actor: Actor) -> Actor:
        """Start a node again, with the keys it had."""
        return self.scene.recast(actor, self._start(actor.name))

    def order(self, order: Order) -> None:
        """Tell all nodes something."""
        for actor in self.scene.actors:
            actor.process.order(order)

    def let_go(self) -> None:
        """From now on any node may end."""
        self._may_end.update(self._processes)

    # -- what happens --------------------------------------------------------------------------

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Tell the audience, and keep it for the report."""
        seconds = self.scene.seconds
        self.scene.events.append((round(seconds, 3), sentence))
        self._audience.say(seconds, sentence, grave=grave)

    def wait_for(
        self, group: Sequence[Actor], ready: Callable[[Actor], object], limit: float, what: str
    ) -> None:
        """Listen until something holds for everybody of a group; raises ``Timeout``."""
        began = time.monotonic()
        deadline = min(began + limit, self._deadline)
        while missing := [actor.name for actor in group if not ready(actor)]:
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{words(missing)} did not {what} within {deadline - began:.0f} s",
                    seconds=deadline - began,
                    hint="This machine may be too busy; try fewer nodes, or more --seconds.",
                )
            self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._receive(*self._events.get(timeout=REFRESH))
            while True:
                self._receive(*self._events.get_nowait())
        self._audience.show(self.scene)

    def _receive(self, process: NodeProcess, news: News | None) -> None:
        if news is None:
            process.ended = True
            if process not in self._may_end:
                raise process.explain_end()
        elif isinstance(news, Failed):
            raise process.explain_end(news)
        else:
            for actor in self.scene.actors:
                if actor.process is process:
                    self.scene.receive(actor, news)
