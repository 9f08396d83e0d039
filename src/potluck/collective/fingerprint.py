"""Fingerprints: what a rank believes an operation to be, in 32 bytes.

The first frame of every operation on every stream carries one.  All ranks of a group must have the
same; where two differ, both are put into words, so that a person sees which call to mend.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from potluck._decode import printable
from potluck._process import ForkSafeLock
from potluck.backend.base import NOTICES
from potluck.backend.sub import SubBackend
from potluck.collective.call import Call, Purpose
from potluck.compression.codecs import NAMES
from potluck.errors import DistributedError
from potluck.schedule.reduce import BFLOAT16, DTYPES, Dtype, ReduceOp
from potluck.schedule.task import Collective

if TYPE_CHECKING:
    from collections.abc import Iterable

    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation


_LAYOUT = struct.Struct("<BBBBIQIIII")
SIZE = _LAYOUT.size

_COLLECTIVES = tuple(Collective)
_OPS = tuple(ReduceOp)
_NO_OP = 255
_OTHER_DTYPE = 128
"""A type beyond those that can be reduced."""

_KINDS = {
    "M": "datetime64",
    "m": "timedelta64",
    "S": "bytes",
    "U": "text",
    "V": "structure",
    "f": "float",
    "c": "complex",
}

_COMPOSED: dict[int, str] = {
    Purpose.BROADCAST_OBJECT: "broadcast_object",
    Purpose.ALL_GATHER_OBJECT: "all_gather_object",
    Purpose.GATHER_OBJECT: "gather_object",
    Purpose.SCATTER_OBJECT: "scatter_object",
    Purpose.ALL_GATHER_COUNTS: "all_gather with counts='ask'",
    Purpose.GATHER_COUNTS: "gather with counts='ask'",
    Purpose.ALL_TO_ALL_COUNTS: "all_to_all with send_counts",
    Purpose.AUTO_COMPRESSION: "all_reduce with compression='auto'",
    Purpose.TOP_K: "all_reduce with compression='topk'",
    Purpose.RANDOM_K: "all_reduce with compression='random'",
    Purpose.POWER_SGD: "all_reduce with compression='powersgd'",
    Purpose.ALL_REDUCE_TREE: "all_reduce of a tree",
    Purpose.BROADCAST_TREE: "broadcast of a tree",
    Purpose.RECORDS: "a step of a training",
}
"""Calls that are made of several collectives, as a person would have written them."""


class Fingerprint(NamedTuple):
    """The facts that must agree."""

    collective: int
    op: int
    dtype: int
    purpose: int
    """A :class:`Purpose`."""
    root: int
    elements: int
    """Of all blocks together."""
    counts: int
    """A hash of how the elements are divided."""
    plan: int
    codec: int = 0
    other_dtype: int = 0
    """Of a type beyond those that can be reduced: its kind, its size and a hash."""

    @classmethod
    def of(cls, call: Call, plan: int, codec: int = 0) -> Fingerprint:
        """The fingerprint of a call that is done by a plan."""
        task = call.task
        op = _NO_OP if call.reducer is None else _OPS.index(call.reducer.op)
        counts = 0 if len(task.counts) == 1 else zlib.crc32(repr(task.counts).encode())
        return cls(
            _COLLECTIVES.index(task.collective),
            op,
            _dtype_code(call.source.dtype),
            call.purpose,
            task.root,
            task.total,
            counts,
            plan,
            codec,
            _describe_other(call.source.dtype),
        )

    def pack(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Fingerprint:
        """Read a fingerprint from the bytes of a peer."""
        return cls(*_LAYOUT.unpack(data))

    def __str__(self) -> str:
        """The call, as a person would have written it."""
        composed = _COMPOSED.get(self.purpose)
        if composed is not None:
            return composed
        known = self.collective < len(_COLLECTIVES)
        collective = _COLLECTIVES[self.collective] if known else None
        name = collective.value if collective else f"collective {self.collective}"
        if collective is Collective.BARRIER:
            return f"{name}()"
        parts = [] if self.op == _NO_OP else [_name_op(self.op)]
        parts.append(_name_dtype(self.dtype, self.other_dtype))
        parts.append("1 element" if self.elements == 1 else f"{self.elements} elements")
        if collective is not None and collective.has_root:
            parts.append(f"root {self.root}")
        if self.codec:
            parts.append(f"as {NAMES.get(self.codec, 'another format')}")
        return f"{name}({', '.join(parts)})"


def _dtype_code(dtype: Dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else _OTHER_DTYPE


def _describe_other(dtype: Dtype) -> int:
    """A letter, a size of up to two bytes, and a byte that tells alike ones apart."""
    if dtype in DTYPES:
        return 0
    dtype = np.dtype(dtype)
    described = repr(dtype.descr if dtype.names else dtype.str)
    size, mark = min(dtype.itemsize, 0xFFFF), zlib.crc32(described.encode()) & 0xFF
    return ord(dtype.kind) << 24 | size << 8 | mark


def _name_dtype(code: int, other: int) -> str:
    if code < len(DTYPES):
        return "bfloat16" if DTYPES[code] == BFLOAT16 else DTYPES[code].name
    kind = _KINDS.get(chr(other >> 24), "another type")
    return f"{kind} of {other >> 8 & 0xFFFF} bytes"


def _name_op(code: int) -> str:
    return _OPS[code].value if code < len(_OPS) else f"reduction {code}"


def describe_mismatch(
    here: tuple[int, Fingerprint], there: tuple[int, Fingerprint], hosts: Callable[[int], str]
) -> str:
    """Which two ranks disagree, and about what."""
    (me, mine), (peer, theirs) = here, there
    what = f"rank {me} called {mine}, rank {peer} ({hosts(peer)}) called {theirs}"
    if str(mine) == str(theirs):
        what += _describe_hidden(mine, theirs)
    return what


def _describe_hidden(mine: Fingerprint, theirs: Fingerprint) -> str:
    """How two differ that look the same in words."""
    if mine.purpose != theirs.purpose:
        return ", and one of them is a call ahead of the other"
    if mine.purpose in _COMPOSED:
        if mine.root != theirs.root:
            return f", with roots {mine.root} and {theirs.root}"
        here, there = mine._replace(purpose=Purpose.OWN), theirs._replace(purpose=Purpose.OWN)
        return f"; one is at its part {here}, the other at {there}"
    if mine.other_dtype != theirs.other_dtype:
        return ", of types that differ in their parts or units"
    if mine.counts != theirs.counts:
        return ", with the elements divided differently"
    return ", with another strategy"


# --------------------------------------------------------------------------------------------------
# Notices: short words between the ranks of a group about an operation, beside its streams.
#
# They travel as ordinary messages and are read only when a rank has waited for a while, or comes
# back after one, so operations that go well one after the other never see one.

NOTICE_SIZE = 512
"""Bytes of every notice."""

FOR_EVER = (1 << 64) - 1
"""The last call of a rank that makes no more: it has left the group."""

_NOTICE_LAYOUT = struct.Struct("<BxHiQQQ32s32s")
_TEXT = NOTICE_SIZE - _NOTICE_LAYOUT.size


class NoticeKind(IntEnum):
    """What a notice says."""

    WAITING = 1
    """I wait for you in this operation, of which I believe this."""
    LOST = 2
    """A rank is gone."""
    MISMATCH = 3
    """This rank has seen that another one takes this operation for something else."""
    ABORTED = 4
    """A rank was told to end the operation."""
    LATE = 5
    """A rank waited for another until its time was up."""
    FAILED = 6
    """Something else went wrong on a rank."""
    ASKING = 7
    """I have waited for long in this operation: are you in it?"""
    MALFORMED = 8
    """A rank sent what no correct rank sends."""
    DISAGREED = 9
    """This rank has heard from another one that two ranks disagree."""


class Notice(NamedTuple):
    """One of them."""

    word: NoticeKind
    epoch: int
    """Up to which call, counted from the group's beginning, all had ended before."""
    operation: int
    """Which one it is since then."""
    culprit: int = -1
    """The rank it is about."""
    fingerprint: bytes = bytes(32)
    text: str = ""
    last_call: int = 0
    """Up to which call, counted from the group's beginning, all have ended now."""
    earlier: bytes = bytes(32)
    """The fingerprint of the operation before."""

    def pack(self) -> bytes:
        """As bytes; a long text loses its end."""
        text = self.text.encode()[:_TEXT]
        about = self.culprit, self.epoch, self.operation, self.last_call
        marks = self.fingerprint, self.earlier
        return (_NOTICE_LAYOUT.pack(self.word, len(text), *about, *marks) + text).ljust(
            NOTICE_SIZE, b"\0"
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Notice | None:
        """From the bytes of a peer; None if they say nothing we know."""
        word, length, culprit, epoch, operation, last, *marks = _NOTICE_LAYOUT.unpack_from(data)
        if word not in {int(each) for each in NoticeKind} or length > _TEXT:
            return None
        said = bytes(data[_NOTICE_LAYOUT.size : _NOTICE_LAYOUT.size + length])
        text = printable(said.decode(errors="replace"))
        return cls(NoticeKind(word), epoch, operation, culprit, marks[0], text, last, marks[1])


class Notices:
    """The notices of one group.

    A rank's last notice says that it has left.  What others send to a group that is closed here is
    still read, when the next group is made or closed: unread messages would be kept for ever.
    """

    def __init__(self, backend: Backend, instance: int = 0) -> None:
        self._backend = backend
        self._instance = instance
        self._others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self._sent: list[Operation] = []
        self._expected: dict[int, tuple[Operation, bytearray]] = {}
        self._left: set[int] = set()
        sweep(backend)

    def tell(self, ranks: Iterable[int], notice: Notice) -> None:
        """Send a notice; who cannot be reached any more is left out."""
        data = notice.pack()
        self._sent = [operation for operation in self._sent if not operation.done]
        for rank in ranks:
            with contextlib.suppress(DistributedError):
                operation = self._backend.post_send(data, rank, tag=self._instance, group=NOTICES)
                if not operation.done:
                    self._sent.append(operation)

    def collect(self) -> list[tuple[int, Notice]]:
        """What has come in since the last time, with its senders."""
        found: list[tuple[int, Notice]] = []
        for rank in self._others:
            if rank not in self._expected and rank not in self._left:
                self._expect(rank)
        self._backend.progress(0)
        for rank, (operation, buffer) in list(self._expected.items()):
            while operation.done:
                del self._expected[rank]
                if operation.error is not None:
                    break  # it is lost, which others find out
                notice = Notice.unpack(buffer)
                if notice is not None:
                    found.append((rank, notice))
                    if notice.last_call == FOR_EVER:
                        self._left.add(rank)
                if rank not in self._left:
                    self._expect(rank)
                if rank not in self._expected:
                    break
                operation, buffer = self._expected[rank]  # noqa: PLW2901 - the next one of this rank
        return found

    def _expect(self, rank: int) -> None:
        buffer = bytearray(NOTICE_SIZE)
        with contextlib.suppress(DistributedError):
            operation = self._backend.post_recv_into(
                buffer, rank, tag=self._instance, group=NOTICES
            )
            self._expected[rank] = (operation, buffer)

    def is_settled(self) -> bool:
        """Whether nothing more can come: everybody has left, or is lost."""
        with contextlib.suppress(DistributedError):
            self.collect()
            return not self._expected  # whom it cannot expect anything from is gone
        return True

    def close(self) -> None:
        """Read no more; what still comes is thrown away in time."""
        if not self.is_settled():
            with _sweeping:
                _past(self._backend).append(self)
        sweep(self._backend)


# -- groups that are closed here and not everywhere ------------------------------------------------

_sweeping = ForkSafeLock()


def _ground(backend: Backend) -> Backend:
    """The backend below all that stand on another."""
    while True:
        below = backend.innermost
        below = below.parent if isinstance(below, SubBackend) else below
        if below is backend:
            return backend
        backend = below


class _GroupCounts(dict[int, int]):
    """How many groups were made on a backend, by what their name has become."""


def count_instances(backend: Backend) -> int:
    """How many groups were made before in the place of this one; the same on all its ranks.

    A subgroup without a name never has another in its place.
    """
    keeper = backend.innermost
    key = 0
    if isinstance(keeper, SubBackend) and keeper.name is not None:
        key = keeper._scope(NOTICES)  # noqa: SLF001 - what its name has become
        keeper = _ground(backend)
    counts = keeper.services.of(_GroupCounts, _GroupCounts)
    made = counts.get(key, 0)
    counts[key] = made + 1
    return made


def _past(backend: Backend) -> list[Notices]:
    past: list[Notices] = vars(_ground(backend)).setdefault("_past_notices", [])
    return past


def sweep(backend: Backend) -> None:
    """Throw away what has come for groups that are closed here."""
    past = _past(backend)
    if past and _sweeping.acquire(blocking=False):  # otherwise another thread does it
        try:
            past[:] = [notices for notices in past if not notices.is_settled()]
        finally:
            _sweeping.release()


def has_notice(parent: Backend, rank: int, identity: int) -> bool:
    """Whether a rank has sent a notice in a subgroup of that number, which is not read here."""
    with contextlib.suppress(DistributedError):
        return parent.has_message(rank, group=identity ^ NOTICES)
    return False


def tell_outside(parent: Backend, rank: int, identity: int, notice: Notice) -> None:
    """Send a notice to a rank in a subgroup that this rank has not made."""
    with contextlib.suppress(DistributedError):
        parent.post_send(notice.pack(), rank, group=identity ^ NOTICES)


# --------------------------------------------------------------------------------------------------
# Ballots: once two ranks disagree about an operation, who is the odd one out.
#
# Every rank that ends a call because of a disagreement tells all others what it took its last two
# operations for: one rank may have finished what another still waits in, but never more than one.
# A rank counts only what another one told it, or showed it on the stream between them; what a rank
# says of a third one counts for nothing.


@dataclass
class MismatchVote:
    """What this rank knows of the beliefs of all."""

    world_size: int
    epoch: int
    operation: int
    """The last one of this rank in that epoch."""
    beliefs: Mapping[int, bytes]
    """What this rank takes its last operations for, by their numbers."""
    told: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank: the same of others."""
    reporters: set[int] = field(default_factory=set)
    """Ranks that say they have seen a disagreement themselves."""
    _shown: dict[int, bytes] = field(default_factory=dict)

    def hear(self, rank: int, notice: Notice) -> None:
        """A rank tells what it believes."""
        if notice.word is NoticeKind.MISMATCH:
            self.reporters.add(rank)
        if notice.epoch == self.epoch:
            self.told[rank] = beliefs_of(notice.operation, notice.fingerprint, notice.earlier)

    def show(self, rank: int, belief: bytes) -> None:
        """A rank began an operation with us that is not ours, whatever it tells later."""
        self._shown[rank] = belief

    def _differing(self, operation: int) -> dict[int, bytes]:
        mine = self.beliefs[operation]
        found = {
            rank: each[operation]
            for rank, each in self.told.items()
            if each.get(operation, mine) != mine
        }
        if operation == self.operation:
            found |= self._shown
        return found

    def _agreeing(self, operation: int) -> int:
        """How many ranks believe the same as this one, which is one of them."""
        mine = self.beliefs[operation]
        return 1 + sum(
            each.get(operation) == mine and rank not in self._shown
            for rank, each in self.told.items()
        )

    def odd_one(self) -> tuple[int, str, str] | None:
        """A rank that believes something else than most do, and what both believe."""
        for operation in sorted(self.beliefs):
            differing = self._differing(operation)
            if differing and self._is_most(self._agreeing(operation)):
                rank = min(differing)
                mine = self.beliefs[operation]
                return rank, _worded(differing[rank]), _worded(mine)
        return None

    @property
    def has_most(self) -> bool:
        """Whether most ranks believe what this one does, of every operation that it knows of."""
        return all(
            not self._differing(operation) or self._is_most(self._agreeing(operation))
            for operation in self.beliefs
        ) and any(self._is_most(self._agreeing(operation)) for operation in self.beliefs)

    def is_decided(self, silent: Collection[int]) -> bool:
        """Whether more votes would change nothing; the silent ones may still vote."""
        if self.odd_one() is not None or not silent:
            return True
        for operation in self.beliefs:
            differing = self._differing(operation)
            if differing:
                most = max(self._agreeing(operation), *Counter(differing.values()).values())
                undecided = sum(rank not in self._shown for rank in silent)
                return not self._is_most(most + undecided) or self._is_most(most)
        return False

    def _is_most(self, count: int) -> bool:
        return 2 * count > self.world_size


def beliefs_of(operation: int, current: bytes, earlier: bytes) -> dict[int, bytes]:
    """The beliefs of a rank by the numbers of its operations, which begin with 1."""
    return {operation: current} | ({operation - 1: earlier} if operation > 1 else {})


def _worded(belief: bytes) -> str:
    return str(Fingerprint.unpack(belief))
