"""Token buckets: a burst, then a rate."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import HealthConfig, HealthMonitor, HealthStatus, HealthSummary
from potluck import HealthEvent as potluck_HealthEvent
from potluck._types import NodeId, ProcessId
from potluck.membership.health import (
    BEATS_PER_SECOND,
    LENGTHENED,
    ArrivalTimes,
    HealthEvent,
    PeerHealth,
    StallAwareClock,
    TokenBucket,
    lengthened,
    pace,
)
from potluck.membership.health import HealthConfig as ConfigHealthConfig
from support.health import Ward, process


def test_a_burst_and_then_a_rate() -> None:
    """However often it is asked, no more than burst + rate × time are given."""
    bucket = TokenBucket(rate=4.0, burst=3, now=100.0)
    given = sum(bucket.take(100.0 + step / 100) for step in range(1001))
    assert given == 3 + 40


def test_it_never_holds_more_than_a_burst() -> None:
    """A long rest does not add up."""
    bucket = TokenBucket(rate=4.0, burst=3, now=0.0)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_looking_takes_nothing_and_says_when() -> None:
    """The next token comes when the rate says so."""
    bucket = TokenBucket(rate=2.0, burst=1, now=0.0)
    assert bucket.has(0.0)
    assert bucket.when(0.0) == 0.0
    assert bucket.take(0.0)
    assert not bucket.has(0.0)
    assert bucket.when(0.0) == pytest.approx(0.5)
    assert bucket.has(0.5)


def test_a_clock_that_is_set_back_gives_and_takes_nothing() -> None:
    """From there it counts on."""
    bucket = TokenBucket(rate=1.0, burst=1, now=100.0)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert bucket.take(51.0)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_what_could_never_give_is_refused(rate: float, burst: int) -> None:
    """A bucket without a rate or without room is a mistake."""
    with pytest.raises(ValueError, match="token bucket"):
        TokenBucket(rate, burst, now=0.0)


def test_the_next_token_is_foretold_with_what_was_gained_meanwhile() -> None:
    """And it is never in the past, however many there are."""
    bucket = TokenBucket(rate=2.0, burst=3, now=0.0)
    assert bucket.when(0.0) == 0.0
    for _ in range(3):
        bucket.take(0.0)
    assert bucket.when(0.25) == pytest.approx(0.5)
    assert bucket.when(9.0) == 9.0


# --------------------------------------------------------------------------------------------------
# Health: who is well, who is suspect, who is given up, and in which words.

A, B = process("a"), process("b")


# --- silence ---


def test_a_peer_that_is_heard_in_time_stays_healthy() -> None:
    """A minute of heartbeats causes no event."""
    ward = Ward()
    ward.beat(times=300, trip=0.001)
    assert ward.events == []
    assert ward.monitor.status(A) is HealthStatus.HEALTHY
    assert ward.monitor.reason(A) == "no heartbeat was missed so far"


def test_a_silent_peer_is_suspected_and_then_given_up() -> None:
    """Each with its reason, once, and all within the bound of the preset."""
    ward = Ward()
    ward.beat(times=50)
    silent_from = ward.now
    ward.rest(10)
    expected = "A is suspect: no heartbeat for 0.6 s, and 0.6 s is the longest normal gap"
    assert ward.told[0] == expected
    expected = "A is dead: no heartbeat for 2.0 s"
    assert ward.told[1:] == [expected]
    suspect, dead = ward.events
    assert suspect.time - silent_from == pytest.approx(0.6, abs=0.01)
    assert dead.time - silent_from == pytest.approx(2.0, abs=0.01)
    assert (dead.peer, dead.previous, dead.status) == (A, suspect.status, HealthStatus.DEAD)
    assert ward.monitor.silence(A, ward.now) == pytest.approx(10)


def test_a_peer_that_never_spoke_is_given_up_as_well() -> None:
    """Its silence counts from when it is watched."""
    ward = Ward()
    ward.rest(5)
    assert [event.status for event in ward.events] == [HealthStatus.SUSPECT, HealthStatus.DEAD]


def test_a_sign_of_life_ends_all_suspicion() -> None:
    """Even of one that was given up: whether it may return is for the membership to say."""
    ward = Ward()
    ward.beat(times=20)
    ward.beat(every=3.0)
    assert ward.monitor.status(A) is HealthStatus.HEALTHY
    assert ward.monitor.next_deadline == ward.now
    ward.beat(times=5)
    assert ward.told[2:] == ["A is healthy: it was heard again after 3.0 s"]


def test_patience_grows_with_silences_that_ended_well() -> None:
    """Who was once heard after 0.65 s is not suspected for the same again."""
    ward = Ward()
    ward.beat(times=20)
    ward.beat(every=0.65)
    ward.beat(times=3)
    assert len(ward.events) == 2
    assert ward.monitor.patience(A) == pytest.approx(0.975)
    ward.beat(every=0.65)
    assert len(ward.events) == 2


# --- connections ---


def test_a_closed_connection_makes_suspect_at_once() -> None:
    """Without waiting for silence; the event comes with the next tick, which is due now."""
    ward = Ward()
    ward.beat(times=10)
    ward.monitor.lost(A, ward.now, "reset by peer")
    assert ward.monitor.status(A) is HealthStatus.SUSPECT
    assert ward.monitor.next_deadline == ward.now
    ward.monitor.lost(A, ward.now, "again")
    ward.rest(0.5)
    assert ward.told == ["A is suspect: its connection ended: reset by peer"]
    ward.rest(1.4)
    assert len(ward.events) == 1
    ward.rest(0.2)
    assert ward.events[-1].status is HealthStatus.DEAD
    ward.monitor.lost(A, ward.now, "much later")
    assert "much later" not in ward.monitor.reason(A)


def test_the_connection_of_a_silent_peer_can_end_too() -> None:
    """The cause changed, so it is told; the status did not."""
    ward = Ward()
    ward.beat(times=10)
    ward.rest(1)
    ward.monitor.lost(A, ward.now, "timed out")
    ward.rest(0.1)
    assert [event.status for event in ward.events] == [HealthStatus.SUSPECT] * 2
    assert ward.monitor.reason(A) == "its connection ended: timed out"


# --- the quality of a link ---


def test_a_slow_link_is_degraded_until_it_is_clearly_better() -> None:
    """A round trip that hovers about the bound causes one event, not one for each swing."""
    ward = Ward()
    ward.beat(times=40, trip=0.12)
    for _ in range(20):
        ward.beat(times=3, trip=0.12)
        ward.beat(times=3, trip=0.09)
    ward.beat(times=30, trip=0.02)
    assert ward.told == [
        "A is degraded: a round trip takes 0.1 s, more than 0.1 s",
        "A is healthy: its link is good again",
    ]


def test_an_uneven_link_is_degraded() -> None:
    """Round trips of one and of a hundred and sixty milliseconds in turn."""
    ward = Ward()
    for _ in range(25):
        ward.beat(trip=0.001)
        ward.beat(trip=0.16)
    assert [event.status for event in ward.events] == [HealthStatus.DEGRADED]
    assert ward.monitor.reason(A).startswith("its round trips vary by")
    assert ward.monitor.reason(A).endswith("more than 50.0 ms")


def test_a_link_that_loses_heartbeats_is_degraded() -> None:
    """Every third heartbeat is missing."""
    ward = Ward()
    for _ in range(15):
        ward.beat()
        ward.beat(every=0.4)
    assert [event.status for event in ward.events] == [HealthStatus.DEGRADED]
    assert ward.monitor.reason(A).endswith("of its heartbeats are lost or late")


def test_a_busy_moment_does_not_make_a_poor_link() -> None:
    """Somebody starts, or compiles something: what does not last five seconds is not told."""
    ward = Ward()
    ward.beat(times=20, trip=0.001)
    ward.beat(times=6, trip=0.15)
    ward.beat(times=20, trip=0.001)
    ward.beat(every=1.0, trip=0.001)
    ward.beat(times=20, trip=0.001)
    assert ward.monitor.summary(ward.now).peers[0].loss > 0
    assert [event.status for event in ward.events if event.status is HealthStatus.DEGRADED] == []


def test_busy_moments_do_not_add_up() -> None:
    """Each lasts for some seconds, and in between the link is good."""
    ward = Ward()
    ward.beat(times=20, trip=0.001)
    for _ in range(4):
        ward.beat(times=12, trip=0.2)
        assert ward.monitor.summary(ward.now).peers[0].round_trip == pytest.approx(0.16, abs=0.01)
        ward.beat(times=40, trip=0.001)
    assert ward.events == []


def test_a_link_that_is_clearly_better_is_good_again_at_once() -> None:
    """Only trouble must last before it is told."""
    ward = Ward()
    ward.beat(times=60, trip=0.15)
    assert ward.monitor.status(A) is HealthStatus.DEGRADED
    while (ward.monitor.summary(ward.now).peers[0].round_trip or 0.0) > 0.06:
        ward.beat(trip=0.05)
    ward.rest(ward.config.interval)
    assert ward.monitor.status(A) is HealthStatus.HEALTHY


def test_our_own_lateness_is_not_blamed_on_the_link() -> None:
    """Answers that waited for us to wake up say nothing about it; quick ones do."""
    ward = Ward()
    ward.beat(times=10, trip=0.010)
    ward.now += 5
    ward.monitor.heard(A, ward.now, round_trip=5.0)
    ward.monitor.heard(A, ward.now, round_trip=0.002)
    assert ward.monitor.summary(ward.now).peers[0].round_trip == pytest.approx(0.009)


def test_one_trouble_can_follow_another() -> None:
    """A lossy link that has become slow instead is still degraded, for another reason."""
    ward = Ward()
    ward.beat(times=30, every=0.4)
    ward.beat(times=100, trip=0.15)
    assert [event.status for event in ward.events] == [HealthStatus.DEGRADED] * 2
    assert "round trip" in ward.monitor.reason(A)


@pytest.mark.parametrize("trip", [0.0, 0.1])
def test_a_round_trip_up_to_the_bound_is_good(trip: float) -> None:
    """However long it lasts."""
    ward = Ward()
    ward.beat(times=100, trip=trip)
    assert ward.events == []


def test_trouble_is_told_when_it_has_lasted_for_twenty_five_heartbeats() -> None:
    """From the first tick at which enough round trips are known."""
    ward = Ward()
    begun = ward.now
    ward.beat(times=50, trip=0.15)
    assert ward.events[0].time - begun == pytest.approx((8 + 1 + 25) * 0.2, abs=0.05)


# --- who is watched ---


def test_strangers_are_ignored() -> None:
    """What is heard or lost of somebody who is not watched changes nothing."""
    monitor = HealthMonitor()
    monitor.heard(B, 1.0)
    monitor.lost(B, 1.0, "gone")
    monitor.forget(B)
    assert monitor.tick(2.0) == []
    assert monitor.next_deadline is None
    assert (monitor.peers, A in monitor) == ((), False)


def test_a_forgotten_peer_is_missed_no_more() -> None:
    """And one that is watched again begins anew, while a second watch changes nothing."""
    ward = Ward(peers="ab")
    ward.monitor.watch(A, ward.now, name="another name")
    ward.monitor.forget(B)
    assert ward.monitor.peers == (A,)
    ward.rest(5)
    assert {event.name for event in ward.events} == {"A"}
    ward.monitor.forget(A)
    assert ward.monitor.next_deadline is None
    ward.rest(100)
    ward.monitor.watch(A, ward.now)
    assert ward.monitor.status(A) is HealthStatus.HEALTHY
    assert ward.monitor.summary(ward.now).peers[0].name == str(A)
    assert ward.monitor.lateness == 0.0


def test_a_forgotten_peer_is_no_reason_to_wake_up() -> None:
    """What was due because of it is not due any more."""
    ward = Ward(peers="ab")
    ward.beat("b", times=3)
    ward.monitor.tick(ward.now)
    ward.monitor.lost(A, ward.now, "reset by peer")
    assert ward.monitor.next_deadline == ward.now
    ward.monitor.forget(A)
    assert ward.monitor.next_deadline == pytest.approx(ward.now + 0.2)


def test_nothing_is_due_between_heartbeats_while_all_is_well() -> None:
    """The next tick is a whole interval away."""
    ward = Ward()
    ward.beat(times=20)
    ward.monitor.tick(ward.now)
    assert ward.monitor.next_deadline == pytest.approx(ward.now + 0.2)


def test_a_status_changes_at_its_moment_and_not_with_the_next_heartbeat() -> None:
    """A pause and twice a pause, though neither is a number of intervals."""
    ward = Ward(HealthConfig(interval=0.3, least_patience=0.7, pause_after=1.0))
    begun = ward.now
    ward.rest(5)
    assert [event.time - begun for event in ward.events] == pytest.approx([1.0, 2.0], abs=0.01)
    exact = HealthMonitor(HealthConfig(interval=0.25, least_patience=0.5, pause_after=1.0))
    exact.watch(A, 0.0)
    seen = [exact.tick(quarter / 4) and exact.status(A) for quarter in range(1, 9)]
    assert [seen[3], seen[7]] == [HealthStatus.SUSPECT, HealthStatus.DEAD]


def test_each_peer_is_judged_by_itself() -> None:
    """One is silent; the other, and the summary, say so."""
    ward = Ward(peers="ab")
    for _ in range(10):
        ward.beat("a", trip=0.01)
        ward.monitor.heard(B, ward.now)
    ward.beat("a", times=5, trip=0.01)
    summary = ward.monitor.summary(ward.now)
    assert str(summary).startswith("1 healthy, 1 suspect; B is suspect: no heartbeat for")
    assert summary.peers[0].round_trip == pytest.approx(0.01)
    assert summary.peers[1].round_trip is None
    assert summary.peers[1].silence == pytest.approx(1.0)


def test_one_that_is_heard_in_the_moment_it_was_lost_was_away_for_no_time() -> None:
    """And what was lost between two ticks is due at that moment."""
    ward = Ward()
    ward.beat(times=10)
    ward.monitor.lost(A, ward.now, "reset by peer")
    ward.monitor.heard(A, ward.now)
    assert ward.monitor.reason(A) == "it was heard again after 0.0 ms"
    ward.monitor.tick(ward.now)
    ward.monitor.lost(A, ward.now + 0.05, "reset by peer")
    assert ward.monitor.next_deadline == ward.now + 0.05


# --- our own lateness ---


def test_a_quarter_of_an_interval_is_not_late() -> None:
    """Of the interval that is in use."""
    for late, lateness in ((0.045, 0.0), (0.055, 0.055)):
        monitor = HealthMonitor(HealthConfig.wired())
        monitor.watch(A, 0.0)
        monitor.tick(0.2 + late)
        assert monitor.lateness == pytest.approx(lateness)


def test_a_tenth_of_an_interval_of_lateness_is_everyday_life() -> None:
    """In a group that beats more slowly, more of it is."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.watch(A, 0.0)
    for said, counts in ((0.019, 0.0), (0.021, 0.021)):
        monitor.heard(A, 0.1, lateness=said)
        assert monitor.allowance(A) == counts
    monitor.adopt(monitor.config.paced(1.0, 5.0))
    for said, counts in ((0.095, 0.0), (0.105, 0.105)):
        monitor.heard(A, 0.1, lateness=said)
        assert monitor.allowance(A) == counts


