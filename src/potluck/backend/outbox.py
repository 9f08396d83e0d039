"""Messages to one peer: small ones at once within a credit, all others on the go-ahead.

The credit is what the receiver is willing to keep for a receive that is not posted yet.  Without
it, or above the size for it, a message is only offered; its bytes leave when the receiver grants
it, in pieces that take turns with other messages.  Everything here is guarded by the link's lock.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from potluck.backend.limits import MAX_OFFERS, MESSAGE_COST, Limits
from potluck.backend.link import Link
from potluck.backend.operation import Cancelled, Driver, Operation
from potluck.backend.writer import Parcel
from potluck.errors import DistributedError, MalformedFrame, Timeout
from potluck.net.frames import Kind, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SIZE", "Outbox", "Send"]

SIZE = struct.Struct("<Q")
"""The payload of an offer: the message's size."""


class Send(Operation):
    """A message going out."""

    __slots__ = ("dst", "eager", "granted", "outbox", "parcel")

    def __init__(self, driver: Driver, dst: int, view: memoryview, group: int, tag: int) -> None:
        super().__init__(driver)
        self.dst = dst
        self.parcel = Parcel(self, view, group, tag)
        self.outbox: Outbox | None = None
        self.eager = False
        self.granted = False

    def finish(self, error: DistributedError | None = None) -> None:
        """Become done; the outbox forgets it."""
        super().finish(error)
        self.parcel.operation = None  # a cycle would hold the caller's buffer until it is collected
        if self.outbox is not None:
            self.outbox.forget(self)

    def describe(self) -> str:
        """Name the receiver."""
        return f"Sending {len(self.parcel.view)} bytes to rank {self.dst}"

    def timeout_error(self, seconds: float) -> Timeout:
        """Say who did not do what."""
        late = "takes them in slowly" if self.granted else "has not asked for them"
        return Timeout(
            f"{self.describe()} was not done within {seconds:g} s",
            seconds=seconds,
            rank=self.dst,
            cause=f"rank {self.dst} {late}",
            hint="Post the receive there first, or give it more time.",
        )


class Outbox:
    """What we send to one peer."""

    def __init__(self, driver: Driver, link: Link, limits: Limits) -> None:
        self._driver = driver
        self._link = link
        self._limits = limits
        self._credit = limits.credit
        self._next_number = 1
        self._open: dict[int, Send] = {}
        self._backlog: deque[Send] = deque()
        self._offered = 0

    @property
    def is_short_of_credit(self) -> bool:
        """Whether the peer should have given credit back by now, were it read."""
        return self._credit * 2 <= self._limits.credit

    def send(self, view: memoryview, group: int, tag: int) -> Send | None:
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
            send = Send(self._driver, self._link.rank, view, group, tag)
            if self._link.lost is not None:
                send.finish(self._link.lost)
                return send
            send.parcel.number = self._take_number(send)
            self._backlog.append(send)
            self._offer()
            return send

    def _send_eagerly(self, view: memoryview, group: int, tag: int) -> Send | None:
        link, number = self._link, self._next_number
        self._credit -= len(view) + MESSAGE_COST
        self._next_number = number + 1
        header = encode(
            Kind.EAGER, group=group, epoch=link.epoch, tag=tag, operation=number, length=len(view)
        )
        if link.writer.write(header, view):
            return None
        send = Send(self._driver, link.rank, view, group, tag)
        send.parcel.number, send.outbox = number, self
        send.eager = send.granted = True
        self._open[number] = send
        link.writer.adopt(send)
        return send

    def _take_number(self, send: Send) -> int:
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
                Kind.OFFER,
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
                raise MalformedFrame(
                    f"Rank {self._link.rank} gave back more credit than had been used"
                )

    def recall(self, send: Send) -> None:
        """Give up: read from the caller's buffer no more, and withdraw what the peer knows."""
        link, parcel = self._link, send.parcel
        with link.lock:
            if send.done:
                return
            if send in self._backlog:
                self._backlog.remove(send)
            else:
                link.writer.recall(send)
                if send.eager or parcel.sent == len(parcel.view) > 0:
                    send.finish()  # every byte is queued and will arrive: it counts as sent
                    return
                self._offered -= 0 if send.granted else 1
                link.writer.write(encode(Kind.WITHDRAW, epoch=link.epoch, operation=parcel.number))
            send.finish(Cancelled("The send was cancelled"))
            self._offer()

    def forget(self, send: Send) -> None:
        """A message is done."""
        self._open.pop(send.parcel.number, None)

    def lose(self, error: DistributedError) -> Iterable[Operation]:
        """The peer is gone: drop everything; the caller finishes what is returned."""
        with self._link.lock:
            self._link.lost = error
            self._link.writer.stop()
            self._backlog.clear()
            return list(self._open.values())
