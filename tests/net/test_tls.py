"""The authority of a namespace: recomputed by every member, valid whatever the clock says."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import (
    ChannelClosed,
    DistributedError,
    HandshakeRefused,
    MalformedFrame,
    PeerLost,
    UnsupportedOperation,
)
from potluck.identity.namespace import NetworkNamespace, SecurityWarning
from potluck.net import tls
from potluck.net.tls import (
    MAX_HANDSHAKE,
    AnotherNamespace,
    Authority,
    NodeMismatch,
    TlsChannel,
    client_context,
    first_record_size,
    peer_public_key,
    read_hello,
    server_context,
)
from support.hostile_hellos import hostile_hello
from support.tls_pair import (
    ATTIC,
    CALLED,
    CALLER,
    LAB,
    THIRD,
    Key,
    Raw,
    converse,
    open_pair,
    pair,
    stranger,
)

_KEY = Ed25519PublicKey.from_public_bytes(CALLER.public_key)
_YEARS = {"1970": 1, "1971": 31_536_000, "2090": 3_786_912_000, "9999": 253_402_214_400}


def common_name(name: x509.Name) -> str:
    """The readable part of a name."""
    return str(name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_every_member_computes_the_same_authority() -> None:
    """Byte for byte, also in another process; another secret gives another one."""
    script = (
        "from pathlib import Path; from potluck.net.tls import Authority;"
        "from potluck.identity.namespace import NetworkNamespace;"
        "print(Authority.of(NetworkNamespace('other name', b'l' * 32)).der.hex())"
    ).replace("other name", "other-name")
    elsewhere = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    assert bytes.fromhex(elsewhere) == Authority.of(LAB).der
    assert Authority.of(ATTIC).der != Authority.of(LAB).der


def test_a_node_gets_the_same_certificate_every_time() -> None:
    """Nothing in it is random, so nothing has to be kept."""
    first = Authority.of(LAB).issue(_KEY)
    assert first == Authority.of(LAB).issue(_KEY)
    assert common_name(first.subject) == CALLER.id
    assert first != Authority.of(LAB).issue(Ed25519PublicKey.from_public_bytes(CALLED.public_key))


def test_certificates_are_the_same_in_every_version() -> None:
    """Members with different versions recompute the same authority from the secret."""
    authority = Authority.of(LAB)
    found = [authority.der, authority.issue(_KEY).public_bytes(Encoding.DER)]
    assert [hashlib.sha256(der).hexdigest() for der in found] == [
        "3625b0a6fac6062ce0a0d8816b77c4bb37d57fcf5b7facd4f784b7dbc179fc12",
        "a29548abac8752be3f185c752ab4df92a82de936c3c5d5f1cd2966971e7b4d33",
    ]


def test_only_the_own_authority_signed_it() -> None:
    """The signature tells namespaces apart."""
    certificate = Authority.of(LAB).issue(_KEY)
    certificate.verify_directly_issued_by(Authority.of(LAB).certificate)
    with pytest.raises((InvalidSignature, ValueError)):
        certificate.verify_directly_issued_by(Authority.of(ATTIC).certificate)


def test_certificates_reveal_the_tag_and_the_node_id_only() -> None:
    """Strangers get to see them, so neither the secret nor its name may be inside."""
    authority = Authority.of(LAB)
    certificate = authority.issue(_KEY)
    assert common_name(certificate.issuer) == f"potluck {LAB.discovery_tag}"
    for der in (authority.der, certificate.public_bytes(Encoding.DER)):
        assert LAB.secret not in der
        assert LAB.name.encode() not in der
        assert authority.key.private_bytes_raw() not in der


def test_certificates_are_valid_for_ever() -> None:
    """From the beginning of computer time to the last second that can be written."""
    for certificate in (Authority.of(LAB).certificate, Authority.of(LAB).issue(_KEY)):
        assert certificate.not_valid_before_utc == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        assert certificate.not_valid_after_utc.year == 9999


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
@pytest.mark.parametrize("purpose", ["sslclient", "sslserver"])
@pytest.mark.parametrize("year", list(_YEARS))
def test_openssl_accepts_them_at_any_time(tmp_path: Path, purpose: str, year: str) -> None:
    """A board without a clock, and a clock that is wrong by decades, break nothing."""
    authority = Authority.of(LAB)
    (tmp_path / "ca").write_bytes(authority.certificate.public_bytes(Encoding.PEM))
    (tmp_path / "node").write_bytes(authority.issue(_KEY).public_bytes(Encoding.PEM))
    command = ["openssl", "verify", "-x509_strict", "-attime", str(_YEARS[year])]
    command += ["-purpose", purpose, "-CAfile", str(tmp_path / "ca"), str(tmp_path / "node")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_authority_may_sign_certificates_and_nothing_else() -> None:
    """Every member has its key, so it must not pass for a node; and nodes cannot sign."""
    authority = Authority.of(LAB)
    usage = authority.certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    constraints = authority.issue(_KEY).extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca


# --------------------------------------------------------------------------------------------------
# The first record of TLS: name and groups are read where they were written, nowhere else.


def client_hello(
    name: str | None,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    context: ssl.SSLContext | None = None,
) -> bytes:
    """What opens a TLS conversation with a server of that name."""
    context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HELLO = client_hello("abcdefgh234567abcdefgh2345")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize("name", ["abcdefgh234567abcdefgh2345", "a", "x" * 63, None])
def test_the_name_comes_back_as_it_was_given(name: str | None, version: ssl.TLSVersion) -> None:
    """Also where there is none."""
    hello = client_hello(name, version)
    assert first_record_size(hello) == len(hello)
    assert read_hello(hello).server == (name or "")


def test_a_record_is_complete_when_all_of_it_is_there() -> None:
    """Its length is known from the fifth byte on; one that cannot be is left to TLS."""
    for size in range(len(HELLO)):
        assert size < first_record_size(HELLO[:size])
        assert not read_hello(HELLO[:size]).server or size > HELLO.index(b"abcdefgh")
    assert first_record_size(b"\x16\x03\x01\x40\x00") == 5 + 16384
    assert first_record_size(b"\x16\x03\x01\x40\x01") == 5
    assert first_record_size(b"\x16\x03\x01\xff\xff") == 5


@given(st.binary(max_size=600))
def test_noise_names_nobody(data: bytes) -> None:
    """And raises nothing."""
    assert first_record_size(data) >= 5
    assert read_hello(data).server.isascii()


@given(st.integers(0, len(HELLO) - 1), st.integers(1, 255))
def test_a_damaged_record_names_nobody_or_plain_letters(place: int, change: int) -> None:
    """Whatever it names still has to be proved."""
    damaged = bytearray(HELLO)
    damaged[place] ^= change
    assert read_hello(damaged).server.isascii()


def test_what_is_no_hello_names_nobody() -> None:
    """An alert, another message of the handshake, a name that is no host, no letters."""
    at = HELLO.index(b"abcdefgh")
    for place, value in ((0, 21), (5, 2), (at - 3, 1), (at, 0xE9)):
        other = bytearray(HELLO)
        other[place] = value
        assert not read_hello(other).server


def test_the_groups_come_back_as_they_were_given() -> None:
    """Up to a bound: a caller that lists thousands has said enough."""
    for group in ("X25519", "prime256v1"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ecdh_curve(group)
        hello = client_hello(None, context=context)
        assert read_hello(hello).groups == ({"X25519": 29, "prime256v1": 23}[group],)
    assert 29 in read_hello(HELLO).groups
    many = [*range(256, 1256)]
    assert read_hello(hostile_hello("X25519", groups=many)).groups == tuple(many[:64])


# --------------------------------------------------------------------------------------------------
# TLS channels: members prove who they are, strangers are refused in words, the end is exact.

# --- members ---


def test_two_members_learn_who_the_other_is() -> None:
    """From the keys in their certificates, and both at the same time."""
    client, server = pair(expected=CALLED.id)
    assert not client.handshake_done
    with pytest.raises(ChannelClosed, match="has not proved"):
        _ = server.peer
    assert converse(client, server) == (None, None)
    assert (client.peer, server.peer) == (CALLED.id, CALLER.id)
    assert server.peer_public_key == CALLER.public_key
    assert client._tls.version() == "TLSv1.3"


def test_two_processes_of_one_node_can_meet() -> None:
    """They share the key; what tells them apart is not the business of TLS."""
    client = TlsChannel(client_context(LAB, CALLED), server_side=False, expected=CALLED.id)
    server = TlsChannel(server_context(LAB, CALLED), server_side=True)
    assert converse(client, server) == (None, None)


@given(st.binary(max_size=70_000), st.integers(1, 20_000))
def test_what_is_written_is_read(data: bytes, size: int) -> None:
    """Whole and in order, however the network cuts it; and it does not travel in clear."""
    client, server = open_pair()
    client.write(data)
    wire = client.outgoing()
    assert len(data) < 16 or data[:16] not in wire
    received = b""
    for start in range(0, len(wire), size):
        server.receive(wire[start : start + size])
        received += server.read()
    assert received == data
    assert server.read() == b""


def test_the_first_data_may_come_with_the_end_of_the_handshake() -> None:
    """A client need not wait for an answer before it writes."""
    client, server = pair()
    server.receive(client.outgoing())
    client.receive(server.outgoing())
    client.write(b"hello")
    server.receive(memoryview(client.outgoing()))
    assert server.read() == b"hello"


# --- strangers ---


def test_another_node_than_the_expected_one_is_refused() -> None:
    """Also if it is a member; and it does not get our certificate to see."""
    client, server = pair(expected=THIRD.id)
    server.receive(client.outgoing())
    with pytest.raises(NodeMismatch) as caught:
        client.receive(server.outgoing())
    error = caught.value
    assert (error.expected, error.got, error.host) == (THIRD.id, CALLED.id, "lion")
    assert f"{CALLED.short_name} ({CALLED.id}) answered instead of {THIRD.short_name}" in str(error)
    assert client.outgoing() == b""
    assert not client.handshake_done


def test_members_of_another_namespace_refuse_each_other() -> None:
    """Both are told in the same words what to check."""
    client = TlsChannel(client_context(ATTIC, CALLER), server_side=False)
    server = TlsChannel(server_context(LAB, CALLED), server_side=True)
    refused, told = converse(client, server)
    for error in (refused, told):
        assert isinstance(error, HandshakeRefused)
        assert "POTLUCK_NAMESPACE" in str(error)
        assert "potluck pair" in str(error)
    assert "it belongs to another group" in str(refused)
    assert "is not in our group, and said so" in str(told)


def test_a_client_of_another_namespace_is_refused_even_if_it_accepts_us() -> None:
    """It trusts everybody, but its certificate is from elsewhere; it learns why."""
    key = Ed25519PrivateKey.generate()
    certificate = Authority.of(ATTIC).issue(key.public_key())
    error = refusal_of_client(certificate, key)
    assert "it belongs to another group" in str(error)


def test_a_client_without_a_certificate_is_refused() -> None:
    """Whoever shows nothing does not get in."""
    assert "it showed no certificate" in str(refusal_of_client(None, None))


def test_a_self_signed_certificate_is_refused() -> None:
    """Even one that copies every name of the namespace."""
    key = Ed25519PrivateKey.generate()
    assert "self-signed" in str(refusal_of_client(certificate_for(key, key), key))
    copied = Authority(key, Authority.of(LAB).certificate).issue(key.public_key())
    assert "it belongs to another group" in str(refusal_of_client(copied, key))


def test_a_forged_signature_is_refused() -> None:
    """A certificate of the namespace with one bit changed is none."""
    key = Ed25519PrivateKey.generate()
    der = bytearray(Authority.of(LAB).issue(key.public_key()).public_bytes(Encoding.DER))
    der[-1] ^= 1
    error = refusal_of_client(x509.load_der_x509_certificate(bytes(der)), key)
    assert "forged or damaged" in str(error)


def test_a_node_cannot_vouch_for_another() -> None:
    """A member's certificate is not an authority."""
    member, guest = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    sponsor = Authority.of(LAB).issue(member.public_key())
    error = refusal_of_client(certificate_for(guest, member, issuer=sponsor.subject), guest)
    assert "it belongs to another group" in str(error)


