"""Strangers at the door: what each may cost, and that no member waits behind them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from potluck.messages import Lane, LaneOpened
from potluck.net import acceptor_callers, handshakes, tcp
from potluck.net.acceptor import Acceptor
from potluck.net.addresses import Address
from potluck.net.client_hello import read_hello
from potluck.net.handshakes import ADDRESS, MEMBERS, STRANGERS, THREADS, Handshakes, source_of
from potluck.net.opening import answer, exchange_hello
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import Security
from potluck.net.tls_context import Group
from support.hostile_hellos import EXPENSIVE, hostile_hello, kinds
from support.threads import eventually
from support.tls_pair import CALLED, CALLER, LAB

HELLO = Lane(session=b"s" * 16, rank=1, to=0)


@contextlib.contextmanager
def open_door() -> Iterator[Acceptor]:
    """A door of the namespace ``LAB`` that lets in all members."""

    def welcome(sock: OpeningSocket, _: bytes) -> None:
        answer(sock, LaneOpened(rank=0))
        sock.close()

    with contextlib.closing(
        Acceptor(tcp.listen("127.0.0.1", 0), welcome, Security(LAB, CALLED))
    ) as door:
        yield door


def come_in(door: Acceptor, source: str = "127.0.0.1", within: float = 30.0) -> None:
    """Connect as a member does, once."""
    deadline = time.monotonic() + within
    with socket.create_connection(
        ("127.0.0.1", door.port), within, source_address=(source, 0)
    ) as sock:
        secure = Security(LAB, CALLER).dial(sock, "door", deadline)
        assert exchange_hello(secure, HELLO, LaneOpened, deadline) == LaneOpened(rank=0)


class Flood:
    """Callers from some addresses that send hellos as fast as they can, until it is over."""

    def __init__(self, port: int, sources: list[str], hellos: list[bytes]) -> None:
        self._target = Address("127.0.0.1", port)
        self._hellos = itertools.cycle(hellos)
        self._over = threading.Event()
        self.sent = 0
        self._threads = [threading.Thread(target=self._run, args=[one]) for one in sources]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, source: str) -> None:
        while not self._over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._target, 5, source_address=(source, 0)) as sock,
            ):
                sock.sendall(next(self._hellos))
                self.sent += 1
                sock.settimeout(5)
                sock.recv(1 << 16)


def cpu_of_hello(hello: bytes) -> float:
    """Seconds of CPU that a server spends on one first message: the least of a few."""
    security = Security(LAB, CALLED)
    for group in Group:  # the contexts are there, as in a process that has been called before
        security._find(read_hello(hostile_hello({Group.X25519: "X25519"}.get(group, "P-256"))))
    return min(_cpu_once(security, hello) for _ in range(5))


def _cpu_once(security: Security, hello: bytes) -> float:
    channel = security.answer_channel("stranger")
    assert channel is not None
    begin = time.thread_time()
    with contextlib.suppress(Exception):
        channel.receive(hello)
    return time.thread_time() - begin


def test_no_hello_costs_more_than_one_that_a_member_sends() -> None:
    """Whatever group, list or extension a stranger chooses: it is cheap or it is refused."""
    usual = max(cpu_of_hello(hostile_hello(name)) for name in ("X25519", "P-256"))
    for name, hello in kinds():
        assert cpu_of_hello(hello) < 3 * usual + 0.0005, name


@pytest.mark.parametrize("group", EXPENSIVE)
def test_a_group_other_than_x25519_and_p256_is_refused(group: str) -> None:
    """With a share of it, and with a hello that asks to be asked for one."""
    with open_door() as door:
        for has_share in (True, False):
            with socket.create_connection(("127.0.0.1", door.port), 30) as sock:
                sock.sendall(hostile_hello(group, has_share=has_share))
                sock.settimeout(30)
                said = sock.recv(1 << 16)
                assert said[0] == 21, "an alert, not an answer"
                assert sock.recv(100) == b""


@pytest.mark.parametrize(
    ("groups", "is_spoken_to"),
    [
        ("X25519", True),
        ("P-256", True),
        ("ffdhe8192:X25519", True),
        ("P-521:P-256", True),
        ("ffdhe8192", False),
        ("ffdhe2048", False),
        ("P-521", False),
        ("P-384", False),
        ("X448", False),
    ],
)
def test_openssl_gets_the_group_that_we_choose_or_none(groups: str, *, is_spoken_to: bool) -> None:
    """The client of OpenSSL, which knows all groups; it has no certificate and comes no further."""
    with open_door() as door:
        said = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{door.port}", "-groups", groups],
            input=b"",
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (b"Server Temp Key" in said.stdout) == is_spoken_to, said.stdout
        assert b"DH, " not in said.stdout.replace(b"ECDH, ", b"")
        come_in(door)


def test_every_member_comes_in_while_strangers_flood_the_door() -> None:
    """Members that were here before, and ones that come for the first time, on the first try."""
    with open_door() as door:
        come_in(door, "127.0.0.30")
        hellos = [hello for _, hello in kinds()]
        sources = [f"127.0.0.{number}" for number in range(9, 13)]
        with Flood(door.port, sources, hellos) as flood:
            eventually(lambda: flood.sent > 50)
            for number in range(6):
                come_in(door, "127.0.0.30")
                come_in(door, f"127.0.0.{40 + number}")
        assert door.refused > 0


def test_one_expensive_caller_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should cryptography take long after all, it takes long for that caller."""
    stuck, go_on = threading.Event(), threading.Event()
    take = acceptor_callers.Caller.take

    def take_long(caller: acceptor_callers.Caller, data: bytes) -> None:
        if caller.host == "127.0.0.9":
            stuck.set()
            assert go_on.wait(60)
        take(caller, data)

    monkeypatch.setattr(acceptor_callers.Caller, "take", take_long)
    with open_door() as door, contextlib.ExitStack() as lines:
        for _ in range(2 * THREADS):
            line = socket.create_connection(
                ("127.0.0.1", door.port), 30, source_address=("127.0.0.9", 0)
            )
            lines.enter_context(line).sendall(hostile_hello("X25519"))
        assert stuck.wait(30)
        come_in(door)
        come_in(door, "127.0.0.31")
        go_on.set()


