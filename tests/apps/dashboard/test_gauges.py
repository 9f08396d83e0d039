"""Gauges: what people want to see of counters that only grow."""

from __future__ import annotations

from potluck.apps.dashboard.gauges import KEPT, MAX_CURVE, MAX_PROCESSES, Gauges

ME = ("a" * 32, 1)


def counted(octets: float, waited: float) -> dict[str, float]:
    """What a process tells."""
    return {"collectives.bytes": octets, "waiting.total": waited}


def test_counters_become_rates() -> None:
    """Of the time between two looks; looks that come too soon are left out."""
    gauges = Gauges()
    gauges.note(ME, counted(1000, 5.0), 10.0)
    gauges.note(ME, counted(1500, 5.1), 10.3)
    gauges.note(ME, counted(3000, 5.5), 12.0)
    assert [each.as_list() for each in gauges.samples(ME)] == [[12.0, 1000, 0.25]]


def test_a_process_that_counts_nothing_has_no_curve() -> None:
    """And counters that fall back, or waiting beyond the clock, stay within what is possible."""
    gauges = Gauges()
    gauges.note(ME, {"uptime_seconds": 3.0}, 1.0)
    assert gauges.samples(ME) == []
    gauges.note(ME, counted(100, 0.0), 1.0)
    gauges.note(ME, counted(50, 9.0), 2.0)
    assert [each.as_list() for each in gauges.samples(ME)] == [[2.0, 0, 1.0]]


def test_curves_are_bounded() -> None:
    """In points, in processes, and to those who are here."""
    gauges = Gauges()
    for second in range(2 * KEPT):
        gauges.note(ME, counted(second, 0), float(second))
    assert len(gauges.samples(ME)) == KEPT
    others = [(f"{number}", 1) for number in range(MAX_PROCESSES + 5)]
    for other in others:
        gauges.note(other, counted(0, 0), 0.0)
        gauges.note(other, counted(0, 0), 2.0)
    gauges.keep(others, [])
    assert gauges.samples(ME) == []
    assert len([other for other in others if gauges.samples(other)]) == MAX_PROCESSES


def test_a_long_loss_becomes_thinner_and_goes_on_from_an_earlier_step() -> None:
    """Its first and its latest points stay."""
    gauges = Gauges()
    for step in range(5000):
        gauges.note_loss("train.py", step, 1 / (step + 1))
    curve = gauges.loss("train.py")
    assert MAX_CURVE // 2 <= len(curve) <= MAX_CURVE
    assert curve[0] == [0, 1.0]
    assert curve[-1][0] >= 4980
    gauges.note_loss("train.py", 4990, 0.5)  # somebody was asked a little earlier
    assert gauges.loss("train.py") == curve
    gauges.note_loss("train.py", 1, 0.5)
    assert gauges.loss("train.py") == [[0, 1.0], [1, 0.5]]
    gauges.keep([], ["other.py"])
    assert gauges.loss("train.py") == []