def test_the_later_one_of_two_decides_how_much_time_is_given() -> None:
    """Our lateness and that of the peer do not add up."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.watch(A, 0.0)
    monitor.tick(0.7)
    assert monitor.lateness == pytest.approx(0.5)
    assert monitor.allowance(A) == pytest.approx(0.5)
    for said in (0.3, 1.5):
        monitor.heard(A, 0.7, lateness=said)
        assert monitor.allowance(A) == pytest.approx(max(said, 0.5))


def test_an_answer_that_waited_for_us_for_half_a_second_says_nothing_about_the_link() -> None:
    """It need not be much longer than usual."""
    ward = Ward()
    ward.beat(times=10, trip=0.010)
    ward.now += 0.7
    ward.monitor.heard(A, ward.now, round_trip=0.5)
    assert ward.monitor.summary(ward.now).peers[0].round_trip == pytest.approx(0.010)


def test_a_node_that_was_held_up_accuses_nobody() -> None:
    """Five seconds without a processor are not five seconds of silence of the others."""
    ward = Ward()
    ward.beat(times=20)
    ward.now += 5
    assert ward.monitor.tick(ward.now) == []
    assert ward.monitor.lateness == pytest.approx(2.0)  # more is not remembered
    assert ward.monitor.patience(A) == pytest.approx(0.6 + 2.0)  # as much as lateness may add
    assert ward.monitor.silence(A, ward.now) == pytest.approx(5)
    ward.beat(times=5)
    assert ward.events == []


def test_patience_returns_to_normal_and_says_what_it_was() -> None:
    """A peer that really is silent is given up in the end, and our own part is mentioned."""
    ward = Ward()
    ward.beat(times=20)
    ward.now += 5
    ward.monitor.tick(ward.now)
    ward.rest(10)
    assert [event.status for event in ward.events] == [HealthStatus.SUSPECT, HealthStatus.DEAD]
    assert "late itself)" in ward.events[0].reason
    assert ward.events[1].time < ward.now - 3


def test_suspicion_is_not_withdrawn_because_patience_grew() -> None:
    """Only a sign of life does that."""
    ward = Ward()
    ward.beat(times=20)
    ward.rest(0.7)
    ward.now += 3
    assert ward.monitor.tick(ward.now) == []
    assert ward.monitor.status(A) is HealthStatus.SUSPECT


def test_a_peer_that_says_it_runs_late_is_given_more_time() -> None:
    """It is suspect later, dead later, and its lateness is in the sentence."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.watch(A, 0.0, name="a")
    monitor.heard(A, 0.2, lateness=0.5)
    assert monitor.patience(A) == pytest.approx(1.5)
    assert monitor.allowance(A) == pytest.approx(0.5)
    events: list[HealthEvent] = []
    due = 0.0
    while not events:
        due = monitor.next_deadline or 0.0
        events = monitor.tick(due)
    assert due == pytest.approx(1.7, abs=0.01)
    assert "it reported that it ran 0.5 s late" in events[0].reason
    while monitor.status(A) is not HealthStatus.DEAD:
        due = monitor.next_deadline or 0.0
        monitor.tick(due)
    assert due == pytest.approx(0.2 + 2.0 + 2 * 0.5, abs=0.01)
    monitor.heard(A, 3.4, lateness=0.0)
    assert monitor.patience(A) == pytest.approx(1.0)


