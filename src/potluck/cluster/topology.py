"""The map of one node, for several threads and for the next run.

The control thread writes heartbeats and profiles, the thread of a collective what it measured, a
probe what it found.  Changes happen one at a time; a snapshot never changes, and costs nothing as
long as there is nothing new.  Figures of links are kept in a file when the node ends.
"""

from __future__ import annotations

import contextlib
import math
import platform
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from potluck import _platform, _process
from potluck import _time as node_clock
from potluck._decode import decode_json, printable
from potluck._types import LinkMatrix, NodeId, ProcessId, Seconds, View
from potluck.cluster.bandwidth import probe_links
from potluck.collective.executor import SEEN, UNMEASURED, LinkMemory, radio_turns
from potluck.errors import BackendUnavailable, DistributedError
from potluck.identity.private_files import (
    ensure_private_directory,
    exclusive_lock,
    potluck_home,
    read_private,
    replace_private,
)
from potluck.membership.topology import (
    Accelerator,
    Battery,
    ClusterTopology,
    ConnectionProfile,
    Endpoint,
    LinkSource,
    Medium,
    NodeInfo,
    NodeProfile,
    Paths,
)
from potluck.net.addresses import attachment, interfaces, is_loopback
from potluck.wire_messages import RankEndpoint

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.cluster.bandwidth import Bandwidth, ProbeLimits
    from potluck.cluster.control import ControlThread
    from potluck.discovery.records import DiscoveryConfig
    from potluck.membership.health import HealthSummary
    from potluck.schedule.reduce import Array


Result = TypeVar("Result")

STALE_AFTER = 120.0
"""Seconds after which a node of which nothing was heard is forgotten."""


