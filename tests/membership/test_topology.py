"""The cluster as a graph: stable ids, measured links, a matrix for the planner."""

from datetime import timedelta

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import ClusterTopology, ConnectionProfile, MalformedFrame, NodeProfile
from potluck._types import LinkMatrix, ProcessId, View
from potluck.membership.topology import (
    MESSAGE,
    PROFILE_LIMIT,
    Accelerator,
    Battery,
    Endpoint,
    LinkSource,
    Paths,
)
from support.health import process

A, B, C = map(process, "abc")
ROOM, HALL = ("10.0.0.2", 5000), ("10.0.1.2", 5000)


def view(*members: ProcessId) -> View:
    """A view of these, in this order."""
    return View("f" * 32, 1, members)


def three() -> ClusterTopology:
    """A knows B and C."""
    topology = ClusterTopology(A, now=1.0)
    topology.add_node(B, now=1.0)
    topology.add_node(C, now=1.0)
    return topology


# --- who is there ---


def test_whoever_is_told_of_is_there() -> None:
    """What is told later completes what was told before."""
    topology = ClusterTopology(A, NodeProfile(host="desk"))
    topology.add_node(B, now=1.0, profile=NodeProfile(host="attic"), addresses=[ROOM])
    topology.add_node(B, now=2.0)
    info = topology.node(B)
    assert (info.process, info.addresses, info.last_seen) == (B, (ROOM,), 2.0)
    assert info.profile == NodeProfile(host="attic")
    topology.add_node(B, now=1.0, profile=NodeProfile(host="cellar"), addresses=[HALL])
    info = topology.node(B)
    assert (info.addresses, info.last_seen) == ((HALL,), 2.0)
    assert info.profile == NodeProfile(host="cellar")
    assert list(topology) == [A, B]
    assert len(topology) == 2


def test_a_stranger_is_nobody() -> None:
    """Asking for one is an error, telling of one without introduction is ignored."""
    topology = ClusterTopology(A)
    topology.seen(B, now=1.0)
    topology.used(B, ROOM)
    topology.failed(B, ROOM, now=1.0)
    topology.remove_node(B)
    topology.add_connection(A, B, ConnectionProfile(latency=1))
    topology.add_connection(B, A, ConnectionProfile(latency=1))
    assert B not in topology
    assert topology.addresses(B, now=1.0) == ()
    assert topology.connection(A, B) is None
    with pytest.raises(KeyError):
        topology.node(B)


def test_removing_one_changes_nothing_for_the_others() -> None:
    """Ids are stable: the rest keeps its links, and a newcomer inherits none."""
    topology = three()
    topology.add_connection(A, C, ConnectionProfile(latency=7))
    topology.add_connection(B, C, ConnectionProfile(latency=8))
    topology.remove_node(B)
    assert topology.nodes == (A, C)
    assert topology.connection(A, C) == ConnectionProfile(latency=7)
    topology.add_node(B, now=2.0)
    assert topology.connection(B, C) is None
    topology.remove_node(A)
    assert A in topology  # nobody removes himself


def test_the_stale_are_pruned() -> None:
    """Whoever was not seen for a while, but never ourselves; a clock set back prunes nobody."""
    topology = three()
    topology.seen(C, now=50.0)
    assert topology.prune(now=-100.0, max_age=30.0) == ()
    assert topology.prune(now=60.0, max_age=timedelta(minutes=1)) == ()
    assert topology.prune(now=60.0, max_age=30.0) == (B,)
    assert topology.prune(now=60.0, max_age=30.0) == ()
    assert topology.remote_nodes == (C,)


def test_a_machine_counts_once_however_many_processes_it_runs() -> None:
    """Cores and memory add up over machines."""
    desk = NodeProfile(cores=8, memory=100)
    topology = ClusterTopology(A, desk)
    topology.add_node(ProcessId(A.node, 2), now=1.0, profile=desk)
    topology.add_node(B, now=1.0, profile=NodeProfile(cores=2, memory=50))
    topology.add_node(C, now=1.0)
    assert (topology.total_cores, topology.total_memory) == (10, 150)


# --- links ---