def test_reported_lateness_is_bounded() -> None:
    """Nobody is waited for without end because it says so."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.watch(A, 0.0)
    monitor.heard(A, 0.2, lateness=1e6)
    assert monitor.allowance(A) == HealthConfig.wired().stretch_limit


def test_a_monitor_changes_its_pace_while_it_runs() -> None:
    """In a larger group the same silence accuses nobody; what was learned at the old beat goes."""
    wired = HealthConfig.wired()
    monitor = HealthMonitor(wired)
    monitor.watch(A, 0.0)
    for beat in range(1, 20):
        monitor.heard(A, beat * 0.2)
        monitor.tick(beat * 0.2)
    assert monitor.patience(A) == pytest.approx(0.6)
    monitor.adopt(wired.paced(1.0, 5.0))
    assert monitor.patience(A) == 5.0
    due = monitor.next_deadline
    assert due is not None
    assert monitor.tick(due) == []
    assert monitor.tick(due + 1.0) == []
    assert monitor.status(A) is HealthStatus.HEALTHY
    monitor.adopt(monitor.config)  # the same again changes nothing
    assert monitor.patience(A) == 5.0
    assert monitor.tick(due + 100.0) == []
    assert monitor.lateness == 10.0  # the bound of the new pace


def test_a_quicker_pace_counts_from_now_on() -> None:
    """The next tick comes sooner, and so does suspicion; what lateness may add is less."""
    wired = HealthConfig.wired()
    monitor = HealthMonitor(wired.paced(1.0, 5.0))
    monitor.watch(A, 0.0)
    monitor.tick(9.0)
    assert monitor.lateness == 8.0
    assert monitor.next_deadline == 10.0
    monitor.adopt(wired)
    assert monitor.next_deadline == pytest.approx(9.2)
    assert monitor.lateness == wired.stretch_limit
    monitor.adopt(wired.paced(1.0, 5.0))
    assert monitor.next_deadline == pytest.approx(9.2)


def test_a_shorter_pause_makes_suspicion_due_sooner() -> None:
    """Though the heartbeat stays the same."""
    wired = HealthConfig.wired()
    monitor = HealthMonitor(wired.paced(0.2, 4.0))
    monitor.watch(A, 0.0)
    monitor.heard(A, 0.05)
    for beat in range(1, 6):
        monitor.tick(beat * 0.2)
    assert monitor.next_deadline == pytest.approx(1.2)
    monitor.adopt(wired)
    assert monitor.next_deadline == pytest.approx(1.05)


def test_a_monitor_without_peers_takes_another_pace() -> None:
    """There is no deadline to move."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.adopt(HealthConfig.wifi())
    assert monitor.next_deadline is None


