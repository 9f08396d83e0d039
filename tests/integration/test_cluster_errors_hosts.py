"""Errors of machines that lose each other: cables, deaf links, cut pairs, firewalls that drop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.agreement import Witnesses
from support.cables import Cables
from support.clusters import new_job
from support.firewalls import drop
from support.hosts import Host, Hosts
from support.ranks import Rank, Ranks

pytestmark = [pytest.mark.netns, pytest.mark.slow]

NAMES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Four machines, for all tests of this file."""
    with Hosts(NAMES) as made:
        yield list(made.values())


@pytest.fixture(scope="module")
def cables(hosts: list[Host]) -> Cables:
    """The ways between them, each of which can be cut."""
    return Cables(hosts)


@pytest.fixture
def witnesses(ranks: Ranks, hosts: list[Host]) -> Witnesses:
    """A process on each of them, in one cluster."""
    made = Witnesses(ranks, new_job(), multicast=True, neighbours=False)
    made.start(len(hosts), [host.command for host in hosts])
    return made


def come_back(witnesses: Witnesses, victim: Rank) -> None:
    """The one that was left out learns so, and is let in again; then all stop."""
    witnesses.wait_until_told(victim, "LeftOut")
    witnesses.wait_for(witnesses.nodes, len(witnesses.nodes))
    witnesses.check([])
    assert witnesses.told[victim][0]["kind"] == "LeftOut", witnesses.told[victim]
    witnesses.stop(witnesses.nodes)


@pytest.mark.parametrize("fault", ["cable", "deaf", "mute"])
def test_a_machine_that_is_cut_off_is_named_alike_by_all_others(
    witnesses: Witnesses, hosts: list[Host], cables: Cables, fault: str
) -> None:
    """Its cable is pulled; or it hears nothing while it is heard; or the other way round."""
    victim, others = witnesses.nodes[1], [*witnesses.nodes[:1], *witnesses.nodes[2:]]
    into = [(host, hosts[1]) for host in hosts if host is not hosts[1]]
    out = [(receiver, sender) for sender, receiver in into]
    ways = {"cable": into + out, "deaf": into, "mute": out}[fault]
    for way in ways:
        cables.cut(*way)
    try:
        witnesses.wait_for(others, 3)
    finally:
        for way in ways:
            cables.mend(*way)
    witnesses.check_named(others, victim)
    come_back(witnesses, victim)


@pytest.mark.parametrize(("pair", "both"), [((1, 3), True), ((0, 2), True), ((2, 1), False)])
def test_of_two_that_lose_each_other_one_is_left_out_and_no_error_names_one_that_stays(
    witnesses: Witnesses, hosts: list[Host], cables: Cables, pair: tuple[int, int], both: bool
) -> None:
    """In both directions or in one; both still hear the rest, which raise the same."""
    one, other = (hosts[number] for number in pair)
    ways = [(one, other), (other, one)] if both else [(one, other)]
    ends = [witnesses.nodes[number] for number in pair]
    rest = [node for node in witnesses.nodes if node not in ends]
    for way in ways:
        cables.cut(*way)
    try:
        witnesses.wait_for(rest, 3)
        told = [error for error in witnesses.told[rest[0]] if error["kind"] == "PeerLost"]
        gone = [error["text"].split(":")[0] for error in told]  # the cause names the other end too
        victims = [end for end in ends if any(witnesses.name(end) in text for text in gone)]
        assert victims, witnesses.told[rest[0]]
        witnesses.wait_until_told(victims[0], "LeftOut")
    finally:
        for way in ways:
            cables.mend(*way)
    witnesses.wait_for(witnesses.nodes, len(witnesses.nodes))
    witnesses.check([])
    witnesses.stop(witnesses.nodes)


def test_after_connections_were_reset_all_members_raise_the_same(
    witnesses: Witnesses, hosts: list[Host]
) -> None:
    """Both ends live, and are back before a view without one of them is agreed, or after it."""
    reset = ["nft", "add", "rule", "inet", "potluck", "input", "ip", "saddr", hosts[3].ipv4]
    drop(hosts[0])
    try:
        hosts[0].run([*reset, "meta", "l4proto", "tcp", "reject", "with", "tcp", "reset"])
        told = witnesses.wait_until_told_any(witnesses.nodes[1])
    finally:
        hosts[0].run(["nft", "delete", "table", "inet", "potluck"])
    assert told["kind"] in {"PeerLost", "ViewChanged"}
    witnesses.wait_for(witnesses.nodes, len(witnesses.nodes))
    witnesses.check([])
    witnesses.stop(witnesses.nodes)


def test_a_process_killed_behind_a_firewall_that_drops_is_named_alike(
    witnesses: Witnesses, hosts: list[Host]
) -> None:
    """Its port does not refuse, so its death cannot be proved; its silence can."""
    victim, others = witnesses.nodes[2], [*witnesses.nodes[:2], *witnesses.nodes[3:]]
    drop(hosts[2], "tcp flags & (syn|ack) == syn")
    drop(hosts[2], "tcp flags & (rst|fin) != 0", direction="output")
    try:
        victim.kill()
        witnesses.wait_for(others, 3)
    finally:
        hosts[2].run(["nft", "delete", "table", "inet", "potluck"])
    witnesses.check([victim])
    witnesses.check_named(others, victim)
    witnesses.stop(others)
