"""What a node of a cluster counts: views, elections, health, who is seen, who is waited for.

The control thread tells what happens; how things are is looked at now and then, and on
request.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import msgspec

from potluck import _time
from potluck._version import THIS_BUILD
from potluck.cluster.reports import (
    MAX_EPOCHS,
    MAX_EVENTS,
    MAX_LINES,
    MAX_NUMBERS,
    MAX_RANKS,
    EpochLine,
    EventLine,
    HealthLine,
    Journal,
    LinkLine,
    MemberLine,
    MissingLine,
    StatusReport,
    bounded,
    bounded_facts,
    sentence,
)
from potluck.collective.context import watch_waiting
from potluck.errors import BackendUnavailable
from potluck.logs import get_logger
from potluck.membership.events import ClusterState, ElectionEvent, ElectionKind, MembershipEvent
from potluck.membership.health import HealthEvent
from potluck.membership.messages import CauseCode
from potluck.metrics.catalogue import figures
from potluck.metrics.instruments import count
from potluck.metrics.registry import DistributedMetrics, PeerSnapshot
from potluck.trace.recorder import DumpHeader, Label, Neighbour, Track, make_recorder

if TYPE_CHECKING:
    from potluck._types import LinkMatrix, ProcessId
    from potluck.backend.port import NodePort
    from potluck.cluster.control import ControlThread
    from potluck.cluster.events import EventLog, ViewChange
    from potluck.cluster.topology import SharedTopology
    from potluck.cluster.views import ViewSession, ViewSessions
    from potluck.membership.health import HealthSummary, PeerHealth
    from potluck.membership.messages import ProcessInfo
    from potluck.trace.recorder import GroupLog


logger = get_logger(__name__)

Arguments = ParamSpec("Arguments")


def _harmless(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A fault of ours in counting must not end the control thread, and with it the node."""

    @functools.wraps(method)
    def attempt(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        try:
            method(*arguments, **options)
        except Exception:
            logger.exception("A metric could not be updated")

    return attempt


class NodeMetrics:
    """Feeds the metrics of one node."""

    def __init__(self, metrics: DistributedMetrics, control: ControlThread, port: NodePort) -> None:
        self.metrics = metrics
        self._control = control
        self._port = port
        self._slept: dict[int, float] | None = None

    # -- the control thread ----------------------------------------------------------------------

    @_harmless
    def installed(
        self, session: ViewSession, change: ViewChange, cards: Sequence[ProcessInfo]
    ) -> None:
        """Another view holds."""
        peers, views = self.metrics.peers, self.metrics.views
        count(views.changes, self._cause(change))
        views.installed += 1
        views.pause(paused=False)  # another view can only be agreed on by a quorum
        views.epoch, views.members, views.rank = (
            session.view.epoch,
            session.world_size,
            session.rank,
        )
        if self._slept is not None:
            peers.release(self._slept)
        peers.keep([card.process for card in cards])
        me = self._control.me.process
        session.labels = {
            rank: peers.label(card.process, card.name or str(card.process))
            for rank, card in enumerate(cards)
            if card.process != me
        }
        self.look()

    def _cause(self, change: ViewChange) -> str:
        """What brought a view, in one word."""
        previous = change.previous
        if previous is None:
            return "founded" if change.view.epoch <= 1 else "joined"
        if change.view.lineage != previous.lineage:
            return "merged"
        if change.left:
            orderly = all(self._control.has_departed(each) for each in change.left)
            return "left" if orderly else "lost"
        return "joined" if change.joined else "other"

    def paused(self, *, paused: bool) -> None:
        """Calls wait, or no longer."""
        self.metrics.views.pause(paused=paused)

    @_harmless
    def noted(self, event: object) -> None:
        """Something happened."""
        if isinstance(event, HealthEvent):
            count(self.metrics.health.changes, event.status.value)
        elif isinstance(event, MembershipEvent):
            count(self.metrics.views.events, event.change.value)
        elif isinstance(event, ElectionEvent):
            count(self.metrics.elections.events, event.kind.value)
            if event.kind in {ElectionKind.ELECTED, ElectionKind.NEW_LEADER}:
                self.metrics.elections.term = event.term
        self.look()

    @_harmless
    def look(self) -> None:
        """See how everything is now."""
        core, metrics = self._control.core, self.metrics
        summary, view = core.health.summary(_time.now()), core.view
        metrics.views.state = core.state.value
        metrics.elections.is_leader = view is not None and view.leader == self._control.me.process
        metrics.health.peers = dict(Counter(each.status.value for each in summary.peers))
        metrics.health.lateness = summary.lateness
        lines = []
        for each in summary.peers:
            rank = view.rank_of(each.peer) if view is not None else None
            if rank is not None:  # who is in no view has no label
                lines.append(
                    PeerSnapshot(
                        peer=metrics.peers.label(each.peer, each.name),
                        rank=rank,
                        status=each.status.value,
                        round_trip=each.round_trip,
                        jitter=each.jitter,
                        loss=each.loss,
                    )
                )
        metrics.peers.see(lines)
        seen, discovery = metrics.discovery, self._control.links.discovery
        seen.refused = self._port.refused
        if discovery is not None:
            seen.visible, seen.strangers = len(discovery.sightings()), discovery.strangers

    def figures(self) -> dict[str, float]:
        """What observers are told, as it is now."""
        self.look()
        found: dict[str, float] = {}
        _harmless(lambda: found.update(figures(self.metrics.snapshot())))()
        return found

    # -- the thread that has connected a view ----------------------------------------------------

    @_harmless
    def built(self, session: ViewSession) -> None:
        """Its operations count for whom they wait."""
        if session.group is not None:
            self._slept = watch_waiting(session.group, self.metrics, session.labels)


# --------------------------------------------------------------------------------------------------
# What a node of a cluster has its flight recorder take down: views, health, elections, steps.

ANSWER_WITHIN = 0.3
"""Seconds for what the control thread knows of the others."""


VIEWS = 32
"""Views of which a dump tells who was in them."""


class ClusterRecorder:
    """The flight recorder of one node, through all its views."""

    def __init__(self, control: ControlThread, job: str) -> None:
        self._control = control
        self._job = job
        self._label = Label(Track.CLUSTER)
        self._view = ""
        self._views: dict[str, tuple[str, ...]] = {}
        self._known: tuple[Neighbour, ...] = ()
        self.recorder = make_recorder()
        self.recorder.is_automatic = True
        self.recorder.describe = self._describe

    def note(self, event: object) -> None:
        """Something happened."""
        what = type(event).__name__
        if isinstance(event, HealthEvent):
            what = event.status.value
        elif isinstance(event, MembershipEvent):
            what = event.change.value
        elif isinstance(event, ElectionEvent):
            what = event.kind.value
        self._append(what, 0, str(event))

    def changed(self, change: ViewChange) -> None:
        """Another view holds."""
        view = change.view
        rank = view.rank_of(self._control.me.process)
        self._view = f"{view.lineage}/{view.epoch}"
        self._label = Label(Track.CLUSTER, "", self._view, -1 if rank is None else rank)
        self.recorder.rank = self._label.rank
        self.recorder.world_size = len(view.members)
        while len(self._views) >= VIEWS:
            del self._views[next(iter(self._views))]
        self._views[self._view] = tuple(map(str_of, view.members))
        self._append(f"view {view.epoch}", view.epoch, str(change))

    def _append(self, what: str, number: int, sentence: str) -> None:
        now = time.monotonic()
        self.recorder.append_event((what, now, now, number, 0, 0, self._label, None, sentence))

    def close(self) -> None:
        """The node ends: what is known of it stays, without anything of the node itself."""
        facts, peers = self._facts(), self._peers()
        self.recorder.describe = lambda header: msgspec.structs.replace(
            header, **facts, peers=peers
        )

    def _describe(self, header: DumpHeader) -> DumpHeader:
        return msgspec.structs.replace(header, **self._facts(), peers=self._peers())

    def _facts(self) -> dict[str, Any]:
        card = self._control.me
        return {
            "process": str_of(card.process),
            "name": card.name,
            "job": self._job[:255],
            "view": self._view,
            "views": self._views.copy(),
        }

    def _peers(self) -> tuple[Neighbour, ...]:
        """What the control thread knows of the others, if it answers."""
        control = self._control
        if control.is_alive:
            with contextlib.suppress(BackendUnavailable):
                ask = control.core.health.summary
                self._known = _neighbours(control.ask(lambda: ask(_time.now()), ANSWER_WITHIN))
        return self._known


def str_of(process: ProcessId) -> str:
    """A process as dumps name it."""
    return f"{process.node}/{process.incarnation}"


def _neighbours(health: HealthSummary) -> tuple[Neighbour, ...]:
    return tuple(
        Neighbour(
            name=each.name[:255],
            process=str_of(each.peer),
            round_trip=each.round_trip,
            status=each.status.value,
            reason=each.reason[:4000],
        )
        for each in health.peers[:256]
    )


class Steps:
    """Takes down the steps of a training: each lasts from the end of the one before."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def note(self, log: GroupLog, number: int, what: str = "step") -> None:
        """A step was made, or something else ended at this number of steps."""
        label, now = log.collectives, time.monotonic()
        label = Label(Track.TRAINING, "", label.view, label.rank)
        log.recorder.append_event((what, self._before, now, number, 0, 0, label, None, None))
        self._before = now


# --------------------------------------------------------------------------------------------------
# What a node tells observers of itself; made by the control thread on request.


class Reporter:
    """Describes one node."""

    def __init__(
        self, control: ControlThread, job: str, facts: Mapping[str, str], topology: SharedTopology
    ) -> None:
        self._control = control
        self._job = job
        self._topology = topology
        self._facts = bounded_facts(facts)

    def report(self) -> StatusReport:
        """As it is this instant."""
        core, card = self._control.core, self._control.me
        view = core.view
        members = view.members[:MAX_LINES] if view else ()
        rank = view.rank_of(card.process) if view else None
        health = core.health.summary(_time.now()).peers[:MAX_LINES]
        machine = self._topology.node(card.process).profile
        return StatusReport(
            node=card.node,
            incarnation=card.incarnation,
            name=card.name,
            host=card.hosts[0] if card.hosts else socket.gethostname()[:255],
            port=card.port,
            pid=os.getpid(),
            version=THIS_BUILD.potluck,
            protocol=THIS_BUILD.protocol,
            oldest=THIS_BUILD.oldest,
            job=self._job,
            state=core.state.value,
            reason=sentence(core.reason),
            lineage=view.lineage if view else "",
            epoch=view.epoch if view else 0,
            rank=-1 if rank is None else rank,
            members=[self._member(each) for each in members],
            peers=[self._peer(each) for each in health],
            missing=self._missing({each.peer: max(0.0, each.silence) for each in health}),
            facts=self._facts,
            medium=None if machine is None else machine.medium,
            battery=None if machine is None else machine.battery,
        )

    def _missing(self, silences: Mapping[ProcessId, float]) -> list[MissingLine]:
        """Whom we wait for: those who may still be at work, or may have the state we lack."""
        core, now = self._control.core, _time.now()
        if core.state is ClusterState.ACTIVE:
            awaited = self._control.awaited.items()
            return [
                MissingLine(who.node, who.incarnation, name, silences.get(who, now - since))
                for who, (name, since) in awaited
                if not core.has_ended(who)
            ][:MAX_LINES]
        return [
            MissingLine(each.who.node, each.who.incarnation, each.name, each.silent_for)
            for each in core.missing(now)[:MAX_LINES]
            if each.code is CauseCode.SILENT
        ]

    def _member(self, process: ProcessId) -> MemberLine:
        name = self._control.card_of(process).name
        return MemberLine(process.node, process.incarnation, name)

    def _peer(self, health: PeerHealth) -> HealthLine:
        addresses = self._control.links.addresses_of(health.peer)
        link = self._topology.connection(health.peer)
        return HealthLine(
            node=health.peer.node,
            incarnation=health.peer.incarnation,
            name=self._control.card_of(health.peer).name or health.name[:255],
            status=health.status.value,
            reason=sentence(health.reason),
            round_trip=health.round_trip,
            silence=max(0.0, health.silence),
            address=str(addresses[0])[:255] if addresses else "",
            link=None if link is None else LinkLine.of(link, _time.now()),
        )


# --------------------------------------------------------------------------------------------------
# The journals of a node: writes its journal when an observer asks.
#
# Runs on the control thread, so it only copies what others keep; it neither waits nor computes.

_LARGEST = 1e300  # beyond, a figure is not a measurement


class JournalBuilder:
    """Writes the journal of one node; ``figures`` are what it has counted, by name."""

    def __init__(
        self,
        me: ProcessId,
        event_log: EventLog,
        sessions: ViewSessions,
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._me = me
        self._event_log = event_log
        self._sessions = sessions
        self._figures = figures

    def journal(self, after: int) -> Journal:
        """What happened after the event of this number, and what is known now."""
        events = [each for each in self._event_log.events if each.number > after]
        links, rank = self._links()
        return bounded(
            Journal(
                node=self._me.node,
                incarnation=self._me.incarnation,
                events=[
                    EventLine(each.number, each.time, sentence(str(each)), _word(each.level))
                    for each in events[:MAX_EVENTS]
                ],
                epochs=[_epoch(*each) for each in self._event_log.views[-MAX_EPOCHS:]],
                up=links.up[rank] if links else 0,
                down=links.down[rank] if links else 0,
                latency=list(links.latency[rank][:MAX_RANKS]) if links else [],
                figures=sensible(self._figures()),
            )
        )

    def _links(self) -> tuple[LinkMatrix | None, int]:
        session = self._sessions.latest
        if session is None or session.group is None:
            return None, 0
        return session.group.links, session.rank


def _epoch(time: float, change: ViewChange) -> EpochLine:
    view = change.view
    members = [f"{each.node}/{each.incarnation}" for each in view.members[:MAX_RANKS]]
    return EpochLine(view.epoch, time, members, sentence(change.reason), view.lineage)


def _word(level: int) -> str:
    return logging.getLevelName(level).lower()


def sensible(figures: Mapping[str, float]) -> dict[str, float]:
    """Finite numbers alone, and not too many."""
    kept = [(key[:255], float(value)) for key, value in figures.items() if abs(value) <= _LARGEST]
    return dict(kept[:MAX_NUMBERS])