class SharedTopology:
    """A :class:`ClusterTopology` that any thread may use.

    >>> from potluck._types import NodeId
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
        remembered: Mapping[NodeId, ConnectionProfile] = MappingProxyType({}),
    ) -> None:
        self._clock = clock
        self.began = clock()
        self._remembered = remembered
        self._lock = threading.Lock()
        self._topology = ClusterTopology(me, profile, now=clock())
        self._snapshot: ClusterTopology | None = None

    @property
    def me(self) -> ProcessId:
        """Whose map it is."""
        return self._topology.me

    def node(self, process: ProcessId) -> NodeInfo:
        """What is known of a process; KeyError for a stranger."""
        with self._lock:
            return self._topology.node(process)

    def update(self, change: Callable[[ClusterTopology], Result]) -> Result:
        """Change the topology; no reader sees it half done.  ``change`` must be quick."""
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
        loss: float = 0.0,
        address: Endpoint | None = None,
    ) -> None:
        """A peer that is known gave a sign of life, perhaps with a measured round trip."""
        now = self._clock()

        def change(topology: ClusterTopology) -> None:
            topology.seen(peer, now)
            if round_trip is not None:
                profile = ConnectionProfile.from_round_trip(
                    round_trip, now, jitter=jitter, loss=loss, address=address
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
        here: str = "",
        interface: str = "",
    ) -> None:
        """There is a connection to a peer, which has told what it is and where.

        It ends here at an address of ours, that of ``interface``.
        """
        now = self._clock()

        def change(topology: ClusterTopology) -> None:
            is_new = peer not in topology
            topology.add_node(peer, now=now, profile=profile, addresses=addresses)
            if is_new and peer.node != topology.me.node and peer.node in self._remembered:
                topology.add_connection(topology.me, peer, self._remembered[peer.node])
            if in_use is not None:
                is_local = in_use[0] == here or is_loopback(in_use[0])
                link = ConnectionProfile(interface=interface, is_local=is_local, address=in_use)
                if interface or is_local:
                    topology.add_connection(topology.me, peer, link)
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
                    loss=peer.loss,
                    address=(in_use or {}).get(peer.peer),
                )

    def rated(
        self,
        peer: ProcessId,
        found: Bandwidth,
        *,
        address: Endpoint | None = None,
        source: LinkSource = LinkSource.PROBE,
    ) -> None:
        """A probe measured the link to a peer."""
        now = self._clock()
        profile = ConnectionProfile(
            latency=found.latency,
            measured_at=now,
            measured_by=source if found.latency else LinkSource.UNKNOWN,
            up=found.up,
            down=found.down,
            rated_at=now,
            rated_by=source,
            address=address,
        )
        self.update(lambda topology: topology.add_connection(topology.me, peer, profile))

    def connection(self, peer: ProcessId) -> ConnectionProfile | None:
        """The link from this node to a peer."""
        with self._lock:
            return self._topology.connection(self._topology.me, peer)

    def learn(self, links: LinkMatrix, view: View) -> None:
        """Collectives measured the links of a view together."""
        now = self._clock()
        self.update(lambda topology: topology.learn(links, view, now))

    def prune(self, *, max_age: Seconds = STALE_AFTER) -> tuple[ProcessId, ...]:
        """Forget processes that were not heard for long; which ones."""
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


# --------------------------------------------------------------------------------------------------
# What this machine is: its profile, found out in a few milliseconds and never with an error.
#
# Whatever the operating system does not tell stays unknown.  Accelerators are found without
# importing a framework: by what its driver shows, and through torch only where the program has
# already put it to use.  Inside a container the limits of the container count, not the machine
# around it.

Found = TypeVar("Found")

_TEXT = 128  # characters of a text in a profile
_MOST = 16  # accelerators in a profile
_CPU_INFO = 4096  # bytes of /proc/cpuinfo that hold the first processor


def local_profile(looking: DiscoveryConfig | None = None, *, root: Path = Path("/")) -> NodeProfile:
    """The profile of this machine, which is reached as ``looking`` says.

    ``root`` is where its files are.
    """
    return NodeProfile(
        host=_clean(_try(socket.gethostname, "")),
        system=_clean(_try(_system, "")),
        machine=_clean(_try(platform.machine, "")),
        processor=_clean(_try(lambda: _processor(root), "")),
        python=_clean(_try(platform.python_version, "")),
        cores=_try(lambda: _cores(root), 0),
        physical_cores=_try(_physical_cores, 0),
        memory=_try(lambda: _memory(root)[0], 0),
        available_memory=_try(lambda: _memory(root)[1], 0),
        accelerators=_try(lambda: _accelerators(root), ()),
        battery=_try(_battery, None),
        medium=_try(lambda: _medium(looking, root), None),
    )


def _try(look: Callable[[], Found], otherwise: Found) -> Found:
    """What there is to see, or what to assume where there is nothing."""
    try:
        return look()
    except Exception:  # noqa: BLE001 - drivers and their files fail in every way there is
        return otherwise


def _clean(text: str) -> str:
    """Printable and bounded, as a profile wants it."""
    return " ".join(printable(text).split())[:_TEXT]


def _system() -> str:
    return f"{platform.system()} {platform.release()}"


def _processor(root: Path) -> str:
    """What the processor is sold as."""
    info = root / "proc/cpuinfo"
    if info.exists():
        with info.open("rb") as file:
            head = file.read(_CPU_INFO).decode("utf-8", "replace")
        for line in head.splitlines():
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "Model", "Hardware"}:
                return value
    return "Apple silicon" if _is_apple_silicon() else ""


def _is_apple_silicon() -> bool:
    return _platform.IS_MACOS and platform.machine() == "arm64"


def _cores(root: Path) -> int:
    """Those that this process may use."""
    count = _platform.usable_cores()
    quota = _try(lambda: _container_cores(root), 0)
    return min(count, quota) if quota else count


def _container_cores(root: Path) -> int:
    """How many cores a container may keep busy; 0 without a limit."""
    quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    return 0 if quota == "max" else math.ceil(int(quota) / int(period))


def _physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or 0


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in all, and bytes that are free."""
    import psutil

    state = psutil.virtual_memory()
    limit = _try(lambda: int((root / "sys/fs/cgroup/memory.max").read_text()), state.total)
    return min(state.total, limit), min(state.available, limit)


def _battery() -> Battery | None:
    import psutil

    state = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if state is None:
        return None
    return Battery(min(100, max(0, round(state.percent))), plugged=bool(state.power_plugged))


