"""The cluster as one node sees it: machines, the links between them, and what both can do.

A graph whose nodes are processes, known by their ids and not by a place in a list, so removing one
changes nothing for the others.  It records: profiles as the machines tell them, latencies from
heartbeats, rates from short probes and from what collectives saw.  For a view it gives the planner
a :class:`~potluck._types.LinkMatrix` in the order of ranks.  Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from potluck._decode import decode_msgpack
from potluck._types import LinkMatrix, ProcessId, Seconds, View, in_seconds
from potluck.errors import MalformedFrame

if TYPE_CHECKING:
    import networkx as nx


# --------------------------------------------------------------------------------------------------
# What is known of one link: its profile by each address, and which address to try first.
#
# Two machines often have several ways to each other (cable and Wi-Fi, IPv4 and IPv6).  Measured
# ones are ordered by how long a message of 1 MiB would take, the others keep the order in which the
# peer named them.  An address that failed goes to the end for a while that doubles with every
# failure; it is never dropped, since it may be the only one left.

Endpoint: TypeAlias = tuple[str, int]
"""Host and port."""

MESSAGE = 1 << 20
"""Bytes of the message by which addresses are compared."""

CABLE_RATE, RADIO_RATE = 125_000_000, 25_000_000
"""Bytes per second to assume where only the latency is known: Ethernet with 1 Gbit/s, Wi-Fi."""

CABLE_LATENCY = 500_000
"""Nanoseconds one way; a link that takes longer is taken for a radio link."""

WINDOW = 60.0
"""Seconds for which a rate seen in real traffic is not lowered by a lower one: traffic that was
limited by something else says only what a link can do at least."""

MARGIN = 0.8
"""Another address replaces the one in use only if a message takes at most this share of time."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds for which a failed address is tried last


class RateSource(Enum):
    """Where a rate comes from."""

    UNKNOWN = "unknown"
    PROBE = "probe"
    """A short measurement of its own."""
    TRAFFIC = "traffic"
    """What collectives saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionProfile:
    """One way from a node to another.  Zero means: not measured yet.

    >>> wifi = ConnectionProfile(latency=2_000_000, up=25_000_000, down=25_000_000)
    >>> wifi.latency / 1e6, wifi.up * 8 // 1_000_000
    (2.0, 200)
    """

    latency: int = 0
    """Nanoseconds that a short message takes, one way."""
    jitter: int = 0
    """Nanoseconds by which that varies."""
    measured_at: float = 0.0
    """When latency and jitter were measured, on the observer's clock."""
    up: int = 0
    """Bytes per second that the node can send to the other."""
    down: int = 0
    """Bytes per second that come back."""
    rated_at: float = 0.0
    rated_by: RateSource = RateSource.UNKNOWN
    address: Endpoint | None = None
    """Which of the other's addresses; None where that is not known."""
    interface: str = ""
    """Which of our own interfaces; empty where that is not known."""

    def __post_init__(self) -> None:
        """Refuse what no link can have."""
        if min(self.latency, self.jitter, self.up, self.down) < 0:
            msg = f"Latency, jitter and rates of a connection cannot be negative: {self}"
            raise ValueError(msg)

    @classmethod
    def from_round_trip(
        cls, seconds: float, now: float, *, jitter: float = 0.0, address: Endpoint | None = None
    ) -> ConnectionProfile:
        """What a heartbeat and its answer tell: half of the round trip is one way."""
        latency, deviation = (max(0, round(time * 5e8)) for time in (seconds, jitter))
        return cls(latency=max(1, latency), jitter=deviation, measured_at=now, address=address)

    @property
    def seconds_for_message(self) -> float:
        """How long a message of 1 MiB takes, as far as one can tell."""
        usual = CABLE_RATE if self.latency <= CABLE_LATENCY else RADIO_RATE
        return self.latency / 1e9 + MESSAGE / (self.up or usual)

    def updated(self, newer: ConnectionProfile) -> ConnectionProfile:
        """This, with what a newer measurement of the same way found."""
        found = self._rated(newer) if newer.up or newer.down else self
        if newer.latency:
            found = replace(
                found, latency=newer.latency, jitter=newer.jitter, measured_at=newer.measured_at
            )
        return replace(found, interface=newer.interface or self.interface)

    def _rated(self, newer: ConnectionProfile) -> ConnectionProfile:
        up, down = newer.up or self.up, newer.down or self.down
        if newer.rated_by is RateSource.TRAFFIC and newer.rated_at - self.rated_at < WINDOW:
            up, down = max(up, self.up), max(down, self.down)
            if (up, down) == (self.up, self.down):
                return self  # nothing new; the better figure keeps its age
        return replace(self, up=up, down=down, rated_at=newer.rated_at, rated_by=newer.rated_by)


