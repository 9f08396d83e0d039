"""What a dump of the flight recorder looks like: JSON Lines, a header and then the records.

The header's first field names the format and its version.  A reader skips fields that it does not
know; a version it does not know it refuses.  Every text and number has a bound, for a dump may come
from anybody.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

__all__ = ["VERSION", "Header", "Neighbour", "Outcome", "Record", "encode"]

VERSION = 1

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Prose = Annotated[str, msgspec.Meta(max_length=4000)]
_Rank = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
"""A machine that has been on for 300 years would not be read; nor would the year 2286."""


class Outcome(StrEnum):
    """How an operation ended."""

    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    """It had not ended when the dump was written."""


class Neighbour(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another process, as the one that wrote the dump knew it."""

    name: _Text
    process: _Text = ""
    round_trip: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    """Seconds, of heartbeats."""
    status: _Text = ""
    reason: _Prose = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose dump it is, and how its clocks stood when it was written."""

    potluck_trace: int
    """The version of the format."""
    monotonic: _Seconds
    """Seconds of the steady clock, at the same moment as ``wall``."""
    wall: _Seconds
    """Seconds since 1970."""
    potluck: _Text = ""
    process: _Text = ""
    """The same in all dumps of one process, and no other process has it."""
    machine: _Text = ""
    """The same for processes that share one steady clock; empty if that is not known."""
    name: _Text = ""
    host: _Text = ""
    pid: _Number = 0
    job: _Text = ""
    rank: _Rank = -1
    world_size: _Number = 0
    view: _Text = ""
    capacity: _Number = 0
    is_full: bool = False
    """Whether older operations were forgotten."""
    reason: _Prose = ""
    """Why it was written, as a sentence."""
    views: Annotated[
        dict[_Text, Annotated[tuple[_Text, ...], msgspec.Meta(max_length=65536)]],
        msgspec.Meta(max_length=4096),
    ] = {}
    """The processes of the last views, in rank order."""
    peers: Annotated[tuple[Neighbour, ...], msgspec.Meta(max_length=4096)] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation, or one event."""

    lane: _Text
    what: _Text
    begin: _Seconds
    end: _Seconds | None = None
    """None while it runs."""
    wall: _Seconds = 0.0
    """Seconds since 1970 at its beginning."""
    rank: _Rank = -1
    group: _Text = ""
    view: _Text = ""
    members: Annotated[tuple[_Rank, ...], msgspec.Meta(max_length=65536)] = ()
    """Ranks of the view in this group; empty means all."""
    epoch: _Number = 0
    number: _Number = 0
    bytes: _Number = 0
    peer: _Rank = -1
    tag: int = 0
    waited: Annotated[dict[_Rank, _Seconds], msgspec.Meta(max_length=4096)] = {}
    """For whom it waited noticeably, and for how many seconds."""
    outcome: Outcome = Outcome.DONE
    error: _Text = ""
    reason: _Prose = ""
    culprit: _Rank = -1


_encoder = msgspec.json.Encoder()


def encode(header: Header, records: list[Record]) -> bytes:
    """A whole dump."""
    return _encoder.encode_lines([header, *records])
