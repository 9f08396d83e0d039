"""Two ends of a TLS conversation without a network, and strangers to try it with."""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from potluck._types import NodeId
from potluck.errors import DistributedError
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity
from potluck.net.tls import TlsChannel, client_context, server_context

Key: TypeAlias = Ed25519PrivateKey | RSAPrivateKey

LAB = NetworkNamespace("lab", b"l" * 32, home=Path("/nowhere"))
ATTIC = NetworkNamespace("attic", b"a" * 32, home=Path("/nowhere"))
CALLER, CALLED, THIRD = (NodeIdentity(bytes([number]) * 32) for number in (1, 2, 3))


def pair(*, expected: NodeId | None = None) -> tuple[TlsChannel, TlsChannel]:
    """Client and server of one namespace, with the handshake still to come."""
    return (
        TlsChannel(client_context(LAB, CALLER), server_side=False, expected=expected, host="lion"),
        TlsChannel(server_context(LAB, CALLED), server_side=True, host="otter"),
    )


def open_pair() -> tuple[TlsChannel, TlsChannel]:
    """Client and server that have met."""
    client, server = pair()
    assert converse(client, server) == (None, None)
    return client, server


def converse(
    client: TlsChannel, server: TlsChannel
) -> tuple[DistributedError | None, DistributedError | None]:
    """Carry bytes to and fro until both are silent; the error that each side ended with, if any."""
    errors: dict[TlsChannel, DistributedError | None] = {client: None, server: None}
    for _ in range(20):
        moved = False
        for sender, receiver in ((client, server), (server, client)):
            data = sender.outgoing()
            moved = moved or bool(data)
            if data and errors[receiver] is None:
                try:
                    receiver.receive(data)
                    if receiver.handshake_done:
                        receiver._plain[:0] = receiver.read()  # looks, and leaves it to be read
                except DistributedError as error:
                    errors[receiver] = error
        if not moved:
            break
    return errors[client], errors[server]


def stranger(
    *, server_side: bool, certificate: x509.Certificate | None = None, key: Key | None = None
) -> ssl.SSLContext:
    """A context that trusts everybody and shows whatever it likes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate is not None and key is not None:
        pem = certificate.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def client_hello() -> bytes:
    """What opens a TLS conversation; whoever sends it need not be anybody."""
    outgoing = ssl.MemoryBIO()
    conversation = stranger(server_side=False).wrap_bio(ssl.MemoryBIO(), outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        conversation.do_handshake()
    return outgoing.read()


class Raw:
    """A stranger's end: an SSL object with its two buffers, driven by hand."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.incoming, self.outgoing_bio = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing_bio, server_side=server_side)

    def meet(self, channel: TlsChannel) -> ssl.SSLError | None:
        """Shake hands as far as it goes; the error the stranger gets.  The channel's is raised."""
        for _ in range(10):
            failure = self._step()
            data = self.outgoing_bio.read()
            if data:
                channel.receive(data)
            answer = channel.outgoing()
            if answer:
                self.incoming.write(answer)
            if failure is not None or not (data or answer):
                return failure
        return None

    def _step(self) -> ssl.SSLError | None:
        try:
            self.tls.do_handshake()
            self.tls.read(1)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError as error:
            return error
        return None
