"""What a timeline says in sentences: who was waited for, what failed and why, what still ran."""

from typing import Any

from potluck.apps.cli.trace_clocks import Alignment
from potluck.apps.cli.trace_reading import Dump
from potluck.apps.cli.trace_summary import Summary, summarize
from potluck.apps.cli.trace_words import sentences
from potluck.runtime.recorder_format import Neighbour, Outcome, Record
from support.traces import NOW, collective, dump_of, header_of

ALIKE = Alignment((0.0, 0.0), (), 0.0)


def told(dumps: list[Dump], alignment: Alignment = ALIKE) -> tuple[Summary, str]:
    """The summary, and its text."""
    summary = summarize(dumps, alignment)
    return summary, "\n".join(text for text, _ in sentences(summary, alignment, [], 12))


def test_who_comes_last_is_who_is_waited_for() -> None:
    """The time that the others spent in the operation before; no longer than they were in it."""
    here = [collective(0, 1, 1.0, 1.6), collective(0, 2, 2.0, 2.1), collective(0, 3, 3.0, 3.2)]
    there = [collective(1, 1, 1.5, 1.6), collective(1, 2, 1.8, 2.1), collective(1, 3, 3.1, 3.2)]
    summary, text = told([dump_of(header_of(0), here), dump_of(header_of(1), there)])
    most, least = summary.waiting
    assert (most.name, round(most.seconds, 6), len(most.operations)) == ("rank 1 (host1)", 0.6, 2)
    assert (least.name, round(least.seconds, 6)) == ("rank 0 (host0)", 0.2)
    assert (
        "Rank 1 (host1) was waited for most: 600 ms of all others together, in 2 operations."
        in text
    )
    assert "No operation failed." in text


def test_waits_shorter_than_the_clocks_are_exact_count_for_nothing() -> None:
    """Nobody is accused by an uncertain clock."""
    dumps = [
        dump_of(header_of(0), [collective(0, 1, 1.0, 1.6)]),
        dump_of(header_of(1), [collective(1, 1, 1.5, 1.6)]),
    ]
    _, text = told(dumps, Alignment((0.0, 0.0), (), 0.9))
    assert "Nobody was waited for noticeably." in text


def test_a_rank_without_a_dump_is_judged_by_what_the_others_noticed() -> None:
    """It was killed: they know how long they waited for it, and the summary says who is missing."""
    views = {"line/1": ("process 0", "process 1", "process 2"), "line/2": ("process 0",)}
    facts: dict[str, Any] = {"views": views, "view": "line/2"}
    peers = (Neighbour(name="attic", process="process 2"),)
    waited = collective(0, 1, 1.0, 4.0, view="line/1", waited={2: 2.5})
    summary, text = told(
        [dump_of(header_of(0, peers=peers, **facts), [waited])], Alignment((0.0,), (), 0.0)
    )
    assert summary.missing == ("rank 1 in view 1", "rank 2 in view 1 (attic)")
    assert "Rank 2 in view 1 (attic) was waited for most: 2.5 s" in text
    assert "There is no dump of rank 1 in view 1 and rank 2 in view 1 (attic)" in text


def test_a_failure_is_told_once_with_the_ranks_that_met_it() -> None:
    """In the words of the error itself, as the program got them."""
    reason = "Rank 2 (attic at 10.0.0.3) is gone: its process ended."
    facts = {"outcome": Outcome.FAILED, "error": "PeerLost", "reason": reason}
    dumps = [
        dump_of(header_of(rank), [collective(rank, 9, 1.0, 2.0, **facts)]) for rank in range(2)
    ]
    summary, text = told(dumps)
    (failed,) = summary.failed
    assert (failed.what, failed.ranks, failed.reason) == ("all_reduce 9 of 4.1 kB", (0, 1), reason)
    assert f"all_reduce 9 of 4.1 kB on ranks 0 and 1: {reason}" in text


def test_messages_and_calls_fail_by_name() -> None:
    """A person sees which line of the program it was."""
    common: dict[str, Any] = {
        "begin": 1.0,
        "end": 2.0,
        "outcome": Outcome.FAILED,
        "error": "Timeout",
        "peer": 1,
    }
    records = [
        Record(lane="messages", what="recv", bytes=2000, reason="late", wall=NOW, **common),
        Record(lane="calls", what="shout", reason="no answer", wall=NOW + 1, **common),
    ]
    summary, _ = told([dump_of(header_of(0, world_size=1), records)], Alignment((0.0,), (), 0.0))
    assert [each.what for each in summary.failed] == [
        "recv from rank 1 of 2 kB",
        "the call of 'shout' on rank 1",
    ]


def test_what_still_ran_says_for_how_long_and_for_whom() -> None:
    """The dump of a program that hangs answers the question that one has then."""
    running = collective(0, 3, 4.0, None, waited={1: 5.9})
    _, text = told([dump_of(header_of(0), [running]), dump_of(header_of(1), [])])
    assert (
        "Rank 0 (host0) was in all_reduce 3 of 4.1 kB for 6 s, waiting for rank 1 (host1)." in text
    )


def test_deaths_and_views_are_told_in_their_own_words() -> None:
    """Each sentence once, in the order of time; everyday events are left to the timeline."""
    records = [
        Record(
            lane="cluster", what="view 2", begin=3.0, wall=NOW + 3, reason="view 2 with 1 member"
        ),
        Record(
            lane="cluster", what="dead", begin=2.0, wall=NOW + 2, reason="attic is dead: silent"
        ),
        Record(lane="cluster", what="met", begin=1.0, wall=NOW + 1, reason="attic is connected"),
    ]
    summary, _ = told([dump_of(header_of(rank), records) for rank in range(2)])
    assert summary.events == ("attic is dead: silent", "view 2 with 1 member")


def test_a_terminal_obeys_no_dump() -> None:
    """Whatever control characters somebody wrote into names and reasons."""
    hostile = "\x1b]0;owned\x07\x1b[2J"
    facts = {"outcome": Outcome.FAILED, "reason": hostile}
    _, text = told([dump_of(header_of(0, name=hostile), [collective(0, 1, 1.0, 2.0, **facts)])] * 2)
    assert "\x1b" not in text
    assert "\x07" not in text
