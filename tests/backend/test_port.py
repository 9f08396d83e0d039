"""One port for everything: control lanes, the lanes of views, and a place for early ones."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.backend import port
from potluck.backend.port import NodePort, PendingConnections, proved_node
from potluck.backend.stream_backend import ViewBackend
from potluck.errors import BackendUnavailable, DistributedError, HandshakeRefused, MalformedFrame
from potluck.identity.node import NodeIdentity
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.frames import FrameType
from potluck.net.opening import RefusedByPeer, RefusedForNow, exchange_hello, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket, Security
from potluck.trust.connect import OutgoingCall, dial
from potluck.wire_messages import (
    ControlReply,
    ControlRequest,
    Introduction,
    Join,
    OpenRequest,
    RankEndpoint,
)
from support.doors import LOOPBACKS
from support.forks import in_child
from support.group_machines import change_secret, impostor
from support.hellos import frame
from support.homes import Home, pair
from support.reception import last_words
from support.threads import Background, eventually, together
from support.views import Neighbourhood, black_hole, neighbourhood, peer_of, soon, sums, view_of

HELLO = ControlRequest(job="soup", card=b"a card")
LANE = OpenRequest(session=b"v" * 16, rank=1, to=0)


class Host:
    """Answers control lanes, and writes down who came."""

    def __init__(self, port: NodePort) -> None:
        self.came: queue.SimpleQueue[tuple[str, ControlRequest]] = queue.SimpleQueue()
        self._port = port
        port.on_control(self._answer)

    def _answer(self, sock: OpeningSocket, hello: ControlRequest) -> None:
        self.came.put((proved_node(sock), hello))
        self._port.answer_control(sock, ControlReply(job=hello.job, card=b"mine"))
        sock.close()


@pytest.fixture(params=["tls", "clear"])
def here(request: pytest.FixtureRequest) -> Iterator[Neighbourhood]:
    """A network, encrypted or not."""
    with neighbourhood(encrypted=request.param == "tls") as here:
        yield here


@pytest.fixture
def secure() -> Iterator[Neighbourhood]:
    """A network, encrypted."""
    with neighbourhood() as here:
        yield here


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_control_lane_says_who_is_at_each_end(here: Neighbourhood, host: str) -> None:
    """Over IPv4 and IPv6, through the same port; node and start are those of the ports."""
    one, other = here.machine(), here.machine()
    guests = Host(other)
    sock, opened = one.dial_control(Address(host, other.port), other.process.node, HELLO, soon())
    with contextlib.closing(sock):
        assert (opened.job, opened.card) == ("soup", b"mine")
        assert opened.introduction.incarnation == other.process.incarnation
        node, hello = guests.came.get(timeout=5)
        assert (hello.job, hello.card) == ("soup", b"a card")
        assert hello.introduction.incarnation == one.process.incarnation
        if isinstance(sock, SecureSocket):
            assert (proved_node(sock), node) == (other.process.node, one.process.node)
        else:
            assert (proved_node(sock), node) == ("", "")
            assert hello.introduction == Introduction(incarnation=one.process.incarnation)


def test_every_port_is_a_start_of_its_own(secure: Neighbourhood) -> None:
    """Two of one machine share its node; each has its number and slot, which is free afterwards."""
    one, other = secure.port(), secure.port()
    assert one.process.node == other.process.node
    assert one.process.incarnation < other.process.incarnation
    assert one.slot != other.slot
    one.close()
    again = secure.port()
    assert again.slot == one.slot
    assert again.process.incarnation > other.process.incarnation


def test_who_is_called_refuses_in_its_own_words(secure: Neighbourhood) -> None:
    """The dialler gets the sentence, and does not try other addresses of the same node."""
    one, other = secure.machine(), secure.machine()
    asked: list[str] = []

    def turn_away(sock: OpeningSocket, hello: ControlRequest) -> None:
        asked.append(hello.job)
        refuse(sock, "this process cooks something else")

    other.on_control(turn_away)
    addresses = [Address("127.0.0.1", other.port), Address("localhost", other.port)]
    with pytest.raises(RefusedByPeer, match="cooks something else"):
        one.dial_control(addresses, other.process.node, HELLO, soon())
    assert asked == ["soup"]


def test_a_port_that_has_only_just_opened_asks_to_come_again(secure: Neighbourhood) -> None:
    """Nobody drives its control lanes yet."""
    one, other = secure.machine(), secure.machine()
    with pytest.raises(RefusedForNow, match="only just started"):
        one.dial_control(Address("127.0.0.1", other.port), None, HELLO, soon())


def test_another_node_than_the_expected_one_is_not_spoken_to(secure: Neighbourhood) -> None:
    """An address may have passed to another machine of the same namespace."""
    one, other, third = secure.machine(), secure.machine(), secure.machine()
    guests = Host(other)
    with pytest.raises(HandshakeRefused, match="answered instead of"):
        one.dial_control(Address("127.0.0.1", other.port), third.process.node, HELLO, soon())
    assert guests.came.empty()


def test_a_stranger_gets_nowhere(secure: Neighbourhood) -> None:
    """Whoever does not have the secret, in TLS or in clear, is sent away before its hello."""
    other = secure.machine()
    guests = Host(other)
    with neighbourhood() as elsewhere:
        stranger = elsewhere.machine()
        with pytest.raises(HandshakeRefused, match="namespace"):
            stranger.dial_control(Address("127.0.0.1", other.port), None, HELLO, soon())
    with socket.create_connection(("127.0.0.1", other.port), timeout=30) as sock:
        sock.sendall(frame(FrameType.HELLO, b"let me in"))
        last_words(sock)
    assert guests.came.empty()


def test_callers_who_say_nothing_keep_no_member_out(secure: Neighbourhood) -> None:
    """Nor do those who talk nonsense: they have a bounded number of places, members find one."""
    one, other = secure.machine(), secure.machine()
    guests = Host(other)
    with contextlib.ExitStack() as crowd:
        for number in range(100):
            address = (f"127.0.0.{2 + number % 4}", other.port)
            sock = crowd.enter_context(socket.create_connection(address, timeout=30))
            with contextlib.suppress(OSError):  # it may have had to make room already
                sock.sendall(b"\x16\x03\x01" if number % 2 else b"GET / HTTP/1.1\r\n")
        for _ in range(5):
            lane, _ = one.dial_control(Address("127.0.0.1", other.port), None, HELLO, soon())
            lane.close()
    assert guests.came.qsize() == 5


def test_whoever_comes_to_join_by_rank_is_told_that_this_is_no_rendezvous(
    secure: Neighbourhood,
) -> None:
    """A hello for a TcpBackend ends at once."""
    one, other = secure.machine(), secure.machine()
    sock = dial(one.members, OutgoingCall(Address("127.0.0.1", other.port), soon()))
    with contextlib.closing(sock), pytest.raises(RefusedByPeer, match="cannot be understood"):
        exchange_hello(
            sock, Join(rank=1, world_size=2, peer=RankEndpoint([], 1, "x")), OpenRequest, soon()
        )


def test_a_rank_that_calls_before_the_port_is_open_is_heard() -> None:
    """It waits at the socket, and gets the answer of the handler that the port was opened with."""
    join = Join(rank=1, world_size=2, peer=RankEndpoint([], 1, "x"))
    listener = tcp.listen("127.0.0.1", 0)
    with neighbourhood(encrypted=False) as clear:
        members = clear.machine().members
        with socket.create_connection(listener.getsockname(), timeout=30) as caller:
            asking = Background(lambda: exchange_hello(caller, join, OpenRequest, soon()))
            door = NodePort(
                members=members,
                listener=listener,
                is_shared=True,
                on_join=lambda sock, hello: refuse(sock, f"rank {hello.rank} was heard"),
            )
            with contextlib.closing(door), pytest.raises(RefusedByPeer, match="rank 1 was heard"):
                asking.result()


def test_a_dialler_takes_the_first_address_that_answers(secure: Neighbourhood) -> None:
    """A black hole, a closed port, and somebody else's program do not hold it up for long."""
    one, other = secure.machine(), secure.machine("127.0.0.1")
    Host(other)
    with (
        black_hole("127.0.0.2", other.port),
        socket.create_server(("127.0.0.3", other.port)),  # accepts, and never says a word
    ):
        hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"]
        addresses = [Address(host, other.port) for host in hosts]
        begin = time.monotonic()
        sock, _ = one.dial_control(addresses, other.process.node, HELLO, soon())
        with contextlib.closing(sock):
            assert sock.getpeername()[0] == "127.0.0.1"
        assert time.monotonic() - begin < 3, "less than a single attempt may take"


