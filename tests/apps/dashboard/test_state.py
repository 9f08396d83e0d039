"""The broadcast: many viewers, none of whom anybody waits for."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from potluck.apps.cli.status_facts import jobs_of, story_of
from potluck.apps.dashboard import state as module
from potluck.apps.dashboard.state import (
    KEPT,
    MAX_CURVE,
    MAX_PROCESSES,
    MAX_VIEWERS,
    SHOWN_FOR,
    Broadcast,
    DashboardState,
    Gauges,
    TooManyViewers,
    draw,
    draw_news,
    lighten,
)
from potluck.cluster.io import CLOSED
from potluck.cluster.observer import ObservedHistory
from potluck.cluster.reports import (
    EpochLine,
    EventLine,
    HealthLine,
    Journal,
    MemberLine,
    StatusReport,
)


def events(message: bytes) -> list[tuple[str, str, object]]:
    """Kind, mark and data of each event in a message."""
    found = []
    for block in message.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["event"], fields["id"], json.loads(fields["data"])))
    return found


def test_a_viewer_gets_everything_first_and_then_what_is_new() -> None:
    """Of pictures the latest alone: who is slow skips those in between."""

    async def watch() -> None:
        shown = Broadcast()
        shown.show(b'"all 1"', b'"light 1"')
        shown.tell(1, b'"news 1"')
        viewer = shown.admit()
        messages = viewer.messages()
        assert events(await anext(messages)) == [
            ("whole", f"{shown.start}.0", "all 1"),
            ("news", f"{shown.start}.1", "news 1"),
        ]
        for number in (2, 3):
            shown.show(b'"all %d"' % number, b'"light %d"' % number)
            shown.tell(number, b'"news %d"' % number)
        assert events(await anext(messages)) == [
            ("light", f"{shown.start}.1", "light 3"),
            ("news", f"{shown.start}.2", "news 2"),
            ("news", f"{shown.start}.3", "news 3"),
        ]
        viewer.leave()
        assert [each async for each in messages] == []
        assert shown.viewers == 0

    asyncio.run(watch())


def test_who_comes_back_misses_nothing_and_hears_nothing_twice() -> None:
    """By the mark of its last event; a mark of another start, or nonsense, means nothing."""

    async def watch() -> None:
        shown = Broadcast()
        for number in range(1, 6):
            shown.tell(number, b"%d" % number)
        for mark, expected in [
            (f"{shown.start}.3", [4, 5]),
            ("cafe.3", [1, 2, 3, 4, 5]),
            (f"{shown.start}.-1", [1, 2, 3, 4, 5]),
            (f"{shown.start}.{'9' * 5000}", [1, 2, 3, 4, 5]),
            (f"{shown.start}.999", []),
            ("", [1, 2, 3, 4, 5]),
        ]:
            viewer = shown.admit()
            message = await anext(viewer.messages(mark))
            assert [data for kind, _, data in events(message) if kind == "news"] == expected
            viewer.leave()

    asyncio.run(watch())


def test_there_is_room_for_so_many() -> None:
    """And again when one of them leaves."""

    async def watch() -> None:
        shown = Broadcast()
        viewers = [shown.admit() for _ in range(MAX_VIEWERS)]
        with pytest.raises(TooManyViewers):
            shown.admit()
        viewers[3].leave()
        shown.admit()

    asyncio.run(watch())


def test_in_silence_a_sign_of_life_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a connection that has broken is noticed on both sides; the end ends it."""
    monkeypatch.setattr(module, "HEARTBEAT", 0.01)

    async def watch() -> None:
        shown = Broadcast()
        messages = shown.admit().messages()
        await anext(messages)
        assert await anext(messages) == b": still here\n\n"
        shown.close()
        assert [each async for each in messages] == []

    asyncio.run(watch())


def test_what_is_kept_is_bounded() -> None:
    """However much happens."""
    shown = Broadcast()
    for number in range(1, 2000):
        shown.tell(number, b"%d" % number)
    assert len(json.loads(shown.news)) == module.BROADCAST_KEPT
    assert shown.last_number == 1999


# --------------------------------------------------------------------------------------------------
# Gauges: what people want to see of counters that only grow.

ME = ("a" * 32, 1)


def counted(moved: float, waited: float) -> dict[str, float]:
    """What a process tells."""
    return {"collectives.bytes": moved, "waiting.total": waited}