def test_the_key_of_the_authority_is_nobodys_identity() -> None:
    """Every member has it, so it proves nothing: refused as it is, and with a certificate on it."""
    authority = Authority.of(LAB)
    error = refusal_of_client(authority.certificate, authority.key)
    assert "not one that Potluck makes" in str(error)
    error = refusal_of_client(authority.issue(authority.key.public_key()), authority.key)
    assert "the group's own key" in str(error)
    assert error.host == "otter"


def test_only_ed25519_keys_name_a_node() -> None:
    """A member that issues itself a certificate for another kind of key is refused."""
    key = rsa.generate_private_key(65537, 2048)
    authority = Authority.of(LAB)
    certificate = certificate_for(key, authority.key, issuer=authority.certificate.subject)
    assert "not for an Ed25519 key" in str(refusal_of_client(certificate, key))


def test_older_tls_is_refused_by_both_sides() -> None:
    """As a client and as a server."""
    old_client = stranger(server_side=False)
    old_client.maximum_version = ssl.TLSVersion.TLSv1_2
    server = TlsChannel(server_context(LAB, CALLED), server_side=True)
    with pytest.raises(HandshakeRefused, match=r"does not speak TLS 1\.3.*update it"):
        Raw(old_client).meet(server)
    key = Ed25519PrivateKey.generate()
    certificate = Authority.of(LAB).issue(key.public_key())
    old_server = stranger(server_side=True, certificate=certificate, key=key)
    old_server.maximum_version = ssl.TLSVersion.TLSv1_2
    client = TlsChannel(client_context(LAB, CALLER), server_side=False)
    with pytest.raises(HandshakeRefused, match=r"does not speak TLS 1\.3, and said so"):
        Raw(old_server, server_side=True).meet(client)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-OpenSSH", b"\0", b"\x80\x2e"])