def test_where_nobody_answers_the_error_has_every_address(secure: Neighbourhood) -> None:
    """And the reason of each."""
    one, other = secure.machine(), secure.machine("127.0.0.1")
    addresses = [Address(host, other.port) for host in ("127.0.0.2", "127.0.0.3")]
    with pytest.raises(DistributedError, match=r"127\.0\.0\.2:\d+: .*127\.0\.0\.3:\d+: "):
        one.dial_control(addresses, other.process.node, HELLO, soon())


def test_dialling_ends_when_it_makes_no_sense_any_more(secure: Neighbourhood) -> None:
    """``look`` is asked all the time."""
    one, other = secure.machine(), secure.machine("127.0.0.1")

    def look() -> None:
        raise MalformedFrame("enough")

    with black_hole("127.0.0.2", other.port), pytest.raises(MalformedFrame, match="enough"):
        one.dial_control(Address("127.0.0.2", other.port), None, HELLO, soon(), look)


def test_a_port_that_is_taken_is_an_error_for_people(secure: Neighbourhood) -> None:
    """It names the port and says what to do; the start is given back."""
    one = secure.port()
    with secure.port() as next_one:
        free = next_one.slot
    with pytest.raises(DistributedError, match=f"port {one.port}.*choose another port"):
        NodePort(secure.namespace, port=one.port)
    assert secure.port().slot <= free


