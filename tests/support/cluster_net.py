"""A tiny network for cluster cores: a queue of events, fixed delays, cuts and deaths.

It is as small as a test needs; the simulated cluster of ``potluck.testing`` is the thorough one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import combinations, count
from typing import Any

from potluck._types import NodeId, ProcessId, View
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    Abort,
    ClusterConfig,
    ClusterState,
    ConnectTo,
    Disconnect,
    Effect,
    Installed,
    Note,
    ProbePort,
    SendMessage,
)
from potluck.membership.messages import ClusterMessage, ProcessInfo, decode, encode

DELAY = 0.001  # seconds that a message takes


def card(letter: str, incarnation: int = 1, **facts: Any) -> ProcessInfo:
    """The card of a process of a machine called ``letter``."""
    facts = {"machine": letter, "name": letter, **facts}
    return ProcessInfo(node=NodeId(letter * 32), incarnation=incarnation, **facts)


class ClusterNet:
    """Cores that talk to each other."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cores: dict[ProcessId, ClusterCore] = {}
        self.connections: set[tuple[ProcessId, ProcessId]] = set()
        self.cut: set[tuple[ProcessId, ProcessId]] = set()  # what the first sends never arrives
        self.dead: set[ProcessId] = set()
        self.stopped: set[ProcessId] = set()
        self.effects: list[tuple[float, ProcessId, Effect]] = []
        self.dropped: Callable[[ProcessId, ProcessId, ClusterMessage], bool] = lambda *_: False
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._alarms: dict[ProcessId, float | None] = {}

    # --- building ---

    def add(self, letter: str, incarnation: int = 1, **facts: Any) -> ProcessId:
        """Start a process."""
        config = facts.pop("config", ClusterConfig())
        me = card(letter, incarnation, **{"quorum": config.quorum, **facts})
        self.cores[me.process] = ClusterCore(me, config, self.now)
        self._arm(me.process)
        return me.process

    def form(self, letters: str, **facts: Any) -> list[ProcessId]:
        """Start processes that are all connected, and let them found a cluster."""
        processes = [self.add(letter, **facts) for letter in letters]
        self.mesh()
        self.run(0.5)
        return processes

    def mesh(self) -> None:
        """Connect everybody with everybody who can be reached."""
        for one, other in combinations(self.alive(), 2):
            self.link(one, other)

    def link(self, one: ProcessId, other: ProcessId) -> None:
        """Open a connection, if it is not there."""
        apart = {(one, other), (other, one)} & self.cut
        if not (apart or {one, other} & self.dead or (one, other) in self.connections):
            self.connections |= {(one, other), (other, one)}
            self.do(one, self.cores[one].connected(self.cores[other].me, self.now))
            self.do(other, self.cores[other].connected(self.cores[one].me, self.now))

    # --- faults ---

    def cut_off(self, ones: Iterable[ProcessId], others: Iterable[ProcessId]) -> None:
        """Nothing arrives any more between two sides."""
        others = list(others)
        self.cut |= {pair for one in ones for o in others for pair in ((one, o), (o, one))}

    def heal(self) -> None:
        """Everything arrives again."""
        self.cut.clear()
        self.mesh()

    def kill(self, process: ProcessId) -> None:
        """A process ends; those it is connected to notice at once."""
        self.dead.add(process)
        for one, other in sorted(self.connections):
            if other == process:
                self.connections -= {(one, other), (other, one)}
                self._at(DELAY, self._closed, one, process)

    def sever(self, one: ProcessId, other: ProcessId) -> None:
        """A connection is reset though both live."""
        self.connections -= {(one, other), (other, one)}
        self._closed(one, other)
        self._closed(other, one)

    def wake(self, process: ProcessId) -> None:
        """A stopped process goes on."""
        self.stopped.discard(process)
        self._alarms[process] = None
        self._arm(process)

    # --- running ---

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(self._queue)
            action(*arguments)
        self.now = end

    def do(self, process: ProcessId, effects: list[Effect]) -> None:
        """Carry out what a core wants done."""
        for effect in effects:
            self.effects.append((self.now, process, effect))
            if isinstance(effect, SendMessage):
                wanted = (process, effect.to) in self.connections
                if wanted and not self.dropped(process, effect.to, effect.message):
                    message = decode(encode(effect.message))
                    self._at(DELAY, self._deliver, process, effect.to, message)
            elif isinstance(effect, ProbePort):
                self._at(2 * DELAY, self._probe, process, effect.peer)
            elif isinstance(effect, Disconnect):
                self.connections -= {(process, effect.peer), (effect.peer, process)}
            elif isinstance(effect, ConnectTo):
                self._at(DELAY, self.link, process, effect.card.process)
        self._arm(process)

    def _at(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        entry = self.now + delay, next(self._numbers), action, arguments
        heapq.heappush(self._queue, entry)

    def _arm(self, process: ProcessId) -> None:
        due = self.cores[process].next_deadline
        if due is not None and due != self._alarms.get(process):
            self._alarms[process] = due
            self._at(max(0.0, due - self.now), self._tick, process, due)

    def _tick(self, process: ProcessId, due: float) -> None:
        if self._alarms.get(process) == due and process not in self.dead | self.stopped:
            self._alarms[process] = None
            self.do(process, self.cores[process].tick(max(due, self.now)))

    def _deliver(self, sender: ProcessId, to: ProcessId, message: ClusterMessage) -> None:
        is_lost = (sender, to) in self.cut or (sender, to) not in self.connections
        if not is_lost and to not in self.dead | self.stopped:
            self.do(to, self.cores[to].receive(sender, message, self.now))

    def _closed(self, one: ProcessId, other: ProcessId) -> None:
        if one not in self.dead:
            self.do(one, self.cores[one].disconnected(other, "reset by peer", self.now))

    def _probe(self, prober: ProcessId, target: ProcessId) -> None:
        core = self.cores[prober]
        if prober in self.dead | self.stopped:
            return
        if (prober, target) in self.cut:
            self.do(prober, core.unreachable(target, "no answer", self.now))
        elif target in self.dead:
            self.do(prober, core.ended(target, "its port refuses connections", self.now))
        else:
            self.link(prober, target)

    # --- looking ---

    def alive(self) -> list[ProcessId]:
        """Who has not been killed."""
        return [process for process in self.cores if process not in self.dead]

    def view_of(self, process: ProcessId) -> View:
        """The view of a process, which must be in one."""
        view = self.cores[process].view
        assert view is not None
        return view

    def agreed(self) -> str:
        """The one view of all that are alive, as letters in rank order."""
        views = {self.cores[process].view for process in self.alive()}
        assert len(views) == 1, views
        (view,) = views
        assert view is not None
        return "".join(member.node[0] for member in view.members)

    def agreed_by(self, processes: Iterable[ProcessId]) -> str:
        """The one view that these are at work in, as letters in rank order."""
        cores = [self.cores[process] for process in processes]
        assert all(core.state is ClusterState.ACTIVE for core in cores)
        (view,) = {core.view for core in cores}
        assert view is not None
        return "".join(member.node[0] for member in view.members)

    def views(self) -> dict[tuple[str, int], set[View]]:
        """All views that were ever installed, by lineage and epoch."""
        seen: dict[tuple[str, int], set[View]] = {}
        for _, _, effect in self.effects:
            if isinstance(effect, Installed):
                key = effect.view.lineage, effect.view.epoch
                seen.setdefault(key, set()).add(effect.view)
        return seen

    def told(self, process: ProcessId) -> str:
        """All sentences that a process had for people."""
        events = [
            effect.event
            for _, who, effect in self.effects
            if who == process and isinstance(effect, Note)
        ]
        return "\n".join(map(str, events))

    def aborts(self, process: ProcessId) -> list[Abort]:
        """When and why operations of a process were aborted."""
        return [e for _, who, e in self.effects if who == process and isinstance(e, Abort)]
