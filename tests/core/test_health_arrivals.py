"""What arrivals teach: patience that fits the peer, and how good its link is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import HealthConfig
from potluck.core.health_arrivals import Arrivals

CONFIG = HealthConfig(interval=0.2, least_patience=0.5, pause_after=4.0)


def after(gaps: list[float], config: HealthConfig = CONFIG) -> Arrivals:
    """A peer that was heard after each of these silences."""
    arrivals = Arrivals(config, 0.0)
    for gap in gaps:
        arrivals.arrived(arrivals.heard_at + gap, None)
    return arrivals


def test_until_enough_is_known_patience_is_longest() -> None:
    """Seven silences say little about the eighth."""
    assert after([]).patience == 4.0
    assert after([0.2] * 7).patience == 4.0
    assert after([0.2] * 8).patience == 0.5


def test_an_irregular_peer_is_given_more_time() -> None:
    """The spread of its silences counts, and so does the longest."""
    regular, uneven = after([0.5] * 20), after([0.3, 0.5, 0.7] * 7)
    assert regular.patience == pytest.approx(0.75)
    assert uneven.patience == pytest.approx(0.5 + 8 * 1.4826 * 0.2)
    assert after([0.2] * 20 + [1.8]).patience == pytest.approx(2.7)


def test_one_long_silence_is_forgotten_in_time() -> None:
    """After 64 heartbeats nothing is left of it."""
    assert after([1.8, *[0.2] * 63]).patience == pytest.approx(2.7)
    assert after([1.8, *[0.2] * 64]).patience == 0.5


def test_messages_between_heartbeats_do_not_shorten_patience() -> None:
    """A stream of them would make every pause look long."""
    talkative = after([0.4] * 10 + [0.01] * 1000)
    assert talkative.patience == after([0.4] * 10).patience
    assert talkative.loss == after([0.4] * 10).loss


def test_heartbeats_that_do_not_come_in_time_are_loss() -> None:
    """Every second one is missing where 0.4 s pass instead of 0.2 s."""
    assert after([0.2] * 7).loss == 0.0
    assert after([0.2] * 20).loss == 0.0
    assert after([0.4] * 20).loss == pytest.approx(0.5)
    assert after([0.4] * 7).loss == 0.0


def test_round_trips_are_smoothed_as_tcp_does() -> None:
    """An eighth of the news, a quarter for its deviation; impossible values are ignored."""
    arrivals = after([])
    arrivals.arrived(0.2, None)
    assert not arrivals.is_timed
    arrivals.arrived(0.4, 0.010)
    assert (arrivals.round_trip, arrivals.jitter) == (0.010, 0.0)
    for turn in range(7):
        assert not arrivals.is_timed
        arrivals.arrived(0.6 + turn / 5, 0.010)
    assert arrivals.is_timed
    arrivals.arrived(2.0, 0.018)
    assert arrivals.round_trip == pytest.approx(0.011)
    assert arrivals.jitter == pytest.approx(0.002)
    arrivals.arrived(2.2, -5.0)
    assert arrivals.round_trip == pytest.approx(0.011)


def test_a_first_round_trip_that_took_long_is_soon_outweighed() -> None:
    """Opening a connection takes its time; the mean of the first few counts."""
    arrivals = after([])
    arrivals.arrived(0.2, 0.8)
    arrivals.arrived(0.4, 0.0)
    assert arrivals.round_trip == pytest.approx(0.4)


@given(st.lists(st.floats(0, 1e9)), st.sampled_from(["loopback", "wired", "wifi"]))
def test_patience_is_bounded_whatever_was_heard(gaps: list[float], preset: str) -> None:
    """Never shorter than the least, never longer than the pause; and loss is a share."""
    config: HealthConfig = getattr(HealthConfig, preset)()
    arrivals = after(gaps, config)
    assert config.least_patience <= arrivals.patience <= config.pause_after
    assert 0 <= arrivals.loss < 1
