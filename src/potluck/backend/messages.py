"""What the inbox keeps: receives that wait, messages under way, and their senders."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from potluck._future import deadline_after
from potluck.backend.framing import LargeMessage, PeerConnection
from potluck.backend.operation import Cancelled, Operation, PumpLock, finish_all
from potluck.errors import DistributedError, MalformedFrame, SizeMismatch, Timeout
from potluck.net.frames import FrameType, Header, encode

if TYPE_CHECKING:
    from collections.abc import Iterable


# --------------------------------------------------------------------------------------------------
# How much one rank may make another keep, and how soon it helps; the same on all ranks.

MESSAGE_COST = 256
"""Bytes of credit a message costs besides its own: what keeping an empty one takes in memory."""

COURTESY_AFTER = 0.05
"""Seconds a send waits for its go-ahead before it helps its peers to get on."""

ANNOUNCE_AFTER = 0.1
"""Seconds after which a barrier tells the others that we are there; sooner if it has no more."""

MAX_OFFERS = 4096
"""Offers one peer may have open; further ones wait on the sender's side."""


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """Bounds of memory, in bytes.

    >>> MessageLimits().eager
    1048576
    """

    eager: int = 1 << 20
    """Largest message sent without asking: above it, one round trip hardly shows."""
    credit: int = 4 << 20
    """What one peer may make us keep unasked."""
    courtesy: int = 128 << 20
    """What we take in from all peers together to break a deadlock of senders."""


# --------------------------------------------------------------------------------------------------
# Messages to one peer: small ones at once within a credit, all others on the go-ahead.
#
# The credit is what the receiver is willing to keep for a receive that is not posted yet.  Without
# it, or above the size for it, a message is only offered; its bytes leave when the receiver grants
# it, in pieces that take turns with other messages.  Everything here is guarded by the link's lock.

SIZE = struct.Struct("<Q")
"""The payload of an offer: the message's size."""


class SendOperation(Operation):
    """A message going out."""

    __slots__ = ("_inbox", "dst", "eager", "granted", "outbox", "parcel")

    def __init__(self, inbox: Inbox, dst: int, view: memoryview, group: int, tag: int) -> None:
        super().__init__(inbox.pump)
        self._inbox = inbox
        self.dst = dst
        self.parcel = LargeMessage(self, view, group, tag)
        self.outbox: Outbox | None = None
        self.eager = False
        self.granted = False

    def drive(self, limit: float | None) -> bool:
        """Run or await the pump; without a go-ahead, help the peers to get theirs."""
        deadline = deadline_after(limit)
        while not self.granted:
            if self.pump.wait_briefly(self, deadline, COURTESY_AFTER):
                return self.ended
            self._inbox.take_offers()
        return self.pump.wait(self, deadline)

    def _give_up(self) -> None:
        with self.pump.standstill():
            if self.outbox is not None:
                self.outbox.recall(self)
            else:
                self._inbox.recall_from_myself(self)

    def finish(self, error: BaseException | None = None, value: None = None) -> None:
        """Become done; the outbox forgets it."""
        super().finish(error, value)
        self.parcel.operation = None  # a cycle would hold the caller's buffer until it is collected
        if self.outbox is not None:
            self.outbox.forget(self)

    def describe(self) -> str:
        """Name the receiver."""
        return f"Sending {len(self.parcel.view)} bytes to rank {self.dst}"

    def timeout_error(self, seconds: float) -> Timeout:
        """Say who did not do what."""
        late = "receives them slowly" if self.granted else "has not posted a receive"
        return Timeout(
            f"{self.describe()} timed out after {seconds:g} s",
            seconds=seconds,
            rank=self.dst,
            cause=f"rank {self.dst} {late}",
            hint="Post the receive there first, or use a longer timeout.",
        )


