"""Messages that arrive in pieces: the memory for them, and whether there may be that much of it."""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.calls import Budget
from potluck.core.calls_errors import RpcInvalidMessage
from potluck.core.calls_frames import Frame, Mark

__all__ = ["Assembly", "Whole"]


class Whole:
    """A message, of which some bytes may be missing."""

    __slots__ = ("filled", "first", "view")

    def __init__(self, first: Frame, view: memoryview) -> None:
        self.first = first
        self.view = view
        self.filled = 0


class Assembly:
    """All messages of one peer that are incomplete, within a :class:`Budget`."""

    def __init__(
        self,
        allowed: int,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        *,
        least: int = 0,
    ) -> None:
        """``least`` bytes have messages that are cut: else a peer could begin millions of them."""
        self._allowed = allowed
        self._budget = Budget(allowed)
        self._least = least
        self._allocate = allocate
        self._parts: dict[tuple[int, int], Whole] = {}
        self.octets = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._parts)

    def has(self, kind: int, number: int) -> bool:
        """Whether a message has begun and is incomplete."""
        return (kind, number) in self._parts

    def accept(self, frame: Frame) -> Whole:
        """The message that a piece belongs to; the caller puts the bytes behind the others.

        Memory is taken only for what is allowed, and no piece may go beyond the announced end.
        """
        key = (frame.kind, frame.number)
        whole = self._parts.get(key)
        if frame.marks & Mark.LATER:
            if whole is None or whole.first.total != frame.total:
                raise RpcInvalidMessage(f"a piece of message {frame.number}, which did not begin")
        else:
            if frame.total < self._least:
                raise RpcInvalidMessage(f"a message of {frame.total} bytes, which nobody cuts")
            if whole is not None:
                raise RpcInvalidMessage(f"message {frame.number} begins twice")
            if not self._budget.admits(frame.total):
                raise RpcInvalidMessage(f"more than {self._allowed} bytes are under way at once")
            whole = self._parts[key] = Whole(frame, self._allocate(frame.total))
            self.octets += frame.total
            self._budget.add(frame.total)
        end = whole.filled + frame.length
        if end > frame.total or (end == frame.total) == bool(frame.marks & Mark.MORE):
            raise RpcInvalidMessage(f"message {frame.number} does not end where it should")
        return whole

    def finish(self, whole: Whole) -> None:
        """It is complete."""
        del self._parts[whole.first.kind, whole.first.number]
        self.octets -= whole.first.total
        self._budget.remove(whole.first.total)

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self._budget = Budget(self._allowed)
        self.octets = 0
