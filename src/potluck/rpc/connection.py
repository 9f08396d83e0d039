"""One connection between two agents, from its opening to its end.

Its ``lock`` guards everything that is sent and counted; ``reading`` is held by the thread that
reads, which is the agent's own or one that waits for an answer on this connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from potluck.errors import MalformedFrame
from potluck.net.transport import Spin
from potluck.rpc.calls import Incoming, RpcFuture
from potluck.rpc.errors import RpcInvalidMessage
from potluck.rpc.protocol import (
    HEADER_SIZE,
    RESPONSE_OVERHEAD,
    SHORT,
    Assembly,
    Failure,
    Frame,
    FrameKind,
    Hello,
    Mark,
    Outbox,
    RpcRequest,
    Window,
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
    from potluck.backend.base import Backend
    from potluck.backend.framing import Wire
    from potluck.net.transport import Buffer, Poller
    from potluck.rpc.calls import RpcConfig
    from potluck.rpc.protocol import Whole


# --------------------------------------------------------------------------------------------------
# Sending answers on a connection, each once.


class Answering:
    """The half of a connection that answers the calls of the other side."""

    rank: int
    lock: threading.Lock
    allowance: Hello | None
    received: dict[int, Incoming]
    _here: int
    _admitted: Window
    _outbox: Outbox

    def flush(self) -> None:
        """Send what can be sent now."""
        raise NotImplementedError

    def _send_short(self, frame: bytes) -> None:
        """Send a whole frame, behind what waits."""
        raise NotImplementedError

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:
        """Send a value."""
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        assert self.allowance is not None
        limit = self.allowance.max_message
        total = RESPONSE_OVERHEAD + size
        if total > limit:
            self.refuse(call, Failure("large", size=total, limit=limit), cork=cork)
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

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:
        """Say why there is no value."""
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

    def _reply(self, call: Incoming, frame: bytes, *, cork: bool) -> None:
        with self.lock:
            if not self._take(call):
                return
            if cork:
                self._outbox.add_short(frame)
            else:
                self._send_short(frame)

    def _take(self, call: Incoming) -> bool:
        """Whether the call is still to be answered; afterwards it is not."""
        if self.received.pop(call.number, None) is not call:
            return False
        self._admitted.remove(call.size)
        return True


# --------------------------------------------------------------------------------------------------
# Reading a connection: frames become messages, long ones straight into their own memory.

BUFFER = 64 << 10
"""Bytes read at once, unless they belong to a long message."""

GLANCE = 4 << 10
"""Bytes read at once between two pieces: more of the next one would have to be copied."""

PART = Mark.MORE | Mark.LATER

Deliver: TypeAlias = Callable[[Frame, "bytes | memoryview"], None]
"""What to do with a message: its (first) header, and its bytes."""


class Reader:
    """Cuts what comes in."""

    def __init__(self, wire: Wire, assembly: Assembly, limit: int) -> None:
        self._wire = wire
        self._assembly = assembly
        self._limit = limit
        self._buffer = memoryview(bytearray(BUFFER))
        self._start = self._end = 0
        self._whole: Whole | None = None  # the message whose piece is being read
        self._missing = 0  # bytes of that piece
        self.count = 0
        """How often something came."""
        self.is_full = False
        """Whether the last read took all it could, so that more may be here."""

    def read(self, deliver: Deliver) -> int:
        """Read once and deliver what is complete; how many bytes came, 0 at the end.

        Raises ``BlockingIOError`` when nothing has come.
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

    def _begin_piece(self, frame: Frame, body: int, deliver: Deliver) -> bool:
        """Take what is here of a piece; whether that is all of it."""
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


# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# What the parts of an agent expect of each other.


class Generations:
    """The agents that the ranks of a group have made one after the other, as one rank knows them.

    The first agent of every rank is of generation 1, the next one of generation 2.  Agents of one
    generation belong together: a call of one waits for its peer of the same generation, or of a
    newer one.
    """

    def __init__(self) -> None:
        self.latest = 0
        """Of this rank."""
        self._staying: dict[int, int] = {}

    @classmethod
    def of(cls, backend: Backend) -> Generations:
        """Those of a group, for all agents that this rank makes on it."""
        known: Generations = vars(backend).setdefault("_rpc_generations", cls())
        return known

    def note_staying(self, rank: int, generation: int) -> None:
        """A rank keeps its agent, although others have made new ones."""
        self._staying[rank] = generation

    def is_staying(self, rank: int, generation: int) -> bool:
        """Whether that is known of the agent of a rank."""
        return self._staying.get(rank) == generation


class Outlook(NamedTuple):
    """What becomes of calls whose connection has ended."""

    is_back_soon: bool
    """Whether the process may be called again, so that calls that may be repeated wait."""
    cause: str | None = None
    """Why it has ended, if that is known better than from the connection itself."""
    hint: str | None = None


class Office(Protocol):
    """What a peer needs of its agent."""

    rank: int
    config: RpcConfig
    hello: Hello
    """What peers are told of the agent, its generation included."""
    generations: Generations

    def serve(self, call: Incoming) -> None:
        """Have a call answered."""

    def forget(self, call: Incoming) -> None:
        """Nobody waits for a call any more: answer it now if it has not begun."""

    def watch(self, connection: Connection) -> None:
        """Read a new connection from now on."""

    def rouse(self) -> None:
        """Look at calls with a deadline from time to time, also at those that wait here."""

    def lost(self, rank: int) -> Outlook:
        """A connection has ended: what that means for calls to its rank."""

    def outlook(self, rank: int) -> Outlook:
        """What is known about the rank of a connection that has ended."""

    def name_of(self, rank: int) -> str | None:
        """Where a rank is, for people."""

    def sweep(self, count: int) -> None:
        """So many calls that wait for workers have lost their callers."""

    def orphaned(self, calls: list[Incoming]) -> None:
        """Nobody waits for these calls any more, and they need no answer."""

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """Wait for a call on the thread of a worker."""

    @property
    def may_block(self) -> bool:
        """Whether this thread may wait: others depend on the agent's own."""


class Staff(Protocol):
    """What the loop needs of its agent."""

    def connection_of(self, rank: int) -> Connection | None:
        """The connection to a rank, if there is one."""

    def lose(self, connection: Connection, reason: Exception) -> None:
        """A connection is over."""

    def answer(self, call: Incoming, *, cork: bool) -> None:
        """Run a quick function; ``cork`` holds its answer back until :meth:`Connection.flush`."""

    def hand_over(self, call: Incoming) -> None:
        """Leave a call to the workers."""

    def tick(self, now: float) -> bool:
        """Look at deadlines; whether anything is under way."""