# --------------------------------------------------------------------------------------------------
# What arrivals teach: patience that fits the peer, and how good its link is.

CONFIG = HealthConfig(interval=0.2, least_patience=0.5, pause_after=4.0)


def after(gaps: list[float], config: HealthConfig = CONFIG) -> ArrivalTimes:
    """A peer that was heard after each of these silences."""
    arrivals = ArrivalTimes(config, 0.0)
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
    mostly = after([*[0.3] * 6, *[0.5] * 9, *[0.7] * 6])
    assert mostly.patience == pytest.approx(0.5 + 8 * 1.4826 * 0.2)
    assert after([*[0.3] * 8, *[0.5] * 13]).patience == pytest.approx(0.75)
    assert after([0.2] * 20 + [1.8]).patience == pytest.approx(2.7)


def test_one_long_silence_is_forgotten_in_time() -> None:
    """After 64 heartbeats nothing is left of it."""
    assert after([1.8, *[0.2] * 63]).patience == pytest.approx(2.7)
    assert after([1.8, *[0.2] * 64]).patience == 0.5


def test_patience_grows_at_once_and_shrinks_with_the_eighth_silence_after_that() -> None:
    """A lesson that is not much older costs a tenth."""
    arrivals = after([1.8, *[0.2] * 63])
    for _ in range(8):
        assert arrivals.patience == pytest.approx(2.7)
        arrivals.arrived(arrivals.heard_at + 0.2, None)
    assert arrivals.patience == 0.5
    arrivals.arrived(arrivals.heard_at + 1.0, None)
    assert arrivals.patience == pytest.approx(1.5)


