"""Shares follow speed, and who holds up the others is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.training.averaging import Record
from potluck.training.balance import (
    AGAIN,
    LASTING,
    Condition,
    Pace,
    Speedometer,
    find_slow_link,
    find_straggler,
    shares_of,
)


@given(st.integers(0, 500), st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_a_batch_is_divided_without_loss(batch: int, speeds: list[int]) -> None:
    """Nothing is lost, nobody waits for work while there is some, and the faster get no less."""
    shares = shares_of(batch, speeds)
    assert sum(shares) == batch
    assert min(shares) >= (1 if batch >= len(speeds) else 0)
    known = [speed for speed in speeds if speed]
    if len(known) == len(speeds) and batch > 4 * len(speeds):
        fastest = max(range(len(speeds)), key=lambda rank: speeds[rank])
        slowest = min(range(len(speeds)), key=lambda rank: speeds[rank])
        assert shares[fastest] >= shares[slowest] - 1


def test_speeds_of_one_one_one_and_a_quarter_use_all_of_them() -> None:
    """All finish at the same time: the throughput is the sum of the four, to within two percent."""
    speeds = [4000, 4000, 4000, 1000]
    batch = 260
    shares = shares_of(batch, speeds)
    slowest = max(share / (speed / 1000) for share, speed in zip(shares, speeds, strict=True))
    assert batch / slowest >= 0.98 * sum(speeds) / 1000


def test_a_speed_is_learned_from_several_steps() -> None:
    """One odd step changes little; nothing is learned from nothing."""
    meter = Speedometer()
    assert meter.speed == 0
    meter.note(0, 1.0)
    meter.note(10, 0.001)
    assert meter.speed == 0
    meter.note(10, 1.0)
    assert meter.speed == 10_000
    meter.note(10, 10.0)
    assert 7000 < meter.speed < 10_000
    for _ in range(20):
        meter.note(10, 10.0)
    assert 1000 <= meter.speed < 1100
    meter.note(1, 1e12)
    assert meter.speed >= 1


@pytest.mark.parametrize(
    ("condition", "cause"),
    [
        (Condition(heat=95, on_battery=True, load=99), "it is hot (95 °C) and slows itself down"),
        (Condition(on_battery=True, load=99), "it runs on its battery"),
        (Condition(load=80), "its processors do other work (80 %)"),
        (Condition(link=2_000_000), "its link is slow (2.0 MB/s)"),
        (Condition(), "its processor is slower"),
    ],
)
def test_a_straggler_is_named_with_its_likely_cause(condition: Condition, cause: str) -> None:
    """Heat, battery, other work, the link, or just a slower machine."""
    others = [Condition(link=100_000_000)] * 2
    found = find_straggler([900, 1000, 250], [*others, condition])
    assert found is not None
    assert str(found) == f"Rank 2 is 4.0 times slower than the others: {cause}"
    named = find_straggler([900, 1000, 250], [*others, replace(condition, name="attic")])
    assert str(named) == f"attic (rank 2) is 4.0 times slower than the others: {cause}"


@pytest.mark.parametrize("speeds", [[5], [1000, 600, 900], [1000, 0], []])
def test_nobody_is_named_without_reason(speeds: list[int]) -> None:
    """Alone, nearly as fast, or not measured yet."""
    assert find_straggler(speeds, [Condition()] * len(speeds)) is None


@pytest.mark.parametrize(
    ("rates", "nbytes", "seconds"),
    [
        ([100, 100, 60], 4000, 1.0),  # not that much slower
        ([100, 100, 10], 4, 10.0),  # slow, but hardly anything goes over it
        ([0, 0, 10], 4000, 1.0),  # nobody to compare with
        ([], 4000, 1.0),
    ],
)
def test_a_link_is_not_accused_without_reason(
    rates: list[int], nbytes: int, seconds: float
) -> None:
    """It has to be measured, much slower than the others', and cost a good part of the step."""
    assert find_slow_link([Condition(link=rate) for rate in rates], nbytes, seconds) is None


def test_a_slow_link_and_a_busy_processor_are_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one computes as fast as the others over a slow link; the other has a good link."""
    rates = [100_000_000, 100_000_000, 1_000_000]
    alike = [Record(1, 1, 1.0, 5000, 0)] * 3
    pace = Pace()
    pace.conditions = (Condition(), Condition(load=90), Condition())
    for _ in range(LASTING):
        pace.note(alike, rates, nbytes=1 << 40)
    assert pace.straggler is not None
    assert (pace.straggler.rank, pace.straggler.cause) == (2, "its link is slow (1.0 MB/s)")
    assert "a cable carries more" in caplog.text

    slow = [alike[0], Record(1, 1, 1.0, 1000, 0), alike[2]]
    pace = Pace()
    pace.conditions = (Condition(), Condition(load=90), Condition())
    for _ in range(LASTING):
        pace.note(slow, [100_000_000] * 3, nbytes=1 << 40)
    assert pace.straggler is not None
    assert pace.straggler.rank == 1
    assert pace.straggler.cause == "its processors do other work (90 %)"


def test_a_member_that_is_slow_now_and_then_is_named_once() -> None:
    """Also those who look on hear it once, with its machine's name; much later again."""
    told: list[str] = []
    pace = Pace(told.append)
    pace.conditions = (Condition(name="desk"), Condition(name="attic", on_battery=True))
    slow, well = (
        [Record(1, 1, 1.0, 5000, 0), Record(1, 1, 1.0, speed, 0)] for speed in (900, 5000)
    )
    for _ in range(20):
        for records in (slow, well):
            for _ in range(LASTING):
                pace.note(records, [100_000_000] * 2, nbytes=1000)
    sentence = "attic (rank 1) is 5.6 times slower than the others: it runs on its battery. "
    assert told == [f"{sentence}It gets a smaller share of each batch."]
    for _ in range(AGAIN):
        pace.note(well, [100_000_000] * 2, nbytes=1000)
    for _ in range(LASTING):
        pace.note(slow, [100_000_000] * 2, nbytes=1000)
    assert len(told) == 2