@pytest.mark.parametrize("server_side", [True, False])
def test_plain_text_is_recognised_from_its_first_byte(first: bytes, server_side: bool) -> None:
    """What somebody says who does not speak TLS is quoted, safely."""
    context = (server_context if server_side else client_context)(LAB, CALLED)
    channel = TlsChannel(context, server_side=server_side, host="10.0.0.7")
    with pytest.raises(HandshakeRefused, match=r"10\.0\.0\.7 does not speak TLS") as caught:
        channel.receive(first)
    assert repr(first[:16]) in str(caught.value)
    assert caught.value.host == "10.0.0.7"


def test_somebody_unknown_gets_64_kib_and_no_more() -> None:
    """A handshake that never ends is cut off, in pieces or at once."""
    # A hello that announces 130,816 bytes, which OpenSSL would patiently collect.
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xff\x00" + bytes(16380)
    for pieces in ([record * 8], [record] * 8):
        server = TlsChannel(server_context(LAB, CALLED), server_side=True)
        with pytest.raises(HandshakeRefused, match="65536 bytes without a handshake"):
            _feed(server, pieces)
        assert server._before <= MAX_HANDSHAKE


def test_the_limit_does_not_count_what_follows_the_handshake() -> None:
    """A peer that proves itself and sends a lot at once is welcome."""
    client, server = pair()
    server.receive(client.outgoing())
    client.receive(server.outgoing())
    client.write(bytes(10 * MAX_HANDSHAKE))
    server.receive(client.outgoing())
    assert server.read() == bytes(10 * MAX_HANDSHAKE)


