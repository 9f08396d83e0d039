"""Dumps of flight recorders as several machines would write them, with clocks that differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from potluck.apps.cli.trace_analysis import Dump
from potluck.trace.recorder import VERSION, DumpHeader, OperationOutcome, TraceRecord, encode

NOW = 1_700_000_000.0
"""What the clocks on the wall show at the true moment 0."""


def header_of(rank: int, clock: float = 0.0, **facts: Any) -> DumpHeader:
    """The header of a rank whose steady clock shows ``clock`` at the true moment 0; written at 10.

    The clocks on the wall are half a second apart from machine to machine.
    """
    given: dict[str, Any] = {
        "process": f"process {rank}",
        "machine": f"machine {rank}",
        "name": f"host{rank}",
        "rank": rank,
        "world_size": 2,
    }
    return DumpHeader(
        potluck_trace=VERSION,
        monotonic=clock + 10.0,
        wall=NOW + 10.0 + rank / 2,
        **{**given, **facts},
    )


def collective(
    rank: int, number: int, begin: float, end: float | None, **facts: Any
) -> TraceRecord:
    """An all-reduce, in times of the rank's own clock."""
    given: dict[str, Any] = {"lane": "collectives", "what": "all_reduce", "group": "world"}
    outcome = OperationOutcome.RUNNING if end is None else OperationOutcome.DONE
    return TraceRecord(
        **{**given, "outcome": outcome, "wall": NOW + begin, **facts},
        rank=rank,
        number=number,
        begin=begin,
        end=end,
        bytes=4096,
    )


def message(
    rank: int, what: str, peer: int, span: tuple[float, float], **facts: Any
) -> TraceRecord:
    """A send or receive."""
    return TraceRecord(
        lane="messages",
        what=what,
        group="world",
        rank=rank,
        peer=peer,
        begin=span[0],
        end=span[1],
        number=1,
        bytes=100,
        **facts,
    )


def dump_of(header: DumpHeader, records: Iterable[TraceRecord]) -> Dump:
    """In memory."""
    return Dump(Path(f"{header.rank}.trace.jsonl"), header, tuple(records))


def write(path: Path, header: DumpHeader, records: Iterable[TraceRecord]) -> Path:
    """On disk."""
    path.write_bytes(encode(header, list(records)))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file of JSON Lines holds."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
