"""Metrics: counters, histograms, and what a snapshot shows of them."""

import dataclasses

import pytest

from potluck.collective.task import Collective
from potluck.metrics import WINDOW, Counter, DistributedMetrics, Histogram


def test_a_counter_grows() -> None:
    """By one or by more."""
    counter = Counter()
    counter.inc()
    counter.add(41)
    assert counter.value == 42


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 50), (95, 95), (99, 99), (100, 100)]
)
def test_a_percentile_is_a_value_that_was_seen(percent: float, value: float) -> None:
    """Of the numbers from 1 to 100."""
    histogram = Histogram()
    for each in range(100, 0, -1):
        histogram.observe(each)
    assert histogram.percentile(percent) == value


def test_an_empty_histogram_shows_zero() -> None:
    """Nothing observed is no error."""
    assert Histogram().mean == Histogram().percentile(50) == 0


def test_a_histogram_forgets_what_is_long_ago() -> None:
    """It counts on, but keeps only the last values."""
    histogram = Histogram()
    for each in range(WINDOW + 10):
        histogram.observe(each)
    assert histogram.count == WINDOW + 10
    assert histogram.percentile(0) == 10


def test_a_snapshot_does_not_change() -> None:
    """It shows the numbers of its moment, for every collective there is."""
    metrics = DistributedMetrics()
    metrics.all_reduce.completed.inc()
    metrics.all_reduce.duration_ms.observe(4)
    before = metrics.snapshot()
    metrics.all_reduce.completed.inc()
    assert before.all_reduce.completed == 1
    assert before.all_reduce.p50_ms == before.all_reduce.mean_ms == 4
    assert {each.name for each in dataclasses.fields(before)} == {each.value for each in Collective}
    assert dataclasses.asdict(before)["barrier"]["failed"] == 0
