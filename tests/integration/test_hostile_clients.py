"""Hostile clients at the ports of a group that works: its ranks neither stop nor swell."""

import contextlib
import os
import random
import socket
import ssl
from collections.abc import Iterator
from unittest import mock

import psutil
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.messages import Join, Lane, LaneOpened, Peer, pack
from potluck.net.acceptor import SLOTS
from potluck.net.frames import HEADER_SIZE, Kind, encode
from support.place import Place, resident
from support.ranks import Rank, Ranks
from support.threads import PATIENCE

LEAKED = b"leaked session.."
BOUND = SLOTS * (64 << 10) + (8 << 20)  # bytes a rank may grow: its callers, and its own heap


IN_CLEAR = "insecure"


def work(place: Place, namespace: str | None = None) -> list[int]:
    """Exchange messages without a pause until told to stop; how often, and how much we grew."""
    chance = os.urandom
    with mock.patch("os.urandom", lambda size: LEAKED if size == 16 else chance(size)):
        backend = place.join(namespace=namespace)  # the enemy knows what names this group
    with backend:
        before, after = (place.rank - 1) % place.world_size, (place.rank + 1) % place.world_size
        at_first = resident()
        place.say("working")
        turns, verdict = 0, bytearray(1)
        while not verdict[0]:
            for size in (64, 5_000, 200_000):
                inbox = bytearray(size)
                receive = backend.post_recv_into(inbox, before)
                backend.send(bytes([place.rank]) * size, after, timeout=PATIENCE)
                receive.wait(PATIENCE)
                assert inbox == bytes([before]) * size
            turns += 1
            if place.rank == 0:
                verdict[0] = obey(place, turns)
                for other in place.others:
                    backend.send(verdict, other, tag=1, timeout=PATIENCE)
            else:
                backend.recv(verdict, 0, tag=1, timeout=PATIENCE)
        backend.barrier(PATIENCE)
        return [turns, resident() - at_first]


def obey(place: Place, turns: int) -> bool:
    """Do what the test says; whether that is to stop."""
    word = place.next_word()
    if word == "report":
        place.say("report", turns=turns)
    return word == "stop"


class Target:
    """A group at work, and its open ports."""

    def __init__(self, processes: list[Rank]) -> None:
        self._processes = processes
        for process in processes:
            process.expect("working")
        self.ports = [port for process in processes for port in listening_ports(process.pid)]

    def assert_works_on(self) -> None:
        """The ranks have done something, and do more after this."""
        turns = []
        for _ in range(2):
            self._processes[0].tell("report")
            turns.append(self._processes[0].expect("report")["turns"])
        assert turns[1] > turns[0]

    def assert_unharmed(self) -> None:
        """They all come to their end, with as much memory as before."""
        self._processes[0].tell("stop")
        for process in self._processes:
            turns, grown = process.value()
            assert turns > 1
            assert grown < BOUND


def listening_ports(pid: int) -> list[int]:
    """Where a process answers."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [entry.laddr[1] for entry in connections if entry.status == psutil.CONN_LISTEN]


def dial(port: int) -> socket.socket:
    """Connect to a rank."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def say(line: socket.socket, data: bytes) -> None:
    """Write as much as the other side cares to take."""
    with contextlib.suppress(ConnectionError):
        line.sendall(data)


def answer_to(port: int, data: bytes) -> bytes:
    """Everything a rank answers until it hangs up."""
    with contextlib.closing(dial(port)) as line:
        say(line, data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := line.recv(4096):
                answer += part
        return answer


def replayed_hellos() -> Iterator[bytes]:
    """Everything that the ranks said to each other while the group formed, and similar."""
    me = Peer(hosts=["127.0.0.1"], port=1, name="double")
    for rank in range(3):
        yield pack(Join(rank=rank, world_size=3, peer=me))
        for other in range(3):
            yield pack(Lane(session=LEAKED, rank=rank, to=other))
            yield pack(Lane(session=LEAKED, rank=rank, to=other, purpose="everything"))
    yield pack(LaneOpened(rank=1))


FRAMES = st.builds(
    lambda kind, numbers, length, payload: (
        encode(kind, group=numbers, operation=numbers, tag=7, piece=length, length=length) + payload
    ),
    st.sampled_from(Kind),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.binary(max_size=3000),
)


def test_a_working_group_shrugs_off_what_strangers_send(ranks: Ranks) -> None:
    """Random bytes, frames out of place, absurd lengths: hypothesis thinks of them."""
    for namespace in (None, IN_CLEAR):
        bombard(Target(ranks.start(work, 3, namespace)))


def bombard(target: Target) -> None:
    """Send whatever hypothesis thinks of to every port, and see what becomes of the group."""
    assert len(target.ports) == 3

    @settings(max_examples=60)
    @given(data=st.binary(max_size=3000) | st.lists(FRAMES, max_size=3).map(b"".join))
    def attack(data: bytes) -> None:
        for port in target.ports:
            with contextlib.closing(dial(port)) as line:
                say(line, data)

    attack()
    target.assert_works_on()
    target.assert_unharmed()


def test_a_working_group_lets_no_double_in(ranks: Ranks) -> None:
    """Hellos that were right once are refused with a sentence; in clear, anybody can send them."""
    target = Target(ranks.start(work, 3, IN_CLEAR))
    for port in target.ports:
        for payload in replayed_hellos():
            answer = answer_to(port, encode(Kind.HELLO, length=len(payload)) + payload)
            assert b"this group is complete" in answer
    target.assert_works_on()
    target.assert_unharmed()


def client_hello() -> bytes:
    """What opens a TLS conversation; whoever sends it need not be anybody."""
    outgoing = ssl.MemoryBIO()
    conversation = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname="potluck"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        conversation.do_handshake()
    return outgoing.read()


def test_a_working_group_does_not_swell_with_callers(ranks: Ranks) -> None:
    """Hundreds that hang up, say nothing, dribble, or send all that they may but one byte."""
    hello = encode(Kind.HELLO, length=60_000) + bytes(60_000)
    crowd(Target(ranks.start(work, 3, IN_CLEAR)), hello, hello[:-1])
    crowd(Target(ranks.start(work, 3)), client_hello(), client_hello())


def crowd(target: Target, greeting: bytes, most_of_it: bytes) -> None:
    """Call hundreds of times and stay on the line."""
    with contextlib.ExitStack() as lines:
        slow = [lines.enter_context(dial(port)) for port in target.ports for _ in range(5)]
        for turn in range(4 * SLOTS):
            for line in slow:
                say(line, greeting[turn : turn + 1])
            port, other = random.Random(turn).sample(target.ports, 2)
            say(lines.enter_context(dial(target.ports[0])), most_of_it)
            say(lines.enter_context(dial(port)), greeting[: turn % (2 * HEADER_SIZE)])
            dial(other).close()
        target.assert_works_on()
    target.assert_unharmed()
