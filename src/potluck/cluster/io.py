"""The I/O thread: one for all control lanes of a process.

It moves bytes and decides nothing.  Messages and ends of lanes go to an :class:`Audience`, which
must return at once.  A peer that does not read fills its own outbox and nobody else's; one that
sends faster than anybody looks is not read for a while.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from potluck import _process
from potluck.errors import UNREACHABLE, ChannelClosed, DistributedError, MalformedFrame
from potluck.logs import get_logger
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, Kind, decode, encode
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tcp import prepare
from potluck.net.tls import TlsChannel

# --------------------------------------------------------------------------------------------------
# One control lane: frames in and out of TLS, without ever waiting.
#
# Only the I/O thread touches the socket and TLS.  What is to be sent is put into a bounded outbox
# by any thread; what does not fit is dropped and counted, for a peer that has stopped must not hold
# up anybody, and whoever sends treats it like a message that was lost on the way.

MAX_OUTBOX = 1 << 20
"""Bytes that wait for a peer before more are dropped: minutes of heartbeats."""

BATCH = 1 << 16
"""Bytes encrypted, and bytes read, at a time."""

MAX_UNREAD = 512
"""Messages of a peer that nobody has looked at yet, before we read no more of it."""


CLOSED = "it closed the connection"
"""What is seen of the end of a process that leaves in good order."""


class Frame(NamedTuple):
    """A message as it came in."""

    tag: int
    payload: bytes


class LaneEnded(Exception):
    """Nothing more will come; the text says what was seen."""


class Lane:
    """A connection that is open for control messages; ``name`` says where it leads."""

    def __init__(self, sock: OpeningSocket, name: str) -> None:
        self.name = name
        self.dropped = 0
        """Messages that did not fit into the outbox."""
        self._channel: TlsChannel | None = None
        first = b""
        if isinstance(sock, SecureSocket):
            self.sock, self._channel, first = sock.hand_over()
        else:
            self.sock = sock
        self._incoming = bytearray(first)
        self._outbox: deque[bytes] = deque()
        self._octets = 0
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()
        self.handed_on = 0  # messages; counted by the I/O thread
        self.looked_at = 0  # of these; counted by whoever hears them
        self.is_deaf = False  # we read no more until somebody has
        self.wants_write = False
        self.closing_at: float | None = None  # when it is closed, sent or not
        self.is_retired = False  # we send on it no more; it stays open while the peer does
        self.handed_on_before = 0  # messages, when it was last looked at for being used
        self.patience = 0.0  # seconds for which it is kept without a message, if it is retired
        self.is_over = False
        _process.track(self.sock)
        prepare(self.sock)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    # -- any thread ----------------------------------------------------------------------------

    def put(self, payload: bytes, tag: int) -> bool:
        """Queue a message; False if there is no room for it, or the lane is over."""
        if len(payload) > MAX_CONTROL:
            msg = f"A control message of {len(payload)} bytes; {MAX_CONTROL} are possible"
            raise ValueError(msg)
        frame = encode(Kind.CONTROL, tag=tag, length=len(payload)) + payload
        with self._lock:
            if self.is_over or self.closing_at is not None:
                return False
            if self._octets + len(frame) > MAX_OUTBOX:
                self.dropped += 1
                return False
            self._outbox.append(frame)
            self._octets += len(frame)
        return True

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outbox and not self._unsent

    @property
    def unread(self) -> int:
        """Messages that nobody has looked at yet."""
        return self.handed_on - self.looked_at

    # -- the I/O thread ------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send what can be sent now; True when nothing is left.  Raises ``OSError``."""
        while True:
            if not self._unsent:
                plain = self._take()
                if not plain:
                    return True
                self._unsent = memoryview(self._seal(plain))
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]

    def _take(self) -> bytes:
        taken: list[bytes] = []
        size = 0
        with self._lock:
            while self._outbox and size < BATCH:
                taken.append(self._outbox.popleft())
                size += len(taken[-1])
            self._octets -= size
        return b"".join(taken)

    def _seal(self, plain: bytes) -> bytes:
        if self._channel is None:
            return plain
        self._channel.write(plain)
        return self._channel.outgoing()

    def first(self) -> list[Frame]:
        """What came with the opening; raises like :meth:`read`."""
        return list(self._frames())

    def read(self) -> list[Frame]:
        """What has come in; raises :class:`LaneEnded`, ``OSError`` or ``MalformedFrame``."""
        try:
            data = self.sock.recv(BATCH)
        except BlockingIOError:
            return []
        if not data:
            raise LaneEnded("its process ended (it crashed or was killed)")
        if self._channel is None:
            self._incoming += data
        else:
            self._channel.receive(data)
            self._incoming += self._channel.read()
        found = list(self._frames())
        if self._channel is not None and self._channel.closed_by_peer and not found:
            raise LaneEnded(CLOSED)
        return found

    def _frames(self) -> Iterator[Frame]:
        data = self._incoming
        start = 0
        while len(data) - start >= HEADER_SIZE:
            header = decode(data, start, max_eager=0)  # lengths are checked there
            if header.kind is not Kind.CONTROL:
                raise MalformedFrame(f"A {header.kind.name} frame on a control lane")
            end = start + HEADER_SIZE + header.length
            if len(data) < end:
                break
            yield Frame(header.tag, bytes(data[start + HEADER_SIZE : end]))
            start = end
        del data[:start]

    def close(self) -> None:
        """Close the socket, saying so in TLS if that is possible at once."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            self._outbox.clear()
        if self._channel is not None and not self._unsent:
            with contextlib.suppress(OSError, DistributedError, ChannelClosed):
                self._channel.unwrap()
                self.sock.send(self._channel.outgoing())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()


# --------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

LINGER = 1.0
"""Seconds for the last words of a lane that we close."""

RETIRED = 3.0
"""Seconds without a message after which a lane that we do not use is closed.

