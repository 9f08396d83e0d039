"""``potluck trace``: the flight recorders of all ranks, as one timeline and a few sentences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from potluck.apps.cli.common import Json
from potluck.apps.cli.output import console, list_names, print_json, working

if TYPE_CHECKING:
    from potluck.apps.cli.trace_analysis import Alignment, Dump, Summary
    from potluck.trace.recorder import TraceRecord


EXAMPLES = """\
potluck trace                              what went wrong last on this machine
potluck trace desk.trace.jsonl attic/      dumps of several ranks; a folder means all in it
potluck trace dumps/ -o monday.json        where to write it; open it on https://ui.perfetto.dev
"""

EXIT_CODES = (
    "Exit codes: 0 all dumps were read, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 some dumps could not be read (the others are in the timeline), 130 interrupted."
)

DAMAGED = 3

SHOWN = 12
"""Failures, and events, that are told; more are in the timeline."""

WIDE = 120
"""Columns where there is no terminal to fit into."""


def trace(
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DUMPS",
            help="Trace files, or folders with them.",
            show_default="the last incident in POTLUCK_TRACE_DIR, or in ~/.potluck/traces",
        ),
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the timeline; - is stdout.")
    ] = Path("trace.json"),
    json: Json = False,
) -> None:
    """Combine the trace files of all machines: one timeline, slow ranks, what failed and why.

    Every rank keeps its last operations in memory. They are written down when a rank is lost,
    ranks disagree or time runs out, when a program calls cluster.dump_trace(), and when `potluck
    run` gets the signal SIGUSR2. Copy the files of all machines to one, and open the timeline on
    https://ui.perfetto.dev.
    """
    from potluck.apps.cli.trace_analysis import align, merge, summarize

    with working("Combining the trace files", silent=str(output) == "-"):
        found, troubles = _read(dumps or [])
        ranks = sorted(merge(found), key=lambda dump: (dump.header.rank, dump.header.process))
        alignment = align(ranks)
        summary = summarize(ranks, alignment)
        written = _write(output, ranks, alignment)
    if json and str(output) != "-":
        print_json(_facts(written, summary, alignment, troubles))
    else:
        _print(written, summary, alignment, troubles, to_stderr=str(output) == "-")
    if troubles:
        raise typer.Exit(DAMAGED)


def _read(given: list[Path]) -> tuple[list[Dump], list[str]]:
    """What could be read, and what is wrong with the rest."""
    from potluck.apps.cli.trace_analysis import UnreadableDump, expand, latest, read_dump
    from potluck.trace.dump import trace_folder

    folder = trace_folder()
    paths = expand(given or ([folder] if folder is not None and folder.exists() else []))
    found, troubles = [], []
    for path in paths:
        try:
            dump = read_dump(path)
        except UnreadableDump as error:
            troubles.append(str(error))
            continue
        found.append(dump)
        troubles += [] if dump.trouble is None else [dump.trouble]
    if not found:
        where = " ".join(map(str, given)) or str(
            folder or "nowhere, since POTLUCK_TRACE_DIR is empty"
        )
        raise UnreadableDump(
            f"There is no dump to show in {where}",
            cause=" ".join(troubles) or None,
            hint="A dump is written when a rank is lost or time runs out, by cluster.dump_trace(), "
            "and when `potluck run` gets SIGUSR2.",
        )
    return (found if given else latest(found)), troubles


def _write(output: Path, ranks: list[Dump], alignment: Alignment) -> str:
    """Write the timeline; atomically, where that is a file."""
    import msgspec

    from potluck.errors import from_os_error

    content = msgspec.json.encode(
        {
            "traceEvents": timeline(ranks, alignment.offsets),
            "displayTimeUnit": "ms",
            "otherData": {"made by": "potluck trace", "clocks": list(alignment.notes)},
        }
    )
    if str(output) == "-":
        typer.echo(content)
        return "stdout"
    try:
        _put(output, content)
    except OSError as error:
        hint = "Give another place with -o."
        raise from_os_error(f"{output} could not be written", error, hint=hint) from error
    return str(output)


def _put(output: Path, content: bytes) -> None:
    """Write it whole or not at all; a device or a pipe is written to, never replaced."""
    import os

    if output.exists() and not output.is_file():
        output.write_bytes(content)
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    file = temporary.open("xb")  # nobody's link is followed
    try:
        with file:
            file.write(content)
        temporary.replace(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _facts(
    written: str, summary: Summary, alignment: Alignment, troubles: list[str]
) -> dict[str, Any]:
    return {
        "timeline": written,
        "time": summary.incident.time,
        "jobs": list(summary.incident.jobs),
        "reason": summary.incident.reason,
        "ranks": list(summary.ranks),
        "missing": list(summary.missing),
        "operations": summary.operations,
        "waiting": [
            {"rank": each.name, "seconds": each.seconds, "operations": len(each.operations)}
            for each in summary.waiting
        ],
        "failed": [
            {"what": each.what, "ranks": list(each.ranks), "reason": each.reason}
            for each in summary.failed
        ],
        "running": list(summary.running),
        "events": list(summary.events),
        "clocks": list(alignment.notes),
        "troubles": troubles,
    }


def _print(
    written: str, summary: Summary, alignment: Alignment, troubles: list[str], *, to_stderr: bool
) -> None:
    from rich.text import Text

    to = console(stderr=to_stderr, wide=WIDE)
    for text, style in sentences(summary, alignment, troubles):
        to.print(Text(text, style))
    to.print(Text(f"\nThe timeline is in {written}: open it on https://ui.perfetto.dev", "bold"))


# --------------------------------------------------------------------------------------------------
# How the summary of a trace reads, line by line, with the style of each.


def sentences(
    summary: Summary, alignment: Alignment, troubles: Sequence[str], most: int = SHOWN
) -> Iterator[tuple[str, str]]:
    """Every line and its style; of failures and events the last ``most``."""
    from potluck._decode import printable

    for line, style in _lines(summary, alignment, troubles, most):
        yield printable(line), style  # names and reasons are those of others


def _lines(
    summary: Summary, alignment: Alignment, troubles: Sequence[str], most: int
) -> Iterator[tuple[str, str]]:
    yield _what(summary), "bold"
    yield _whose(summary), ""
    if summary.missing:
        yield _missing(summary), "yellow"
    for note in alignment.notes:
        yield note, "dim"
    yield "", ""
    yield _waited_for(summary), "bold"
    for rest in summary.waiting[1:4]:
        yield f"  {rest.name}: {_seconds(rest.seconds)} in {_times(rest.operations)}", ""
    yield from _failures(summary, most)
    for sentence in summary.running:
        yield sentence, "yellow"
    if summary.events:
        yield "", ""
        yield "What happened in the cluster:", "bold"
        yield from ((f"  {each}", "") for each in summary.events[-most:])
    for trouble in troubles:
        yield trouble, "red"


def _what(summary: Summary) -> str:
    """Which incident it is: when, of which script, and why."""
    incident = summary.incident
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.time))
    jobs = incident.jobs[:16]
    of = f" of {list_names(jobs)}" if jobs else ""
    reason = incident.reason.rstrip(". ")
    return f"Dumps{of} from {when}{f': {reason}' if reason else ''}."


def _whose(summary: Summary) -> str:
    who = list_names(summary.ranks[:16])
    count = "1 operation" if summary.operations == 1 else f"{summary.operations} operations"
    return f"{count} of {who}."


def _missing(summary: Summary) -> str:
    gone = list_names(summary.missing[:16])
    return f"There is no dump of {gone}: killed, or not copied here."


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _times(operations: set[tuple[str, str, tuple[int, ...], int, str]]) -> str:
    return "1 operation" if len(operations) == 1 else f"{len(operations)} operations"


def _waited_for(summary: Summary) -> str:
    if not summary.waiting:
        return "No rank kept the others waiting noticeably."
    first = summary.waiting[0]
    name = first.name
    return (
        f"{name[0].upper()}{name[1:]} was waited for most: {_seconds(first.seconds)} of all "
        f"others together, in {_times(first.operations)}."
    )


def _failures(summary: Summary, most: int) -> Iterator[tuple[str, str]]:
    if not summary.failed:
        yield "No operation failed.", "green"
        return
    count = len(summary.failed)
    yield "", ""
    yield f"{count} operation{'s' * (count != 1)} failed:", "bold"
    for each in summary.failed[-most:]:
        ranks = list_names([str(rank) for rank in each.ranks[:16]])
        where = f"on rank{'s' * (len(each.ranks) != 1)} {ranks}"
        yield f"  {each.what} {where}: {each.reason}", "red"
    if count > most:
        yield f"  The timeline has {count - most} more, from before.", ""


# --------------------------------------------------------------------------------------------------
# One timeline of all ranks, as events that Perfetto and Chrome's tracing page understand.
#
# One process for each rank, one track for each lane and group in it; where operations of one track
# overlap, as messages may, further tracks take them.  Times are microseconds from the first event.

Event: TypeAlias = dict[str, Any]

LANES = ("training", "collectives", "messages", "calls", "cluster")
"""From top to bottom."""

MOST_TRACKS = 64
"""Side by side in one lane and group; what overlaps more is drawn over the last."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """An operation with its place on the timeline, in nanoseconds."""

    record: TraceRecord
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
    if record.outcome.value == "failed":
        event["cname"] = "terrible"  # a colour, where the page knows it
    return {**event, "args": _args(record)}


def _args(record: TraceRecord) -> Event:
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
    from potluck.apps.cli.trace_analysis import matched_messages

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
