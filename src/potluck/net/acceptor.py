"""The acceptor: answers the door, one thread for all callers that have not said who they are.

A caller has a few seconds to prove who it is, to say hello in one frame, and to agree with us on
who belongs (a :class:`~potluck.net.opening.Conversation`).  There is a bounded number of places, of
which a crowd loses its own.  A hello that is granted goes to ``receive``, which owns the connection
from then on and must not block.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.acceptor_callers import PATIENCE, SLOTS, SLOTS_PER_HOST, Caller, whom_to_drop
from potluck.net.frames import Kind, VersionMismatch
from potluck.net.opening import Conversation, Next, Turn, hang_up, log_refusal, refuse
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import Security
from potluck.net.tls import TlsChannel

__all__ = ["PATIENCE", "SLOTS", "SLOTS_PER_HOST", "Acceptor"]

logger = get_logger(__name__)

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
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._callers.get(key.fd) is key.data is not None:
                        # It may have been dropped a moment ago, to make room.
                        self._attend(key.data, events)
                self._expire()
        finally:
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

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely: without a pause this would spin.
            logger.warning("could not accept a connection: %s", error)
            time.sleep(0.05)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse when it has hung up already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # hellos go back and forth
        descriptors.track(sock)
        caller = Caller(sock, str(address[0]), int(address[1]))
        try:
            if self._security is not None:
                caller.channel = self._security.answer_channel(caller.name)
        except (OSError, DistributedError) as error:
            logger.error("could not answer %s: %s", caller.name, error)  # noqa: TRY400
            sock.close()
            return
        self._make_room(caller.host)
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _make_room(self, host: str) -> None:
        excess = whom_to_drop(self._callers.values(), host)
        if excess is not None:
            self._drop(*excess)

    def _attend(self, caller: Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not caller.read():
                self._drop(caller, "it hung up")
                return
            if caller.greeting.is_complete and not caller.is_leaving:
                self._hear(caller)
            if self._callers.get(caller.sock.fileno()) is caller:
                self._watch(caller)
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
                self._introduce(caller)
            case Next.REFUSE:
                self._drop(caller, turn.sentence, tell=turn.sentence)
            case Next.CLOSE:
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
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]


def _mirrored(error: VersionMismatch) -> str:
    """The mismatch as the other side sees it."""
    return (
        f"this node speaks protocol version {error.expected}, you speak {error.got}; "
        "install the same version of potluck on every machine"
    )
