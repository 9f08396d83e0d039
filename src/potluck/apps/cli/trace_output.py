"""One timeline of all ranks, as events that Perfetto and Chrome's tracing page understand.

One process for each rank, one track for each lane and group in it; where operations of one track
overlap, as messages may, further tracks take them.  Times are microseconds from the first event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from potluck.apps.cli.trace_analysis import Alignment, Dump, Summary, matched_messages
from potluck.trace.recorder import Outcome, Record
from potluck.trust.roster import listed

Event: TypeAlias = dict[str, Any]

LANES = ("training", "collectives", "messages", "calls", "cluster")
"""From top to bottom."""

MOST_TRACKS = 64
"""Side by side in one lane and group; what overlaps more is drawn over the last."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """An operation with its place on the timeline, in nanoseconds."""

    record: Record
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a slice is drawn."""

    process: int
    track: int
    begin: int
    end: int


def timeline(dumps: Sequence[Dump], offsets: Sequence[float]) -> list[Event]:
    """All events: names first, then everything else in the order of time."""
    start = min(
        (
            offset + record.begin
            for dump, offset in _pairs(dumps, offsets)
            for record in dump.records
        ),
        default=0.0,
    )
    names: list[Event] = []
    events: list[Event] = []
    spots: dict[int, _Spot] = {}
    for number, (dump, offset) in enumerate(_pairs(dumps, offsets)):
        process = number + 1  # Perfetto keeps 0 for the idle process
        names += _process(process, dump)
        tracks = _Tracks(process)
        for each in _slices(dump, offset - start):
            track = tracks.place(each)
            events.append(_event(process, track, each))
            spots[id(each.record)] = _Spot(process, track, each.begin, each.end)
        names += tracks.names
    events += _flows(dumps, spots)
    events.sort(key=lambda event: event["ts"])
    return names + events


def _pairs(dumps: Sequence[Dump], offsets: Sequence[float]) -> list[tuple[Dump, float]]:
    return list(zip(dumps, offsets, strict=True))


