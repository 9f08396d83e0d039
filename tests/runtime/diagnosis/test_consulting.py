"""Two who look around measure how much goes through; nobody can keep the other busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from potluck.backend.port import NodePort
from potluck.core.topology_nodes import Battery, NodeProfile
from potluck.net.addresses import Address
from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace, Protection
from potluck.net.security import Security
from potluck.runtime.diagnosis import consulting
from potluck.runtime.diagnosis.consulting import Consulting

LAB = NetworkNamespace("lab", b"l" * 32, protection=Protection.PASSPHRASE)


@contextlib.contextmanager
def doctor(letter: str, job: str = "looking", *, plugged: bool = True) -> Iterator[Consulting]:
    """Somebody who looks around."""
    security = Security(LAB, NodeIdentity(letter.encode() * 32))
    with NodePort(security=security) as port:
        profile = NodeProfile(host=letter, battery=Battery(50, plugged=plugged))
        one = Consulting(port, job, profile)
        yield one
        one.close()


def where(one: Consulting) -> list[Address]:
    """Where it is."""
    return [Address("127.0.0.1", one.port.port)]


def test_a_rate_is_measured_and_the_battery_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a moment; on loopback it is more than any cable at home carries."""
    monkeypatch.setattr(consulting, "SENDING", 0.05)
    with doctor("a") as one, doctor("b", plugged=False) as other:
        rate = one.ask(where(other))
        assert rate is not None
        assert rate.octets > 1_000_000
        assert rate.host == "127.0.0.1"
        assert rate.is_on_battery


def test_those_who_do_something_else_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job, a crowd, or nobody at all."""
    with doctor("a") as one, doctor("b", "training") as other:
        assert one.ask(where(other)) is None
    assert other.ask([Address("127.0.0.1", 1)]) is None
    monkeypatch.setattr(consulting, "SERVED", 0)
    with doctor("a") as one, doctor("b") as busy:
        assert one.ask(where(busy)) is None


def test_one_who_stops_half_way_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides have a deadline; what got away until then is the rate."""
    monkeypatch.setattr(consulting, "PATIENCE", 0.3)
    monkeypatch.setattr(consulting, "_count", lambda sock, _deadline: sock.recv(1) and [])
    monkeypatch.setattr(consulting, "SENDING", 0.1)
    with doctor("a") as one, doctor("b") as other:
        rate = one.ask(where(other))
        assert rate is None or rate.octets > 0
