"""Matching: which arriving message belongs to which posted receive.

Messages of one key (group, sender, tag) match receives of that key strictly in order, whoever
comes first.  Keys never wait for each other.  The mailbox knows neither bytes nor threads; what it
keeps are the caller's own objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ReceiveT = TypeVar("ReceiveT")
MessageT = TypeVar("MessageT")
Mine = TypeVar("Mine")
Other = TypeVar("Other")


class Mailbox(Generic[KeyT, ReceiveT, MessageT]):
    """Receives that wait for messages, and messages that wait for receives.

    For one key at most one of the two queues is non-empty.

    >>> box = Mailbox[str, str, str]()
    >>> box.post("key", "receive"), box.arrive("key", "message")
    (None, 'receive')
    """

    def __init__(self) -> None:
        self._receives: dict[KeyT, deque[ReceiveT]] = {}
        self._messages: dict[KeyT, deque[MessageT]] = {}

    def post(self, key: KeyT, receive: ReceiveT) -> MessageT | None:
        """Give the oldest message of ``key`` to ``receive``, or let it wait."""
        return _meet(key, receive, self._receives, self._messages)

    def arrive(self, key: KeyT, message: MessageT) -> ReceiveT | None:
        """Give ``message`` to the oldest receive of ``key``, or let it wait."""
        return _meet(key, message, self._messages, self._receives)

    def take_receive(self, key: KeyT) -> ReceiveT | None:
        """The oldest receive that waits for ``key``, for a message that needs no waiting."""
        queue = self._receives.get(key)
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del self._receives[key]
        return receive

    def take_back_receive(self, key: KeyT, receive: ReceiveT) -> bool:
        """Remove a receive that still waits; False if it has met a message."""
        return _remove(self._receives, key, receive)

    def take_back_message(self, key: KeyT, message: MessageT) -> bool:
        """Remove a message that still waits; False if it has met a receive."""
        return _remove(self._messages, key, message)

    def return_receive(self, key: KeyT, receive: ReceiveT) -> MessageT | None:
        """Its message was withdrawn: it comes first again, and may meet the next one at once."""
        if key in self._messages:
            return self.post(key, receive)
        self._receives.setdefault(key, deque()).appendleft(receive)
        return None

    def return_message(self, key: KeyT, message: MessageT) -> ReceiveT | None:
        """Its receive gave up: it comes first again, and may meet the next one at once."""
        if key in self._receives:
            return self.arrive(key, message)
        self._messages.setdefault(key, deque()).appendleft(message)
        return None

    def has_message(self, key: KeyT) -> bool:
        """Whether a message of ``key`` waits for a receive."""
        return key in self._messages

    def waiting_messages(self) -> list[MessageT]:
        """Every message nobody has asked for yet, oldest first within a key."""
        return [message for queue in self._messages.values() for message in queue]

    def abandon(self, keys: list[KeyT]) -> list[ReceiveT]:
        """Remove and return every receive that waits for one of ``keys``; messages stay."""
        return [receive for key in keys for receive in self._receives.pop(key, ())]

    def awaited_keys(self) -> list[KeyT]:
        """The keys some receive waits for."""
        return list(self._receives)


def _meet(
    key: KeyT, mine: Mine, own: dict[KeyT, deque[Mine]], others: dict[KeyT, deque[Other]]
) -> Other | None:
    queue = others.get(key)
    if queue is None:
        own.setdefault(key, deque()).append(mine)
        return None
    partner = queue.popleft()
    if not queue:
        del others[key]
    return partner


def _remove(queues: dict[KeyT, deque[Mine]], key: KeyT, item: Mine) -> bool:
    queue = queues.get(key)
    if queue is None or item not in queue:
        return False
    queue.remove(item)
    if not queue:
        del queues[key]
    return True