def test_a_closed_port_opens_nothing(secure: Neighbourhood) -> None:
    """It may be closed twice; nothing listens there any more."""
    one, other = secure.machine(), secure.machine()
    one.close()
    one.close()
    with pytest.raises(BackendUnavailable, match="closed its port"):
        one.dial_control(Address("127.0.0.1", other.port), None, HELLO, soon())
    with pytest.raises(BackendUnavailable, match="closed its port"):
        one.serve(bytes(16), lambda sock, _: sock.close())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one.port), timeout=30)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # that is the case here
def test_a_forked_child_has_no_port() -> None:
    """Its parent's goes on, under the same claim to its slot."""
    with neighbourhood() as here:
        one, other = here.machine(), here.machine()
        Host(one)

        def misuse() -> str:
            try:
                one.dial_control(Address("127.0.0.1", other.port), None, HELLO, soon())
            except BackendUnavailable as error:
                one.close()
                return str(error)
            return "it works"

        assert "belongs to the parent process" in in_child(misuse)
        sock, _ = other.dial_control(Address("127.0.0.1", one.port), None, HELLO, soon())
        sock.close()
        assert here.port().slot not in {one.slot, other.slot}


# --- lanes that wait for their view ---


def ask(one: NodePort, other: NodePort, lane: OpenRequest = LANE) -> ControlRequest:
    """Say hello as a lane and wait for the answer."""
    sock = dial(one.members, OutgoingCall(Address("127.0.0.1", other.port), soon()))
    with contextlib.closing(sock):
        introduced = OpenRequest(lane.session, lane.rank, lane.to, introduction=one.introduction())
        return exchange_hello(sock, introduced, ControlRequest, soon())


def test_an_early_lane_waits_until_its_view_is_served(secure: Neighbourhood) -> None:
    """It then goes where later ones go."""
    one, other = secure.machine(), secure.machine()
    early = Background(lambda: ask(one, other))
    lobby: PendingConnections = other._lobby
    eventually(lambda: lobby.waiting == 1)
    came: list[OpenRequest] = []

    def intake(sock: OpeningSocket, lane: OpenRequest) -> None:
        came.append(lane)
        refuse(sock, "here you are")

    other.serve(LANE.session, intake)
    with pytest.raises(RefusedByPeer, match="here you are"):
        early.result()
    with pytest.raises(RefusedByPeer, match="here you are"):
        ask(one, other)
    assert [lane.rank for lane in came] == [1, 1]
    assert lobby.waiting == 0


