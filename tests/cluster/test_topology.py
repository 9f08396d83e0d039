"""The topology of a running cluster: put together from connections, heartbeats and collectives."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest

from potluck import (
    Cluster,
    ConnectionProfile,
    HealthStatus,
    HealthSummary,
    NodeProfile,
    SharedTopology,
    _platform,
)
from potluck import _time as node_clock
from potluck._types import LinkMatrix, NodeId, ProcessId, View
from potluck.cluster.bandwidth import Bandwidth
from potluck.cluster.topology import (
    AddressRanking,
    ConnectedPeer,
    LinkStore,
    TopologyFacts,
    TopologyTracker,
    ViewLinks,
    knock,
    local_profile,
)
from potluck.collective.executor import UNMEASURED
from potluck.membership.health import PeerHealth
from potluck.membership.topology import Accelerator, Battery, Endpoint, LinkSource, Medium
from potluck.wire_messages import RankEndpoint
from support.clusters import clusters, everywhere
from support.health import process
from support.threads import eventually, together

TOPOLOGY_A, TOPOLOGY_B, TOPOLOGY_C = map(process, "abc")
TOPOLOGY_ROOM, HALL = ("10.0.0.2", 5000), ("10.0.1.2", 5000)


def health(status: HealthStatus, round_trip: float | None) -> HealthSummary:
    """B is well or not; C is somebody without a connection."""
    told = [(TOPOLOGY_B, status, round_trip), (TOPOLOGY_C, HealthStatus.HEALTHY, 0.1)]
    peers = [
        PeerHealth(who, "B", how, "because", 0.0, 1.0, trip, trip and trip / 10, 0.0)
        for who, how, trip in told
    ]
    return HealthSummary(tuple(peers), 0.0)


def test_facts_become_a_topology() -> None:
    """Profiles and addresses as told, latencies by the address in use."""
    met = ConnectedPeer(TOPOLOGY_B, NodeProfile(host="attic"), HALL, [TOPOLOGY_ROOM, HALL])
    facts = [TopologyFacts([met], health(HealthStatus.HEALTHY, None))]
    topology_tracker = TopologyTracker(TOPOLOGY_A, lambda: facts[0])
    topology = topology_tracker.draw()
    assert list(topology) == [TOPOLOGY_A, TOPOLOGY_B]
    assert topology.snapshot().node(TOPOLOGY_A).profile is not None
    assert topology.snapshot().node(TOPOLOGY_B).profile == NodeProfile(host="attic")
    assert topology.addresses(TOPOLOGY_B) == (HALL, TOPOLOGY_ROOM)
    assert topology.snapshot().connection(TOPOLOGY_A, TOPOLOGY_B) is None
    facts[0] = TopologyFacts([met], health(HealthStatus.SUSPECT, 0.002))
    assert topology_tracker.draw().snapshot().connection(TOPOLOGY_A, TOPOLOGY_B) is None
    facts[0] = TopologyFacts([met], health(HealthStatus.DEGRADED, 0.002))
    assert topology_tracker.draw() is topology
    found = topology.snapshot().connection(TOPOLOGY_A, TOPOLOGY_B)
    assert found is not None
    assert (found.latency, found.jitter, found.address) == (1_000_000, 100_000, HALL)


def test_a_cluster_knows_its_machines_and_links() -> None:
    """What peers tell of themselves, what heartbeats take, what collectives have measured."""
    with clusters(2) as nodes:
        here, there = nodes
        before = here.topology
        assert before.link_matrix(_view(here)).up == (0, 0)
        told = before.snapshot().node(there.process)
        assert told.profile is not None
        assert told.profile.cores == local_profile().cores
        assert told.addresses[0][1] == before.addresses(there.process)[0][1]
        ends = here.process, there.process
        eventually(lambda: here.topology.snapshot().connection(*ends) is not None)
        everywhere(nodes, lambda node: node.all_reduce(np.ones(1 << 16, "f4")))
        first, second = (node.topology.link_matrix(_view(here)) for node in nodes)
        assert first == second
        assert min(first.up) > 0
        assert here.topology is before
        assert here.topology.link_matrix(_view(here)) == first


def test_the_links_of_a_cluster_can_be_measured_at_will() -> None:
    """All ranks together; the results are in the topology of each."""
    with clusters(2) as nodes:
        found = everywhere(nodes, lambda node: node.measure_links())
        first, second = (topology.link_matrix(_view(nodes[0])) for topology in found)
        assert (first.up, first.down) == (second.up, second.down)
        assert min(first.up + first.down) > 0
        best = found[0].snapshot().connection(nodes[0].process, nodes[1].process)
        assert best is not None
        assert best.rated_by is LinkSource.PROBE


def _view(node: Cluster) -> View:
    view = node.view
    assert view is not None
    return view


# --------------------------------------------------------------------------------------------------
# Which address of a peer is tried first.


def test_only_who_answers_has_a_time() -> None:
    """Not a closed port, nor what is no address; the same address is knocked at once."""
    with (
        socket.create_server(("127.0.0.1", 0)) as open_,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        here, gone = open_.getsockname(), closed.getsockname()
        closed.close()
        found = knock([here, here, gone, ("no number", 80)], within=5)
        assert list(found) == [here]
        assert 0 < found[here] < 5


def test_nobody_to_knock_at_takes_no_time() -> None:
    """An empty list is no reason to wait."""
    begin = time.monotonic()
    assert knock([], within=30) == {}
    assert time.monotonic() - begin < 10


class Network:
    """Answers knocks as told, and counts them."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.knocks = 0
        self.now = 0.0

    def knock(self, addresses: Sequence[Endpoint]) -> dict[Endpoint, float]:
        """How long each address takes; letters stand for hosts."""
        self.knocks += len(addresses)
        return {each: self.seconds[each[0]] for each in addresses if each[0] in self.seconds}

    def order(self, finder: AddressRanking, hosts: str = "abc") -> str:
        """The order in which hosts are tried."""
        (peer,) = finder.sorted([RankEndpoint(list(hosts), 5000, "desk")])
        return "".join(peer.hosts)


