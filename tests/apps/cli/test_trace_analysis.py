"""Clocks of several machines, put side by side by what they did together."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.apps.cli import trace_analysis
from potluck.apps.cli.trace import sentences
from potluck.apps.cli.trace_analysis import (
    Alignment,
    Dump,
    Summary,
    UnreadableDump,
    align,
    expand,
    latest,
    merge,
    read_dump,
    summarize,
)
from potluck.trace.recorder import DumpHeader, Neighbour, OperationOutcome, TraceRecord, encode
from support.traces import NOW, collective, dump_of, header_of, message, write

AHEAD = 321.5  # seconds by which the second machine's clock is ahead


def test_one_machine_has_one_clock() -> None:
    """Processes of one machine need no correction, whatever they did."""
    dumps = [dump_of(header_of(rank, machine="desk"), []) for rank in range(3)]
    found = align(dumps)
    assert (found.offsets, found.notes) == ((0.0, 0.0, 0.0), ())


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_the_ends_of_common_operations_set_the_clock(late: float) -> None:
    """To a fraction of a millisecond, also if one rank is always late: that must stay visible."""
    chance = random.Random(5)
    here, there = [], []
    for number in range(1, 50):
        moment = number / 10
        end = moment + late + 0.001
        jitter = chance.uniform(-2e-4, 2e-4)
        here.append(collective(0, number, moment, end))
        there.append(collective(1, number, AHEAD + moment + late, AHEAD + end + jitter))
    found = align([dump_of(header_of(0), here), dump_of(header_of(1, AHEAD), there)])
    assert found.offsets[1] == pytest.approx(-AHEAD, abs=2e-4)
    assert found.uncertainty < 2e-4
    (note,) = found.notes
    assert note.startswith("The clock of host1 was set by 49 operations in common, to about 0.")


def test_no_message_arrives_before_it_was_sent() -> None:
    """Where the ends mislead, as on a slow way back, the bounds put the clock right."""
    here = [collective(0, 1, 0.0, 1.0), message(0, "send", 1, (2.0, 2.1))]
    # The receiver left the operation 0.5 s later; by the median its receive would end at 1.9.
    there = [collective(1, 1, 0.4, 1.5), message(1, "recv", 0, (2.2, 2.4))]
    found = align([dump_of(header_of(0), here), dump_of(header_of(1), there)])
    assert 2.4 + found.offsets[1] >= 2.0
    assert 0.4 + found.offsets[1] <= 1.0


def test_machines_that_never_met_are_compared_by_way_of_others() -> None:
    """A chain of three, of which the ends share nothing."""
    ends = [
        [collective(0, 1, 1.0, 1.1, group="left")],
        [
            collective(1, 1, 11.0, 11.1, group="left"),
            collective(1, 1, 12.0, 12.1, group="right"),
        ],
        [collective(2, 1, 52.0, 52.1, group="right")],
    ]
    found = align([dump_of(header_of(rank), each) for rank, each in enumerate(ends)])
    assert found.offsets == pytest.approx((0.0, -10.0, -50.0))


def test_without_anything_in_common_the_clocks_on_the_wall_have_to_do() -> None:
    """And it is said."""
    found = align([dump_of(header_of(0), []), dump_of(header_of(1, AHEAD), [])])
    assert found.offsets[1] == pytest.approx(-AHEAD + 0.5)
    assert "taken from the wall" in found.notes[0]


def test_clocks_that_contradict_themselves_are_put_in_the_middle() -> None:
    """Drift over a long time, or a dump that lies: a timeline all the same."""
    here = [collective(0, 1, 0.0, 0.1), collective(0, 2, 100.0, 100.1)]
    there = [collective(1, 1, 0.0, 0.1), collective(1, 2, 101.0, 101.1)]
    found = align([dump_of(header_of(0), here), dump_of(header_of(1), there)])
    assert -1.1 <= found.offsets[1] <= 0.1


def test_many_machines_take_no_time() -> None:
    """A thousand dumps of a thousand machines are aligned in passing."""
    dumps = [dump_of(header_of(rank), [collective(rank, 1, 1.0, 1.1)]) for rank in range(300)]
    assert len(align(dumps).offsets) == 300


# --------------------------------------------------------------------------------------------------
# Dumps are read whoever wrote them; what is wrong with one is no harm to the others.


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every field of it."""
    record = collective(0, 1, 1.0, 2.0, waited={1: 0.5}, members=(0, 1), reason="x", epoch=3)
    dump = read_dump(write(tmp_path / "a", header_of(0), [record]))
    assert (dump.header, dump.records, dump.trouble) == (header_of(0), (record,), None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\x00\xff\x00\xff", "its first line is not a header"),
        (b"[1, 2]\n", "its first line is not a header"),
        (b'{"potluck_trace": 1}\n', "its first line is not a header"),
        (b'{"potluck_trace": 9, "monotonic": 1, "wall": 2}\n', "in format 9"),
        (
            b'{"potluck_trace": 1, "monotonic": 1e999, "wall": 2}\n',
            "its first line is not a header",
        ),
        (b'{"a": ' * 100_000, "its first line is not a header"),
        (b"x" * (trace_analysis.LONGEST_LINE + 10), "its first line is not a header"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """With the file's name and the reason, and without reading more than one line."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UnreadableDump, match=reason) as caught:
        read_dump(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A file that is not there, and something that is no file."""
    with pytest.raises(UnreadableDump, match="No such file"):
        read_dump(tmp_path / "nowhere")
    with pytest.raises(UnreadableDump):
        read_dump(tmp_path)


def test_what_keeps_waiting_or_claims_any_size_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a file of a terabyte that takes no room."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnreadableDump, match="not a regular file"):
        read_dump(tmp_path / "pipe")
    dump = write(tmp_path / "a", header_of(0), [])
    os.truncate(dump, 1 << 40)
    with pytest.raises(UnreadableDump, match="it has 1099511627776 bytes"):
        read_dump(dump)


def test_a_damaged_line_costs_that_line(tmp_path: Path) -> None:
    """Cut off, too long, too large, ending before it begins: each is counted, the rest is used."""
    good = [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)]
    content = encode(header_of(0), good)
    damaged = [
        b'{"lane": "collectives", "what": "all_re',
        b"\xff\xfe",
        b'{"lane": "x", "what": "y", "begin": 5, "end": 4}',
        b'{"lane": "x", "what": "y", "begin": 1e300}',
        b'{"lane": "x", "what": "y", "begin": 1, "number": 123456789012345678901234567890}',
        b'{"lane": "x", "what": "' + b"y" * 300 + b'", "begin": 1}',
        b" " * (trace_analysis.LONGEST_LINE + 5),
    ]
    first, second, rest = content.splitlines()[0], content.splitlines()[1], content.splitlines()[2]
    (tmp_path / "a").write_bytes(b"\n".join([first, second, *damaged, rest]))
    dump = read_dump(tmp_path / "a")
    assert dump.records == tuple(good)
    assert dump.skipped == len(damaged)
    assert dump.trouble is not None
    assert "7 lines could not be read; the other 2 are used" in dump.trouble


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 400))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path: Path, noise: bytes, place: int
) -> None:
    """No noise anywhere in a dump leads to anything else."""
    content = encode(header_of(0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)])
    (tmp_path / "a").write_bytes(content[:place] + noise + content[place:])
    try:
        dump = read_dump(tmp_path / "a")
    except UnreadableDump:
        return
    assert all(each.end is None or each.end >= each.begin for each in dump.records)


