"""Shares follow speed, and who holds up the others is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.identity.node import machine_name
from potluck.training import balance
from potluck.training.averaging import StepContribution
from potluck.training.balance import (
    AGAIN,
    LASTING,
    MemberCondition,
    MemberSpeeds,
    Speedometer,
    find_slow_link,
    find_straggler,
    measure_condition,
    shares_of,
)


@given(st.integers(0, 500), st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
@example(2, [5, 5, 5])
@example(3, [1, 9, 5])
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
    one = Speedometer()
    one.note(1, 1.0)
    assert one.speed == 1000
    slow = Speedometer()
    slow.note(1, 10_000.0)
    assert slow.speed == 1  # 0 would mean that it is unknown
    fast = Speedometer()
    fast.note(10**30, 1.0)
    assert fast.speed == 1 << 62  # the others would refuse a larger number


@pytest.mark.parametrize(
    ("condition", "cause"),
    [
        (
            MemberCondition(heat=95, on_battery=True, load=99),
            "it is hot (95 °C) and throttles itself",
        ),
        (MemberCondition(on_battery=True, load=99), "it runs on battery"),
        (MemberCondition(load=80), "other programs use 80 % of its CPU"),
        (MemberCondition(link=2_000_000), "its link is slow (2.0 MB/s)"),
        (MemberCondition(), "its processor is slower"),
    ],
)
def test_a_straggler_is_named_with_its_likely_cause(condition: MemberCondition, cause: str) -> None:
    """Heat, battery, other work, the link, or just a slower machine."""
    others = [MemberCondition(link=100_000_000)] * 2
    found = find_straggler([900, 1000, 250], [*others, condition])
    assert found is not None
    assert str(found) == f"Rank 2 is 4.0 times slower than the others: {cause}"
    named = find_straggler([900, 1000, 250], [*others, replace(condition, name="attic")])
    assert str(named) == f"attic (rank 2) is 4.0 times slower than the others: {cause}"


@pytest.mark.parametrize("speeds", [[5], [1000, 600, 900], [1000, 0], []])
def test_nobody_is_named_without_reason(speeds: list[int]) -> None:
    """Alone, nearly as fast, or not measured yet."""
    assert find_straggler(speeds, [MemberCondition()] * len(speeds)) is None


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
    assert find_slow_link([MemberCondition(link=rate) for rate in rates], nbytes, seconds) is None


def test_a_slow_link_and_a_busy_processor_are_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one computes as fast as the others over a slow link; the other has a good link."""
    rates = [100_000_000, 100_000_000, 1_000_000]
    alike = [StepContribution(1, 1, 1.0, 5000, 0)] * 3
    pace = MemberSpeeds()
    pace.conditions = (MemberCondition(), MemberCondition(load=90), MemberCondition())
    for _ in range(LASTING):
        pace.note(alike, rates, nbytes=1 << 40)
    assert pace.straggler is not None
    assert (pace.straggler.rank, pace.straggler.cause) == (2, "its link is slow (1.0 MB/s)")
    assert "a cable is faster" in caplog.text

    slow = [alike[0], StepContribution(1, 1, 1.0, 1000, 0), alike[2]]
    pace = MemberSpeeds()
    pace.conditions = (MemberCondition(), MemberCondition(load=90), MemberCondition())
    for _ in range(LASTING):
        pace.note(slow, [100_000_000] * 3, nbytes=1 << 40)
    assert pace.straggler is not None
    assert pace.straggler.rank == 1
    assert pace.straggler.cause == "other programs use 90 % of its CPU"


def test_a_member_that_is_slow_now_and_then_is_named_once() -> None:
    """Also those who look on hear it once, with its machine's name; much later again."""
    told: list[str] = []
    pace = MemberSpeeds(told.append)
    pace.conditions = (MemberCondition(name="desk"), MemberCondition(name="attic", on_battery=True))
    slow, well = (
        [StepContribution(1, 1, 1.0, 5000, 0), StepContribution(1, 1, 1.0, speed, 0)]
        for speed in (900, 5000)
    )
    for _ in range(20):
        for records in (slow, well):
            for _ in range(LASTING):
                pace.note(records, [100_000_000] * 2, nbytes=1000)
    sentence = "attic (rank 1) is 5.6 times slower than the others: it runs on battery. "
    assert told == [f"{sentence}It gets a smaller share of each batch."]
    for _ in range(AGAIN):
        pace.note(well, [100_000_000] * 2, nbytes=1000)
    for _ in range(LASTING):
        pace.note(slow, [100_000_000] * 2, nbytes=1000)
    assert len(told) == 2


def test_shares_follow_the_speeds_of_as_many_members_as_there_are() -> None:
    """Speeds of another number of members are of another view: there, all count as equal."""
    pace = MemberSpeeds()
    assert pace.counts(9, 3) == [3, 3, 3]
    pace.note([StepContribution(1, 1, 1.0, speed, 0) for speed in (2000, 1000)])
    assert pace.counts(9, 2) == [6, 3]
    assert pace.counts(9, 3) == [3, 3, 3]


