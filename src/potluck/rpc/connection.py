"""The connection between two agents: opening it, frames in both directions, and its end.

Its ``lock`` guards everything that is sent and counted.  The thread that reads holds ``reading``:
that is the agent's own thread, or one that waits for an answer on this connection.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from potluck.errors import ChannelClosed, DistributedError, MalformedFrame, describe
from potluck.net.transport import Spin
from potluck.rpc.calls import IncomingCall, Replier, RpcFuture
from potluck.rpc.errors import RpcInvalidMessage
from potluck.rpc.protocol import (
    HEADER_SIZE,
    RESPONSE_OVERHEAD,
    SHORT,
    Assembly,
    Budget,
    CallFailure,
    CallOutbox,
    FrameFlag,
    FrameKind,
    RankAddress,
    RpcFrame,
    RpcHello,
    RpcRequest,
    milliseconds,
    pack_frame,
    read_frame,
    reply_with,
    request_head,
    response_head,
    short_request,
    short_response,
)
from potluck.rpc.values import aligned_memory

if TYPE_CHECKING:
    from potluck.backend.base import Backend, PeerStream
    from potluck.net.records import BufferedStream
    from potluck.net.transport import Buffer, Poller
    from potluck.rpc.protocol import PartialMessage


BUFFER = 64 << 10
"""Bytes read at once, except those of a long message."""

GLANCE = 4 << 10
"""Bytes read at once between two pieces: what is read of the next piece has to be copied."""

PART = FrameFlag.MORE | FrameFlag.LATER

Deliver: TypeAlias = Callable[[RpcFrame, "bytes | memoryview"], None]
"""Receives a message: its (first) header, and its bytes."""


class FrameAssembler:
    """Reads frames, and delivers messages; long ones are read straight into their own memory."""

    def __init__(self, wire: BufferedStream, assembly: Assembly, limit: int) -> None:
        self._wire = wire
        self._assembly = assembly
        self._limit = limit
        self._buffer = memoryview(bytearray(BUFFER))
        self._start = self._end = 0
        self._whole: PartialMessage | None = None  # the message whose piece is being read
        self._missing = 0  # bytes of that piece
        self.count = 0
        """The number of reads that returned bytes."""
        self.is_full = False
        """Whether the last read filled its buffer, so that more may be available."""

    def read(self, deliver: Deliver) -> int:
        """Read once and deliver complete messages; return the bytes read, 0 at the end.

        Raises ``BlockingIOError`` if nothing is available.
        """
        if self._missing:
            missing = self._missing
            count = self._read_piece()
            self.is_full = count == missing
            self.count += 1
            if not self._missing:
                self._end_piece(deliver)
            return count
        if self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = self._end + GLANCE if len(self._assembly) else BUFFER
        count = self._wire.recv_into(self._buffer[self._end : room])
        self._end += count
        self.is_full = self._end >= room
        self.count += 1
        self._cut(deliver)
        return count

    def _read_piece(self) -> int:
        whole = self._whole
        assert whole is not None
        count = self._wire.recv_into(whole.view[whole.filled : whole.filled + self._missing])
        whole.filled += count
        self._missing -= count
        return count

    def _cut(self, deliver: Deliver) -> None:
        buffer, end = self._buffer, self._end
        while end - self._start >= HEADER_SIZE:
            frame = read_frame(buffer, self._start, self._limit)
            body = self._start + HEADER_SIZE
            if frame.length > SHORT or frame.marks & PART:
                if not self._begin_piece(frame, body, deliver):
                    return
                continue
            stop = body + frame.length
            if stop > end:
                return
            self._start = stop
            deliver(frame, bytes(buffer[body:stop]))

    def _begin_piece(self, frame: RpcFrame, body: int, deliver: Deliver) -> bool:
        """Copy what was read of a piece; whether that is all of it."""
        whole = self._whole = self._assembly.accept(frame)
        count = min(frame.length, self._end - body)
        whole.view[whole.filled : whole.filled + count] = self._buffer[body : body + count]
        whole.filled += count
        self._missing = frame.length - count
        self._start = body + count
        if self._missing:
            return False
        self._end_piece(deliver)
        return True

    def _end_piece(self, deliver: Deliver) -> None:
        whole, self._whole = self._whole, None
        assert whole is not None
        if whole.filled == whole.first.total:
            self._assembly.finish(whole)
            deliver(whole.first, whole.view)


TURN = 1 << 20
"""Bytes read from one peer, or sent to it, before others get a turn, approximately."""


ENDED = "its process has ended, or its agent was closed"


class AgentClosed(Exception):
    """The other agent has closed, and said so."""


class Connection(Replier):
    """Frames to and from one rank."""

    def __init__(
        self,
        ranks: tuple[int, int],
        wire: BufferedStream,
        hello: RpcHello,
        lock: threading.Lock,
        deliver: Callable[[Connection, RpcFrame, bytes | memoryview], None],
    ) -> None:
        self._here, self.rank = ranks
        self.wire = wire
        self.lock = lock
        self.reading = threading.RLock()  # an RLock, which knows its owner after Ctrl-C
        self.is_open = True
        self.is_reading = False  # in the middle of it
        self.allowance: RpcHello | None = (
            None  # the limits of the other side; None before its hello
        )
        self.greeted_at = math.inf
        self.is_early = True
        """Whether the other agent is not known yet, or has an older generation than ours."""
        self.sent: dict[int, RpcFuture[Any] | int] = {}
        """Calls without an answer; for a cancelled call, its size."""
        self.window = Budget(1, messages=1)
        self.received: dict[int, IncomingCall] = {}
        """Calls of the other side that we have not answered."""
        self._hello = hello  # the limits that we set the other side
        self._has_begun = False
        self._deliver = deliver
        self._admitted = Budget(hello.window, hello.calls)
        self._outbox = CallOutbox()
        self._assembly = Assembly(hello.window, aligned_memory, least=SHORT + 1)
        self._reader = FrameAssembler(wire, self._assembly, hello.max_message)
        self._unwanted: set[int] = set()  # cancelled requests of which pieces are missing
        self._poller: Poller | None = None
        self.direct: Poller | None = None
        self.spin = Spin()
        self._wants_write = False
        self._is_sending = False
        self._earliest = math.inf  # no received call has an earlier deadline

    # -- opening and ending ----------------------------------------------------------------------

    def begin(self, poller: Poller, direct: Poller | None) -> None:
        """Register with ``poller``, and send the hello; callers wait with ``direct``."""
        self._poller = poller
        poller.register(self.wire.stream, self.rank)
        hello = self._hello.pack()
        with self.lock:
            self._has_begun = True
            self._send_short(pack_frame(FrameKind.HELLO, 0, len(hello)) + hello)
        if direct is not None:
            direct.register(self.wire.stream, self.rank)
        self.direct = direct  # last: a reader may send, and the hello must be first

    def greeted(self, data: bytes | memoryview) -> None:
        """Read the hello of the other side."""
        hello = RpcHello.unpack(data)
        if self.allowance is not None:
            raise RpcInvalidMessage("a second hello")
        self.window = Budget(hello.window, hello.calls)
        self._outbox.allow(hello.window)
        self.allowance = hello
        self.is_early = hello.generation < self._hello.generation
        self.greeted_at = time.monotonic()

    def send_goodbye(self) -> None:
        """Tell the other side that this agent closes, if the hello was sent."""
        with self.lock:
            if self._has_begun:
                self._send_short(pack_frame(FrameKind.GOODBYE, 0, 0))

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._is_sending and self.wire.is_flushed and self._outbox.is_empty

    def end(self) -> tuple[list[RpcFuture[Any]], list[IncomingCall]]:
        """Mark the connection as ended; return outgoing and incoming calls without an answer.

        The lock is held, so the caller cancels the incoming ones later: each may wait for a call of
        its own, perhaps to this peer.
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
        """Close the stream, after the last reader."""
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
        """Send a call; a long one is left to :meth:`flush`."""
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
        """Cancel a call: remove it if it has not been sent, or tell the other side.

        The caller may change its memory afterwards.
        """
        self.sent[call.number] = call.size
        if self._outbox.withdraw(FrameKind.REQUEST, call.number):
            self.window.remove(call.size)
            del self.sent[call.number]
        else:
            self._send_short(pack_frame(FrameKind.CANCEL, call.number, 0))

    def _send_short(self, frame: bytes) -> None:
        if not self._is_sending and self.wire.is_flushed and self._outbox.is_empty:
            try:
                if self.wire.send((frame,)):
                    return  # the usual case, and the fastest
            except OSError:
                pass  # the reader finds out, and reports it
        else:
            self._outbox.add_short(frame)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent now, for one turn; the poller reports when more can be sent.

        The lock is free while a piece of a long message is sent, so callers that hold it call this
        last.  A thread that adds a short message meanwhile has it sent before the next piece.
        """
        if self._is_sending:
            return  # that thread sends this too
        self._is_sending = True
        outbox, left = self._outbox, TURN
        wants = False
        try:
            is_idle = self.wire.is_flushed or self._push(None)
            while is_idle and left > 0 and self.is_open and (buffers := outbox.take()):
                size = sum(map(len, buffers))
                left -= size
                is_idle = self.wire.send(buffers) if size <= SHORT else self._push(buffers)
            wants = not (is_idle and outbox.is_empty)
        except OSError:
            pass  # the reader finds out, and reports it
        finally:
            self._is_sending = False
        if wants is not self._wants_write and self._poller is not None and self.is_open:
            self._wants_write = wants
            self._poller.want_write(self.wire.stream, self.rank, wants)

    def _push(self, buffers: Sequence[Buffer] | None) -> bool:
        """Send buffers, or what is left, without the lock; whether all was sent."""
        self.lock.release()
        try:
            return self.wire.flush() if buffers is None else self.wire.send(buffers)
        finally:
            self.lock.acquire()

    @property
    def is_congested(self) -> bool:
        """Whether too many bytes wait to be sent to make more answers."""
        return self.is_open and self._outbox.owed > self._hello.window

    # -- answers -----------------------------------------------------------------------------------

    def answer(self, call: IncomingCall, parts: list[Any], *, cork: bool = False) -> None:
        """Send a value."""
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        assert self.allowance is not None
        limit = self.allowance.max_message
        total = RESPONSE_OVERHEAD + size
        if total > limit:
            self.refuse(call, CallFailure("large", size=total, limit=limit), cork=cork)
        elif total <= SHORT:
            payload = parts[0] if len(parts) == 1 else b"".join(parts)
            self._reply(call, short_response(call.number, payload, call.marks), cork=cork)
        else:
            head = response_head(call.number, size)
            views = [memoryview(head), *(memoryview(part) for part in parts)]
            with self.lock:
                if self._take(call):
                    self._outbox.add_long(FrameKind.RESPONSE, call.number, views, marks=call.marks)
                    self.flush()

    def refuse(self, call: IncomingCall, failure: CallFailure, *, cork: bool = False) -> None:
        """Send the reason why there is no value."""
        limit = None if self.allowance is None else self.allowance.max_message
        body = reply_with(call.number, failure, self._here, limit)
        if len(body) <= SHORT:
            frame = pack_frame(FrameKind.RESPONSE, call.number, len(body))
            self._reply(call, frame + body, cork=cork)
            return
        with self.lock:
            if self._take(call):
                self._outbox.add_long(FrameKind.RESPONSE, call.number, [memoryview(body)])
                self.flush()

    def _reply(self, call: IncomingCall, frame: bytes, *, cork: bool) -> None:
        with self.lock:
            if not self._take(call):
                return
            if cork:
                self._outbox.add_short(frame)
            else:
                self._send_short(frame)

    def _take(self, call: IncomingCall) -> bool:
        """Remove a call that was not answered yet; whether there was one."""
        if self.received.pop(call.number, None) is not call:
            return False
        self._admitted.remove(call.size)
        return True

    # -- in ----------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Read for one turn; whether more may be available.  ``reading`` is held."""
        count = 0
        self.is_reading = True
        try:
            while count < TURN:
                got = self._reader.read(self._on_message)
                if not got:
                    raise ConnectionResetError(ENDED)
                if not self._reader.is_full:
                    break  # that was all; if not, the poller reports it
                count += got
        except BlockingIOError:
            self.is_reading = False
            return False
        self.is_reading = False
        return self.wire.has_more

    def read_all(self) -> bool:
        """Read everything that is available; whether that was anything.  ``reading`` is held."""
        before = self._reader.count
        while self.read():
            pass
        return self._reader.count != before

    def _on_message(self, frame: RpcFrame, data: bytes | memoryview) -> None:
        if self.allowance is None and frame.kind is not FrameKind.HELLO:
            raise RpcInvalidMessage("the first frame of the other side was not a hello")
        self._deliver(self, frame, data)

    def overdue(self, now: float) -> list[IncomingCall]:
        """Calls of the other side whose deadline has passed."""
        if now < self._earliest or self.is_congested:
            return []
        with self.lock:
            calls = list(self.received.values())
        self._earliest = min((c.deadline for c in calls if c.deadline > now), default=math.inf)
        return [call for call in calls if call.deadline <= now]

    def cancelled(self, number: int) -> IncomingCall | None:
        """The call that the other side has cancelled; None if it is incomplete or was answered."""
        call = self.received.get(number)
        if call is None and self._assembly.has(FrameKind.REQUEST, number):
            self._unwanted.add(
                number
            )  # the caller may change its memory, so its last pieces may be wrong
        return call

    def accept(self, frame: RpcFrame, data: bytes | memoryview) -> IncomingCall:
        """Accept a request within our limits."""
        request = RpcRequest.deserialize(data)
        if request.request_id != frame.number:
            raise RpcInvalidMessage("a request with two different numbers")
        marks = frame.marks & (FrameFlag.TYPED | FrameFlag.NESTED)
        call = IncomingCall(
            self, frame.number, request.function_name, request.payload, frame.patience, marks
        )
        call.size = len(data)
        with self.lock:
            if call.number in self.received:
                raise RpcInvalidMessage(f"call {call.number} was made twice")
            if not self._admitted.admits(call.size):
                raise RpcInvalidMessage("more unanswered calls than allowed")
            self._admitted.add(call.size)
            self.received[call.number] = call
            self._earliest = min(self._earliest, call.deadline)
        if self._unwanted and call.number in self._unwanted:
            self._unwanted.discard(call.number)
            call.cancelled = True
        return call

    def watch_reading(self, *, wanted: bool) -> None:
        """Let the agent's own thread read this connection, or not."""
        with self.lock:
            if self.is_open and self._poller is not None:
                self._poller.want_read(self.wire.stream, self.rank, wanted)


