"""TLS contexts: nothing older, nobody unknown, and no key on the disk."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.errors import HandshakeRefused, UnsupportedOperation
from potluck.net import tls_context
from potluck.net.namespace import NetworkNamespace, SecurityWarning
from potluck.net.tls import client_context, peer_node_id, server_context
from support.tls_pair import CALLED, CALLER, LAB, open_pair

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
    assert context.keylog_filename is None
    assert len(context.get_ca_certs()) == 1


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
        monkeypatch.setattr(tls_context, "_DESCRIPTORS", str(tmp_path / "no proc"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    client_context(LAB, CALLER)
    assert b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in seen[0]
    assert b"-----BEGIN PRIVATE KEY-----" not in seen[0]
    assert list(tmp_path.iterdir()) == []


def test_the_node_id_comes_from_the_key_in_the_certificate() -> None:
    """Each side sees the other's."""
    client, server = open_pair()
    assert peer_node_id(client._tls) == CALLED.id
    assert peer_node_id(server._tls) == CALLER.id


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
        peer_node_id(_Shows(der))  # type: ignore[arg-type]
