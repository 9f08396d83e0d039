"""Notices: short words between the ranks of a group about an operation, beside its streams.

They travel as ordinary messages and are read only when a rank has waited for a while, so an
operation that goes well never sees one.
"""

from __future__ import annotations

import contextlib
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from potluck.backend.base import NOTICES
from potluck.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from potluck.backend.base import Backend
    from potluck.backend.operation import Operation

__all__ = ["Notice", "Notices", "Word"]

SIZE = 512
"""Bytes of every notice."""

_LAYOUT = struct.Struct("<BxHIQi32s")
_TEXT = SIZE - _LAYOUT.size


class Word(IntEnum):
    """What a notice says."""

    WAITING = 1
    """I wait for you in this operation, of which I believe this."""
    LOST = 2
    """A rank is gone."""
    MISMATCH = 3
    """Two ranks disagree about this operation."""
    ABORTED = 4
    """A rank was told to end the operation."""
    LATE = 5
    """A rank waited for another until its time was up."""
    FAILED = 6
    """Something else went wrong on a rank."""


class Notice(NamedTuple):
    """One of them."""

    word: Word
    epoch: int
    operation: int
    culprit: int = -1
    """The rank it is about."""
    fingerprint: bytes = bytes(32)
    text: str = ""

    def pack(self) -> bytes:
        """As bytes; a long text loses its end."""
        text = self.text.encode()[:_TEXT]
        head = _LAYOUT.pack(
            self.word, len(text), self.epoch, self.operation, self.culprit, self.fingerprint
        )
        return (head + text).ljust(SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Notice | None:
        """From the bytes of a peer; None if they say nothing we know."""
        word, length, epoch, operation, culprit, fingerprint = _LAYOUT.unpack_from(data)
        if word not in {int(each) for each in Word} or length > _TEXT:
            return None
        text = bytes(data[_LAYOUT.size : _LAYOUT.size + length]).decode(errors="replace")
        return cls(Word(word), epoch, operation, culprit, fingerprint, text)


class Notices:
    """The notices of one group."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sent: list[Operation] = []
        self._expected: dict[int, tuple[Operation, bytearray]] = {}

    def tell(self, ranks: Iterable[int], notice: Notice) -> None:
        """Send a notice; who cannot be reached any more is left out."""
        data = notice.pack()
        self._sent = [operation for operation in self._sent if not operation.done]
        for rank in ranks:
            with contextlib.suppress(DistributedError):
                operation = self._backend.post_send(data, rank, group=NOTICES)
                if not operation.done:
                    self._sent.append(operation)

    def collect(self) -> list[tuple[int, Notice]]:
        """What has come in since the last time, with its senders."""
        found: list[tuple[int, Notice]] = []
        for rank in range(self._backend.world_size):
            if rank != self._backend.rank and rank not in self._expected:
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
                self._expect(rank)
                if rank not in self._expected:
                    break
                operation, buffer = self._expected[rank]  # noqa: PLW2901 - the next one of this rank
        return found

    def _expect(self, rank: int) -> None:
        buffer = bytearray(SIZE)
        with contextlib.suppress(DistributedError):
            operation = self._backend.post_recv_into(buffer, rank, group=NOTICES)
            self._expected[rank] = (operation, buffer)

    def close(self) -> None:
        """Expect nothing more."""
        for operation, _ in self._expected.values():
            with contextlib.suppress(DistributedError):
                operation.cancel()
        self._expected.clear()
