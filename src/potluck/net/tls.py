"""TLS 1.3 with mutual authentication: how every connection opens.

The key in a node's certificate is the node's identity, so the handshake itself proves who is there;
:class:`TlsChannel` tells who it is and refuses any other node than the expected one.  The channel
never touches a socket: bytes go in through :meth:`~TlsChannel.receive` and come out of
:meth:`~TlsChannel.outgoing`.  Control and RPC stay on it; a data connection ends it
with :meth:`~TlsChannel.unwrap` and continues with its own frames on the same connection.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import hashlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck._platform import memory_file
from potluck._types import NodeId
from potluck.errors import (
    ChannelClosed,
    DistributedError,
    HandshakeRefused,
    MalformedFrame,
    PeerLost,
    UnsupportedOperation,
)
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity, node_id, short_name

# --------------------------------------------------------------------------------------------------
# The certificate authority that every member of a namespace can recompute.
#
# Its key is derived from the namespace's secret, so nobody has to be asked for a certificate: a
# node signs one for its own key, and every other member recognises the signature.  To show a
# certificate of the namespace proves membership; to use it proves the node's key, and with it the
# node's id. Everything here is deterministic: the same secret and key give the same bytes, always.

# Home machines boot without a clock (1970) or with a wrong one.  Membership ends when the secret is
# rotated, never by date, so the dates cover all that can be written; the last second of 9999 is
# what RFC 5280 prescribes for "no well-defined expiration".
_BEGIN = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)


@dataclass(frozen=True)
class Authority:
    """The authority of one namespace: its key, and the certificate that members trust."""

    key: Ed25519PrivateKey
    certificate: x509.Certificate

    @classmethod
    def of(cls, namespace: NetworkNamespace) -> Authority:
        """Recompute it from the secret.

        Its name contains the discovery tag, which strangers may know, and nothing else: a server
        shows its certificate before it knows whom it is talking to.
        """
        key = Ed25519PrivateKey.from_private_bytes(namespace.subkey("certificate authority"))
        name = _name(f"potluck {namespace.discovery_tag}")
        public_key = key.public_key()
        builder = (
            _builder(name, name, public_key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            # Only to sign certificates: every member has this key, so it must be nobody's identity.
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        return cls(key, builder.sign(key, None))

    def issue(self, public_key: Ed25519PublicKey) -> x509.Certificate:
        """A certificate for the node that has this key, as client and as server."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        name = _name(node_id(public_key.public_bytes_raw()))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(name, self.certificate.subject, public_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(issuer, critical=False)
        )
        return builder.sign(self.key, None)

    @property
    def der(self) -> bytes:
        """The certificate as bytes."""
        return self.certificate.public_bytes(Encoding.DER)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Ed25519PublicKey
) -> x509.CertificateBuilder:
    serial = hashlib.sha256(issuer.public_bytes() + public_key.public_bytes_raw()).digest()[:16]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(int.from_bytes(serial, "big") | 1)  # never zero
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


# --------------------------------------------------------------------------------------------------
# TLS contexts: what the two sides of a connection show, and what they accept.
#
# TLS 1.3 and nothing older, both sides authenticated by a certificate of the namespace, no session
# tickets.  The key in a node's certificate is the node's identity, so a finished handshake proves
# who is there.
#
# A context agrees on keys in one group.  A caller chooses among the groups that a server allows,
# and in OpenSSL's own list are some that cost a hundred milliseconds before anything is proved.
# Python's ``ssl`` can set only one group per context, so a server has a context for each group it
# allows, and answers with the one that fits the caller's hello.

_DESCRIPTORS = "/proc/self/fd"


class KeyGroup(enum.Enum):
    """A group in which keys may be agreed on; the first one that both sides have is used."""

    X25519 = 29
    P256 = 23

    @property
    def curve(self) -> str:
        """Its name in OpenSSL."""
        return _CURVES[self]


_CURVES = {KeyGroup.X25519: "X25519", KeyGroup.P256: "prime256v1"}


class NamespaceContext(ssl.SSLContext):
    """A context that remembers under which secret it opens connections."""

    tag: str = ""
    """The discovery tag of that secret."""


