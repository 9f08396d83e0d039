"""Reading dumps of flight recorders: a damaged file does not spoil the others.

A dump may come from another machine, be cut off by a full disk, or be no dump at all.  Lines,
files and numbers have bounds; what cannot be read is counted and told, the rest is used.
"""

from __future__ import annotations

import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import BinaryIO, TypeAlias

import msgspec

from potluck import _time
from potluck._decode import Reader, json_reader
from potluck._platform import AT_ONCE
from potluck._version import NewerFile
from potluck.apps.cli.output import list_names
from potluck.errors import DistributedError, describe
from potluck.trace.dump import SUFFIX
from potluck.trace.recorder import VERSION, DumpHeader, OperationOutcome, TraceRecord

LONGEST_LINE = 1 << 20
"""Bytes."""

MOST_LINES = 1_100_000
"""A recorder keeps at most about a million operations."""

LARGEST_FILE = 1 << 30
"""Bytes: a thousand for each of these operations.  A file may claim any size, and take no room."""

MOST_DUMPS = 4096

INCIDENT = 60.0
"""Seconds between dumps of one incident."""


class UnreadableDump(DistributedError, ValueError):
    """A file holds no dump that this version can read."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What one process wrote."""

    path: Path
    header: DumpHeader
    records: tuple[TraceRecord, ...]
    skipped: int = 0
    """Lines that could not be read."""

    @property
    def trouble(self) -> str | None:
        """What is wrong with it, as a sentence."""
        if not self.skipped:
            return None
        lines = "1 line" if self.skipped == 1 else f"{self.skipped} lines"
        return f"{self.path}: {lines} could not be read; the other {len(self.records)} are used."


_WRONG = (msgspec.DecodeError, ValueError, RecursionError)
"""No JSON, no text, nested without end."""

_headers: Reader[DumpHeader] = json_reader(DumpHeader)
_records: Reader[TraceRecord] = json_reader(TraceRecord)


def read_dump(path: Path) -> Dump:
    """What a file holds; raises :class:`UnreadableDump` for any other file."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UnreadableDump(f"{path} is not a regular file")
            if state.st_size > LARGEST_FILE:
                cause = f"it has {state.st_size} bytes; the largest has {LARGEST_FILE}"
                raise UnreadableDump(f"{path} is not a trace file", cause=cause)
            lines = _lines(file)
            header = _read_header(path, next(lines, b""))
            records, skipped = _read_records(lines)
    except OSError as error:
        raise UnreadableDump(f"{path} could not be read", cause=describe(error)) from None
    return Dump(path, header, tuple(records), skipped)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer does not block (Windows has none)."""
    return os.open(path, flags | AT_ONCE)


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines; None for one that is too long."""
    for _ in range(MOST_LINES):
        line = file.readline(LONGEST_LINE)
        if not line:
            return
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        yield None
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)


def _read_header(path: Path, line: bytes | None) -> DumpHeader:
    hint = "Give files that Potluck's flight recorder wrote (*.trace.jsonl)."
    try:
        header = _headers.decode(line or b"")
    except _WRONG as error:
        what = "it is empty" if line == b"" else f"its first line is not a header ({error})"
        raise UnreadableDump(f"{path} is not a trace file", cause=what, hint=hint) from None
    if header.potluck_trace > VERSION:
        newer = NewerFile(path, header.potluck_trace, VERSION, header.potluck)
        raise UnreadableDump(newer.message, expected=VERSION, got=newer.got, hint=newer.hint)
    if header.potluck_trace != VERSION:
        raise UnreadableDump(
            f"{path} was written by another version of Potluck",
            cause=f"its format is {header.potluck_trace}, this version reads {VERSION}",
            expected=VERSION,
            got=header.potluck_trace,
            hint="Use `potluck trace` of the version that wrote it.",
        )
    return header


def _read_records(lines: Iterable[bytes | None]) -> tuple[list[TraceRecord], int]:
    found, skipped = [], 0
    for line in lines:
        try:
            record = _records.decode(line) if line is not None else None
        except _WRONG:
            record = None
        if record is None or (record.end is not None and record.end < record.begin):
            skipped += 1
        else:
            found.append(record)
    return found, skipped


def merge(dumps: Iterable[Dump]) -> list[Dump]:
    """One for each process: what several dumps of one hold in common counts once."""
    by_process: dict[object, list[Dump]] = {}
    for dump in dumps:
        key: object = (dump.header.process, dump.header.machine) if dump.header.process else dump
        by_process.setdefault(key, []).append(dump)
    return [_merge_one(sorted(each, key=_written)) for each in by_process.values()]


def _written(dump: Dump) -> float:
    return dump.header.monotonic


def _merge_one(dumps: list[Dump]) -> Dump:
    last = dumps[-1]
    if len(dumps) == 1:
        return last
    known: dict[object, TraceRecord] = {}
    for dump in dumps:  # what ran in an earlier dump has ended in a later one, or is there too
        for record in dump.records:
            key = (record.lane, record.group, record.view, record.what, record.begin, record.peer)
            known[key, record.number] = record
    running = {id(record) for record in last.records}
    kept = [each for each in known.values() if each.end is not None or id(each) in running]
    kept.sort(key=lambda record: record.begin)
    return Dump(last.path, last.header, tuple(kept), sum(dump.skipped for dump in dumps))


def expand(paths: Iterable[Path]) -> list[Path]:
    """The files that are meant; a folder stands for the dumps in it."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        found.update(dict.fromkeys(inside))
    if len(found) > MOST_DUMPS:
        raise UnreadableDump(f"{len(found)} dumps are too many", expected=MOST_DUMPS)
    return list(found)