BROKEN = (OSError, MalformedFrame, AgentClosed)
"""What reading raises when a connection has ended."""


def describe_end(reason: Exception | str) -> str:
    """Why a connection has ended, for an error."""
    if isinstance(reason, AgentClosed):
        return "it has closed its agent"
    if isinstance(reason, ConnectionError) and not reason.errno:
        return str(reason)
    if isinstance(reason, OSError):
        return f"its connection broke ({describe(reason)})"
    return str(reason)


class Generations:
    """The generations of the agents of a group, as one rank knows them.

    The first agent of every rank has generation 1, the next one generation 2.  Agents of the same
    generation belong together: a call waits for an agent of its own generation, or a newer one.
    """

    def __init__(self) -> None:
        self.latest = 0
        """The generation of the latest agent of this rank."""
        self._staying: dict[int, int] = {}

    @classmethod
    def of(cls, backend: Backend) -> Generations:
        """The generations of a group, shared by all agents that this rank makes on it."""
        return backend.services.of(cls, cls)

    def note_staying(self, rank: int, generation: int) -> None:
        """Note that a rank keeps its agent, although others have made new ones."""
        self._staying[rank] = generation

    def is_staying(self, rank: int, generation: int) -> bool:
        """Whether a rank is known to keep this agent."""
        return self._staying.get(rank) == generation


