"""What holds for health whatever happens: random arrivals, hold-ups, clocks that jump."""

import heapq
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import HealthConfig, HealthEvent, HealthMonitor, HealthStatus
from support.health import Ward, process

A = process("a")
PRESETS = {
    "loopback": HealthConfig.loopback(),
    "wired": HealthConfig.wired(),
    "wifi": HealthConfig.wifi(),
}

waits = st.floats(0, 3)
trips = st.none() | st.floats(0, 10)
presets = st.sampled_from(sorted(PRESETS))
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
        ward.monitor.heard(A, ward.now, round_trip=amount)
    elif what == "lost":
        ward.monitor.lost(A, ward.now, "closed")
    else:  # held up, or the clock was set: the monitor cannot know which
        ward.now += amount or 0.0
        ward.events += ward.monitor.tick(ward.now)


@settings(max_examples=50)
@given(presets, steps)
def test_nobody_dies_without_silence(preset: str, happened: list[tuple[str, float | None]]) -> None:
    """Dead means: not heard for so long, by a clock that stands still while we do."""
    config = PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        known = len(ward.events)
        act(ward, step)
        died = [event for event in ward.events[known:] if event.status is HealthStatus.DEAD]
        if died:
            assert ward.monitor.silence(A, ward.now) >= config.dead_after - 1e-6
            assert step[0] != "beat"


@settings(max_examples=50)
@given(presets, steps)
def test_patience_is_bounded_in_every_situation(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """Between the least and the longest, plus at most what our own lateness may add."""
    config = PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        act(ward, step)
        longest = config.pause_after + config.stretch_limit
        assert config.least_patience <= ward.monitor.patience(A) <= longest


@settings(max_examples=50)
@given(presets, steps)
def test_silence_only_makes_things_worse(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """Whatever was before: without a word no status improves, and the end is death, in time."""
    config = PRESETS[preset]
    ward = Ward(config)
    for step in happened:
        act(ward, step)
    ward.rest(0)
    known, severity = len(ward.events), ward.monitor.status(A).severity
    ward.rest(2 * (config.pause_after + config.stretch_limit) + config.interval)
    silent = [
        event.status.severity
        for event in ward.events[known:]
        if not event.status.is_operational or not event.previous.is_operational
    ]
    assert silent == sorted(silent)
    assert ward.monitor.status(A) is HealthStatus.DEAD
    assert severity <= HealthStatus.DEAD.severity


@settings(max_examples=50)
@given(presets, steps)
def test_nothing_is_told_twice(preset: str, happened: list[tuple[str, float | None]]) -> None:
    """Every event follows on the one before, and ticking alone brings nothing new."""
    ward = Ward(PRESETS[preset])
    for step in happened:
        act(ward, step)
    previous = HealthStatus.HEALTHY
    for event in ward.events:
        assert event.previous is previous
        previous = event.status
    ward.monitor.tick(ward.now)
    reason = ward.monitor.reason(A)
    assert [ward.monitor.tick(ward.now) for _ in range(5)] == [[]] * 5
    assert ward.monitor.reason(A) == reason


@settings(max_examples=50)
@given(presets, steps)
def test_the_next_tick_is_never_far_nor_a_busy_loop(
    preset: str, happened: list[tuple[str, float | None]]
) -> None:
    """At most one heartbeat away, and after a tick at least a millisecond."""
    config = PRESETS[preset]
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
        self.events: list[HealthEvent] = []
        for other in everybody.replace(name, ""):
            self.monitor.watch(process(other), 0.0, name=other)

    def run(self, now: float) -> float:
        """Work off the inbox and look round; when to be woken next."""
        for sender in self.inbox:
            self.monitor.heard(process(sender), now)
        self.inbox.clear()
        self.events += self.monitor.tick(now)
        return self.monitor.next_deadline or now


@pytest.mark.parametrize("preset", sorted(PRESETS))
@settings(max_examples=10)
@given(chance=st.randoms(use_true_random=False), worst=st.floats(0.1, 2.0))
def test_neighbours_that_starve_together_stay_together(
    preset: str, chance: Random, worst: float
) -> None:
    """For five seconds every turn on the processor comes late, by up to two seconds."""
    names, config = "abcd", PRESETS[preset]
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