@given(st.binary(max_size=200), st.integers(0, 300), st.booleans())
def test_no_bytes_make_a_channel_fail_in_an_unknown_way(
    noise: bytes, position: int, server_side: bool
) -> None:
    """Whatever arrives, in place of a handshake or in its middle, is refused with our errors."""
    client, server = pair()
    hello = client.outgoing()
    receiver, good = (server, hello) if server_side else (client, b"")
    if not server_side:
        server.receive(hello)
        good = server.outgoing()
    data = good[:position] + noise + good[position + len(noise) :]
    with pytest.raises(DistributedError):
        _receive_to_the_end(receiver, data)
    with pytest.raises(ChannelClosed, match="has failed before"):
        receiver.receive(b"more")


# --- the end ---


def test_a_connection_that_ends_too_early_is_an_error() -> None:
    """During the handshake it is a refusal, later a loss; after a farewell it is neither."""
    client, server = pair()
    with pytest.raises(HandshakeRefused, match="closed the connection before"):
        server.receive_eof()
    client, server = open_pair()
    with pytest.raises(PeerLost, match="ended without a word"):
        client.receive_eof()
    client, server = open_pair()
    client.unwrap()
    server.receive(client.outgoing())
    server.receive_eof()
    assert server.closed_by_peer
    assert server.read() == b""