def test_the_fastest_is_tried_first() -> None:
    """If it is clearly faster than the one by which the peer was reached; the silent last."""
    network = Network(b=0.004, c=0.0003)
    finder = AddressRanking(lambda: network.now, network.knock)
    assert network.order(finder) == "cba"
    assert network.order(finder, "bc") == "cb"
    network = Network(a=0.0004, b=0.004, c=0.0003)
    assert network.order(AddressRanking(lambda: network.now, network.knock)) == "acb"
    network = Network()
    assert network.order(AddressRanking(lambda: network.now, network.knock)) == "abc"


def test_what_was_measured_holds_for_a_minute() -> None:
    """A view that changes often does not knock every time."""
    network = Network(a=0.004, b=0.0003)
    finder = AddressRanking(lambda: network.now, network.knock)
    for network.now in (0.0, 30.0, 60.0):
        assert network.order(finder, "ab") == "ba"
    assert network.knocks == 2
    network.seconds = {"a": 0.0003, "b": 0.004}
    network.now = 61.0
    assert network.order(finder, "ab") == "ab"
    assert network.knocks == 4


def test_only_so_many_addresses_are_remembered() -> None:
    """Whoever comes and goes with ever new ones fills no memory; the latest count."""
    network = Network()
    finder = AddressRanking(lambda: network.now, network.knock)
    for number in range(400):
        finder.sorted([RankEndpoint([f"x{number}", f"y{number}"], 5000, "desk")])
    assert network.knocks == 800
    finder.sorted([RankEndpoint(["x399", "y399"], 5000, "desk")])
    assert network.knocks == 800
    finder.sorted([RankEndpoint(["x0", "y0"], 5000, "desk")])
    assert network.knocks == 802


