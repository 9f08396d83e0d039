"""The cluster as one node sees it: machines, the links between them, and what both can do.

A graph whose nodes are processes, known by their ids and not by a place in a list, so removing one
changes nothing for the others.  It records: profiles as the machines tell them, latencies from
heartbeats, rates from short probes and from what collectives saw.  For a view it gives the planner
a :class:`~potluck.vocabulary.LinkMatrix` in the order of ranks.  Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from potluck.core.topology_links import ConnectionProfile, Endpoint, Paths, RateSource
from potluck.core.topology_nodes import Accelerator, Battery, NodeProfile
from potluck.vocabulary import LinkMatrix, ProcessId, Seconds, View, in_seconds

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "Accelerator",
    "Battery",
    "ClusterTopology",
    "ConnectionProfile",
    "NodeInfo",
    "NodeProfile",
    "RateSource",
]

_LARGEST_RATE = (1 << 63) - 1  # what fits into a link matrix
_LARGEST_LATENCY = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One process, as far as it is known here."""

    process: ProcessId
    profile: NodeProfile | None
    addresses: tuple[Endpoint, ...]
    """As it names them."""
    last_seen: float
    up: int
    """Bytes per second that it can send, as collectives saw it; 0 if they did not."""
    down: int
    rated_at: float
    """When collectives saw it."""


class ClusterTopology:
    """All processes of a cluster and the links between them, seen from one of them.

    >>> from potluck.vocabulary import NodeId
    >>> me, you = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
    >>> topology = ClusterTopology(me, NodeProfile(host="desk", cores=8))
    >>> topology.add_node(you, now=1.0, addresses=[("10.0.0.2", 5000), ("10.9.0.2", 5000)])
    >>> fast = ConnectionProfile(latency=90_000, measured_at=1.0, address=("10.9.0.2", 5000))
    >>> topology.add_connection(me, you, fast)
    >>> topology.addresses(you, now=2.0)[0]
    ('10.9.0.2', 5000)
    >>> topology.link_matrix(View("f" * 32, 1, (me, you))).latency
    ((0, 90000), (90000, 0))
    """

    def __init__(
        self, me: ProcessId, profile: NodeProfile | None = None, *, now: float = 0.0
    ) -> None:
        import networkx as nx  # takes a third of a second: only who has a cluster pays for it

        self.me = me
        self._graph: nx.DiGraph[ProcessId] = nx.DiGraph()
        self._paths: dict[ProcessId, Paths] = {}
        self.add_node(me, now=now, profile=profile)

    # --- who is there ---

    def add_node(
        self,
        node: ProcessId,
        *,
        now: float,
        profile: NodeProfile | None = None,
        addresses: Iterable[Endpoint] | None = None,
    ) -> None:
        """Somebody is there, or still is; what is not told stays as it was known."""
        known = self._info(node)
        if known is None:
            self._paths[node] = Paths()
            known = NodeInfo(node, None, (), now, 0, 0, 0.0)
        if addresses is not None:
            self._paths[node].name(addresses)
        self._graph.add_node(
            node,
            info=replace(
                known,
                profile=known.profile if profile is None else profile,
                addresses=self._paths[node].named,
                last_seen=max(now, known.last_seen),
            ),
        )

    def seen(self, node: ProcessId, now: float) -> None:
        """A sign of life of a node that is known."""
        if node in self._graph:
            self.add_node(node, now=now)

    def remove_node(self, node: ProcessId) -> None:
        """Somebody is gone, with all its links.  We ourselves never are."""
        if node != self.me and node in self._graph:
            self._graph.remove_node(node)
            del self._paths[node]

    def prune(self, now: float, *, max_age: Seconds) -> tuple[ProcessId, ...]:
        """Remove whoever was not seen for ``max_age`` seconds; who that was."""
        age = in_seconds(max_age)
        stale = tuple(node for node in self.remote_nodes if now - self.node(node).last_seen > age)
        for node in stale:
            self.remove_node(node)
        return stale

    @property
    def nodes(self) -> tuple[ProcessId, ...]:
        """Everybody, ourselves included, in the order of ids."""
        return tuple(sorted(self._graph.nodes))

    @property
    def remote_nodes(self) -> tuple[ProcessId, ...]:
        """Everybody but ourselves."""
        return tuple(node for node in self.nodes if node != self.me)

    def __len__(self) -> int:
        return len(self._graph)

    def __contains__(self, node: object) -> bool:
        return node in self._graph

    def __iter__(self) -> Iterator[ProcessId]:
        return iter(self.nodes)

    def node(self, node: ProcessId) -> NodeInfo:
        """What is known of somebody; KeyError for a stranger."""
        info = self._info(node)
        if info is None:
            raise KeyError(node)
        return info

    def _info(self, node: ProcessId) -> NodeInfo | None:
        return self._graph.nodes[node]["info"] if node in self._graph else None

    @property
    def total_cores(self) -> int:
        """Of all machines that told theirs; several processes of one machine count once."""
        return sum(profile.cores for profile in self._machines())

    @property
    def total_memory(self) -> int:
        """Bytes, of all machines that told theirs."""
        return sum(profile.memory for profile in self._machines())

    def _machines(self) -> list[NodeProfile]:
        told = ((node.node, self.node(node).profile) for node in self.nodes)
        return list({machine: profile for machine, profile in told if profile}.values())

    # --- the links ---

    def add_connection(
        self, source: ProcessId, target: ProcessId, profile: ConnectionProfile
    ) -> None:
        """A link between two known nodes was measured; strangers' links are not kept."""
        if source == target or source not in self._graph or target not in self._graph:
            return
        ways = self._ways(source, target)
        known = ways.get(profile.address)
        newer = profile if known is None else known.updated(profile)
        self._graph.add_edge(source, target, ways={**ways, profile.address: newer})

    def _ways(
        self, source: ProcessId, target: ProcessId
    ) -> dict[Endpoint | None, ConnectionProfile]:
        if not self._graph.has_edge(source, target):
            return {}
        ways: dict[Endpoint | None, ConnectionProfile] = self._graph.edges[source, target]["ways"]
        return ways

    def connection(self, source: ProcessId, target: ProcessId) -> ConnectionProfile | None:
        """The best known way from one to another; what collectives saw goes before the rest."""
        ways = self._ways(source, target)
        if None in ways:
            return ways[None]
        return min(ways.values(), key=lambda way: way.seconds_for_message, default=None)

    def addresses(self, target: ProcessId, now: float) -> tuple[Endpoint, ...]:
        """Under which addresses to try to reach somebody, fastest first; none for a stranger."""
        paths = self._paths.get(target)
        return () if paths is None else paths.order(self._ways(self.me, target), now)

    def used(self, target: ProcessId, address: Endpoint) -> None:
        """We are connected with somebody by this address."""
        if target in self._paths:
            self._paths[target].used(address)

    def failed(self, target: ProcessId, address: Endpoint, now: float) -> None:
        """Nobody was reached by this address: others are tried first for a while."""
        if target in self._paths:
            self._paths[target].failed(address, now)

    # --- for plans ---

    def learn(self, links: LinkMatrix, view: View, now: float) -> None:
        """Take over what the collectives of a view measured together."""
        if links.size != len(view.members):
            msg = f"{links.size} ranks were measured, the view has {len(view.members)} members"
            raise ValueError(msg)
        for rank, member in enumerate(view.members):
            self.add_node(member, now=now)
            info = self.node(member)
            up, down = links.up[rank] or info.up, links.down[rank] or info.down
            self._graph.add_node(member, info=replace(info, up=up, down=down, rated_at=now))
        for source, times in zip(view.members, links.latency, strict=True):
            for target, time in zip(view.members, times, strict=True):
                if time:
                    measured = ConnectionProfile(latency=time, measured_at=now)
                    self.add_connection(source, target, measured)

    def link_matrix(self, view: View) -> LinkMatrix:
        """What is known of the links of a view, in rank order and whole numbers."""
        members = view.members
        return LinkMatrix(
            tuple(self._rate(member, members, sending=True) for member in members),
            tuple(self._rate(member, members, sending=False) for member in members),
            tuple(tuple(self._latency(a, b) for b in members) for a in members),
        )

    def _rate(self, node: ProcessId, members: tuple[ProcessId, ...], *, sending: bool) -> int:
        """What all agreed on, or the best rate at which it was seen to send or receive since."""
        info = self._info(node)
        if info is None:
            return 0
        agreed = info.up if sending else info.down
        there = [way for other in members for way in self._ways(node, other).values()]
        back = [way for other in members for way in self._ways(other, node).values()]
        seen = [(way.up if sending else way.down, way.rated_at) for way in there]
        seen += [(way.down if sending else way.up, way.rated_at) for way in back]
        newer = [rate for rate, time in seen if rate and (not agreed or time > info.rated_at)]
        return min(max(newer, default=agreed), _LARGEST_RATE)

    def _latency(self, source: ProcessId, target: ProcessId) -> int:
        ways = self.connection(source, target) or self.connection(target, source)
        return 0 if ways is None else min(ways.latency, _LARGEST_LATENCY)

    # --- as a graph ---

    @property
    def graph(self) -> nx.DiGraph[ProcessId]:
        """A copy to draw or to compute with: nodes have ``info``, edges ``connection``."""
        found = self._graph.copy()
        for source, target, data in found.edges(data=True):
            data["connection"] = self.connection(source, target)
            del data["ways"]
        return found

    def islands(self) -> list[frozenset[ProcessId]]:
        """Groups of nodes between which no link is known, largest first."""
        import networkx as nx

        groups = map(frozenset, nx.weakly_connected_components(self._graph))
        return sorted(groups, key=lambda group: (-len(group), min(group)))

    def copy(self) -> ClusterTopology:
        """The same, as it is now; later changes of the one do not show in the other."""
        found = ClusterTopology(self.me)
        found._graph = self._graph.copy()
        found._paths = {node: paths.copy() for node, paths in self._paths.items()}
        return found
