"""Channels: the bytes of operations between this rank and one other, in clear or sealed.

What travels is known to both ends beforehand: in each operation a list of units, of known lengths.
The first of them in either direction follows an *opening*, the header of a frame and a fingerprint,
and because both ends must agree on every bit of it, checking it means comparing bytes.

In clear the units then follow one another with nothing between them.  Sealed, each unit is a frame:
a header, the encrypted bytes and a tag; the opening is the first one's header, so it travels
readable but authenticated.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from potluck.collective.fingerprint import SIZE, Fingerprint
from potluck.collective.program import MARGIN
from potluck.errors import MalformedFrame
from potluck.net import frames
from potluck.net.aead import TAG_SIZE
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, NUMBERS, NUMBERS_AT, FrameType
from potluck.net.records import BufferedStream, PeerEnded
from potluck.net.tcp import SocketStream
from potluck.net.unix_socket import SLOT_SIZE, SLOTS

if TYPE_CHECKING:
    from potluck.collective.program import Slot
    from potluck.net.aead import Decryptor, Encryptor
    from potluck.net.frames import Header
    from potluck.net.transport import Stream
    from potluck.net.unix_socket import SharedMemory


OPENING_SIZE = HEADER_SIZE + SIZE

LONG = 1 << 16
"""Bytes of a unit beyond which it travels in shared memory, where there is any."""

MOST_HELD = SLOTS - 2
"""Slots of a peer that are kept until they are used; what comes then is copied out at once.