def server_context(
    namespace: NetworkNamespace, identity: NodeIdentity, group: KeyGroup = KeyGroup.X25519
) -> NamespaceContext:
    """For the side that was called."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, namespace, identity, group)
    # A ticket would arrive after the handshake, when the data lane already ends TLS; and a resumed
    # session would spare a peer the proof of its key.
    context.num_tickets = 0
    return context


def client_context(
    namespace: NetworkNamespace, identity: NodeIdentity, group: KeyGroup = KeyGroup.X25519
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
        raise HandshakeRefused("The other side used the group's own key instead of a node's")
    return key.public_bytes_raw()


def _context(
    protocol: int, namespace: NetworkNamespace, identity: NodeIdentity, group: KeyGroup
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


def _restrict(context: ssl.SSLContext, group: KeyGroup) -> None:
    """Agree on keys in this group; in P-256 if this OpenSSL has no X25519 (FIPS, or before 3.0)."""
    try:
        context.set_ecdh_curve(group.curve)
    except (ValueError, ssl.SSLError):
        context.set_ecdh_curve(KeyGroup.P256.curve)


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
    descriptor = memory_file("potluck")
    if descriptor is None:
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


# --------------------------------------------------------------------------------------------------
# What TLS says when it fails, in sentences for people.
#
# OpenSSL has its own words for a handshake that failed ("tlsv1 alert unknown ca").  Here they
# become what most likely happened at home and what to do about it; the original stays in ``cause``.

_SAME_NAMESPACE = (
    "Check that both are in the same group (--namespace, POTLUCK_NAMESPACE). If one was away when "
    "the secret was rotated, or never was paired, pair the two: potluck pair"
)
_NOT_POTLUCK = (
    "It is probably another program: check the address and the port. If it is Potluck, it may run "
    "with the insecure namespace while this side does not."
)
_OLD_TLS = (
    "Potluck speaks TLS 1.3 only. If the other side is Potluck too, update it; a virus scanner or "
    "proxy that inspects connections must leave this one alone."
)

# Words of OpenSSL -> what it means, what to do.  The first line that occurs decides.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it showed no certificate", _NOT_POTLUCK),
    ("CERTIFICATE_REQUIRED", "it asks for a certificate and got none", _SAME_NAMESPACE),
    ("UNKNOWN_CA", "it is not in our group, and said so", _SAME_NAMESPACE),
    ("PROTOCOL_VERSION", "it does not speak TLS 1.3, and said so", _OLD_TLS),
    ("UNSUPPORTED_PROTOCOL", "it does not speak TLS 1.3", _OLD_TLS),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS 1.3", _OLD_TLS),
    ("VERSION_TOO_LOW", "it does not speak TLS 1.3", _OLD_TLS),
    ("NO_SHARED_CIPHER", "it has no cipher in common with us", _OLD_TLS),
    ("ALERT_HANDSHAKE_FAILURE", "it has no cipher in common with us, and said so", _OLD_TLS),
    ("ALERT_BAD_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_DECRYPT_ERROR", "it does not accept our certificate", _SAME_NAMESPACE),
    ("ALERT_ACCESS_DENIED", "it does not accept us", _SAME_NAMESPACE),
)

# Why a certificate was not accepted: numbers of X509_V_ERR_*, stable across versions of OpenSSL.
_CERTIFICATES = {
    7: "its certificate is forged or damaged",
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: "its certificate is self-signed, not made by a group",
    19: "it belongs to another group",
    20: "it belongs to another group",
    21: "it belongs to another group",
}


_OTHER_SECRET = frozenset({19, 20, 21})


class AnotherNamespace(HandshakeRefused):
    """The other side showed a certificate under a secret that is not ours now."""


class NodeMismatch(HandshakeRefused):
    """A member of the namespace answered, but not the one that was called."""


def plain_text(first: bytes, host: str | None) -> HandshakeRefused:
    """The other side's first bytes are no TLS at all."""
    return HandshakeRefused(
        f"{_who(host)} does not speak TLS: it began with {first[:16]!r}",
        host=host,
        got=first[:16],
        hint=_NOT_POTLUCK,
    )


def during_handshake(error: ssl.SSLError, host: str | None) -> HandshakeRefused:
    """The two could not agree on a connection."""
    words = (error.reason or str(error)).upper().replace(" ", "_")
    meaning, hint = "the two could not agree", _NOT_POTLUCK
    kind = HandshakeRefused
    if isinstance(error, ssl.SSLCertVerificationError):
        default = "its certificate is not one that Potluck makes"
        meaning, hint = _CERTIFICATES.get(error.verify_code, default), _SAME_NAMESPACE
        if error.verify_code in _OTHER_SECRET:
            kind = AnotherNamespace
    else:
        for key, *found in _MEANINGS:
            if key in words:
                meaning, hint = found
                break
    message = f"No connection with {_who(host)}, because {meaning}"
    return kind(message, host=host, cause=_cause(error), hint=hint)


