"""Reaching a node with several addresses: best first, and none holds up the next."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from potluck.errors import NoConnection
from potluck.identity.namespace import NetworkNamespace, SecurityWarning
from potluck.identity.node import NodeIdentity
from potluck.net import dial, tcp
from potluck.net.addresses import Address
from potluck.net.dial import reach
from potluck.net.listener import Acceptor
from potluck.net.secure_socket import SecureSocket, Security
from potluck.net.tls import AnotherNamespace, NodeMismatch
from support.ports import free_port
from support.threads import PATIENCE
from support.views import black_hole

LAB = NetworkNamespace.generate("lab")


def soon(seconds: float = PATIENCE) -> float:
    """A deadline."""
    return time.monotonic() + seconds


@contextlib.contextmanager
def node_at(host: str, port: int, namespace: NetworkNamespace = LAB) -> Iterator[Security]:
    """A member that listens there."""
    security = Security(namespace, NodeIdentity.ephemeral())
    acceptor = Acceptor(tcp.listen(host, port), lambda sock, _: sock.close(), security)
    with contextlib.closing(acceptor):
        yield security


@pytest.fixture
def me() -> Security:
    """Who dials."""
    return Security(LAB, NodeIdentity.ephemeral())


def places(port: int, *hosts: str) -> list[Address]:
    """Addresses with one port."""
    return [Address(host, port) for host in hosts]


def test_the_best_address_that_works_is_taken(me: Security) -> None:
    """Although others would as well."""
    port = free_port()
    with node_at("", port) as node:
        for order in (["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"]):
            address, sock = reach(me, places(port, *order), soon(), node.me)
            with contextlib.closing(sock):
                assert isinstance(sock, SecureSocket)
                assert sock.peer == node.me
                assert address.host == order[0]


def test_a_black_hole_holds_up_the_next_address_for_a_moment_only(
    me: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that accepts and says nothing; a port that is closed costs no time at all."""
    monkeypatch.setattr(dial, "NEXT_AFTER", 0.05)
    port = free_port()
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"]
    with (
        node_at("127.0.0.1", port) as node,
        black_hole("127.0.0.2", port),
        socket.create_server(("127.0.0.3", port)),
    ):
        begin = time.monotonic()
        address, sock = reach(me, places(port, *hosts), soon(), node.me)
        sock.close()
        assert address.host == "127.0.0.1"
        assert time.monotonic() - begin < dial.ATTEMPT


def test_no_other_address_is_bothered_while_the_best_one_answers(
    me: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second handshake would cost its machine what the first one has cost."""
    monkeypatch.setattr(dial, "NEXT_AFTER", PATIENCE)
    monkeypatch.setattr(dial, "SHAKING", PATIENCE)
    port = free_port()
    with node_at("127.0.0.1", port) as node, socket.create_server(("127.0.0.2", port)) as other:
        other.setblocking(False)
        address, sock = reach(me, places(port, "127.0.0.1", "127.0.0.2"), soon(), node.me)
        sock.close()
        assert address.host == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            other.accept()


def test_another_member_at_an_address_is_passed_over(me: Security) -> None:
    """The expected one is behind the next; alone, the other is named."""
    port = free_port()
    with node_at("127.0.0.1", port) as node, node_at("127.0.0.2", port):
        address, sock = reach(me, places(port, "127.0.0.2", "127.0.0.1"), soon(), node.me)
        sock.close()
        assert address.host == "127.0.0.1"
        with pytest.raises(NodeMismatch):
            reach(me, places(port, "127.0.0.2"), soon(), node.me)


def test_another_namespace_is_told_before_all_other_reasons(me: Security) -> None:
    """It may be somebody who was away while the secret changed."""
    port = free_port()
    with (
        node_at("127.0.0.2", port, NetworkNamespace.generate("other")),
        pytest.raises(AnotherNamespace) as caught,
    ):
        reach(me, places(port, "127.0.0.1", "127.0.0.2", "127.0.0.3"), soon())
    assert caught.value.host == f"127.0.0.2:{port}"


def test_every_address_has_its_reason(me: Security) -> None:
    """One that is alone speaks for itself."""
    port = free_port()
    with pytest.raises(NoConnection) as caught:
        reach(me, places(port, "127.0.0.1", "no-such-name.invalid"), soon())
    assert f"127.0.0.1:{port}: Connection refused" in str(caught.value)
    assert f"no-such-name.invalid:{port}: " in str(caught.value)
    with pytest.raises(ConnectionRefusedError):
        reach(me, places(port, "127.0.0.1"), soon())
    with pytest.raises(TimeoutError, match="no address"):
        reach(me, [], soon())


def test_an_attempt_that_goes_nowhere_ends(me: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, or at the deadline if that is earlier."""
    port = free_port()
    with black_hole("127.0.0.1", port):
        with pytest.raises(TimeoutError, match=f"no answer from 127.0.0.1:{port}"):
            reach(me, places(port, "127.0.0.1"), soon(0.05))
        monkeypatch.setattr(dial, "ATTEMPT", 0.05)
        with pytest.raises(TimeoutError, match="it did not answer"):
            reach(me, places(port, "127.0.0.1"), soon())
    monkeypatch.setattr(dial, "HANDSHAKE", 0.05)
    with (
        socket.create_server(("127.0.0.1", port)),  # accepts, and never says a word
        pytest.raises(TimeoutError, match="it did not answer"),
    ):
        reach(me, places(port, "127.0.0.1"), soon())


def test_somebody_who_hangs_up_is_no_refusal(me: Security) -> None:
    """It may be back in the next moment."""
    port = free_port()
    acceptor = Acceptor(tcp.listen("127.0.0.1", port), lambda *_: None)  # knows no TLS
    with contextlib.closing(acceptor), pytest.raises(ConnectionError):
        reach(me, places(port, "127.0.0.1"), soon())


def test_looking_goes_on_while_nothing_happens(me: Security) -> None:
    """And ends it all, leaving nothing open."""
    port, looks = free_port(), []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise KeyError

    with black_hole("127.0.0.1", port), pytest.raises(KeyError):
        reach(me, places(port, "127.0.0.1"), soon(), look=look)


def test_a_name_may_stand_for_several_addresses(me: Security) -> None:
    """They are tried one after the other, as the resolver gives them."""
    port = free_port()
    with node_at("127.0.0.1", port) as node:
        address, sock = reach(me, places(port, "localhost"), soon(), node.me)
        sock.close()
        assert address.host == "localhost"


def test_in_clear_whoever_is_there_is_taken() -> None:
    """The socket as it is."""
    with pytest.warns(SecurityWarning):
        security = Security(NetworkNamespace.insecure())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, sock = reach(security, [Address(*listener.getsockname())], soon())
        with contextlib.closing(sock):
            assert isinstance(sock, socket.socket)
            assert sock.getblocking()
