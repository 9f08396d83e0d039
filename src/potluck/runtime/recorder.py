"""The flight recorder: the last operations of one rank, kept for the price of a tuple each.

Pure: no clock, file or lock.  Whoever does something appends an entry when it is over; the ring
forgets the oldest.  Only when somebody wants to see them do entries become records.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from potluck.collective.task import Collective, Task
from potluck.errors import DistributedError
from potluck.runtime.recorder_format import Outcome, Record

if TYPE_CHECKING:
    from potluck.runtime.recorder_format import Header

__all__ = ["CAPACITY", "Entry", "Failure", "Label", "Lane", "Log", "Recorder", "Source"]

CAPACITY = 1024
"""Operations that are kept."""

EVENTS = 256
"""Events and training steps that are kept beside them: thousands of operations a second would
crowd them out."""

LONGEST_REASON = 2000
"""Characters of an error's text that are kept."""


class Lane(Enum):
    """What an entry is about; each has a track of its own."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    CALLS = "calls"
    TRAINING = "training"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What all entries of one group share."""

    lane: Lane
    group: str = ""
    """The same on all ranks, and no other group of the view has it."""
    view: str = ""
    """Lineage and epoch of the view, where ranks belong to one."""
    rank: int = -1
    """This process's place in the view, or in the backend below all groups."""
    members: tuple[int, ...] = ()
    """Such places of the group's members, in the group's order; empty means all."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How an operation ended that did not end well."""

    kind: str
    reason: str
    culprit: int = -1
    """Of the group's ranks, the one that the error names."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What an error says."""
        culprit = error.rank if isinstance(error, DistributedError) else None
        text = str(error)[:LONGEST_REASON]
        return cls(type(error).__name__, text, -1 if culprit is None else culprit)


Entry: TypeAlias = "tuple[Task | str, float, float, int, int, int, Label, Failure | None, Any]"
"""What, begin, end, number, bytes, epoch, label, failure, and more.

Begin and end are seconds of the machine's steady clock; the end of what still runs is 0.  Bytes are
of one element for a task, whose size is known.  The rest depends on the lane: for collectives the
seconds that each rank was waited for, or None; for messages and calls what ends with peer and tag;
for events the sentence.
"""


class Source(Protocol):
    """Somebody who knows what is under way."""

    def under_way(self) -> Entry | None:
        """The operation under way, if there is one."""


class Recorder:
    """The last entries of one rank; any thread may append.

    >>> recorder = Recorder(capacity=2)
    >>> for number in range(3):
    ...     recorder.append(("step", 1.0, 2.0, number, 0, 0, Label(Lane.TRAINING), None, None))
    >>> [record.number for record in recorder.records(wall=100.0)]
    [1, 2]
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Entry] = deque(maxlen=capacity)
        self.append: Callable[[Entry], None] = self._ring.append
        """Keep an operation; atomic, so nobody waits for anybody."""
        self._events: deque[Entry] = deque(maxlen=EVENTS)
        self.append_event: Callable[[Entry], None] = self._events.append
        """Keep something that is rarer, and matters longer."""
        self.open: dict[int, Source] = {}
        """What is under way and will be appended when it is over, by its ``id``."""
        self.describe: Callable[[Header], Header] = lambda header: header
        """Adds to a dump's header what the owner knows of itself."""
        self.is_automatic = False
        """Whether it is written down when something goes wrong, also if nobody asked for that."""
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

    def records(self, wall: float) -> list[Record]:
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
class Log:
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
        self.messages, self.calls = Label(Lane.MESSAGES, *rest), Label(Lane.CALLS, *rest)
        self.append = self.recorder.append

    def note_call(self, call: RemoteCall, now: float, error: BaseException | None) -> None:
        """A call of a function on another rank is over."""
        failure = None if error is None else Failure.of(error)
        peer = (call.peer.rank, 0)
        entry = (call.name, call.began, now, call.number, call.size, 0)
        self.append((*entry, self.calls, failure, peer))


class Ranked(Protocol):
    """Somebody with a rank."""

    @property
    def rank(self) -> int:
        """Its place."""


class RemoteCall(Protocol):
    """What is taken down of a call."""

    name: str
    number: int
    size: int
    began: float

    @property
    def peer(self) -> Ranked:
        """Whom it goes to."""


def record_of(entry: Entry, wall: float) -> Record:
    """An entry as others read it."""
    task, began, ended, number, nbytes, epoch, label, failure, more = entry
    if isinstance(task, Task):
        is_empty = task.collective is Collective.BARRIER  # its byte is no user's
        what, nbytes = task.collective.value, 0 if is_empty else task.total * nbytes
    else:
        what = task
    is_message = label.lane in (Lane.MESSAGES, Lane.CALLS)
    peer, tag = more[-2:] if is_message else (-1, 0)
    outcome = Outcome.FAILED if failure else Outcome.DONE if ended else Outcome.RUNNING
    return Record(
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
