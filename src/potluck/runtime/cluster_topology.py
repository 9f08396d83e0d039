"""The topology of a running cluster: what lanes, heartbeats and collectives know, put together.

It is drawn when somebody asks, on the thread that asks; the control thread only hands out what it
has.  What earlier views taught about the links is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.runtime import clock
from potluck.runtime.bandwidth import probe_links
from potluck.runtime.profile import local_profile
from potluck.runtime.topology import SharedTopology

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.core.health_records import HealthSummary
    from potluck.core.topology_links import Endpoint
    from potluck.core.topology_nodes import NodeProfile
    from potluck.runtime.bandwidth import Bandwidth
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.control import Control
    from potluck.vocabulary import LinkMatrix, ProcessId, View

__all__ = ["Acquaintance", "Facts", "Topographer", "facts_of", "measure_links"]

FRESH = 600.0
"""Seconds after which a link is probed again, in the next view."""


@dataclass(frozen=True, slots=True)
class Acquaintance:
    """Somebody to whom there is a lane."""

    process: ProcessId
    profile: NodeProfile | None
    in_use: Endpoint
    """The address of the lane."""
    addresses: Sequence[Endpoint]
    """All it is known to have, best first."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the control thread knows at one moment."""

    acquaintances: Sequence[Acquaintance]
    health: HealthSummary


def facts_of(control: Control) -> Facts:
    """What a control thread knows; waits for its answer."""

    def collect() -> Facts:
        links = control.links
        return Facts(
            [
                Acquaintance(
                    lane.card.process,
                    lane.profile,
                    lane.address,
                    links.addresses_of(lane.card.process),
                )
                for lane in links.opened_lanes
            ],
            control.core.health.summary(clock.now()),
        )

    return control.ask(collect)


class Topographer:
    """Keeps the topology of one node up to date; any thread."""

    def __init__(self, me: ProcessId, collect: Callable[[], Facts]) -> None:
        self._me = me
        self._collect = collect
        self._lock = threading.Lock()
        self._shared: SharedTopology | None = None
        self._learned: LinkMatrix | None = None
        self._rated: dict[ProcessId, float] = {}

    def draw(self, stage: Stage | None) -> SharedTopology:
        """The topology, with what is known now; ``stage`` is the view that holds."""
        facts = self._collect()
        with self._lock:
            if self._shared is None:
                self._shared = SharedTopology(self._me, local_profile(), clock=clock.now)
            shared = self._shared
            for each in facts.acquaintances:
                shared.introduce(
                    each.process,
                    profile=each.profile,
                    addresses=each.addresses,
                    in_use=each.in_use,
                )
            in_use = {each.process: each.in_use for each in facts.acquaintances}
            shared.observe(facts.health, in_use)
            self._learn(shared, stage)
            shared.prune()
            return shared

    def is_rated(self, process: ProcessId) -> bool:
        """Whether the link to a process was probed not long ago."""
        at = self._rated.get(process)
        return at is not None and clock.now() - at < FRESH

    def rate(self, process: ProcessId, found: Bandwidth) -> None:
        """A probe has measured the link to a process."""
        self._rated[process] = clock.now()
        self.draw(None).rated(process, found)

    def _learn(self, shared: SharedTopology, stage: Stage | None) -> None:
        if stage is None or stage.group is None:
            return
        links = stage.group.links
        if links is not self._learned and any(links.up):
            shared.learn(links, stage.view)
            self._learned = links


def measure_links(backend: Backend, topology: SharedTopology, view: View) -> SharedTopology:
    """Probe the links of all members of a view, who must do so together; what is known then."""
    for rank, found in probe_links(backend).items():
        topology.rated(view.members[rank], found)
    return topology
