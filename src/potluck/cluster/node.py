"""A node of a cluster: its port, its threads and its views, put together and taken apart."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck import _process, _time
from potluck.backend.view import ViewBackend
from potluck.cluster import events as words
from potluck.cluster.bandwidth import Probes
from potluck.cluster.connections import Doors, Errands, make_card, open_port
from potluck.cluster.control import Control
from potluck.cluster.events import Bulletin, ViewChange
from potluck.cluster.telemetry import ClusterRecorder, NodeMetrics, Reporter, Scribe
from potluck.cluster.topology import PathFinder, Topographer, facts_of, local_profile
from potluck.cluster.views import Builders, Look, Stage, Stages, clear_away
from potluck.discovery.records import Advert, Sighting
from potluck.discovery.service import Discovery
from potluck.errors import BackendUnavailable, DistributedError
from potluck.logs import get_logger
from potluck.membership.core import ClusterCore
from potluck.membership.health import HealthEvent
from potluck.membership.messages import ProcessCard, Role
from potluck.metrics.instruments import MetricsSnapshot
from potluck.metrics.registry import DistributedMetrics
from potluck.net.addresses import Address
from potluck.trace.recorder import attach
from potluck.wire_messages import Peer

if TYPE_CHECKING:
    from potluck._types import View
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.reports import Journal, Report
    from potluck.membership.messages import Cause, Commit


logger = get_logger("potluck.cluster")

MISSING_WITHIN = 1.0
"""Seconds to ask the control thread whom it misses; it needs milliseconds."""

GOODBYE_WITHIN = 2.0
"""Seconds for each step of leaving."""


class ClusterNode:
    """One process in its cluster, from the moment it begins to look for others."""

    def __init__(self, config: AutoDiscoveryConfig) -> None:
        self.config = config
        self.job = config.job_name
        settings, discovery = config.cluster(), config.discovery()
        self.stages = Stages()
        self.bulletin = Bulletin()
        self._view: View | None = None
        self._peers: dict[int, list[Peer]] = {}
        self._paths = PathFinder(_time.now)
        self._closed = False
        self.port = open_port(config, discovery.rendezvous.listen_port)
        try:
            self.card = make_card(self.port, config, Role.MEMBER)
            self._errands = Errands()
            core = ClusterCore(self.card, settings, _time.now())
            self.control = Control(core, self, self._errands)
        except BaseException:
            self.port.close()
            raise
        self._builders = Builders(self.stages, self._make, config.collectives)
        self.flight = ClusterRecorder(self.control, self.job)
        self._reporter = Reporter(self.control, self.job, config.known_facts)
        self._counting = NodeMetrics(
            config.registry() or DistributedMetrics(), self.control, self.port
        )
        self.metrics.tell = self._failed
        self.stages.follow(self._counting.built)
        self.stages.find_missing = self._missing
        figures = self._counting.figures
        self._scribe = Scribe(self.card.process, self.bulletin, self.stages, figures)
        links = self.control.links
        links.counts = self.metrics.discovery
        links.doors = Doors(
            self.port, self.job, self.card, links.opened, links.objection, profile=local_profile()
        )
        self.topographer = Topographer(self.card.process, lambda: facts_of(self.control))
        if config.probes:
            self.stages.follow(Probes(self._builders, self.topographer).begin)
        self._advert = self._make_advert()
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

    # -- the theatre: called by the control thread ---------------------------------------------

    def install(
        self, view: View, cards: Sequence[ProcessCard], reason: str, commits: Sequence[Commit]
    ) -> None:
        """Continue with this view; operations of the one before end with what ``commits`` say."""
        rank = view.rank_of(self.card.process)
        assert rank is not None
        stage = Stage(view, rank)
        stage.complain = lambda rank, why: self._make_sure_of(stage, rank, why)
        stage.accuse = lambda rank, why: self._expel(stage, rank, why)
        self._peers = {view.epoch: [self._peer(card) for card in cards]}
        change, self._view = ViewChange(view, self._view, reason), view
        self.flight.changed(change)
        self._counting.installed(stage, change, cards)
        self.bulletin.changed(change)  # before anybody can see the view itself
        ending, orderly = self._ending_before(commits)
        passed = self._passed(commits)
        before = self.stages.install(stage, ending, orderly=orderly, passed=passed)
        if before is not None:
            self._builders.abort(before)
        self.stages.pause(None)
        self._builders.build(stage, before)
        self._remember(cards)

    def _ending_before(self, commits: Sequence[Commit]) -> tuple[DistributedError, bool]:
        """What the stage before ends with, if it has not, and whether in good order."""
        stage = self.stages.latest
        if stage is None or stage.ending is not None:
            return words.out_of_view("it has ended before"), True  # which nothing will raise
        view = stage.view
        error = words.ending(view, commits, self.card.process)
        return error, words.is_orderly(view, commits)

    def _passed(self, commits: Sequence[Commit]) -> list[Stage]:
        """Views between the last one and the new one: the others were in them, this process not.

        Its program is told of their ends too, as those of the others are.
        """
        passed = []
        for number, commit in enumerate(commits[:-1], 1):
            rank = commit.view.rank_of(self.card.process)
            if rank is not None:
                over = Stage(commit.view, rank)
                over.end(words.ending(commit.view, commits[number:], self.card.process))
                passed.append(over)
        return passed

    def _peer(self, card: ProcessCard) -> Peer:
        addresses = self.control.links.addresses_of(card.process)
        known = [each.host for each in addresses if each.port == card.port]
        hosts = list(dict.fromkeys([*known, *card.hosts]))
        return Peer(hosts[:16], card.port or 1, card.name or str(card.process), card.node)

    def _make(self, stage: Stage, deadline: float, look: Look) -> ViewBackend:
        """On a builder's thread: connect the members."""
        peers = self._peers.get(stage.view.epoch, [])
        peers[: stage.rank] = self._paths.sorted(peers[: stage.rank])  # those whom we dial
        me = self.card.process
        backend = ViewBackend(self.port, stage.view, me, peers, deadline=deadline, look=look)
        backend.timeout = None  # callers bring their own
        attach(backend, self.flight.recorder)
        return backend

    def _remember(self, cards: Sequence[ProcessCard]) -> None:
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
                version=0,
                name=card.name,
            )
            for card in cards
            if card.process != self.card.process
        )

    def stop(self, reason: str, *, orderly: bool) -> None:
        """Interrupt what runs in the present view; its error is made from the commit to come."""
        stage = self.stages.stop(reason, orderly=orderly)
        if stage is not None:
            self._builders.abort(stage)

    def pause(self, reason: str | None) -> None:
        """Let calls wait."""
        self.stages.pause(reason)
        self._counting.paused(paused=reason is not None)

    def removed(self, reason: str, commit: Commit | None) -> None:
        """We are in no view any more."""
        self.stages.explain(reason)
        self.stages.pause(None)
        stage = self.stages.latest
        if stage is None:
            return
        if commit is None or commit.lineage != stage.view.lineage:
            self.stages.end(words.out_of_view(reason))
        else:
            self.stages.end(words.ending(stage.view, (commit,), self.card.process))
        self._builders.abort(stage)

    def note(self, event: object) -> None:
        """Something happened."""
        self.stages.explain(self.control.core.reason)
        view = self.control.core.view
        members = view.members if view is not None else ()
        # That somebody who has left, or was left behind, is silent is no news.
        is_idle_talk = isinstance(event, HealthEvent) and (
            event.peer not in members or self.control.has_departed(event.peer)
        )
        self.bulletin.post(event, quietly=is_idle_talk)
        self._counting.noted(event)
        self.flight.note(event)

    def look_around(self) -> None:
        """Now and then: the secret may have changed, and what we show follows from it."""
        self._counting.look()
        advert, discovery = self._make_advert(), self.control.links.discovery
        if advert != self._advert and discovery is not None:
            self._advert = advert
            discovery.update(advert)

    def fail(self, reason: str) -> None:
        """The end, for good."""
        self.stages.fail(words.ended_for_good(reason))
        stage = self.stages.latest
        if stage is not None:
            self._builders.abort(stage)

    def report(self) -> Report:
        """How this process is."""
        return self._reporter.report()

    def journal(self, after: int) -> Journal:
        """What happened after an event, and what was measured."""
        return self._scribe.journal(after)

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
        self.control.post(lambda: self.bulletin.keep_once(sentence, logging.WARNING))

    def fresh_metrics(self) -> MetricsSnapshot:
        """A snapshot; how things are is looked at meanwhile, for the next one."""
        if self.control.is_alive:
            self.control.post(self._counting.look)
        return self.metrics.snapshot()

    def _make_sure_of(self, stage: Stage, rank: int, why: str) -> None:
        """Operations have lost a member with which membership is in contact: contact it anew.

        A view follows in any case: without that member, or with the same members.
        """
        process = stage.view.members[rank]

        def look() -> None:
            if not stage.stopped.is_set() and self.stages.latest is stage:
                logger.warning("Operations have lost %s, membership has not: %s", process, why)
                self.control.links.drop(process, why)

        self.control.post(look)

    def _expel(self, stage: Stage, rank: int, why: str) -> None:
        """A member has sent what no correct process sends: a view without it follows.

        Also if it has left meanwhile: it is not let in again.
        """
        process = stage.view.members[rank]
        self.control.post(lambda: self.control.misbehaved(process, why))

    def _missing(self) -> Sequence[Cause]:
        control = self.control
        try:
            return control.ask(lambda: control.core.missing(_time.now()), MISSING_WITHIN)
        except BackendUnavailable:
            return ()

    @property
    def is_closed(self) -> bool:
        """Whether it has left."""
        return self._closed

    def close(self) -> None:
        """Say goodbye and end everything.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.flight.close()
        self.control.leave(GOODBYE_WITHIN)
        self.stages.fail(words.ended_for_good("it was closed"))
        stage = self.stages.latest
        if stage is not None:
            clear_away(stage)
        self._builders.close(GOODBYE_WITHIN)
        self._errands.close(0.0)
        self.control.links.io.close()
        if self.control.links.discovery is not None:
            self.control.links.discovery.close()
        self.port.close()
        self._errands.close(GOODBYE_WITHIN)
        self.control.clear()
        self.bulletin.close(GOODBYE_WITHIN)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and no thread is here."""
        self._closed = True
        self.stages.become_forked(
            words.belongs_to_parent(os.getppid()),
        )