def test_half_an_interval_is_the_shortest_silence_that_counts() -> None:
    """What comes sooner was sent between two heartbeats."""
    config = HealthConfig(interval=0.25, least_patience=0.5, pause_after=4.0)
    assert after([0.125] * 8, config).patience == 0.5
    assert after([0.125] * 8, config).loss == 0.0
    assert after([0.1] * 8, config).patience == 4.0


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
    outage = after([*[0.2] * 20, 3.0])
    assert outage.loss == pytest.approx(3 / (3 + 21))  # an outage is not a lossy link


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
    arrivals.arrived(2.2, -0.005)
    assert arrivals.round_trip == pytest.approx(0.011)


def test_an_answer_as_quick_as_usual_counts_though_we_ran_late() -> None:
    """What took longer may have waited for us."""
    arrivals = after([])
    arrivals.arrived(0.2, 0.25)
    for turn in range(7):
        assert not arrivals.is_timed
        arrivals.arrived(0.4 + turn, 0.3, is_late=True)
        arrivals.arrived(0.8 + turn, 0.25, is_late=True)
    assert arrivals.is_timed
    assert arrivals.round_trip == 0.25


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


# --------------------------------------------------------------------------------------------------
# Lived time: it stands still while we were held up, and jumps of the clock do not move it.


def started() -> StallAwareClock:
    """A clock that began at 100 and means to be called again at 101."""
    clock = StallAwareClock(grace=0.1, half_life=1.0)
    assert clock.advance(100.0) == 0.0
    clock.due = 101.0
    return clock


def test_punctual_calls_live_all_of_the_time() -> None:
    """Early or on time, and a little late as well."""
    clock = started()
    assert clock.wall == 100.0
    assert clock.advance(100.5) == pytest.approx(0.5)
    assert clock.advance(101.05) == pytest.approx(1.05)
    assert clock.lateness == 0.0
    assert clock.elapsed == clock.awake
    assert clock.elapsed_at(102.05) == pytest.approx(2.05)
    assert clock.elapsed_at(99.0) == pytest.approx(1.05)


def test_before_the_first_call_no_time_has_passed() -> None:
    """Whatever the clock of the caller shows."""
    clock = StallAwareClock(grace=0.1, half_life=1.0)
    assert clock.wall == 0.0
    assert clock.elapsed_at(1e9) == 0.0


def test_being_held_up_is_not_counted_but_remembered() -> None:
    """Four seconds late: one second counts, and the lateness fades by half in each second."""
    clock = started()
    assert clock.advance(105.0) == pytest.approx(1.0)
    assert clock.elapsed == pytest.approx(5.0)
    assert clock.lateness == pytest.approx(4.0)
    clock.due = 200.0
    clock.advance(106.0)
    assert clock.lateness == pytest.approx(2.0)


def test_lateness_fades_by_half_in_each_awake_half_life() -> None:
    """The time of another hold-up is not awake, so it does not fade meanwhile."""
    clock = StallAwareClock(grace=0.1, half_life=2.0)
    clock.advance(100.0)
    clock.due = 101.0
    clock.advance(105.0)
    clock.due = 200.0
    clock.advance(107.0)
    assert clock.lateness == pytest.approx(2.0)
    clock.due = 109.0
    clock.advance(109.5)
    assert clock.lateness == pytest.approx(1.0)


def test_the_grace_itself_is_not_late() -> None:
    """More than that is."""
    for now, lateness in ((101.125, 0.0), (101.25, 0.25)):
        clock = StallAwareClock(grace=0.125, half_life=1.0)
        clock.advance(100.0)
        clock.due = 101.0
        clock.advance(now)
        assert clock.lateness == lateness


