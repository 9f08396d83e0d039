"""The timeline follows the trace-event format, and nothing in it runs backwards."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.apps.cli.trace import timeline
from potluck.apps.cli.trace_analysis import Dump
from potluck.trace.recorder import OperationOutcome, TraceRecord
from support.traces import collective, dump_of, header_of, message

# What each phase of the trace-event format must have.
REQUIRED = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ph", "cat", "ts", "pid", "tid", "s"},
    "s": {"name", "ph", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "ph", "cat", "ts", "pid", "tid", "id", "bp"},
}


def check(events: list[dict[str, Any]]) -> None:
    """Everything a reader of the format relies on."""
    for event in events:
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    tracks: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert track in named
            # Times are rounded to half a nanosecond, and in centuries to what a float can hold.
            rounding = 1e-3 + 2 * math.ulp(event["ts"])
            assert event["ts"] >= tracks.get(track, 0.0) - rounding
            tracks[track] = event["ts"] + event["dur"]


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    """The events of a phase."""
    return [event for event in events if event["ph"] == phase]


def test_every_rank_is_a_process_and_every_lane_a_track() -> None:
    """Named for people, ranks in order."""
    records = [
        collective(0, 1, 1.0, 2.0),
        collective(0, 1, 1.0, 2.0, group="pair"),
        TraceRecord(lane="training", what="step", begin=0.5, end=2.5, number=7),
        TraceRecord(lane="calls", what="shout", begin=1.0, end=1.5, peer=1),
    ]
    events = timeline([dump_of(header_of(0), records), dump_of(header_of(1), [])], [0.0, 0.0])
    check(events)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 · host0 · pid 0", "rank 1 · host1 · pid 0"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"training", "collectives", "collectives of pair", "calls"}
    assert {event["name"] for event in of(events, "X")} == {"all_reduce 1", "step 7", "shout"}


def test_times_are_microseconds_on_one_clock() -> None:
    """From the first event on, with each machine's offset."""
    dumps = [
        dump_of(header_of(0), [collective(0, 1, 5.0, 5.5)]),
        dump_of(header_of(1), [collective(1, 1, 105.25, 105.5)]),
    ]
    events = of(timeline(dumps, [0.0, -100.0]), "X")
    assert [(event["ts"], event["dur"]) for event in events] == [(0, 5e5), (2.5e5, 2.5e5)]


def test_messages_are_joined_by_arrows() -> None:
    """From the send to the receive that took it, each within its slice; others have none."""
    dumps = [
        dump_of(header_of(0), [message(0, "send", 1, (1.0, 1.2))]),
        dump_of(
            header_of(1),
            [message(1, "recv", 0, (0.5, 1.3)), message(1, "recv", 0, (2.0, 2.1), tag=9)],
        ),
    ]
    events = timeline(dumps, [0.0, 0.0])
    check(events)
    (start,), (end,) = of(events, "s"), of(events, "f")
    assert start["id"] == end["id"]
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (1, 5e5, 2, 8e5)


def test_messages_side_by_side_have_tracks_of_their_own() -> None:
    """Overlapping slices of one track would be drawn as if one were part of the other."""
    records = [message(0, "recv", 1, (1.0, 3.0), tag=tag) for tag in range(3)]
    events = timeline([dump_of(header_of(0), records)], [0.0])
    check(events)
    assert len({event["tid"] for event in of(events, "X")}) == 3
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"messages", "messages 2", "messages 3"}


def test_deaths_and_views_are_marked() -> None:
    """As moments of the process, with the sentence."""
    event = TraceRecord(lane="cluster", what="dead", begin=2.0, end=2.0, reason="attic is dead: x")
    (mark,) = of(timeline([dump_of(header_of(0), [event])], [0.0]), "i")
    assert (mark["name"], mark["s"], mark["args"]["reason"]) == ("dead", "p", "attic is dead: x")


def test_what_still_ran_lasts_until_the_dump() -> None:
    """And says so."""
    (event,) = of(timeline([dump_of(header_of(0), [collective(0, 1, 4.0, None)])], [0.0]), "X")
    assert (event["dur"], event["args"]["outcome"]) == (6e6, "running")


times = st.floats(-1e10, 1e10, allow_nan=False)


@st.composite
def any_dump(draw: st.DrawFn, rank: int) -> Dump:
    """Whatever passes the reader."""
    records = []
    for _ in range(draw(st.integers(0, 6))):
        begin = draw(times)
        end = draw(st.none() | st.floats(begin, 1e10))
        lane = draw(st.sampled_from(["collectives", "messages", "calls", "cluster", "odd"]))
        what = draw(st.sampled_from(["send", "recv", "all_reduce"]))
        outcome = draw(st.sampled_from(OperationOutcome))
        records.append(
            TraceRecord(
                lane=lane,
                what=what,
                begin=begin,
                end=end,
                outcome=outcome,
                rank=rank,
                peer=1 - rank,
                number=draw(st.integers(0, 2)),
            )
        )
    return dump_of(header_of(rank, clock=draw(st.floats(-1e6, 1e6))), records)


@settings(max_examples=40)
@given(any_dump(0), any_dump(1), st.floats(-1e6, 1e6))
def test_whatever_the_dumps_say_the_timeline_is_sound(one: Dump, two: Dump, offset: float) -> None:
    """Sorted, complete, nothing negative, nothing overlapping."""
    check(timeline([one, two], [0.0, offset]))


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_draw_is_drawn(count: int) -> None:
    """A rank that has done nothing still has its name there."""
    events = timeline([dump_of(header_of(0), [])] * count, [0.0] * count)
    assert {event["ph"] for event in events} <= {"M"}