def test_dumps_of_one_process_become_one() -> None:
    """What both hold counts once; what ran in the first has ended in the second."""
    early = dump_of(header_of(0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, None)])
    late = dump_of(
        header_of(0, clock=5.0), [collective(0, 1, 1.0, 2.0), collective(0, 2, 3.0, 4.0)]
    )
    other = dump_of(header_of(1), [])
    merged, alone = merge([late, early, other])
    assert [each.number for each in merged.records] == [1, 2]
    assert all(each.end is not None for each in merged.records)
    assert merged.header == late.header
    assert alone == other


def test_a_folder_stands_for_the_dumps_in_it(tmp_path: Path) -> None:
    """Nothing else in it is taken for one."""
    for name in ("b.trace.jsonl", "a.trace.jsonl", "notes.txt", ".x.trace.jsonl.new"):
        (tmp_path / name).write_text("")
    assert [path.name for path in expand([tmp_path, tmp_path / "notes.txt"])] == [
        "a.trace.jsonl",
        "b.trace.jsonl",
        "notes.txt",
    ]


def test_the_last_incident_is_of_one_job_and_one_minute() -> None:
    """What happened yesterday, or to another job, is another story."""
    dumps = [dump_of(header_of(rank, job="ab"[rank > 0]), []) for rank in range(3)]
    old = DumpHeader(potluck_trace=1, monotonic=1.0, wall=dumps[0].header.wall - 100, job="b")
    found = latest([*dumps, dump_of(old, [])])
    assert [dump.header.rank for dump in found] == [1, 2]
    assert latest([]) == []


# --------------------------------------------------------------------------------------------------
# What a timeline says in sentences: who was waited for, what failed and why, what still ran.

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
    assert "No rank kept the others waiting noticeably." in text


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
    facts = {"outcome": OperationOutcome.FAILED, "error": "PeerLost", "reason": reason}
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
        "outcome": OperationOutcome.FAILED,
        "error": "Timeout",
        "peer": 1,
    }
    records = [
        TraceRecord(lane="messages", what="recv", bytes=2000, reason="late", wall=NOW, **common),
        TraceRecord(lane="calls", what="shout", reason="no answer", wall=NOW + 1, **common),
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
        TraceRecord(
            lane="cluster", what="view 2", begin=3.0, wall=NOW + 3, reason="view 2 with 1 member"
        ),
        TraceRecord(
            lane="cluster", what="dead", begin=2.0, wall=NOW + 2, reason="attic is dead: silent"
        ),
        TraceRecord(
            lane="cluster", what="met", begin=1.0, wall=NOW + 1, reason="attic is connected"
        ),
    ]
    summary, _ = told([dump_of(header_of(rank), records) for rank in range(2)])
    assert summary.events == ("attic is dead: silent", "view 2 with 1 member")


def test_a_terminal_obeys_no_dump() -> None:
    """Whatever control characters somebody wrote into names and reasons."""
    hostile = "\x1b]0;owned\x07\x1b[2J"
    facts = {"outcome": OperationOutcome.FAILED, "reason": hostile}
    _, text = told([dump_of(header_of(0, name=hostile), [collective(0, 1, 1.0, 2.0, **facts)])] * 2)
    assert "\x1b" not in text
    assert "\x07" not in text
