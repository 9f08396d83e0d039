"""A backend as a user writes one: six methods over queues, and nothing else."""

from __future__ import annotations

import queue
import threading
from typing import Any

from potluck import Backend, Timeout


class Room:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        ranks = range(size)
        self.boxes: dict[tuple[int, int], queue.Queue[bytes]] = {
            (src, dst): queue.Queue() for src in ranks for dst in ranks
        }
        self.gate = threading.Barrier(size)


class QueueBackend(Backend):
    """One rank."""

    def __init__(self, rank: int, room: Room) -> None:
        self._rank, self._room = rank, room
        self.barriers = 0

    @property
    def rank(self) -> int:
        """Its place."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._room.size

    def send(self, data: Any, dst: int) -> None:  # type: ignore[override]
        """Put a message into the box of its receiver."""
        self._room.boxes[self._rank, dst].put(bytes(data))

    def recv(self, into: Any, src: int) -> None:  # type: ignore[override]
        """Take the next message."""
        memoryview(into)[:] = self._room.boxes[src, self._rank].get()

    def recv_timeout(self, into: Any, src: int, timeout: float) -> None:  # type: ignore[override]
        """Take the next message, if it comes in time."""
        try:
            memoryview(into)[:] = self._room.boxes[src, self._rank].get(timeout=timeout)
        except queue.Empty:
            raise Timeout(f"Nothing came from rank {src}", seconds=timeout) from None

    def barrier(self) -> None:  # type: ignore[override]
        """Wait for all."""
        self.barriers += 1
        self._room.gate.wait(30)


def queue_group(size: int) -> list[QueueBackend]:
    """All ranks of a new group."""
    room = Room(size)
    return [QueueBackend(rank, room) for rank in range(size)]