def on_open_channel(error: ssl.SSLError, host: str | None) -> DistributedError:
    """The connection had been made, and then something came that does not belong there."""
    return MalformedFrame(
        f"The bytes from {_who(host)} were damaged or forged on the way",
        host=host,
        cause=_cause(error),
        hint="If this happens again, suspect the memory or the network hardware of either machine.",
    )


def _who(host: str | None) -> str:
    return host or "the other side"


def _cause(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return (error.reason or str(error)).replace("_", " ").lower()


# --------------------------------------------------------------------------------------------------
# What a caller asks for in the first record of TLS, before TLS looks at it.
#
# A caller names the tag of the secret it has, in the field where browsers name a host, so that it
# can be answered under that secret.  It also lists the groups in which it can agree on keys; which
# of them is used is decided here, because the cheapest costs a thousandth of the dearest.  None of
# it proves anything: that is left to the handshake.  What is unusual here is treated as not said,
# and TLS itself reports what is wrong with it.

_HEADER = 5  # kind, version, length
_LARGEST = 1 << 14  # bytes of a record that is not encrypted
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_SUPPORTED_GROUPS = 10
_MOST_EXTENSIONS, _MOST_GROUPS = 64, 64  # of which we take notice; ours has about ten of either


def first_record_size(data: bytes | bytearray) -> int:
    r"""How many bytes the first record has with its header, as far as that is known yet.

    >>> first_record_size(b"\x16\x03\x01\x02\x00")
    517
    """
    if len(data) < _HEADER:
        return _HEADER
    length = int.from_bytes(data[3:5], "big")
    return _HEADER if length > _LARGEST else _HEADER + length


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What matters to us of the first message of a caller."""

    server: str = ""
    """The name of the server that is called; empty if there is none that we could have written."""
    groups: tuple[int, ...] = ()
    """The numbers of the groups that the caller supports, as IANA assigns them."""


def read_hello(record: bytes | bytearray) -> ClientHello:
    """Read a complete first record; anything unusual in it counts as not said."""
    reader = _Reader(bytes(record))
    server = ""
    groups: tuple[int, ...] = ()
    try:
        if reader.number(1) != _HANDSHAKE:
            return ClientHello()
        reader.skip(2 + 2)  # version, length of the record
        if reader.number(1) != _CLIENT_HELLO:
            return ClientHello()
        reader.skip(3 + 2 + 32)  # length, version, random
        reader.skip(reader.number(1))  # session
        reader.skip(reader.number(2))  # ciphers
        reader.skip(reader.number(1))  # compression
        extensions = _Reader(reader.take(reader.number(2)))
        for _ in range(_MOST_EXTENSIONS):
            if not extensions.rest:
                break
            kind = extensions.number(2)
            content = extensions.take(extensions.number(2))
            if kind == _SERVER_NAME:
                server = _server_name(_Reader(content))
            elif kind == _SUPPORTED_GROUPS:
                groups = _groups(content)
    except EOFError:
        pass
    return ClientHello(server, groups)


def _server_name(content: _Reader) -> str:
    content.skip(2)  # length of the list
    if content.number(1) != _HOST_NAME:
        return ""
    name = content.take(content.number(2))
    return name.decode("ascii") if name.isascii() else ""


def _groups(content: bytes) -> tuple[int, ...]:
    listed = content[2 : 2 + 2 * _MOST_GROUPS]
    return tuple(int.from_bytes(listed[at : at + 2], "big") for at in range(0, len(listed) - 1, 2))


class _Reader:
    """Takes numbers and spans off the front of some bytes; EOFError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.rest:
            raise EOFError
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int) -> None:
        self.take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")


# --------------------------------------------------------------------------------------------------

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
                self._fail(plain_text(bytes(view[:16]), self._host))
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
            self._fail(during_handshake(error, self._host), error)
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
            return on_open_channel(error, self._host)
        return during_handshake(error, self._host)

    def _refused(self, what: str) -> HandshakeRefused:
        hint = "It may belong to another group, run another version, or be another program."
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
