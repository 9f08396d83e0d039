"""TLS 1.3 with mutual authentication: how every connection opens.

The key in a node's certificate is the node's identity, so the handshake itself proves who is there;
:class:`TlsChannel` says it and refuses anybody else than the node that was expected.  The channel
never touches a socket: bytes go in through :meth:`~TlsChannel.receive` and come out of
:meth:`~TlsChannel.outgoing`.  Control and RPC stay on it; the data lane ends it with
:meth:`~TlsChannel.unwrap` and goes on with its own frames on the same connection.
"""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable
from typing import NoReturn

from potluck.errors import ChannelClosed, DistributedError, HandshakeRefused, PeerLost
from potluck.net import tls_errors
from potluck.net.client_hello import ClientHello, first_record_size, read_hello
from potluck.net.identity import node_id
from potluck.net.names import short_name
from potluck.net.tls_context import (
    NamespaceContext,
    client_context,
    peer_node_id,
    peer_public_key,
    server_context,
)
from potluck.net.tls_errors import AnotherNamespace, NodeMismatch
from potluck.vocabulary import NodeId

__all__ = [
    "MAX_HANDSHAKE",
    "AnotherNamespace",
    "NodeMismatch",
    "TlsChannel",
    "client_context",
    "peer_node_id",
    "server_context",
]

MAX_HANDSHAKE = 64 * 1024  # bytes from somebody unknown; our own handshakes need about 2 KiB
_RECORD = 16 * 1024  # bytes; TLS hands out no more at a time
_FIRST_BYTES = frozenset({21, 22})  # a TLS conversation begins with an alert or a handshake record


class _Phase(enum.Enum):
    HANDSHAKE = "handshake"
    OPEN = "open"
    ENDING = "ending"  # we have said that we end TLS, the other side has not
    ENDED = "ended"
    FAILED = "failed"


