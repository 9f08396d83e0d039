"""The flight recorder: the last operations of one rank, kept for the price of a tuple each.

Pure: no clock, file or lock.  An operation appends an entry when it is over; the ring
forgets the oldest.  Only when they are read do entries become records.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

import msgspec

from potluck._platform import call_in_children
from potluck._process import ForkSafeLock
from potluck.backend.sub import SubBackend
from potluck.errors import BackendUnavailable, DistributedError
from potluck.schedule.task import Collective, Task

if TYPE_CHECKING:
    from potluck.backend.base import Backend


# --------------------------------------------------------------------------------------------------
# What a dump of the flight recorder looks like: JSON Lines, a header and then the records.
#
# The header's first field names the format and its version.  A reader skips fields that it does not
# know; a version it does not know it refuses.  Every text and number has a bound, for a dump may
# come from anybody.

VERSION = 1

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Prose = Annotated[str, msgspec.Meta(max_length=4000)]
_Rank = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
"""A machine that has been on for 300 years would not be read; nor would the year 2286."""


class OperationOutcome(StrEnum):
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


class DumpHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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


class TraceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    outcome: OperationOutcome = OperationOutcome.DONE
    error: _Text = ""
    reason: _Prose = ""
    culprit: _Rank = -1


_encoder = msgspec.json.Encoder()


def encode(header: DumpHeader, records: list[TraceRecord]) -> bytes:
    """A whole dump."""
    return _encoder.encode_lines([header, *records])


# --------------------------------------------------------------------------------------------------

CAPACITY = 1024
"""Operations that are kept."""

EVENTS = 256
"""Events and training steps that are kept beside them: thousands of operations a second would
crowd them out."""

LONGEST_REASON = 2000
"""Characters of an error's text that are kept."""


class Track(Enum):
    """What an entry is about; each has a track of its own."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    CALLS = "calls"
    TRAINING = "training"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What all entries of one group share."""

    lane: Track
    group: str = ""
    """The same on all ranks, and no other group of the view has it."""
    view: str = ""
    """Lineage and epoch of the view, where ranks belong to one."""
    rank: int = -1
    """This process's place in the view, or in the backend below all groups."""
    members: tuple[int, ...] = ()
    """Such places of the group's members, in the group's order; empty means all."""


@dataclass(frozen=True, slots=True)
class OperationFailure:
    """How an operation ended that did not end well."""

    kind: str
    reason: str
    culprit: int = -1
    """Of the group's ranks, the one that the error names."""

    @classmethod
    def of(cls, error: BaseException) -> OperationFailure:
        """What an error says."""
        culprit = error.rank if isinstance(error, DistributedError) else None
        text = str(error)[:LONGEST_REASON]
        return cls(type(error).__name__, text, -1 if culprit is None else culprit)


Entry: TypeAlias = (
    "tuple[Task | str, float, float, int, int, int, Label, OperationFailure | None, Any]"
)
"""What, begin, end, number, bytes, epoch, label, failure, and more.

Begin and end are seconds of the machine's steady clock; the end of what still runs is 0.  Bytes are
of one element for a task, whose size is known.  The rest depends on the lane: for collectives the
seconds that each rank was waited for, or None; for messages and calls what ends with peer and tag;
for events the sentence.
"""


class Source(Protocol):
    """Knows what is under way."""

    def under_way(self) -> Entry | None:
        """The operation under way, if there is one."""


class Recorder:
    """The last entries of one rank; any thread may append.

    >>> recorder = Recorder(capacity=2)
    >>> for number in range(3):
    ...     recorder.append(("step", 1.0, 2.0, number, 0, 0, Label(Track.TRAINING), None, None))
    >>> [record.number for record in recorder.records(wall=100.0)]
    [1, 2]
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Entry] = deque(maxlen=capacity)
        self.append: Callable[[Entry], None] = self._ring.append
        """Keep an operation; atomic, so no thread waits."""
        self._events: deque[Entry] = deque(maxlen=EVENTS)
        self.append_event: Callable[[Entry], None] = self._events.append
        """Keep something that is rarer, and matters longer."""
        self.open: dict[int, Source] = {}
        """What is under way and will be appended when it is over, by its ``id``."""
        self.describe: Callable[[DumpHeader], DumpHeader] = lambda header: header
        """Adds to a dump's header what the owner knows of itself."""
        self.is_automatic = False
        """Whether it is written down when something goes wrong, also if no one asked for that."""
        self.rank, self.world_size = -1, 0
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def capacity(self) -> int:
        """How many operations are kept."""
        return self._ring.maxlen or 0

    @property
    def is_full(self) -> bool:
        """Whether older ones were forgotten."""
        return len(self._ring) == self._ring.maxlen

    def watch(self, source: Source) -> None:
        """Ask this one too what is under way."""
        self._sources.add(source)

    def records(self, wall: float) -> list[TraceRecord]:
        """Everything that is kept, oldest first, then what is under way.

        ``wall`` is what the clock on the wall shows when the steady clock shows 0.
        """
        # Copies, each of them atomic.
        entries = sorted([*self._ring.copy(), *self._events.copy()], key=lambda entry: entry[2])
        sources = [*self.open.copy().values(), *self._sources]
        running = [source.under_way() for source in sources]
        found = [record_of(entry, wall) for entry in entries]
        return found + [record_of(entry, wall) for entry in running if entry is not None]