def _medium(looking: DiscoveryConfig | None, root: Path) -> Medium | None:
    """What connects this machine to the others."""
    virtual, only = (looking.virtual, looking.interfaces) if looking else (False, ())
    found = attachment(virtual=virtual, only=only, root=root)
    return found and Medium("wireless" if found.is_wireless else "wired", *found.air)


def _accelerators(root: Path) -> tuple[Accelerator, ...]:
    """What the drivers show; from torch also how much memory, if it is in use anyway."""
    nothing: list[Accelerator] = []
    found = _try(_from_torch, nothing)
    if not found:
        found = _try(lambda: _from_nvidia(root), nothing) + _try(lambda: _from_amd(root), nothing)
    if not found and _is_apple_silicon():
        found = [Accelerator("mps", "Apple silicon")]
    return tuple(found[:_MOST])


def _from_torch() -> list[Accelerator]:
    """Only where CUDA has been started: starting it takes seconds and memory."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    kind = "rocm" if torch.version.hip else "cuda"
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return [Accelerator(kind, _clean(each.name), int(each.total_memory)) for each in devices]


def _from_nvidia(root: Path) -> list[Accelerator]:
    found = []
    for device in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = device.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
        found.append(Accelerator("cuda", _clean(names[0] if names else "")))
    return found


def _from_amd(root: Path) -> list[Accelerator]:
    found = []
    for device in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        words = dict(line.split(maxsplit=1) for line in device.read_text().splitlines())
        if int(words.get("simd_count", "0")):  # a node without is a processor
            name = device.with_name("name").read_text(encoding="utf-8", errors="replace")
            found.append(Accelerator("rocm", _clean(name)))
    return found


# --------------------------------------------------------------------------------------------------
# The map of a running node: what connections, heartbeats, probes and collectives know.


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """A process to which there is a connection."""

    process: ProcessId
    profile: NodeProfile | None
    in_use: Endpoint
    """The address of the connection."""
    addresses: Sequence[Endpoint]
    """All it is known to have, best first."""
    here: str = ""
    """Our own end of the connection: an address of ours."""


@dataclass(frozen=True, slots=True)
class TopologyFacts:
    """What the control thread knows at one moment."""

    acquaintances: Sequence[ConnectedPeer]
    health: HealthSummary


def collect_facts(control: ControlThread) -> TopologyFacts:
    """What a control thread knows; on that thread."""
    links = control.links
    return TopologyFacts(
        [
            ConnectedPeer(
                connection.card.process,
                connection.profile,
                connection.address,
                links.addresses_of(connection.card.process),
                connection.here,
            )
            for connection in links.opened_connections
        ],
        control.core.health.summary(node_clock.now()),
    )


class TopologyTracker:
    """Keeps the map of one node up to date; any thread."""

    def __init__(
        self,
        me: ProcessId,
        collect: Callable[[], TopologyFacts],
        profile: NodeProfile | None = None,
        store: LinkStore | None = None,
    ) -> None:
        self._collect = collect
        self._store = store
        self._interfaces: dict[str, str] = {}
        self._connected: dict[ProcessId, tuple[Endpoint, str]] = {}
        remembered = {} if store is None else store.load(node_clock.now())
        self.shared = SharedTopology(me, profile or local_profile(), remembered=remembered)

    def draw(self) -> SharedTopology:
        """The map, with what is known now; as it was at the end where the node has ended."""
        with contextlib.suppress(BackendUnavailable):
            self.observe(self._collect())
        return self.shared

    def observe(self, facts: TopologyFacts) -> None:
        """Write down what the control thread knows."""
        for each in facts.acquaintances:
            way = each.in_use, each.here
            if self._connected.get(each.process, way) != way:  # such as Wi-Fi instead of a cable
                self.shared.update(lambda topology, who=each.process: topology.forget_figures(who))  # type: ignore[misc]
            self.shared.introduce(
                each.process,
                profile=each.profile,
                addresses=each.addresses,
                in_use=each.in_use,
                here=each.here,
                interface=self._interface_of(each.here),
            )
        self._connected |= {each.process: (each.in_use, each.here) for each in facts.acquaintances}
        in_use = {each.process: each.in_use for each in facts.acquaintances}
        self.shared.observe(facts.health, in_use)
        self.shared.prune()

    def _interface_of(self, host: str) -> str:
        """The name of the interface with an address of ours; empty where it is not found."""
        if host and host not in self._interfaces:
            found = {at: each.name for each in interfaces(virtual=True) for at in each.hosts}
            self._interfaces |= {"": "", host: "", **found}
        return self._interfaces.get(host, "")

    def is_rated(self, process: ProcessId) -> bool:
        """Whether the link to a process was measured not long ago."""
        known = self.shared.connection(process)
        return known is not None and known.is_fresh(node_clock.now())

    def close(self) -> None:
        """Keep what is known of the links for the next run."""
        if self._store is not None:
            with contextlib.suppress(DistributedError, OSError):  # then the next run measures anew
                self._store.save(self.shared.snapshot(), node_clock.now())


class ViewLinks:
    """What the map says of the links of one member of a view, by rank."""

    def __init__(self, topology: SharedTopology, view: View) -> None:
        self._topology = topology
        self._view = view

    @property
    def memory(self) -> LinkMemory:
        """The same for the one who makes surveys."""
        return LinkMemory(self.air, self.known, self.measured, self.agreed)

    def air(self) -> tuple[int, int]:
        """By which radio this machine is reached."""
        profile = self._topology.node(self._topology.me).profile
        return (0, 0) if profile is None else profile.air

    def known(self) -> Array | None:
        """What a survey would see of all other ranks; None unless all of it is fresh.

        Figures of an earlier run do not count: the machines may be elsewhere now.
        """
        now, members = node_clock.now(), self._view.members
        air = self._topology.snapshot().air(members) or (0,) * len(members)
        here = members.index(self._topology.me)
        turns = {frozenset(pair) for pair in radio_turns(air)}
        row = np.zeros((SEEN, len(members)), np.int64)
        for rank, member in enumerate(members):
            if rank == here:
                continue
            link = self._topology.connection(member)
            # Of a rank on a radio one link says how fast that is.
            is_needed = not (air[here] or air[rank]) or frozenset((here, rank)) in turns
            if link is None or not link.is_fresh(now, rated=is_needed):
                return None
            if link.measured_at < self._topology.began or (
                is_needed and not link.is_local and link.rated_at < self._topology.began
            ):
                return None
            rate = link.down if is_needed else UNMEASURED
            row[:, rank] = 0 if link.is_local else rate, link.latency, link.is_local
        return row

    def measured(self, row: Array) -> None:
        """Collectives have measured the links of this rank."""
        now, me = node_clock.now(), self._topology.me

        def change(topology: ClusterTopology) -> None:
            for rank, member in enumerate(self._view.members):
                rate = max(0, int(row[0, rank]))
                topology.add_node(member, now=now)
                found = ConnectionProfile(
                    latency=int(row[1, rank]),
                    measured_at=now,
                    measured_by=LinkSource.COLLECTIVES,
                    down=rate,
                    rated_at=now if rate else 0.0,
                    rated_by=LinkSource.COLLECTIVES if rate else LinkSource.UNKNOWN,
                    is_local=bool(row[2, rank]),
                )
                topology.add_connection(me, member, found)

        self._topology.update(change)

    def agreed(self, links: LinkMatrix) -> None:
        """The ranks have agreed on their links."""
        self._topology.learn(links, self._view)


def measure_links(
    backend: Backend,
    topology: SharedTopology,
    view: View,
    *,
    limits: ProbeLimits | None = None,
    source: LinkSource = LinkSource.PROBE,
) -> dict[int, Bandwidth]:
    """Probe the links of all members of a view, who must do so together; by rank."""
    found = probe_links(backend, limits=limits)
    for rank, bandwidth in found.items():
        topology.rated(view.members[rank], bandwidth, source=source)
    return found


# --------------------------------------------------------------------------------------------------
# What is known of links, kept for the next run, whatever job it is.
#
# ::
#
#     ~/.potluck/links/<tag of the namespace>     at most 64 machines, newest first, for 30 days

MAX_KEPT = 64
LINKS_MAX_SIZE = 64 << 10  # bytes of the file; 64 machines take about 16 KiB
KEPT_FOR = 30 * 86400.0  # seconds
STORE_PATIENCE = 2.0  # seconds to wait for another process that writes

_Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_When = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]


class KeptLink(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The link to one machine; times in seconds since 1970."""

    node: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{32}$")]
    latency: _Whole = 0
    jitter: _Whole = 0
    measured: _When = 0.0
    measured_by: LinkSource = LinkSource.UNKNOWN
    up: _Whole = 0
    down: _Whole = 0
    rated: _When = 0.0
    rated_by: LinkSource = LinkSource.UNKNOWN

    def profile(self, now: float, today: float) -> ConnectionProfile:
        """The same by the clock of a node: ``now`` there is ``today`` here."""
        return ConnectionProfile(
            latency=self.latency,
            jitter=self.jitter,
            measured_at=now - max(0.0, today - self.measured),
            measured_by=self.measured_by,
            up=self.up,
            down=self.down,
            rated_at=now - max(0.0, today - self.rated),
            rated_by=self.rated_by,
        )

    @classmethod
    def of(cls, node: NodeId, link: ConnectionProfile, now: float, today: float) -> KeptLink:
        """What is worth keeping of a link."""
        timing: dict[str, Any] = {}
        if link.measured_by not in {LinkSource.UNKNOWN, LinkSource.HEARTBEAT}:
            measured = max(0.0, today - (now - link.measured_at))
            timing = {"latency": link.latency, "measured": measured}
            timing |= {"jitter": link.jitter, "measured_by": link.measured_by}
        return cls(
            node=node,
            **timing,
            up=link.up,
            down=link.down,
            rated=max(0.0, today - (now - link.rated_at)) if link.up or link.down else 0.0,
            rated_by=link.rated_by,
        )


