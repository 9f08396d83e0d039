"""Presence: a process whose ranks were fixed at the start answers observers as members do.

``potluck run`` gives scripts their ranks; those that form a group from them (``TcpBackend``, the
process group of PyTorch) agree on no views.  Here such a process says who it is, which rank it has,
what it counts and which ranks it has lost, so that ``potluck status`` and the dashboard show it.

Light to import: what a presence is made of is loaded by its own thread, under ``potluck run`` only.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck._platform import call_in_children
from potluck._process import ForkSafeLock
from potluck._version import THIS_BUILD
from potluck.backend import tcp
from potluck.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck._types import LinkMatrix, ProcessId
    from potluck.backend.base import Backend
    from potluck.cluster.connections import ControlConnections
    from potluck.cluster.io import ControlConnection
    from potluck.cluster.reports import EventLine, HealthLine, Journal, MemberLine, StatusReport
    from potluck.collective.group import Group
    from potluck.membership.messages import ProcessInfo
    from potluck.metrics.registry import DistributedMetrics
    from potluck.trace.recorder import DumpHeader


FIXED = "fixed"
"""What the fact ``world`` says of a process that no other one can join later."""

LOOK_EVERY = 5.0
"""Seconds between two looks at whether the secret has changed, and what is shown with it."""

CLOSE_WITHIN = 2.0
"""Seconds for the presence to say that it ends."""

MAX_EVENTS = 256
"""Events that are remembered; a group is formed once and loses each rank once."""

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class FixedGroup:
    """A group of fixed ranks that this process is in."""

    backend: Backend
    processes: list[tuple[str, int, str]]
    """Node, incarnation and name of every rank; empty where this process is alone."""
    lineage: str
    began: float
    metrics: DistributedMetrics | None = None
    group: Group | None = None
    """What runs its collectives, once they are used."""

    @property
    def links(self) -> LinkMatrix | None:
        """The links as its collectives measured them."""
        return None if self.group is None else self.group.links


def attend(backend: Backend) -> None:
    """Let observers see this group for as long as it is open; only under ``potluck run``."""
    if not os.environ.get("POTLUCK_RUN"):
        return
    from potluck.cluster.metrics_endpoint import process_metrics
    from potluck.collective.context import GroupPresence, attend_to
    from potluck.trace.recorder import recorder_of

    world = _world_of(backend)
    _fixed_groups.enter(world)
    attend_to(backend, GroupPresence(process_metrics, functools.partial(counted, backend)))
    backend.on_close(lambda: _fixed_groups.leave(world))
    recorder_of(backend).describe = _described


def counted(backend: Backend, group: Group, metrics: DistributedMetrics) -> None:
    """What this group counts is in these metrics."""
    world = _fixed_groups.find(backend)
    if world is not None:
        world.metrics, world.group = metrics, group
        metrics.tell = _fixed_groups.failed
        views = metrics.views
        views.state, views.epoch = "active", 1
        views.members, views.rank = backend.world_size, backend.rank


def _world_of(backend: Backend) -> FixedGroup:
    import time

    processes, lineage = [], ""
    if isinstance(backend, tcp.TcpBackend):
        lineage = backend.table.session.hex()
        for peer in backend.table.peers:
            node, _, number = peer.process.partition("/")
            incarnation = int(number) if number.isascii() and number.isdecimal() else 0
            processes.append((node or peer.node, incarnation % (1 << 62), peer.name))
    return FixedGroup(backend, processes, lineage, time.time())


def _described(header: DumpHeader) -> DumpHeader:
    """The header of a dump, with what this process is called by observers."""
    import msgspec

    presence = _fixed_groups.presence
    card = None if presence is None else presence.card
    if presence is None or card is None:
        return header
    return msgspec.structs.replace(
        header,
        process=f"{card.node}/{card.incarnation}",
        name=card.name,
        job=presence.job[:255],
    )


class FixedGroups:
    """The groups of this process; while there are any, it is present."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._worlds: list[FixedGroup] = []
        self.presence: Presence | None = None
        call_in_children(self._become_forked)

    def enter(self, world: FixedGroup) -> None:
        """A group has formed."""
        with self._lock:
            self._worlds.append(world)
            if self.presence is None:
                self.presence = Presence()
            self.presence.world = world

    def leave(self, world: FixedGroup) -> None:
        """A group closes; the one before it is shown again, if it is still open."""
        with self._lock:
            if world not in self._worlds or self.presence is None:
                return
            self._worlds.remove(world)
            if self._worlds:
                self.presence.world = self._worlds[-1]
            else:
                self.presence.end()
                self.presence = None

    def find(self, backend: Backend) -> FixedGroup | None:
        """The group of a backend, if it is shown."""
        with self._lock:
            return next((each for each in self._worlds if each.backend is backend), None)

    def failed(self, sentence: str) -> None:
        """A collective has failed."""
        presence = self.presence
        if presence is not None:
            presence.failed(sentence)

    def close(self) -> None:
        """The process ends: say so."""
        presence, self.presence = self.presence, None
        if presence is not None:
            presence.end()

    def _become_forked(self) -> None:
        self._worlds, self.presence = [], None


