"""Streams of their own: connections between two ranks for one purpose beside the messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.errors import Timeout

if TYPE_CHECKING:
    from potluck.net.sealing import Opener, Sealer
    from potluck.net.transport import Stream

__all__ = ["PeerStream", "Switchboard"]

LOOK_EVERY = 0.02
"""Seconds between two looks of a waiting rank at whether its peer is still there."""


@dataclass(frozen=True, slots=True)
class PeerStream:
    """An open connection."""

    stream: Stream
    seal: tuple[Sealer, Opener] | None = None
    """None on a connection in clear."""
    first: bytes = b""
    """What came in before the stream was ours."""


class Switchboard:
    """Where connections that came in wait until somebody asks for them: by rank and purpose."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str], object] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, rank: int, purpose: str, connection: object) -> object | None:
        """Keep a connection; returns one to close: that which it replaces, or itself at the end."""
        with self._changed:
            if self._is_closed:
                return connection
            replaced = self._waiting.pop((rank, purpose), None)
            self._waiting[rank, purpose] = connection
            self._changed.notify_all()
            return replaced

    def count(self, rank: int) -> int:
        """How many connections of a rank wait."""
        with self._changed:
            return sum(1 for known, _ in self._waiting if known == rank)

    def take(self, rank: int, purpose: str, deadline: float, look: Callable[[], None]) -> object:
        """Wait for a connection; ``look`` raises when waiting makes no sense any more."""
        while True:
            with self._changed:
                found = self._waiting.pop((rank, purpose), None)
                if found is not None:
                    return found
                self._changed.wait(LOOK_EVERY)
            look()
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"Rank {rank} did not come to the operation", seconds=0.0, missing=(rank,)
                )

    def abandon(self, is_over: Callable[[str], bool]) -> list[object]:
        """Take the connections for purposes that are over."""
        with self._changed:
            over = [key for key in self._waiting if is_over(key[1])]
            return [self._waiting.pop(key) for key in over]

    def take_all(
        self,
        ranks: Sequence[int],
        purpose: str,
        look: Callable[[], None],
        is_fit: Callable[[object], bool] = lambda _: True,
    ) -> dict[int, object]:
        """Wait until a connection of each rank is here, and take them all, the latest of each.

        Those that are not fit any more by then are dropped: their ranks may come again.
        """
        while True:
            with self._changed:
                if not self._absent(ranks, purpose):
                    for rank in ranks:
                        if not is_fit(self._waiting[rank, purpose]):
                            del self._waiting[rank, purpose]
                if not self._absent(ranks, purpose):
                    return {rank: self._waiting.pop((rank, purpose)) for rank in ranks}
                self._changed.wait(LOOK_EVERY)
            look()

    def absent(self, ranks: Sequence[int], purpose: str) -> list[int]:
        """Those of whom no such connection waits."""
        with self._changed:
            return self._absent(ranks, purpose)

    def _absent(self, ranks: Sequence[int], purpose: str) -> list[int]:
        return [rank for rank in ranks if (rank, purpose) not in self._waiting]

    def drain(self) -> list[object]:
        """Take everything that waits, and keep nothing from now on."""
        with self._changed:
            self._is_closed = True
            found = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
            return found