def test_counters_become_rates() -> None:
    """Of the time between two looks; looks that come too soon are left out."""
    gauges = Gauges()
    gauges.note(ME, counted(1000, 5.0), 10.0)
    gauges.note(ME, counted(1500, 5.1), 10.3)
    gauges.note(ME, counted(3000, 5.5), 12.0)
    assert [each.as_list() for each in gauges.samples(ME)] == [[12.0, 1000, 0.25]]


def test_a_process_that_counts_nothing_has_no_curve() -> None:
    """And counters that fall back, or waiting beyond the clock, stay within what is possible."""
    gauges = Gauges()
    gauges.note(ME, {"uptime_seconds": 3.0}, 1.0)
    assert gauges.samples(ME) == []
    gauges.note(ME, counted(100, 0.0), 1.0)
    gauges.note(ME, counted(50, 9.0), 2.0)
    assert [each.as_list() for each in gauges.samples(ME)] == [[2.0, 0, 1.0]]


def test_curves_are_bounded() -> None:
    """In points, in processes, and to those who are here."""
    gauges = Gauges()
    for second in range(2 * KEPT):
        gauges.note(ME, counted(second, 0), float(second))
    assert len(gauges.samples(ME)) == KEPT
    others = [(f"{number}", 1) for number in range(MAX_PROCESSES + 5)]
    for other in others:
        gauges.note(other, counted(0, 0), 0.0)
        gauges.note(other, counted(0, 0), 2.0)
    gauges.keep(others, [])
    assert gauges.samples(ME) == []
    assert len([other for other in others if gauges.samples(other)]) == MAX_PROCESSES


def test_a_long_loss_becomes_thinner_and_goes_on_from_an_earlier_step() -> None:
    """Its first and its latest points stay."""
    gauges = Gauges()
    for step in range(5000):
        gauges.note_loss("train.py", step, 1 / (step + 1))
    curve = gauges.loss("train.py")
    assert MAX_CURVE // 2 <= len(curve) <= MAX_CURVE
    assert curve[0] == [0, 1.0]
    assert curve[-1][0] >= 4980
    gauges.note_loss("train.py", 4990, 0.5)  # somebody was asked a little earlier
    assert gauges.loss("train.py") == curve
    gauges.note_loss("train.py", 1, 0.5)
    assert gauges.loss("train.py") == [[0, 1.0], [1, 0.5]]
    gauges.keep([], ["other.py"])
    assert gauges.loss("train.py") == []


# --------------------------------------------------------------------------------------------------
# The picture: what the page shows follows from what processes told, whatever that is.

NOW = 1_000_000.0
LETTERS = "abcd"
MEMBERS = [MemberLine(letter * 32, 1, letter) for letter in LETTERS]


def report(letter: str, members: str = LETTERS, **changes: Any) -> StatusReport:
    """Of a member that is in contact with all others."""
    return StatusReport(
        node=letter * 32,
        incarnation=1,
        name=letter,
        host="192.0.2.1",
        port=4711,
        job="train.py",
        state="active",
        reason="begun by a",
        epoch=len(LETTERS) - len(members) + 1,
        rank=members.index(letter),
        members=[each for each in MEMBERS if each.name in members],
        peers=[
            HealthLine(each.node, 1, each.name, "healthy", "fine", 0.002)
            for each in MEMBERS
            if each.name != letter and each.name in members
        ],
        **changes,
    )


def journal(letter: str, **changes: Any) -> Journal:
    """What it tells beside."""
    return Journal(node=letter * 32, incarnation=1, **changes)


def scene(
    reports: list[StatusReport], history: ObservedHistory | None = None, **changes: Any
) -> DashboardState:
    """What an observer knows."""
    facts: dict[str, Any] = {
        "namespace": "home",
        "job": None,
        "reports": reports,
        "troubles": {},
        "discovery": {},
        "history": history or ObservedHistory(lambda: NOW),
        "gauges": Gauges(),
        "now": NOW,
    }
    return DashboardState(**{**facts, **changes})


