"""What an agent has yet to send to one peer, and in which order.

Short messages go first, many at a time; after each batch of them comes one piece of a long one, the
long ones in rotation.  So a large array delays a small call by one piece, and small calls, however
many, never stop an array.
"""

from __future__ import annotations

from collections import deque

from potluck.core.calls import Budget
from potluck.core.calls_frames import PIECE, FrameKind, Mark, pack_frame

__all__ = ["Outbox"]

BATCH = 64
"""Short messages, and thus buffers, of one batch at most; the kernel takes a thousand."""

Octets = bytes | bytearray | memoryview


class _Long:
    """A long message, of which some pieces may have been sent."""

    __slots__ = ("is_owed", "key", "marks", "parts", "patience", "sent", "total")

    def __init__(self, key: tuple[int, int], parts: list[memoryview], total: int) -> None:
        self.key = key
        self.parts = parts
        self.total = total
        self.sent = 0
        self.marks = 0
        self.patience = 0
        self.is_owed = False

    def next_piece(self, size: int) -> list[Octets]:
        """The next frame."""
        length = min(size, self.total - self.sent)
        marks = self.marks | (Mark.LATER if self.sent else 0)
        self.sent += length
        if self.sent < self.total:
            marks |= Mark.MORE
        kind, number = self.key
        frame: list[Octets] = [
            pack_frame(kind, number, length, marks=marks, total=self.total, patience=self.patience)
        ]
        while length:
            part = self.parts[0]
            if len(part) <= length:
                frame.append(self.parts.pop(0))
                length -= len(part)
            else:
                frame.append(part[:length])
                self.parts[0] = part[length:]
                length = 0
        return frame


class Outbox:
    """The messages to one peer."""

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._short: deque[bytes] = deque()
        self._begun: deque[_Long] = deque()
        self._later: deque[_Long] = deque()
        self._budget = Budget(PIECE)
        self._longs_turn = False
        self.octets = 0
        """Bytes that wait, about."""
        self.owed = 0
        """Those of answers, and of all short messages; one large answer is not counted."""
        self._large_answers = 0

    def allow(self, octets: int) -> None:
        """How many bytes of long messages may have begun at a time, as a :class:`Budget`.

        Before anything is added.
        """
        self._budget = Budget(octets)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._short or self._begun or self._later)

    def add_short(self, frame: bytes) -> None:
        """A whole frame."""
        self._short.append(frame)
        self.octets += len(frame)
        self.owed += len(frame)

    def add_long(
        self,
        kind: int,
        number: int,
        parts: list[memoryview],
        *,
        marks: int = 0,
        patience: int = 0,
    ) -> None:
        """A message that will be cut; its parts must not change until it has left."""
        parts = [part for part in parts if len(part)]
        message = _Long((kind, number), parts, sum(map(len, parts)))
        message.marks, message.patience = marks, patience
        if kind == FrameKind.RESPONSE:
            message.is_owed = True
            if self._budget.is_larger(message.total):
                message.is_owed = self._large_answers > 0
                self._large_answers += 1
        self._later.append(message)
        self.octets += message.total
        self.owed += message.total if message.is_owed else 0

    def withdraw(self, kind: int, number: int) -> bool:
        """Take a long message back, if nothing of it has been sent."""
        for message in self._later:
            if message.key == (kind, number):
                self._later.remove(message)
                self._count_sent(message, message.total)
                return True
        return False

    def take(self) -> list[Octets]:
        """The buffers to send next; none if nothing waits."""
        if self._short and not (self._longs_turn and (self._begun or self._later)):
            return self._take_batch()
        self._longs_turn = False
        self._begin_more()
        if not self._begun:
            return []
        message = self._begun.popleft()
        before = message.sent
        frame = message.next_piece(self._piece)
        self._count_sent(message, message.sent - before)
        if message.sent < message.total:
            self._begun.append(message)
        else:
            self._budget.remove(message.total)
            if message.key[0] == FrameKind.RESPONSE and self._budget.is_larger(message.total):
                self._large_answers -= 1
        return frame

    def _count_sent(self, message: _Long, count: int) -> None:
        self.octets -= count
        self.owed -= count if message.is_owed else 0

    def _take_batch(self) -> list[Octets]:
        batch: list[Octets] = []
        size = 0
        while self._short and len(batch) < BATCH and size < self._piece:
            frame = self._short.popleft()
            size += len(frame)
            batch.append(frame)
        self.octets -= size
        self.owed -= size
        self._longs_turn = True
        return batch

    def _begin_more(self) -> None:
        """Begin those that may; one that is larger holds up only others of its kind."""
        if not self._later:
            return
        passed: list[_Long] = []
        while self._later:
            message = self._later[0]
            if self._budget.admits(message.total):
                self._budget.add(message.total)
                self._begun.append(self._later.popleft())
            elif self._budget.is_larger(message.total):
                passed.append(self._later.popleft())
            else:
                break
        self._later.extendleft(reversed(passed))