def latest(dumps: Iterable[Dump]) -> list[Dump]:
    """Those of the last incident: of the same job as the newest, and written about then."""
    ordered = sorted(dumps, key=lambda dump: dump.header.wall)
    if not ordered:
        return []
    newest = ordered[-1].header
    return [
        dump
        for dump in ordered
        if dump.header.job == newest.job and newest.wall - dump.header.wall <= INCIDENT
    ]


# --------------------------------------------------------------------------------------------------
# Putting the clocks of several machines side by side, from what their dumps have in common.
#
# Processes of one machine share a steady clock.  Between machines two facts are used.  All ranks
# leave an all-reduce, a barrier and their like at about the same moment, so the median difference
# of the ends of such operations is the difference of the clocks, however late some rank came to
# them. And no rank can leave before the last has come, nor receive what was not sent: these bounds
# always hold, and correct the median where it is wrong.  Where nothing was done together, the
# clocks on the wall have to do.

SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""No rank leaves one of these before all have come."""

RECENT = 256
"""Common operations that count, the last ones: clocks drift."""

MANY = 128
"""Machines beyond which only what two have done directly is used: the rest takes too long."""

OperationKey: TypeAlias = tuple[str, str, tuple[int, ...], int, str]
"""View, group, members, number and name: the same on all ranks of one operation."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How to read the clocks of some dumps as one: add a dump's offset to its times."""

    offsets: tuple[float, ...]
    notes: tuple[str, ...]
    """How it was done, one sentence for each machine but the first."""
    uncertainty: float
    """Seconds by which two machines may be apart."""


def key_of(record: TraceRecord) -> OperationKey:
    """What a collective has in common on all its ranks."""
    return record.view, record.group, record.members, record.number, record.what


def align(dumps: Sequence[Dump]) -> Alignment:
    """Offsets for all dumps; the first one's clock is the measure."""
    machines: dict[str, list[int]] = {}
    for index, dump in enumerate(dumps):
        machines.setdefault(dump.header.machine or f"dump {index}", []).append(index)
    names = list(machines)
    home = {index: place for place, name in enumerate(names) for index in machines[name]}
    shared = _Shared(len(names))
    for one, other in _common_operations(dumps):
        if home[one[0]] != home[other[0]]:
            shared.met((home[one[0]], one[1]), (home[other[0]], other[1]))
    for (sender, sent), (receiver, received) in matched_messages(dumps):
        if home[sender] != home[receiver] and received.end is not None:
            # Sent before it was received: offset(sender) - offset(receiver) is at most this.
            shared.bound(home[receiver], home[sender], received.end - sent.begin)
    walls = [dumps[machines[name][0]].header for name in names]
    by_wall = [
        header.wall - header.monotonic - (walls[0].wall - walls[0].monotonic) for header in walls
    ]
    offsets, notes, uncertainty = shared.solve(
        by_wall, [header.name or header.host for header in walls]
    )
    return Alignment(tuple(offsets[home[index]] for index in range(len(dumps))), notes, uncertainty)


