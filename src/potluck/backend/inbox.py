"""Messages from all peers: matched by (group, sender, tag) in order, landing where they belong.

A message that somebody waits for lands directly in that receive's buffer.  A small one that nobody
waits for is kept, within the sender's credit; a large one stays with its sender until asked for.
A receive that gives up in the middle of a message leaves the bytes that are here to the next one.
``lock`` guards everything; the links' locks may be taken inside it.
"""

from __future__ import annotations

import threading

from potluck.backend.limits import MAX_OFFERS, Limits
from potluck.backend.message import Key, Message, Receive, Sender
from potluck.backend.operation import Cancelled, Driver, Operation, finish_all
from potluck.backend.outbox import SIZE, Send
from potluck.core.matching import Mailbox
from potluck.errors import DistributedError, MalformedFrame, SizeMismatch
from potluck.net.frames import Header, Kind

__all__ = ["Inbox"]


class Inbox:
    """Everything sent to one rank."""

    def __init__(self, rank: int, driver: Driver, limits: Limits) -> None:
        self.lock = threading.Lock()
        self._rank = rank
        self._driver = driver
        self._mailbox: Mailbox[Key, Receive, Message] = Mailbox()
        self.has_message = self._mailbox.has_message  # one look at one key, so without the lock
        self._courtesy_left = limits.courtesy
        self._myself = Sender(rank, None, 0)

    # -- receives --------------------------------------------------------------------------

    def receive(
        self, sender: Sender | None, key: Key, view: memoryview, *, at_most: bool = False
    ) -> Receive:
        """Start receiving from a peer, or from oneself when there is no sender."""
        receive = Receive(self._driver, key, view, at_most=at_most)
        with self.lock:
            message = self._mailbox.post(key, receive)
            if message is not None:
                self._join(receive, message)
            elif sender is not None and sender.link is not None and sender.link.lost is not None:
                self._mailbox.take_back_receive(key, receive)
                receive.finish(sender.link.lost)
        return receive

    def give_up(self, receive: Receive) -> None:
        """Free the caller's buffer; what is here of a message is kept for the next receive.

        Only while the pump stands still: the pump writes into that buffer.
        """
        with self.lock:
            message = receive.message
            if receive.done:
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

    def _join(self, receive: Receive, message: Message) -> None:
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
        if message.whole and not receive.done:
            self._deliver(message)

    def _grant(self, message: Message) -> None:
        sender = message.sender
        sender.ungranted -= 1
        sender.tell(Kind.GRANT, message.number)
        if message.size == 0:
            del sender.offers[message.number]

    def _drop(self, message: Message) -> None:
        """Nobody will get this message; its sender counts it as delivered."""
        message.unwanted = True
        if message.source is not None:
            message.source.finish()
        elif message.buffer is None:
            message.sender.ungranted -= 1
            del message.sender.offers[message.number]
            message.sender.tell(Kind.DISCARD, message.number)
        elif message.whole and message is not message.sender.arriving:
            self._release(message)

    def _deliver(self, message: Message) -> None:
        receive, buffer = message.receive, message.buffer if message.kept else None
        assert receive is not None
        self._release(message)
        receive.message = message.receive = None  # a cycle would hold the caller's buffer
        if buffer is None:
            receive.finish()
        else:
            receive.take(buffer)

    def _release(self, message: Message) -> None:
        """The message's bytes are needed no more."""
        message.buffer = None
        if message.courtesy:
            message.courtesy = False
            self._courtesy_left += message.cost
        if message.eager:
            message.sender.give_back(message.size)

    # -- frames, called by the pump --------------------------------------------------------

    def begin(self, sender: Sender, header: Header) -> memoryview:
        """Say where a payload lands."""
        if header.kind == Kind.OFFER and header.length == SIZE.size:
            return memoryview(sender.size_buffer)
        with self.lock:
            if header.kind == Kind.EAGER:
                return self._begin_eager(sender, header)
            if header.kind == Kind.DATA:
                return self._begin_piece(sender, header)
        raise MalformedFrame(f"Rank {sender.rank} sent a {header.kind.name} frame with a payload")

    def _begin_eager(self, sender: Sender, header: Header) -> memoryview:
        sender.charge(header.length)
        key = (header.group, sender.rank, header.tag)
        message = Message(sender, key, header.operation, header.length, eager=True)
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

    def _begin_piece(self, sender: Sender, header: Header) -> memoryview:
        message = sender.offers.get(header.operation)
        if message is None or message.buffer is None:
            raise MalformedFrame(f"Rank {sender.rank} sent a piece that nobody had asked for")
        end = message.filled + header.length
        if end > message.size:
            raise MalformedFrame(f"Rank {sender.rank} sent more than it had offered")
        return message.buffer[message.filled : end]

    def complete_small(self, sender: Sender, header: Header, payload: memoryview) -> None:
        """A whole small message is here, in a buffer that is only lent."""
        key = (header.group, sender.rank, header.tag)
        with self.lock:
            sender.charge(header.length)
            receive = self._mailbox.take_receive(key)
            if receive is None:
                message = Message(sender, key, header.operation, header.length, eager=True)
                message.buffer, message.kept = memoryview(bytearray(payload)), True
                message.filled = message.size
                self._mailbox.arrive(key, message)
                return
            sender.give_back(header.length)
            receive.take(payload)

    def complete_eager(self, sender: Sender, header: Header) -> None:
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

    def complete_piece(self, sender: Sender, header: Header) -> None:
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

    def complete_offer(self, sender: Sender, header: Header) -> None:
        """A peer has something for us."""
        with self.lock:
            if header.operation in sender.offers or sender.ungranted >= MAX_OFFERS:
                raise MalformedFrame(f"Rank {sender.rank} offered more than it may")
            if header.length != SIZE.size:
                raise MalformedFrame(f"Rank {sender.rank} offered a message without a size")
            (size,) = SIZE.unpack(sender.size_buffer)
            key = (header.group, sender.rank, header.tag)
            message = Message(sender, key, header.operation, size, eager=False)
            sender.offers[header.operation] = message
            sender.ungranted += 1
            receive = self._mailbox.arrive(key, message)
            if receive is not None:
                self._join(receive, message)

    def complete_withdrawal(self, sender: Sender, number: int) -> None:
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

    def send_to_myself(self, send: Send) -> None:
        """Deliver locally; kept within the courtesy budget when no receive is posted."""
        view = send.parcel.view
        key = (send.parcel.group, self._rank, send.parcel.tag)
        message = Message(self._myself, key, 0, len(view), eager=False, source=send)
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

    def recall_from_myself(self, send: Send) -> None:
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

    def lose(self, sender: Sender) -> list[Operation]:
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