Each side chooses between two lanes when it learns of the second one, and they may choose
differently.  So a lane that the other side still uses stays open.
"""


class Audience(Protocol):
    """Who hears what comes in; called on the I/O thread, returns at once."""

    def arrived(self, lane: Lane, frame: Frame) -> None:
        """A message."""

    def ended(self, lane: Lane, cause: str) -> None:
        """A lane is over; ``cause`` is the rest of a sentence about the peer."""

    def silenced(self, reason: str) -> None:
        """The thread itself is over, without having been asked: nothing will come any more."""


class IoThread:
    """Moves the bytes of control lanes until closed."""

    def __init__(self, audience: Audience) -> None:
        self._audience = audience
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
            _process.track(end)
        _process.track(self._selector)
        _process.on_fork(self)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._lanes: set[Lane] = set()
        self._tasks: deque[Callable[[], None]] = deque()
        self._woken = False
        self._stopping = False
        self._until = 0.0
        self._is_foreign = False  # in a forked child, where there is no such thread
        self._thread = threading.Thread(target=self._run, name="potluck-io", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------

    def add(self, lane: Lane) -> None:
        """Move the bytes of a lane from now on."""
        self._ask(lambda: self._begin(lane))

    def send(self, lane: Lane, payload: bytes, tag: int = 0) -> bool:
        """Send a message when the peer reads; False if it was dropped."""
        if not lane.put(payload, tag):
            return False
        self._ask(lambda: self._flush(lane))
        return True

    def looked_at(self, lane: Lane) -> None:
        """Somebody has looked at a message of this lane."""
        lane.looked_at += 1
        if lane.is_deaf and lane.unread < MAX_UNREAD // 2:
            self._ask(lambda: self._listen(lane))

    def drop(self, lane: Lane, linger: float = LINGER) -> None:
        """Close a lane once what is queued has been sent; nobody is told of its end."""
        self._ask(lambda: self._part(lane, time.monotonic() + linger))

    def retire(self, lane: Lane, after: float = RETIRED) -> None:
        """Send on a lane no more, and close it when nothing has come on it for some time.

        The other side may not know yet that there is a better one, or may use this one for good.
        """
        lane.is_retired, lane.patience = True, after
        self.drop(lane, after)

    def close(self, linger: float = LINGER) -> None:
        """Send what is queued, for so many seconds at most, and close every lane."""
        if not self._stopping:
            self._until = time.monotonic() + linger
            self._stopping = True
            self._wake()
        if not self._is_foreign and threading.current_thread() is not self._thread:
            self._thread.join(linger + LINGER)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, the thread is not here."""
        self._stopping = self._is_foreign = True

    def _ask(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(
                OSError
            ):  # full means that it will wake, closed that it is over
                self._wake_out.send(b"\0")

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "it was closed"
        try:
            while not self._is_done():
                self._round()
        except BaseException as error:
            reason = f"the thread that moves control messages failed: {error!r}"
            if not self._is_foreign:
                logger.exception("The I/O thread failed")
            raise
        finally:
            for lane in list(self._lanes):
                self._remove(lane)
            self._selector.close()
            for end in (self._wake_in, self._wake_out):
                end.close()
            if not self._stopping:
                self._audience.silenced(reason)

    def _is_done(self) -> bool:
        if not self._stopping or self._tasks:
            return False
        return time.monotonic() >= self._until or all(lane.is_flushed for lane in self._lanes)

    def _round(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            elif key.data in self._lanes:
                self._move(key.data, events)
        self._woken = False  # before the tasks: one that is added from now on wakes us again
        while self._tasks:
            self._tasks.popleft()()
        now = time.monotonic()
        for lane in [each for each in self._lanes if each.closing_at is not None]:
            if lane.is_retired and lane.handed_on > lane.handed_on_before:
                lane.handed_on_before, lane.closing_at = lane.handed_on, now + lane.patience
            elif now >= (lane.closing_at or 0.0) or (lane.is_flushed and not lane.is_retired):
                self._end(lane, "it was not used any more")

    def _patience(self) -> float | None:
        moments = [lane.closing_at for lane in self._lanes if lane.closing_at is not None]
        if self._stopping:
            moments.append(self._until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _begin(self, lane: Lane) -> None:
        self._lanes.add(lane)
        self._selector.register(lane, selectors.EVENT_READ, lane)
        self._guarded(lane, lambda: self._hand_on(lane, lane.first()))
        self._flush(lane)

    def _move(self, lane: Lane, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._guarded(lane, lambda: self._hand_on(lane, lane.read()))
        if events & selectors.EVENT_WRITE:
            self._flush(lane)

    def _hand_on(self, lane: Lane, frames: list[Frame]) -> None:
        for frame in frames:
            lane.handed_on += 1
            self._audience.arrived(lane, frame)
        if lane.unread >= MAX_UNREAD and not lane.is_deaf:
            lane.is_deaf = True
            self._watch(lane)
            if lane.unread < MAX_UNREAD // 2:  # all were looked at while we made up our mind
                self._listen(lane)

    def _listen(self, lane: Lane) -> None:
        if lane.is_deaf:
            lane.is_deaf = False
            self._watch(lane)

    def _flush(self, lane: Lane) -> None:
        if lane not in self._lanes:
            return
        self._guarded(lane, lambda: self._note(lane, unsent=not lane.flush()))

    def _note(self, lane: Lane, *, unsent: bool) -> None:
        if lane.wants_write is not unsent:
            lane.wants_write = unsent
            self._watch(lane)

    def _watch(self, lane: Lane) -> None:
        if lane not in self._lanes:
            return
        events = 0 if lane.is_deaf else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if lane.wants_write else 0
        known = lane in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(lane)
        elif known:
            self._selector.modify(lane, events, lane)
        else:
            self._selector.register(lane, events, lane)

    def _guarded(self, lane: Lane, action: Callable[[], None]) -> None:
        """Do something with a lane; what goes wrong with it ends it, and nothing else."""
        if lane not in self._lanes:
            return
        try:
            action()
        except LaneEnded as error:
            self._end(lane, str(error))
        except (OSError, MalformedFrame, DistributedError) as error:
            self._end(lane, _in_words(error))

    def _end(self, lane: Lane, cause: str) -> None:
        told = lane.closing_at is None or lane.is_retired
        self._remove(lane)
        if told:
            self._audience.ended(lane, cause)

    def _part(self, lane: Lane, until: float) -> None:
        if lane in self._lanes and lane.closing_at is None:
            lane.closing_at = until
            self._flush(lane)

    def _remove(self, lane: Lane) -> None:
        self._lanes.discard(lane)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(lane)
        lane.close()


def _in_words(error: Exception) -> str:
    """What became of a peer, as the rest of a sentence about it."""
    if isinstance(error, MalformedFrame):
        return f"it sent what is no valid message ({error})"
    if isinstance(error, ConnectionError) and not isinstance(error, DistributedError):
        return "its process ended (it crashed or was killed)"
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) in UNREACHABLE:
        return "it no longer answers (asleep, switched off or unplugged)"
    return str(error)
