"""Notices: short words between the ranks of a group about an operation, beside its streams.

They travel as ordinary messages and are read only when a rank has waited for a while, or comes back
after one, so operations that go well one after the other never see one.
"""

from __future__ import annotations

import contextlib
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from potluck.backend.base import NOTICES
from potluck.backend.sub import SubBackend
from potluck.decoding import printable
from potluck.errors import DistributedError
from potluck.forking import ForkSafeLock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation

__all__ = [
    "FOR_EVER",
    "Notice",
    "Notices",
    "Word",
    "count_instances",
    "has_notice",
    "sweep",
    "tell_outside",
]

SIZE = 512
"""Bytes of every notice."""

FOR_EVER = (1 << 64) - 1
"""The last call of a rank that makes no more: it has left the group."""

_LAYOUT = struct.Struct("<BxHiQQQ32s32s")
_TEXT = SIZE - _LAYOUT.size


class Word(IntEnum):
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

    word: Word
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
        return (_LAYOUT.pack(self.word, len(text), *about, *marks) + text).ljust(SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Notice | None:
        """From the bytes of a peer; None if they say nothing we know."""
        word, length, culprit, epoch, operation, last, *marks = _LAYOUT.unpack_from(data)
        if word not in {int(each) for each in Word} or length > _TEXT:
            return None
        said = bytes(data[_LAYOUT.size : _LAYOUT.size + length])
        text = printable(said.decode(errors="replace"))
        return cls(Word(word), epoch, operation, culprit, marks[0], text, last, marks[1])


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
        buffer = bytearray(SIZE)
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
        below = getattr(backend, "innermost", backend)
        below = below.parent if isinstance(below, SubBackend) else below
        if below is backend:
            return backend
        backend = below


def count_instances(backend: Backend) -> int:
    """How many groups were made before in the place of this one; the same on all its ranks.

    A subgroup without a name never has another in its place.
    """
    keeper: Backend = getattr(backend, "innermost", backend)
    key = 0
    if isinstance(keeper, SubBackend) and keeper.name is not None:
        key = keeper._scope(NOTICES)  # noqa: SLF001 - what its name has become
        keeper = _ground(backend)
    counts: dict[int, int] = vars(keeper).setdefault("_groups_made", {})
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
