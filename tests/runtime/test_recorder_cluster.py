"""What a node of a cluster takes down beside its operations: views, events, steps."""

import json
from pathlib import Path

from potluck.runtime.recorder import CAPACITY, Label, Lane, Log, Recorder
from potluck.runtime.recorder_cluster import Steps
from potluck.runtime.recorder_files import dump
from potluck.runtime.recorder_logs import recorder_of
from support.clusters import clusters, everywhere
from support.threads import eventually


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    """With its number, and the view in which it was made."""
    recorder = Recorder()
    log = Log(recorder, Label(Lane.COLLECTIVES, "world", "line/3", 1))
    steps = Steps()
    steps.note(log, 7)
    steps.note(log, 9, "state received")
    first, second = recorder.records(0.0)
    assert (first.lane, first.what, first.number, first.view) == ("training", "step", 7, "line/3")
    assert (second.what, second.number, second.rank) == ("state received", 9, 1)
    assert second.begin == first.end


def test_operations_do_not_crowd_out_events() -> None:
    """A death is still known after a thousand further operations, which take 0.1 s."""
    recorder = Recorder()
    recorder.append_event(("dead", 1.0, 1.0, 0, 0, 0, Label(Lane.CLUSTER), None, "attic is dead"))
    for number in range(2 * CAPACITY):
        recorder.append(("step", 2.0, 3.0, number, 0, 0, Label(Lane.TRAINING), None, None))
    first, *rest = recorder.records(0.0)
    assert (first.what, first.reason) == ("dead", "attic is dead")
    assert len(rest) == CAPACITY


def test_a_dump_after_the_end_still_says_whose_it_is(tmp_path: Path) -> None:
    """The last words of a program may come when its cluster is closed; who left is told too."""
    with clusters(2) as nodes:
        everywhere(nodes, lambda node: node.barrier())
        stays, goes = nodes
        recorder, process = recorder_of(stays), goes.process
        goes.close()
        eventually(lambda: stays.view is not None and len(stays.view.members) == 1)
    header, *records = map(
        json.loads, dump(recorder, tmp_path / "a", reason="late").read_text().splitlines()
    )
    assert header["process"] in header["views"][header["view"]]
    assert [len(members) for members in header["views"].values()] == [2, 1]
    said = [record["reason"] for record in records if record["lane"] == "cluster"]
    assert any("left" in sentence or "goodbye" in sentence for sentence in said)
    assert process.node in str(header["views"])