class Outbox:
    """What we send to one peer."""

    def __init__(self, inbox: Inbox, link: PeerConnection, limits: MessageLimits) -> None:
        self._inbox = inbox
        self._link = link
        self._limits = limits
        self._credit = limits.credit
        self._next_number = 1
        self._open: dict[int, SendOperation] = {}
        self._backlog: deque[SendOperation] = deque()
        self._offered = 0

    @property
    def is_short_of_credit(self) -> bool:
        """Whether the peer should have given credit back by now, were it read."""
        return self._credit * 2 <= self._limits.credit

    def send(self, view: memoryview, group: int, tag: int) -> SendOperation | None:
        """Start sending; None when every byte has left already."""
        with self._link.lock:
            cost = len(view) + MESSAGE_COST
            if (
                self._link.lost is None
                and len(view) <= self._limits.eager
                and cost <= self._credit
                and not self._backlog
            ):
                return self._send_eagerly(view, group, tag)
            send = SendOperation(self._inbox, self._link.rank, view, group, tag)
            if self._link.lost is not None:
                send.finish(self._link.lost)
                return send
            send.parcel.number = self._take_number(send)
            self._backlog.append(send)
            self._offer()
            return send

    def _send_eagerly(self, view: memoryview, group: int, tag: int) -> SendOperation | None:
        link, number = self._link, self._next_number
        self._credit -= len(view) + MESSAGE_COST
        self._next_number = number + 1
        header = encode(
            FrameType.EAGER,
            group=group,
            epoch=link.epoch,
            tag=tag,
            operation=number,
            length=len(view),
        )
        if link.writer.write(header, view):
            return None
        send = SendOperation(self._inbox, link.rank, view, group, tag)
        send.parcel.number, send.outbox = number, self
        send.eager = send.granted = True
        self._open[number] = send
        link.writer.adopt(send)
        return send

    def _take_number(self, send: SendOperation) -> int:
        number = self._next_number
        self._next_number = number + 1
        send.outbox = self
        self._open[number] = send
        return number

    def _offer(self) -> None:
        while self._backlog and self._offered < MAX_OFFERS:
            parcel = self._backlog.popleft().parcel
            self._offered += 1
            header = encode(
                FrameType.OFFER,
                group=parcel.group,
                epoch=self._link.epoch,
                tag=parcel.tag,
                operation=parcel.number,
                length=SIZE.size,
            )
            self._link.writer.write(header, memoryview(SIZE.pack(len(parcel.view))))

    def receive_grant(self, number: int, *, wanted: bool) -> None:
        """The peer wants an offered message, or wants it gone."""
        with self._link.lock:
            send = self._open.get(number)
            if send is None or send.granted:
                return  # withdrawn meanwhile
            send.granted = True
            self._offered -= 1
            if wanted and len(send.parcel.view):
                self._link.writer.send(send.parcel)
            else:
                send.finish()
            self._offer()

    def receive_credit(self, amount: int) -> None:
        """The peer has consumed eager messages."""
        with self._link.lock:
            self._credit += amount
            if self._credit > self._limits.credit:
                raise MalformedFrame(f"Rank {self._link.rank} returned more credit than was used")

    def recall(self, send: SendOperation) -> None:
        """Give up: read from the caller's buffer no more, and withdraw what the peer knows."""
        link, parcel = self._link, send.parcel
        with link.lock:
            if send.ended:
                return
            if send in self._backlog:
                self._backlog.remove(send)
            else:
                link.writer.recall(send)
                if send.eager or parcel.sent == len(parcel.view) > 0:
                    send.finish()  # every byte is queued and will arrive: it counts as sent
                    return
                self._offered -= 0 if send.granted else 1
                link.writer.write(
                    encode(FrameType.WITHDRAW, epoch=link.epoch, operation=parcel.number)
                )
            send.finish(Cancelled("The send was cancelled"))
            self._offer()

    def forget(self, send: SendOperation) -> None:
        """A message is done."""
        self._open.pop(send.parcel.number, None)

    def lose(self, error: DistributedError) -> Iterable[Operation]:
        """The peer is gone: drop everything; the caller finishes what is returned."""
        with self._link.lock:
            self._link.lost = error
            self._link.writer.stop()
            self._backlog.clear()
            return list(self._open.values())


# --------------------------------------------------------------------------------------------------

Key: TypeAlias = tuple[int, int, int]
"""(group, sender's rank, tag)"""


