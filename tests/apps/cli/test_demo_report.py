"""The demo's report: sentences for people, JSON for machines, and no mercy for differences."""

import json

import msgspec
import pytest

from potluck.apps.cli.demo_messages import Finished
from potluck.apps.cli.demo_report import Agreed, Killed, Noticed, Report, Resumed, Returned, Run


def end(print_of: str = "abcd", weight: float = 1920.0) -> Finished:
    """What a node tells at the end of a run."""
    return Finished(
        run="story",
        step=10,
        loss=0.0123,
        wobble=0.01,
        accuracy=0.994,
        fingerprint=print_of,
        samples=1920.0,
        weight=weight,
        averaged=67_000_000,
        seconds=2.0,
    )


@pytest.fixture
def report() -> Report:
    """A run of three nodes."""
    run = Run.of({"basil": end(), "thyme": end(), "sage": end(weight=0.0)})
    return Report(
        nodes=["basil", "thyme", "sage"],
        seed=0,
        found_by="multicast DNS",
        meeting_seconds=2.2,
        killed=Killed("sage", rank=2, pid=13, step=40),
        noticed=[Noticed("basil", 1.25, "sage is gone"), Noticed("thyme", 3.5, "sage is gone")],
        agreed=Agreed(2, 9.0, "view 2 with 2 members"),
        resumed=Resumed(41, 120.4),
        returned=Returned("sage", 14, 3, 90, 1.9, 801_812, 0.166),
        story=run,
        undisturbed=msgspec.structs.replace(run, loss=0.0131),
        losses={"story": [(1, 0.8), (10, 0.0123)], "undisturbed": [(1, 0.8)]},
        averaged_bytes=67_000_000,
        view=3,
        events=[(0.1, "It begins.")],
        pids=[11, 12, 13, 14],
        seconds=10.04,
    )


def test_people_read_sentences(report: Report) -> None:
    """What happened, the losses of both runs, what was moved, and equality."""
    killed, back, losses, samples, moved, equal = report.sentences()
    assert killed == (
        "sage was killed at step 40. All others knew within 3.5 ms, agreed on view 2 "
        "after 9 ms and committed the next step after 120 ms."
    )
    assert back == (
        "sage came back 1.9 s after its start, got 0.8 MB of state in 0.17 s "
        "and went on from step 90."
    )
    assert losses == (
        "Loss after 10 steps: 0.0123; undisturbed 0.0131. "
        "They differ by 0.0008, single batches by up to 0.0100."
    )
    assert samples == (
        "1,920 samples counted, each once per epoch; "
        "99.4% of unseen points are put on the right spiral."
    )
    assert moved == (
        "67 MB went through the collectives of each node; "
        "undisturbed and at full speed it was 5 steps/s."
    )
    assert equal == "All 3 nodes hold the same parameters, bit for bit (abcd)."


def test_machines_read_json(report: Report) -> None:
    """The whole report and the verdict."""
    facts = json.loads(report.to_json())
    assert facts["killed"] == {"name": "sage", "rank": 2, "pid": 13, "step": 40}
    assert facts["losses"]["story"][-1] == [10, 0.0123]
    assert (facts["identical"], facts["held"]) == (True, True)


def test_a_run_without_a_kill_tells_of_none(report: Report) -> None:
    """Nothing is made up."""
    calm = msgspec.structs.replace(
        report, killed=None, noticed=[], agreed=None, resumed=None, returned=None
    )
    assert next(calm.sentences()).startswith("Loss after 10 steps")
    assert json.loads(calm.to_json())["killed"] is None


def test_a_difference_is_not_hidden(report: Report) -> None:
    """One flipped bit, and both readers are told."""
    parted = Run.of({"basil": end(), "thyme": end("abce")})
    told = msgspec.structs.replace(report, story=parted)
    assert json.loads(told.to_json())["held"] is False
    assert "parameters after the story differ" in list(told.sentences())[-1]


def test_a_loss_beyond_noise_is_not_hidden(report: Report) -> None:
    """The losses may differ as much as batches do, and no more."""
    worse = msgspec.structs.replace(report.undisturbed, loss=0.03)
    told = msgspec.structs.replace(report, undisturbed=worse)
    assert told.problems == [
        "the losses differ by 0.0177, which is more than the 0.0100 between single batches"
    ]


def test_a_sample_that_was_lost_is_not_hidden(report: Report) -> None:
    """What went into steps is what the sampler says has counted."""
    short = Run.of({"basil": end(weight=1856.0), "thyme": end()})
    told = msgspec.structs.replace(report, story=short)
    assert told.problems == ["64 samples of the story were lost or counted twice"]