def test_a_refused_client_learns_it_at_the_first_answer() -> None:
    """Its own handshake was done before the server had looked at its certificate."""
    key = Ed25519PrivateKey.generate()
    context = client_context(LAB, CALLER)
    wrong = stranger(
        server_side=False, certificate=Authority.of(ATTIC).issue(key.public_key()), key=key
    )
    wrong.load_verify_locations(cadata=Authority.of(LAB).der)
    wrong.verify_mode = context.verify_mode
    client = TlsChannel(wrong, server_side=False, host="lion")
    server = TlsChannel(server_context(LAB, CALLED), server_side=True)
    server.receive(client.outgoing())
    client.receive(server.outgoing())
    assert client.handshake_done
    with pytest.raises(HandshakeRefused):
        server.receive(client.outgoing())
    client.receive(server.outgoing())
    with pytest.raises(HandshakeRefused, match=r"lion.*is not in our group"):
        client.receive_eof()


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_delivers_nothing(position: int, change: int) -> None:
    """Damage or forgery ends the channel; what was damaged is never read."""
    client, server = open_pair()
    client.write(b"first")
    server.receive(client.outgoing())
    assert server.read() == b"first"
    client.write(b"second" * 20)
    wire = bytearray(client.outgoing())
    wire[position % len(wire)] ^= change
    server.receive(wire)
    with pytest.raises((MalformedFrame, PeerLost)):
        _read_all(server)
    with pytest.raises(ChannelClosed, match="has failed before"):
        server.read()


def test_a_record_cannot_be_replayed() -> None:
    """The second copy is as good as forged."""
    client, server = open_pair()
    client.write(b"pay 10")
    wire = client.outgoing()
    server.receive(wire)
    assert server.read() == b"pay 10"
    server.receive(wire)
    with pytest.raises(MalformedFrame, match="otter were damaged or forged"):
        server.read()


def test_the_wrong_order_of_calls_is_refused() -> None:
    """Nothing is written before, or after the end; and there is no rest before it."""
    client, server = pair()
    for action in (client.unwrap, client.leftover, lambda: client.write(b"early")):
        with pytest.raises(ChannelClosed):
            action()
    assert converse(client, server) == (None, None)
    assert not client.unwrap()
    with pytest.raises(ChannelClosed, match="ending"):
        client.write(b"late")
    with pytest.raises(ChannelClosed, match="no rest"):
        client.leftover()


