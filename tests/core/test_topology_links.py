"""One link: what newer measurements change, and in which order its addresses are tried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import ConnectionProfile
from potluck.core.topology_links import MESSAGE, Endpoint, Paths, RateSource

CABLE, RADIO, OTHER = ("10.0.0.2", 5000), ("10.0.1.2", 5000), ("fd00::2", 5000)


def rated(up: int, at: float, by: RateSource = RateSource.TRAFFIC) -> ConnectionProfile:
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
    second = first.updated(rated(1000, at=2.0, by=RateSource.PROBE))
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
    assert known.updated(rated(400, at=20.0, by=RateSource.PROBE)).up == 400


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


def test_a_copy_lives_its_own_life() -> None:
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
