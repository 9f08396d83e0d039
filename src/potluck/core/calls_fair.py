"""A queue in which everybody gets a turn: of those who wait, each peer's first in rotation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["FairQueue"]

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of several peers.

    >>> queue = FairQueue()
    >>> for peer, item in ((1, "a"), (1, "b"), (2, "c")): queue.add(peer, item)
    >>> queue.take(), queue.take(), queue.take(), queue.take()
    ('a', 'c', 'b', None)
    """

    def __init__(self) -> None:
        self._turns: deque[Hashable] = deque()
        self._waiting: dict[Hashable, deque[Item]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def add(self, peer: Hashable, item: Item) -> None:
        """Queue behind the others of that peer."""
        line = self._waiting.get(peer)
        if line is None:
            line = self._waiting[peer] = deque()
            self._turns.append(peer)
        line.append(item)
        self._count += 1

    def take(self, may: Callable[[Any], bool] = lambda _: True) -> Item | None:
        """The next item, of a peer who may; None if there is none."""
        for _ in range(len(self._turns)):
            peer = self._turns.popleft()
            if not may(peer):
                self._turns.append(peer)
                continue
            line = self._waiting[peer]
            item = line.popleft()
            self._count -= 1
            if line:
                self._turns.append(peer)
            else:
                del self._waiting[peer]
            return item
        return None

    def take_out(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove some wherever they stand."""
        found: list[Item] = []
        for peer in list(self._turns):
            line = self._waiting[peer]
            out = [item for item in line if unwanted(item)]
            if not out:
                continue
            found += out
            rest = deque(item for item in line if not unwanted(item))
            if rest:
                self._waiting[peer] = rest
            else:
                del self._waiting[peer]
                self._turns.remove(peer)
        self._count -= len(found)
        return found