@dataclass(frozen=True, slots=True)
class _Failures:
    count: int
    until: float  # tried last up to then


class Paths:
    """The ways from this node to one other, best first."""

    def __init__(self) -> None:
        self._named: tuple[Endpoint, ...] = ()
        self._failures: dict[Endpoint, _Failures] = {}
        self._in_use: Endpoint | None = None

    def copy(self) -> Paths:
        """The same, as it is now."""
        found = Paths()
        found._named, found._in_use = self._named, self._in_use
        found._failures = dict(self._failures)
        return found

    @property
    def named(self) -> tuple[Endpoint, ...]:
        """The addresses as the peer named them."""
        return self._named

    def name(self, addresses: Iterable[Endpoint]) -> None:
        """The peer tells its addresses, best first; what is no more is forgotten."""
        self._named = tuple(dict.fromkeys((host, port) for host, port in addresses))
        self._failures = {
            address: failures
            for address, failures in self._failures.items()
            if address in self._named
        }
        if self._in_use not in self._named:
            self._in_use = None

    def used(self, address: Endpoint) -> None:
        """A connection by this address is open."""
        self._failures.pop(address, None)
        if address in self._named:
            self._in_use = self._named[self._named.index(address)]

    def failed(self, address: Endpoint, now: float) -> None:
        """A connection by this address could not be made, or broke."""
        if address not in self._named:
            return
        count = self._failures[address].count + 1 if address in self._failures else 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count - 1, 10))
        self._failures[address] = _Failures(count, now + pause)
        if self._in_use == address:
            self._in_use = None

    def order(
        self, profiles: Mapping[Endpoint | None, ConnectionProfile], now: float
    ) -> tuple[Endpoint, ...]:
        """Which to try, one after the other."""
        ranked = sorted(self._named, key=lambda address: self._key(address, profiles, now))
        current = self._in_use
        if current is None:
            return tuple(ranked)
        best = ranked[0]
        if best in profiles and current in profiles:
            times = [profiles[address].seconds_for_message for address in (best, current)]
            if times[0] <= MARGIN * times[1]:
                return tuple(ranked)
        ranked.remove(current)
        return (current, *ranked)

    def _key(
        self,
        address: Endpoint,
        profiles: Mapping[Endpoint | None, ConnectionProfile],
        now: float,
    ) -> tuple[bool, float, int]:
        """Those that failed lately last, then by time, then as they were named."""
        failures = self._failures.get(address)
        avoided = failures is not None and now < failures.until <= now + LONGEST_PAUSE
        profile = profiles.get(address)
        seconds = float("inf") if profile is None else profile.seconds_for_message
        return avoided, seconds, self._named.index(address)


# --------------------------------------------------------------------------------------------------
# What a machine can do, as it tells the others: a typed, bounded record that travels as bytes.

PROFILE_LIMIT = 8192
"""Bytes that a profile takes at most; more is refused unread."""

_TEXT_LIMIT = 128  # characters
_ACCELERATORS = 16

