"""The clock that is pushed: order, cancelling, and clocks that are wrong."""

import pytest

from potluck.testing.clock import LocalClock, VirtualClock


def test_things_happen_in_the_order_of_their_time() -> None:
    """Those due at one moment keep the order in which they were asked for."""
    seen: list[object] = []
    clock = VirtualClock()
    for when, what in [(2.0, "c"), (1.0, "a"), (1.0, "b")]:
        clock.at(when, seen.append, what)
    clock.advance(3.0)
    assert seen == ["a", "b", "c"]
    assert clock() == 3.0


def test_the_clock_shows_the_moment_of_what_happens() -> None:
    """Whoever looks at the clock during an action sees the time it was due."""
    seen: list[object] = []
    clock = VirtualClock(start=10.0)
    clock.after(0.5, lambda: seen.append(clock.now))
    clock.advance(5.0)
    assert seen == [10.5]


def test_an_action_may_ask_for_another_within_the_same_push() -> None:
    """A chain of actions runs to the end of the push, and no further."""
    seen: list[object] = []
    clock = VirtualClock()

    def again() -> None:
        seen.append(clock.now)
        clock.after(1.0, again)

    again()
    clock.advance(2.5)
    assert seen == [0.0, 1.0, 2.0]
    assert clock.next_due == 3.0


def test_what_is_cancelled_does_not_happen() -> None:
    """Cancelling twice, or too late, is harmless."""
    seen: list[object] = []
    clock = VirtualClock()
    late = clock.after(1.0, seen.append, "late")
    kept = clock.after(2.0, seen.append, "kept")
    late.cancel()
    late.cancel()
    assert clock.next_due == 2.0
    clock.advance(3.0)
    kept.cancel()
    assert seen == ["kept"]
    assert clock.next_due is None


def test_a_moment_that_has_passed_is_now() -> None:
    """Time never goes back."""
    seen: list[object] = []
    clock = VirtualClock(start=5.0)
    clock.at(1.0, lambda: seen.append(clock.now))
    assert clock.step()
    assert seen == [5.0]
    assert not clock.step()
    clock.advance_to(4.0)
    assert clock.now == 5.0


def test_a_local_clock_drifts_and_leaps() -> None:
    """What it will show can be turned into the time of the world and back."""
    clock = VirtualClock(start=3.0)
    watch = LocalClock(clock, offset=50.0)
    assert watch.now == pytest.approx(50.0)
    watch.drift(0.5)
    clock.advance(4.0)
    assert watch.now == pytest.approx(52.0)
    watch.jump(10.0)
    assert watch.now == pytest.approx(62.0)
    assert watch.world_time(63.0) == pytest.approx(clock.now + 2.0)


def test_a_suspended_clock_stands_still() -> None:
    """It goes on from where it stood; thawing what is not frozen changes nothing."""
    clock = VirtualClock()
    watch = LocalClock(clock)
    clock.advance(1.0)
    watch.freeze()
    clock.advance(10.0)
    watch.thaw()
    watch.thaw()
    clock.advance(1.0)
    assert watch.now == pytest.approx(2.0)
