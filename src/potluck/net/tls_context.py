"""TLS contexts: what the two sides of a connection show, and what they accept.

TLS 1.3 and nothing older, both sides authenticated by a certificate of the namespace, no session
tickets.  The key in a node's certificate is the node's identity, so a finished handshake proves who
is there.

A context agrees on keys in one group.  A caller chooses among the groups that a server allows, and
in OpenSSL's own list are some that cost a hundred milliseconds before anything is proved.  Python's
``ssl`` can set only one group per context, so a server has a context for each group it allows, and
answers with the one that fits the caller's hello.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from potluck.errors import HandshakeRefused, UnsupportedOperation
from potluck.net.certificates import Authority
from potluck.net.identity import NodeIdentity, node_id
from potluck.net.namespace import NetworkNamespace
from potluck.vocabulary import NodeId

__all__ = [
    "Group",
    "NamespaceContext",
    "client_context",
    "peer_node_id",
    "peer_public_key",
    "server_context",
]

_DESCRIPTORS = "/proc/self/fd"


class Group(enum.Enum):
    """A group in which keys may be agreed on; the first one that both sides have is used."""

    X25519 = 29
    P256 = 23

    @property
    def curve(self) -> str:
        """Its name in OpenSSL."""
        return _CURVES[self]


_CURVES = {Group.X25519: "X25519", Group.P256: "prime256v1"}


class NamespaceContext(ssl.SSLContext):
    """A context that remembers under which secret it opens connections."""

    tag: str = ""
    """The discovery tag of that secret."""


def server_context(
    namespace: NetworkNamespace, identity: NodeIdentity, group: Group = Group.X25519
) -> NamespaceContext:
    """For the side that was called."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, namespace, identity, group)
    # A ticket would arrive after the handshake, when the data lane already ends TLS; and a resumed
    # session would spare a peer the proof of its key.
    context.num_tickets = 0
    return context


def client_context(
    namespace: NetworkNamespace, identity: NodeIdentity, group: Group = Group.X25519
) -> NamespaceContext:
    """For the side that calls; a server gets no other group to choose."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, namespace, identity, group)


def peer_public_key(tls: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """The raw Ed25519 key that the other side has just proved to own."""
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        raise HandshakeRefused("The other side showed no certificate")
    try:
        certificate = x509.load_der_x509_certificate(shown)
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise HandshakeRefused("The certificate is unreadable", cause=str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise HandshakeRefused("The certificate is not for an Ed25519 key, so it names no node")
    if _signed_itself(certificate, key):
        # Every member can compute this key, so it proves nothing about who is there.
        raise HandshakeRefused("The other side used the namespace's own key instead of a node's")
    return key.public_bytes_raw()


def peer_node_id(tls: ssl.SSLObject | ssl.SSLSocket) -> NodeId:
    """Who the other side has just proved to be."""
    return node_id(peer_public_key(tls))


def _context(
    protocol: int, namespace: NetworkNamespace, identity: NodeIdentity, group: Group
) -> NamespaceContext:
    if not namespace.is_encrypted:
        raise UnsupportedOperation("The insecure namespace is plain TCP: there is no TLS to open")
    authority = Authority.of(namespace)
    context = NamespaceContext(protocol)
    context.tag = namespace.discovery_tag
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # addresses change at home; the node id is checked instead
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    _restrict(context, group)
    context.load_verify_locations(cadata=authority.der)
    public_key = Ed25519PublicKey.from_public_bytes(identity.public_key)
    password = secrets.token_hex(32).encode()
    certificate = authority.issue(public_key).public_bytes(Encoding.PEM)
    with _path_to(certificate + identity.private_key_pem(password)) as path:
        context.load_cert_chain(path, password=password)
    return context


def _restrict(context: ssl.SSLContext, group: Group) -> None:
    """Agree on keys in this group; in P-256 if this OpenSSL has no X25519 (FIPS, or before 3.0)."""
    try:
        context.set_ecdh_curve(group.curve)
    except (ValueError, ssl.SSLError):
        context.set_ecdh_curve(Group.P256.curve)


@contextlib.contextmanager
def _path_to(content: bytes) -> Iterator[str]:
    """A path from which ``content`` can be read for a moment; ``ssl`` loads keys from paths only.

    In memory where the system can (Linux), else in a private directory that is removed at once.
    Either way the key is encrypted with a password that only this process knows, so that even a
    crash at the wrong moment leaves nothing of use on the disk.
    """
    with contextlib.ExitStack() as stack:
        path = _memory_file(content, stack)
        if path is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-"))
            path = str(Path(directory) / "key")
            Path(path).write_bytes(content)
        yield path


def _memory_file(content: bytes, stack: contextlib.ExitStack) -> str | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("potluck")
    except OSError:  # forbidden in some sandboxes
        return None
    stack.callback(os.close, descriptor)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    path = f"{_DESCRIPTORS}/{descriptor}"
    return path if Path(path).exists() else None  # /proc may be missing


def _signed_itself(certificate: x509.Certificate, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    except InvalidSignature:
        return False
    return True
