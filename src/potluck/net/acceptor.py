"""The acceptor: answers the door, one thread for all callers that have not said who they are.

A caller has a few seconds to prove who it is, to say hello in one frame, and to agree with us on
who belongs (a :class:`~potluck.net.opening.Conversation`).  There is a bounded number of places, of
which a crowd loses its own, and a bounded amount of CPU time: :mod:`~potluck.net.handshakes` does
the cryptography, on other threads.  A hello that is granted goes to ``receive``, which owns the
connection from then on and must not block.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.acceptor_callers import PATIENCE, SLOTS, SLOTS_PER_HOST, Caller, whom_to_drop
from potluck.net.frames import Kind, VersionMismatch
from potluck.net.handshakes import Handshakes, source_of
from potluck.net.opening import Conversation, Next, Turn, hang_up, log_refusal, refuse
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import Security
from potluck.net.tls import TlsChannel

__all__ = ["PATIENCE", "SLOTS", "SLOTS_PER_HOST", "Acceptor"]

logger = get_logger(__name__)

_AT_ONCE = 32  # callers that are accepted before those who are here are heard again
_NEWS_EVERY = 10.0  # seconds between two lines about callers that were turned away
_NO_LINGER = struct.pack("ii", 1, 0)

Receiver = Callable[[OpeningSocket, bytes], None]

Host = Callable[[TlsChannel, str], Conversation]
"""Begins the conversation with a caller that has proved who it is; gets its address too."""

Note = Callable[[HandshakeRefused], None]
"""Told of callers with whom there was no TLS, and why; must not block."""


class Acceptor:
    """Listens until closed."""

    def __init__(
        self,
        listener: socket.socket,
        receive: Receiver,
        security: Security | None = None,
        host: Host | None = None,
        note: Note = lambda _: None,
    ) -> None:
        self.receive = receive
        self._security = security
        self._host = host
        self._note = note
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
            descriptors.track(end)
        descriptors.track(self._selector)
        self._callers: dict[int, Caller] = {}  # in order of arrival, so of deadline
        self._handshakes = Handshakes(self._wake)
        self._turned_away = 0
        self._news_due = 0.0
        self._stopping = False
        self.refused = 0
        """Callers that were sent away."""
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
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
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept_some()
                    elif key.fileobj is self._wake_in:
                        self._wake_in.recv(4096)
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
            for sock in (self._listener, self._wake_in, self._wake_out):
                sock.close()

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
                self._accept(Caller(sock, host, int(address[1]), source, is_known=is_known))
            else:
                self._turn_away(sock, host)

    def _accept(self, caller: Caller) -> None:
        begin = time.thread_time()
        sock = caller.sock
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse when it has hung up already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # hellos go back and forth
        descriptors.track(sock)
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

    def _make_room(self, newcomer: Caller) -> bool:
        """Drop whoever has to go; False if that is the newcomer."""
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

    def _charge(self, caller: Caller, begin: float) -> None:
        """What this thread did for a caller since ``begin`` is on its account."""
        spent = time.thread_time() - begin
        caller.cpu += spent
        self._handshakes.charge(caller.source, spent)

    def _attend(self, caller: Caller, events: int) -> None:
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
        """Go on with the callers for whom a worker has made a step."""
        for caller, error, cpu in self._handshakes.finished():
            assert isinstance(caller, Caller)
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

    def _listen_to(self, caller: Caller) -> None:
        caller.hear()
        if caller.greeting.is_complete and not caller.is_leaving:
            self._hear(caller)
        if self._callers.get(caller.sock.fileno()) is caller:
            self._watch(caller)

    @contextlib.contextmanager
    def _judging(self, caller: Caller) -> Iterator[None]:
        """What becomes of a caller when something is wrong with what it said."""
        try:
            yield
        except BlockingIOError:
            pass
        except VersionMismatch as error:
            self._drop(caller, str(error), tell=_mirrored(error))
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

    def _watch(self, caller: Caller) -> None:
        """Wait for what the caller says, and until it has read what was said to it."""
        is_read = caller.send_pending()
        if is_read and caller.is_leaving:
            self._forget(caller)
            hang_up(caller.sock)
        elif is_read == caller.is_behind:
            caller.is_behind = not is_read
            write = selectors.EVENT_WRITE if caller.is_behind else 0
            self._selector.modify(caller.sock, selectors.EVENT_READ | write, caller)

    def _hear(self, caller: Caller) -> None:
        """A frame is complete: the hello, or what follows it."""
        kind, payload = caller.greeting.kind, caller.greeting.payload
        if caller.hello is None:
            if caller.channel is not None and self._host is not None:
                caller.conversation = self._host(caller.channel, caller.name)
            # Who does not accept us says so instead of hello.
            if kind != Kind.HELLO and not (kind == Kind.REFUSAL and caller.conversation):
                self._drop(caller, f"its first frame was {kind.name}")
                return
            caller.hello = payload
        turn = Turn(Next.GRANT)
        if caller.conversation is not None:
            turn = caller.conversation.receive(kind, payload)
        caller.say(turn.say)
        match turn.next:
            case Next.GRANT:
                self._handshakes.proved(caller.source, caller.cpu)
                caller.cpu = 0.0
                self._introduce(caller)
            case Next.REFUSE:
                self._drop(caller, turn.sentence, tell=turn.sentence)
            case Next.CLOSE:
                self._handshakes.proved(caller.source, caller.cpu)
                caller.cpu = 0.0
                caller.is_leaving = True

    def _introduce(self, caller: Caller) -> None:
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

    def _drop(self, caller: Caller, reason: str, tell: str = "") -> None:
        self._forget(caller)
        self.refused += 1
        if tell:
            refuse(caller.as_socket(), tell, reason=reason)
        else:
            log_refusal(caller.name, reason)
            hang_up(caller.sock)

    def _forget(self, caller: Caller) -> None:
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


def _mirrored(error: VersionMismatch) -> str:
    """The mismatch as the other side sees it."""
    return (
        f"this node speaks protocol version {error.expected}, you speak {error.got}; "
        "install the same version of potluck on every machine"
    )