def test_a_channel_that_has_failed_is_of_no_more_use() -> None:
    """Every call says so, and why, from its first byte on or after the handshake."""
    early, _ = pair()
    late, other = open_pair()
    other.write(b"x")
    damaged = bytearray(other.outgoing())
    damaged[-1] ^= 1

    def hear(channel: TlsChannel, wrong: bytes) -> None:
        channel.receive(wrong)
        channel.read()

    for channel, wrong in ((early, b"GET / HTTP/1.1"), (late, bytes(damaged))):
        with pytest.raises(DistributedError) as first:
            hear(channel, wrong)
        assert not isinstance(first.value, ChannelClosed)
        for action in (
            lambda channel=channel: channel.receive(b"x"),
            lambda channel=channel: channel.write(b"x"),
            channel.receive_eof,
            channel.read,
            channel.unwrap,
        ):
            with pytest.raises(ChannelClosed, match="has failed before") as again:
                action()
            assert again.value.cause == str(first.value)


@given(
    before=st.tuples(st.binary(max_size=40_000), st.binary(max_size=40_000)),
    after=st.tuples(st.binary(max_size=40_000), st.binary(max_size=40_000)),
    cuts=st.lists(st.integers(0, 90_000), max_size=6),
)
def test_raw_bytes_behind_the_end_arrive_unshifted(
    before: tuple[bytes, bytes], after: tuple[bytes, bytes], cuts: list[int]
) -> None:
    """Both sides write, end TLS and go on raw in one breath, cut anywhere: nothing is lost."""
    client, server = open_pair()
    wires = []
    for channel, plain, raw in zip((client, server), before, after, strict=True):
        channel.write(plain)
        assert not channel.unwrap()
        wires.append(channel.outgoing() + raw)
    for channel, wire, plain, raw in (
        (server, wires[0], before[0], after[0]),
        (client, wires[1], before[1], after[1]),
    ):
        received = b""
        for start, end in pairwise(sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})):
            channel.receive(wire[start:end])
            received += channel.read()
            channel.unwrap()
        assert channel.unwrap()
        assert received + channel.read() == plain
        assert channel.leftover() == raw
        assert channel.outgoing() == b""
        channel.receive_eof()


def test_bytes_cut_one_by_one_are_unshifted_too() -> None:
    """The end is found between any two bytes."""
    client, server = open_pair()
    client.write(b"key")
    client.unwrap()
    for byte in client.outgoing() + b"\x17\x03\x03 looks like a record":
        server.receive(bytes([byte]))
        server.unwrap()
    assert server.read() == b"key"
    assert server.leftover() == b"\x17\x03\x03 looks like a record"


# --- real sockets ---


