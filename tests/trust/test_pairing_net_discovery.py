"""Finding the machine that shows a code: announced by number, found by number, and nothing else."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zeroconf

from potluck.discovery.mdns import DiscoveryUnavailable
from potluck.net.addresses import Address
from potluck.trust import pairing_net
from potluck.trust.pairing_net import MAX_ANSWERS, MAX_HOSTS, PairingDiscovery
from support.threads import PATIENCE, eventually


@pytest.fixture(autouse=True)
def own_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only loopback, and a service type of this test's own: another run must not be found."""
    service = f"_pl{secrets.token_hex(4)}._tcp.local."
    monkeypatch.setattr(pairing_net, "SERVICE", service)
    monkeypatch.setattr(pairing_net, "usable_hosts", list)
    for pause in ("_REGISTER_TIME", "_UNREGISTER_TIME"):  # between repetitions of what is said
        monkeypatch.setattr(f"zeroconf._core.{pause}", 10)
    before = threading.active_count()
    yield
    eventually(lambda: threading.active_count() <= before)


def announce(
    to: PairingDiscovery, label: str, slot: str, *, port: int = 4711, hosts: int = 1
) -> None:
    """Say anything at all, as a stranger could."""
    info = zeroconf.ServiceInfo(
        pairing_net.SERVICE,
        f"{label}.{pairing_net.SERVICE}",
        port=port,
        properties={"slot": slot},
        server=f"{label}.local.",
        parsed_addresses=[f"127.0.0.{number + 1}" for number in range(hosts)],
    )
    to._zeroconf.register_service(info, cooperating_responders=True)


def slots(heard_by: PairingDiscovery, wanted: set[int]) -> bool:
    """Listen until these numbers have been heard; whether there was no other."""
    heard: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    while not heard >= wanted and time.monotonic() < deadline:
        heard |= heard_by.slots(0.1)
    return heard == wanted


def test_a_machine_is_found_by_its_number() -> None:
    """Once, with its address and port; under another number it is not found."""
    with PairingDiscovery() as host, PairingDiscovery() as guest:
        host.announce(7, 4711, 1)
        found = guest.find(7, PATIENCE)
        assert found is not None
        assert found.addresses == (Address("127.0.0.1", 4711),)
        assert guest.find(7, 0.02) is None
    with PairingDiscovery() as host, PairingDiscovery() as guest:
        host.announce(7, 4711, 1)
        assert guest.find(17, 0.3) is None


def test_the_announcement_says_nothing_else() -> None:
    """Number and version, a random name: neither this machine's name nor anything secret."""
    with PairingDiscovery() as host, PairingDiscovery() as guest:
        host.announce(7, 4711, 1)
        assert slots(guest, {7})
        (name,) = guest._answers._seen
        info = zeroconf.ServiceInfo(pairing_net.SERVICE, name)
        assert info.request(guest._zeroconf, 3000)
        assert info.properties == {b"slot": b"7", b"v": b"1"}
        label = name.split(".")[0]
        assert info.server == f"potluck-{label.removeprefix('7-')}.local."
        assert len(label) == len("7-") + 12
        assert socket.gethostname() not in f"{name} {info.server}"


def test_the_numbers_others_show_are_known_in_a_moment() -> None:
    """So that nobody chooses one twice; several machines are told apart."""
    with PairingDiscovery() as one, PairingDiscovery() as other, PairingDiscovery() as third:
        one.announce(7, 1, 1)
        other.announce(42, 2, 1)
        assert slots(third, {7, 42})


def test_several_machines_that_claim_one_number_are_returned_in_turn() -> None:
    """Whoever searches decides how many to believe."""
    with PairingDiscovery() as one, PairingDiscovery() as other, PairingDiscovery() as guest:
        one.announce(7, 1111, 1)
        other.announce(7, 2222, 1)
        found = [guest.find(7, PATIENCE) for _ in range(2)]
        ports = {each.addresses[0].port for each in found if each}
        assert ports == {1111, 2222}


def test_answers_that_make_no_sense_are_left_out() -> None:
    """A name that is not of our form, or a record that contradicts its name."""
    with PairingDiscovery() as stranger, PairingDiscovery() as guest:
        announce(stranger, "somebody", "7")
        announce(stranger, "7-abcdefabcdef", "8")
        announce(stranger, "7-aaaaaaaaaaaa", "7", hosts=40)
        found = guest.find(7, PATIENCE)
        assert found is not None
        assert len(found.addresses) == MAX_HOSTS
        assert guest.find(7, 0.05) is None


def test_a_flood_of_answers_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory and time for it are bounded."""
    monkeypatch.setattr(pairing_net, "_RESOLVE", 0.2)
    with PairingDiscovery() as guest:
        for number in range(1000):
            guest._answers(name=f"7-{number:012x}.{pairing_net.SERVICE}", service_type="")
        assert len(guest._answers._seen) == MAX_ANSWERS
        begin = time.monotonic()
        assert guest.find(7, 0.1) is None  # nobody is behind them
        assert time.monotonic() - begin < PATIENCE


def test_where_there_is_no_multicast_the_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No interface that can, or none at all."""

    def refused(**_options: object) -> None:
        raise OSError(98, "Address in use")

    for broken in (refused, _Deaf):
        monkeypatch.setattr(zeroconf, "Zeroconf", broken)
        with pytest.raises(DiscoveryUnavailable, match=r"cannot find each other .* --host ADDRESS"):
            PairingDiscovery()


class _Deaf:
    """Zeroconf where no interface could be used."""

    def __init__(self, **_options: object) -> None:
        self.engine = self
        self.senders: list[object] = []

    def close(self) -> None:
        """Nothing to close."""


def test_an_announcement_that_fails_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may go away in between."""

    def refused(*_arguments: object, **_options: object) -> None:
        raise zeroconf.NotRunningException

    with PairingDiscovery() as host:
        monkeypatch.setattr(host._zeroconf, "register_service", refused)
        with pytest.raises(DiscoveryUnavailable):
            host.announce(7, 4711, 1)


@pytest.mark.parametrize(
    ("hosts", "used"),
    [
        (["10.0.0.1", "fd00::1"], ["10.0.0.1"]),
        (["fd00::1"], ["fd00::1"]),
    ],
)
def test_one_way_to_ask_is_enough(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], used: list[str]
) -> None:
    """IPv4 where there is any, IPv6 where there is nothing else."""
    asked: list[list[str]] = []

    def note(interfaces: list[str]) -> _Deaf:
        asked.append(interfaces)
        return _Deaf()

    monkeypatch.setattr(pairing_net, "usable_hosts", lambda: hosts)
    monkeypatch.setattr(zeroconf, "Zeroconf", note)
    with pytest.raises(DiscoveryUnavailable):
        PairingDiscovery()
    assert asked == [used]