Ended: TypeAlias = tuple[int, TraceRecord]
"""Whose it is, and what."""


def _common_operations(dumps: Sequence[Dump]) -> Iterable[tuple[Ended, Ended]]:
    """Pairs of ranks in one operation that synchronises."""
    found: dict[OperationKey, list[Ended]] = defaultdict(list)
    for index, dump in enumerate(dumps):
        for record in dump.records:
            is_done = record.outcome is OperationOutcome.DONE and record.end is not None
            if is_done and record.lane == "collectives" and record.what in SYNCHRONISING:
                found[key_of(record)].append((index, record))
    for ranks in found.values():
        first = ranks[0]
        for other in ranks[1:]:
            yield first, other


def matched_messages(dumps: Sequence[Dump]) -> list[tuple[Ended, Ended]]:
    """Sends and the receives that took them: the n-th to a rank is its n-th of that size."""
    sends: dict[object, Ended] = {}
    received: list[tuple[object, Ended]] = []
    for index, dump in enumerate(dumps):
        for record in dump.records:
            if record.lane != "messages" or record.outcome is not OperationOutcome.DONE:
                continue
            is_send = record.what == "send"
            source, target = (record.rank, record.peer) if is_send else (record.peer, record.rank)
            where = (record.view, record.group, record.members, source, target)
            key = (*where, record.tag, record.number, record.bytes)
            if is_send:
                sends[key] = (index, record)
            else:
                received.append((key, (index, record)))
    return [(sends[key], taken) for key, taken in received if key in sends]


class _Shared:
    """What machines have done together."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._most = [[math.inf] * count for _ in range(count)]
        self._apart: dict[tuple[int, int], list[float]] = defaultdict(list)

    def met(self, one: Ended, other: Ended) -> None:
        """Two machines were in one operation, both to its end."""
        (here, mine), (there, theirs) = one, other
        assert mine.end is not None
        assert theirs.end is not None
        self.bound(here, there, mine.end - theirs.begin)
        self.bound(there, here, theirs.end - mine.begin)
        ends = mine.end - theirs.end
        self._apart[here, there].append(ends)
        self._apart[there, here].append(-ends)

    def bound(self, here: int, there: int, most: float) -> None:
        """The offset of ``there`` is at most so much more than that of ``here``."""
        self._most[here][there] = min(self._most[here][there], most)

    def solve(
        self, by_wall: Sequence[float], names: Sequence[str]
    ) -> tuple[list[float], tuple[str, ...], float]:
        """Offsets of all machines, how they were found, and how far they may be off."""
        self._close()
        offsets, spread = {0: 0.0}, {0: 0.0}
        while True:  # the machine with most in common with those that are placed comes next
            edges = [
                (len(apart), here, there)
                for (here, there), apart in self._apart.items()
                if here in offsets and there not in offsets
            ]
            if not edges:
                break
            _, here, there = max(edges)
            apart = self._apart[here, there][-RECENT:]
            offsets[there] = offsets[here] + median(apart)
            middle = median(apart)
            spread[there] = spread[here] + median(abs(each - middle) for each in apart)
        notes = []
        for place in range(1, self._count):
            guess = offsets.get(place, by_wall[place])
            offsets[place] = self._within(place, guess)
            notes.append(self._note(place, spread, names))
        return [offsets[place] for place in range(self._count)], tuple(notes), max(spread.values())

    def _close(self) -> None:
        """What follows from the bounds by way of other machines (Floyd and Warshall)."""
        if self._count > MANY:
            return
        most, places = self._most, range(self._count)
        for middle in places:
            for here in places:
                for there in places:
                    through = most[here][middle] + most[middle][there]
                    most[here][there] = min(most[here][there], through)

    def _within(self, place: int, guess: float) -> float:
        """What the bounds allow; where they contradict each other, for clocks drift, the middle."""
        highest, lowest = self._most[0][place], -self._most[place][0]
        if lowest > highest:
            return (lowest + highest) / 2
        return min(max(guess, lowest), highest)

    def _note(self, place: int, spread: dict[int, float], names: Sequence[str]) -> str:
        who = names[place] or f"machine {place + 1}"
        if place not in spread:
            return (
                f"The clock of {who} was taken from the wall: it has done nothing together with "
                "the others that is in the dumps."
            )
        count = max(len(apart) for (_, there), apart in self._apart.items() if there == place)
        times = "1 operation" if count == 1 else f"{min(count, RECENT)} operations"
        about = f"{spread[place] * 1e3:.2g} ms"
        return f"The clock of {who} was set by {times} in common, to about {about}."


# --------------------------------------------------------------------------------------------------
# Who is who in several dumps: a rank may be another process in every view.

Who: TypeAlias = str
"""A process: its id, or its rank where there are no views."""


class TracedProcesses:
    """The processes that appear in some dumps, those that left none included."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._views: dict[str, tuple[str, ...]] = {}
        self._names: dict[Who, str] = {}
        self._ranks: dict[Who, str] = {}
        for dump in dumps:
            self._views.update(dump.header.views)
            self._names.update({each.process: each.name for each in dump.header.peers})
        for dump in dumps:
            header = dump.header
            self._names[self.of(dump)] = header.name or header.host
        for view, members in self._views.items():
            for rank, process in enumerate(members):
                self._ranks[process] = f"rank {rank} in view {view.rpartition('/')[2]}"
        for dump in dumps:
            self._ranks[self.of(dump)] = f"rank {dump.header.rank}"
        self.present = [self.of(dump) for dump in dumps]
        """Whose dumps there are."""
        self._sizes = [dump.header.world_size for dump in dumps if not dump.header.views]

    def of(self, dump: Dump) -> Who:
        """The process that wrote a dump."""
        is_member = bool(dump.header.view or dump.header.views)
        return dump.header.process if is_member else f"rank {dump.header.rank}"

    def at(self, view: str, rank: int) -> Who:
        """The process that had a rank in a view."""
        members = self._views.get(view, ())
        return members[rank] if 0 <= rank < len(members) else f"rank {rank}"

    def called(self, who: Who) -> str:
        """A process for people, with its last rank.

        >>> TracedProcesses([]).called("rank 3")
        'rank 3'
        """
        name, rank = self._names.get(who), self._ranks.get(who, who)
        return f"{rank} ({name})" if name else rank

    @property
    def missing(self) -> list[Who]:
        """Those who took part and left no dump."""
        everybody = dict.fromkeys(who for members in self._views.values() for who in members)
        most = min(max(self._sizes, default=0), 1 << 16)
        everybody.update(dict.fromkeys(f"rank {rank}" for rank in range(most)))
        return [who for who in everybody if who not in self.present]


