"""What a node of a cluster counts: views, elections, health, who is seen, who is waited for.

The control thread tells what happens; how things are is looked at now and then, and when somebody
asks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec

from potluck.core.cluster_events import MembershipEvent
from potluck.core.election_events import ElectionEvent, ElectionKind
from potluck.core.health_records import HealthEvent
from potluck.logs import get_logger
from potluck.metrics import DistributedMetrics, PeerSnapshot
from potluck.metrics.figures import figures
from potluck.runtime import clock
from potluck.runtime.waiting import watch_waiting

if TYPE_CHECKING:
    from potluck.backend.port import NodePort
    from potluck.core.cluster_cards import ProcessCard
    from potluck.runtime.cluster_events import ViewChange
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.control import Control

__all__ = ["NodeMetrics"]

logger = get_logger(__name__)

Arguments = ParamSpec("Arguments")


def _harmless(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A fault of ours in counting must not end the control thread, and with it the node."""

    @functools.wraps(method)
    def attempt(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        try:
            method(*arguments, **options)
        except Exception:
            logger.exception("Counting failed, and is left out")

    return attempt


class NodeMetrics:
    """Feeds the metrics of one node."""

    def __init__(self, metrics: DistributedMetrics, control: Control, port: NodePort) -> None:
        self.metrics = metrics
        self._control = control
        self._port = port
        self._slept: dict[int, float] | None = None
        self._had_view = False

    # -- the control thread ----------------------------------------------------------------------

    @_harmless
    def installed(self, stage: Stage, change: ViewChange, cards: Sequence[ProcessCard]) -> None:
        """Another view holds."""
        peers, views = self.metrics.peers, self.metrics.views
        views.changes.inc(self._cause(change))
        views.installed.inc()
        views.pause(paused=False)  # another view can only be agreed on by a quorum
        views.epoch, views.members, views.rank = stage.view.epoch, stage.world_size, stage.rank
        if self._slept is not None:
            peers.release(self._slept)
        peers.keep([card.process for card in cards])
        me = self._control.me.process
        stage.labels = {
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
            self.metrics.health.changes.inc(event.status.value)
        elif isinstance(event, MembershipEvent):
            self.metrics.views.events.inc(event.change.value)
        elif isinstance(event, ElectionEvent):
            self.metrics.elections.events.inc(event.kind.value)
            if event.kind in {ElectionKind.ELECTED, ElectionKind.NEW_LEADER}:
                self.metrics.elections.term = event.term
        self.look()

    @_harmless
    def look(self) -> None:
        """See how everything is now."""
        core, metrics = self._control.core, self.metrics
        summary, view = core.health.summary(clock.now()), core.view
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
    def built(self, stage: Stage) -> None:
        """Its operations count for whom they wait."""
        if stage.group is not None:
            self._slept = watch_waiting(stage.group, self.metrics, stage.labels)
