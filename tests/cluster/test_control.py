"""The clock that counts sleep: used wherever times meet the core, and a jump accuses nobody."""

from __future__ import annotations

import inspect
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest

from potluck import _platform, _time
from potluck._types import NodeId, ProcessId
from potluck.cluster import cluster as cluster_module
from potluck.cluster import connections, control, node, observer, telemetry, topology
from potluck.cluster.connections import (
    COURTESY,
    FIRST_PAUSE,
    TRIES,
    ConnectionTable,
    DialCandidates,
    DialPool,
    OpenedConnection,
    is_attached,
    probe,
)
from potluck.cluster.io import ControlConnection
from potluck.discovery.records import Sighting
from potluck.membership.events import MembershipChange, MembershipEvent
from potluck.membership.health import HealthEvent, HealthStatus
from potluck.membership.messages import ProcessInfo
from potluck.net.addresses import Address
from support.clusters import clusters, everywhere, insist
from support.control_connections import bare_sockets
from support.ports import free_port
from support.threads import PATIENCE, eventually

ASLEEP = 3600.0  # seconds


@pytest.mark.skipif(sys.platform != "linux", reason="how Linux names its clocks")
def test_it_counts_the_time_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the clock since boot, not the one that stands still in between."""
    clocks = {time.CLOCK_BOOTTIME: ASLEEP, time.CLOCK_MONOTONIC: 1.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    assert _time.now() == ASLEEP


def test_a_system_without_such_a_clock_gets_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose sandbox forbids the better clock."""
    assert _platform.sleepless_clock("win32") is time.monotonic

    def forbid(_: int) -> float:
        raise PermissionError

    monkeypatch.setattr(time, "clock_gettime", forbid)
    assert _platform.sleepless_clock("linux") is time.monotonic


@pytest.mark.parametrize(
    "part",
    [
        control.ControlThread,
        connections.ConnectionListener,
        connections.ControlConnections,
        connections._is_free,
        connections._raise,
        connections.DialCandidate,
        connections.DialCandidates,
        connections._key,
        connections.OpenedConnection,
        connections.ConnectionTable,
        node.ClusterNode,
        telemetry.Reporter,
        topology.ConnectedPeer,
        topology.TopologyFacts,
        topology.collect_facts,
        topology.TopologyTracker,
        topology.measure_links,
        topology.SharedTopology,
    ],
    ids=lambda part: str(part.__name__),
)
def test_what_meets_the_core_knows_no_other_clock(part: Callable[..., object]) -> None:
    """Two clocks in one class would sooner or later meet in one sum."""
    source = inspect.getsource(part)
    assert "monotonic" not in source
    assert not re.search(r"(?<![\w.])time\.\w", source)


@pytest.mark.parametrize(
    ("module", "what"),
    [(cluster_module, "core.health.summary("), (observer, "_links.dial_due(")],
    ids=["auto", "observing"],
)
def test_whoever_also_waits_keeps_the_two_apart(module: ModuleType, what: str) -> None:
    """Deadlines of callers are on the usual clock; what the links and the core are told is not."""
    source = inspect.getsource(module)
    assert source.count(what) == source.count(f"{what}_time.now())") == 1
    lines = [line for line in source.splitlines() if "monotonic" in line]
    assert all("deadline" in line for line in lines)


def test_a_machine_that_slept_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leases have ended, so it pauses; the silence was its own, so nobody is removed."""
    with clusters(3) as nodes:
        everywhere(nodes, lambda node: node.all_reduce(1.0))
        view, known = nodes[0].view, [len(node.events()) for node in nodes]
        monkeypatch.setattr(_time, "now", lambda: _platform.sleepless_clock()() + ASLEEP)

        def news(number: int) -> list[object]:
            return [each.event for each in nodes[number].events()[known[number] :]]

        def has(number: int, change: MembershipChange) -> bool:
            return any(
                isinstance(each, MembershipEvent) and each.change is change for each in news(number)
            )

        for number in range(3):
            eventually(partial(has, number, MembershipChange.PAUSED))
            eventually(partial(has, number, MembershipChange.RESUMED))
        assert everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0))) == [3.0] * 3
        assert {node.view for node in nodes} == {view}
        for number in range(3):
            health = [each for each in news(number) if isinstance(each, HealthEvent)]
            assert HealthStatus.DEAD not in [each.status for each in health]
        monkeypatch.undo()  # the clock goes back, and nobody minds that either
        assert everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0))) == [3.0] * 3


# --------------------------------------------------------------------------------------------------
# The pieces of the control plane: whom to dial, which connection to keep, what a refusal proves.

A, B, C = (ProcessId(NodeId(letter * 32), 1) for letter in "abc")
HERE = Address("10.0.0.9", 4000)


def sighting(process: ProcessId | None, address: Address = HERE) -> Sighting:
    """A hint."""
    key = str(address) if process is None else f"{process.node}/{process.incarnation}"
    node, start = (None, 0) if process is None else process
    return Sighting(key, ("mdns",), node, start, "job", (address,), 1, "attic")


# --- whom to dial ---


def test_the_smaller_id_dials_at_once_and_the_larger_after_a_moment() -> None:
    """So there is rarely more than one connection, and always at least one."""
    contacts = DialCandidates(B)
    contacts.sighted(sighting(C), 0.0)
    contacts.sighted(sighting(A), 0.0)
    assert [each.process for each in contacts.due(0.0)] == [C]
    assert contacts.next_deadline == COURTESY
    assert [each.process for each in contacts.due(COURTESY)] == [A]
    assert contacts.next_deadline is None


def test_failures_are_tried_again_with_growing_pauses_and_in_the_end_forgotten() -> None:
    """Somebody whom nobody reports any more is not dialled for ever; a reported one is."""
    contacts = DialCandidates(A)
    contacts.sighted(sighting(B), 0.0)
    now, pauses = 0.0, []
    for _ in range(6):
        (contact,) = contacts.due(now)
        contacts.failed(contact, "refused", now)
        due = contacts.next_deadline
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == sorted(pauses)
    assert pauses[0] == 2 * FIRST_PAUSE
    assert contacts.troubles == {"attic": "refused"}
    contacts.unsighted(sighting(B).key)
    for _ in range(TRIES):
        for contact in contacts.due(now):
            contacts.failed(contact, "refused", now)
        now += 10
    assert contacts.next_deadline is None
    assert contacts.addresses_of(B) == ()


def test_who_is_connected_is_not_dialled_by_any_of_its_names() -> None:
    """One may be known by its id, by a bare address, and by what members tell."""
    contacts = DialCandidates(A)
    contacts.sighted(sighting(None), 0.0)
    (bare,) = contacts.due(0.0)
    card = ProcessInfo(node=B.node, incarnation=1, hosts=("10.0.0.9",), port=4000)
    contacts.introduced(card, 0.0)
    contacts.connected(B, 0.0, bare)
    bare.is_dialled = False
    contacts.sighted(sighting(B), 1.0)
    assert contacts.due(5.0) == []
    contacts.disconnected(B, 6.0)
    assert len(contacts.due(6.0 + COURTESY)) == 2
    assert contacts.addresses_of(B) == (HERE,)


def test_an_earlier_process_whose_port_another_has_is_not_dialled_again_and_again() -> None:
    """It is forgotten, or tried later if discovery still reports it; it is never due at once."""
    contacts = DialCandidates(A)
    contacts.introduced(
        ProcessInfo(node=B.node, incarnation=1, hosts=("10.0.0.9",), port=4000), 0.0
    )
    contacts.sighted(sighting(C), 0.0)
    later = ProcessId(B.node, 2)
    for contact in contacts.due(0.0):
        contact.is_dialled = False
        contacts.connected(later, 0.0, contact)
    assert contacts.addresses_of(B) == ()
    assert contacts.due(FIRST_PAUSE) == []
    assert [each.process for each in contacts.due(1.0)] == [C]
    assert "another process" in contacts.troubles["attic"]


def test_we_do_not_dial_ourselves() -> None:
    """Nor does a contact that turned out to be us."""
    contacts = DialCandidates(A)
    contacts.sighted(sighting(A), 0.0)
    contacts.sighted(sighting(None), 0.0)
    (bare,) = contacts.due(0.0)
    bare.is_self, bare.is_dialled = True, False
    assert contacts.due(9.0) == []


# --- which connection to keep ---


@pytest.fixture
def opened_ones() -> Iterator[list[ControlConnection]]:
    """Some opened_ones; what they lead to does not matter here."""
    ends = [end for _ in range(2) for end in bare_sockets()]
    made = [ControlConnection(end, "somewhere") for end in ends]
    yield made
    for connection in made:
        connection.close()


def opened(
    connection: ControlConnection, dialler: ProcessId, peer: ProcessId = B
) -> OpenedConnection:
    """A connection to a peer."""
    return OpenedConnection(connection, ProcessInfo(node=peer.node, incarnation=1), dialler, HERE)


@pytest.mark.parametrize("first", [A, B])
def test_both_sides_keep_the_connection_that_the_smaller_id_dialled(
    opened_ones: list[ControlConnection], first: ProcessId
) -> None:
    """Whichever comes first, here and there."""
    second = B if first is A else A
    for me, peer in ((A, B), (B, A)):
        table = ConnectionTable(me)
        by_first, by_second = (
            opened(opened_ones[0], first, peer),
            opened(opened_ones[1], second, peer),
        )
        assert table.add(by_first, 1.0) == (True, None)
        kept, dropped = (
            (opened_ones[0], opened_ones[1]) if first is A else (opened_ones[1], opened_ones[0])
        )
        assert table.add(by_second, 2.0) == (False, dropped)
        found = table.to(peer)
        assert found is not None
        assert found.connection is kept
        assert table.ended(dropped) is None
        assert table.ended(kept) is found


def test_a_second_connection_by_the_same_side_replaces_the_first(
    opened_ones: list[ControlConnection],
) -> None:
    """It had lost the first before it dialled again."""
    table = ConnectionTable(A)
    table.add(opened(opened_ones[0], B), 1.0)
    assert table.add(opened(opened_ones[1], B), 2.0) == (False, opened_ones[0])
    assert table.behind(opened_ones[0]) == table.behind(opened_ones[1])
    assert set(table.remove(B)) == {opened_ones[0], opened_ones[1]}
    assert table.to(B) is None


@pytest.mark.parametrize("dialler", [A, B])
def test_a_connection_that_comes_much_later_replaces_the_other(
    opened_ones: list[ControlConnection], dialler: ProcessId
) -> None:
    """Whoever dialled it has lost the first, after an outage that only one side has noticed."""
    table = ConnectionTable(A)
    table.add(opened(opened_ones[0], A), 1.0)
    assert table.add(opened(opened_ones[1], dialler), 9.0) == (False, opened_ones[0])


# --- what a refusal proves ---


def test_a_port_that_refuses_on_this_machine_is_a_proof() -> None:
    """A port that answers, or an address that is nobody's, is none."""
    assert probe([Address("127.0.0.1", free_port())]) is None
    with socket.create_server(("127.0.0.1", 0)) as door:
        where = Address("127.0.0.1", door.getsockname()[1])
        assert probe([where]) == f"{where} still answers"
    assert probe([]) == "its address is not known"


