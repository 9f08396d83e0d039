"""Sections: what needs more than a counter."""

import pytest

from potluck.metrics import sections
from potluck.metrics.sections import RpcMetrics, TrainingMetrics, ViewMetrics


class Clock:
    """Stands until it is pushed."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the machine's."""
    made = Clock()
    monkeypatch.setattr(sections, "time", made)
    return made


def test_pauses_add_up_and_the_present_one_counts(clock: Clock) -> None:
    """Whoever is told twice that it pauses has paused once."""
    views = ViewMetrics()
    views.pause(paused=False)
    views.pause(paused=True)
    clock.now += 2
    views.pause(paused=True)
    assert (views.snapshot().pauses, views.snapshot().paused_seconds) == (1, 2)
    views.pause(paused=False)
    clock.now += 100
    views.pause(paused=True)
    clock.now += 3
    assert (views.snapshot().pauses, views.snapshot().paused_seconds) == (2, 5)


def test_the_pace_of_training_is_that_of_the_last_steps(clock: Clock) -> None:
    """One step says nothing yet."""
    training = TrainingMetrics()
    training.commit(1, 10.0, tries=1)
    assert training.snapshot().samples_per_second == 0
    for step in range(2, 200):
        clock.now += 10 if step < 100 else 0.5
        training.commit(step, 10.0, tries=1)
    assert training.snapshot().samples_per_second == pytest.approx(20)
    assert training.snapshot().samples == 1990


def test_calls_under_way_are_those_of_the_agents_that_are_there() -> None:
    """One that is gone has none."""

    class Agent:
        in_flight = 3

    rpc, agent = RpcMetrics(), Agent()
    rpc.follow(agent)
    rpc.follow(agent)
    assert rpc.snapshot().in_flight == 3
    del agent
    assert rpc.snapshot().in_flight == 0
