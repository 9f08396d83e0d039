"""Two who look around measure how much goes through; nobody can keep the other busy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from potluck._version import Build
from potluck.backend.port import NodePort
from potluck.cluster.bandwidth import Bandwidth, ProbeLimits
from potluck.doctor import probe
from potluck.doctor.facts import ProbeOutcome
from potluck.doctor.probe import PeerThroughput
from potluck.doctor.probe import probe as probe_probe
from potluck.identity.namespace import NetworkNamespace, Protection
from potluck.identity.node import NodeIdentity
from potluck.membership.topology import Battery, NodeProfile
from potluck.net.addresses import Address
from potluck.net.frames import encode_opening
from potluck.net.secure_socket import OpeningSocket, Security
from potluck.trust.membership_store import TrustStore
from support.threads import PATIENCE

CONSULTING_LAB = NetworkNamespace("lab", b"l" * 32, protection=Protection.PASSPHRASE)


@contextlib.contextmanager
def doctor(letter: str, job: str = "looking", *, plugged: bool = True) -> Iterator[PeerThroughput]:
    """Somebody who looks around."""
    security = Security(CONSULTING_LAB, NodeIdentity(letter.encode() * 32))
    with NodePort(security=security) as port:
        profile = NodeProfile(host=letter, battery=Battery(50, plugged=plugged))
        one = PeerThroughput(port, job, profile)
        yield one
        one.close()


def where(one: PeerThroughput) -> list[Address]:
    """Where it is."""
    return [Address("127.0.0.1", one.port.port)]


def test_a_rate_is_measured_and_the_battery_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a moment; on loopback it is more than any cable at home carries."""
    monkeypatch.setattr(probe, "LIMITS", ProbeLimits(seconds=0.05, patience=PATIENCE))
    with doctor("a") as one, doctor("b", plugged=False) as other:
        rate = one.ask(where(other))
        assert rate is not None
        assert rate.bytes_per_second > 1_000_000
        assert rate.down > 1_000_000
        assert 0 < rate.latency < 1_000_000_000
        assert rate.host == "127.0.0.1"
        assert rate.is_on_battery


def test_those_who_do_something_else_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job, a crowd, or nobody at all."""
    with doctor("a") as one, doctor("b", "training") as other:
        assert one.ask(where(other)) is None
    assert other.ask([Address("127.0.0.1", 1)]) is None
    monkeypatch.setattr(probe, "SERVED", 0)
    with doctor("a") as one, doctor("b") as busy:
        assert one.ask(where(busy)) is None


def test_one_who_stops_half_way_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides have a deadline."""
    monkeypatch.setattr(probe, "LIMITS", ProbeLimits(seconds=0.1, patience=1.0))
    measure = probe._measure

    def stop(sock: OpeningSocket, *, first: bool) -> Bandwidth:
        if first:
            return measure(sock, first=True)
        assert sock.recv(1)
        asked.wait(PATIENCE)
        return Bandwidth(0, 0)

    asked = threading.Event()
    monkeypatch.setattr(probe, "_measure", stop)
    with doctor("a") as one, doctor("b") as other:
        assert one.ask(where(other)) is None
        asked.set()


# --------------------------------------------------------------------------------------------------
# Trying to meet somebody: every way in which that ends is told apart, and it always ends.


def group(letter: str) -> NetworkNamespace:
    """A namespace without a roster: whoever has the secret is a member."""
    return NetworkNamespace("lab", letter.encode() * 32, protection=Protection.PASSPHRASE)


LAB, ATTIC = group("l"), group("a")


@pytest.fixture
def members() -> TrustStore:
    """Who we are."""
    return TrustStore(Security(LAB, NodeIdentity(b"m" * 32)))


@contextlib.contextmanager
def node(namespace: NetworkNamespace) -> Iterator[tuple[Address, NodePort]]:
    """A node of some namespace on this machine."""
    security = Security(namespace, NodeIdentity(b"n" * 32))
    with NodePort(security=security) as port:
        yield Address("127.0.0.1", port.port), port


@contextlib.contextmanager
def somebody(act: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Any other program, which takes one caller."""
    with socket.create_server(("127.0.0.1", 0)) as port:

        def serve() -> None:
            with port.accept()[0] as line:
                line.settimeout(PATIENCE)
                act(line)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", port.getsockname()[1])
        thread.join(PATIENCE)


def test_a_member_is_met_and_named(members: TrustStore) -> None:
    """Proved by TLS, on the very port that nodes use."""
    with node(LAB) as (address, port):
        result = probe_probe(members, address)
        assert result.outcome is ProbeOutcome.MET
        assert result.node == port.process.node
        assert result.skew is not None
        assert abs(result.skew) < PATIENCE


def test_another_secret_is_another_namespace(members: TrustStore) -> None:
    """Found out without telling it ours."""
    with node(ATTIC) as (address, _):
        assert probe_probe(members, address).outcome is ProbeOutcome.OTHER_NAMESPACE


def test_another_version_is_told_from_the_rest(
    members: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS still works; the first frame says what cannot be."""
    as_another = partial(encode_opening, build=Build("9.8.7", 9, 9))
    monkeypatch.setattr("potluck.net.opening.encode_opening", as_another)
    with node(LAB) as (address, _):
        result = probe_probe(members, address)
        assert result.outcome is ProbeOutcome.OTHER_VERSION
        assert "Potluck 9.8.7 (protocol 9)" in result.words


def test_a_port_where_nobody_listens_refuses(members: TrustStore) -> None:
    """At once."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        address = Address("127.0.0.1", port.getsockname()[1])
    assert probe_probe(members, address).outcome is ProbeOutcome.REFUSED


def test_a_name_that_nobody_knows(members: TrustStore) -> None:
    """The resolver's words are kept."""
    result = probe_probe(members, Address("no-such-machine.invalid", 1))
    assert result.outcome is ProbeOutcome.UNKNOWN_NAME
    assert "the name is unknown" in result.words


def test_an_address_without_a_way_there(members: TrustStore) -> None:
    """The system says so by itself."""
    result = probe_probe(members, Address("255.255.255.255", 1))
    assert result.outcome is ProbeOutcome.UNREACHABLE
    assert result.words


def test_another_program_is_not_potluck(members: TrustStore) -> None:
    """One that greets in clear, and one that hangs up."""
    with somebody(lambda line: line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as address:
        assert probe_probe(members, address).outcome is ProbeOutcome.NOT_POTLUCK
    with somebody(lambda line: None) as address:
        assert probe_probe(members, address).outcome in {
            ProbeOutcome.FAILED,
            ProbeOutcome.NOT_POTLUCK,
        }


def test_one_who_says_nothing_does_not_hold_us_up(
    members: TrustStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for talking is bounded too."""
    monkeypatch.setattr(probe, "HANDSHAKE_TIMEOUT", 0.2)
    with somebody(_read_all) as address:
        result = probe_probe(members, address)
        assert result.outcome is ProbeOutcome.MUTE
        assert "did not respond" in result.words


def _read_all(line: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while line.recv(4096):
            pass