class ReconnectDecision(NamedTuple):
    """What happens to calls whose connection has ended."""

    is_back_soon: bool
    """Whether the process may come back, so that idempotent calls wait."""
    cause: str | None = None
    """Why it has ended, if more is known than from the connection itself."""
    hint: str | None = None


def name_of(backend: Backend, rank: int) -> str | None:
    """The machine of a rank; None if it is not known, as for our own rank."""
    with contextlib.suppress(DistributedError, KeyError, OSError):
        return backend.peer_name(rank)
    return None


def places_of(backend: Backend) -> dict[int, RankAddress]:
    """The machine and the process of every rank, including our own."""
    view = backend.view
    places = {}
    for rank in range(backend.world_size):
        name = name_of(backend, rank) or socket.gethostname()
        if view is None:
            places[rank] = RankAddress(name, backend.node_of(rank) or "")
        else:
            places[rank] = RankAddress(name, *view.members[rank])
    return places


PURPOSE = "rpc"

DIAL = 1.0
"""Seconds for one attempt: one that hangs delays the connections to other ranks."""

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two rounds of attempts; each pause is twice as long as the last."""

LONGEST_LISTENING = 0.25
"""The same if this rank only accepts: a check costs little, and calls may wait."""


class ConnectionOpener:
    """Opens connections as soon as both agents exist, and again after a loss.

    Of two ranks the higher one dials, as for every stream.  One thread opens all connections, and
    ends when none is missing.
    """

    def __init__(self, backend: Backend, give_up: Callable[[int], None]) -> None:
        self._backend = backend
        self._give_up = give_up
        self._missing: dict[int, Callable[[PeerStream], None]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, rank: int, connect: Callable[[PeerStream], None]) -> None:
        """Open a connection to a rank, and give it to ``connect``."""
        with self._changed:
            if self._closed:
                return
            self._missing[rank] = connect
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-rpc-open", daemon=True
                )
                self._thread.start()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank has left the group, if it has."""
        with contextlib.suppress(DistributedError):
            self._backend.progress(0)  # so that a loss is noticed
        return self._backend.loss_of(rank)

    def close(self, deadline: float) -> None:
        """Stop opening connections."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause, known = FIRST_PAUSE, -1
        while True:
            with self._changed:
                if self._closed or not self._missing:
                    self._thread = None
                    return
                ranks = sorted(self._missing)
            for rank in ranks:
                self._try(rank)
            dials = any(rank < self._backend.rank for rank in ranks)
            longest = LONGEST_PAUSE if dials else LONGEST_LISTENING
            pause = FIRST_PAUSE if len(ranks) != known else min(2 * pause, longest)
            known = len(ranks)
            with self._changed:
                if self._missing and not self._closed:
                    self._changed.wait(pause)

    def _try(self, rank: int) -> None:
        def look() -> None:
            if self._closed:
                raise ChannelClosed("the agent was closed")

        dials = rank < self._backend.rank
        deadline = time.monotonic() + DIAL if dials else 0.0
        try:
            opened = self._backend.open_stream(rank, PURPOSE, deadline, look)
        except (DistributedError, OSError):
            if self.loss_of(rank) is not None and not self._closed:
                with self._changed:
                    self._missing.pop(rank, None)
                self._give_up(rank)
            return
        with self._changed:
            connect = self._missing.pop(rank)
        connect(opened)
