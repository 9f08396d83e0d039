"""What the inbox keeps: receives that wait, messages under way, and their senders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from potluck.backend.limits import MESSAGE_COST
from potluck.backend.operation import Driver, Operation
from potluck.backend.outbox import SIZE, Send
from potluck.errors import MalformedFrame, SizeMismatch, Timeout
from potluck.net.frames import Header, Kind, encode

if TYPE_CHECKING:
    from potluck.backend.link import Link

__all__ = ["Key", "Message", "Receive", "Sender"]

Key: TypeAlias = tuple[int, int, int]
"""(group, sender's rank, tag)"""


class Receive(Operation):
    """A buffer waiting for a message."""

    __slots__ = ("at_most", "key", "message", "view")

    def __init__(
        self, driver: Driver, key: Key, view: memoryview, *, at_most: bool = False
    ) -> None:
        super().__init__(driver)
        self.key = key
        self.at_most = at_most
        self.view = view
        self.message: Message | None = None

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
class Message:
    """A message offered, on its way in, or here and not yet asked for."""

    sender: Sender
    key: Key
    number: int
    size: int
    eager: bool
    buffer: memoryview | None = None
    """Where it lands; None while it is only offered."""
    kept: bool = False
    """The buffer is ours and not the receive's, which gets a copy."""
    filled: int = 0
    receive: Receive | None = None
    unwanted: bool = False
    """Its receive had another size; the bytes are dropped when they are all here."""
    courtesy: bool = False
    """Its buffer counts against the courtesy budget."""
    source: Send | None = None
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
class Sender:
    """What we keep about one peer that sends to us."""

    rank: int
    link: Link | None
    credit: int
    """What it may make us keep, in bytes."""
    used: int = 0
    """Credit the peer has used and we have not given back."""
    owed: int = 0
    """The part of it that is consumed and will go back with the next note."""
    ungranted: int = 0
    offers: dict[int, Message] = field(default_factory=dict)
    arriving: Message | None = None
    """The eager message whose payload is now on its way."""
    size_buffer: bytearray = field(default_factory=lambda: bytearray(SIZE.size))

    def message_of(self, header: Header) -> Message | None:
        """The message a frame with payload belongs to."""
        if header.kind == Kind.EAGER:
            return self.arriving
        return self.offers.get(header.operation) if header.kind == Kind.DATA else None

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
            self.tell(Kind.CREDIT, self.owed)
            self.owed = 0

    def tell(self, kind: Kind, number: int) -> None:
        """Send the peer a frame without payload."""
        assert self.link is not None
        self.link.tell(encode(kind, epoch=self.link.epoch, operation=number))