# --------------------------------------------------------------------------------------------------
# What a timeline says, in sentences: who was waited for, what failed and why, what still ran.

NOTICEABLE = 1e-4
"""Seconds; shorter waits are normal."""


@dataclass(slots=True)
class WaitTime:
    """For one rank, how long the others waited."""

    name: str
    seconds: float = 0.0
    operations: set[OperationKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FailedOperation:
    """One operation that failed, on some ranks, for one reason."""

    what: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Incident:
    """What the dumps were written for."""

    time: float
    """Seconds since 1970, by the clock of the machine that wrote first."""
    jobs: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """All of it."""

    incident: Incident
    ranks: tuple[str, ...]
    """Whose dumps there are."""
    missing: tuple[str, ...]
    """Who took part and left no dump."""
    operations: int
    waiting: tuple[WaitTime, ...]
    """Most waited for first."""
    failed: tuple[FailedOperation, ...]
    running: tuple[str, ...]
    events: tuple[str, ...]
    """Deaths and losses, and the views that followed."""


def summarize(dumps: Sequence[Dump], alignment: Alignment) -> Summary:
    """What the dumps say together."""
    cast = TracedProcesses(dumps)
    count = sum(record.lane != "cluster" for dump in dumps for record in dump.records)
    return Summary(
        incident=_incident(dumps),
        ranks=tuple(cast.called(who) for who in cast.present),
        missing=tuple(cast.called(who) for who in cast.missing),
        operations=count,
        waiting=_waiting(dumps, alignment, cast),
        failed=_failed(dumps),
        running=_running(dumps, cast),
        events=_events(dumps),
    )


def _incident(dumps: Sequence[Dump]) -> Incident:
    headers = sorted((dump.header for dump in dumps), key=lambda each: each.wall)
    jobs = tuple(sorted({each.job for each in headers if each.job}))
    reason = next((each.reason for each in headers if each.reason), "")
    return Incident(headers[0].wall if headers else 0.0, jobs, reason)


# -- who was waited for ------------------------------------------------------------------------


def _waiting(
    dumps: Sequence[Dump], alignment: Alignment, cast: TracedProcesses
) -> tuple[WaitTime, ...]:
    """By who came last to each operation; where a rank gave no dump, by what the others noticed."""
    found: dict[Who, WaitTime] = {}
    operations: dict[OperationKey, list[tuple[float, float, TraceRecord]]] = defaultdict(list)
    for dump, offset in zip(dumps, alignment.offsets, strict=True):
        for record in dump.records:
            if record.lane == "collectives":
                end = dump.header.monotonic if record.end is None else record.end
                operations[key_of(record)].append((record.begin + offset, end + offset, record))
    least = max(NOTICEABLE, alignment.uncertainty)
    for key, ranks in operations.items():
        for rank, seconds in _shares(ranks, least).items():
            who = cast.at(key[0], rank)
            entry = found.setdefault(who, WaitTime(cast.called(who)))
            entry.seconds += seconds
            entry.operations.add(key)
    return tuple(sorted(found.values(), key=lambda each: -each.seconds))


def _shares(ranks: list[tuple[float, float, TraceRecord]], least: float) -> dict[int, float]:
    """For one operation: how long each rank was waited for, by all others together."""
    shares: dict[int, float] = defaultdict(float)
    came, _, last = max(ranks, key=lambda each: each[0])
    present = {record.rank for _, _, record in ranks}
    for begin, end, record in ranks:
        absent = {rank: told for rank, told in record.waited.items() if rank not in present}
        for rank, seconds in absent.items():
            shares[rank] += seconds
        waited = min(came, end) - begin
        if record is not last and not absent and waited > least:
            shares[last.rank] += waited
    return shares


# -- what failed -------------------------------------------------------------------------------


def _failed(dumps: Sequence[Dump]) -> tuple[FailedOperation, ...]:
    """Each failure once, with the ranks that met it, in the order of time."""
    groups: dict[tuple[str, str], list[TraceRecord]] = defaultdict(list)
    for dump in dumps:
        for record in dump.records:
            if record.outcome is OperationOutcome.FAILED:
                groups[_described(record), record.reason or record.error].append(record)
    ordered = sorted(groups.items(), key=lambda item: min(each.wall for each in item[1]))
    return tuple(
        FailedOperation(what, tuple(sorted({each.rank for each in records})), reason)
        for (what, reason), records in ordered
    )


def _described(record: TraceRecord) -> str:
    if record.lane == "messages":
        way = "to" if record.what == "send" else "from"
        return f"{record.what} {way} rank {record.peer} of {_time.size(record.bytes)}"
    if record.lane == "calls":
        return f"the call of '{record.what}' on rank {record.peer}"
    where = "" if record.group in {"", "world"} else f" of {record.group}"
    size = f" of {_time.size(record.bytes)}" if record.bytes else ""
    return f"{record.what} {record.number}{where}{size}"


def _running(dumps: Sequence[Dump], cast: TracedProcesses) -> tuple[str, ...]:
    sentences = []
    for dump in dumps:
        for record in dump.records:
            if record.outcome is OperationOutcome.RUNNING:
                seconds = max(0.0, dump.header.monotonic - record.begin)
                who = cast.called(cast.of(dump))
                awaited = [cast.called(cast.at(record.view, rank)) for rank in record.waited]
                waits = f", waiting for {list_names(sorted(awaited))}" if awaited else ""
                what = _described(record)
                sentences.append(
                    f"{who[0].upper()}{who[1:]} was in {what} for {seconds:.3g} s{waits}."
                )
    return tuple(sentences)


def _events(dumps: Sequence[Dump]) -> tuple[str, ...]:
    """Each sentence once, as it was first said."""
    worth = {"lost", "dead", "proved dead", "removed", "paused", "resumed", "split brain"}
    said: dict[str, float] = {}
    for dump in dumps:
        for record in dump.records:
            is_view = record.what.startswith("view ")
            if record.lane == "cluster" and (is_view or record.what in worth) and record.reason:
                said[record.reason] = min(record.wall, said.get(record.reason, record.wall))
    return tuple(sorted(said, key=lambda sentence: said[sentence]))
