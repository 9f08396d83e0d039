"""Lived time: it stands still while we were held up, and jumps of the clock do not move it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.health_clock import LivedClock


def started() -> LivedClock:
    """A clock that began at 100 and means to be called again at 101."""
    clock = LivedClock(grace=0.1, half_life=1.0)
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
    assert clock.elapsed == clock.lived
    assert clock.elapsed_at(102.05) == pytest.approx(2.05)
    assert clock.elapsed_at(99.0) == pytest.approx(1.05)


def test_before_the_first_call_no_time_has_passed() -> None:
    """Whatever the clock of the caller shows."""
    clock = LivedClock(grace=0.1, half_life=1.0)
    assert clock.wall == 0.0
    assert clock.elapsed_at(1e9) == 0.0


def test_being_held_up_is_not_lived_but_remembered() -> None:
    """Four seconds late: one second counts, and the lateness fades by half in each second."""
    clock = started()
    assert clock.advance(105.0) == pytest.approx(1.0)
    assert clock.elapsed == pytest.approx(5.0)
    assert clock.lateness == pytest.approx(4.0)
    clock.due = 200.0
    clock.advance(106.0)
    assert clock.lateness == pytest.approx(2.0)


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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 10))
def test_lived_time_never_runs_back_nor_ahead(stamps: list[float], wait: float) -> None:
    """Lived is at most elapsed, and both only grow, whatever the caller's clock does."""
    clock = LivedClock(grace=0.1, half_life=1.0)
    before = (0.0, 0.0)
    for now in stamps:
        clock.advance(now)
        assert before <= (clock.lived, clock.elapsed)
        assert clock.lived - before[0] <= clock.elapsed - before[1] + 1e-6
        assert clock.lateness >= 0
        before = (clock.lived, clock.elapsed)
        clock.due = clock.wall + wait