def test_lanes_do_not_wait_for_ever(secure: Neighbourhood, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent away for now; nothing of them is left."""
    monkeypatch.setattr(port, "WAIT", 0.05)
    one, other = secure.machine(), secure.machine()
    with pytest.raises(RefusedForNow, match="not known here yet"):
        ask(one, other)
    assert other._lobby.waiting == 0


def test_lanes_of_a_view_that_is_over_do_not_wait(secure: Neighbourhood) -> None:
    """Unless it is served once more."""
    one, other = secure.machine(), secure.machine()
    other.serve(LANE.session, lambda sock, _: refuse(sock, "taken"))
    other.withdraw(LANE.session)
    with pytest.raises(RefusedForNow, match="this view has ended here"):
        ask(one, other)
    other.serve(LANE.session, lambda sock, _: refuse(sock, "taken again"))
    with pytest.raises(RefusedByPeer, match="taken again"):
        ask(one, other)


def test_one_node_cannot_take_all_the_seats(
    secure: Neighbourhood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others still find one, until there is none left at all."""
    monkeypatch.setattr(port, "SEATS_EACH", 2)
    monkeypatch.setattr(port, "SEATS", 3)
    greedy, modest, late, other = (secure.machine() for _ in range(4))
    lobby: PendingConnections = other._lobby
    waiting = [Background(lambda: ask(greedy, other)) for _ in range(2)]
    eventually(lambda: lobby.waiting == 2)
    with pytest.raises(RefusedForNow, match="too many"):
        ask(greedy, other)
    waiting.append(Background(lambda: ask(modest, other)))
    eventually(lambda: lobby.waiting == 3)
    with pytest.raises(RefusedForNow, match="too many"):
        ask(late, other)
    other.close()
    for one in waiting:
        with pytest.raises(RefusedForNow, match="leaving"):
            one.result()


def test_in_clear_seats_are_counted_by_address() -> None:
    """Nobody has proved anything there."""
    with neighbourhood(encrypted=False) as here:
        one, other = here.machine(), here.machine()
        waiting = Background(lambda: ask(one, other))
        eventually(lambda: other._lobby.waiting == 1)
        assert other._lobby._guests[0].origin.endswith("127.0.0.1")
        other.close()
        with pytest.raises(RefusedForNow, match="leaving"):
            waiting.result()


# --------------------------------------------------------------------------------------------------
# Ports of machines with rosters: every opening agrees on who belongs, as all others do.

MEMBERS_HELLO = ControlRequest(job="soup")


@contextlib.contextmanager
def port_of(home: Home) -> Iterator[NodePort]:
    """A process of a machine, which answers whoever opens a control lane."""
    identity = NodeIdentity.load_or_generate(home.path / "node_keypair")
    with NodePort(security=Security(home.namespace(), identity)) as port:

        def welcome(sock: OpeningSocket, _: ControlRequest) -> None:
            port.answer_control(sock, ControlReply(job="soup"))
            sock.close()

        port.on_control(welcome)
        yield port


def call(one: NodePort, other: NodePort) -> None:
    """Open a control lane and close it again."""
    address = Address("127.0.0.1", other.port)
    one.dial_control(address, other.process.node, MEMBERS_HELLO, soon())[0].close()


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Home, Home, Home]:
    """Two machines that were paired, and one with a stolen secret."""
    desk, laptop = Home(tmp_path, "desk"), Home(tmp_path, "laptop")
    pair(desk, laptop)
    return desk, laptop, impostor(tmp_path, desk)


def test_a_secret_alone_opens_no_lane(homes: tuple[Home, Home, Home]) -> None:
    """Whoever is on no roster is refused, and does not accept others either."""
    with contextlib.ExitStack() as stack:
        desk, laptop, thief = (stack.enter_context(port_of(home)) for home in homes)
        call(laptop, desk)
        for one, other in ((thief, desk), (desk, thief)):
            with pytest.raises(HandshakeRefused, match=r"not a member|another group"):
                call(one, other)


@pytest.mark.parametrize("dials", ["who was away", "who has the secret"])
def test_who_was_away_while_the_secret_changed_gets_it(
    homes: tuple[Home, Home, Home], dials: str
) -> None:
    """In one call, whichever side dials; afterwards the two form a view."""
    desk_home, laptop_home, _ = homes
    change_secret(desk_home, laptop_home)
    assert desk_home.namespace().secret != laptop_home.namespace().secret
    with port_of(desk_home) as desk, port_of(laptop_home) as laptop:
        call(*((laptop, desk) if dials == "who was away" else (desk, laptop)))
        assert desk_home.namespace().secret == laptop_home.namespace().secret
        view, peers = view_of(desk, laptop), [peer_of(desk), peer_of(laptop)]
        backends = together(
            lambda: ViewBackend(desk, view, desk.process, peers, deadline=soon()),
            lambda: ViewBackend(laptop, view, laptop.process, peers, deadline=soon()),
        )
        with backends[0], backends[1]:
            assert sums(backends) == [3.0] * 2
