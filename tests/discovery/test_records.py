"""Where to look: arguments, then the environment, then the usual ports."""

from __future__ import annotations

import pytest

from potluck.discovery.records import (
    DEFAULT_PORT,
    MAX_GIVEN,
    USUAL_PORTS,
    DiscoveryConfig,
    LauncherRendezvous,
    given_addresses,
)
from potluck.net.addresses import Address


def test_arguments_win_over_the_environment() -> None:
    """What somebody types counts more than what lies around."""
    environ = {"POTLUCK_PEERS": "10.0.0.1:1, 10.0.0.2:2 [fd00::3]:3"}
    config = DiscoveryConfig.from_environment(environ=environ)
    assert config.peers == (
        Address("10.0.0.1", 1),
        Address("10.0.0.2", 2),
        Address("fd00::3", 3),
    )
    config = DiscoveryConfig.from_environment(["desk:4"], environ=environ)
    assert config.peers == (Address("desk", 4),)
    assert DiscoveryConfig.from_environment(environ={}).peers == ()


def test_a_host_without_a_port_means_the_usual_ones() -> None:
    """Those that the first processes of a machine take; each of them is somebody else."""
    found = given_addresses(["desk", "desk:52416", "fd00::1"])
    assert found[0] == Address("desk", DEFAULT_PORT)
    assert len(found) == len(set(found)) == 2 * USUAL_PORTS
    assert Address("fd00::1", DEFAULT_PORT + 1) in found
    assert [address.port - DEFAULT_PORT for address in found[:USUAL_PORTS]] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["desk:port", "10.0.0.1:99999", "a b:1", "[10.0.0.1]:4"])
def test_what_is_no_address_is_told_at_once(text: str) -> None:
    """Not an hour later, when nobody has come."""
    with pytest.raises(ValueError, match="is not an address: write host:port"):
        DiscoveryConfig.from_environment([text], environ={})


def test_more_addresses_than_machines_are_a_mistake() -> None:
    """They would all be dialled, again and again."""
    with pytest.raises(ValueError, match="at most 64 machines"):
        given_addresses(f"10.0.{number}.1" for number in range(MAX_GIVEN + 1))


def test_in_a_run_ranks_say_nothing_about_where_to_meet() -> None:
    """`potluck run` sets the variables of launchers for others, and POTLUCK_PEERS for us."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "desk", "MASTER_PORT": "4711"}
    assert (
        LauncherRendezvous.from_environment({**environ, "POTLUCK_RUN": "1"}) == LauncherRendezvous()
    )


def test_a_launcher_says_where_to_meet() -> None:
    """Rank 0 listens there, the others dial it."""
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "desk", "MASTER_PORT": "4711"}
    first = DiscoveryConfig.from_environment(environ={**environ, "RANK": "0"}).rendezvous
    assert first == LauncherRendezvous((Address("desk", 4711),), listen_port=4711)
    second = DiscoveryConfig.from_environment(environ={**environ, "RANK": "1"}).rendezvous
    assert second == LauncherRendezvous((Address("desk", 4711),))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a b", "MASTER_PORT": "1"},
    ],
)
def test_an_environment_that_says_nothing_useful_is_no_rendezvous(environ: dict[str, str]) -> None:
    """There are other ways to meet."""
    assert LauncherRendezvous.from_environment(environ) == LauncherRendezvous()


def test_interfaces_can_be_named() -> None:
    """For those who know better which way is good."""
    config = DiscoveryConfig.from_environment(environ={"POTLUCK_INTERFACES": "eth1, tun0"})
    assert config.interfaces == ("eth1", "tun0")