def test_the_story_is_that_of_the_command() -> None:
    """Word for word, also when nobody is here or somebody cannot be reached."""
    troubles = {"desk": "its port refuses"}
    for reports in ([report(each) for each in LETTERS], [], [report("a")]):
        picture = draw(scene(reports, troubles=troubles))
        assert picture["story"] == story_of("home", None, jobs_of(reports), [], troubles)
    silent = draw(scene([report("a")]))["jobs"][0]["nodes"][1]
    assert (silent["state"], silent["health"]) == ("silent", "silent")


def test_links_and_the_ring_follow_from_measurements() -> None:
    """The order round the ring is the shortest way, not that of ranks."""
    history = ObservedHistory(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    near = {("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")}
    for each in reports:
        times = [
            0 if each.name == other else 100_000 if (each.name, other) in near else 9_000_000
            for other in LETTERS
        ]
        history.heard(each, journal(each.name, up=10**9, down=10**9, latency=times))
    job = draw(scene(reports, history))["jobs"][0]
    assert [key[0] for key in job["ring"]] == ["a", "c", "b", "d"]
    assert len(job["links"]) == 12
    first = next(each for each in job["links"] if each["from"][0] + each["to"][0] == "ac")
    assert (first["round_trip"], first["latency"]) == (0.002, 0.0001)
    assert {node["up"] for node in job["nodes"]} == {10**9}


def test_of_very_many_links_those_that_matter_are_shown() -> None:
    """The ring, and whatever is not healthy: a picture of a large cluster stays small."""
    members = [MemberLine(f"{number:032}", 1, str(number)) for number in range(40)]
    reports = [
        StatusReport(
            node=me.node,
            incarnation=1,
            name=me.name,
            job="train.py",
            state="active",
            members=members,
            peers=[
                HealthLine(other.node, 1, other.name, "suspect" if me.name == "7" else "healthy")
                for other in members
                if other is not me
            ],
        )
        for me in members
    ]
    job = draw(scene(reports))["jobs"][0]
    after = dict(pairwise([*job["ring"], job["ring"][0]]))
    assert len(job["links"]) == 39 + 39
    assert all(
        link["status"] == "suspect" or after[link["from"]] == link["to"] for link in job["links"]
    )


def test_nonsense_is_no_ring() -> None:
    """A member that tells rates below zero or too few times changes nothing for the others."""
    history = ObservedHistory(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    for each in reports:
        history.heard(each, journal(each.name, up=-1, down=-1, latency=[1 << 61] * 4))
    assert [key[0] for key in draw(scene(reports, history))["jobs"][0]["ring"]] == list(LETTERS)
    history.heard(reports[0], journal("a", up=5, latency=[1]))
    assert [key[0] for key in draw(scene(reports, history))["jobs"][0]["ring"]] == list(LETTERS)


def test_who_is_gone_is_shown_with_the_reason_of_the_view_after_it() -> None:
    """For a while; the reason is the sentence by which the others went on."""
    history = ObservedHistory(lambda: NOW)
    names = [f"{letter * 32}/1" for letter in LETTERS]
    left = report("d")
    history.parted(left, "the connection ended")
    reports = [report(each, "abc") for each in "abc"]
    job = draw(scene(reports, history))["jobs"][0]
    gone = job["nodes"][-1]
    assert (gone["name"], gone["health"], gone["reason"]) == ("d", "gone", "the connection ended")
    epochs = [EpochLine(1, 1.0, names, "begun"), EpochLine(2, 2.0, names[:3], "without d: dead")]
    history.heard(reports[0], journal("a", epochs=epochs))
    job = draw(scene(reports, history))["jobs"][0]
    assert job["nodes"][-1]["reason"] == "without d: dead"
    assert [each["epoch"] for each in job["epochs"]] == [1, 2]
    later = draw(scene(reports, history, now=NOW + SHOWN_FOR))["jobs"][0]
    assert [node["name"] for node in later["nodes"]] == ["a", "b", "c"]


def test_a_machine_that_was_restarted_is_one_machine() -> None:
    """Also after several restarts; a worker that died beside another one stays to be seen."""
    moment = NOW
    history = ObservedHistory(lambda: moment)

    def start(letter: str, incarnation: int) -> StatusReport:
        begun = msgspec.structs.replace(report(letter, "ab"), incarnation=incarnation)
        history.arrived(begun.key)
        return begun

    def shown(here: list[StatusReport]) -> list[tuple[str, str]]:
        members = [MemberLine(*each.key, each.name) for each in here]
        told = [msgspec.structs.replace(each, members=members) for each in here]
        nodes = draw(scene(told, history, now=moment))["jobs"][0]["nodes"]
        return [(each["name"], each["health"]) for each in nodes]

    workers, restarted = [start("a", 1), start("a", 2)], start("b", 1)
    for number in (2, 3, 4):
        moment += 60
        history.parted(restarted, "the connection ended")
        assert shown(workers)[-1] == ("b", "gone")
        moment += 60
        restarted = start("b", number)
        assert shown([*workers, restarted]) == [(name, "healthy") for name in "aab"]
    history.parted(workers[0], "the connection ended")
    assert shown([workers[1], restarted])[-1] == ("a", "gone")


def test_a_job_that_has_ended_is_still_shown() -> None:
    """Who worked on it and how far it came; the story is that of the jobs under way."""
    history, gauges = ObservedHistory(lambda: NOW), Gauges()
    gauges.note_loss("train.py", 100, 0.25)
    for letter in LETTERS:
        history.parted(report(letter), CLOSED)
    picture = draw(scene([], history, gauges=gauges))
    (job,) = picture["jobs"]
    assert (job["ended"], job["state"], job["loss"]) == (True, "ended", [[100, 0.25]])
    assert {node["state"] for node in job["nodes"]} == {"left"}
    assert picture["story"] == story_of("home", None, [], [], {})
    assert draw(scene([], history, now=NOW + SHOWN_FOR))["jobs"] == []


def test_figures_that_nobody_told_are_left_out() -> None:
    """And those that are not shown are not sent."""
    history = ObservedHistory(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    figures = {"training.step": 7.0, "training.loss": 0.5, "something.else": 1.0}
    history.heard(reports[0], journal("a", figures=figures))
    nodes = draw(scene(reports, history))["jobs"][0]["nodes"]
    assert nodes[0]["figures"] == {"training.step": 7.0, "training.loss": 0.5}
    assert nodes[1]["figures"] == {}


def test_which_operations_failed_is_shown() -> None:
    """Of those that never failed nothing."""
    history = ObservedHistory(lambda: NOW)
    figures = {"collectives.failed": 2.0, "all_reduce.failed": 2.0, "barrier.failed": 0.0}
    history.heard(report("a"), journal("a", figures=figures))
    node = draw(scene([report("a")], history))["jobs"][0]["nodes"][0]
    assert node["figures"] == {"collectives.failed": 2.0, "all_reduce.failed": 2.0}


def test_for_whom_a_rank_waits_is_told() -> None:
    """The one that cost it most; sums over all and nonsense are no rank."""
    history = ObservedHistory(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    waited = {"waiting.total": 9.0, "waiting.1": 2.0, "waiting.3": 7.0, "waiting.x": 99.0}
    waited["waiting." + "9" * 99] = 1e9
    history.heard(reports[0], journal("a", figures=waited))
    history.heard(reports[1], journal("b", figures={"waiting.0": 0.0}))
    nodes = draw(scene(reports, history))["jobs"][0]["nodes"]
    assert [node["waits_for"] for node in nodes] == [3, None, None, None]


def test_a_light_picture_has_the_last_points_alone() -> None:
    """A page keeps the others; all of it is plain data."""
    gauges = Gauges()
    for second in range(9):
        gauges.note(("a" * 32, 1), {"collectives.bytes": second * 10.0}, second * 1.0)
        gauges.note_loss("train.py", second, 1.0)
    picture = draw(scene([report(each) for each in LETTERS], gauges=gauges))
    assert len(picture["jobs"][0]["nodes"][0]["samples"]) == 8
    light = msgspec.json.decode(msgspec.json.encode(lighten(picture)))
    assert len(light["jobs"][0]["nodes"][0]["samples"]) == 1
    assert light["jobs"][0]["loss"] == [[8, 1.0]]


def test_news_name_who_told_them() -> None:
    """As texts and numbers, whatever is in them."""
    history = ObservedHistory(lambda: NOW)
    text = "<script>alert(1)</script>"
    history.heard(report("b"), journal("b", events=[EventLine(1, 5.0, text, "warning")]))
    (news,) = draw_news(history.news())
    assert (news["number"], news["name"], news["level"], news["text"]) == (1, "b", "warning", text)
