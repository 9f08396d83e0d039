"""The map of a cluster as one node sees it: machines, the links between them, what both can do.

Processes are known by their ids and not by a place in a list, so removing one changes nothing for
the others.  Machines tell their profiles; heartbeats, probes, collectives, ``potluck bench`` and
``potluck doctor`` measure links.  Each figure says when it was measured and by what, so a stale one
loses to a fresh one.  Time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Literal, TypeAlias

import msgspec

from potluck._decode import decode_msgpack
from potluck._types import LinkMatrix, ProcessId, Seconds, View, in_seconds, sharing_air
from potluck.errors import MalformedFrame

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


FRESH = 600.0
"""Seconds for which a figure is as good as a new one; afterwards a link is measured again."""


class LinkSource(Enum):
    """What measured a figure of a link."""

    UNKNOWN = "unknown"
    HEARTBEAT = "heartbeat"
    """The answer to a heartbeat, which waits for threads as well: good for a latency alone."""
    PROBE = "probe"
    """A short measurement in a quiet moment."""
    COLLECTIVES = "collectives"
    """The survey before a collective."""
    BENCH = "bench"
    DOCTOR = "doctor"


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
    loss: float = 0.0
    """Share of the heartbeats that did not come in time, 0 to 1."""
    measured_at: float = 0.0
    """When latency, jitter and loss were measured, on the observer's clock."""
    measured_by: LinkSource = LinkSource.UNKNOWN
    up: int = 0
    """Bytes per second that the node can send to the other."""
    down: int = 0
    """Bytes per second that come back."""
    rated_at: float = 0.0
    """When the rates were measured."""
    rated_by: LinkSource = LinkSource.UNKNOWN
    is_local: bool = False
    """Both ends are on one machine: no link is between them that could be slow."""
    address: Endpoint | None = None
    """Which of the other's addresses; None where that is not known."""
    interface: str = ""
    """Which of our own interfaces; empty where that is not known."""

    def __post_init__(self) -> None:
        """Refuse what no link can have."""
        if min(self.latency, self.jitter, self.loss, self.up, self.down) < 0:
            msg = f"Latency, jitter, loss and rates of a connection cannot be negative: {self}"
            raise ValueError(msg)

    @classmethod
    def from_round_trip(
        cls,
        seconds: float,
        now: float,
        *,
        jitter: float = 0.0,
        loss: float = 0.0,
        address: Endpoint | None = None,
    ) -> ConnectionProfile:
        """What a heartbeat and its answer tell: half of the round trip is one way."""
        latency, deviation = (max(0, round(time * 5e8)) for time in (seconds, jitter))
        return cls(
            latency=max(1, latency),
            jitter=deviation,
            loss=loss,
            measured_at=now,
            measured_by=LinkSource.HEARTBEAT,
            address=address,
        )

    @property
    def seconds_for_message(self) -> float:
        """How long a message of 1 MiB takes, as far as one can tell."""
        usual = CABLE_RATE if self.latency <= CABLE_LATENCY else RADIO_RATE
        return self.latency / 1e9 + MESSAGE / (self.up or usual)

    def updated(self, newer: ConnectionProfile) -> ConnectionProfile:
        """This, with what a newer measurement of the same way found."""
        found = self._rated(newer) if newer.up or newer.down else self
        is_rough = newer.measured_by is LinkSource.HEARTBEAT is not self.measured_by
        ours_until = self.measured_at + (FRESH if is_rough and self.latency else 0.0)
        if newer.latency and newer.measured_at >= ours_until:
            found = replace(
                found,
                latency=newer.latency,
                jitter=newer.jitter,
                loss=newer.loss,
                measured_at=newer.measured_at,
                measured_by=newer.measured_by,
            )
        return replace(
            found,
            interface=newer.interface or self.interface,
            is_local=newer.is_local or self.is_local,
        )

    def _rated(self, newer: ConnectionProfile) -> ConnectionProfile:
        if newer.rated_at < self.rated_at:
            return self
        up, down = newer.up or self.up, newer.down or self.down
        if newer.rated_by is LinkSource.COLLECTIVES and newer.rated_at - self.rated_at < WINDOW:
            up, down = max(up, self.up), max(down, self.down)
            if (up, down) == (self.up, self.down):
                return self  # nothing new; the better figure keeps its age
        return replace(self, up=up, down=down, rated_at=newer.rated_at, rated_by=newer.rated_by)

    def is_fresh(self, now: float, *, rated: bool = True) -> bool:
        """Whether the latency and the rate from there, unless not ``rated``, count as new.

        A latency that a heartbeat measured does not.
        """
        is_timed = bool(self.latency) and self.measured_by is not LinkSource.HEARTBEAT
        is_rated = self.is_local or not rated or bool(self.down and _is_recent(self.rated_at, now))
        return is_timed and is_rated and _is_recent(self.measured_at, now)


