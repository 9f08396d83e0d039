"""What the demo draws, and what it reports: sentences for people, and no mercy for differences."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from potluck.apps.cli.demo import problems, summary
from potluck.apps.cli.demo_story import WIDTH, Demo, Node
from potluck.apps.cli.output import Display, replace_missing_signs
from potluck.apps.cli.status_facts import jobs_of
from potluck.cluster.reports import (
    EventLine,
    HealthLine,
    Journal,
    MemberLine,
    StatusReport,
)


def run(**changes: Any) -> dict[str, Any]:
    """The results of a run."""
    return {
        "steps": 10,
        "loss": 0.0123,
        "noise": 0.01,
        "accuracy": 0.994,
        "fingerprints": {"basil": "abcd", "thyme": "abcd", "sage": "abcd"},
        "samples": 1920.0,
        "missing_samples": 0.0,
        "seconds": 2.0,
        **changes,
    }


@pytest.fixture
def facts() -> dict[str, Any]:
    """What a demo of three nodes found out."""
    return {
        "nodes": ["basil", "thyme", "sage"],
        "story": run(),
        "undisturbed": run(loss=0.0131),
        "difference": 0.0008,
        "noise": 0.01,
        "averaged_bytes": 67_000_000,
    }


def test_people_read_sentences(facts: dict[str, Any]) -> None:
    """The losses of both runs, what was moved, and equality."""
    losses, samples, moved, equal = summary(facts)
    assert losses == (
        "Loss after 10 steps: 0.0123, undisturbed 0.0131. "
        "They differ by 0.0008, single batches by up to 0.0100."
    )
    assert samples == (
        "1,920 samples counted, each once per epoch. "
        "99.4% of unseen points are put on the right spiral."
    )
    assert moved == (
        "Each node averaged up to 67.0 MB of gradients in both runs. "
        "The undisturbed run made 5 steps/s."
    )
    assert equal == "All 3 nodes have the same parameters, bit for bit (abcd)."
    assert problems(facts) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"story": run(fingerprints={"basil": "abcd", "thyme": "abce"})},
            "the parameters after the disturbed run differ: {'basil': 'abcd', 'thyme': 'abce'}",
        ),
        (
            {"difference": 0.0169},
            "the losses differ by 0.0169, which is more than the 0.0100 between single batches",
        ),
        (
            {"story": run(missing_samples=64.0)},
            "64 samples of the disturbed run were lost or counted twice",
        ),
    ],
)
def test_a_difference_is_not_hidden(
    facts: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    """One flipped bit, one lost sample, a worse loss: each is a problem, and nothing is equal."""
    changed = {**facts, **change}
    assert problems(changed) == [problem]
    assert not any("bit for bit" in sentence for sentence in summary(changed))


# --------------------------------------------------------------------------------------------------
# What the demo draws, as text.

NAMES = ("basil", "thyme", "sage")


def report(rank: int, *peers: HealthLine) -> StatusReport:
    """What a member tells the observer."""
    members = [MemberLine(name, 1, name) for name in NAMES]
    return StatusReport(
        node=NAMES[rank],
        incarnation=1,
        name=NAMES[rank],
        pid=rank,
        job="demo",
        state="active",
        epoch=3,
        rank=rank,
        members=members,
        peers=list(peers),
    )


def make_demo(*, steps: int = 20_000) -> Demo:
    """Two nodes that train, and one that was killed; large but possible figures."""
    demo = Demo(Display(), steps=steps)
    slow = HealthLine("thyme", 1, "thyme", "degraded", "its link is slow", 0.0123)
    healthy = HealthLine("basil", 1, "basil", "healthy", "fine", 0.0021)
    (job,) = jobs_of([report(0, slow), report(1, healthy), report(2)])
    figures = {"all_reduce.bytes_per_second": 2.5e9}
    for status in job.nodes:
        process: Any = SimpleNamespace(pid=4_194_303)
        node = Node(status.name, process, Path())
        is_sage = status.name == "sage"
        step, loss = (99, 0.8) if is_sage else (12_345, 0.2)
        line = {"run": "story", "step": step, "loss": loss, "share": 64, "view": 3, "time": 9.0}
        node.steps.append({**line, "averaged": 98_765_432_100})
        demo.losses["story"][step] = loss
        node.observe(status, Journal(node=status.node, incarnation=1, figures=figures))
        node.is_killed = is_sage
        demo.nodes.append(node)
    demo.marks[99] = "✕"
    return demo


def drawn(demo: Demo) -> str:
    """The picture on a terminal of 80 columns."""
    to = Console(file=io.StringIO(), width=80)
    to.print(demo.draw())
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_the_picture_fits_a_small_terminal() -> None:
    """Large figures included, no line is wrapped or cut at 80 columns."""
    text = drawn(make_demo())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert "0 basil training healthy 12,345 64 98.8 GB 2.5 GB/s 12.3 ms".split() in rows
    assert "– sage killed 99 – 98.8 GB – –".split() in rows


def test_a_node_that_is_not_well_is_named_with_the_reason() -> None:
    """In the words of `potluck status` and of the log."""
    assert "thyme is degraded: its link is slow" in drawn(make_demo())


def test_before_the_first_step_there_is_a_picture_too() -> None:
    """Nothing is known yet, and nothing breaks."""
    demo = make_demo()
    process: Any = SimpleNamespace(pid=1)
    demo.nodes[:] = [Node("basil", process, Path())]
    demo.losses = {"story": {}}
    assert re.search(r"– +basil +starting", drawn(demo))
    assert demo.line() == ""


def test_both_runs_are_drawn_on_one_scale() -> None:
    """The higher loss has the higher bar; the end of a run shows the loss of the report."""
    demo = make_demo(steps=10)
    demo.losses = {"story": {1: 1.0, 10: 0.1}, "undisturbed": {1: 0.1, 10: 0.01}}
    demo.marks = {5: "✕"}
    text = drawn(demo)
    assert re.search(r"loss +█+[▄▅] +0\.1000", text)
    assert re.search(r"undisturbed +[▄▅]+▁ +0\.0100", text)
    assert text.splitlines()[-2].index("✕") == 12 + WIDTH // 2


def test_a_line_says_how_far_the_training_is() -> None:
    """For a file or a pipe."""
    line = re.sub(r" *\d+\.\d\d s +", "", make_demo().line(), count=1)
    assert line == "step 12,345, loss 0.2000, 2 of 3 nodes, 0 steps/s, 98.8 GB averaged"


def test_a_terminal_without_such_signs_gets_plain_ones() -> None:
    """An old locale, as one may meet it over SSH, ends nothing with an error."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    replace_missing_signs(file)
    Console(file=file, width=80).print(make_demo().draw())
    file.seek(0)
    text = file.read()
    assert "- " in text
    assert re.search(r"loss +#[ .:=+*#-]+ +0\.2000", text)
    assert re.search(r"\n +x *\n", text)


# --------------------------------------------------------------------------------------------------


def test_a_node_notices_a_loss_when_its_log_first_names_the_other() -> None:
    """What it said before the kill does not count."""
    process: Any = SimpleNamespace(pid=1)
    node, victim = Node("basil", process, Path()), Node("sage", process, Path())
    joined, ended = EventLine(1, 95.0, "sage has joined"), EventLine(2, 100.005, "sage ended")
    node.observe(None, Journal(node="basil", incarnation=1, events=[joined]))
    assert node.noticed(victim, 100.0) is None
    # A journal has what is new since the last one.
    left = EventLine(3, 100.02, "view 2: without sage")
    node.observe(None, Journal(node="basil", incarnation=1, events=[ended, left]))
    assert node.noticed(victim, 100.0) == ended
    assert node.noticed(victim, 90.0) == joined