def test_several_calls_after_a_hold_up_count_it_once() -> None:
    """Whoever works off a queue after waking up is not late again."""
    clock = started()
    clock.advance(105.0)
    assert clock.advance(105.01) == pytest.approx(1.01)


def test_nobody_is_late_who_had_no_appointment() -> None:
    """Without peers there is no loop to be late."""
    clock = started()
    clock.due = None
    assert clock.advance(150.0) == pytest.approx(50.0)


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    """Time goes on from where the clock is now; so does the appointment."""
    clock = started()
    clock.advance(100.5)
    assert clock.advance(40.0) == pytest.approx(0.5)
    assert clock.due == pytest.approx(40.5)
    assert clock.advance(40.4) == pytest.approx(0.9)
    clock.due = None
    clock.advance(10.0)
    assert clock.advance(11.0) == pytest.approx(1.9)


def test_stamps_slightly_out_of_order_are_everyday_life() -> None:
    """A message stamped a moment before the last tick neither loses nor adds time."""
    clock = started()
    clock.advance(100.5)
    clock.advance(100.45)
    assert clock.advance(100.6) == pytest.approx(0.6)
    exact = StallAwareClock(grace=0.125, half_life=1.0)
    exact.advance(100.0)
    exact.due = 101.0
    exact.advance(99.875)
    assert (exact.wall, exact.due) == (100.0, 101.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 10))
def test_awake_time_never_runs_back_nor_ahead(stamps: list[float], wait: float) -> None:
    """Lived is at most elapsed, and both only grow, whatever the caller's clock does."""
    clock = StallAwareClock(grace=0.1, half_life=1.0)
    before = (0.0, 0.0)
    for now in stamps:
        clock.advance(now)
        assert before <= (clock.awake, clock.elapsed)
        assert clock.awake - before[0] <= clock.elapsed - before[1] + 1e-6
        assert clock.lateness >= 0
        before = (clock.awake, clock.elapsed)
        clock.due = clock.wall + wait


# --------------------------------------------------------------------------------------------------
# What may be configured about health, and that the presets keep the promises made for them.

PRESETS = [HealthConfig.loopback(), HealthConfig.wired(), HealthConfig.wifi()]


def test_wired_leaves_a_second_to_agree_on_who_remains() -> None:
    """Whoever falls silent is given up after two seconds of the three that are promised."""
    assert HealthConfig.wired() == HealthConfig()
    assert HealthConfig() == HealthConfig(0.2, 0.6, 1.0, 0.1, 0.05, 0.2)
    assert HealthConfig.wired().dead_after <= 2.0


def test_the_presets_are_those_of_the_table() -> None:
    """Heartbeat, patience, pause; then the bounds of a good link."""
    assert HealthConfig.loopback() == HealthConfig(0.1, 0.4, 1.0, 0.05, 0.03, 0.2)
    assert HealthConfig.wifi() == HealthConfig(0.5, 2.0, 4.0, 0.3, 0.15, 0.3)
    assert [preset.dead_after for preset in PRESETS] == [2.0, 2.0, 8.0]
    assert [preset.stretch_limit for preset in PRESETS] == [2.0, 2.0, 8.0]


def test_times_may_be_given_as_durations() -> None:
    """They are kept in seconds."""
    config = HealthConfig(interval=timedelta(milliseconds=100))  # type: ignore[arg-type]
    assert config.interval == 0.1


@pytest.mark.parametrize("preset", PRESETS)
def test_whoever_is_given_up_has_paused_long_before(preset: HealthConfig) -> None:
    """In every preset the one bound is twice the other, and several heartbeats fit in between."""
    assert preset.dead_after == 2 * preset.pause_after
    assert preset.pause_after >= 5 * preset.interval
    assert preset.least_patience > 2.5 * preset.interval


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0.0},
        {"interval": -1.0},
        {"interval": math.nan},
        {"interval": 0.4},
        {"least_patience": 1.5},
        {"pause_after": 0.5},
        {"pause_after": math.inf},
    ],
)
def test_times_that_could_not_work_are_refused(wrong: dict[str, float]) -> None:
    """A single late heartbeat must never accuse anybody."""
    with pytest.raises(ValueError, match="2 × interval ≤ least_patience ≤ pause_after"):
        HealthConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slow_round_trip": 0.0},
        {"high_jitter": 0.0},
        {"high_jitter": -1.0},
        {"high_loss": 0.0},
        {"high_loss": 1},
    ],
)
def test_bounds_of_a_link_that_could_not_work_are_refused(wrong: dict[str, float]) -> None:
    """No link would ever be good, or none ever bad."""
    with pytest.raises(ValueError, match="high_loss between 0 and 1"):
        HealthConfig(**wrong)


# --------------------------------------------------------------------------------------------------
# What holds for health whatever happens: random arrivals, hold-ups, clocks that jump.

PROPERTIES_A = process("a")
PROPERTIES_PRESETS = {
    "loopback": HealthConfig.loopback(),
    "wired": HealthConfig.wired(),
    "wifi": HealthConfig.wifi(),
}