def test_addresses_are_ordered_by_what_was_measured() -> None:
    """And fail over to the next."""
    topology = ClusterTopology(A)
    topology.add_node(B, now=1.0, addresses=[ROOM, HALL])
    assert topology.addresses(B, now=1.0) == (ROOM, HALL)
    topology.add_connection(A, B, ConnectionProfile(latency=10**6, address=ROOM))
    topology.add_connection(A, B, ConnectionProfile(latency=10**5, address=HALL))
    assert topology.addresses(B, now=1.0) == (HALL, ROOM)
    best = topology.connection(A, B)
    assert best is not None
    assert best.address == HALL
    topology.failed(B, HALL, now=1.0)
    assert topology.addresses(B, now=1.5) == (ROOM, HALL)
    topology.used(B, HALL)
    assert topology.addresses(B, now=1.5) == (HALL, ROOM)


def test_a_link_to_oneself_is_none() -> None:
    """It is not kept."""
    topology = ClusterTopology(A)
    topology.add_connection(A, A, ConnectionProfile(latency=1))
    assert topology.connection(A, A) is None


# --- for the planner ---


def test_the_matrix_is_in_the_order_of_ranks() -> None:
    """Unknown links are zero, a latency counts for the way back too if nothing else is known."""
    topology = three()
    topology.add_connection(A, B, ConnectionProfile(latency=100, up=5, down=6, rated_at=1.0))
    topology.add_connection(B, A, ConnectionProfile(latency=300))
    topology.add_connection(C, B, ConnectionProfile(latency=1 << 40, up=1 << 70))
    assert topology.link_matrix(view(B, A)) == LinkMatrix((6, 5), (5, 6), ((0, 300), (100, 0)))
    links = topology.link_matrix(view(C, B, process("d")))
    assert links.up == ((1 << 63) - 1, 0, 0)
    assert links.down == (0, (1 << 63) - 1, 0)
    assert links.latency == ((0, (1 << 32) - 1, 0), ((1 << 32) - 1, 0, 0), (0, 0, 0))


def test_a_newer_probe_goes_before_what_was_agreed_earlier() -> None:
    """And what was agreed before an older probe."""
    topology = three()
    links = LinkMatrix((100, 100), (100, 100), ((0, 5), (5, 0)))
    topology.learn(links, view(A, B), now=10.0)
    old = ConnectionProfile(up=70, rated_at=9.0, rated_by=LinkSource.PROBE, address=ROOM)
    topology.add_connection(A, B, old)
    assert topology.link_matrix(view(A, B)).up[0] == 100
    new = ConnectionProfile(up=80, rated_at=11.0, rated_by=LinkSource.PROBE, address=ROOM)
    topology.add_connection(A, B, new)
    assert topology.link_matrix(view(A, B)).up == (80, 100)
    assert topology.link_matrix(view(A, B)).down == (100, 80)


def test_the_matrix_says_who_shares_a_machine() -> None:
    """As agreed, in the order of any view; rates within a machine say nothing of its cable."""
    topology = three()
    times = ((0, 5, 9), (5, 0, 9), (9, 9, 0))
    links = LinkMatrix((100,) * 3, (100,) * 3, times, machines=(0, 0, 2))
    topology.learn(links, view(A, B, C), now=10.0)
    near = ConnectionProfile(up=10**10, down=10**10, rated_at=11.0, rated_by=LinkSource.BENCH)
    topology.add_connection(A, B, near)
    assert topology.link_matrix(view(A, B, C)) == links
    assert topology.link_matrix(view(B, C, A)).machines == (0, 1, 0)
    assert topology.link_matrix(view(A, C)).machines == ()
    assert topology.link_matrix(view(A, B)).up == (10**10, 10**10)


def test_only_what_was_measured_is_learned() -> None:
    """Zeros change nothing; a matrix of another size is a mistake."""
    topology = three()
    links = LinkMatrix((9, 8), (7, 6), ((0, 5), (4, 0)))
    topology.learn(links, view(A, B), now=2.0)
    topology.learn(LinkMatrix.uniform(2, rate=0, latency=0), view(A, B), now=3.0)
    assert topology.link_matrix(view(A, B)) == links
    with pytest.raises(ValueError, match="2 ranks were measured, the view has 3 members"):
        topology.learn(links, view(A, B, C), now=3.0)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 6))
