"""Cells: counters, tallies, histograms, from any thread."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from potluck.metrics.instruments import (
    BOUNDS,
    LONG,
    OTHER,
    WINDOW,
    Counter,
    Gauge,
    Histogram,
    OperationMetrics,
    count,
    hold,
)
from support.threads import together


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_counter_grows() -> None:
    """By one or by more."""
    counter = Counter()
    counter.inc()
    counter.add(41)
    assert counter.value == 42


def test_no_count_is_lost_between_threads(restless: None) -> None:
    """Four threads that write at once are all heard, in every kind of cell."""
    counter, histogram = Counter(), Histogram()
    counts: dict[str, float] = {}

    def write() -> None:
        for _ in range(500):
            counter.inc()
            count(counts, "this")
            histogram.observe(1.0)

    together(write, write, write, write)
    assert counter.value == counts["this"] == histogram.count == 2000


def test_a_gauge_is_what_was_said_last() -> None:
    """And nothing before anybody has said anything."""
    gauge = Gauge()
    assert gauge.value is None
    gauge.set(2)
    gauge.set(1.5)
    assert gauge.value == 1.5


def test_counts_have_a_bounded_number_of_names() -> None:
    """Whatever names come from outside: beyond the limit they are one."""
    counts = {"known": 0.0}
    for number in range(100):
        count(counts, f"name {number}", limit=3)
    count(counts, "known", limit=3)
    assert counts == {"known": 1, "name 0": 1, "name 1": 1, OTHER: 98}


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
    assert histogram.count == sum(histogram.buckets) == WINDOW + 10
    assert histogram.total == sum(range(WINDOW + 10))
    assert histogram.percentile(0) == 10


def test_a_value_is_in_the_bucket_of_the_next_bound() -> None:
    """A value that equals a bound is within it, as Prometheus has it; the largest are apart."""
    histogram = Histogram()
    for bound in BOUNDS:
        histogram.observe(bound)
    histogram.observe(BOUNDS[-1] * 2)
    histogram.observe(BOUNDS[0] * 1.01)
    assert histogram.buckets == [1, 2, *[1] * (len(BOUNDS) - 1)]
    assert list(BOUNDS) == sorted(BOUNDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_can_count() -> None:
    """Though a thread of its parent held the lock at that moment."""
    held, done = threading.Event(), threading.Event()

    def keep_it() -> None:
        with hold():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=keep_it)
    thread.start()
    held.wait(30)
    child = os.fork()
    if not child:  # pragma: no cover - in the child
        Counter().inc()
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --------------------------------------------------------------------------------------------------
# Operations: a journal that costs nothing to write, and numbers that miss nothing.


def test_what_was_noted_is_in_every_number() -> None:
    """The one who reads works off the journal, whichever number is read."""
    operation = OperationMetrics()
    operation.note(0.004, 100)
    assert operation.completed.value == 1
    operation.note(0.002, 50, "PeerLost")
    assert operation.failed.value == 1
    assert operation.bytes_processed.value == 150
    assert operation.duration_ms.percentile(100) == pytest.approx(4)
    assert not operation.seconds


def test_the_journal_stays_short_though_nobody_reads() -> None:
    """A program that never looks at its metrics must not pay for them in memory."""
    operation = OperationMetrics()
    for _ in range(3 * LONG):
        operation.note(1e-3, 8)
    assert len(operation.seconds) <= LONG
    assert operation.snapshot().completed == 3 * LONG


def test_writers_and_readers_lose_nothing() -> None:
    """Three threads write while another takes snapshots, which never go back."""
    operation = OperationMetrics()
    seen: list[int] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write() -> None:
        for _ in range(1500):
            operation.note(1e-3, 1)

    def read() -> None:
        seen.extend(operation.snapshot().completed for _ in range(100))

    try:
        together(write, write, write, read)
    finally:
        sys.setswitchinterval(before)
    assert seen == sorted(seen)
    assert operation.snapshot().completed == operation.snapshot().bytes_processed == 4500


def test_a_call_after_an_interruption_is_a_retry() -> None:
    """One that was refused for what it asked is not tried again by calling something else."""
    operation = OperationMetrics()
    for error in ("", "ViewChanged", "PeerLost", "", "", "ValueError", ""):
        operation.note(1e-3, 1, error)
    snapshot = operation.snapshot()
    assert snapshot.retried == 2
    assert snapshot.errors == {"ViewChanged": 1, "PeerLost": 1, "ValueError": 1}


def test_rates_are_those_of_the_last_operations() -> None:
    """What happened long ago says nothing about the links as they are now."""
    operation = OperationMetrics()
    for _ in range(300):
        operation.note(10.0, 1)
    for _ in range(300):
        operation.note(0.5, 1000)
    assert operation.snapshot().bytes_per_second == pytest.approx(2000)


def test_counting_by_hand_is_counting() -> None:
    """As programs do that know the names of the origin."""
    operation = OperationMetrics()
    operation.duration_ms.observe(3.0)
    operation.bytes_processed.add(12)
    operation.completed.inc()
    snapshot = operation.snapshot()
    assert (snapshot.completed, snapshot.bytes_processed, snapshot.p50_ms) == (1, 12, 3.0)
