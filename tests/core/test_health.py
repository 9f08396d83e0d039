"""Health: who is well, who is suspect, who is given up, and in which words."""

import pytest

from potluck import HealthConfig, HealthMonitor, HealthStatus
from potluck.core.health_records import HealthEvent
from support.health import Ward, process

A, B = process("a"), process("b")


# --- silence ---


def test_a_peer_that_is_heard_in_time_stays_healthy() -> None:
    """A minute of heartbeats causes no event."""
    ward = Ward()
    ward.beat(times=300, trip=0.001)
    assert ward.events == []
    assert ward.monitor.status(A) is HealthStatus.HEALTHY
    assert ward.monitor.reason(A) == "nothing has been missed since it is watched"


def test_a_silent_peer_is_suspected_and_then_given_up() -> None:
    """Each with its reason, once, and all within the bound of the preset."""
    ward = Ward()
    ward.beat(times=50)
    silent_from = ward.now
    ward.rest(10)
    expected = "A is suspect: nothing was heard for 0.6 s, and 0.6 s is the longest normal silence"
    assert ward.told[0] == expected
    expected = (
        "A is dead: nothing was heard for 2.0 s; if it is alive, it paused itself after 1.0 s"
    )
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
    assert ward.monitor.reason(A).endswith("of its heartbeats do not come in time")


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


def test_each_peer_is_judged_by_itself() -> None:
    """One is silent; the other, and the summary, say so."""
    ward = Ward(peers="ab")
    for _ in range(10):
        ward.beat("a", trip=0.01)
        ward.monitor.heard(B, ward.now)
    ward.beat("a", times=5, trip=0.01)
    summary = ward.monitor.summary(ward.now)
    assert str(summary).startswith("1 healthy, 1 suspect; B is suspect: nothing was heard for")
    assert summary.peers[0].round_trip == pytest.approx(0.01)
    assert summary.peers[1].round_trip is None
    assert summary.peers[1].silence == pytest.approx(1.0)


# --- our own lateness ---


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
    assert "late ourselves)" in ward.events[0].reason
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
    assert "it said that it ran 0.5 s late" in events[0].reason
    monitor.heard(A, 1.8, lateness=0.0)
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


def test_a_monitor_without_peers_takes_another_pace() -> None:
    """There is no deadline to move."""
    monitor = HealthMonitor(HealthConfig.wired())
    monitor.adopt(HealthConfig.wifi())
    assert monitor.next_deadline is None
