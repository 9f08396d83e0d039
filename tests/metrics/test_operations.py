"""Operations: a journal that costs nothing to write, and numbers that miss nothing."""

import sys

import pytest

from potluck.metrics.operations import LONG, OperationMetrics
from support.threads import together


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