waits = st.floats(0, 3)
trips = st.none() | st.floats(0, 10)
presets = st.sampled_from(sorted(PROPERTIES_PRESETS))
steps = st.lists(
    st.tuples(st.just("rest"), waits)
    | st.tuples(st.just("beat"), trips)
    | st.tuples(st.just("lost"), st.none())
    | st.tuples(st.just("held up"), st.floats(0, 20))
    | st.tuples(st.just("clock"), st.floats(-1e5, 1e5)),
    max_size=40,
)


def act(ward: Ward, step: tuple[str, float | None]) -> None:
    """Let one of the things happen that can."""
    what, amount = step
    if what == "rest":
        ward.rest(amount or 0.0)
    elif what == "beat":
        ward.monitor.heard(PROPERTIES_A, ward.now, round_trip=amount)
    elif what == "lost":
        ward.monitor.lost(PROPERTIES_A, ward.now, "closed")
    else:  # held up, or the clock was set: the monitor cannot know which
        ward.now += amount or 0.0
        ward.events += ward.monitor.tick(ward.now)


@settings(max_examples=50)
@given(presets, steps)
def test_nobody_dies_without_silence(preset: str, happened: list[tuple[str, float | None]]) -> None:
    """Dead means: not heard for so long, by a clock that stands still while we do."""
    config = PROPERTIES_PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        known = len(ward.events)
        act(ward, step)
        died = [event for event in ward.events[known:] if event.status is HealthStatus.DEAD]
        if died:
            assert ward.monitor.silence(PROPERTIES_A, ward.now) >= config.dead_after - 1e-6
            assert step[0] != "beat"