class LinkStore:
    """The file in which one namespace's links are kept."""

    def __init__(
        self, tag: str, home: Path | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = (home or potluck_home()) / "links" / tag
        self._clock = clock

    def load(self, now: float) -> dict[NodeId, ConnectionProfile]:
        """What was kept, by machine; nothing where that cannot be read."""
        today = self._clock()
        return {NodeId(each.node): each.profile(now, today) for each in self._read()}

    def _read(self) -> list[KeptLink]:
        oldest = self._clock() - KEPT_FOR
        try:
            text = read_private(self._path, limit=LINKS_MAX_SIZE + 1) or b"[]"
            kept = decode_json(text, list[KeptLink]) if len(text) <= LINKS_MAX_SIZE else []
        except (DistributedError, OSError, msgspec.DecodeError, UnicodeDecodeError):
            return []
        return [each for each in kept if max(each.rated, each.measured) >= oldest]

    def save(self, topology: ClusterTopology, now: float) -> None:
        """Keep the links of a node to other machines; newer figures in the file stay."""
        today = self._clock()
        links = {}
        for peer in topology.remote_nodes:
            link = topology.connection(topology.me, peer)
            if link is not None and not link.is_local and (link.up or link.down):
                links[peer.node] = link
        if not links:
            return
        ensure_private_directory(self._path.parent)
        with exclusive_lock(self._path.parent / ".lock", patience=STORE_PATIENCE):
            merged = self.load(now)
            for node, link in links.items():
                merged[node] = merged[node].updated(link) if node in merged else link
            kept = [KeptLink.of(node, link, now, today) for node, link in merged.items()]
            kept.sort(key=lambda each: -max(each.rated, each.measured))
            replace_private(self._path, msgspec.json.encode(kept[:MAX_KEPT]))


# --------------------------------------------------------------------------------------------------
# Which of a peer's addresses is fastest: found out by knocking at all of them at once.
#
# A machine with a cable and a radio has an address for each, and nothing in the addresses says
# which is which.  How long a connection takes to open does: a cable answers in a fraction of a
# millisecond. It is measured once in a while for each address, before the connections of a view are
# opened; when one fails the dialler continues with the next.

WITHIN = 0.1
"""Seconds for all knocks; an address that answers later is slower than any usable path."""

KNOCKS = 2
"""At each address; the quicker one counts: the first may have had to ask for a hardware address."""

REMEMBERED = 60.0
"""Seconds for which a measurement holds, also that there was no answer."""

MOST = 512
"""Addresses of which the times are kept."""


class AddressRanking:
    """Orders the addresses of peers, fastest first; any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[Sequence[Endpoint]], dict[Endpoint, float]] | None = None,
    ) -> None:
        self._clock = clock
        self._knock = measure or knock
        self._lock = threading.Lock()
        self._known: dict[Endpoint, tuple[float | None, float]] = {}  # seconds, and when measured

    def sorted(self, peers: Iterable[RankEndpoint]) -> list[RankEndpoint]:
        """The same peers, each with its fastest address first; takes a tenth of a second at most.

        A peer on this machine, or with a single address, is left as it is.
        """
        peers = list(peers)
        self._measure([_addresses(peer) for peer in peers])
        return [structs.replace(peer, hosts=self._order(peer)) for peer in peers]

    def _measure(self, choices: Sequence[Sequence[Endpoint]]) -> None:
        now = self._clock()
        with self._lock:
            wanted = [
                address
                for choice in choices
                for address in choice
                if address not in self._known or now - self._known[address][1] > REMEMBERED
            ]
        if not wanted:
            return
        found = self._knock(wanted)
        with self._lock:
            self._known |= {address: (found.get(address), now) for address in wanted}
            while len(self._known) > MOST:
                del self._known[next(iter(self._known))]

    def _order(self, peer: RankEndpoint) -> list[str]:
        addresses = _addresses(peer)
        with self._lock:
            times = {each: self._known[each][0] for each in addresses if each in self._known}
        if not times:
            return peer.hosts
        paths = Paths()
        paths.name(addresses)
        paths.used(addresses[0])  # where it was reached before: another must be clearly better
        for address, seconds in times.items():
            if seconds is None:
                paths.failed(address, 0.0)
        profiles: dict[Endpoint | None, ConnectionProfile] = {
            address: ConnectionProfile.from_round_trip(seconds, 0.0, address=address)
            for address, seconds in times.items()
            if seconds is not None
        }
        return [host for host, _ in paths.order(profiles, 0.0)]


def _addresses(peer: RankEndpoint) -> list[Endpoint]:
    """Those among which there is a choice."""
    if len(peer.hosts) < 2 or is_loopback(peer.hosts[0]):  # noqa: PLR2004 - there must be a choice
        return []
    return [(host, peer.port) for host in peer.hosts]


def knock(addresses: Sequence[Endpoint], *, within: float = WITHIN) -> dict[Endpoint, float]:
    """Seconds until a connection to each address was open; those that were not are left out."""
    deadline = time.monotonic() + within
    found: dict[Endpoint, float] = {}
    for _ in range(KNOCKS):
        for address, seconds in _knock_once(list(dict.fromkeys(addresses)), deadline):
            found[address] = min(seconds, found.get(address, seconds))
    return found


def _knock_once(addresses: Sequence[Endpoint], deadline: float) -> list[tuple[Endpoint, float]]:
    found = []
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        _process.track(selector)
        for address in addresses:
            with contextlib.suppress(OSError):  # no number, or no way there from here
                sock = stack.enter_context(_connecting(address))
                selector.register(sock, selectors.EVENT_WRITE, (address, time.monotonic()))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                now, (address, begun) = time.monotonic(), key.data
                selector.unregister(key.fileobj)
                sock = key.fileobj  # type: ignore[assignment]
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.append((address, now - begun))
    return found


def _connecting(address: Endpoint) -> socket.socket:
    """A socket on its way to an address given in numbers."""
    family, kind, proto, _, target = socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    sock = socket.socket(family, kind, proto)
    _process.track(sock)
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock
