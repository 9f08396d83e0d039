"""Several machines, each with an address of its own: the ranks find and reach each other."""

import time
from collections.abc import Callable, Iterator

import pytest

from potluck.net.addresses import is_loopback
from support.hosts import Host, Hosts
from support.place import Place
from support.ranks import Rank, Ranks, Wrap, start_together
from support.threads import PATIENCE

pytestmark = pytest.mark.netns

PORT = 29500


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three machines on one switch."""
    with Hosts("desk laptop mac") as hosts:
        yield hosts


def start(
    ranks: Ranks, program: Callable[..., object], places: list[Host], master: str
) -> list[Rank]:
    """Run a program with rank i on the i-th of these hosts."""

    def on_its_host(rank: int) -> Wrap:
        return places[rank].command

    return ranks.start(program, len(places), master=f"{master}:{PORT}", wrap=on_its_host)


def talk(place: Place) -> list[str | float]:
    """Exchange messages with everybody; how long forming took, and where the others are."""
    place.wait_for_start()
    before = time.monotonic()
    with place.join() as backend:
        taken = time.monotonic() - before
        for other in place.others:
            inbox = bytearray(1 << 20)
            receive = backend.post_recv_into(inbox, other)
            backend.send(bytes([place.rank]) * len(inbox), other, timeout=PATIENCE)
            receive.wait(PATIENCE)
            assert inbox == bytes([other]) * len(inbox)
        backend.barrier(PATIENCE)
        return [taken, *(backend.peer_name(other) for other in place.others)]


def assert_all_talk(started: list[Rank], places: list[Host]) -> None:
    """Everybody is connected with everybody's own address; loopback serves one machine only."""
    start_together(started)
    for process in started:
        taken, *names = process.value()
        assert taken < 3  # one address that is dialled in vain would already take so long
        others = [host for rank, host in enumerate(places) if rank != process.rank]
        for name, host in zip(names, others, strict=True):
            machine, address = name.rsplit(":", 1)[0].split(" at ")
            assert machine == host.name
            on_same_machine = host is places[process.rank]
            reachable = {host.ipv4, host.ipv6}
            assert address.strip("[]") in reachable or (on_same_machine and is_loopback(address))


def test_ranks_on_several_machines_reach_each_other(ranks: Ranks, hosts: Hosts) -> None:
    """By IPv4 and by IPv6; two of them share a machine, and still give out its real address."""
    desk, laptop, mac = hosts.values()
    places = [desk, laptop, desk, mac]
    for master in (desk.ipv4, f"[{desk.ipv6}]"):
        assert_all_talk(start(ranks, talk, places, master), places)


def test_the_master_may_be_the_name_of_a_machine(ranks: Ranks, hosts: Hosts) -> None:
    """Every machine knows it, as in a home network."""
    places = list(hosts.values())
    assert_all_talk(start(ranks, talk, places, "desk"), places)


def test_a_machine_that_knows_itself_as_loopback_can_be_the_master(ranks: Ranks) -> None:
    """Debian writes 127.0.1.1 beside a machine's own name; the others know its real address."""
    with Hosts("desk laptop mac", own_loopback=True) as hosts:
        desk, laptop, mac = hosts.values()
        for places in ([desk, laptop, mac], [desk, laptop, desk]):
            assert_all_talk(start(ranks, talk, places, "desk"), places)


def test_interfaces_that_nobody_can_reach_cost_no_time(ranks: Ranks) -> None:
    """A container bridge with the same address everywhere, and a second network of one's own."""
    with Hosts("desk laptop mac") as hosts:
        places = list(hosts.values())
        for number, host in enumerate(places):
            for name, address in (("docker0", "172.17.0.1/16"), ("wlan0", f"10.9.{number}.1/24")):
                host.ip("link", "add", name, "type", "bridge")
                host.ip("address", "add", address, "dev", name)
                host.ip("link", "set", name, "up")
        assert_all_talk(start(ranks, talk, places, places[0].ipv4), places)


def fail(place: Place) -> list[object]:
    """How joining failed, if it did, and how long it took."""
    place.wait_for_start()
    before = time.monotonic()
    try:
        backend = place.join(timeout=3)
    except Exception as error:  # noqa: BLE001 - which one it is, is for the test to judge
        return [type(error).__name__, str(error), time.monotonic() - before]
    backend.close()
    return ["joined", "", time.monotonic() - before]


def test_a_firewall_between_two_machines_is_named(ranks: Ranks) -> None:
    """Within the time-out, by both of them, and with the other one's address."""
    with Hosts("desk laptop mac") as hosts:
        desk, laptop, mac = hosts.values()
        laptop.refuse_silently(mac)  # rank 2 dials rank 1 and hears nothing
        started = start(ranks, fail, [desk, laptop, mac], desk.ipv4)
        start_together(started)
        _, (one, one_text, one_taken), (two, two_text, two_taken) = (p.value() for p in started)
        assert two == "NoConnection"
        assert "Rank 2 could not connect to rank 1 on laptop" in two_text
        assert laptop.ipv4 in two_text
        assert one == "Timeout"
        assert "Rank 1 waited 3 s for rank 2, which did not connect" in one_text
        assert max(one_taken, two_taken) < 6
