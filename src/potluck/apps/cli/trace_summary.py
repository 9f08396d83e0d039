"""What a timeline says, in sentences: who was waited for, what failed and why, what still ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck.apps.cli.trace_cast import Cast, Who
from potluck.apps.cli.trace_clocks import Alignment, OperationKey, key_of
from potluck.apps.cli.trace_reading import Dump
from potluck.collective import wording
from potluck.core.roster_words import listed
from potluck.runtime.recorder_format import Outcome, Record

__all__ = ["Failed", "Summary", "Waiting", "summarize"]

NOTICEABLE = 1e-4
"""Seconds; shorter waits are nobody's fault."""


@dataclass(slots=True)
class Waiting:
    """For one rank, how long the others waited."""

    name: str
    seconds: float = 0.0
    operations: set[OperationKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Failed:
    """One operation that failed, on some ranks, for one reason."""

    what: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """All of it."""

    ranks: tuple[str, ...]
    """Whose dumps there are."""
    missing: tuple[str, ...]
    """Who took part and left no dump."""
    operations: int
    waiting: tuple[Waiting, ...]
    """Most waited for first."""
    failed: tuple[Failed, ...]
    running: tuple[str, ...]
    events: tuple[str, ...]
    """Deaths and losses, and the views that followed."""


def summarize(dumps: Sequence[Dump], alignment: Alignment) -> Summary:
    """What the dumps say together."""
    cast = Cast(dumps)
    count = sum(record.lane != "cluster" for dump in dumps for record in dump.records)
    return Summary(
        ranks=tuple(cast.called(who) for who in cast.present),
        missing=tuple(cast.called(who) for who in cast.missing),
        operations=count,
        waiting=_waiting(dumps, alignment, cast),
        failed=_failed(dumps),
        running=_running(dumps, cast),
        events=_events(dumps),
    )


# -- who was waited for ------------------------------------------------------------------------


def _waiting(dumps: Sequence[Dump], alignment: Alignment, cast: Cast) -> tuple[Waiting, ...]:
    """By who came last to each operation; where a rank gave no dump, by what the others noticed."""
    found: dict[Who, Waiting] = {}
    operations: dict[OperationKey, list[tuple[float, float, Record]]] = defaultdict(list)
    for dump, offset in zip(dumps, alignment.offsets, strict=True):
        for record in dump.records:
            if record.lane == "collectives":
                end = dump.header.monotonic if record.end is None else record.end
                operations[key_of(record)].append((record.begin + offset, end + offset, record))
    least = max(NOTICEABLE, alignment.uncertainty)
    for key, ranks in operations.items():
        for rank, seconds in _shares(ranks, least).items():
            who = cast.at(key[0], rank)
            entry = found.setdefault(who, Waiting(cast.called(who)))
            entry.seconds += seconds
            entry.operations.add(key)
    return tuple(sorted(found.values(), key=lambda each: -each.seconds))


def _shares(ranks: list[tuple[float, float, Record]], least: float) -> dict[int, float]:
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


def _failed(dumps: Sequence[Dump]) -> tuple[Failed, ...]:
    """Each failure once, with the ranks that met it, in the order of time."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for dump in dumps:
        for record in dump.records:
            if record.outcome is Outcome.FAILED:
                groups[_described(record), record.reason or record.error].append(record)
    ordered = sorted(groups.items(), key=lambda item: min(each.wall for each in item[1]))
    return tuple(
        Failed(what, tuple(sorted({each.rank for each in records})), reason)
        for (what, reason), records in ordered
    )


def _described(record: Record) -> str:
    if record.lane == "messages":
        way = "to" if record.what == "send" else "from"
        return f"{record.what} {way} rank {record.peer} of {wording.size(record.bytes)}"
    if record.lane == "calls":
        return f"the call of '{record.what}' on rank {record.peer}"
    where = "" if record.group in {"", "world"} else f" of {record.group}"
    size = f" of {wording.size(record.bytes)}" if record.bytes else ""
    return f"{record.what} {record.number}{where}{size}"


def _running(dumps: Sequence[Dump], cast: Cast) -> tuple[str, ...]:
    sentences = []
    for dump in dumps:
        for record in dump.records:
            if record.outcome is Outcome.RUNNING:
                seconds = max(0.0, dump.header.monotonic - record.begin)
                who = cast.called(cast.of(dump))
                awaited = listed(
                    [cast.called(cast.at(record.view, rank)) for rank in record.waited]
                )
                waits = f", waiting for {awaited}" if record.waited else ""
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