So there is always one for the peer to write to, whatever this rank waits for.
"""

TOGETHER = 1 << 14
"""Bytes of a unit up to which it is read in one go with the opening in front of it, and copied."""


class ChannelBroken(Exception):
    """The stream to a peer is of no more use."""

    def __init__(self, peer: int, reason: Exception) -> None:
        super().__init__(peer)
        self.peer = peer
        self.reason = reason


class Disagreement(Exception):
    """The other side is in another operation."""

    def __init__(self, peer: int, operation: int, fingerprint: Fingerprint) -> None:
        super().__init__(peer)
        self.peer = peer
        self.operation = operation
        self.fingerprint = fingerprint


class Channel(BufferedStream):
    """What both kinds share: the state of the two directions."""

    joins = 0
    """Bytes up to which it pays to receive further units together with the next."""

    def __init__(self, peer: int, stream: Stream, first: bytes = b"") -> None:
        super().__init__(stream, first)
        self.peer = peer
        self._opening = b""
        self._read = 0
        self.missing = 1
        """Bytes that the next pull needs to continue, after one that ran out of them."""

    def broken(self, error: OSError) -> Exception:
        """What is raised when the stream is broken."""
        return ChannelBroken(self.peer, error)

    @property
    def credits(self) -> Stream | None:
        """What must be readable before the rest can be sent; None if the stream must have room."""
        return None

    def begin(self, opening: bytes) -> None:
        """A new operation; the last one is over in both directions."""
        raise NotImplementedError

    # -- out -----------------------------------------------------------------------------------

    def push(self, unit: memoryview) -> bool:
        """Send a unit; False if some of it is left for :meth:`flush`."""
        raise NotImplementedError

    def keep(self) -> None:
        """Copy what is left: the caller continues and may change its memory."""
        self._rest = [memoryview(bytes(view)) for view in self._rest]

    # -- in ------------------------------------------------------------------------------------

    def pull(self, target: memoryview, slot: Slot | None = None) -> bool:
        """Continue receiving a unit; True when it is complete, False if more is to come.

        ``slot`` is the one whose front is the target, if there is one.
        """
        raise NotImplementedError

    def _fill(self, view: memoryview) -> bool:
        """Read until a view is full; False if the bytes have not come yet."""
        done, size = self._read, len(view)
        while done < size:
            count = self._take(view[done:] if done else view)
            if not count:
                self._read = done
                self.missing = size - done
                return False
            done += count
        self._read = 0
        return True

    def _take(self, view: memoryview) -> int:
        """Read what is there; 0 if nothing is."""
        receive = self.recv_into if self._first else self.stream.recv_into  # one call less
        try:
            count = receive(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.broken(error) from None
        if count == 0:
            raise ChannelBroken(self.peer, PeerEnded())
        return count

    def _disagree(self, opening: bytes) -> None:
        """Raise what the difference to our own opening means."""
        header = self._decode(opening)
        if header.kind is not FrameType.COLLECTIVE:
            reason = MalformedFrame(
                f"A {header.kind.name} frame came where a collective must begin"
            )
            raise ChannelBroken(self.peer, reason)
        raise Disagreement(
            self.peer, header.operation, Fingerprint.unpack(opening[HEADER_SIZE:OPENING_SIZE])
        )

    def _decode(self, opening: bytes) -> Header:
        try:
            return frames.decode(opening, 0, MAX_PIECE)
        except MalformedFrame as error:
            raise ChannelBroken(self.peer, error) from None


class PlainChannel(Channel):
    """A channel in clear: units leave no trace in it."""

    joins = 4 << 20

    def __init__(self, peer: int, stream: Stream, first: bytes = b"") -> None:
        super().__init__(peer, stream, first)
        self._head = bytearray(OPENING_SIZE + TOGETHER)
        self._head_view = memoryview(self._head)
        self._ahead: tuple[bytes, ...] = ()  # goes out in front of the next unit
        self._has_met = False

    def begin(self, opening: bytes) -> None:
        """A new operation; the last one is over in both directions."""
        self._opening = opening
        self._ahead = (opening,)
        self._has_met = False

    def push(self, unit: memoryview) -> bool:
        """Send a unit, the first behind the opening."""
        ahead, self._ahead = self._ahead, ()
        return self._transmit([*ahead, unit])

    def pull(self, target: memoryview, slot: Slot | None = None) -> bool:  # noqa: ARG002
        """Continue receiving a unit, and the opening before the first."""
        if self._has_met:
            return self._fill(target)
        if len(target) > TOGETHER:
            return self._meet(OPENING_SIZE) and self._fill(target)
        size = OPENING_SIZE + len(target)
        if not self._meet(size):
            return False
        target[:] = self._head_view[OPENING_SIZE:size]
        return True

    def _meet(self, size: int) -> bool:
        """Receive the opening, with what follows up to ``size`` bytes; True if it is there.

        Another operation may be shorter than ours: look at the opening as soon as it is there.
        """
        read = self._read = self._read + self._take(self._head_view[self._read : size])
        if read >= OPENING_SIZE and not self._head.startswith(self._opening):
            self._disagree(bytes(self._head_view[:OPENING_SIZE]))
        if read < size:
            self.missing = size - read
            return False
        self._has_met = True
        self._read = 0
        return True


# --------------------------------------------------------------------------------------------------
# Channels within a machine: long units lie in shared memory, and only their places travel.
#
# Both ends know the length of every unit, so they agree on which ones these are.


class SharedChannel(PlainChannel):
    """A channel in clear, between two processes that share memory."""

    joins = 0

    def __init__(self, peer: int, stream: Stream, shared: SharedMemory, first: bytes = b"") -> None:
        super().__init__(peer, stream, first)
        self._shared = shared
        self._credits = SocketStream(shared.credits, "credits")
        self._free = list(range(SLOTS))
        self._waiting: deque[memoryview] = deque()  # a unit without a free slot, and what follows
        self._place = memoryview(bytearray(1))

    @property
    def credits(self) -> Stream | None:
        """The credits, while a unit waits for a slot."""
        return self._credits if self._waiting else None

    @property
    def is_flushed(self) -> bool:
        """Whether nothing is left to send."""
        return not self._waiting and super().is_flushed

    def push(self, unit: memoryview) -> bool:
        """Put a long unit into a slot, and send its place."""
        if not self._waiting and not LONG < len(unit) <= SLOT_SIZE:
            return super().push(unit)
        self._waiting.append(unit)
        self._use_slots()
        return (not self._rest or self._transmit([])) and not self._waiting

    def flush(self) -> bool:
        """Send what is left; True if nothing is."""
        self._use_slots()
        return super().flush() and not self._waiting

    def _use_slots(self) -> None:
        """Move units from those that wait to those that can be sent, as far as there are slots."""
        while self._waiting:
            unit = self._waiting[0]
            if LONG < len(unit) <= SLOT_SIZE:
                if not self._free and not self._take_back():
                    return
                place = self._free.pop()
                self._shared.mine[place][: len(unit)] = unit
                unit = memoryview(bytes((place,)))
            self._waiting.popleft()
            self._rest += (*self._ahead, unit)
            self._ahead = ()

    def keep(self) -> None:
        """Make what is left our own."""
        super().keep()
        self._waiting = deque(memoryview(bytes(unit)) for unit in self._waiting)

    def _take_back(self) -> bool:
        """See which slots the peer has given back; False if none."""
        try:
            places = self._shared.take_back()
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelBroken(self.peer, error) from None
        if not places:
            raise ChannelBroken(self.peer, PeerEnded())
        for place in places:
            if place >= SLOTS or place in self._free:
                raise ChannelBroken(
                    self.peer, MalformedFrame(f"Slot {place} was returned but not in use")
                )
            self._free.append(place)
        return True

    def pull(self, target: memoryview, slot: Slot | None = None) -> bool:
        """Continue receiving a unit; a long one stays where it is, if a slot can stand for it."""
        size = len(target)
        if not LONG < size <= SLOT_SIZE:
            return super().pull(target, slot)
        if not self._has_met and not self._meet(OPENING_SIZE):
            return False
        if not self._fill(self._place):
            return False
        place, held = self._place[0], self._shared.held
        if place >= SLOTS or place in held:
            raise ChannelBroken(self.peer, MalformedFrame(f"A unit cannot be in slot {place}"))
        if slot is not None and len(held) < MOST_HELD:
            held.add(place)
            theirs = np.frombuffer(self._shared.theirs[place], np.uint8)
            slot.borrow(theirs, partial(self._shared.give_back, place))
        else:
            target[:] = self._shared.theirs[place][:size]
            self._shared.give_back(place)
        return True


# --------------------------------------------------------------------------------------------------
# Sealed channels: every unit is a frame, encrypted and authenticated.
#
# A frame is a header, the encrypted bytes and a tag; the opening of an operation is the first
# frame's header.  So it travels readable, and is believed only when its frame proves genuine.


class EncryptedChannel(Channel):
    """A channel on which every unit is encrypted and authenticated."""

    def __init__(
        self, peer: int, stream: Stream, seal: tuple[Encryptor, Decryptor], first: bytes = b""
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
        self._opening = opening
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
            out = memoryview(self._out)
        return self._transmit([self._sealer.seal_record(head, unit, out)])

    def keep(self) -> None:
        """What is left is sealed, so our own already; but its place must not be used again."""
        if self._rest:
            self._out = bytearray()

    def pull(self, target: memoryview, slot: Slot | None = None) -> bool:
        """Continue receiving a unit; decrypt it when complete, in place if it is in a slot."""
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
            raise ChannelBroken(
                self.peer, MalformedFrame("A frame came that was not expected here")
            )
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
            raise ChannelBroken(self.peer, error) from None
