"""Matching: which arriving message belongs to which posted receive.

Messages of one key (group, sender, tag) match receives of that key strictly in order, whoever
comes first.  Keys never wait for each other.  The mailbox knows neither bytes nor threads; what it
keeps are the caller's own objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Key = TypeVar("Key", bound=Hashable)
Receive = TypeVar("Receive")
Message = TypeVar("Message")
Mine = TypeVar("Mine")
Other = TypeVar("Other")


class Mailbox(Generic[Key, Receive, Message]):
    """Receives that wait for messages, and messages that wait for receives.

    For one key at most one of the two queues is non-empty.

    >>> box = Mailbox[str, str, str]()
    >>> box.post("key", "receive"), box.arrive("key", "message")
    (None, 'receive')
    """

    def __init__(self) -> None:
        self._receives: dict[Key, deque[Receive]] = {}
        self._messages: dict[Key, deque[Message]] = {}

    def post(self, key: Key, receive: Receive) -> Message | None:
        """Give the oldest message of ``key`` to ``receive``, or let it wait."""
        return _meet(key, receive, self._receives, self._messages)

    def arrive(self, key: Key, message: Message) -> Receive | None:
        """Give ``message`` to the oldest receive of ``key``, or let it wait."""
        return _meet(key, message, self._messages, self._receives)

    def take_receive(self, key: Key) -> Receive | None:
        """The oldest receive that waits for ``key``, for a message that needs no waiting."""
        queue = self._receives.get(key)
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del self._receives[key]
        return receive

    def take_back_receive(self, key: Key, receive: Receive) -> bool:
        """Remove a receive that still waits; False if it has met a message."""
        return _remove(self._receives, key, receive)

    def take_back_message(self, key: Key, message: Message) -> bool:
        """Remove a message that still waits; False if it has met a receive."""
        return _remove(self._messages, key, message)

    def return_receive(self, key: Key, receive: Receive) -> Message | None:
        """Its message was withdrawn: it comes first again, and may meet the next one at once."""
        if key in self._messages:
            return self.post(key, receive)
        self._receives.setdefault(key, deque()).appendleft(receive)
        return None

    def return_message(self, key: Key, message: Message) -> Receive | None:
        """Its receive gave up: it comes first again, and may meet the next one at once."""
        if key in self._receives:
            return self.arrive(key, message)
        self._messages.setdefault(key, deque()).appendleft(message)
        return None

    def has_message(self, key: Key) -> bool:
        """Whether a message of ``key`` waits for a receive."""
        return key in self._messages

    def waiting_messages(self) -> list[Message]:
        """Every message nobody has asked for yet, oldest first within a key."""
        return [message for queue in self._messages.values() for message in queue]

    def abandon(self, keys: list[Key]) -> list[Receive]:
        """Remove and return every receive that waits for one of ``keys``; messages stay."""
        return [receive for key in keys for receive in self._receives.pop(key, ())]

    def awaited_keys(self) -> list[Key]:
        """The keys some receive waits for."""
        return list(self._receives)


def _meet(
    key: Key, mine: Mine, own: dict[Key, deque[Mine]], others: dict[Key, deque[Other]]
) -> Other | None:
    queue = others.get(key)
    if queue is None:
        own.setdefault(key, deque()).append(mine)
        return None
    partner = queue.popleft()
    if not queue:
        del others[key]
    return partner


def _remove(queues: dict[Key, deque[Mine]], key: Key, item: Mine) -> bool:
    queue = queues.get(key)
    if queue is None or item not in queue:
        return False
    queue.remove(item)
    if not queue:
        del queues[key]
    return True