# -- allowances ------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the allowances."""
    one = Clock()
    monkeypatch.setattr("potluck.net.handshakes.time.monotonic", one)
    return one


@pytest.fixture
def desk() -> Iterator[Handshakes]:
    """Handshakes without workers: nothing is submitted."""
    with contextlib.closing(Handshakes(lambda: None)) as one:
        yield one


def test_an_address_that_has_cost_too_much_waits(desk: Handshakes, clock: Clock) -> None:
    """And is heard again when it has earned it."""
    desk.charge("10.0.0.9", ADDRESS.burst * 0.9)
    assert desk.admit("10.0.0.9")
    desk.charge("10.0.0.9", ADDRESS.burst * 0.2)
    assert not desk.admit("10.0.0.9")
    assert desk.admit("10.0.0.8")
    clock.now += 0.5 * ADDRESS.burst / ADDRESS.share
    assert desk.admit("10.0.0.9")


def test_strangers_together_have_an_allowance_that_newcomers_do_not_wait_for(
    desk: Handshakes, clock: Clock
) -> None:
    """Those who made it run out wait; one who has cost next to nothing does not."""
    crowd = [f"10.0.1.{number}" for number in range(20)]
    for one in crowd:
        desk.charge(one, STRANGERS.burst / 15)
    assert not any(desk.admit(one) for one in crowd)
    assert desk.admit("10.0.0.8")


def test_whoever_proves_itself_gets_back_what_it_paid(desk: Handshakes, clock: Clock) -> None:
    """A hundred members from one address use up nothing."""
    for _ in range(100):
        desk.charge("10.0.0.5", ADDRESS.burst / 20)
        desk.proved("10.0.0.5", ADDRESS.burst / 20)
    assert desk.admit("10.0.0.5")
    assert desk.admit("10.0.0.9")
    desk.charge("10.0.0.9", STRANGERS.burst * 0.9)  # nothing of it was used by the members
    assert desk.admit("10.0.0.8")


def test_an_address_of_members_is_always_heard(desk: Handshakes, clock: Clock) -> None:
    """Also when strangers call from it, and when others have used up everything."""
    desk.proved("10.0.0.5", 0.0)
    desk.charge("10.0.0.9", 100.0)
    desk.charge("10.0.0.5", 100 * MEMBERS.burst)
    assert desk.admit("10.0.0.5")
    assert not desk.admit("10.0.0.9")


def test_a_machine_that_calls_itself_frees_none_of_its_neighbours(
    desk: Handshakes, clock: Clock
) -> None:
    """Of IPv6 a network counts as one address, and this machine is in one."""
    own, neighbour = "fd00:1::7", "fd00:1::8"
    assert desk.admit(source_of(own, called=own), is_local=True)
    desk.charge(source_of(neighbour, called=own), 10.0)
    assert not desk.admit(source_of(neighbour, called=own))
    assert desk.admit(source_of(own, called=own), is_local=True)


def test_what_is_remembered_of_addresses_is_bounded(desk: Handshakes, clock: Clock) -> None:
    """Strangers are forgotten before members."""
    desk.proved("10.0.0.5", 0.0)
    for number in range(3 * handshakes.SOURCES):
        desk.charge(f"stranger {number}", 0.0)
    assert len(desk._sources) <= handshakes.SOURCES
    assert desk.is_known("10.0.0.5")


def _pass(gate: threading.Event) -> None:
    assert gate.wait(30)


def run_all(order: list[str], steps: list[tuple[str, Callable[[], None]]]) -> list[str]:
    """Let a worker take steps in its order, all waiting before the first one is taken."""
    gate = threading.Event()
    with contextlib.closing(Handshakes(lambda: None)) as desk:
        desk.proved("member", 0.0)
        desk.charge("flood", ADDRESS.burst * 0.9)
        for number in range(handshakes.THREADS):
            desk.admit(f"gate {number}", is_local=True)
            desk.submit(f"gate {number}", None, lambda: _pass(gate))
        eventually(lambda: not desk._queue)
        for source, work in steps:
            desk.submit(source, source, work)
        gate.set()
        eventually(lambda: len(order) == len(steps))
    return order


def test_members_come_first_then_who_has_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which they called."""
    monkeypatch.setattr(handshakes, "THREADS", 2)  # so that strangers have one worker
    order: list[str] = []
    lock = threading.Lock()

    def note(name: str) -> Callable[[], None]:
        def work() -> None:
            with lock:
                order.append(name)

        return work

    steps = [("flood", note("flood"))] * 3 + [("newcomer", note("newcomer"))]
    seen = run_all(order, [*steps, ("member", note("member"))])
    assert set(seen[:2]) == {"member", "newcomer"}
    assert seen[2:] == ["flood"] * 3