@dataclass(slots=True, eq=False)
class GroupLog:
    """The recorder as one group sees it: with its labels, and messages numbered."""

    recorder: Recorder
    collectives: Label
    messages: Label = field(init=False)
    calls: Label = field(init=False)
    append: Callable[[Entry], None] = field(init=False)
    counts: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """Messages so far by kind, peer and tag: the n-th send is received by the n-th receive."""

    def __post_init__(self) -> None:
        """Derive the labels of the other lanes."""
        label = self.collectives
        rest = (label.group, label.view, label.rank, label.members)
        self.messages, self.calls = Label(Track.MESSAGES, *rest), Label(Track.CALLS, *rest)
        self.append = self.recorder.append


def record_of(entry: Entry, wall: float) -> TraceRecord:
    """An entry as others read it."""
    task, began, ended, number, nbytes, epoch, label, failure, more = entry
    if isinstance(task, Task):
        is_empty = task.collective is Collective.BARRIER  # its byte is not a user's
        what, nbytes = task.collective.value, 0 if is_empty else task.total * nbytes
    else:
        what = task
    is_message = label.lane in (Track.MESSAGES, Track.CALLS)
    peer, tag = more[-2:] if is_message else (-1, 0)
    outcome = (
        OperationOutcome.FAILED
        if failure
        else OperationOutcome.DONE
        if ended
        else OperationOutcome.RUNNING
    )
    return TraceRecord(
        lane=label.lane.value,
        what=what[:255],
        begin=began,
        end=ended or None,
        wall=wall + began,
        rank=label.rank,
        group=label.group,
        view=label.view,
        members=label.members,
        epoch=epoch,
        number=number,
        bytes=nbytes,
        peer=_place(label, peer),
        tag=tag,
        waited=dict(_waits(label, None if is_message else more)),
        outcome=outcome,
        error=failure.kind if failure else "",
        reason=failure.reason if failure else more[:LONGEST_REASON] if type(more) is str else "",
        culprit=_place(label, failure.culprit) if failure else -1,
    )


def _place(label: Label, rank: int) -> int:
    """A rank of the group as a rank of the whole."""
    return label.members[rank] if 0 <= rank < len(label.members) else rank


def _waits(label: Label, waited: object) -> Iterator[tuple[int, float]]:
    if isinstance(waited, Mapping):
        for rank, seconds in waited.copy().items():  # type: ignore[attr-defined] # a dict
            yield _place(label, rank), round(seconds, 6)


# --------------------------------------------------------------------------------------------------
# Who records where: one recorder for each rank, one log for each of its groups.

LENGTH_VARIABLE = "POTLUCK_TRACE_LENGTH"

LEAST, MOST = 16, 1 << 20
"""Operations that can be kept; a million take about 200 MB."""

REMEMBERED = 4
"""Recorders that are kept although their backends are gone: what went wrong may be told later."""

_live: weakref.WeakSet[Recorder] = weakref.WeakSet()
_latest: deque[Recorder] = deque(maxlen=REMEMBERED)
_finding = ForkSafeLock()  # a signal's handler may look while we do


def make_recorder() -> Recorder:
    """A recorder of the length that the environment asks for."""
    text = os.environ.get(LENGTH_VARIABLE, "") or str(CAPACITY)
    if not (text.isascii() and text.isdecimal() and LEAST <= int(text[:9]) <= MOST):
        raise BackendUnavailable(
            f"{LENGTH_VARIABLE} must be a number from {LEAST} to {MOST}",
            got=text,
            cause=f"it is {text[:40]!r}",
            hint=f"Unset it, or give the number of operations to keep, such as {CAPACITY}.",
        )
    recorder = Recorder(int(text))
    with _finding:
        _live.add(recorder)
        _latest.append(recorder)
    return recorder


def live_recorders() -> list[Recorder]:
    """Those of this process that have something to tell."""
    with _finding:
        return sorted(_live, key=lambda each: each.rank)


def attach(backend: Backend, recorder: Recorder) -> None:
    """Have what runs on a backend recorded there."""
    backend.services.put(Recorder, recorder)


def log_of(backend: Backend) -> GroupLog:
    """The log of the group that a backend is: always the same one."""
    return backend.services.of(GroupLog, lambda: _make_log(backend))


def _make_log(backend: Backend) -> GroupLog:
    below = backend.innermost
    group, inner = "world", below
    members: tuple[int, ...] = ()
    while isinstance(inner, SubBackend):
        if inner is below:
            group = inner.name or f"subgroup {inner.identity:x}"
        above = inner.members
        members = tuple(above[rank] for rank in members) if members else above
        inner = inner.parent.innermost
    recorder = recorder_of(inner)
    view = inner.view
    name = "" if view is None else f"{view.lineage}/{view.epoch}"
    recorder.rank, recorder.world_size = inner.rank, inner.world_size
    return GroupLog(recorder, Label(Track.COLLECTIVES, group[:255], name, inner.rank, members))


def recorder_of(backend: Backend) -> Recorder:
    """The recorder of the rank that a backend is, or is a part of."""
    backend = backend.innermost
    while isinstance(backend, SubBackend):
        backend = backend.parent.innermost
    return backend.services.of(Recorder, make_recorder)


def become_forked() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    _live.clear()
    _latest.clear()


call_in_children(become_forked)
