"""One connection between two agents, from its opening to its end.

Its ``lock`` guards everything that is sent and counted; ``reading`` is held by the thread that
reads, which is the agent's own or one that waits for an answer on this connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from potluck.backend.spin import Spin
from potluck.core.calls import Window, milliseconds
from potluck.core.calls_assembly import Assembly
from potluck.core.calls_encoding import RpcRequest, request_head
from potluck.core.calls_errors import RpcInvalidMessage
from potluck.core.calls_frames import SHORT, FrameKind, Hello, Mark, pack_frame, short_request
from potluck.core.calls_outbox import Outbox
from potluck.errors import MalformedFrame
from potluck.runtime.rpc_answering import Answering
from potluck.runtime.rpc_calls import Incoming, RpcFuture
from potluck.runtime.rpc_reader import Reader
from potluck.runtime.rpc_values import aligned_memory

if TYPE_CHECKING:
    from potluck.core.calls_frames import Frame
    from potluck.net.transport import Buffer, Poller
    from potluck.runtime.rpc_wire import Wire

__all__ = ["BROKEN", "ENDED", "Connection", "Left", "in_words"]

TURN = 1 << 20
"""Bytes read from one peer, or sent to it, before others get a turn, about."""


ENDED = "its process has ended, or its agent was closed"


class Left(Exception):
    """The other agent has closed, in good order."""


class Connection(Answering):
    """Frames to and from one rank."""

    def __init__(
        self,
        ranks: tuple[int, int],
        wire: Wire,
        hello: Hello,
        lock: threading.Lock,
        deliver: Callable[[Connection, Frame, bytes | memoryview], None],
    ) -> None:
        self._here, self.rank = ranks
        self.wire = wire
        self.lock = lock
        self.reading = threading.RLock()  # which knows its owner, whatever interrupts that
        self.is_open = True
        self.is_reading = False  # in the middle of it
        self.allowance: Hello | None = None  # what the other side allows; None before it says so
        self.greeted_at = math.inf
        self.is_early = True
        """Whether the other agent is not known yet, or is of an older generation than ours."""
        self.sent: dict[int, RpcFuture[Any] | int] = {}
        """Calls without an answer; of one that nobody waits for any more, its size."""
        self.window = Window(1, 1)
        self.received: dict[int, Incoming] = {}
        """Calls of the other side that we have not answered."""
        self._hello = hello  # what we allow the other side
        self._has_begun = False
        self._deliver = deliver
        self._admitted = Window(hello.calls, hello.octets)
        self._outbox = Outbox()
        self._assembly = Assembly(hello.octets, aligned_memory, least=SHORT + 1)
        self._reader = Reader(wire, self._assembly, hello.max_message)
        self._unwanted: set[int] = set()  # requests in pieces that nobody waits for any more
        self._poller: Poller | None = None
        self.direct: Poller | None = None
        self.spin = Spin()
        self._wants_write = False
        self._is_sending = False
        self._earliest = math.inf  # none of the calls received has a deadline before this

    # -- opening and ending ----------------------------------------------------------------------

    def begin(self, poller: Poller, direct: Poller | None) -> None:
        """Be watched by ``poller``, and say hello; ``direct`` is for those who wait for answers."""
        self._poller = poller
        poller.register(self.wire.stream, self.rank)
        hello = self._hello.pack()
        with self.lock:
            self._has_begun = True
            self._send_short(pack_frame(FrameKind.HELLO, 0, len(hello)) + hello)
        if direct is not None:
            direct.register(self.wire.stream, self.rank)
        self.direct = direct  # last: who reads may send, and nothing goes before the hello

    def greeted(self, data: bytes | memoryview) -> None:
        """The other side has said what it allows."""
        hello = Hello.unpack(data)
        if self.allowance is not None:
            raise RpcInvalidMessage("a second hello")
        self.window = Window(hello.calls, hello.octets)
        self._outbox.allow(hello.octets)
        self.allowance = hello
        self.is_early = hello.generation < self._hello.generation
        self.greeted_at = time.monotonic()

    def say_goodbye(self) -> None:
        """Let the other side know that this is the end, if it knows that we are here."""
        with self.lock:
            if self._has_begun:
                self._send_short(pack_frame(FrameKind.GOODBYE, 0, 0))

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._is_sending and self.wire.is_idle and self._outbox.is_empty

    def end(self) -> tuple[list[RpcFuture[Any]], list[Incoming]]:
        """Of no more use; the calls that will get no answer, and those that nobody waits for.

        The lock is held, so the caller cancels the latter, later: each may wait for a call of its
        own, perhaps of this very peer.
        """
        self.is_open = False
        if self.direct is not None:
            self.direct.wake()
        calls = [call for call in self.sent.values() if isinstance(call, RpcFuture)]
        self.sent.clear()
        orphans = list(self.received.values())
        self.received.clear()
        return calls, orphans

    def close(self, linger: float = 0.0) -> None:
        """Release what it holds, when no thread reads any more."""
        with self.reading:
            while self._is_sending:  # for as long as a piece takes
                time.sleep(0.0005)
            if self._poller is not None:
                self._poller.unregister(self.wire.stream)
            if self.direct is not None:
                self.direct.close()
            if linger:
                self.wire.stream.finish(time.monotonic() + linger)
            else:
                self.wire.stream.close()

    # -- out: all of this with the lock held -----------------------------------------------------

    def request(self, call: RpcFuture[Any]) -> None:
        """Send a call; of a long one that is left to :meth:`flush`."""
        self.sent[call.number] = call
        self.window.add(call.size)
        name = call.name.encode()
        patience = milliseconds(call.deadline - time.monotonic())
        if call.size <= SHORT:
            (payload,) = call.parts
            self._send_short(short_request(call.number, name, payload, call.marks, patience))
        else:
            head = request_head(call.number, name, sum(map(len, call.parts)))
            parts = [memoryview(head), *(memoryview(part) for part in call.parts)]
            self._outbox.add_long(
                FrameKind.REQUEST, call.number, parts, marks=call.marks, patience=patience
            )

    def withdraw(self, call: RpcFuture[Any]) -> None:
        """Nobody waits for a call any more: the other side will hear it, and answers all the same.

        What has not been sent of it is taken back, for its memory is the caller's again.
        """
        self.sent[call.number] = call.size
        if self._outbox.withdraw(FrameKind.REQUEST, call.number):
            self.window.remove(call.size)
            del self.sent[call.number]
        else:
            self._send_short(pack_frame(FrameKind.CANCEL, call.number, 0))

    def _send_short(self, frame: bytes) -> None:
        if not self._is_sending and self.wire.is_idle and self._outbox.is_empty:
            try:
                if self.wire.push((frame,)):
                    return  # the usual way, and the shortest
            except OSError:
                pass  # reading will find out, and say so
        else:
            self._outbox.add_short(frame)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now, for one turn, and have the rest sent when there is room.

        The lock is free while a piece of a long message leaves, so this comes last where it is
        held: a thread with a short message adds that, and it goes before the next piece.
        """
        if self._is_sending:
            return  # that thread sends this too
        self._is_sending = True
        outbox, left = self._outbox, TURN
        wants = False
        try:
            is_idle = self.wire.is_idle or self._push(None)
            while is_idle and left > 0 and self.is_open and (buffers := outbox.take()):
                size = sum(map(len, buffers))
                left -= size
                is_idle = self.wire.push(buffers) if size <= SHORT else self._push(buffers)
            wants = not (is_idle and outbox.is_empty)
        except OSError:
            pass  # reading will find out, and say so
        finally:
            self._is_sending = False
        if wants is not self._wants_write and self._poller is not None and self.is_open:
            self._wants_write = wants
            self._poller.want_write(self.wire.stream, self.rank, wants)

    def _push(self, buffers: Sequence[Buffer] | None) -> bool:
        """Send this, or what is left, without the lock; whether all has left."""
        self.lock.release()
        try:
            return self.wire.flush() if buffers is None else self.wire.push(buffers)
        finally:
            self.lock.acquire()

    @property
    def is_congested(self) -> bool:
        """Whether so much waits to be sent that there shall be no more answers."""
        return self.is_open and self._outbox.owed > self._hello.octets

    # -- in ----------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read for one turn; whether more may be here.  ``reading`` is held."""
        count = 0
        self.is_reading = True
        try:
            while count < TURN:
                got = self._reader.read(self._on_message)
                if not got:
                    raise ConnectionResetError(ENDED)
                if not self._reader.is_full:
                    break  # that was all; if not, the poller will say so
                count += got
        except BlockingIOError:
            self.is_reading = False
            return False
        self.is_reading = False
        return self.wire.has_more

    def read_all(self) -> bool:
        """Read everything that is here; whether that was anything.  ``reading`` is held."""
        before = self._reader.count
        while self.read():
            pass
        return self._reader.count != before

    def _on_message(self, frame: Frame, data: bytes | memoryview) -> None:
        if self.allowance is None and frame.kind is not FrameKind.HELLO:
            raise RpcInvalidMessage("the other side began without a hello")
        self._deliver(self, frame, data)

    def overdue(self, now: float) -> list[Incoming]:
        """Calls of the other side that were to be answered by now."""
        if now < self._earliest or self.is_congested:
            return []
        with self.lock:
            calls = list(self.received.values())
        self._earliest = min((c.deadline for c in calls if c.deadline > now), default=math.inf)
        return [call for call in calls if call.deadline <= now]

    def cancelled(self, number: int) -> Incoming | None:
        """Nobody waits for a call any more: the call, or None while it is not here, or no more."""
        call = self.received.get(number)
        if call is None and self._assembly.has(FrameKind.REQUEST, number):
            self._unwanted.add(number)  # its memory is the caller's again: what comes may be torn
        return call

    def accept(self, frame: Frame, data: bytes | memoryview) -> Incoming:
        """A request, if it keeps to what we allow."""
        request = RpcRequest.deserialize(data)
        if request.request_id != frame.number:
            raise RpcInvalidMessage("a request with two numbers")
        marks = frame.marks & (Mark.TYPED | Mark.NESTED)
        call = Incoming(
            self, frame.number, request.function_name, request.payload, frame.patience, marks
        )
        call.size = len(data)
        with self.lock:
            if call.number in self.received:
                raise RpcInvalidMessage(f"call {call.number} was made twice")
            if not self._admitted.admits(call.size):
                raise RpcInvalidMessage("more calls are unanswered than are allowed")
            self._admitted.add(call.size)
            self.received[call.number] = call
            self._earliest = min(self._earliest, call.deadline)
        if self._unwanted and call.number in self._unwanted:
            self._unwanted.discard(call.number)
            call.cancelled = True
        return call

    def watch_reading(self, *, wanted: bool) -> None:
        """Let the agent's own thread read, or not."""
        with self.lock:
            if self.is_open and self._poller is not None:
                self._poller.want_read(self.wire.stream, self.rank, wanted)


BROKEN = (OSError, MalformedFrame, Left)
"""What reading raises when a connection is over."""


def in_words(reason: Exception | str) -> str:
    """Why a connection is over, for people."""
    if isinstance(reason, Left):
        return "it has closed its agent"
    if isinstance(reason, ConnectionError) and not reason.errno:
        return str(reason)
    if isinstance(reason, OSError):
        return f"its connection broke ({reason.strerror or reason})"
    return str(reason)
