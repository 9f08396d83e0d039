"""The picture: what the page shows follows from what processes told, whatever that is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from potluck.apps.cli.status_facts import jobs_of, story_of
from potluck.apps.dashboard.gauges import Gauges
from potluck.apps.dashboard.picture import SHOWN_FOR, Scene, draw, draw_news, lighten
from potluck.runtime.control_reports import HealthLine, MemberLine, Report
from potluck.runtime.io_lane import CLOSED
from potluck.runtime.observing_chronicle import Chronicle
from potluck.runtime.observing_journal import EpochLine, EventLine, Journal

NOW = 1_000_000.0
LETTERS = "abcd"
MEMBERS = [MemberLine(letter * 32, 1, letter) for letter in LETTERS]


def report(letter: str, members: str = LETTERS, **changes: Any) -> Report:
    """Of a member that is in contact with all others."""
    return Report(
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


def scene(reports: list[Report], chronicle: Chronicle | None = None, **changes: Any) -> Scene:
    """What an observer knows."""
    facts: dict[str, Any] = {
        "namespace": "home",
        "job": None,
        "reports": reports,
        "troubles": {},
        "discovery": {},
        "chronicle": chronicle or Chronicle(lambda: NOW),
        "gauges": Gauges(),
        "now": NOW,
    }
    return Scene(**{**facts, **changes})


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
    chronicle = Chronicle(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    near = {("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")}
    for each in reports:
        times = [
            0 if each.name == other else 100_000 if (each.name, other) in near else 9_000_000
            for other in LETTERS
        ]
        chronicle.heard(each, journal(each.name, up=10**9, down=10**9, latency=times))
    job = draw(scene(reports, chronicle))["jobs"][0]
    assert [key[0] for key in job["ring"]] == ["a", "c", "b", "d"]
    assert len(job["links"]) == 12
    first = next(each for each in job["links"] if each["from"][0] + each["to"][0] == "ac")
    assert (first["round_trip"], first["latency"]) == (0.002, 0.0001)
    assert {node["up"] for node in job["nodes"]} == {10**9}


def test_of_very_many_links_those_that_matter_are_shown() -> None:
    """The ring, and whatever is not healthy: a picture of a large cluster stays small."""
    members = [MemberLine(f"{number:032}", 1, str(number)) for number in range(40)]
    reports = [
        Report(
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
    chronicle = Chronicle(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    for each in reports:
        chronicle.heard(each, journal(each.name, up=-1, down=-1, latency=[1 << 61] * 4))
    assert [key[0] for key in draw(scene(reports, chronicle))["jobs"][0]["ring"]] == list(LETTERS)
    chronicle.heard(reports[0], journal("a", up=5, latency=[1]))
    assert [key[0] for key in draw(scene(reports, chronicle))["jobs"][0]["ring"]] == list(LETTERS)


def test_who_is_gone_is_shown_with_the_reason_of_the_view_after_it() -> None:
    """For a while; the reason is the sentence by which the others went on."""
    chronicle = Chronicle(lambda: NOW)
    names = [f"{letter * 32}/1" for letter in LETTERS]
    left = report("d")
    chronicle.parted(left, "the connection ended")
    reports = [report(each, "abc") for each in "abc"]
    job = draw(scene(reports, chronicle))["jobs"][0]
    gone = job["nodes"][-1]
    assert (gone["name"], gone["health"], gone["reason"]) == ("d", "gone", "the connection ended")
    epochs = [EpochLine(1, 1.0, names, "begun"), EpochLine(2, 2.0, names[:3], "without d: dead")]
    chronicle.heard(reports[0], journal("a", epochs=epochs))
    job = draw(scene(reports, chronicle))["jobs"][0]
    assert job["nodes"][-1]["reason"] == "without d: dead"
    assert [each["epoch"] for each in job["epochs"]] == [1, 2]
    later = draw(scene(reports, chronicle, now=NOW + SHOWN_FOR))["jobs"][0]
    assert [node["name"] for node in later["nodes"]] == ["a", "b", "c"]


def test_a_machine_that_was_restarted_is_one_machine() -> None:
    """Also after several restarts; a worker that died beside another one stays to be seen."""
    moment = NOW
    chronicle = Chronicle(lambda: moment)

    def start(letter: str, incarnation: int) -> Report:
        begun = msgspec.structs.replace(report(letter, "ab"), incarnation=incarnation)
        chronicle.arrived(begun.key)
        return begun

    def shown(here: list[Report]) -> list[tuple[str, str]]:
        members = [MemberLine(*each.key, each.name) for each in here]
        told = [msgspec.structs.replace(each, members=members) for each in here]
        nodes = draw(scene(told, chronicle, now=moment))["jobs"][0]["nodes"]
        return [(each["name"], each["health"]) for each in nodes]

    workers, restarted = [start("a", 1), start("a", 2)], start("b", 1)
    for number in (2, 3, 4):
        moment += 60
        chronicle.parted(restarted, "the connection ended")
        assert shown(workers)[-1] == ("b", "gone")
        moment += 60
        restarted = start("b", number)
        assert shown([*workers, restarted]) == [(name, "healthy") for name in "aab"]
    chronicle.parted(workers[0], "the connection ended")
    assert shown([workers[1], restarted])[-1] == ("a", "gone")


def test_a_job_that_has_ended_is_still_shown() -> None:
    """Who worked on it and how far it came; the story is that of the jobs under way."""
    chronicle, gauges = Chronicle(lambda: NOW), Gauges()
    gauges.note_loss("train.py", 100, 0.25)
    for letter in LETTERS:
        chronicle.parted(report(letter), CLOSED)
    picture = draw(scene([], chronicle, gauges=gauges))
    (job,) = picture["jobs"]
    assert (job["ended"], job["state"], job["loss"]) == (True, "ended", [[100, 0.25]])
    assert {node["state"] for node in job["nodes"]} == {"left"}
    assert picture["story"] == story_of("home", None, [], [], {})
    assert draw(scene([], chronicle, now=NOW + SHOWN_FOR))["jobs"] == []


def test_figures_that_nobody_told_are_left_out() -> None:
    """And those that are not shown are not sent."""
    chronicle = Chronicle(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    figures = {"training.step": 7.0, "training.loss": 0.5, "something.else": 1.0}
    chronicle.heard(reports[0], journal("a", figures=figures))
    nodes = draw(scene(reports, chronicle))["jobs"][0]["nodes"]
    assert nodes[0]["figures"] == {"training.step": 7.0, "training.loss": 0.5}
    assert nodes[1]["figures"] == {}


def test_which_operations_failed_is_shown() -> None:
    """Of those that never failed nothing."""
    chronicle = Chronicle(lambda: NOW)
    figures = {"collectives.failed": 2.0, "all_reduce.failed": 2.0, "barrier.failed": 0.0}
    chronicle.heard(report("a"), journal("a", figures=figures))
    node = draw(scene([report("a")], chronicle))["jobs"][0]["nodes"][0]
    assert node["figures"] == {"collectives.failed": 2.0, "all_reduce.failed": 2.0}


def test_for_whom_a_rank_waits_is_told() -> None:
    """The one that cost it most; sums over all and nonsense are no rank."""
    chronicle = Chronicle(lambda: NOW)
    reports = [report(each) for each in LETTERS]
    waited = {"waiting.total": 9.0, "waiting.1": 2.0, "waiting.3": 7.0, "waiting.x": 99.0}
    waited["waiting." + "9" * 99] = 1e9
    chronicle.heard(reports[0], journal("a", figures=waited))
    chronicle.heard(reports[1], journal("b", figures={"waiting.0": 0.0}))
    nodes = draw(scene(reports, chronicle))["jobs"][0]["nodes"]
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
    chronicle = Chronicle(lambda: NOW)
    text = "<script>alert(1)</script>"
    chronicle.heard(report("b"), journal("b", events=[EventLine(1, 5.0, text, "warning")]))
    (news,) = draw_news(chronicle.news())
    assert (news["number"], news["name"], news["level"], news["text"]) == (1, "b", "warning", text)