def _is_recent(moment: float, now: float) -> bool:
    return 0 <= now - moment < FRESH


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
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
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


class Medium(msgspec.Struct, frozen=True, omit_defaults=True):
    """What connects a machine to the others."""

    kind: Literal["wired", "wireless"] = "wired"
    cell: _Number = 0
    """Stands for the access point; 0 where the system does not tell."""
    network: _Number = 0
    """Stands for the network of its address: without a cell, who shares it shares the air."""


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
    medium: Medium | None = None
    """By what others reach it; None where that is not known."""

    @property
    def is_wireless(self) -> bool:
        """Whether it is known to be on Wi-Fi."""
        return self.medium is not None and self.medium.kind == "wireless"

    @property
    def air(self) -> tuple[int, int]:
        """Its cell and its network, where it is on Wi-Fi; zeros otherwise."""
        if self.medium is None or not self.is_wireless:
            return 0, 0
        return self.medium.cell, self.medium.network

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
            "Wi-Fi" if self.is_wireless else "",
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


_Ways: TypeAlias = Mapping[Endpoint | None, ConnectionProfile]
"""The ways from one process to another, by the address of the other."""


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
        self.me = me
        self._nodes: dict[ProcessId, NodeInfo] = {}
        self._links: dict[tuple[ProcessId, ProcessId], _Ways] = {}
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
        known = self._nodes.get(node)
        if known is None:
            self._paths[node] = Paths()
            known = NodeInfo(node, None, (), now, 0, 0, 0.0)
        if addresses is not None:
            self._paths[node].name(addresses)
        self._nodes[node] = replace(
            known,
            profile=known.profile if profile is None else profile,
            addresses=self._paths[node].named,
            last_seen=max(now, known.last_seen),
        )

    def seen(self, node: ProcessId, now: float) -> None:
        """A sign of life of a node that is known."""
        if node in self._nodes:
            self.add_node(node, now=now)

    def remove_node(self, node: ProcessId) -> None:
        """A process is gone, with all its links.  We ourselves never are."""
        if node != self.me and node in self._nodes:
            del self._nodes[node], self._paths[node]
            self._links = {ends: ways for ends, ways in self._links.items() if node not in ends}

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
        return tuple(sorted(self._nodes))

    @property
    def remote_nodes(self) -> tuple[ProcessId, ...]:
        """Everybody but ourselves."""
        return tuple(node for node in self.nodes if node != self.me)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[ProcessId]:
        return iter(self.nodes)

    def node(self, node: ProcessId) -> NodeInfo:
        """What is known of a process; KeyError for a stranger."""
        return self._nodes[node]

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

    def air(self, members: Iterable[ProcessId]) -> tuple[int, ...]:
        """Which of these share a radio: equal numbers from 1 on; 0 for those on a cable."""
        infos = (self._nodes.get(member) for member in members)
        profiles = [info.profile if info else None for info in infos]
        return sharing_air([profile.air if profile else (0, 0) for profile in profiles])

    # --- the links ---

    def add_connection(
        self, source: ProcessId, target: ProcessId, profile: ConnectionProfile
    ) -> None:
        """A link between two known nodes was measured; strangers' links are not kept."""
        if source == target or source not in self._nodes or target not in self._nodes:
            return
        ways = self._ways(source, target)
        known = ways.get(profile.address)
        newer = profile if known is None else known.updated(profile)
        self._links[source, target] = {**ways, profile.address: newer}

    def forget_figures(self, target: ProcessId) -> None:
        """What was measured of the link to a process was measured on another way."""
        ways = self._ways(self.me, target)
        self._links[self.me, target] = {at: way for at, way in ways.items() if at is not None}

    def _ways(self, source: ProcessId, target: ProcessId) -> _Ways:
        return self._links.get((source, target), {})

    def connection(self, source: ProcessId, target: ProcessId) -> ConnectionProfile | None:
        """The link from one to another: its newest rates, and the best of its fresh latencies.

        A latency that collectives or a probe measured goes before those of heartbeats.
        """
        ways = list(self._ways(source, target).values())
        if not ways:
            return None
        newest = max(way.measured_at for way in ways)
        fresh = [way for way in ways if way.latency and newest - way.measured_at < FRESH]
        exact = [way for way in fresh if way.address is None]
        timed = min(exact or fresh or ways, key=lambda way: way.seconds_for_message)
        rated = max(ways, key=lambda way: (bool(way.up or way.down), way.rated_at))
        beats = [way for way in ways if way.measured_by is LinkSource.HEARTBEAT]
        return replace(
            timed,
            up=rated.up,
            down=rated.down,
            rated_at=rated.rated_at,
            rated_by=rated.rated_by,
            loss=max(beats, key=lambda way: way.measured_at).loss if beats else 0.0,
            is_local=any(way.is_local for way in ways),
            interface=next((way.interface for way in ways if way.interface), ""),
        )

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
            self._nodes[member] = replace(info, up=up, down=down, rated_at=now)
        machines = links.machines or range(links.size)
        for here, source, times in zip(machines, view.members, links.latency, strict=True):
            for there, target, time in zip(machines, view.members, times, strict=True):
                if time:
                    measured = ConnectionProfile(
                        latency=time,
                        measured_at=now,
                        measured_by=LinkSource.COLLECTIVES,
                        is_local=here == there,
                    )
                    self.add_connection(source, target, measured)

    def link_matrix(self, view: View) -> LinkMatrix:
        """What is known of the links of a view, in rank order and whole numbers."""
        members = view.members
        return LinkMatrix(
            tuple(self._rate(member, members, sending=True) for member in members),
            tuple(self._rate(member, members, sending=False) for member in members),
            tuple(tuple(self._latency(a, b) for b in members) for a in members),
            self._sharing(members),
            self.air(members),
        )

    def _sharing(self, members: tuple[ProcessId, ...]) -> tuple[int, ...]:
        """For each the lowest that is known to share its machine; empty if none is."""
        found: list[int] = []
        for rank, member in enumerate(members):
            together = (low for low in range(rank) if self._is_local(members[low], member))
            found.append(next((found[low] for low in together), rank))
        return tuple(found) if len(set(found)) < len(found) else ()

    def _is_local(self, one: ProcessId, other: ProcessId) -> bool:
        ways = (*self._ways(one, other).values(), *self._ways(other, one).values())
        return any(way.is_local for way in ways)

    def _rate(self, node: ProcessId, members: tuple[ProcessId, ...], *, sending: bool) -> int:
        """What all agreed on, or the best rate at which it was seen to send or receive since."""
        info = self._nodes.get(node)
        if info is None:
            return 0
        agreed = info.up if sending else info.down
        # What passes within a machine shows nothing of its cable.
        away = [other for other in members if not self._is_local(node, other)]
        others = away if {*away} - {node} else members
        there = [way for other in others for way in self._ways(node, other).values()]
        back = [way for other in others for way in self._ways(other, node).values()]
        seen = [(way.up if sending else way.down, way.rated_at) for way in there]
        seen += [(way.down if sending else way.up, way.rated_at) for way in back]
        newer = [rate for rate, time in seen if rate and (not agreed or time > info.rated_at)]
        return min(max(newer, default=agreed), _LARGEST_RATE)

    def _latency(self, source: ProcessId, target: ProcessId) -> int:
        ways = self.connection(source, target) or self.connection(target, source)
        return 0 if ways is None else min(ways.latency, _LARGEST_LATENCY)

    def copy(self) -> ClusterTopology:
        """The same, as it is now; later changes of the one do not show in the other."""
        found = ClusterTopology(self.me)
        found._nodes, found._links = self._nodes.copy(), self._links.copy()
        found._paths = {node: paths.copy() for node, paths in self._paths.items()}
        return found
