"""The demo's report: sentences for people, the same facts for machines."""

import json

import msgspec
import pytest

from potluck.apps.cli.demo_report import Killed, Noticed, Report


@pytest.fixture
def report() -> Report:
    """A run of three ranks."""
    return Report(
        ranks=3,
        seed=0,
        pids=[11, 12, 13],
        killed=Killed(rank=2, pid=13, step=40),
        noticed=[Noticed(0, 1.25, "Rank 2 is gone"), Noticed(1, 3.5, "Rank 2 is gone")],
        resumed_milliseconds=120.4,
        resumed_step=41,
        steps=1200,
        losses=[(1, 0.8), (1200, 0.0123)],
        accuracy=0.994,
        fingerprints={"0": "abcd", "1": "abcd"},
        messages=12_345,
        bytes_sent=67_000_000,
        seconds=10.04,
    )


def test_people_read_sentences(report: Report) -> None:
    """Loss, accuracy, traffic, detection and equality, in this order."""
    assert list(report.sentences()) == [
        "1,200 steps in 10.0 s: loss 0.800 → 0.012, 99.4% of unseen points on the right spiral.",
        "12,345 messages, 67 MB between 3 processes.",
        "All others noticed the end of rank 2 within 3.5 ms; training went on after 120 ms.",
        "All survivors hold the same parameters, bit for bit (abcd).",
    ]


def test_machines_read_json(report: Report) -> None:
    """The whole report and the verdict."""
    facts = json.loads(report.to_json())
    assert facts["killed"] == {"rank": 2, "pid": 13, "step": 40}
    assert facts["losses"][-1] == [1200, 0.0123]
    assert facts["identical"] is True


def test_a_difference_is_not_hidden(report: Report) -> None:
    """One flipped bit, and both readers are told."""
    differing = msgspec.structs.replace(report, fingerprints={"0": "abcd", "1": "abce"})
    assert not differing.is_identical
    assert json.loads(differing.to_json())["identical"] is False
    assert "parameters differ" in list(differing.sentences())[-1]