def test_a_refusal_from_elsewhere_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may refuse for a machine, and another machine may have its address now."""
    where = Address("127.0.0.1", free_port())
    monkeypatch.setattr(connections, "is_attached", lambda _: False)
    assert probe([where]) == f"{where} refuses, but it is not on a network of ours"
    monkeypatch.undo()
    monkeypatch.setattr(connections, "link_address", lambda _: "02:00:00:00:00:02")
    assert probe([where], "02:00:00:00:00:02") is None
    assert probe([where], "02:00:00:00:00:01") is not None


def test_networks_that_are_ours_are_known() -> None:
    """Loopback and our own addresses are attached; documentation's are not."""
    assert is_attached("127.0.1.1")
    assert is_attached("::1")
    assert not is_attached("198.51.100.7")


# --- pool ---


def test_errands_run_a_bounded_number_at_once_and_survive_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others wait in line; one that fails is logged and hinders nobody."""
    pool, release = DialPool(at_once=2), threading.Event()
    running, most, done = [0], [0], [0]
    lock = threading.Lock()

    def task() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        release.wait(PATIENCE)
        with lock:
            running[0] -= 1
            done[0] += 1

    def fault() -> None:
        raise ZeroDivisionError

    pool.run(fault)
    for _ in range(6):
        pool.run(task)
    eventually(lambda: running[0] == 2)
    release.set()
    eventually(lambda: done[0] == 6)
    assert most[0] == 2
    assert "A background task failed" in caplog.text
    pool.close(PATIENCE)
    pool.run(task)
    assert done[0] == 6


def test_what_is_urgent_does_not_wait_behind_those_who_do_not_answer() -> None:
    """A death is proved at once, however many others are being dialled in vain."""
    pool, release, proved = DialPool(at_once=2), threading.Event(), threading.Event()
    begun: list[int] = []
    later: list[int] = []

    def wait() -> None:
        begun.append(1)
        assert release.wait(PATIENCE)

    for _ in range(2):
        pool.run(wait)
    eventually(lambda: len(begun) == 2)
    for number in range(3):
        pool.run(partial(later.append, number))
    pool.run(partial(later.append, 3), ahead=True)
    pool.run(proved.set, urgent=True)
    assert proved.wait(PATIENCE)
    assert later == []  # the thread kept for what is urgent does nothing else
    release.set()
    eventually(lambda: sorted(later) == [0, 1, 2, 3])
    assert later.index(3) <= 1  # two threads take what waits, this one first
    pool.close(PATIENCE)


def test_an_address_that_is_none_is_no_proof() -> None:
    """What a peer calls its address is its own word."""
    assert probe([Address("nul\0", 1)]) is not None
    assert probe([Address("." * 300, 1)]) is not None


def test_sightings_that_move_are_dialled_at_their_new_place_at_once() -> None:
    """A machine that changed its address need not wait for a long pause to pass."""
    contacts = DialCandidates(A)
    contacts.sighted(sighting(B), 0.0)
    for _ in range(4):
        contacts.failed(contacts.due(100.0)[0], "refused", 100.0)
        contacts.sighted(replace(sighting(B), addresses=(HERE,)), 100.0)
        for contact in contacts._candidates():
            contact.due = 100.0
    contacts.failed(contacts.due(100.0)[0], "refused", 100.0)
    assert contacts.due(100.0) == []
    contacts.sighted(sighting(B, Address("10.0.0.8", 4000)), 100.0)
    assert [each.addresses[0].host for each in contacts.due(100.0)] == ["10.0.0.8"]
