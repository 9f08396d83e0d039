"""Addresses: reading and writing them, and which of ours others can reach."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import _platform
from potluck.net import addresses
from potluck.net.addresses import (
    Address,
    Attachment,
    attachment,
    by_preference,
    interfaces,
    is_loopback,
    parse_address,
    unmapped,
    usable_hosts,
)

names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
ipv6 = st.ip_addresses(v=6).map(str)
scoped = st.tuples(ipv6, st.from_regex(r"[a-z]{1,4}[0-9]{1,2}", fullmatch=True)).map("%".join)
hosts = names | st.ip_addresses(v=4).map(str) | ipv6 | scoped
ports = st.integers(0, 65535)


@given(hosts, ports)
def test_an_address_reads_back_as_it_was_written(host: str, port: int) -> None:
    """Names, IPv4, IPv6 and IPv6 with its interface; with and without a default at hand."""
    address = Address(host, port)
    for default in (None, 1):
        assert parse_address(str(address), default) == address
        assert parse_address(f"  {address}\n", default) == address


@given(hosts, ports)
def test_a_host_without_a_port_takes_the_default(host: str, port: int) -> None:
    """A bare IPv6 host as well, with or without brackets."""
    forms = [host, f"[{host}]"] if ":" in host else [host]
    for form in forms:
        assert parse_address(form, port) == Address(host, port)
        with pytest.raises(ValueError, match="write host:port"):
            parse_address(form)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ":80",
        "desk:",
        "desk:x",
        "desk:+5",
        "desk: 80",
        "desk:65536",
        "desk:-1",
        "desk:٣",
        "desk:" + "9" * 5000,
        "my desk:80",
        "10.0.0.5:80:90",
        "[::1",
        "::1]:80",
        "desk]:80",
        "[desk]:80",
        "[]:80",
        "[::1]80",
        "[::1]:",
        "[::1]:65536",
        "[fe80::1%]:80",
        "http://desk:80",
    ],
)
@pytest.mark.parametrize("default", [None, 29500])
def test_what_is_no_address_is_refused(text: str, default: int | None) -> None:
    """With the text that was given and two good examples."""
    with pytest.raises(
        ValueError, match=r"is not an address: write host:port, such as 192\.168"
    ) as e:
        parse_address(text, default)
    assert repr(text.strip()) in str(e.value)


@given(st.text(), st.none() | ports)
def test_any_text_is_an_address_or_is_refused(text: str, default: int | None) -> None:
    """What was understood can be written down and read again."""
    try:
        address = parse_address(text, default)
    except ValueError:
        return
    assert address.host
    assert 0 <= address.port <= 65535
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::1%lo", True),
        ("192.168.1.10", False),
        ("::ffff:192.168.1.10", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("desk.local", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_is_known_by_its_number(host: str, answer: bool) -> None:
    """Also inside a socket for both families; names are for the resolver to judge."""
    assert is_loopback(host) is answer


def test_addresses_are_tried_in_the_order_in_which_home_networks_route_them() -> None:
    """Private and public IPv4, IPv6, and those that only hold on one cable."""
    order = ["10.0.0.9", "192.168.0.1", "1.1.1.1", "2001:db8::1", "fd00::1"]
    order += ["169.254.0.1", "fe80::1"]
    assert by_preference([*reversed(order), "10.0.0.9"]) == order


def test_an_ipv4_address_is_taken_out_of_its_ipv6_form() -> None:
    """Everything else stays."""
    assert unmapped("::ffff:10.0.0.5") == "10.0.0.5"
    for host in ("10.0.0.5", "::1", "fe80::1%eth0", "desk.local", "::ffff:0:0"):
        assert unmapped(host) == host


# -- which of ours ---------------------------------------------------------------------------------


class Nic(NamedTuple):
    """An address as psutil tells of it."""

    family: int
    address: str


class Stats(NamedTuple):
    """The state of an interface."""

    isup: bool


def v4(host: str) -> Nic:
    """An IPv4 address."""
    return Nic(socket.AF_INET, host)


def v6(host: str) -> Nic:
    """An IPv6 address."""
    return Nic(socket.AF_INET6, host)


def test_this_machine_shows_addresses_that_can_be_bound() -> None:
    """What we hand out is ours, and nobody is sent to loopback."""
    for host in usable_hosts(virtual=True):
        assert not is_loopback(host)
        family, kind, proto, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.bind(address)


@pytest.fixture
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop with everything: cable, Wi-Fi, containers, a VPN, and an unplugged adapter."""
    interfaces = {
        "lo": [v4("127.0.0.1"), v6("::1")],
        "docker0": [v4("172.17.0.1")],
        "tailscale0": [v4("100.64.0.7")],
        "eth0": [Nic(psutil.AF_LINK, "aa:bb:cc:dd:ee:ff"), v6("fe80::2%eth0"), v6("2001:db8::2")],
        "wlan0": [v4("169.254.3.4"), v4("93.184.215.14"), v4("192.168.1.10")],
        "usb0": [v4("192.168.7.1")],
        "odd0": [v4("0.0.0.0"), v4("224.0.0.1"), v6("ff02::1")],
        "new0": [v4("192.168.9.9")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    state = {name: Stats(name != "usb0") for name in interfaces if name != "new0"}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: state)


HOME = [
    "192.168.1.10",
    "192.168.9.9",
    "93.184.215.14",
    "2001:db8::2",
    "169.254.3.4",
    "fe80::2%eth0",
]


@pytest.mark.usefixtures("busy_machine")
def test_the_best_address_comes_first() -> None:
    """Private IPv4, public IPv4, IPv6, link-local; nothing of loopback, down or multicast.

    An interface that appeared between the two questions counts as up.
    """
    assert usable_hosts() == HOME


@pytest.mark.usefixtures("busy_machine")
def test_every_interface_that_is_not_used_has_its_reason() -> None:
    """For whoever wonders why a machine is not found."""
    found = {each.name: each for each in interfaces()}
    reasons = {name: each.skipped for name, each in found.items() if each.skipped}
    assert reasons == {
        "lo": "it has no address that others can reach",
        "docker0": "it belongs to a container, a virtual machine or a VPN",
        "tailscale0": "it belongs to a container, a virtual machine or a VPN",
        "usb0": "it is down",
        "odd0": "it has no address that others can reach",
    }
    assert found["docker0"].hosts == ("172.17.0.1",)
    chosen = {each.name: each.skipped for each in interfaces(only=["docker0"])}
    assert chosen["docker0"] == ""
    assert chosen["wlan0"] == "it is not among the interfaces to be used"


@pytest.mark.usefixtures("busy_machine")
def test_containers_and_tunnels_are_left_out_unless_asked_for() -> None:
    """All of them, or by name."""
    assert set(usable_hosts(virtual=True)) == {*HOME, "172.17.0.1", "100.64.0.7"}
    assert usable_hosts(only=["tailscale0"]) == ["100.64.0.7"]
    assert usable_hosts(only=["wlan0", "docker0"])[0] == "172.17.0.1"
    assert usable_hosts(only=["nothing0"]) == []
    assert usable_hosts(only=["lo", "usb0"]) == []


@pytest.mark.parametrize(
    "name",
    "docker0 br-1a2b veth12 virbr0 vmnet8 vboxnet0 cni0 flannel.1 cali9 podman1 lxcbr0 lxdbr0 "
    "tun0 tap1 utun3 wg0 tailscale0 zt5 ppp0 ipsec0 awdl0 llw0 vEthernet".split(),
)
def test_virtual_interfaces_are_known_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux, macOS and Windows."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [v4("10.9.9.9")]})
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    assert usable_hosts() == []
    assert usable_hosts(virtual=True) == ["10.9.9.9"]


@pytest.mark.parametrize("name", ["eth0", "enp3s0", "en0", "wlan0", "wlp2s0", "bond0", "br0"])
def test_real_interfaces_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cable, Wi-Fi, and a bridge that an administrator has set up over them."""
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: [v4("10.9.9.9")]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: Stats(True)})
    assert usable_hosts() == ["10.9.9.9"]


# -- by what it is connected -----------------------------------------------------------------------


class Masked(NamedTuple):
    """An address with its network, as psutil tells of it."""

    family: int
    address: str
    netmask: str | None = None


def machine(monkeypatch: pytest.MonkeyPatch, root: Path, **names: str) -> None:
    """A machine with these interfaces, each with an address; those called ``wl…`` are radios."""
    told = {
        name: [
            Masked(socket.AF_INET6, host, "ffff:ffff:ffff:ffff::")
            if ":" in host
            else Masked(socket.AF_INET, host, "255.255.255.0")
        ]
        for name, host in names.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: told)
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    monkeypatch.setattr(_platform, "IS_LINUX", True)
    for name in names:
        path = root / "sys/class/net" / name
        (path / "wireless" if name.startswith("wl") else path).mkdir(parents=True)


def test_a_machine_without_a_cable_is_on_wifi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of one network share the air, as long as no access point is known."""
    monkeypatch.setattr(addresses, "access_point_of", lambda _: b"")
    found = []
    for number, host in enumerate(("192.168.1.10", "192.168.1.20", "192.168.2.10")):
        machine(monkeypatch, tmp_path / str(number), wlan0=host)
        found.append(attachment(root=tmp_path / str(number)))
    first, second, other = found
    assert first is not None
    assert first.is_wireless
    assert first.cell == 0
    assert first == second
    assert other is not None
    assert other.air[1] not in {0, first.air[1]}


def test_a_network_of_ipv6_is_one_air_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its mask is an address, as the system tells it."""
    monkeypatch.setattr(addresses, "access_point_of", lambda _: b"")
    found = []
    for number, host in enumerate(("fd00::1:10", "fd00::2:20", "fd00:0:0:1::10")):
        machine(monkeypatch, tmp_path / str(number), wlan0=host)
        found.append(attachment(root=tmp_path / str(number)))
    first, second, other = found
    assert first is not None
    assert first == second
    assert first != other


def test_an_access_point_has_a_number_that_does_not_tell_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Equal for equal ones."""
    machine(monkeypatch, tmp_path, wlp3s0="10.0.0.1")
    monkeypatch.setattr(addresses, "access_point_of", {"wlp3s0": b"radio1"}.__getitem__)
    found = attachment(root=tmp_path)
    assert found is not None
    assert found.cell not in {0, int.from_bytes(b"radio1")}
    assert attachment(root=tmp_path) == found


def test_a_cable_counts_before_a_radio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless the radio alone is to be used."""
    machine(monkeypatch, tmp_path, eth0="192.168.1.10", wlan0="192.168.1.11")
    assert attachment(root=tmp_path) == Attachment(is_wireless=False)
    alone = attachment(only=["wlan0"], root=tmp_path)
    assert alone is not None
    assert alone.is_wireless
    assert Attachment(is_wireless=False, cell=5, network=6).air == (0, 0)


def test_without_a_network_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a cable nor a radio."""
    machine(monkeypatch, tmp_path)
    assert attachment(root=tmp_path) is None
