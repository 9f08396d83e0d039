"""Reading dumps of flight recorders: whoever wrote them, a damaged one spoils no other.

A dump may come from another machine, be cut off by a full disk, or be no dump at all.  Lines,
files and numbers have bounds; what cannot be read is counted and told, the rest is used.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from potluck.decoding import Reader, json_reader
from potluck.errors import DistributedError
from potluck.runtime.recorder_files import SUFFIX
from potluck.runtime.recorder_format import VERSION, Header, Record

__all__ = ["Dump", "UnreadableDump", "expand", "latest", "merge", "read_dump"]

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
    header: Header
    records: tuple[Record, ...]
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

_headers: Reader[Header] = json_reader(Header)
_records: Reader[Record] = json_reader(Record)


def read_dump(path: Path) -> Dump:
    """What a file holds; raises :class:`UnreadableDump` where that is no dump."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise UnreadableDump(f"{path} is not a regular file")
            if state.st_size > LARGEST_FILE:
                cause = f"it has {state.st_size} bytes; the largest has {LARGEST_FILE}"
                raise UnreadableDump(f"{path} is no dump of a flight recorder", cause=cause)
            lines = _lines(file)
            header = _read_header(path, next(lines, b""))
            records, skipped = _read_records(lines)
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise UnreadableDump(f"{path} could not be read", cause=cause) from None
    return Dump(path, header, tuple(records), skipped)


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to does not keep us waiting (Windows has none)."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


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


def _read_header(path: Path, line: bytes | None) -> Header:
    hint = "Give files that Potluck's flight recorder wrote (*.trace.jsonl)."
    try:
        header = _headers.decode(line or b"")
    except _WRONG as error:
        what = "it is empty" if line == b"" else f"its first line is no header ({error})"
        raise UnreadableDump(
            f"{path} is no dump of a flight recorder", cause=what, hint=hint
        ) from None
    if header.potluck_trace != VERSION:
        raise UnreadableDump(
            f"{path} was written by another version of Potluck",
            cause=f"its format is {header.potluck_trace}, this version reads {VERSION}",
            expected=VERSION,
            got=header.potluck_trace,
            hint="Use `potluck trace` of the version that wrote it.",
        )
    return header


def _read_records(lines: Iterable[bytes | None]) -> tuple[list[Record], int]:
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
    known: dict[object, Record] = {}
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