def test_whoever_has_no_choice_is_left_as_it_is() -> None:
    """A peer with one address, and one on this machine."""
    peers = [
        RankEndpoint(["10.99.0.1"], 5000, "far"),
        RankEndpoint(["127.0.0.1", "10.99.0.1"], 5000, "near"),
    ]
    assert AddressRanking().sorted(peers) == peers
    assert AddressRanking().sorted([]) == []


# --------------------------------------------------------------------------------------------------
# The profile of this machine: true, quick, and without an error on the strangest of machines.


def plant(root: Path, files: dict[str, str]) -> Path:
    """A machine with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_profile_of_this_machine_is_true() -> None:
    """As far as another look at the machine can tell, and it survives the journey."""
    profile = local_profile()
    assert profile.python == platform.python_version()
    assert profile.system.startswith(platform.system())
    assert 1 <= profile.cores <= (os.cpu_count() or 1)
    assert 0 < profile.available_memory <= profile.memory <= psutil.virtual_memory().total
    assert NodeProfile.from_bytes(profile.to_bytes()) == profile


def test_it_takes_less_than_fifty_milliseconds() -> None:
    """The best of several, for the machine is shared."""
    local_profile()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        local_profile()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05


def test_it_imports_no_framework() -> None:
    """Whoever has no torch loaded gets none."""
    before = set(sys.modules)
    local_profile()
    assert {"torch", "jax", "mlx"} & (set(sys.modules) - before) == set()


def test_a_machine_that_tells_nothing_has_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every question fails; what is left is: not known."""

    def fail(*_: object, **__: object) -> None:
        raise PermissionError

    for module, name in [
        (platform, "system"),
        (platform, "machine"),
        (platform, "python_version"),
        (psutil, "cpu_count"),
        (psutil, "virtual_memory"),
        (psutil, "sensors_battery"),
        (psutil, "net_if_addrs"),
        (os, "sched_getaffinity"),
    ]:
        monkeypatch.setattr(module, name, fail, raising=False)
    monkeypatch.setattr("socket.gethostname", fail)
    assert local_profile(root=tmp_path) == NodeProfile()


def test_a_container_counts_with_its_limits(tmp_path: Path) -> None:
    """Half a core is one; no limit is no limit."""
    limited = plant(
        tmp_path / "limited",
        {"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": "1048576\n"},
    )
    profile = local_profile(root=limited)
    assert (profile.cores, profile.memory) == (1, 1 << 20)
    assert profile.available_memory <= 1 << 20
    free = plant(
        tmp_path / "free",
        {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
    )
    assert local_profile(root=free).cores == local_profile().cores
    assert local_profile(root=free).memory == psutil.virtual_memory().total


def test_the_processor_has_the_name_it_is_sold_under(tmp_path: Path) -> None:
    """Without what could play tricks on a terminal."""
    text = "processor\t: 0\nmodel name\t: Some  \x1b[31mChip 9000\nmodel name\t: another\n"
    assert local_profile(root=plant(tmp_path, {"proc/cpuinfo": text})).processor == (
        "Some [31mChip 9000"
    )
    assert local_profile(root=plant(tmp_path, {"proc/cpuinfo": "nothing"})).processor == ""


def test_accelerators_are_found_by_their_drivers(tmp_path: Path) -> None:
    """Of both makers; a node of the AMD driver without vector units is a processor."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root = plant(
        tmp_path,
        {
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t GeForce RTX\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "IRQ: 2\n",
            f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
            f"{nodes}/0/name": "\n",
            f"{nodes}/1/properties": "cpu_cores_count 0\nsimd_count 80\n",
            f"{nodes}/1/name": "navi21\n",
        },
    )
    assert local_profile(root=root).accelerators == (
        Accelerator("cuda", "GeForce RTX"),
        Accelerator("cuda", ""),
        Accelerator("rocm", "navi21"),
    )


def test_torch_is_asked_only_where_it_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting CUDA for a profile would take seconds; one that runs knows the memory too."""
    torch = ModuleType("torch")
    device = SimpleNamespace(name="GeForce RTX", total_memory=8 << 30)
    running = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: device,
    )
    torch.cuda = running  # type: ignore[attr-defined]
    torch.version = SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    expected = (Accelerator("cuda", "GeForce RTX", 8 << 30),)
    assert local_profile(root=tmp_path).accelerators == expected
    running.is_initialized = lambda: False
    assert local_profile(root=tmp_path).accelerators == ()