_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_LIMIT)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Accelerator(msgspec.Struct, frozen=True, omit_defaults=True):
    """A processor beside the processor."""

    kind: _Text
    """The word that programs use for it: cuda, rocm, mps, xpu."""
    name: _Text = ""
    memory: _Bytes = 0
    """Bytes; 0 where not known or shared with the machine's own."""

    def __post_init__(self) -> None:
        """Refuse text that could play tricks on a terminal."""
        _refuse_unprintable(self.kind, self.name)


class Battery(msgspec.Struct, frozen=True, omit_defaults=True):
    """A machine that can be carried away."""

    percent: _Percent
    plugged: bool = False


class NodeProfile(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A machine, and the Python on it.  Zero and empty text mean: not known.

    >>> profile = NodeProfile(host="attic", cores=8, memory=16 << 30)
    >>> NodeProfile.from_bytes(profile.to_bytes()) == profile
    True
    >>> print(profile)
    attic: 8 cores, 16.0 GiB
    """

    host: _Text = ""
    system: _Text = ""
    """Operating system and its release."""
    machine: _Text = ""
    """Architecture, such as x86_64."""
    processor: _Text = ""
    """What it is sold as."""
    python: _Text = ""
    cores: _Count = 0
    """That run at once, as the operating system counts and this process may use them."""
    physical_cores: _Count = 0
    memory: _Bytes = 0
    available_memory: _Bytes = 0
    """When the profile was made."""
    accelerators: Annotated[tuple[Accelerator, ...], msgspec.Meta(max_length=_ACCELERATORS)] = ()
    battery: Battery | None = None
    """None on machines without one."""

    def __post_init__(self) -> None:
        """Refuse text that could play tricks on a terminal."""
        _refuse_unprintable(self.host, self.system, self.machine, self.processor, self.python)

    def to_bytes(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeProfile:
        """Read what a peer sent; anything odd is refused."""
        if len(data) > PROFILE_LIMIT:
            raise MalformedFrame(
                f"A node profile of {len(data)} bytes is too long: {PROFILE_LIMIT} is the limit",
                expected=PROFILE_LIMIT,
                got=len(data),
            )
        try:
            return decode_msgpack(data, cls)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(f"Invalid node profile: {error}") from None

    def __str__(self) -> str:
        """One line for people, with what is known."""
        parts = [
            f"{self.cores} core{'s' * (self.cores != 1)}" if self.cores else "",
            f"{self.memory / (1 << 30):.1f} GiB" if self.memory else "",
            *(accelerator.name or accelerator.kind for accelerator in self.accelerators),
            _charge(self.battery) if self.battery else "",
            self.system,
            f"Python {self.python}" if self.python else "",
        ]
        return f"{self.host or 'a machine'}: " + (", ".join(filter(None, parts)) or "nothing known")


def _charge(battery: Battery) -> str:
    return f"battery {battery.percent} %{' (plugged in)' if battery.plugged else ''}"


def _refuse_unprintable(*texts: str) -> None:
    if not all(text.isprintable() for text in texts):
        msg = "a node profile must consist of printable characters"
        raise ValueError(msg)


# --------------------------------------------------------------------------------------------------

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

    >>> from potluck._types import NodeId
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
        """A process is there, or still is; what is not told stays as it was known."""
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
        """A process is gone, with all its links.  We ourselves never are."""
        if node != self.me and node in self._graph:
            self._graph.remove_node(node)
            del self._paths[node]

    def prune(self, now: float, *, max_age: Seconds) -> tuple[ProcessId, ...]:
        """Remove processes not seen for ``max_age`` seconds; which ones."""
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
        """What is known of a process; KeyError for a stranger."""
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
        """Under which addresses to try to reach a process, fastest first; none for a stranger."""
        paths = self._paths.get(target)
        return () if paths is None else paths.order(self._ways(self.me, target), now)

    def used(self, target: ProcessId, address: Endpoint) -> None:
        """We are connected with a process by this address."""
        if target in self._paths:
            self._paths[target].used(address)

    def failed(self, target: ProcessId, address: Endpoint, now: float) -> None:
        """No process was reached by this address: others are tried first for a while."""
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
