"""What a node tells observers of itself; made by the control thread when somebody asks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from potluck.core.cluster_events import ClusterState
from potluck.core.cluster_messages import CauseCode
from potluck.runtime import clock
from potluck.runtime.control_reports import (
    MAX_LINES,
    HealthLine,
    MemberLine,
    MissingLine,
    Report,
    bounded_facts,
    sentence,
    software_version,
)

if TYPE_CHECKING:
    from potluck.core.health_records import PeerHealth
    from potluck.runtime.control import Control
    from potluck.vocabulary import ProcessId

__all__ = ["Reporter"]


class Reporter:
    """Describes one node."""

    def __init__(self, control: Control, job: str, facts: Mapping[str, str]) -> None:
        self._control = control
        self._job = job
        self._facts = bounded_facts(facts)
        self._version = software_version()

    def report(self) -> Report:
        """As it is this instant."""
        core, card = self._control.core, self._control.me
        view = core.view
        members = view.members[:MAX_LINES] if view else ()
        rank = view.rank_of(card.process) if view else None
        health = core.health.summary(clock.now()).peers[:MAX_LINES]
        return Report(
            node=card.node,
            incarnation=card.incarnation,
            name=card.name,
            host=card.hosts[0] if card.hosts else socket.gethostname()[:255],
            port=card.port,
            pid=os.getpid(),
            version=self._version,
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
        )

    def _missing(self, silences: Mapping[ProcessId, float]) -> list[MissingLine]:
        """Whom we wait for: those who may still be at work, or may have the state we lack."""
        core, now = self._control.core, clock.now()
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
        return HealthLine(
            node=health.peer.node,
            incarnation=health.peer.incarnation,
            name=self._control.card_of(health.peer).name or health.name[:255],
            status=health.status.value,
            reason=sentence(health.reason),
            round_trip=health.round_trip,
            silence=max(0.0, health.silence),
            address=str(addresses[0])[:255] if addresses else "",
        )
