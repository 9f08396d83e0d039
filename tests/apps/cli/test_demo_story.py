"""The demo's report: sentences for people, JSON for machines, and no mercy for differences."""

from __future__ import annotations

import io
import json
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from potluck.apps.cli.demo_messages import Begun, Finished, LinkLine, Listening, Progress
from potluck.apps.cli.demo_story import (
    CURVE_WIDTH,
    Actor,
    Agreed,
    Killed,
    Link,
    LiveScreen,
    Noticed,
    PlainScreen,
    Report,
    Resumed,
    Returned,
    Run,
    Scene,
    SilentScreen,
    link_words,
    open_screen,
    picture,
    sparkline,
    speak_plainly,
)


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


# --------------------------------------------------------------------------------------------------
# What the demo draws, as text.


def progress(rank: int, *links: LinkLine, **changes: Any) -> Progress:
    """Large but possible figures."""
    facts: dict[str, Any] = {
        "run": "story",
        "step": 12_345,
        "loss": 0.2,
        "epoch": 3,
        "share": 64,
        "averaged": 98_765_432_100,
        "rate": 2.5e9,
        "speed": 31.2,
        "up": 250_000_000,
        "down": 250_000_000,
    }
    return Progress(rank=rank, links=list(links), **facts | changes)


def scene() -> Scene:
    """Two that train, and one that was killed."""
    process: Any = SimpleNamespace(pid=4_194_303)
    made = Scene([Actor(name, process) for name in ("basil", "thyme", "sage")], steps=20_000)
    for number, actor in enumerate(made.actors):
        made.receive(actor, Listening(f"{actor.name}/1", 52416 + number))
        made.receive(actor, Begun(1, 0, 0, 0.1, 1.0))
    basil, thyme, sage = made.actors
    made.receive(sage, progress(2, step=99, loss=0.8))
    sage.state, sage.reason = "killed", "the connection to sage ended: its process ended"
    slow = LinkLine("thyme/1", "degraded", "its link is slow", 0.0123)
    made.receive(basil, progress(0, slow))
    made.receive(thyme, progress(1, LinkLine("basil/1", "healthy", "fine", 0.0021)))
    made.marks.append((99, "✕"))
    return made


def console(*, terminal: bool, dumb: bool = False, **variables: str) -> Console:
    """A console of 80 columns that writes to memory."""
    given = {"TERM": "dumb" if dumb else "xterm", **variables}
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, _environ=given)


def written(to: Console) -> str:
    """What it was given."""
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_the_picture_fits_a_small_terminal() -> None:
    """Large figures included, no line is wrapped or cut at 80 columns."""
    to = console(terminal=False)
    to.print(picture(scene()))
    lines = [line.rstrip() for line in written(to).splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in written(to)
    rows = [line.split() for line in lines]
    assert "1 thyme training degraded 12,345 64 98.8 GB 2.5 GB/s".split() in rows
    assert "– sage killed 99 – 98.8 GB –".split() in rows
    assert "basil – thyme 12.3 ms not a limit".split() in rows  # the slower of both directions


def test_who_is_not_well_is_named_with_the_reason() -> None:
    """In the words of `potluck status` and of the log."""
    to = console(terminal=False)
    to.print(picture(scene()))
    assert "thyme is degraded: its link is slow" in written(to)
    assert "the connection to sage ended: its process ended" in written(to)


def test_before_the_first_news_there_is_a_picture_too() -> None:
    """Nothing is known yet, and nothing breaks."""
    process: Any = SimpleNamespace(pid=1)
    to = console(terminal=False)
    to.print(picture(Scene([Actor("basil", process)], steps=10)))
    assert "starting" in written(to)


def test_a_node_that_comes_back_begins_anew() -> None:
    """Nothing that its last start told is shown as this one's; why it was gone stays."""
    made = scene()
    process: Any = SimpleNamespace(pid=7)
    back = made.recast(made.actors[2], process)
    assert made.actors[2] is back
    assert (back.state, back.progress) == ("starting again", None)
    assert back.reason
    made.receive(back, Begun(3, 90, 1, 0.1, 2.0))
    assert (back.state, back.reason) == ("training", "")


def test_a_curve_keeps_its_ends() -> None:
    """A long one is thinned out, not cut off; one that has just begun is short."""
    falling = [(step, 1.0 - step / 1000) for step in range(1, 1001)]
    curve = sparkline(falling, 1000, 0.0, 1.0)
    assert len(curve) == CURVE_WIDTH + 1
    assert (curve[0], curve[-1]) == ("▇", "▁")
    assert sparkline([], 10, 0.0, 1.0) == ""
    assert sparkline([(1, 2.0)], 1000, 2.0, 2.0) == "▁"


def test_many_links_are_not_all_listed() -> None:
    """The slowest are, and how many others there are."""
    process: Any = SimpleNamespace(pid=1)
    names = [f"node-{number}" for number in range(6)]
    made = Scene([Actor(name, process) for name in names], steps=10)
    for rank, actor in enumerate(made.actors):
        made.receive(actor, Begun(1, 0, 0, 0.1, 1.0))
        made.receive(actor, progress(rank))
    to = console(terminal=False)
    to.print(picture(made))
    assert "and 9 more, which are no slower" in written(to)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (Link(("a", "b"), None, 0), ("a – b", "", "")),
        (Link(("a", "b"), 0.25, 900_000), ("a – b", "250.0 ms", "1 MB/s")),
    ],
)
def test_what_nobody_has_measured_is_left_out(link: Link, said: tuple[str, ...]) -> None:
    """No figure is made up."""
    assert link_words(link) == said


@pytest.mark.parametrize(
    ("to", "silent", "kind"),
    [
        (console(terminal=True), False, LiveScreen),
        (console(terminal=False), False, PlainScreen),
        (console(terminal=True, dumb=True), False, PlainScreen),
        (console(terminal=True), True, SilentScreen),
    ],
)
def test_the_screen_fits_the_reader(to: Console, silent: bool, kind: type) -> None:
    """A terminal, a pipe, a simple terminal, a machine."""
    with open_screen(to, silent=silent) as screen:
        assert isinstance(screen, kind)
        screen.say(1.5, "Soup at [::1]:29500 [red]is[/red] ready.", grave=True)
        screen.show(scene())
    # What an event says is text: no part of it is taken for a colour or vanishes.
    assert ("Soup at [::1]:29500 [red]is[/red] ready." in written(to)) is not silent


def test_a_terminal_without_such_signs_gets_plain_ones() -> None:
    """An old locale, as one may meet it over SSH, ends nothing with an error."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    speak_plainly(file)
    Console(file=file, width=80).print(picture(scene()))
    file.seek(0)
    text = file.read()
    assert "basil - thyme" in text
    assert re.search(r"loss +#[ .:=+*#-]+ +0\.2000", text)
    assert re.search(r"\n +x *\n", text)


def test_no_color_means_no_colour() -> None:
    """The picture is the same, only plain."""
    to = console(terminal=True, NO_COLOR="1")
    with open_screen(to, silent=False) as screen:
        screen.say(1.0, "sage is killed.", grave=True)
        screen.show(scene())
    assert "killed" in written(to)
    assert not any(f"\x1b[{colour}m" in written(to) for colour in range(30, 38))
    assert ";3" not in written(to)