class ReceiveOperation(Operation):
    """A buffer waiting for a message."""

    __slots__ = ("_inbox", "at_most", "key", "message", "view")

    def __init__(self, inbox: Inbox, key: Key, view: memoryview, *, at_most: bool = False) -> None:
        super().__init__(inbox.pump)
        self._inbox = inbox
        self.key = key
        self.at_most = at_most
        self.view = view
        self.message: IncomingMessage | None = None

    def _give_up(self) -> None:
        with self.pump.standstill():
            self._inbox.give_up(self)

    def take(self, payload: memoryview) -> None:
        """Become done with a copy of a whole message; fail if it does not fit."""
        if self.fits(len(payload)):
            self.view[: len(payload)] = payload
            self.finish()
        else:
            self.finish(SizeMismatch(len(self.view), len(payload), rank=self.key[1]))

    def fits(self, size: int) -> bool:
        """Whether a message of this size is what the caller wants."""
        return size == len(self.view) or (self.at_most and size < len(self.view))

    def describe(self) -> str:
        """Name the sender."""
        return f"A message of {len(self.view)} bytes from rank {self.key[1]}"

    def timeout_error(self, seconds: float) -> Timeout:
        """Say who is silent."""
        return Timeout(
            f"{self.describe()} did not arrive within {seconds:g} s",
            seconds=seconds,
            rank=self.key[1],
            hint="Nothing is lost: receive again when the sender is ready.",
        )


@dataclass(eq=False, slots=True)
class IncomingMessage:
    """A message offered, on its way in, or here and not yet asked for."""

    sender: SenderState
    key: Key
    number: int
    size: int
    eager: bool
    buffer: memoryview | None = None
    """Where it lands; None while it is only offered."""
    kept: bool = False
    """The buffer is ours and not the receive's, which gets a copy."""
    filled: int = 0
    receive: ReceiveOperation | None = None
    unwanted: bool = False
    """Its receive had another size; the bytes are dropped when they are all here."""
    courtesy: bool = False
    """Its buffer counts against the courtesy budget."""
    source: SendOperation | None = None
    """For a message to oneself: the send that still holds the bytes."""

    @property
    def cost(self) -> int:
        """What keeping it takes: also an empty message takes memory."""
        return max(self.size, MESSAGE_COST)

    @property
    def whole(self) -> bool:
        """Whether every byte is here."""
        return self.filled == self.size and self.buffer is not None

    def keep(self) -> None:
        """Move what is here from a caller's buffer into one of ours, and let the rest follow.

        Only while the pump stands still.
        """
        link, landed = self.sender.link, self.buffer
        assert link is not None  # messages to oneself never land in pieces
        assert landed is not None  # it has been landing there
        kept = memoryview(bytearray(self.size))
        here = self.filled
        arriving = link.reader.arriving()
        if arriving is not None and self is self.sender.message_of(arriving[0]):
            here += arriving[1]
            link.reader.redirect(kept[here : self.filled + arriving[0].length])
        kept[:here] = landed[:here]
        self.buffer, self.kept = kept, True


@dataclass(eq=False)
class SenderState:
    """What we keep about one peer that sends to us."""

    rank: int
    link: PeerConnection | None
    credit: int
    """What it may make us keep, in bytes."""
    used: int = 0
    """Credit the peer has used and we have not given back."""
    owed: int = 0
    """The part of it that is consumed and will go back with the next note."""
    ungranted: int = 0
    offers: dict[int, IncomingMessage] = field(default_factory=dict)
    arriving: IncomingMessage | None = None
    """The eager message whose payload is now on its way."""
    size_buffer: bytearray = field(default_factory=lambda: bytearray(SIZE.size))

    def message_of(self, header: Header) -> IncomingMessage | None:
        """The message a frame with payload belongs to."""
        if header.kind == FrameType.EAGER:
            return self.arriving
        return self.offers.get(header.operation) if header.kind == FrameType.DATA else None

    def charge(self, size: int) -> None:
        """A small message of this size uses up credit."""
        self.used += size + MESSAGE_COST
        if self.used > self.credit:
            raise MalformedFrame(f"Rank {self.rank} sent more than it had credit for")

    def give_back(self, size: int) -> None:
        """A small message is consumed; credit goes back in few notes, not for each message."""
        self.owed += size + MESSAGE_COST
        if self.owed * 2 >= self.credit:
            self.used -= self.owed
            self.tell(FrameType.CREDIT, self.owed)
            self.owed = 0

    def tell(self, kind: FrameType, number: int) -> None:
        """Send the peer a frame without payload."""
        assert self.link is not None
        self.link.tell(encode(kind, epoch=self.link.epoch, operation=number))