class TlsChannel:
    """One TLS conversation without a socket.

    After every :meth:`receive`, :meth:`write` and :meth:`unwrap`, also one that raised, send what
    :meth:`outgoing` returns; after an error then close the connection.  A finished handshake proves
    who the other side is; whether it accepts us a client knows only when the first answer comes.
    A server may ``find`` another context that fits what a client asks for.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        expected: NodeId | None = None,
        host: str | None = None,
        find: Callable[[ClientHello], ssl.SSLContext | None] | None = None,
    ) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        tag = None if server_side else _tag(context)
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=tag
        )
        self._find = find
        self._first = bytearray()  # the first record, until we know how to answer it
        self._expected = expected
        self._host = host
        self._phase = _Phase.HANDSHAKE
        self._failure: DistributedError | None = None
        self._peer_key = b""
        self._before = 0  # bytes received during the handshake
        self._plain = bytearray()  # decrypted, not yet read
        self._heard = False  # the other side has sent data, so it has accepted us
        self.closed_by_peer = False
        """Whether the other side has ended TLS."""
        self._advance()

    @property
    def handshake_done(self) -> bool:
        """Whether the other side has proved who it is."""
        return self._phase in {_Phase.OPEN, _Phase.ENDING, _Phase.ENDED}

    @property
    def tag(self) -> str:
        """The discovery tag of the secret under which the two have met; "" if that is unknown."""
        return _tag(self._tls.context) or ""

    @property
    def peer(self) -> NodeId:
        """Who the other side is, once :attr:`handshake_done`."""
        return node_id(self.peer_public_key)

    @property
    def peer_public_key(self) -> bytes:
        """The key behind :attr:`peer`, for checking its signatures."""
        if not self.handshake_done:
            raise ChannelClosed("The other side has not proved who it is")
        return self._peer_key

    def outgoing(self) -> bytes:
        """What has to be sent now."""
        return self._outgoing.read()

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that came from the network."""
        self._refuse_if_failed()
        view = memoryview(data)
        if self._phase is _Phase.HANDSHAKE and view:
            if not self._before and view[0] not in _FIRST_BYTES:
                self._fail(tls_errors.plain_text(bytes(view[:16]), self._host))
            allowed = MAX_HANDSHAKE - self._before
            self._incoming.write(self._answerable(view[:allowed]))
            self._before += min(len(view), allowed)
            view = view[allowed:]
            self._advance()
            if not self.handshake_done and self._before == MAX_HANDSHAKE:
                self._fail(self._refused(f"sent {MAX_HANDSHAKE} bytes without a handshake"))
        if view:
            self._incoming.write(view)

    def _answerable(self, data: memoryview) -> bytes | bytearray | memoryview:
        """What TLS may see: all of it, once the caller has named the secret it comes with."""
        if self._find is None:
            return data
        self._first += data
        if len(self._first) < first_record_size(self._first):
            return b""
        context = self._find(read_hello(self._first))
        if context is not None:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._find = None
        return self._first

    def receive_eof(self) -> None:
        """The network has no more: raises unless the other side had ended TLS first."""
        self._refuse_if_failed()
        if self._phase is _Phase.HANDSHAKE:
            self._fail(self._refused("closed the connection before the handshake was done"))
        if self._phase is not _Phase.ENDED:
            self._drain()  # the reason may be among the last bytes
        if not self.closed_by_peer:
            who = self._host or self.peer
            self._fail(PeerLost(f"The connection with {who} ended without a word", host=self._host))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt ``data``; it is then part of :meth:`outgoing`."""
        self._refuse_if_failed()
        if self._phase is not _Phase.OPEN:
            raise ChannelClosed(f"Nothing can be written: TLS is in the phase {self._phase.value}")
        view = memoryview(data).cast("B")
        while view:
            view = view[self._tls.write(view) :]

    def read(self) -> bytes:
        """Everything the other side wrote and that was not read yet; b"" if that is nothing."""
        self._refuse_if_failed()
        if self._phase in {_Phase.OPEN, _Phase.ENDING}:
            self._drain()
        data = bytes(self._plain)
        self._plain.clear()
        return data

    def unwrap(self) -> bool:
        """End TLS on our side; True once the other side has ended it too.

        Call it again after each :meth:`receive` until it returns True.  Our own raw bytes may
        follow directly behind what :meth:`outgoing` returns after the first call.  What the other
        side wrote before its end comes from :meth:`read`, what it sent after from :meth:`leftover`.
        """
        self._refuse_if_failed()
        if self._phase is _Phase.HANDSHAKE:
            raise ChannelClosed("TLS cannot end before it has begun")
        if self._phase is not _Phase.ENDED:
            # OpenSSL fails if it meets data while it looks for the other side's end.
            self._drain()
            self._phase = _Phase.ENDING
            try:
                self._tls.unwrap()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError as error:
                self._fail(self._meaning(error), error)
            self.closed_by_peer = True
            self._phase = _Phase.ENDED
        return True

    def leftover(self) -> bytes:
        """The raw bytes that came behind the end of TLS, as they were sent."""
        if self._phase is not _Phase.ENDED:
            raise ChannelClosed(f"There is no rest: TLS is in the phase {self._phase.value}")
        return self._incoming.read()

    def _advance(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            self._fail(tls_errors.during_handshake(error, self._host), error)
        try:
            self._peer_key = peer_public_key(self._tls)
            self._check_expected(node_id(self._peer_key))
        except DistributedError as error:
            self._outgoing.read()  # whoever it is, it does not get our certificate
            error.host = self._host
            self._fail(error)
        self._phase = _Phase.OPEN

    def _check_expected(self, found: NodeId) -> None:
        if self._expected not in {None, found}:
            wanted = NodeId(self._expected or "")
            them, others = short_name(found), short_name(wanted)
            raise NodeMismatch(
                f"{them} ({found}) answered instead of {others} ({wanted})",
                node=found,
                host=self._host,
                expected=wanted,
                got=found,
                hint="The address may have passed to another machine since it was found.",
            )

    def _drain(self) -> None:
        """Decrypt all that is there."""
        while not self.closed_by_peer:
            try:
                data = self._tls.read(_RECORD)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLZeroReturnError:
                data = b""
            except ssl.SSLError as error:
                self._fail(self._meaning(error), error)
            self._plain += data
            self._heard = True
            self.closed_by_peer = not data

    def _meaning(self, error: ssl.SSLError) -> DistributedError:
        if self._heard:
            return tls_errors.on_open_channel(error, self._host)
        return tls_errors.during_handshake(error, self._host)

    def _refused(self, what: str) -> HandshakeRefused:
        hint = "It may belong to another namespace, run another version, or be another program."
        who = self._host or "The other side"
        return HandshakeRefused(f"{who} {what}", host=self._host, hint=hint)

    def _fail(self, error: DistributedError, cause: BaseException | None = None) -> NoReturn:
        self._phase = _Phase.FAILED
        self._failure = error
        raise error from cause

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            message = "This connection has failed before"
            raise ChannelClosed(message, host=self._host, cause=str(self._failure))


def _tag(context: ssl.SSLContext) -> str | None:
    return context.tag if isinstance(context, NamespaceContext) else None
