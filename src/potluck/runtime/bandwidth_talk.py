"""How two sides of a bandwidth probe talk: words with a number, and blocks that are only counted.

Each word is one byte and a number of eight; a block is followed by so many bytes, which are read
and dropped.  On a sealed stream all of it is encrypted and authenticated, as real traffic is.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from potluck.errors import MalformedFrame, PeerLost, Timeout
from potluck.runtime.rpc_wire import make_wire

if TYPE_CHECKING:
    from potluck.backend.streams import PeerStream
    from potluck.net.transport import Poller

__all__ = ["BLOCK", "Talk", "Word"]

BLOCK = 1 << 16
"""Bytes of a block."""

_HEAD = struct.Struct("<BQ")
_KEY = 0  # of the only stream in the poller
_READS = 8  # before something else has its turn
_LOOK_EVERY = 0.01  # seconds: how long it takes at most to notice that one is needed elsewhere
_GRAIN = 0.002  # seconds; what comes within is one arrival: packets come in bundles of 64 KiB
_MOST_WAITING = 4096  # words that nobody has listened to


class Word(IntEnum):
    """What can be said."""

    BLOCK = 1
    """So many bytes follow."""
    ARRIVED = 2
    """So many bytes of blocks have come so far."""
    END = 3
    """No more blocks; 0 if it was broken off."""
    RATE = 4
    """Bytes per second at which they came."""
    STOP = 5
    """I am needed elsewhere."""


_KNOWN = frozenset(int(word) for word in Word)


class Talk:
    """One end of the conversation, on the thread that measures."""

    def __init__(self, opened: PeerStream, poller: Poller, patience: float) -> None:
        self._wire = make_wire(opened)
        self._stream = opened.stream
        self._poller = poller
        self._patience = patience
        self._deadline = time.monotonic() + patience
        self._buffer = memoryview(bytearray(4 * BLOCK))
        self._head = b""  # the beginning of a word that has not come whole
        self._skip = 0  # bytes of a block that are still to come
        self._words: deque[tuple[Word, int]] = deque()
        self._bundle = float("-inf")  # when the first of the last arrival came
        self._ended = False
        self.received = 0
        """Bytes of blocks that have come."""
        self.arrivals: list[tuple[float, int]] = []
        """Moments, and what had been received by then."""
        poller.register(opened.stream, _KEY)

    def end(self) -> None:
        """Leave the stream to whoever closes it."""
        self._poller.unregister(self._stream)

    def say(self, word: Word, value: int = 0, payload: bytes = b"") -> None:
        """Send a word, after what was sent before."""
        self.finish()
        try:
            self._wire.push([_HEAD.pack(word, value), payload])
        except OSError as error:
            self._lost(error)

    def finish(self) -> None:
        """Return when everything said is on its way."""
        while not self._flush():
            self._poller.want_write(self._stream, _KEY, True)
            self._sleep()
            self._poller.want_write(self._stream, _KEY, False)

    def _flush(self) -> bool:
        try:
            return self._wire.flush()
        except OSError as error:
            self._lost(error)

    def heard(self) -> Iterator[tuple[Word, int]]:
        """What was said to us, one after the other; what is not taken stays for the next time."""
        while self._words:
            yield self._words.popleft()

    def wait(self) -> None:
        """Sleep until something comes, but not for long."""
        if not self._words:
            self._sleep()

    def _sleep(self) -> None:
        if self._ended:
            self._lost(None)
        if time.monotonic() >= self._deadline:
            raise Timeout(
                f"{self._stream.peer_name} took no part in measuring the link "
                f"for {self._patience:g} s",
                seconds=self._patience,
            )
        if not self._wire.has_more:
            self._poller.wait(_LOOK_EVERY)
        self.look()

    def look(self) -> None:
        """Take in what has come."""
        for _ in range(_READS):
            try:
                count = self._wire.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(error)
            if not count:
                self._ended = True  # what was said before is still to be heard
                return
            self._take(self._buffer[:count])

    def _take(self, data: memoryview) -> None:
        while data:
            if self._skip:
                count = min(self._skip, len(data))
                self._skip -= count
                self.received += count
                self._note()
                data = data[count:]
                continue
            missing = _HEAD.size - len(self._head)
            self._head += bytes(data[:missing])
            data = data[missing:]
            if len(self._head) == _HEAD.size:
                self._understand(*_HEAD.unpack(self._head))
                self._head = b""

    def _note(self) -> None:
        now = time.monotonic()
        if len(self.arrivals) > 1 and now - self._bundle < _GRAIN:
            self.arrivals[-1] = (now, self.received)
        else:
            self._bundle = now
            self.arrivals.append((now, self.received))

    def _understand(self, word: int, value: int) -> None:
        if word == Word.BLOCK:
            if value > BLOCK:
                self.refuse(f"a block of {value} bytes")
            self._skip = value
        elif word in _KNOWN and value < 1 << 63 and len(self._words) < _MOST_WAITING:
            self._words.append((Word(word), value))
        else:
            self.refuse(f"word {word} with {value}")

    def refuse(self, what: str) -> NoReturn:
        """The peer does not keep to the protocol."""
        raise MalformedFrame(
            f"{self._stream.peer_name} does not measure the link as agreed: {what}",
            hint="Are both machines on the same version of Potluck?",
        )

    def _lost(self, error: OSError | None) -> NoReturn:
        raise PeerLost(
            f"{self._stream.peer_name} went away while the link was measured",
            cause=str(error) if error else "it closed the connection",
        ) from error