def test_apple_silicon_has_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the machine's memory."""
    monkeypatch.setattr(_platform, "IS_MACOS", True)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    profile = local_profile(root=tmp_path)
    assert profile.accelerators == (Accelerator("mps", "Apple silicon"),)
    assert profile.processor == "Apple silicon"


def test_a_laptop_tells_its_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within bounds, whatever the battery says of itself."""
    state = SimpleNamespace(percent=104.2, power_plugged=None)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: state, raising=False)
    assert local_profile().battery == Battery(100, plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert local_profile().battery is None


# --------------------------------------------------------------------------------------------------
# One topology for several threads: changes whole, snapshots still.

A, B, C = map(process, "abc")
ROOM = ("10.0.0.2", 5000)


class Clock:
    """Pushed by the test."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now


def shared(clock: Clock | None = None) -> SharedTopology:
    """A, who knows B."""
    clock = clock or Clock()
    topology = SharedTopology(A, clock=clock)
    topology.update(lambda known: known.add_node(B, now=clock(), addresses=[ROOM]))
    return topology


def test_a_snapshot_stands_still() -> None:
    """The same object as long as nothing changes, and never changed itself."""
    topology = shared()
    before = topology.snapshot()
    assert topology.snapshot() is before
    topology.update(lambda known: known.remove_node(B))
    assert list(before) == [A, B]
    assert list(topology) == [A]
    assert len(topology) == 1


def test_heartbeats_leave_a_sign_of_life_and_a_latency() -> None:
    """From a peer that is known; a stranger's are ignored."""
    clock = Clock()
    topology = shared(clock)
    clock.now = 20.0
    topology.heard(B)
    assert topology.snapshot().node(B).last_seen == 20.0
    topology.heard(B, round_trip=0.002, jitter=0.001, address=ROOM)
    assert topology.snapshot().connection(A, B) == ConnectionProfile(
        latency=1_000_000,
        jitter=500_000,
        measured_at=20.0,
        measured_by=LinkSource.HEARTBEAT,
        address=ROOM,
    )
    topology.heard(C, round_trip=0.1)
    assert C not in topology.snapshot()
    assert topology.addresses(B) == (ROOM,)


def test_probes_and_collectives_fill_the_matrix() -> None:
    """In the order of ranks, whichever came first."""
    clock = Clock()
    topology = shared(clock)
    view = View("f" * 32, 1, (B, A))
    topology.rated(B, Bandwidth(up=100, down=50), address=ROOM)
    assert topology.link_matrix(view) == LinkMatrix((50, 100), (100, 50), ((0, 0), (0, 0)))
    best = topology.snapshot().connection(A, B)
    assert best is not None
    assert (best.rated_by, best.rated_at) == (LinkSource.PROBE, 10.0)
    clock.now = 20.0
    links = LinkMatrix((70, 80), (90, 60), ((0, 5), (6, 0)))
    topology.learn(links, view)
    assert topology.link_matrix(view) == links


def test_the_stale_are_pruned() -> None:
    """After two minutes unless told otherwise."""
    clock = Clock()
    topology = shared(clock)
    clock.now = 100.0
    assert topology.prune() == ()
    clock.now = 131.0
    assert topology.prune() == (B,)


