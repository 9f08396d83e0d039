"""Discovery between real processes, on this machine and on emulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.firewalls import block_multicast
from support.hosts import Hosts
from support.seekers import Seeker, seekers

FORMING = 3.0
"""Seconds from a cold start until everybody has found everybody."""


def assert_meet(crowd: list[Seeker], *, source: str = "") -> None:
    """Everybody finds everybody else, and nobody else, within the time for forming."""
    for each in crowd:
        for other in crowd:
            if other is not each:
                event = each.wait_for("found", other.me, source=source)
                assert event["after"] < FORMING
        assert each.found() == {other.me for other in crowd if other is not each}


def test_processes_of_one_machine_meet_without_a_network(tmp_path: Path) -> None:
    """They share a home; a killed one is noticed, a leaving one too, a new one is found."""
    ports = iter(range(4711, 4720))
    with seekers(*(Seeker(tmp_path, port=next(ports)) for _ in range(3))) as crowd:
        assert_meet(crowd)
        first, second, third = crowd
        second.kill()
        gone = first.wait_for("gone", second.me)
        assert gone["reason"] == "its process on this machine has ended"
        third.leave()
        first.wait_for("gone", third.me)
        with Seeker(tmp_path, port=next(ports)) as newcomer:
            first.wait_for("found", newcomer.me)
            newcomer.wait_for("found", first.me)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three on one switch, for tests that leave their network as it is."""
    with Hosts("alpha beta gamma") as made:
        yield made


@pytest.mark.netns
def test_machines_meet_from_a_cold_start(hosts: Hosts, tmp_path: Path) -> None:
    """By multicast, each with an address of both families."""
    with seekers(*(Seeker(tmp_path / name, host=host) for name, host in hosts.items())) as crowd:
        assert_meet(crowd, source="mdns")
        addresses = crowd[0].wait_for("found", crowd[1].me)["addresses"]
        beta = hosts["beta"]
        assert addresses[0] == f"{beta.ipv4}:4711"
        assert f"[{beta.ipv6}]:4711" in addresses
        crowd[2].leave()
        assert crowd[0].wait_for("gone", crowd[2].me)["reason"] == "it left"


@pytest.mark.netns
def test_namespaces_and_jobs_on_one_switch_never_mix(hosts: Hosts, tmp_path: Path) -> None:
    """Of two processes on each of two machines only two belong together."""
    alpha, beta = hosts["alpha"], hosts["beta"]
    with seekers(
        Seeker(tmp_path / "alpha", host=alpha, port=5001),
        Seeker(tmp_path / "beta", host=beta, port=5001),
        Seeker(tmp_path / "alpha", host=alpha, port=5002, letter="x"),
        Seeker(tmp_path / "beta", host=beta, port=5002, job="other.py"),
    ) as (one, other, stranger, colleague):
        assert_meet([one, other])
        assert stranger.found() == colleague.found() == set()


@pytest.mark.netns
def test_where_multicast_is_blocked_the_last_run_or_a_hand_helps(tmp_path: Path) -> None:
    """A firewall comes up: nobody is heard, but known peers and given addresses are there."""
    with Hosts("alpha beta") as hosts:
        alpha, beta = hosts.values()
        with seekers(*(Seeker(tmp_path / name, host=host) for name, host in hosts.items())) as (
            one,
            other,
        ):
            one.wait_for("found", other.me)
            one.tell("remember")
            one.leave()
        block_multicast(alpha)
        with (
            Seeker(tmp_path / "beta", host=beta, peers=[alpha.ipv4]) as other,
            Seeker(tmp_path / "alpha", host=alpha) as one,
        ):
            known = one.wait_for("found")
            assert known["sources"] == ["known"]
            assert f"{beta.ipv4}:4711" in known["addresses"]
            given = other.wait_for("found")
            assert given["sources"] == ["given"]
            assert given["addresses"] == [f"{alpha.ipv4}:52416"]
            assert one.me not in other.found()
            assert other.me not in one.found()


@pytest.mark.netns
def test_an_interface_that_comes_later_is_used(tmp_path: Path) -> None:
    """Wi-Fi comes back: the machine is found there, by itself; in a network of IPv6 alone."""
    with Hosts("alpha beta") as hosts:
        alpha = hosts["alpha"]
        for host in hosts.values():
            host.ip("address", "delete", f"{host.ipv4}/24", "dev", "eth0")
        alpha.unplug()
        crowd = [Seeker(tmp_path / name, host=host) for name, host in hosts.items()]
        with seekers(*crowd) as (one, other):
            alpha.ip("link", "set", "eth0", "up")
            alpha.ip("address", "replace", f"{alpha.ipv6}/64", "dev", "eth0", "nodad")
            found = other.wait_for("found", one.me)
            one.wait_for("found", other.me)
            assert all(each.startswith("[f") for each in found["addresses"])  # fd… or fe80…
