"""Accepts connections: one thread for all callers that have not proved who they are.

A caller has a few seconds to prove its identity, to send one hello frame, and to agree on who is a
member (:class:`~potluck.net.opening.HandshakeProtocol`).  Places and CPU time are bounded; other
threads do the cryptography.  A granted connection goes to ``receive``, which must not block.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from potluck import _process
from potluck._version import VersionMismatch
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.logs import get_logger
from potluck.net.addresses import unmapped
from potluck.net.frames import FrameType
from potluck.net.opening import (
    Greeting,
    HandshakeAction,
    HandshakeProtocol,
    HandshakeStep,
    hang_up,
    log_refusal,
    refuse,
)
from potluck.net.secure_socket import CHUNK, OpeningSocket, SecureSocket, Security
from potluck.net.tcp import Waker
from potluck.net.tls import TlsChannel

# --------------------------------------------------------------------------------------------------
# Handshakes of callers that have proved nothing yet: on threads of their own, within a budget.
#
# Cryptography for a caller runs on a few worker threads, never on the thread that accepts, so one
# expensive caller delays no other.  The CPU time that a caller costs is measured and charged to its
# address until it has proved that it belongs; then its address is given back what it paid.  An
# address that has used up its allowance waits, and its next callers are turned away before they
# cost anything.  All unknown addresses together have an allowance too; of these the one that has
# cost least is served first, so a newcomer does not stand behind a crowd.  Addresses of members,
# and of this machine, come before all others and do not share their allowance.

THREADS = 3
"""Workers at most; strangers leave one of them free for members."""

IDLE = 10.0
"""Seconds after which a worker without work ends."""

SOURCES = 1024
"""Addresses that are remembered; of those that wait for nothing, the one unseen longest goes."""


class Allowance(NamedTuple):
    """How much CPU time callers may cost before they have proved anything."""

    share: float
    """Seconds of CPU per second, in the long run."""
    burst: float
    """Seconds of CPU at once."""


ADDRESS = Allowance(share=0.05, burst=0.5)
"""For one unknown address; a handshake costs about 0.5 ms on a computer of 2020."""

STRANGERS = Allowance(share=0.25, burst=1.0)
"""For all unknown addresses together."""

NEWCOMER = 0.02
"""Seconds of CPU that an unknown address may cost also when strangers have used up theirs."""

MEMBERS = Allowance(share=0.5, burst=2.0)
"""For one address from which a member has come."""

Work = Callable[[], None]


class FinishedStep(NamedTuple):
    """A step of a handshake that was made."""

    owner: object
    error: BaseException | None
    cpu: float
    """Seconds that it took; they are charged already."""


@dataclass(slots=True)
class _Account:
    """CPU time that was used and is not earned again yet."""

    debt: float = 0.0
    at: float = 0.0

    def settle(self, allowance: Allowance, now: float) -> float:
        self.debt = max(0.0, self.debt - (now - self.at) * allowance.share)
        self.at = now
        return self.debt

    def wait(self, allowance: Allowance, now: float) -> float:
        """Seconds until there is something left to spend; 0 if there is."""
        return max(0.0, self.settle(allowance, now) - allowance.burst) / allowance.share


@dataclass(slots=True)
class _Source:
    """One address, or one network of IPv6."""

    is_local: bool = False
    is_member: bool = False
    account: _Account = field(default_factory=_Account)
    waiting: deque[tuple[object, Work]] = field(default_factory=deque)
    running: int = 0

    @property
    def is_known(self) -> bool:
        return self.is_local or self.is_member

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running


class Handshakes:
    """Runs steps of handshakes, in turn by address; ``wake`` is called when one is finished."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._queue: dict[str, _Source] = {}  # those of them for which something waits
        self._strangers = _Account()
        self._strangers_running = 0
        self._finished: deque[FinishedStep] = deque()
        self._threads: set[threading.Thread] = set()
        self._resting = 0  # workers that wait for work
        self._is_closed = False

    def admit(self, source: str, *, is_local: bool = False) -> bool:
        """Whether a new caller from this address may cost anything now."""
        now = time.monotonic()
        with self._changed:
            one = self._source(source)
            one.is_local = one.is_local or is_local
            if one.is_known:
                return True
            if one.account.wait(ADDRESS, now):
                return False
            is_new = one.account.debt <= NEWCOMER
            return is_new or not self._strangers.wait(STRANGERS, now)

    def is_known(self, source: str) -> bool:
        """Whether a member has come from there, or it is this machine."""
        with self._changed:
            one = self._sources.get(source)
            return one is not None and one.is_known

    def submit(self, source: str, owner: object, work: Work) -> None:
        """Have ``work`` done; :meth:`finished` then returns it with its ``owner``."""
        with self._changed:
            one = self._queue[source] = self._source(source)
            one.waiting.append((owner, work))
            if not self._resting and len(self._threads) < THREADS:
                self._start()
            self._changed.notify()
            step = None if self._threads else self._begin(source)
        if step is not None:  # the machine has no thread to spare
            self._step(source, *step)

    def finished(self) -> list[FinishedStep]:
        """The steps that were made since the last call."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def forget(self, source: str, owner: object) -> None:
        """It is not needed any more."""
        with self._changed:
            one = self._sources.get(source)
            if one is not None:
                one.waiting = deque(each for each in one.waiting if each[0] is not owner)
                if not one.waiting:
                    self._queue.pop(source, None)

    def charge(self, source: str, cpu: float) -> None:
        """Its callers have cost this many seconds of CPU; negative gives them back."""
        now = time.monotonic()
        with self._changed:
            self._charge(self._source(source), cpu, now)

    def proved(self, source: str, cpu: float) -> None:
        """A member has come from there, and has cost this much before it proved to be one."""
        with self._changed:
            one = self._source(source)
            self._charge(one, -cpu, time.monotonic())
            one.is_member = True

    def close(self) -> None:
        """Drop what waits, and end the workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # -- workers -------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="potluck-handshake", daemon=True)
        with contextlib.suppress(RuntimeError):  # those that run already do it, or whoever asks
            thread.start()
            self._threads.add(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                source = self._await_turn()
                if source is None:
                    self._threads.discard(threading.current_thread())
                    return
                step = self._begin(source)  # before another worker chooses the same address
            self._step(source, *step)

    def _step(self, source: str, owner: object, work: Work, is_stranger: bool) -> None:  # noqa: FBT001
        """Do the step that has begun for an address."""
        begin = time.thread_time()
        error: BaseException | None = None
        try:
            work()
        except Exception as raised:  # noqa: BLE001 - whoever attends to the caller judges it
            error = raised
        spent = time.thread_time() - begin
        with self._changed:
            self._strangers_running -= is_stranger
            one = self._sources[source]  # is not forgotten while it is at work
            one.running -= 1
            self._charge(one, spent, time.monotonic())
            self._changed.notify()
        self._finished.append(FinishedStep(owner, error, spent))
        self._wake()

    def _begin(self, source: str) -> tuple[object, Work, bool]:
        """Take what waits longest for an address off the queue."""
        one = self._queue[source]
        owner, work = one.waiting.popleft()
        if not one.waiting:
            del self._queue[source]
        is_stranger = not one.is_known
        one.running += 1
        self._strangers_running += is_stranger
        return owner, work, is_stranger

    def _await_turn(self) -> str | None:
        """Whose turn it is; None when there is no more work for this thread."""
        idle_since = time.monotonic()
        while not self._is_closed:
            now = time.monotonic()
            source, wait = self._next(now)
            if source is not None:
                return source
            if wait is None and now - idle_since >= IDLE:
                return None
            self._resting += 1
            self._changed.wait(IDLE if wait is None else min(wait, IDLE))
            self._resting -= 1
        return None

    def _next(self, now: float) -> tuple[str | None, float | None]:
        """Whose turn it is; else in how many seconds it is anybody's, None if nothing waits."""
        best: tuple[tuple[bool, int, float], str] | None = None
        soonest: float | None = None
        for name, one in self._queue.items():
            wait = self._wait(one, now)
            if wait:
                soonest = wait if soonest is None else min(soonest, wait)
            elif best is None or _rank(one) < best[0]:
                best = _rank(one), name
        return best and best[1], soonest

    def _wait(self, one: _Source, now: float) -> float:
        if one.is_local:
            return 0.0
        if one.is_member:
            return one.account.wait(MEMBERS, now)
        if one.running or self._strangers_running >= THREADS - 1:
            return IDLE  # whoever finishes gives notice
        return max(one.account.wait(ADDRESS, now), self._strangers.wait(STRANGERS, now))

    # -- accounts ------------------------------------------------------------------------------

    def _source(self, name: str) -> _Source:
        one = self._sources.get(name)
        if one is None:
            self._make_room()
            one = self._sources[name] = _Source()
        self._sources.move_to_end(name)
        return one

    def _make_room(self) -> None:
        """Forget an address: a stranger's rather than a member's, and none that is at work."""
        if len(self._sources) < SOURCES:
            return
        for is_known in (False, True):
            for name, one in self._sources.items():
                if one.is_idle and one.is_known == is_known:
                    del self._sources[name]
                    return

    def _charge(self, one: _Source, cpu: float, now: float) -> None:
        allowance = MEMBERS if one.is_known else ADDRESS
        one.account.settle(allowance, now)
        one.account.debt = max(0.0, one.account.debt + cpu)
        if not one.is_known:
            self._strangers.settle(STRANGERS, now)
            self._strangers.debt = max(0.0, self._strangers.debt + cpu)


def _rank(one: _Source) -> tuple[bool, int, float]:
    """Members first, then who has least at work, then who has cost least."""
    return not one.is_known, one.running, one.account.debt


def source_of(host: str, called: str = "") -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 one.

    ``called`` is the address that it calls.  This machine is not one with its neighbours.

    >>> source_of("::ffff:10.0.0.5"), source_of("fe80::1%eth0"), source_of("2001:db8::7")
    ('10.0.0.5', 'fe80::1', '2001:db8::/64')
    >>> source_of("2001:db8::7", called="2001:db8::7")
    '2001:db8::7'
    """
    if host == called:
        return host
    host = unmapped(host).partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4 or address.is_link_local or address.is_loopback:  # noqa: PLR2004
        return str(address)  # a network of our own cable has one machine behind each address
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


# --------------------------------------------------------------------------------------------------
# Callers at the door, from their first byte to their hello, and who makes room when it is full.
#
# When all places are taken the address with most callers gives one up: that of whoever has come
# least far there, and of these has waited longest.  So a crowd costs itself its places, and
# somebody who calls from elsewhere, or says what he has to say, keeps his.  Addresses of members
# give up a place last.

PATIENCE = 5.0
"""Seconds a caller has to say hello."""

SLOTS = 64
"""Callers that may be in the middle of a hello at once."""

SLOTS_PER_HOST = 48
"""Of these, from one address: a flood from one machine leaves room for the others."""


class IncomingConnection:
    """A caller that has not proved who it is."""

    def __init__(
        self, sock: socket.socket, host: str, port: int, source: str = "", *, is_known: bool = False
    ) -> None:
        self.sock = sock
        self.host = host
        self.source = source or source_of(host)
        self.is_known = is_known
        """Whether a member has come from its address before."""
        self.cpu = 0.0
        """Seconds of CPU that it has cost so far."""
        self.is_waiting = False
        """It has said something that a worker has to answer; it is not read meanwhile."""
        self.name = f"{host}:{port}"
        self.deadline = time.monotonic() + PATIENCE
        self.greeting = Greeting()
        self.channel: TlsChannel | None = None
        self.conversation: HandshakeProtocol | None = None
        self.hello: bytes | None = None
        self.is_leaving = False
        self.is_behind = False  # it has not read all that was said to it
        self._is_answered = False  # it has said enough for TLS to have something to say to it
        self._unsent = bytearray()

    @property
    def progress(self) -> int:
        """0 for one that has said little, 1 in the middle of a handshake, 2 for one of us."""
        if self.channel is None:
            return 0
        return 2 if self.channel.handshake_done else int(self._is_answered)

    def read(self) -> bytes:
        """What is there to be taken in; b"" when the caller has hung up."""
        return self.sock.recv(self.greeting.wanted if self.channel is None else CHUNK)

    def needs_worker(self) -> bool:
        """Whether reading bytes costs cryptography for an unknown caller."""
        return self.channel is not None and not self.channel.handshake_done

    def take(self, data: bytes) -> None:
        """Take in what was read."""
        if self.channel is None:
            self.greeting.receive(data)
        else:
            self.channel.receive(data)

    def hear(self) -> None:
        """Answer, and read what can be read of it."""
        if self.channel is not None:
            self.send_pending()
            if self.channel.handshake_done:
                self._read_plain(self.channel.read())

    def _read_plain(self, data: bytes) -> None:
        while data and self.greeting.wanted:
            part, data = data[: self.greeting.wanted], data[self.greeting.wanted :]
            self.greeting.receive(part)
        if data:
            raise MalformedFrame("It said more than hello")

    def say(self, frames: bytes) -> None:
        """Have frames sent with what is pending, and listen for the next one."""
        self.greeting = Greeting()
        if frames and self.channel is not None:
            self.channel.write(frames)

    def send_pending(self) -> bool:
        """Send what TLS has to say, as far as the caller reads it; True when all is sent."""
        if self.channel is not None:
            self._unsent += self.channel.outgoing()
            self._is_answered = self._is_answered or bool(self._unsent)
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        return not self._unsent

    def as_socket(self) -> OpeningSocket:
        """The connection as the code that answers the hello uses it."""
        return self.sock if self.channel is None else SecureSocket(self.sock, self.channel)


def whom_to_drop(
    callers: Collection[IncomingConnection], newcomer: IncomingConnection
) -> tuple[IncomingConnection, str] | None:
    """Who makes room for one more, and why; None while there is room.

    ``callers`` are in the order in which they came.
    """
    sizes = Counter(caller.source for caller in callers)
    if sizes[newcomer.source] >= SLOTS_PER_HOST:
        source, reason = newcomer.source, "too many callers from its address"
    elif len(callers) >= SLOTS:
        sizes[newcomer.source] += 1
        known = {caller.source for caller in callers if caller.is_known}
        source = max(sizes, key=lambda each: (each not in known, sizes[each]))
        reason = "too many callers at once"
    else:
        return None
    crowd = [caller for caller in callers if caller.source == source]
    return min(crowd, key=lambda each: each.progress, default=newcomer), reason


# --------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

_AT_ONCE = 32  # callers that are accepted before those who are here are heard again
_NEWS_EVERY = 10.0  # seconds between two lines about callers that were turned away
_NO_LINGER = struct.pack("ii", 1, 0)

Receiver = Callable[[OpeningSocket, bytes], None]

Host = Callable[[TlsChannel, str], HandshakeProtocol]
"""Begins the conversation with a caller that has proved who it is; gets its address too."""

Note = Callable[[HandshakeRefused], None]
"""Told of callers with whom there was no TLS, and why; must not block."""

Differs = Callable[[VersionMismatch, TlsChannel | None, str], VersionMismatch]
"""Told of callers of other versions, and where they are; the same error with a better name."""


class Acceptor:
    """Listens until closed."""

    def __init__(
        self,
        listener: socket.socket,
        receive: Receiver,
        security: Security | None = None,
        host: Host | None = None,
        note: Note = lambda _: None,
        differs: Differs = lambda error, _channel, _host: error,
    ) -> None:
        self.receive = receive
        self._security = security
        self._host = host
        self._note, self._differs = note, differs
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        _process.track(self._selector)
        self._callers: dict[int, IncomingConnection] = {}  # in order of arrival, so of deadline
        self._handshakes = Handshakes(self._waker.wake)
        self._turned_away = 0
        self._news_due = 0.0
        self._stopping = False
        self.refused = 0
        """Callers that were sent away."""
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="potluck-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port callers use."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop answering and hang up on everybody who has not said hello."""
        if self._stopping:
            return
        self._stopping = True
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept_some()
                    elif key.data is self._waker:
                        self._waker.drain()
                    elif self._callers.get(key.fd) is key.data is not None:
                        # It may have been dropped a moment ago, to make room.
                        self._attend(key.data, events)
                self._go_on()
                self._expire()
        finally:
            self._handshakes.close()
            for caller in list(self._callers.values()):
                self._forget(caller)
                caller.sock.close()
            self._selector.close()
            self._listener.close()
            self._waker.close()

    def _next_deadline(self) -> float | None:
        for caller in self._callers.values():
            return max(0.0, caller.deadline - time.monotonic())
        return None

    def _accept_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely: without a pause this would spin.
                logger.warning("could not accept a connection: %s", error)
                time.sleep(0.05)
                return
            host = str(address[0])
            called = _address_of(sock)
            source = source_of(host, called)
            if self._handshakes.admit(source, is_local=host == called):
                is_known = self._handshakes.is_known(source)
                self._accept(
                    IncomingConnection(sock, host, int(address[1]), source, is_known=is_known)
                )
            else:
                self._turn_away(sock, host)

    def _accept(self, caller: IncomingConnection) -> None:
        begin = time.thread_time()
        sock = caller.sock
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse when it has hung up already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # hellos go back and forth
        _process.track(sock)
        try:
            if self._security is not None:
                caller.channel = self._security.answer_channel(caller.name)
        except (OSError, DistributedError) as error:
            logger.error("could not answer %s: %s", caller.name, error)  # noqa: TRY400
            sock.close()
            return
        if self._make_room(caller):
            self._callers[sock.fileno()] = caller
            self._selector.register(sock, selectors.EVENT_READ, caller)
        self._charge(caller, begin)

    def _turn_away(self, sock: socket.socket, host: str) -> None:
        """Hang up on one whose address has cost too much, at no cost but this."""
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.close()
        self.refused += 1
        self._turned_away += 1
        now = time.monotonic()
        if now >= self._news_due:
            self._news_due = now + _NEWS_EVERY
            logger.warning(
                "turned away %d callers, the last one from %s: they use more CPU time than "
                "strangers may have",
                self._turned_away,
                host,
            )
            self._turned_away = 0

    def _make_room(self, newcomer: IncomingConnection) -> bool:
        """Drop the caller that has to go; False if that is the newcomer."""
        excess = whom_to_drop(self._callers.values(), newcomer)
        if excess is None:
            return True
        caller, reason = excess
        if caller is newcomer:
            log_refusal(newcomer.name, reason)
            newcomer.sock.close()
            self.refused += 1
            return False
        self._drop(caller, reason)
        return True

    def _charge(self, caller: IncomingConnection, begin: float) -> None:
        """What this thread did for a caller since ``begin`` is on its account."""
        spent = time.thread_time() - begin
        caller.cpu += spent
        self._handshakes.charge(caller.source, spent)

    def _attend(self, caller: IncomingConnection, events: int) -> None:
        """Something can be read from a caller, or written to it."""
        begin = time.thread_time()
        with self._judging(caller):
            if events & selectors.EVENT_READ:
                data = caller.read()
                if not data:
                    self._drop(caller, "it hung up")
                    return
                if caller.needs_worker():
                    self._selector.unregister(caller.sock)
                    caller.is_waiting = True
                    self._handshakes.submit(caller.source, caller, lambda: caller.take(data))
                    return
                caller.take(data)
            self._listen_to(caller)
        self._charge(caller, begin)

    def _go_on(self) -> None:
        """Continue with the callers for which a worker has made a step."""
        for caller, error, cpu in self._handshakes.finished():
            assert isinstance(caller, IncomingConnection)
            caller.cpu += cpu
            caller.is_waiting = False
            if self._callers.get(caller.sock.fileno()) is not caller:
                continue  # dropped meanwhile
            begin = time.thread_time()
            write = selectors.EVENT_WRITE if caller.is_behind else 0
            self._selector.register(caller.sock, selectors.EVENT_READ | write, caller)
            with self._judging(caller):
                if error is not None:
                    raise error
                self._listen_to(caller)
            self._charge(caller, begin)

    def _listen_to(self, caller: IncomingConnection) -> None:
        caller.hear()
        if caller.greeting.is_complete and not caller.is_leaving:
            self._hear(caller)
        if self._callers.get(caller.sock.fileno()) is caller:
            self._watch(caller)

    @contextlib.contextmanager
    def _judging(self, caller: IncomingConnection) -> Iterator[None]:
        """What becomes of a caller when something is wrong with what it said."""
        try:
            yield
        except BlockingIOError:
            pass
        except VersionMismatch as error:
            named = self._differs(error, caller.channel, unmapped(caller.host))
            self._drop(caller, str(named), tell=str(named))
        except (OSError, DistributedError) as error:
            if isinstance(error, HandshakeRefused):
                self._note(error)
            with contextlib.suppress(OSError, DistributedError):
                caller.send_pending()  # the alert that tells the caller why
            self._drop(caller, str(error))
        except Exception:
            # A fault of ours with one caller must not close the door to all others.
            logger.exception("could not answer %s", caller.name)
            if self._callers.get(caller.sock.fileno()) is caller:
                self._forget(caller)
            caller.sock.close()

    def _watch(self, caller: IncomingConnection) -> None:
        """Wait for what the caller says, and until it has read what was said to it."""
        is_read = caller.send_pending()
        if is_read and caller.is_leaving:
            self._forget(caller)
            hang_up(caller.sock)
        elif is_read == caller.is_behind:
            caller.is_behind = not is_read
            write = selectors.EVENT_WRITE if caller.is_behind else 0
            self._selector.modify(caller.sock, selectors.EVENT_READ | write, caller)

    def _hear(self, caller: IncomingConnection) -> None:
        """A frame is complete: the hello, or what follows it."""
        kind, payload = caller.greeting.kind, caller.greeting.payload
        if caller.hello is None:
            caller.greeting.check_version(caller.host)
            if caller.channel is not None and self._host is not None:
                caller.conversation = self._host(caller.channel, caller.name)
            # Who does not accept us says so instead of hello.
            if kind != FrameType.HELLO and not (kind == FrameType.REFUSAL and caller.conversation):
                self._drop(caller, f"its first frame was {kind.name}")
                return
            caller.hello = payload
        turn = HandshakeStep(HandshakeAction.GRANT)
        if caller.conversation is not None:
            turn = caller.conversation.receive(kind, payload)
        caller.say(turn.say)
        match turn.next:
            case HandshakeAction.GRANT:
                self._handshakes.proved(caller.source, caller.cpu)
                caller.cpu = 0.0
                self._introduce(caller)
            case HandshakeAction.REFUSE:
                self._drop(caller, turn.sentence, tell=turn.sentence)
            case HandshakeAction.CLOSE:
                self._handshakes.proved(caller.source, caller.cpu)
                caller.cpu = 0.0
                caller.is_leaving = True

    def _introduce(self, caller: IncomingConnection) -> None:
        self._forget(caller)
        try:
            self.receive(caller.as_socket(), caller.hello or b"")
        except MalformedFrame as error:
            refuse(caller.as_socket(), "this hello cannot be understood", reason=str(error))
        except OSError as error:
            logger.debug("lost %s before it was answered: %s", caller.name, error)
            caller.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for caller in list(self._callers.values()):
            if caller.deadline > now:
                break
            if caller.is_waiting:
                self._drop(caller, "its address used more CPU time than strangers may have")
            else:
                self._drop(caller, f"it did not say hello within {PATIENCE:g} s")

    def _drop(self, caller: IncomingConnection, reason: str, tell: str = "") -> None:
        self._forget(caller)
        self.refused += 1
        if tell:
            refuse(caller.as_socket(), tell, reason=reason)
        else:
            log_refusal(caller.name, reason)
            hang_up(caller.sock)

    def _forget(self, caller: IncomingConnection) -> None:
        if caller.is_waiting:
            self._handshakes.forget(caller.source, caller)
        else:
            self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]


def _address_of(sock: socket.socket) -> str:
    """The address that a caller calls; a caller that comes from there is on this machine."""
    try:
        return str(sock.getsockname()[0])
    except OSError:  # gone already
        return ""
