"""One topology for several threads: whoever learns something writes it, whoever looks gets a copy.

The control thread records heartbeats and profiles, the thread of a collective what it measured, a
dashboard looks.  Changes happen one at a time; a snapshot never changes, and costs nothing as long
as there is nothing new.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from potluck.core.topology import ClusterTopology
from potluck.core.topology_links import ConnectionProfile, RateSource
from potluck.core.topology_nodes import NodeProfile
from potluck.runtime import clock as node_clock
from potluck.vocabulary import LinkMatrix, ProcessId, Seconds, View

if TYPE_CHECKING:
    from potluck.core.health_records import HealthSummary
    from potluck.core.topology_links import Endpoint
    from potluck.runtime.bandwidth import Bandwidth

__all__ = ["STALE_AFTER", "SharedTopology"]

Result = TypeVar("Result")

STALE_AFTER = 120.0
"""Seconds after which a node of which nothing was heard is forgotten."""


class SharedTopology:
    """A :class:`ClusterTopology` that any thread may use.

    >>> from potluck.vocabulary import NodeId
    >>> me, you = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
    >>> shared = SharedTopology(me)
    >>> shared.update(lambda topology: topology.add_node(you, now=1.0))
    >>> before = shared.snapshot()
    >>> shared.update(lambda topology: topology.remove_node(you))
    >>> len(before), len(shared.snapshot())
    (2, 1)
    """

    def __init__(
        self,
        me: ProcessId,
        profile: NodeProfile | None = None,
        *,
        clock: Callable[[], float] = node_clock.now,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._topology = ClusterTopology(me, profile, now=clock())
        self._snapshot: ClusterTopology | None = None

    def update(self, change: Callable[[ClusterTopology], Result]) -> Result:
        """Change the topology; nobody sees it half done.  ``change`` must be quick."""
        with self._lock:
            self._snapshot = None
            return change(self._topology)

    def snapshot(self) -> ClusterTopology:
        """The topology as it is now, shared among all who look before it changes: do not change it.

        A copy of your own is ``snapshot().copy()``.
        """
        with self._lock:
            if self._snapshot is None:
                self._snapshot = self._topology.copy()
            return self._snapshot

    def __iter__(self) -> Iterator[ProcessId]:
        return iter(self.snapshot())

    def __len__(self) -> int:
        return len(self.snapshot())

    def heard(
        self,
        peer: ProcessId,
        *,
        round_trip: float | None = None,
        jitter: float = 0.0,
        address: Endpoint | None = None,
    ) -> None:
        """A peer that is known gave a sign of life, perhaps with a measured round trip."""
        now = self._clock()

        def change(topology: ClusterTopology) -> None:
            topology.seen(peer, now)
            if round_trip is not None:
                profile = ConnectionProfile.from_round_trip(
                    round_trip, now, jitter=jitter, address=address
                )
                topology.add_connection(topology.me, peer, profile)

        self.update(change)

    def introduce(
        self,
        peer: ProcessId,
        *,
        profile: NodeProfile | None = None,
        addresses: Iterable[Endpoint] | None = None,
        in_use: Endpoint | None = None,
    ) -> None:
        """There is a connection to a peer, which has told what it is and where."""
        now = self._clock()

        def change(topology: ClusterTopology) -> None:
            topology.add_node(peer, now=now, profile=profile, addresses=addresses)
            if in_use is not None:
                topology.used(peer, in_use)

        self.update(change)

    def observe(
        self, summary: HealthSummary, in_use: Mapping[ProcessId, Endpoint] | None = None
    ) -> None:
        """Take over what heartbeats have measured, by the addresses in use."""
        for peer in summary.peers:
            if peer.status.is_operational:
                self.heard(
                    peer.peer,
                    round_trip=peer.round_trip,
                    jitter=peer.jitter or 0.0,
                    address=(in_use or {}).get(peer.peer),
                )

    def rated(self, peer: ProcessId, found: Bandwidth, *, address: Endpoint | None = None) -> None:
        """A probe measured the link to a peer."""
        profile = ConnectionProfile(
            up=found.up,
            down=found.down,
            rated_at=self._clock(),
            rated_by=RateSource.PROBE,
            address=address,
        )
        self.update(lambda topology: topology.add_connection(topology.me, peer, profile))

    def learn(self, links: LinkMatrix, view: View) -> None:
        """Collectives measured the links of a view together."""
        now = self._clock()
        self.update(lambda topology: topology.learn(links, view, now))

    def prune(self, *, max_age: Seconds = STALE_AFTER) -> tuple[ProcessId, ...]:
        """Forget whoever was not heard for long; who that was."""
        now = self._clock()
        return self.update(lambda topology: topology.prune(now, max_age=max_age))

    def addresses(self, peer: ProcessId) -> tuple[Endpoint, ...]:
        """Under which addresses to try to reach a peer, fastest first."""
        with self._lock:
            return self._topology.addresses(peer, self._clock())

    def link_matrix(self, view: View) -> LinkMatrix:
        """What this node knows of the links of a view, for the planner."""
        with self._lock:
            return self._topology.link_matrix(view)

    def ring_order(self, view: View) -> tuple[ProcessId, ...]:
        """The members in the order in which the way round all of them is shortest.

        Optimal up to 12 members, near it up to 64.  It rests on what this node knows, so it is for
        people to look at; collectives agree on their own.
        """
        from potluck.collective.planner import Planner

        ring = Planner(self.link_matrix(view)).ring
        return tuple(view.members[rank] for rank in ring)
