"""How many calls at a time, for how long, where they run, and to whom."""

import pytest

from potluck import NoConnection
from potluck.core.calls import Pace, Stall, Window, find_rank, milliseconds, reply_by


def test_a_window_bounds_calls_and_bytes() -> None:
    """And lets a single message of any size through."""
    window = Window(2, 100)
    window.add(60)
    assert window.admits(40)
    assert not window.admits(41)
    window.add(40)
    assert not window.admits(0)
    window.remove(60)
    window.remove(40)
    assert (window.calls, window.octets) == (0, 0)
    assert window.admits(1 << 40)


def test_a_function_earns_trust_by_quick_runs() -> None:
    """One slow run after many quick ones is forgiven, two are not."""
    pace = Pace()
    assert not pace.is_quick
    for _ in range(20):
        pace.observe(1e-6)
    assert pace.is_quick
    pace.observe(1.0)
    assert pace.is_quick
    pace.observe(1.0)
    pace.observe(1.0)
    assert not pace.is_quick
    for _ in range(Pace.ENOUGH):
        pace.observe(1e-6)
    assert pace.is_quick


def test_all_workers_waiting_for_long_is_a_stall() -> None:
    """Not if one of them works, nor if one got its answer meanwhile."""
    stall = Stall(workers=2, after=0.5)
    stall.begin_waiting(10.0)
    assert not stall.is_stalled(20.0)
    stall.begin_waiting(20.0)
    assert not stall.is_stalled(20.4)
    assert stall.is_stalled(20.5)
    stall.end_waiting()
    assert not stall.is_stalled(30.0)
    stall.begin_waiting(30.0)
    assert not stall.is_stalled(30.1)
    assert stall.is_stalled(30.5)


def test_a_reason_arrives_before_the_caller_gives_up() -> None:
    """A tenth earlier, or a tenth of a second."""
    assert reply_by(5.0, milliseconds(0.5)) == pytest.approx(5.45)
    assert reply_by(5.0, milliseconds(60)) == pytest.approx(64.9)


def test_a_node_is_found_by_its_name() -> None:
    """In short or in full; several ranks on one machine need a number."""
    names = {0: "kitchen at 10.0.0.2:1", 1: "attic at 10.0.0.3:1", 2: "attic at 10.0.0.3:2"}
    assert find_rank("kitchen", names) == 0
    assert find_rank("attic at 10.0.0.3:2", names) == 2
    with pytest.raises(NoConnection, match="attic runs several ranks: 1, 2"):
        find_rank("attic", names)
    with pytest.raises(NoConnection, match=r"No rank runs on kitchn\. Did you mean kitchen\?"):
        find_rank("kitchn", names)
    with pytest.raises(NoConnection, match=r"No rank runs on zzz$"):
        find_rank("zzz", names)