def test_what_was_learned_is_given_back_for_any_part(data: st.DataObject, size: int) -> None:
    """For the same view the same matrix; for a part of it, in any order, the same figures."""
    members = tuple(map(process, "abcdef"[:size]))
    rates = st.lists(st.integers(1, 10**10), min_size=size, max_size=size).map(tuple)
    times = [
        tuple(0 if a == b else data.draw(st.integers(1, 10**9)) for b in range(size))
        for a in range(size)
    ]
    links = LinkMatrix(data.draw(rates), data.draw(rates), tuple(times))
    topology = ClusterTopology(A)
    topology.learn(links, view(*members), now=1.0)
    assert topology.link_matrix(view(*members)) == links
    part = data.draw(st.permutations(range(size)))[: data.draw(st.integers(1, size))]
    found = topology.link_matrix(view(*(members[rank] for rank in part)))
    assert found.up == tuple(links.up[rank] for rank in part)
    assert found.latency == tuple(tuple(links.latency[a][b] for b in part) for a in part)


def test_a_copy_lives_its_own_life() -> None:
    """Whatever happens to the one."""
    topology = three()
    topology.add_node(B, now=1.0, addresses=[ROOM, HALL])
    copy = topology.copy()
    topology.remove_node(C)
    topology.failed(B, ROOM, now=1.0)
    topology.add_connection(A, B, ConnectionProfile(latency=1))
    assert copy.nodes == (A, B, C)
    assert copy.addresses(B, now=1.5) == (ROOM, HALL)
    assert copy.connection(A, B) is None
    assert copy.me == A


# --------------------------------------------------------------------------------------------------
# One link: what newer measurements change, and in which order its addresses are tried.

CABLE, RADIO, OTHER = ("10.0.0.2", 5000), ("10.0.1.2", 5000), ("fd00::2", 5000)


def rated(up: int, at: float, by: LinkSource = LinkSource.COLLECTIVES) -> ConnectionProfile:
    """A measurement of a rate."""
    return ConnectionProfile(up=up, rated_at=at, rated_by=by)


# --- profiles ---


def test_half_of_a_round_trip_is_one_way() -> None:
    """In whole nanoseconds, and never zero, which would mean: not measured."""
    profile = ConnectionProfile.from_round_trip(0.002, now=5.0, jitter=0.0001, address=CABLE)
    assert (profile.latency, profile.jitter) == (1_000_000, 50_000)
    assert (profile.measured_at, profile.address) == (5.0, CABLE)
    assert ConnectionProfile.from_round_trip(-1.0, now=5.0).latency == 1


def test_negative_figures_are_refused() -> None:
    """No link has them."""
    with pytest.raises(ValueError, match="cannot be negative"):
        ConnectionProfile(up=-1)


def test_a_newer_measurement_changes_what_it_measured() -> None:
    """A latency keeps the rate, a rate keeps the latency."""
    first = ConnectionProfile(latency=100, jitter=10, measured_at=1.0, interface="eth0")
    second = first.updated(rated(1000, at=2.0, by=LinkSource.PROBE))
    assert (second.latency, second.up, second.measured_at, second.rated_at) == (100, 1000, 1.0, 2.0)
    third = second.updated(ConnectionProfile(latency=50, measured_at=3.0, interface="eth1"))
    assert (third.latency, third.jitter, third.up, third.interface) == (50, 0, 1000, "eth1")
    assert second.interface == "eth0"


def test_traffic_lowers_a_rate_only_after_a_while() -> None:
    """What was limited by something else says only what the link can do at least."""
    known = rated(1000, at=10.0)
    assert known.updated(rated(400, at=20.0)) == known
    assert known.updated(rated(1500, at=20.0)).up == 1500
    assert known.updated(rated(400, at=70.0)).up == 400
    assert known.updated(rated(400, at=20.0, by=LinkSource.PROBE)).up == 400