def test_the_data_lane_goes_on_raw_on_a_real_connection() -> None:
    """Over TCP: keys inside TLS, the end, and megabytes of raw bytes directly behind it."""
    raw = bytes(range(256)) * 8192  # 2 MiB, more than all buffers between the two
    results: dict[str, tuple[bytes, bytes]] = {}

    def called(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        channel = TlsChannel(server_context(LAB, CALLED), server_side=True)
        results["called"] = exchange_and_go_raw(connection, channel, b"server key", raw)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=called, args=(listener,))
        thread.start()
        caller = socket.create_connection(listener.getsockname())
        channel = TlsChannel(client_context(LAB, CALLER), server_side=False, expected=CALLED.id)
        results["caller"] = exchange_and_go_raw(caller, channel, b"client key", raw[::-1])
        thread.join()
    assert results["called"] == (b"client key", raw[::-1])
    assert results["caller"] == (b"server key", raw)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "showed no certificate"),
        (["-tls1_2"], r"does not speak TLS 1\.3"),
        (["-cert", "own", "-key", "own"], "self-signed"),
    ],
)
def test_openssl_from_the_command_line_is_refused(
    tmp_path: Path, options: list[str], words: str
) -> None:
    """The tools of a curious neighbour get a refusal, and the log has the reason."""
    request = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=x"]
    own = subprocess.run([*request, "-keyout", "-"], check=True, capture_output=True).stdout
    (tmp_path / "own").write_bytes(own)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        with subprocess.Popen(
            ["openssl", "s_client", "-connect", address, *options],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as neighbour:
            connection, _ = listener.accept()
            channel = TlsChannel(server_context(LAB, CALLED), server_side=True)
            with connection, pytest.raises(HandshakeRefused, match=words):
                _shake_hands(connection, channel)
            neighbour.communicate()


# --- helpers ---


def exchange_and_go_raw(
    connection: socket.socket, channel: TlsChannel, key: bytes, raw: bytes
) -> tuple[bytes, bytes]:
    """What a data lane does; returns the key and the raw bytes of the other side."""
    with connection:
        connection.settimeout(20)
        _shake_hands(connection, channel)
        channel.write(key)
        channel.unwrap()
        wire = channel.outgoing() + raw  # one breath: nothing is awaited in between
        sender = threading.Thread(target=_send_and_finish, args=(connection, wire))
        sender.start()
        while not channel.unwrap():
            channel.receive(connection.recv(4096))
        received = channel.leftover()
        while data := connection.recv(65536):
            received += data
        sender.join()
        return channel.read(), received


def _send_and_finish(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def _shake_hands(connection: socket.socket, channel: TlsChannel) -> None:
    connection.sendall(channel.outgoing())
    while not channel.handshake_done:
        channel.receive(connection.recv(4096))
        connection.sendall(channel.outgoing())


def _feed(channel: TlsChannel, pieces: list[bytes]) -> None:
    for piece in pieces:
        channel.receive(piece)


def _receive_to_the_end(channel: TlsChannel, data: bytes) -> None:
    channel.receive(data)
    channel.receive_eof()


def _read_all(channel: TlsChannel) -> None:
    """To the end: a changed length may announce more than ever comes."""
    assert channel.read() == b""
    channel.receive_eof()


def refusal_of_client(certificate: x509.Certificate | None, key: Key | None) -> HandshakeRefused:
    """What the server says about a client that shows this."""
    server = TlsChannel(server_context(LAB, CALLED), server_side=True, host="otter")
    client = Raw(stranger(server_side=False, certificate=certificate, key=key))
    with pytest.raises(HandshakeRefused) as caught:
        client.meet(server)
    assert not server.handshake_done
    return caught.value


def certificate_for(
    key: Key, signer: Ed25519PrivateKey, *, issuer: x509.Name | None = None
) -> x509.Certificate:
    """A certificate in our own format for any key, signed by whoever; by default by ``key``."""
    template = Authority.of(LAB).issue(Ed25519PublicKey.from_public_bytes(CALLER.public_key))
    builder = (
        x509.CertificateBuilder()
        .subject_name(template.subject)
        .issuer_name(issuer or template.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
    )
    for extension in template.extensions:
        value: x509.ExtensionType = extension.value
        if isinstance(value, x509.SubjectKeyIdentifier):
            value = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        elif isinstance(value, x509.AuthorityKeyIdentifier):
            value = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(value, critical=extension.critical)
    return builder.sign(signer, None)


# --------------------------------------------------------------------------------------------------
# TLS contexts: nothing older, nobody unknown, and no key on the disk.

MAKERS = [client_context, server_context]


@pytest.mark.parametrize("make", MAKERS)
def test_a_context_demands_tls_1_3_and_a_certificate(
    make: Callable[..., ssl.SSLContext],
) -> None:
    """Both sides, without compression and without trust in anybody but the namespace."""
    context = make(LAB, CALLER)
    assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.options & ssl.OP_NO_TICKET
    assert context.keylog_filename is None
    assert len(context.get_ca_certs()) == 1


def test_where_openssl_lacks_x25519_keys_are_agreed_on_in_p256(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with FIPS: no other group takes its place."""
    monkeypatch.setitem(tls._CURVES, tls.KeyGroup.X25519, "unknown")
    client = TlsChannel(client_context(LAB, CALLER), server_side=False)
    assert read_hello(client.outgoing()).groups == (tls.KeyGroup.P256.value,)


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [
        (7, "forged or damaged", HandshakeRefused),
        (9, "not valid yet", HandshakeRefused),
        (10, "has expired", HandshakeRefused),
        (18, "is self-signed", HandshakeRefused),
        (19, "belongs to another group", AnotherNamespace),
        (20, "belongs to another group", AnotherNamespace),
        (21, "belongs to another group", AnotherNamespace),
        (22, "is not one that Potluck makes", HandshakeRefused),
    ],
)
def test_every_reason_of_openssl_has_our_words(
    code: int, words: str, kind: type[HandshakeRefused]
) -> None:
    """Only another secret is another namespace."""
    error = ssl.SSLCertVerificationError("verify failed")
    error.reason = "CERTIFICATE_VERIFY_FAILED"
    error.verify_code, error.verify_message = code, "in its own words"
    found = tls.during_handshake(error, "otter")
    assert type(found) is kind
    assert words in found.message
    assert (found.host, found.cause) == ("otter", "in its own words")


def test_there_are_no_session_tickets() -> None:
    """After the handshake a server has nothing to add, and no session can be taken up again."""
    assert server_context(LAB, CALLED).num_tickets == 0
    client, server = open_pair()
    assert server.outgoing() == b""
    assert client._tls.session is None or not client._tls.session.has_ticket


@pytest.mark.parametrize("make", MAKERS)
def test_the_insecure_namespace_has_no_tls(make: Callable[..., ssl.SSLContext]) -> None:
    """Nobody gets a context that merely looks protected."""
    with pytest.warns(SecurityWarning):
        plain = NetworkNamespace.insecure()
    with pytest.raises(UnsupportedOperation, match="plain TCP"):
        make(plain, CALLER)


def test_the_key_goes_through_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has files in memory, no file appears on the disk at any time."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")

    def never(*_: object, **__: object) -> None:
        pytest.fail("a temporary directory was made")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", never)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    client_context(LAB, CALLER)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


@pytest.mark.parametrize("lack", ["memfd_create", "permission", "/proc"])
def test_elsewhere_an_encrypted_file_exists_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """Even a crash at that moment leaves nothing of use, and nothing remains afterwards."""
    seen: list[bytes] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(context: ssl.SSLContext, path: str, password: bytes) -> None:
        seen.append(Path(path).read_bytes())
        assert Path(path).is_relative_to(tmp_path)
        assert Path(path).parent.stat().st_mode & 0o077 == 0
        load(context, path, password=password)

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    if lack == "memfd_create":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif lack == "permission":
        monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    else:
        monkeypatch.setattr(tls, "_DESCRIPTORS", str(tmp_path / "no proc"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    client_context(LAB, CALLER)
    assert b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in seen[0]
    assert b"-----BEGIN PRIVATE KEY-----" not in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_the_node_id_comes_from_the_key_in_the_certificate() -> None:
    """Each side sees the other's."""
    client, server = open_pair()
    assert client.peer == CALLED.id
    assert server.peer == CALLER.id


class _Shows:
    """An SSL object that shows these bytes as the peer's certificate."""

    def __init__(self, der: bytes | None) -> None:
        self.der = der

    def getpeercert(self, *, binary_form: bool) -> bytes | None:
        return self.der if binary_form else None


@pytest.mark.parametrize(("der", "words"), [(None, "no certificate"), (b"0\x82", "unreadable")])
def test_without_a_readable_certificate_there_is_no_node(der: bytes | None, words: str) -> None:
    """The second lock behind the one in OpenSSL."""
    with pytest.raises(HandshakeRefused, match=words):
        peer_public_key(_Shows(der))  # type: ignore[arg-type]
