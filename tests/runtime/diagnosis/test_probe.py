"""Trying to meet somebody: every way in which that ends is told apart, and it always ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from potluck.backend.membership import Membership
from potluck.backend.port import NodePort
from potluck.net.addresses import Address
from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace, Protection
from potluck.net.security import Security
from potluck.runtime.diagnosis import probe as probe_module
from potluck.runtime.diagnosis.probe import probe
from potluck.runtime.diagnosis.scene import Outcome
from support.threads import PATIENCE


def circle(letter: str) -> NetworkNamespace:
    """A namespace without a roster: whoever has the secret is a member."""
    return NetworkNamespace("lab", letter.encode() * 32, protection=Protection.PASSPHRASE)


LAB, ATTIC = circle("l"), circle("a")


@pytest.fixture
def members() -> Membership:
    """Who we are."""
    return Membership(Security(LAB, NodeIdentity(b"m" * 32)))


@contextlib.contextmanager
def node(namespace: NetworkNamespace) -> Iterator[tuple[Address, NodePort]]:
    """A node of some namespace on this machine."""
    security = Security(namespace, NodeIdentity(b"n" * 32))
    with NodePort(security=security) as port:
        yield Address("127.0.0.1", port.port), port


@contextlib.contextmanager
def somebody(act: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Any other program, which takes one caller."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with door.accept()[0] as line:
                line.settimeout(PATIENCE)
                act(line)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", door.getsockname()[1])
        thread.join(PATIENCE)


def test_a_member_is_met_and_named(members: Membership) -> None:
    """Proved by TLS, on the very port that nodes use."""
    with node(LAB) as (address, port):
        result = probe(members, address)
        assert result.outcome is Outcome.MET
        assert result.node == port.process.node
        assert result.skew is not None
        assert abs(result.skew) < PATIENCE


def test_another_secret_is_another_namespace(members: Membership) -> None:
    """Found out without telling it ours."""
    with node(ATTIC) as (address, _):
        assert probe(members, address).outcome is Outcome.OTHER_NAMESPACE


def test_another_version_is_told_by_its_words(
    members: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS still works; the first frame does not."""
    monkeypatch.setattr("potluck.net.acceptor_callers.Greeting", _Newer)
    with node(LAB) as (address, _):
        result = probe(members, address)
        assert result.outcome is Outcome.OTHER_VERSION
        assert "protocol version" in result.words


class _Newer:
    """How a node of another version reads a hello."""

    wanted = 1
    is_complete = False

    def receive(self, _data: bytes) -> bool:
        """It does not know this form."""
        from potluck.net.frames import VersionMismatch

        raise VersionMismatch(99)


def test_a_port_where_nobody_listens_refuses(members: Membership) -> None:
    """At once."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = Address("127.0.0.1", door.getsockname()[1])
    assert probe(members, address).outcome is Outcome.REFUSED


def test_a_name_that_nobody_knows(members: Membership) -> None:
    """The resolver's words are kept."""
    result = probe(members, Address("no-such-machine.invalid", 1))
    assert result.outcome is Outcome.UNKNOWN_NAME
    assert "nobody knows this name" in result.words


def test_an_address_without_a_way_there(members: Membership) -> None:
    """The system says so by itself."""
    result = probe(members, Address("255.255.255.255", 1))
    assert result.outcome is Outcome.UNREACHABLE
    assert result.words


def test_another_program_is_not_potluck(members: Membership) -> None:
    """One that greets in clear, and one that hangs up."""
    with somebody(lambda line: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as address:
        assert probe(members, address).outcome is Outcome.NOT_POTLUCK
    with somebody(lambda line: None) as address:
        assert probe(members, address).outcome in {Outcome.FAILED, Outcome.NOT_POTLUCK}


def test_one_who_says_nothing_does_not_hold_us_up(
    members: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for talking is bounded too."""
    monkeypatch.setattr(probe_module, "TALKING", 0.2)
    with somebody(_read_all) as address:
        result = probe(members, address)
        assert result.outcome is Outcome.MUTE
        assert "said nothing" in result.words


def _read_all(line: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while line.recv(4096):
            pass