def test_each_direction_has_its_own_rate() -> None:
    """What was measured in one says nothing about the other."""
    known = rated(1000, at=10.0).updated(ConnectionProfile(down=300, rated_at=11.0))
    assert (known.up, known.down) == (1000, 300)


def test_a_message_takes_latency_and_bytes() -> None:
    """A rate that is not known counts as a cable's, or as a radio's where answers take long."""
    assert ConnectionProfile(latency=10**9, up=MESSAGE).seconds_for_message == pytest.approx(2.0)
    assert ConnectionProfile().seconds_for_message == pytest.approx(MESSAGE / 125e6)
    radio = ConnectionProfile(latency=10**6)
    assert radio.seconds_for_message == pytest.approx(0.001 + MESSAGE / 25e6)


# --- addresses ---


def named(*addresses: Endpoint) -> Paths:
    """A peer that has told its addresses."""
    paths = Paths()
    paths.name(addresses)
    return paths


def test_without_measurements_the_order_is_the_peers_own() -> None:
    """Each address once; none is not an error."""
    assert named(CABLE, RADIO, CABLE).order({}, 0.0) == (CABLE, RADIO)
    assert named().order({}, 0.0) == ()


def test_the_fastest_comes_first_and_the_unknown_last() -> None:
    """By the time of a message: latency and rate together."""
    profiles = {
        RADIO: ConnectionProfile(latency=50_000, up=5_000_000),
        CABLE: ConnectionProfile(latency=200_000, up=100_000_000),
        None: ConnectionProfile(latency=1),
    }
    assert named(OTHER, RADIO, CABLE).order(profiles, 0.0) == (CABLE, RADIO, OTHER)


def test_an_address_that_failed_is_tried_last_for_a_while() -> None:
    """The while doubles with every failure, up to a minute, and ends with a success."""
    paths = named(CABLE, RADIO)
    paths.failed(CABLE, now=0.0)
    assert paths.order({}, 0.5) == (RADIO, CABLE)
    assert paths.order({}, 1.5) == (CABLE, RADIO)
    for _ in range(20):
        paths.failed(CABLE, now=2.0)
    assert paths.order({}, 61.0) == (RADIO, CABLE)
    assert paths.order({}, 62.5) == (CABLE, RADIO)
    assert paths.order({}, -500.0) == (CABLE, RADIO)  # the clock was set back: begin anew
    paths.used(CABLE)
    paths.failed(CABLE, now=100.0)
    assert paths.order({}, 101.5) == (CABLE, RADIO)


def test_the_address_in_use_stays_unless_another_is_clearly_better() -> None:
    """Measurements vary; connections do not hop to and fro with them."""
    paths = named(CABLE, RADIO)
    paths.used(RADIO)
    assert paths.order({}, 0.0) == (RADIO, CABLE)
    paths.name([CABLE, RADIO])
    assert paths.order({}, 0.0) == (RADIO, CABLE)
    profiles: dict[Endpoint | None, ConnectionProfile] = {CABLE: ConnectionProfile(up=100)}
    assert paths.order(profiles, 0.0) == (RADIO, CABLE)
    profiles[RADIO] = ConnectionProfile(up=90)
    assert paths.order(profiles, 0.0) == (RADIO, CABLE)
    profiles[CABLE] = ConnectionProfile(up=200)
    assert paths.order(profiles, 0.0) == (CABLE, RADIO)
    paths.failed(CABLE, 0.0)
    paths.failed(RADIO, 0.0)
    assert paths.order({}, 0.5) == (CABLE, RADIO)


def test_addresses_that_are_no_more_are_forgotten() -> None:
    """With all that was known of them; what is said about strangers' addresses is not kept."""
    paths = named(CABLE, RADIO)
    paths.used(CABLE)
    paths.failed(RADIO, 0.0)
    paths.used(OTHER)
    paths.failed(OTHER, 0.0)
    paths.name([OTHER, RADIO])
    assert paths.order({}, 0.5) == (OTHER, RADIO)
    paths.name([CABLE, OTHER])
    paths.name([RADIO, OTHER])
    assert paths.order({}, 0.5) == (RADIO, OTHER)


