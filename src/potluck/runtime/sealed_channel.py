"""Sealed channels: every unit is a frame, encrypted and authenticated.

A frame is a header, the encrypted bytes and a tag; the opening of an operation is the first frame's
header.  So it travels readable, and is believed only when its frame proves genuine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.errors import MalformedFrame
from potluck.net.frames import HEADER_SIZE, NUMBERS, NUMBERS_AT
from potluck.net.sealing import TAG_SIZE
from potluck.runtime.channel import OPENING_SIZE, Broken, Channel
from potluck.runtime.memory import MARGIN

if TYPE_CHECKING:
    from potluck.net.sealing import Opener, Sealer
    from potluck.net.transport import Stream
    from potluck.runtime.memory import Slot

__all__ = ["SealedChannel"]


class SealedChannel(Channel):
    """A channel on which every unit is encrypted and authenticated."""

    def __init__(
        self, peer: int, stream: Stream, seal: tuple[Sealer, Opener], first: bytes = b""
    ) -> None:
        super().__init__(peer, stream, first)
        self._sealer, self._opener = seal
        self._out = bytearray()
        self._in = bytearray(OPENING_SIZE + TAG_SIZE)
        self._sent_units = self._got_units = 0
        self._expected = b""
        self._foreign: tuple[bytes, bytearray] | None = None

    def begin(self, opening: bytes) -> None:
        """A new operation; the last one is over in both directions."""
        super().begin(opening)
        self._sent_units = self._got_units = 0
        self._expected = b""

    def _header(self, number: int, length: int) -> bytes:
        """The header of a unit: that of the opening, with its own number and length."""
        head = self._opening[:NUMBERS_AT] + NUMBERS.pack(number, length)
        return head if number else head + self._opening[HEADER_SIZE:]

    def push(self, unit: memoryview) -> bool:
        """Seal a unit and send it."""
        head = self._header(self._sent_units, len(unit))
        self._sent_units += 1
        size = len(head) + len(unit) + TAG_SIZE
        if self._rest:
            out = memoryview(bytearray(size))  # the last one is still in the usual place
        else:
            if len(self._out) < size:
                self._out = bytearray(size)
            out = memoryview(self._out)[:size]
        out[: len(head)] = head
        self._sealer.seal_into(head, unit, out[len(head) :])
        self._rest.append(out)
        return self.flush()

    def keep(self) -> None:
        """What is left is sealed, so our own already; but its place must not be used again."""
        if self._rest:
            self._out = bytearray()

    def pull(self, target: memoryview, slot: Slot | None = None) -> bool:
        """Go on receiving a unit; decrypt it when it is whole, in place if it is in a slot."""
        if self._foreign is not None:
            return self._pull_foreign(*self._foreign)
        head = self._expected
        if not head:
            self._expected = head = self._header(self._got_units, len(target))
        size = len(head) + len(target) + TAG_SIZE
        if slot is not None:
            view = slot.wider[MARGIN - len(head) :]
        else:
            if len(self._in) < size:
                self._in = self._in[: self._read] + bytes(size - self._read)
            view = memoryview(self._in)
        # Another operation may be shorter than ours: look at the opening as soon as it is there.
        if self._got_units == 0 and self._read < OPENING_SIZE:
            if not self._fill(view[:OPENING_SIZE]):
                return False
            if view[:OPENING_SIZE] != head:
                return self._meet_foreign(bytes(view[:OPENING_SIZE]))
            self._read = OPENING_SIZE
        if not self._fill(view[:size]):
            return False
        if view[: len(head)] != head:
            raise Broken(self.peer, MalformedFrame("A frame came in that does not belong there"))
        self._open(head, view[len(head) : size], target)
        self._expected = b""
        self._got_units += 1
        return True

    def _meet_foreign(self, opening: bytes) -> bool:
        length = self._decode(opening).length  # checked before it is allocated
        self._foreign = (opening, bytearray(length + TAG_SIZE))
        return self._pull_foreign(*self._foreign)

    def _pull_foreign(self, opening: bytes, rest: bytearray) -> bool:
        """Another opening than ours: believe it only when its frame proves genuine."""
        if self._fill(memoryview(rest)):
            length = len(rest) - TAG_SIZE
            self._open(opening, memoryview(rest), memoryview(bytearray(length)))
            self._disagree(opening)
        return False

    def _open(self, head: bytes, sealed: memoryview, target: memoryview) -> None:
        try:
            self._opener.open_into(head, sealed, target)
        except MalformedFrame as error:
            raise Broken(self.peer, error) from None