class Presence:
    """Can be found and answers those who ask; everything on a thread of its own."""

    def __init__(self) -> None:
        self.world: FixedGroup | None = None
        self.job = ""
        self.card: ProcessInfo | None = None
        self._events: list[EventLine] = []
        self._noted: set[tuple[str, int]] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        self._links: ControlConnections | None = None
        self._thread = threading.Thread(target=self._run, name="potluck-presence", daemon=True)
        self._thread.start()
        _ending.append(self._thread)

    def end(self) -> None:
        """Be present no more; returns at once."""
        self._inbox.put(self._stop)

    def failed(self, sentence: str) -> None:
        """A collective has failed: those who look on see what and why, each reason once."""
        self._inbox.put(lambda: self._note(sentence, -1, sentence, "warning"))

    def _stop(self) -> None:
        self._ended = True

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                look = self._open(stack)
                while not self._ended:
                    with contextlib.suppress(queue.Empty):
                        self._inbox.get(timeout=LOOK_EVERY)()
                        continue
                    look()
        except Exception as error:  # noqa: BLE001 - the training continues unseen
            logger.warning("`potluck status` cannot see this process: %s", error)

    def _open(self, stack: contextlib.ExitStack) -> Callable[[], None]:
        """Listen and be found; what this returns follows a change of the secret."""
        from potluck.cluster.config import AutoDiscoveryConfig
        from potluck.cluster.connections import (
            ControlConnections,
            ControlHandshake,
            DialPool,
            make_card,
            open_port,
        )
        from potluck.discovery.records import Advert
        from potluck.discovery.service import Discovery
        from potluck.membership.messages import ProcessRole

        config = AutoDiscoveryConfig()
        self.job, self._facts = config.job_name, config.known_facts
        port = open_port(config, is_shared=True)
        stack.callback(port.close)
        card = self.card = make_card(port, config, ProcessRole.OBSERVER)
        pool = DialPool()
        links = self._links = ControlConnections(card, self, pool, self._inbox.put)
        links.handshake = ControlHandshake(port, self.job, card, links.opened, links.objection)

        def advert() -> Advert:
            namespace = port.members.security.namespace
            return Advert.of(namespace, card.process, job=self.job, port=port.port)

        shown = advert()
        discovery = Discovery(shown, config.discovery())
        stack.callback(discovery.close)
        stack.callback(links.io.close, 0.5)
        stack.callback(pool.close, 0.0)

        def look() -> None:
            nonlocal shown
            if advert() != shown:
                shown = advert()
                discovery.update(shown)

        return look

    # -- what the links tell -------------------------------------------------------------------

    def met(self, card: ProcessInfo) -> None:
        """An observer is here; it asks."""

    def lost(self, process: ProcessId, cause: str) -> None:
        """It is gone again."""

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """Its connection is closed, and that is all."""

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Never asked for."""

    def said(self, process: ProcessId, payload: bytes) -> None:
        """Not for those who agree on nothing."""

    def asked(self, connection: ControlConnection, payload: bytes) -> None:
        """An observer wants to know how we are."""
        from potluck.cluster.connections import REPORTS
        from potluck.cluster.reports import StatusRequest, read_said, write

        said, world = read_said(payload), self.world
        if not isinstance(said, StatusRequest) or world is None or self._links is None:
            return
        self._note_losses(world)
        self._links.io.send(connection, write(self.report(world)), REPORTS)
        if said.news_after >= 0:
            self._links.io.send(connection, write(self.journal(world, said.news_after)), REPORTS)

    def report(self, world: FixedGroup) -> StatusReport:
        """How this process is."""
        from potluck.cluster.reports import MAX_LINES, StatusReport, bounded_facts

        card, backend = self.card, world.backend
        assert card is not None
        return StatusReport(
            node=card.node,
            incarnation=card.incarnation,
            name=card.name,
            host=card.hosts[0],
            port=card.port,
            pid=os.getpid(),
            version=THIS_BUILD.potluck,
            protocol=THIS_BUILD.protocol,
            oldest=THIS_BUILD.oldest,
            job=self.job,
            state="active",
            reason=_reason(world),
            lineage=world.lineage or f"{card.incarnation:032x}",
            epoch=1,
            rank=backend.rank,
            members=[self._member(world, rank) for rank in range(backend.world_size)][:MAX_LINES],
            peers=[
                self._peer(world, rank)
                for rank in range(min(backend.world_size, MAX_LINES))
                if rank != backend.rank
            ],
            facts=bounded_facts({"world": FIXED, **self._facts}),
        )

    def _member(self, world: FixedGroup, rank: int) -> MemberLine:
        from potluck.cluster.reports import MemberLine

        card = self.card
        assert card is not None
        if rank == world.backend.rank:
            return MemberLine(card.node, card.incarnation, card.name)
        return MemberLine(*world.processes[rank])

    def _peer(self, world: FixedGroup, rank: int) -> HealthLine:
        from potluck.cluster.reports import HealthLine, sentence

        node, incarnation, name = world.processes[rank]
        loss = world.backend.loss_of(rank)
        return HealthLine(
            node=node,
            incarnation=incarnation,
            name=name,
            status="healthy" if loss is None else "dead",
            reason="" if loss is None else sentence(loss.cause or loss.message),
            round_trip=_round_trip(world, rank),
            address=world.backend.peer_name(rank).rpartition(" at ")[2][:255],
        )

    def _note_losses(self, world: FixedGroup) -> None:
        """What has happened since the last call, each once."""
        self._note(world.lineage, -1, _reason(world), "info", world.began)
        for rank in range(world.backend.world_size):
            loss = None if rank == world.backend.rank else world.backend.loss_of(rank)
            if loss is not None:
                self._note(world.lineage, rank, str(loss), "warning")

    def _note(
        self, lineage: str, rank: int, text: str, level: str, moment: float | None = None
    ) -> None:
        import time

        from potluck.cluster.reports import EventLine, sentence

        if (lineage, rank) in self._noted or len(self._noted) >= MAX_EVENTS:
            return
        self._noted.add((lineage, rank))
        number = len(self._events) + 1
        self._events.append(EventLine(number, moment or time.time(), sentence(text), level))

    def journal(self, world: FixedGroup, after: int) -> Journal:
        """What has happened after an event, and what was counted and measured."""
        from potluck.cluster import reports as journals
        from potluck.cluster.telemetry import sensible
        from potluck.metrics.catalogue import figures

        card, backend, metrics = self.card, world.backend, world.metrics
        assert card is not None
        links = world.links
        rank, lines = backend.rank, range(min(backend.world_size, journals.MAX_RANKS))
        members = [self._member(world, each) for each in lines]
        epoch = journals.EpochLine(
            1,
            world.began,
            [f"{each.node}/{each.incarnation}" for each in members],
            _reason(world),
            world.lineage or f"{card.incarnation:032x}",
        )
        return journals.bounded(
            journals.Journal(
                node=card.node,
                incarnation=card.incarnation,
                events=[each for each in self._events if each.number > after][
                    : journals.MAX_EVENTS
                ],
                epochs=[epoch],
                up=links.up[rank] if links else 0,
                down=links.down[rank] if links else 0,
                latency=list(links.latency[rank][: journals.MAX_RANKS]) if links else [],
                figures=sensible(figures(metrics.snapshot())) if metrics is not None else {},
            )
        )


def _round_trip(world: FixedGroup, rank: int) -> float | None:
    """Seconds of a short message to a rank and back, if that was measured."""
    links = world.links
    latency = 0 if links is None else links.latency[world.backend.rank][rank]
    return 2e-9 * latency if latency else None


def _reason(world: FixedGroup) -> str:
    count = world.backend.world_size
    what = "1 rank" if count == 1 else f"{count} ranks"
    return f"{what}, fixed when the script formed its group"


_ending: list[threading.Thread] = []
_fixed_groups = FixedGroups()
tcp.formed.append(attend)


@atexit.register
def _close() -> None:
    """A process that ends without closing still says that it does."""
    with contextlib.suppress(KeyboardInterrupt):  # a person cannot wait
        _fixed_groups.close()
        for thread in _ending[-4:]:
            thread.join(CLOSE_WITHIN)