def test_threads_do_not_step_on_each_other() -> None:
    """Writers and readers at once; nothing is lost, and nobody sees a change half done."""
    topology = SharedTopology(A)
    go = threading.Event()

    def write(letter: str) -> None:
        go.wait()
        for number in range(50):
            node = ProcessId(NodeId(letter * 32), number)
            topology.update(lambda known, node=node: known.add_node(node, now=1.0))  # type: ignore[misc]
            topology.heard(node, round_trip=0.001)

    def read() -> None:
        go.set()
        while len(snapshot := topology.snapshot()) < 151:
            assert all(snapshot.node(node).process == node for node in snapshot)

    together(*(lambda letter=letter: write(letter) for letter in "xyz"), read)
    assert all(topology.snapshot().connection(A, node) for node in topology if node != A)


# --------------------------------------------------------------------------------------------------
# What collectives, probes and earlier runs know is in one map, with its age and its source.


def test_after_a_job_the_map_says_how_fast_each_link_is() -> None:
    """Which figures, from when, and by what; also after the node has left."""
    with clusters(2, probes=False) as nodes:
        before = node_clock.now()
        everywhere(nodes, lambda node: node.all_reduce(np.ones(1 << 16, "f4")))
        maps = [(node.process, node.topology) for node in nodes]
    (here, mine), (there, theirs) = maps
    for known, one, other in ((mine, here, there), (theirs, there, here)):
        link = known.snapshot().connection(one, other)
        assert link is not None
        assert link.latency > 0
        assert link.measured_by is LinkSource.COLLECTIVES
        assert before <= link.measured_at <= node_clock.now()
        assert link.is_local
        assert known.snapshot().node(other).rated_at >= before  # as the ranks agreed


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of day of a node."""
    clock = Clock()
    monkeypatch.setattr(node_clock, "now", clock)
    return clock


def test_a_stale_rate_is_replaced_by_a_fresh_one(at: Clock) -> None:
    """Traffic that was slower within a minute may have been limited by something else."""
    topology = shared(at)
    topology.rated(B, Bandwidth(up=100, down=90, latency=5000), source=LinkSource.BENCH)
    links = ViewLinks(topology, View("f" * 32, 1, (A, B)))
    found = np.array([[0, 40], [0, 7000], [0, 0]], np.int64)
    at.now += 30.0
    links.measured(found)
    link = topology.connection(B)
    assert link is not None
    assert (link.down, link.rated_by, link.latency) == (90, LinkSource.BENCH, 7000)
    at.now += 60.0
    links.measured(found)
    link = topology.connection(B)
    assert link is not None
    assert (link.down, link.rated_by, link.rated_at) == (40, LinkSource.COLLECTIVES, at.now)
    assert link.up == 100  # nobody has measured that direction since


def test_a_survey_is_spared_what_is_known_and_fresh(at: Clock) -> None:
    """From a probe or from collectives, not from heartbeats; for ten minutes."""
    topology = shared(at)
    links = ViewLinks(topology, View("f" * 32, 1, (B, A)))
    assert links.known() is None
    topology.heard(B, round_trip=0.001, address=ROOM)
    assert links.known() is None
    topology.rated(B, Bandwidth(up=100, down=90, latency=5000))
    known = links.known()
    assert known is not None
    assert known.tolist() == [[90, 0], [5000, 0], [0, 0]]
    topology.heard(B, round_trip=0.001, address=ROOM)
    assert links.known() is not None
    at.now += 599.0
    assert links.known() is not None
    at.now += 2.0
    assert links.known() is None


def test_of_those_on_a_radio_one_rate_is_enough(at: Clock) -> None:
    """As in a survey: that of the link to one on a cable; short messages are timed by all."""
    wireless = NodeProfile(medium=Medium("wireless", 1, 2))
    topology = SharedTopology(A, wireless, clock=at)
    for peer, profile in ((B, NodeProfile(medium=Medium())), (C, wireless)):
        topology.introduce(peer, profile=profile)
        topology.rated(peer, Bandwidth(up=0, down=0, latency=5000))
    links = ViewLinks(topology, View("f" * 32, 1, (A, B, C)))
    assert links.air() == (1, 2)
    assert links.known() is None
    topology.rated(B, Bandwidth(up=70, down=60, latency=5000))
    known = links.known()
    assert known is not None
    assert known.tolist() == [[0, 60, UNMEASURED], [0, 5000, 5000], [0, 0, 0]]


def test_on_another_way_a_link_is_measured_anew(at: Clock) -> None:
    """As when a laptop is unplugged and comes back by Wi-Fi; not when nothing has changed."""
    facts = [
        TopologyFacts([ConnectedPeer(B, None, ROOM, [ROOM], here)], HealthSummary((), 0.0))
        for here in ("10.0.0.1", "10.0.0.1", "10.0.1.1")
    ]
    left = iter(facts)
    tracker = TopologyTracker(A, lambda: next(left), NodeProfile())
    tracker.shared = SharedTopology(A, clock=at)
    links = ViewLinks(tracker.draw(), View("f" * 32, 1, (A, B)))
    tracker.shared.rated(B, Bandwidth(up=100, down=90, latency=5000))
    at.now += 1.0
    tracker.draw()
    assert links.known() is not None
    tracker.draw()
    assert links.known() is None


def test_a_connection_between_equal_addresses_stays_within_the_machine() -> None:
    """Also one that is not a loopback; of another machine both ends differ."""
    topology = SharedTopology(A)
    host, port = ROOM
    topology.introduce(B, in_use=(host, port), here=host, interface="eth0")
    topology.introduce(C, in_use=(host, port), here="192.0.2.77", interface="eth0")
    near, far = topology.connection(B), topology.connection(C)
    assert near is not None
    assert far is not None
    assert (near.is_local, far.is_local) == (True, False)


def no_facts() -> TopologyFacts:
    """Of a node without connections."""
    return TopologyFacts([], HealthSummary((), 0.0))


def test_links_are_remembered_by_the_next_run(tmp_path: Path, at: Clock) -> None:
    """By machine, with the age they have by then; the newer figure of two runs stays."""
    today = Clock()
    today.now = 1e9
    store = LinkStore("tag", tmp_path, clock=today)
    topology = SharedTopology(A, clock=at)
    topology.introduce(B, in_use=ROOM)
    topology.rated(B, Bandwidth(up=100, down=90, latency=5000), source=LinkSource.DOCTOR)
    topology.heard(B, round_trip=1.0)
    tracker = TopologyTracker(A, no_facts, NodeProfile(), store)
    tracker.shared = topology
    tracker.close()
    at.now, today.now = 5.0, 1e9 + 60  # a restart, a minute later
    again = TopologyTracker(A, no_facts, NodeProfile(), LinkStore("tag", tmp_path, clock=today))
    reborn = ProcessId(B.node, B.incarnation + 1)
    again.shared.introduce(reborn, in_use=ROOM)
    link = again.shared.connection(reborn)
    assert link is not None
    assert (link.up, link.down, link.latency) == (100, 90, 5000)
    assert (link.rated_by, link.measured_by) == (LinkSource.DOCTOR, LinkSource.DOCTOR)
    assert (link.rated_at, link.measured_at) == (5.0 - 60, 5.0 - 60)
    assert again.is_rated(reborn)
    assert ViewLinks(again.shared, View("f" * 32, 1, (A, reborn))).known() is None  # of today
    store.save(SharedTopology(A, clock=at).snapshot(), at.now)
    assert list(store.load(at.now)) == [B.node]
    today.now += 31 * 86400
    assert store.load(at.now) == {}


def test_a_damaged_memory_is_as_good_as_none(tmp_path: Path) -> None:
    """Nothing in it is believed."""
    store = LinkStore("tag", tmp_path)
    (tmp_path / "links").mkdir(mode=0o700)
    for text in (b"{", b"[1]", b"[" + b" " * (1 << 17) + b"]", b'[{"node": "x", "up": -1}]'):
        (tmp_path / "links" / "tag").write_bytes(text)
        (tmp_path / "links" / "tag").chmod(0o600)
        assert store.load(0.0) == {}