# --------------------------------------------------------------------------------------------------
# Matching: which arriving message belongs to which posted receive.
#
# Messages of one key (group, sender, tag) match receives of that key strictly in order, whichever
# comes first.  Keys never wait for each other.  The queue knows neither bytes nor threads; what it
# keeps are the caller's own objects.

KeyT = TypeVar("KeyT", bound=Hashable)
ReceiveT = TypeVar("ReceiveT")
MessageT = TypeVar("MessageT")
Mine = TypeVar("Mine")
Other = TypeVar("Other")


class MatchQueue(Generic[KeyT, ReceiveT, MessageT]):
    """Receives that wait for messages, and messages that wait for receives.

    For one key at most one of the two queues is non-empty.

    >>> box = MatchQueue[str, str, str]()
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
        """Every message that has not been asked for yet, oldest first within a key."""
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


# --------------------------------------------------------------------------------------------------
# Messages from all peers: matched by (group, sender, tag) in order, landing where they belong.
#
# A message that somebody waits for lands directly in that receive's buffer.  A small one that
# nobody waits for is kept, within the sender's credit; a large one stays with its sender until
# asked for. A receive that gives up in the middle of a message leaves the bytes that are here to
# the next one. ``lock`` guards everything; the links' locks may be taken inside it.


class Inbox:
    """Everything sent to one rank."""

    def __init__(self, rank: int, pump: PumpLock, limits: MessageLimits) -> None:
        self.lock = threading.Lock()
        self.pump = pump
        self._rank = rank
        self._mailbox: MatchQueue[Key, ReceiveOperation, IncomingMessage] = MatchQueue()
        self.has_message = self._mailbox.has_message  # one look at one key, so without the lock
        self._courtesy_left = limits.courtesy
        self._myself = SenderState(rank, None, 0)

    # -- receives --------------------------------------------------------------------------

    def receive(
        self, sender: SenderState | None, key: Key, view: memoryview, *, at_most: bool = False
    ) -> ReceiveOperation:
        """Start receiving from a peer, or from oneself when there is no sender."""
        receive = ReceiveOperation(self, key, view, at_most=at_most)
        with self.lock:
            message = self._mailbox.post(key, receive)
            if message is not None:
                self._join(receive, message)
            elif sender is not None and sender.link is not None and sender.link.lost is not None:
                self._mailbox.take_back_receive(key, receive)
                receive.finish(sender.link.lost)
        return receive

    def give_up(self, receive: ReceiveOperation) -> None:
        """Free the caller's buffer; what is here of a message is kept for the next receive.

        Only while the pump stands still: the pump writes into that buffer.
        """
        with self.lock:
            message = receive.message
            if receive.ended:
                return
            if message is None:
                self._mailbox.take_back_receive(receive.key, receive)
            else:
                if not message.kept:
                    message.keep()
                message.receive = receive.message = None
                successor = self._mailbox.return_message(receive.key, message)
                if successor is not None:
                    self._join(successor, message)
            receive.finish(Cancelled("The receive was cancelled"))

    # -- meeting ---------------------------------------------------------------------------

    def _join(self, receive: ReceiveOperation, message: IncomingMessage) -> None:
        """A receive and a message have met."""
        if not receive.fits(message.size):
            receive.finish(SizeMismatch(len(receive.view), message.size, rank=message.key[1]))
            self._drop(message)
            return
        receive.message, message.receive = message, receive
        if message.source is not None:
            receive.view[: message.size] = message.source.parcel.view
            message.source.finish()
            receive.finish()
        elif message.buffer is None:
            message.buffer = receive.view[: message.size]
            self._grant(message)
        if message.whole and not receive.ended:
            self._deliver(message)

    def _grant(self, message: IncomingMessage) -> None:
        sender = message.sender
        sender.ungranted -= 1
        sender.tell(FrameType.GRANT, message.number)
        if message.size == 0:
            del sender.offers[message.number]

    def _drop(self, message: IncomingMessage) -> None:
        """Drop this message undelivered; its sender counts it as delivered."""
        message.unwanted = True
        if message.source is not None:
            message.source.finish()
        elif message.buffer is None:
            message.sender.ungranted -= 1
            del message.sender.offers[message.number]
            message.sender.tell(FrameType.DISCARD, message.number)
        elif message.whole and message is not message.sender.arriving:
            self._release(message)

    def _deliver(self, message: IncomingMessage) -> None:
        receive, buffer = message.receive, message.buffer if message.kept else None
        assert receive is not None
        self._release(message)
        receive.message = message.receive = None  # a cycle would hold the caller's buffer
        if buffer is None:
            receive.finish()
        else:
            receive.take(buffer)

    def _release(self, message: IncomingMessage) -> None:
        """The message's bytes are needed no more."""
        message.buffer = None
        if message.courtesy:
            message.courtesy = False
            self._courtesy_left += message.cost
        if message.eager:
            message.sender.give_back(message.size)

    # -- frames, called by the pump --------------------------------------------------------

    def begin(self, sender: SenderState, header: Header) -> memoryview:
        """Say where a payload lands."""
        if header.kind == FrameType.OFFER and header.length == SIZE.size:
            return memoryview(sender.size_buffer)
        with self.lock:
            if header.kind == FrameType.EAGER:
                return self._begin_eager(sender, header)
            if header.kind == FrameType.DATA:
                return self._begin_piece(sender, header)
        raise MalformedFrame(f"Rank {sender.rank} sent a {header.kind.name} frame with a payload")

    def _begin_eager(self, sender: SenderState, header: Header) -> memoryview:
        sender.charge(header.length)
        key = (header.group, sender.rank, header.tag)
        message = IncomingMessage(sender, key, header.operation, header.length, eager=True)
        sender.arriving = message
        receive = self._mailbox.arrive(key, message)
        if receive is not None:
            receive.message, message.receive = message, receive
            if receive.fits(header.length):
                message.buffer = receive.view[: header.length]
                return message.buffer
        # Of another size: that ends the receive, but only when the frame has proved to be genuine.
        message.buffer, message.kept = memoryview(bytearray(header.length)), True
        return message.buffer

    def _begin_piece(self, sender: SenderState, header: Header) -> memoryview:
        message = sender.offers.get(header.operation)
        if message is None or message.buffer is None:
            raise MalformedFrame(f"Rank {sender.rank} sent a piece that was not asked for")
        end = message.filled + header.length
        if end > message.size:
            raise MalformedFrame(f"Rank {sender.rank} sent more than it had offered")
        return message.buffer[message.filled : end]

    def complete_small(self, sender: SenderState, header: Header, payload: memoryview) -> None:
        """A whole small message is here, in a buffer that is only lent."""
        key = (header.group, sender.rank, header.tag)
        with self.lock:
            sender.charge(header.length)
            receive = self._mailbox.take_receive(key)
            if receive is None:
                message = IncomingMessage(sender, key, header.operation, header.length, eager=True)
                message.buffer, message.kept = memoryview(bytearray(payload)), True
                message.filled = message.size
                self._mailbox.arrive(key, message)
                return
            sender.give_back(header.length)
            receive.take(payload)

    def complete_eager(self, sender: SenderState, header: Header) -> None:
        """A whole small message is here."""
        with self.lock:
            if header.length == 0:
                self._begin_eager(sender, header)
            message, sender.arriving = sender.arriving, None
            assert message is not None
            message.filled = message.size
            if message.unwanted:
                self._release(message)
            elif message.receive is not None:
                self._deliver(message)

    def complete_piece(self, sender: SenderState, header: Header) -> None:
        """A piece of a granted message is here."""
        with self.lock:
            message = sender.offers.get(header.operation)
            if message is None or header.length == 0:
                raise MalformedFrame(f"Rank {sender.rank} sent an empty piece")
            message.filled += header.length
            if message.filled < message.size:
                return
            del sender.offers[header.operation]
            if message.unwanted:
                self._release(message)
            elif message.receive is not None:
                self._deliver(message)

    def complete_offer(self, sender: SenderState, header: Header) -> None:
        """A peer has something for us."""
        with self.lock:
            if header.operation in sender.offers or sender.ungranted >= MAX_OFFERS:
                raise MalformedFrame(f"Rank {sender.rank} offered more than it may")
            if header.length != SIZE.size:
                raise MalformedFrame(f"Rank {sender.rank} offered a message without a size")
            (size,) = SIZE.unpack(sender.size_buffer)
            key = (header.group, sender.rank, header.tag)
            message = IncomingMessage(sender, key, header.operation, size, eager=False)
            sender.offers[header.operation] = message
            sender.ungranted += 1
            receive = self._mailbox.arrive(key, message)
            if receive is not None:
                self._join(receive, message)

    def complete_withdrawal(self, sender: SenderState, number: int) -> None:
        """A peer gave up sending; its receive waits for the next message instead."""
        with self.lock:
            message = sender.offers.pop(number, None)
            if message is None:
                return  # it had been delivered or dropped before the withdrawal came
            sender.ungranted -= message.buffer is None
            receive, message.receive = message.receive, None
            self._release(message)
            if receive is None:
                self._mailbox.take_back_message(message.key, message)
                return
            receive.message = None
            successor = self._mailbox.return_receive(receive.key, receive)
            if successor is not None:
                self._join(receive, successor)

    # -- oneself, deadlocks, endings -------------------------------------------------------

    def send_to_myself(self, send: SendOperation) -> None:
        """Deliver locally; kept within the courtesy budget when no receive is posted."""
        view = send.parcel.view
        key = (send.parcel.group, self._rank, send.parcel.tag)
        message = IncomingMessage(self._myself, key, 0, len(view), eager=False, source=send)
        with self.lock:
            receive = self._mailbox.arrive(key, message)
            if receive is not None:
                self._join(receive, message)
            elif message.cost <= self._courtesy_left:
                self._courtesy_left -= message.cost
                message.buffer, message.filled = memoryview(bytearray(view)), len(view)
                message.kept = message.courtesy = True
                message.source = None
                send.finish()

    def recall_from_myself(self, send: SendOperation) -> None:
        """A send to oneself gives up."""
        with self.lock:
            for message in self._mailbox.waiting_messages():
                if message.source is send:
                    self._mailbox.take_back_message(message.key, message)
                    send.finish(Cancelled("The send was cancelled"))

    def take_offers(self) -> None:
        """Take in what peers offer, as far as the courtesy budget goes, so that they get on."""
        with self.lock:
            for message in self._mailbox.waiting_messages():
                if message.buffer is not None or message.source is not None:
                    continue
                if message.cost <= self._courtesy_left:
                    self._courtesy_left -= message.cost
                    message.courtesy = message.kept = True
                    message.buffer = memoryview(bytearray(message.size))
                    self._grant(message)

    def lose(self, sender: SenderState) -> list[Operation]:
        """A peer is gone; whole messages stay.  The caller finishes what is returned."""
        with self.lock:
            half = list(sender.offers.values())
            half += [sender.arriving] if sender.arriving is not None else []
            sender.offers.clear()
            sender.arriving = None
            for message in half:
                self._mailbox.take_back_message(message.key, message)
                if message.courtesy:
                    self._courtesy_left += message.cost
            keys = [key for key in self._mailbox.awaited_keys() if key[1] == sender.rank]
            ended: list[Operation] = list(self._mailbox.abandon(keys))
            return ended + [m.receive for m in half if m.receive is not None]

    def end(self, error: DistributedError) -> None:
        """This side closes: end everything that still waits here."""
        with self.lock:
            ended: list[Operation] = list(self._mailbox.abandon(self._mailbox.awaited_keys()))
            waiting = self._mailbox.waiting_messages()
            ended += [message.source for message in waiting if message.source is not None]
            finish_all(ended, error)