def test_a_straggler_stays_named_while_it_is_slow() -> None:
    """From the fifth step on; one step at full speed ends it."""
    pace = MemberSpeeds()
    pace.conditions = (MemberCondition(on_battery=True), MemberCondition())
    slow, well = (
        [StepContribution(1, 1, 1.0, speed, 0), StepContribution(1, 1, 1.0, 5000, 0)]
        for speed in (900, 5000)
    )
    seen = []
    for records in [slow] * (2 * LASTING) + [well] + [slow] * LASTING:
        pace.note(records)
        seen.append(pace.straggler is not None)
    first = [False] * (LASTING - 1)
    assert seen == [*first, *[True] * (LASTING + 1), False, *first, True]


@pytest.mark.parametrize(
    ("condition", "cause"),
    [
        (MemberCondition(heat=90, on_battery=True), "it is hot (90 °C) and throttles itself"),
        (MemberCondition(heat=89, load=50), "other programs use 50 % of its CPU"),
        (MemberCondition(load=49, link=49), "its link is slow (0.0 MB/s)"),
        (MemberCondition(load=49, link=50), "its processor is slower"),
        (MemberCondition(), "its processor is slower"),
    ],
)
def test_a_cause_counts_from_its_bound_on(condition: MemberCondition, cause: str) -> None:
    """90 degrees, half of the CPU, half of the speed of the slowest other link."""
    others = [MemberCondition(link=100), MemberCondition(link=200)]
    found = find_straggler([400, 400, 200], [*others, condition])
    assert found is not None
    assert (found.rank, found.factor, found.cause) == (2, 2.0, cause)
    assert find_straggler([400, 400, 201], [*others, condition]) is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"cpu_percent": 70.0, "own": 80.0, "cpu_count": 2}, (30, False, 0)),
        ({"cpu_percent": 10.0, "own": 80.0, "cpu_count": 2}, (0, False, 0)),
        ({"cpu_percent": 70.0, "own": 10.0, "cpu_count": None}, (60, False, 0)),
        ({"cpu_percent": 130.0}, (100, False, 0)),  # the others would refuse more
        ({"sensors_battery": SimpleNamespace(power_plugged=False)}, (0, True, 0)),
        ({"sensors_battery": SimpleNamespace(power_plugged=True)}, (0, False, 0)),
        ({"sensors_battery": SimpleNamespace(power_plugged=None)}, (0, False, 0)),
        ({"sensors_temperatures": {"a": [50.4, None], "b": [71.6]}}, (0, False, 72)),
    ],
)
def test_a_machine_tells_how_it_is(
    facts: dict[str, Any], expected: tuple[int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load by others, battery and the hottest sensor, as far as it knows."""
    facts = {"cpu_percent": 0.0, "own": 0.0, "cpu_count": 1, **facts}
    own = SimpleNamespace(cpu_percent=lambda _: facts["own"])
    heat = facts.get("sensors_temperatures", {})
    rows = {name: [SimpleNamespace(current=each) for each in row] for name, row in heat.items()}
    monkeypatch.setattr(balance, "_this_process", lambda _: own)
    monkeypatch.setattr(psutil, "cpu_percent", lambda _: facts["cpu_percent"])
    monkeypatch.setattr(psutil, "cpu_count", lambda: facts["cpu_count"])
    battery = facts.get("sensors_battery")
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: rows, raising=False)
    found = measure_condition(link=7)
    assert (found.load, found.on_battery, found.heat) == expected
    assert (found.link, found.name) == (7, machine_name())


def test_a_machine_without_sensors_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, which has no temperatures, and boards without a battery."""
    for name in ("sensors_battery", "sensors_temperatures"):
        monkeypatch.delattr(psutil, name, raising=False)
    found = measure_condition()
    assert (found.on_battery, found.heat, found.link) == (False, 0, 0)


@pytest.mark.parametrize(("nbytes", "is_named"), [(2_666_000, False), (2_667_000, True)])
def test_a_slow_link_is_named_once_it_costs_a_quarter_of_a_step(
    nbytes: int, *, is_named: bool
) -> None:
    """A step takes as long as the slowest member computes, and then as its slowest link sends."""
    pace = MemberSpeeds()
    pace.conditions = (MemberCondition(),) * 3
    records = [StepContribution(1, 1, 8.0, speed, 0) for speed in (1900, 1000, 1500)]
    for _ in range(LASTING):
        pace.note(records, [100_000_000, 100_000_000, 1_000_000], nbytes)
    assert (pace.straggler is not None) == is_named


@pytest.mark.parametrize(("between", "times"), [(AGAIN - LASTING - 1, 1), (AGAIN - LASTING, 2)])
def test_a_member_is_named_again_after_a_thousand_steps(between: int, times: int) -> None:
    """Not before."""
    told: list[str] = []
    pace = MemberSpeeds(told.append)
    pace.conditions = (MemberCondition(),) * 2
    slow, well = (
        [StepContribution(1, 1, 1.0, 5000, 0), StepContribution(1, 1, 1.0, speed, 0)]
        for speed in (900, 5000)
    )
    for records in [slow] * LASTING + [well] * between + [slow] * LASTING:
        pace.note(records)
    assert len(told) == times


def test_of_two_links_the_slow_one_is_named() -> None:
    """One alone cannot be compared."""
    links = [MemberCondition(link=100_000_000), MemberCondition(link=1_000_000), MemberCondition()]
    found = find_slow_link(links, nbytes=1_000_000, seconds=1.0)
    assert found is not None
    assert (found.rank, found.factor) == (1, 100.0)
    assert find_slow_link(links[1:], nbytes=1_000_000, seconds=1.0) is None