@settings(max_examples=50)
@given(presets, steps)
def test_patience_is_bounded_in_every_situation(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """Between the least and the longest, plus at most what our own lateness may add."""
    config = PROPERTIES_PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        act(ward, step)
        longest = config.pause_after + config.stretch_limit
        assert config.least_patience <= ward.monitor.patience(PROPERTIES_A) <= longest


@settings(max_examples=50)
@given(presets, steps)
def test_silence_only_makes_things_worse(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """Whatever was before: without a word no status improves, and the end is death, in time."""
    config = PROPERTIES_PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        act(ward, step)
    ward.rest(0)
    known, severity = len(ward.events), ward.monitor.status(PROPERTIES_A).severity
    ward.rest(2 * (config.pause_after + config.stretch_limit) + config.interval)
    silent = [
        event.status.severity
        for event in ward.events[known:]
        if not event.status.is_operational or not event.previous.is_operational
    ]
    assert silent == sorted(silent)
    assert ward.monitor.status(PROPERTIES_A) is HealthStatus.DEAD
    assert severity <= HealthStatus.DEAD.severity


@settings(max_examples=50)
@given(presets, steps)
def test_nothing_is_told_twice(preset: str, happened: list[tuple[str, float | None]]) -> None:
    """Every event follows on the one before, and ticking alone brings nothing new."""
    ward = Ward(PROPERTIES_PRESETS[preset])
    for step in happened:
        act(ward, step)
    previous = HealthStatus.HEALTHY
    for event in ward.events:
        assert event.previous is previous
        previous = event.status
    ward.monitor.tick(ward.now)
    reason = ward.monitor.reason(PROPERTIES_A)
    assert [ward.monitor.tick(ward.now) for _ in range(5)] == [[]] * 5
    assert ward.monitor.reason(PROPERTIES_A) == reason


@settings(max_examples=50)
@given(presets, steps)
def test_the_next_tick_is_never_far_nor_a_busy_loop(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """At most one heartbeat away, and after a tick at least a millisecond."""
    config = PROPERTIES_PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        act(ward, step)
        ward.monitor.tick(ward.now)
        due = ward.monitor.next_deadline
        assert due is not None
        wait = due - ward.now
        assert 0.0009 < wait <= config.interval + config.interval / 4 + 1e-6


class Neighbour:
    """A node that gets a processor when the machine gives it one."""

    def __init__(self, name: str, everybody: str, config: HealthConfig) -> None:
        self.name = name
        self.monitor = HealthMonitor(config)
        self.inbox: list[str] = []
        self.events: list[potluck_HealthEvent] = []
        for other in everybody.replace(name, ""):
            self.monitor.watch(process(other), 0.0, name=other)

    def run(self, now: float) -> float:
        """Work off the inbox and look round; when to be woken next."""
        for sender in self.inbox:
            self.monitor.heard(process(sender), now)
        self.inbox.clear()
        self.events += self.monitor.tick(now)
        return self.monitor.next_deadline or now


@pytest.mark.parametrize("preset", sorted(PROPERTIES_PRESETS))
@settings(max_examples=10)
@given(chance=st.randoms(use_true_random=False), worst=st.floats(0.1, 2.0))
def test_neighbours_that_starve_together_stay_together(
    preset: str, chance: Random, worst: float
) -> None:
    """For five seconds every turn on the processor comes late, by up to two seconds."""
    names, config = "abcd", PROPERTIES_PRESETS[preset]
    nodes = {name: Neighbour(name, names, config) for name in names}
    agenda = [(0.0, name) for name in names]
    while agenda[0][0] < 20:
        now, name = heapq.heappop(agenda)
        for other in names.replace(name, ""):
            nodes[other].inbox.append(name)
        wanted = max(nodes[name].run(now), now + config.interval / 2)
        starved = 5 < wanted < 10
        heapq.heappush(agenda, (wanted + (chance.uniform(0, worst) if starved else 0.0), name))
    for node in nodes.values():
        assert [str(event) for event in node.events if event.status is HealthStatus.DEAD] == []
        assert node.monitor.summary(20.0).is_cluster_healthy


def test_all_of_them_stopped_for_five_seconds_stay_together() -> None:
    """Whoever wakes up first finds the others silent, and does not blame them for it."""
    names = "abcd"
    nodes = {name: Neighbour(name, names, HealthConfig.wired()) for name in names}
    for beat in [*(turn * 0.2 for turn in range(50)), *(15 + turn * 0.2 for turn in range(50))]:
        for node in nodes.values():
            node.run(beat)
            for other in names.replace(node.name, ""):
                nodes[other].inbox.append(node.name)
    assert [str(event) for node in nodes.values() for event in node.events] == []


# --------------------------------------------------------------------------------------------------
# The words in which health is told.

PEER = ProcessId(NodeId("a" * 32), 1)


def peer(name: str, status: HealthStatus, reason: str) -> PeerHealth:
    """The health of somebody."""
    return PeerHealth(PEER, name, status, reason, 0.1, 0.6, 0.001, 0.0001, 0.0)


def test_one_can_work_with_the_healthy_and_the_degraded() -> None:
    """The four statuses, from best to worst."""
    working = [status for status in HealthStatus if status.is_operational]
    assert working == [HealthStatus.HEALTHY, HealthStatus.DEGRADED]
    assert [status.severity for status in HealthStatus] == [0, 1, 2, 3]


def test_an_event_is_one_sentence() -> None:
    """Who, what, and why."""
    event = potluck_HealthEvent(
        PEER, "attic", HealthStatus.HEALTHY, HealthStatus.DEAD, "no word", 3.0
    )
    assert str(event) == "attic is dead: no word"


def test_a_summary_counts_and_explains() -> None:
    """Healthy peers are only counted; for the others it says why."""
    summary = HealthSummary(
        (
            peer("desk", HealthStatus.HEALTHY, "fine"),
            peer("attic", HealthStatus.DEGRADED, "slow"),
            peer("sofa", HealthStatus.DEAD, "silent"),
            peer("hall", HealthStatus.HEALTHY, "fine"),
        ),
        lateness=0.0,
    )
    assert (
        str(summary)
        == "2 healthy, 1 degraded, 1 dead; attic is degraded: slow; sofa is dead: silent"
    )
    assert summary.counts[HealthStatus.SUSPECT] == 0
    assert summary.health_percentage == 75.0
    assert not summary.is_cluster_healthy


def test_a_node_alone_is_well() -> None:
    """Nobody is missed where nobody is expected."""
    summary = HealthSummary((), lateness=0.0)
    assert str(summary) == "no peers"
    assert summary.is_cluster_healthy
    assert summary.health_percentage == 100.0


# --------------------------------------------------------------------------------------------------
# Pace: interval and pause by the size of a group, and pauses lengthened by lateness.

WIRED, WIFI = ConfigHealthConfig.wired(), ConfigHealthConfig.wifi()


@pytest.mark.parametrize("members", range(1, 8))
def test_small_groups_keep_the_preset(members: int) -> None:
    """Up to seven members nothing changes."""
    assert pace(members, WIRED) == (0.2, 1.0)
    assert pace(members, WIFI) == (0.5, 4.0)


@pytest.mark.parametrize("members", [8, 16, 32, 64, 256])
def test_larger_groups_beat_more_slowly(members: int) -> None:
    """No member sends more beats in a second than it can afford; five fit into a pause."""
    interval, pause = pace(members, WIRED)
    assert (members - 1) / interval == pytest.approx(BEATS_PER_SECOND)
    assert pause == pytest.approx(5 * interval)


def test_the_slowest_member_sets_the_pause() -> None:
    """One member on Wi-Fi makes the whole view patient; it cannot make it impatient."""
    assert pace(3, WIRED, [1.0, 4.0, 1.0]) == (0.2, 4.0)
    assert pace(3, WIRED, [0.5]) == (0.2, 1.0)


def test_a_pause_is_lengthened_by_lateness_within_bounds() -> None:
    """Small lateness changes nothing, and none lengthens it beyond a bound."""
    assert lengthened(1.0, 0.1) == 1.0
    assert lengthened(1.0, 0.2) == pytest.approx(1.4)
    assert lengthened(5.0, 1e6) == LENGTHENED * 5.0


@pytest.mark.parametrize("members", [2, 8, 33, 256])
@pytest.mark.parametrize("preset", [WIRED, WIFI, ConfigHealthConfig.loopback()])
def test_every_pace_makes_a_valid_config(members: int, preset: ConfigHealthConfig) -> None:
    """Patience fits between two intervals and the pause."""
    config = preset.paced(*pace(members, preset))
    assert 2 * config.interval <= config.least_patience <= config.pause_after
    assert config.slow_round_trip == preset.slow_round_trip


def test_a_preset_with_a_short_pause_beats_often_enough() -> None:
    """Five beats fit into a pause whatever the preset's interval is."""
    short = replace(WIRED, interval=0.3, least_patience=0.8)
    assert pace(2, short) == (0.2, 1.0)


def test_negligible_lateness_is_a_tenth_of_the_pause() -> None:
    """Of a long pause more is negligible."""
    assert lengthened(4.0, 0.39) == 4.0
    assert lengthened(4.0, 0.41) == pytest.approx(4.82)