def test_a_copy_lives_its_own_life_links() -> None:
    """What happens to the one does not happen to the other."""
    paths = named(CABLE, RADIO)
    paths.failed(CABLE, 0.0)
    copy = paths.copy()
    paths.used(CABLE)
    assert copy.order({}, 0.5) == (RADIO, CABLE)
    assert copy.named == paths.named


addresses = st.sampled_from([CABLE, RADIO, OTHER])


@given(
    st.lists(st.tuples(st.sampled_from(["used", "failed"]), addresses, st.floats(0, 100))),
    st.dictionaries(addresses, st.builds(ConnectionProfile, latency=st.integers(0, 10**9))),
    st.floats(0, 200),
)
def test_no_address_is_ever_lost(
    happened: list[tuple[str, Endpoint, float]],
    profiles: dict[Endpoint | None, ConnectionProfile],
    now: float,
) -> None:
    """Whatever happened, each is tried once."""
    paths = named(CABLE, RADIO, OTHER)
    for what, address, when in happened:
        if what == "used":
            paths.used(address)
        else:
            paths.failed(address, when)
    assert sorted(paths.order(profiles, now)) == sorted([CABLE, RADIO, OTHER])


# --------------------------------------------------------------------------------------------------
# Node profiles: they travel, they are bounded, and nothing odd gets in.

FULL = NodeProfile(
    host="attic",
    system="Linux 6.8",
    machine="x86_64",
    processor="Some Chip 9000",
    python="3.11.7",
    cores=16,
    physical_cores=8,
    memory=32 << 30,
    available_memory=20 << 30,
    accelerators=(Accelerator("cuda", "GeForce", 8 << 30), Accelerator("mps")),
    battery=Battery(80, plugged=True),
)


@pytest.mark.parametrize("profile", [NodeProfile(), FULL])
def test_a_profile_survives_the_journey(profile: NodeProfile) -> None:
    """Nothing is lost, and what is not known takes no room."""
    assert NodeProfile.from_bytes(profile.to_bytes()) == profile
    assert NodeProfile().to_bytes() == b"\x80"


def test_a_profile_is_one_line_for_people() -> None:
    """With what is known, and without what is not."""
    assert str(FULL) == (
        "attic: 16 cores, 32.0 GiB, GeForce, mps, battery 80 % (plugged in), Linux 6.8, "
        "Python 3.11.7"
    )
    assert str(NodeProfile(cores=1, battery=Battery(7))) == "a machine: 1 core, battery 7 %"
    assert str(NodeProfile(host="attic")) == "attic: nothing known"


@pytest.mark.parametrize(
    "told",
    [
        {"cores": -1},
        {"cores": 1 << 40},
        {"memory": 1 << 62},
        {"cores": "many"},
        {"host": "x" * 129},
        {"host": "\x1b[31mred"},
        {"accelerators": [{"kind": "cuda"}] * 17},
        {"accelerators": [{"kind": "cu\nda"}]},
        {"battery": {"percent": 101}},
        [1, 2, 3],
    ],
)
def test_what_makes_no_sense_is_refused(told: object) -> None:
    """Numbers out of bounds, text with control characters, the wrong shape."""
    with pytest.raises(MalformedFrame, match="Invalid node profile"):
        NodeProfile.from_bytes(msgspec.msgpack.encode(told))


def test_what_is_too_long_is_refused_unread() -> None:
    """Its size is looked at before anything else."""
    with pytest.raises(MalformedFrame, match="8193 bytes is too long: 8192 is the limit"):
        NodeProfile.from_bytes(bytes(PROFILE_LIMIT + 1))


def test_the_longest_profile_is_within_the_limit() -> None:
    """Whatever a machine can tell about itself arrives."""
    text = "x" * 128
    longest = NodeProfile(
        host=text,
        system=text,
        machine=text,
        processor=text,
        python=text,
        accelerators=(Accelerator(text, text, 1 << 61),) * 16,
    )
    assert NodeProfile.from_bytes(longest.to_bytes()) == longest


@given(st.binary(max_size=200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    """They are a profile or a clean refusal."""
    try:
        profile = NodeProfile.from_bytes(data)
    except MalformedFrame:
        return
    assert isinstance(profile, NodeProfile)
