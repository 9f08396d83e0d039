"""Dumps of flight recorders as several machines would write them, with clocks that differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from potluck.apps.cli.trace_analysis import Dump
from potluck.trace.recorder import VERSION, Header, Outcome, Record, encode

NOW = 1_700_000_000.0
"""What the clocks on the wall show at the true moment 0."""


def header_of(rank: int, clock: float = 0.0, **facts: Any) -> Header:
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
    return Header(
        potluck_trace=VERSION,
        monotonic=clock + 10.0,
        wall=NOW + 10.0 + rank / 2,
        **{**given, **facts},
    )


def collective(rank: int, number: int, begin: float, end: float | None, **facts: Any) -> Record:
    """An all-reduce, in times of the rank's own clock."""
    given: dict[str, Any] = {"lane": "collectives", "what": "all_reduce", "group": "world"}
    outcome = Outcome.RUNNING if end is None else Outcome.DONE
    return Record(
        **{**given, "outcome": outcome, "wall": NOW + begin, **facts},
        rank=rank,
        number=number,
        begin=begin,
        end=end,
        bytes=4096,
    )


def message(rank: int, what: str, peer: int, span: tuple[float, float], **facts: Any) -> Record:
    """A send or receive."""
    return Record(
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


def dump_of(header: Header, records: Iterable[Record]) -> Dump:
    """In memory."""
    return Dump(Path(f"{header.rank}.trace.jsonl"), header, tuple(records))


def write(path: Path, header: Header, records: Iterable[Record]) -> Path:
    """On disk."""
    path.write_bytes(encode(header, list(records)))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """What a file of JSON Lines holds."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
