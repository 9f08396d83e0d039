"""A node of a cluster: its port, its threads and its views, put together and taken apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck import _process, _time
from potluck.backend.stream_backend import ViewBackend
from potluck.cluster import events as words
from potluck.cluster.bandwidth import Probes
from potluck.cluster.connections import (
    REPORTS,
    ControlHandshake,
    DialPool,
    make_card,
    open_port,
)
from potluck.cluster.control import ControlThread
from potluck.cluster.events import Announcer, EventLog, ViewChange
from potluck.cluster.reports import ContinueRequest, StatusRequest, read_said, write
from potluck.cluster.telemetry import ClusterRecorder, JournalBuilder, NodeMetrics, Reporter
from potluck.cluster.topology import (
    AddressRanking,
    LinkStore,
    TopologyTracker,
    ViewLinks,
    collect_facts,
    local_profile,
)
from potluck.cluster.views import Look, ViewConnector, ViewSession, ViewSessions, clear_away
from potluck.collective.executor import LinkMemory
from potluck.discovery.records import Advert, Sighting
from potluck.discovery.service import Discovery
from potluck.errors import BackendUnavailable, DistributedError
from potluck.logs import get_logger
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    Abort,
    Effect,
    Installed,
    MembershipChange,
    MembershipEvent,
    Note,
    Paused,
    Removed,
    ViewResumed,
)
from potluck.membership.health import HealthEvent
from potluck.membership.messages import ProcessInfo, ProcessRole
from potluck.metrics.registry import DistributedMetrics, MetricsSnapshot
from potluck.net.addresses import Address, usable_hosts
from potluck.trace.recorder import attach
from potluck.wire_messages import RankEndpoint

if TYPE_CHECKING:
    from potluck._types import View
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.io import ControlConnection
    from potluck.cluster.topology import TopologyFacts
    from potluck.membership.messages import Cause, Commit


logger = get_logger("potluck.cluster")

MISSING_WITHIN = 1.0
"""Seconds to ask the control thread whom it misses; it needs milliseconds."""

LEAVE_WITHIN = 2.0
"""Seconds for each step of leaving."""


class ClusterNode:
    """One process in its cluster, from the moment it begins to look for others."""

    def __init__(self, config: AutoDiscoveryConfig) -> None:
        self.config = config
        self.job = config.job_name
        discovery = config.discovery()
        profile = local_profile(discovery)
        settings = config.cluster(profile)
        self.sessions = ViewSessions()
        self.event_log = EventLog()
        self._view: View | None = None
        self._peers: dict[int, list[RankEndpoint]] = {}
        self._paths = AddressRanking(_time.now)
        self._closed = False
        self.port = open_port(config, discovery.rendezvous.listen_port)
        try:
            self.card = make_card(self.port, config, ProcessRole.MEMBER, settings.health)
            self._pool = DialPool()
            self._announcer = Announcer(self.card.process, has_launcher="POTLUCK_RUN" in os.environ)
            core = ClusterCore(self.card, settings, _time.now())
            self.control = ControlThread(
                core,
                self._pool,
                carry_out=self._carry_out,
                answer=self._answer,
                look_around=self._look_around,
                failed=self._fail,
            )
        except BaseException:
            self.port.close()
            raise
        self._connector = ViewConnector(self.sessions, self._make, config.collectives)
        self.flight = ClusterRecorder(self.control, self.job)
        self._advert = self._make_advert()
        store = LinkStore(self._advert.tag, discovery.home) if config.known else None
        self.topology_tracker = tracker = TopologyTracker(
            self.card.process, self._ask_facts, profile, store
        )
        self._reporter = Reporter(self.control, self.job, config.known_facts, tracker.shared)
        self._counting = NodeMetrics(
            config.registry() or DistributedMetrics(), self.control, self.port
        )
        self.metrics.tell = self._failed
        self.sessions.follow(self._counting.built)
        self.sessions.find_missing = self._missing
        figures = self._counting.figures
        self._journals = JournalBuilder(self.card.process, self.event_log, self.sessions, figures)
        links = self.control.links
        links.counts = self.metrics.discovery
        links.handshake = ControlHandshake(
            self.port, self.job, self.card, links.opened, links.objection, profile=profile
        )
        if config.probes_links:
            probes = Probes(self._connector, tracker.is_rated, tracker.shared.rated)
            self.sessions.follow(probes.begin)
        self.control.start()
        try:
            links.discovery = Discovery(self._advert, discovery, links.wake)
        except BaseException:
            self.close()
            raise
        links.wake()  # what it found before we could be woken
        _process.on_fork(self)

    def _make_advert(self) -> Advert:
        namespace = self.port.members.security.namespace
        return Advert.of(namespace, self.card.process, job=self.job, port=self.port.port)

    def _ask_facts(self) -> TopologyFacts:
        return self.control.ask(lambda: collect_facts(self.control))

    # -- called by the control thread ----------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        """What concerns operations, and what people want to know."""
        match effect:
            case Installed(view, reason, commits):
                self._install(view, reason, commits)
            case Abort(reason=reason, orderly=orderly):
                self._stop(reason, orderly=orderly)
            case Paused(reason):
                self._pause(reason)
            case ViewResumed():
                self._pause(None)
            case Removed(reason, commit):
                self._removed(reason, commit)
            case Note(event):
                self._note(event)

    def _install(self, view: View, reason: str, commits: Sequence[Commit]) -> None:
        """Continue with this view; operations of the one before end with what ``commits`` say."""
        cards = [self.control.card_of(each) for each in view.members]
        rank = view.rank_of(self.card.process)
        assert rank is not None
        session = ViewSession(view, rank)
        self.topology_tracker.observe(collect_facts(self.control))
        session.complain = lambda rank, why: self._make_sure_of(session, rank, why)
        session.accuse = lambda rank, why: self._expel(session, rank, why)
        self._peers = {view.epoch: [self._peer(card) for card in cards]}
        change, self._view = ViewChange(view, self._view, reason), view
        self.flight.changed(change)
        self._counting.installed(session, change, cards)
        self.event_log.changed(change)  # before anybody can see the view itself
        self._announcer.installed(change, cards, commits)
        ending, orderly = self._ending_before(commits)
        passed = self._passed(commits)
        before = self.sessions.install(session, ending, orderly=orderly, passed=passed)
        if before is not None:
            self._connector.abort(before)
        self.sessions.pause(None)
        self._connector.build(session, before)
        self._remember(cards)

    def _ending_before(self, commits: Sequence[Commit]) -> tuple[DistributedError, bool]:
        """What the session before ends with, if it has not, and whether in good order."""
        session = self.sessions.latest
        if session is None or session.ending is not None:
            return words.out_of_view("it has already ended"), True  # which nothing will raise
        view = session.view
        error = words.ending(view, commits, self.card.process)
        return error, words.is_orderly(view, commits)

    def _passed(self, commits: Sequence[Commit]) -> list[ViewSession]:
        """Views between the last one and the new one: the others were in them, this process not.

        Its program is told of their ends too, as those of the others are.
        """
        passed = []
        for number, commit in enumerate(commits[:-1], 1):
            rank = commit.view.rank_of(self.card.process)
            if rank is not None:
                over = ViewSession(commit.view, rank)
                over.end(words.ending(commit.view, commits[number:], self.card.process))
                passed.append(over)
        return passed

    def _peer(self, card: ProcessInfo) -> RankEndpoint:
        addresses = self.control.links.addresses_of(card.process)
        known = [each.host for each in addresses if each.port == card.port]
        hosts = list(dict.fromkeys([*known, *card.hosts]))
        return RankEndpoint(hosts[:16], card.port or 1, card.name or str(card.process), card.node)

    def _make(self, session: ViewSession, deadline: float, look: Look) -> ViewBackend:
        """On a builder's thread: connect the members."""
        peers = self._peers.get(session.view.epoch, [])
        peers[: session.rank] = self._paths.sorted(peers[: session.rank])  # those whom we dial
        me = self.card.process
        backend = ViewBackend(self.port, session.view, me, peers, deadline=deadline, look=look)
        backend.timeout = None  # callers bring their own
        attach(backend, self.flight.recorder)
        links = ViewLinks(self.topology_tracker.shared, session.view)
        backend.services.put(LinkMemory, links.memory)
        return backend

    def _remember(self, cards: Sequence[ProcessInfo]) -> None:
        discovery = self.control.links.discovery
        if discovery is None:
            return
        links = self.control.links
        discovery.remember(
            Sighting(
                key=f"{card.node}/{card.incarnation}",
                sources=("known",),
                node=card.node,
                incarnation=0,
                job_tag="",
                addresses=links.addresses_of(card.process)
                or tuple(Address(host, card.port) for host in card.hosts),
                version=card.build.protocol,
                name=card.name,
                oldest=card.build.oldest,
                potluck=card.build.potluck,
            )
            for card in cards
            if card.process != self.card.process
        )

    def _stop(self, reason: str, *, orderly: bool) -> None:
        """Interrupt what runs in the present view; its error is made from the commit to come."""
        session = self.sessions.stop(reason, orderly=orderly)
        if session is not None:
            self._connector.abort(session)

    def _pause(self, reason: str | None) -> None:
        """Let calls wait."""
        self.sessions.pause(reason)
        self._counting.paused(paused=reason is not None)

    def _removed(self, reason: str, commit: Commit | None) -> None:
        """We are in no view any more."""
        self.sessions.explain(reason)
        self.sessions.pause(None)
        session = self.sessions.latest
        if session is None:
            return
        if commit is None or commit.lineage != session.view.lineage:
            self.sessions.end(words.out_of_view(reason))
        else:
            self.sessions.end(words.ending(session.view, (commit,), self.card.process))
        self._connector.abort(session)

    def _note(self, event: object) -> None:
        """Something happened."""
        self.sessions.explain(self.control.core.reason)
        view = self.control.core.view
        members = view.members if view is not None else ()
        # A process that has left, or was left behind, is silent as expected.
        is_idle_talk = isinstance(event, HealthEvent) and (
            event.peer not in members or self.control.has_departed(event.peer)
        )
        self.event_log.post(event, quietly=is_idle_talk)
        self._announce(event)
        self._counting.noted(event)
        self.flight.note(event)

    def _announce(self, event: object) -> None:
        """Tell people, where it concerns them."""
        missing: list[str] = []
        has_network = True
        if isinstance(event, MembershipEvent) and event.change is MembershipChange.PAUSED:
            causes = self.control.core.missing(_time.now())
            missing = sorted({each.name or str(each.who) for each in causes})
            looking = self.config.discovery()
            has_network = bool(usable_hosts(virtual=looking.virtual, only=looking.interfaces))
        self._announcer.noted(event, missing, has_network=has_network)

    def _look_around(self) -> None:
        """Now and then: the secret may have changed, and what we show follows from it."""
        self._counting.look()
        self._announcer.look()
        self.topology_tracker.observe(collect_facts(self.control))
        advert, discovery = self._make_advert(), self.control.links.discovery
        if advert != self._advert and discovery is not None:
            self._advert = advert
            discovery.update(advert)

    def _fail(self, reason: str) -> None:
        """The end, for good."""
        self.sessions.fail(words.ended_for_good(reason))
        session = self.sessions.latest
        if session is not None:
            self._connector.abort(session)

    def _answer(self, connection: ControlConnection, payload: bytes) -> None:
        """An observer asks for our state, or to continue without missing machines."""
        said = read_said(payload)
        send = self.control.links.io.send
        if isinstance(said, ContinueRequest) and said.job == self.job:
            logger.warning("A user asked this process to continue without the missing machines")
            self.control.continue_without_missing()
            send(connection, write(self._reporter.report()), REPORTS)
        if isinstance(said, StatusRequest):
            self.topology_tracker.observe(collect_facts(self.control))
            send(connection, write(self._reporter.report()), REPORTS)
            if said.news_after >= 0:
                send(connection, write(self._journals.journal(said.news_after)), REPORTS)

    # -- any thread ----------------------------------------------------------------------------

    @property
    def metrics(self) -> DistributedMetrics:
        """What this node has counted."""
        return self._counting.metrics

    def count_in(self, metrics: DistributedMetrics) -> None:
        """Count there from now on, and show it there; the cluster's history comes along."""
        metrics.adopt_cluster(self.metrics)
        self._counting.metrics = metrics
        metrics.tell = self._failed

    def _failed(self, sentence: str) -> None:
        """A collective has failed: those who look on see what and why."""
        self.control.post(lambda: self.event_log.keep_once(sentence, logging.WARNING))

    def fresh_metrics(self) -> MetricsSnapshot:
        """A snapshot; how things are is looked at meanwhile, for the next one."""
        if self.control.is_alive:
            self.control.post(self._counting.look)
        return self.metrics.snapshot()

    def _make_sure_of(self, session: ViewSession, rank: int, why: str) -> None:
        """Operations have lost a member with which membership is in contact: contact it anew.

        A view follows in any case: without that member, or with the same members.
        """
        process = session.view.members[rank]

        def look() -> None:
            if not session.stopped.is_set() and self.sessions.latest is session:
                logger.info("A connection to %s failed, but it is still a member: %s", process, why)
                self.control.links.drop(process, why)

        self.control.post(look)

    def _expel(self, session: ViewSession, rank: int, why: str) -> None:
        """A member has sent what no correct process sends: a view without it follows.

        Also if it has left meanwhile: it is not let in again.
        """
        process = session.view.members[rank]
        self.control.post(lambda: self.control.misbehaved(process, why))

    def _missing(self) -> Sequence[Cause]:
        """Whom a call that waited misses; no one if a member at work can let us in."""
        control = self.control
        core = control.core

        def find() -> Sequence[Cause]:
            is_at_the_door = core.view is None and core.can_be_let_in
            return () if is_at_the_door else core.missing(_time.now())

        try:
            return control.ask(find, MISSING_WITHIN)
        except BackendUnavailable:
            return ()

    @property
    def is_closed(self) -> bool:
        """Whether it has left."""
        return self._closed

    def close(self) -> None:
        """Leave the job and end everything.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.flight.close()
        self.control.leave(LEAVE_WITHIN)
        self.sessions.fail(words.ended_for_good("it was closed"))
        session = self.sessions.latest
        if session is not None:
            clear_away(session)
        self._connector.close(LEAVE_WITHIN)
        self._pool.close(0.0)
        self.control.links.io.close()
        if self.control.links.discovery is not None:
            self.control.links.discovery.close()
        self.port.close()
        self.topology_tracker.close()
        self._pool.close(LEAVE_WITHIN)
        self.control.clear()
        self.event_log.close(LEAVE_WITHIN)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and no thread is here."""
        self._closed = True
        self.sessions.become_forked(
            words.belongs_to_parent(os.getppid()),
        )