def _slices(dump: Dump, shift: float) -> list[_Slice]:
    """The records of a dump by time; what still ran lasts until the dump was written."""
    found = []
    for record in dump.records:
        begin = _nanoseconds(record.begin + shift)
        last = dump.header.monotonic if record.end is None else record.end
        found.append(_Slice(record, begin, max(begin, _nanoseconds(last + shift))))
    return sorted(found, key=lambda each: (each.begin, -each.end))


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class _Tracks:
    """The tracks of one process."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._ends: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._count = 0
        self.names: list[Event] = []

    def place(self, each: _Slice) -> int:
        """The first track of its lane and group that is free; of events the one they have."""
        lane, group = each.record.lane, each.record.group
        tracks = self._ends.setdefault((lane, group), [])
        for index, (track, end) in enumerate(tracks):
            if end <= each.begin or lane == "cluster":
                tracks[index] = (track, each.end)
                return track
        if len(tracks) >= MOST_TRACKS:
            return tracks[-1][0]
        track = self._make(lane, group, len(tracks))
        tracks.append((track, each.end))
        return track

    def _make(self, lane: str, group: str, number: int) -> int:
        self._count += 1
        name = lane if group in {"", "world"} else f"{lane} of {group}"
        name += f" {number + 1}" if number else ""
        order = LANES.index(lane) if lane in LANES else len(LANES)
        common = {"ph": "M", "ts": 0, "pid": self._process, "tid": self._count}
        self.names.append({"name": "thread_name", **common, "args": {"name": name}})
        place = order * 1000 + min(self._count, 999)
        self.names.append({"name": "thread_sort_index", **common, "args": {"sort_index": place}})
        return self._count


def _process(process: int, dump: Dump) -> list[Event]:
    header = dump.header
    rank = f"rank {header.rank}" if header.rank >= 0 else "no rank"
    name = f"{rank} · {header.name or header.host} · pid {header.pid}"
    common = {"ph": "M", "ts": 0, "pid": process, "tid": 0}
    return [
        {"name": "process_name", **common, "args": {"name": name}},
        {"name": "process_labels", **common, "args": {"labels": header.reason[:200]}},
        {"name": "process_sort_index", **common, "args": {"sort_index": max(header.rank, 0)}},
    ]


def _event(process: int, track: int, each: _Slice) -> Event:
    record = each.record
    common: Event = {"cat": record.lane, "ts": each.begin / 1e3, "pid": process, "tid": track}
    if record.lane == "cluster":
        return {"name": record.what, "ph": "i", "s": "p", **common, "args": _args(record)}
    name = (
        f"{record.what} {record.number}"
        if record.lane in {"collectives", "training"}
        else record.what
    )
    event = {"name": name, "ph": "X", **common, "dur": (each.end - each.begin) / 1e3}
    if record.outcome is Outcome.FAILED:
        event["cname"] = "terrible"  # a colour, where the page knows it
    return {**event, "args": _args(record)}


def _args(record: Record) -> Event:
    known: Event = {
        "outcome": record.outcome.value,
        "rank": record.rank,
        "group": record.group,
        "view": record.view,
        "epoch": record.epoch,
        "number": record.number,
        "bytes": record.bytes,
        "peer": record.peer,
        "waited": {f"rank {rank}": f"{seconds:.3g} s" for rank, seconds in record.waited.items()},
        "error": record.error,
        "reason": record.reason,
    }
    return {name: value for name, value in known.items() if value not in ("", -1, 0, {})}


def _flows(dumps: Sequence[Dump], spots: dict[int, _Spot]) -> list[Event]:
    """An arrow from each send to the receive that took it."""
    events: list[Event] = []
    for number, ((_, sent), (_, taken)) in enumerate(matched_messages(dumps), 1):
        start, end = spots[id(sent)], spots[id(taken)]
        common = {"name": "message", "cat": "message", "id": number}
        # Both are within their slices; an arrow that would point back is drawn straight down.
        begin, stop = start.begin, max(start.begin, end.end)
        events.append({**common, "ph": "s", "ts": begin / 1e3, **_where(start)})
        events.append({**common, "ph": "f", "bp": "e", "ts": stop / 1e3, **_where(end)})
    return events


def _where(spot: _Spot) -> Event:
    return {"pid": spot.process, "tid": spot.track}


# --------------------------------------------------------------------------------------------------
# How the summary of a trace reads, line by line, with the style of each.


def sentences(
    summary: Summary, alignment: Alignment, troubles: Sequence[str], most: int
) -> Iterator[tuple[str, str]]:
    """Every line and its style; of failures and events the last ``most``."""
    yield _whose(summary), "bold"
    if summary.missing:
        yield _missing(summary), "yellow"
    for note in alignment.notes:
        yield printable(note), "dim"
    yield f"\n{_waited_for(summary)}", "bold"
    for rest in summary.waiting[1:4]:
        yield f"  {printable(rest.name)}: {_seconds(rest.seconds)} in {_times(rest.operations)}", ""
    yield from _failures(summary, most)
    for sentence in summary.running:
        yield printable(sentence), "yellow"
    if summary.events:
        yield "\nWhat happened in the cluster:", "bold"
        yield from ((f"  {printable(each)}", "") for each in summary.events[-most:])
    for trouble in troubles:
        yield printable(trouble), "red"


def printable(text: str) -> str:
    """Without what a terminal would obey: dumps may come from anybody."""
    return "".join(each if each.isprintable() else "�" for each in text)


def _whose(summary: Summary) -> str:
    who = listed([printable(each) for each in summary.ranks[:16]])
    count = "1 operation" if summary.operations == 1 else f"{summary.operations} operations"
    return f"{count} of {who}."


def _missing(summary: Summary) -> str:
    gone = listed([printable(each) for each in summary.missing[:16]])
    return f"There is no dump of {gone}: killed, or not copied here."


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _times(operations: set[tuple[str, str, tuple[int, ...], int, str]]) -> str:
    return "1 operation" if len(operations) == 1 else f"{len(operations)} operations"


def _waited_for(summary: Summary) -> str:
    if not summary.waiting:
        return "Nobody was waited for noticeably."
    first = summary.waiting[0]
    name = printable(first.name)
    return (
        f"{name[0].upper()}{name[1:]} was waited for most: {_seconds(first.seconds)} of all "
        f"others together, in {_times(first.operations)}."
    )


def _failures(summary: Summary, most: int) -> Iterator[tuple[str, str]]:
    if not summary.failed:
        yield "No operation failed.", "green"
        return
    count = len(summary.failed)
    yield f"\n{count} operation{'s' * (count != 1)} failed:", "bold"
    for each in summary.failed[-most:]:
        ranks = listed([str(rank) for rank in each.ranks[:16]])
        where = f"on rank{'s' * (len(each.ranks) != 1)} {ranks}"
        yield f"  {printable(each.what)} {where}: {printable(each.reason)}", "red"
    if count > most:
        yield f"  The timeline has {count - most} more, from before.", ""
