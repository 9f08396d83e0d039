"""A node of a cluster: its port, its threads and its views, put together and taken apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.backend.view import ViewBackend
from potluck.core.cluster import ClusterCore
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.health_records import HealthEvent
from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.messages import Peer
from potluck.metrics import DistributedMetrics, MetricsSnapshot
from potluck.net import descriptors
from potluck.net.addresses import Address
from potluck.net.discovery import Advert, Discovery
from potluck.net.discovery_records import Sighting
from potluck.runtime import clock
from potluck.runtime import cluster_words as words
from potluck.runtime.bandwidth_unasked import Probes
from potluck.runtime.cluster_building import Builders, clear_away
from potluck.runtime.cluster_events import Bulletin, ViewChange
from potluck.runtime.cluster_metrics import NodeMetrics
from potluck.runtime.cluster_reporting import Reporter
from potluck.runtime.cluster_stage import Look, Stage
from potluck.runtime.cluster_stages import Stages
from potluck.runtime.cluster_topology import Topographer, facts_of
from potluck.runtime.control import Control
from potluck.runtime.control_doors import Doors
from potluck.runtime.control_errands import Errands
from potluck.runtime.control_port import make_card, open_port
from potluck.runtime.observing_scribe import Scribe
from potluck.runtime.paths import PathFinder
from potluck.runtime.profile import local_profile
from potluck.runtime.recorder_cluster import ClusterRecorder
from potluck.runtime.recorder_logs import attach

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.control_reports import Report
    from potluck.runtime.observing_journal import Journal
    from potluck.vocabulary import ProcessId, View

__all__ = ["ClusterNode"]

logger = get_logger("potluck.cluster")

WHY_WITHIN = 0.3
"""Seconds to learn why others have ended a view."""

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
        self._paths = PathFinder(clock.now)
        self._closed = False
        self.port = open_port(config, discovery.rendezvous.listen_port)
        try:
            self.card = make_card(self.port, config, Role.MEMBER)
            self._errands = Errands()
            core = ClusterCore(self.card, settings, clock.now())
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
        self.stages.follow(self._counting.built)
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
        descriptors.on_fork(self)

    def _make_advert(self) -> Advert:
        namespace = self.port.members.security.namespace
        return Advert.of(namespace, self.card.process, job=self.job, port=self.port.port)

    # -- the theatre: called by the control thread ---------------------------------------------

    def install(self, view: View, cards: Sequence[ProcessCard], reason: str) -> None:
        """Go on with this view."""
        rank = view.rank_of(self.card.process)
        assert rank is not None
        stage = Stage(view, rank)
        stage.complain = lambda rank, why: self._make_sure_of(view.members[rank], why)
        self._peers = {view.epoch: [self._peer(card) for card in cards]}
        change, self._view = ViewChange(view, self._view, reason), view
        self.flight.changed(change)
        self._counting.installed(stage, change, cards)
        self.bulletin.changed(change)  # before anybody can see the view itself
        ending, orderly = self._ending_before(change)
        before = self.stages.install(stage, ending, orderly=orderly)
        if before is not None:
            self._builders.abort(before)
        self.stages.pause(None)
        self._builders.build(stage, before)
        self._remember(cards)

    def _ending_before(self, change: ViewChange) -> tuple[DistributedError, bool]:
        """What the view before ends with if nothing has ended it, and whether in good order."""
        if change.previous is None or not change.left:
            return words.changed(change.reason), True
        first = change.left[0]
        card, rank = self.control.card_of(first), change.previous.rank_of(first)
        orderly = all(self.control.has_departed(each) for each in change.left)
        return words.lost(card, rank, change.reason), orderly

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

    def abort(
        self, lost: ProcessCard | None, rank: int | None, reason: str, *, orderly: bool
    ) -> None:
        """End what runs in the present view: at once, unless whoever left did so in good order."""
        if lost is None:
            self._end_soon(words.changed(reason))
        elif lost.process == self.card.process:
            self._end_stage(words.removed(reason))
        else:
            self._end_stage(words.lost(lost, rank, reason), orderly=orderly)

    def _end_soon(self, error: DistributedError) -> None:
        """Somebody else has ended this view; the next one, or whoever is lost, will say why."""
        stage = self.stages.latest

        def work() -> None:
            if stage is not None and not stage.over.wait(WHY_WITHIN):
                self.stages.end(error, orderly=True, stage=stage)
                self._builders.abort(stage)

        self._builders.start(work, "potluck-why")

    def pause(self, reason: str | None) -> None:
        """Let calls wait."""
        self.stages.pause(reason)
        self._counting.paused(paused=reason is not None)

    def removed(self, reason: str) -> None:
        """We are in no view any more."""
        self.stages.explain(reason)
        self._end_stage(words.removed(reason))

    def _end_stage(self, error: DistributedError, *, orderly: bool = False) -> None:
        self.stages.end(error, orderly=orderly)
        stage = self.stages.latest
        if stage is not None:
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

    def fresh_metrics(self) -> MetricsSnapshot:
        """A snapshot; how things are is looked at meanwhile, for the next one."""
        if self.control.is_alive:
            self.control.post(self._counting.look)
        return self.metrics.snapshot()

    def _make_sure_of(self, process: ProcessId, why: str) -> None:
        """Operations have lost a member with whom we are still in contact: contact it anew."""
        logger.warning("%s is lost to operations, though it is in contact: %s", process, why)
        self.control.post(lambda: self.control.links.drop(process, why))

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
