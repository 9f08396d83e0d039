"""Showing a code: real sockets, real files; three tries, five minutes, at most one guest."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck._version import PROTOCOL as VERSION
from potluck.errors import Disconnected, NoConnection
from potluck.identity.namespace import UnknownNamespace
from potluck.net.addresses import Address
from potluck.trust import pairing, pairing_net
from potluck.trust.membership_store import MembershipChanged
from potluck.trust.pairing import GUESSES, PAUSES, Notice, PairingFailed, WaitingForGuest
from potluck.trust.pairing_net import PairingDiscovery
from potluck.trust.pairing_protocol import (
    PUBLIC_LIMIT,
    Offered,
    PairingHello,
    PairingRefused,
    Refusal,
    TryFailed,
    decode,
    encode,
)
from support.homes import CODE, WRONG, Guest, Home, Hosting, call, framed, hello_of
from support.ports import free_port
from support.threads import Background, eventually


@pytest.fixture
def desk(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path_factory.mktemp("desk"), "desk")


@pytest.fixture
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The machine on which it is typed."""
    return Home(tmp_path_factory.mktemp("laptop"), "laptop")


def test_two_machines_end_in_one_group(desk: Home, laptop: Home) -> None:
    """Both learn who the other is; both disks have the secret and the roster, for us alone."""
    with Hosting(desk) as hosting:
        membership = laptop.join(hosting.where)
        outcome = hosting.outcome.result()
    assert outcome.peer == laptop.me.card
    assert outcome.reason == '"laptop" joined "home".'
    assert membership.namespace == desk.namespace()
    for home in (desk, laptop):
        assert home.members() == ["desk", "laptop"]
        assert not home.namespace().is_unused
        for file in home.namespace().directory.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_guest_is_on_the_hosts_disk_before_it_hears_of_it(desk: Home, laptop: Home) -> None:
    """Whatever happens to either machine afterwards."""
    with Hosting(desk) as hosting:
        guest = Guest(laptop)
        guest.application().at([hosting.where])
        assert desk.members() == ["desk", "laptop"]


def test_a_wrong_code_costs_a_try_and_the_right_one_still_works(desk: Home, laptop: Home) -> None:
    """Both people are told what happened."""
    with Hosting(desk) as hosting:
        with pytest.raises(PairingFailed, match="did not accept the code; read it once more"):
            laptop.join(hosting.where, WRONG)
        laptop.join(hosting.where)
        hosting.outcome.result()
        failed = [notice for notice in hosting.notices if isinstance(notice, TryFailed)]
        assert failed == [TryFailed('"laptop" does not know the code.', 2)]


def test_there_is_no_fourth_try(desk: Home, laptop: Home) -> None:
    """After three wrong ones the door is closed, and the right code does not open it."""
    with Hosting(desk) as hosting:
        for _ in range(3):
            with pytest.raises(PairingFailed, match="did not accept the code"):
                laptop.join(hosting.where, WRONG)
        with pytest.raises(PairingFailed, match=r"All 3 tries are used.*for a new code"):
            hosting.outcome.result()
        with pytest.raises(Disconnected):
            laptop.join(hosting.where)
    assert desk.members() == ["desk"]


def test_a_code_lives_five_minutes(desk: Home) -> None:
    """The person is shown how much is left; then the door is closed."""
    with Hosting(desk) as hosting:
        eventually(lambda: len(hosting.notices) > 1)  # a clock on the screen can run
        first = hosting.notices[0]
        assert isinstance(first, WaitingForGuest)
        assert 290 < first.seconds_left <= 300
        assert first.tries_left == 3
        hosting.clock.push(301)
        with pytest.raises(PairingFailed, match=r"valid for 5 minutes.*for a new code"):
            hosting.outcome.result()


def told(sock: object) -> Refusal:
    """The refusal that comes on a bare connection, before its end."""
    with contextlib.closing(sock.makefile("rb")) as file:  # type: ignore[attr-defined]
        size = int.from_bytes(file.read(4), "big")
        message = decode(file.read(size), PUBLIC_LIMIT)
        assert file.read() == b""
    assert isinstance(message, PairingRefused)
    return message.why


def test_who_says_nothing_is_hung_up_on_after_five_seconds(desk: Home, laptop: Home) -> None:
    """He is told why, it costs no try, and nobody else notices."""
    with Hosting(desk) as hosting, call(hosting.where) as silent:
        eventually(lambda: len(hosting.listener._calls) == 1)
        hosting.clock.push(5.1)
        assert told(silent) is Refusal.TOO_SLOW
        silent.close()
        laptop.join(hosting.where)
        assert hosting.outcome.result().peer == laptop.me.card
        assert hosting.failures == []


def test_dripping_bytes_does_not_buy_time(desk: Home) -> None:
    """The limit is for the whole message, not for the next byte."""
    with Hosting(desk) as hosting, call(hosting.where) as slow:
        for byte in b"\0\0\1":
            slow.sendall(bytes([byte]))
            eventually(lambda: len(hosting.listener._calls) == 1)
            hosting.clock.push(1.8)
        assert told(slow) is Refusal.TOO_SLOW


def test_an_interrupt_says_good_bye(desk: Home) -> None:
    """Whoever is connected learns that the code is dead; nothing stays open."""
    ready = threading.Event()

    def interrupt(notice: Notice) -> None:
        if ready.is_set():
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), Hosting(desk, tell=interrupt) as hosting:
        with call(hosting.where) as caller:
            eventually(lambda: len(hosting.listener._calls) == 1)
            ready.set()
            assert told(caller) is Refusal.CODE_DEAD
        with pytest.raises(KeyboardInterrupt):
            hosting.outcome.result()
        with pytest.raises(ConnectionRefusedError):
            call(hosting.where)


def test_two_codes_may_be_shown_at_once(
    desk: Home, laptop: Home, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two people, two codes, one group: nobody is lost."""
    nas = Home(tmp_path_factory.mktemp("nas"), "nas")
    with Hosting(desk) as first, Hosting(desk, WRONG) as second:
        joining = Background(lambda: nas.join(second.where, WRONG))
        laptop.join(first.where)
        joining.result()
        first.outcome.result()
        second.outcome.result()
    assert desk.members() == ["desk", "laptop", "nas"]


# --- when the host cannot keep its word ---


def test_a_guest_is_not_in_if_the_host_could_not_write_it_down(desk: Home, laptop: Home) -> None:
    """The namespace was deleted while the guest was deciding: the host says so, the guest too."""

    def sabotage(offered: Offered) -> bool:
        desk.namespace().delete()
        return guest.decide(offered)

    with contextlib.suppress(UnknownNamespace), Hosting(desk) as hosting:
        guest = Guest(laptop)
        with pytest.raises(PairingFailed, match="hung up where a confirmation that we are in"):
            guest.application(decide=sabotage).at([hosting.where])
        with pytest.raises(UnknownNamespace):
            hosting.outcome.result()


def test_an_old_secret_is_not_given_away_as_a_new_one(desk: Home, laptop: Home) -> None:
    """The secret was changed on this machine while the code was shown."""

    def rotate(offered: Offered) -> bool:
        membership = desk.membership()
        membership.propose(lambda roster, secret: roster.rotate(membership.me, secret))
        return guest.decide(offered)

    with contextlib.suppress(MembershipChanged), Hosting(desk) as hosting:
        guest = Guest(laptop)
        with pytest.raises(PairingFailed):
            guest.application(decide=rotate).at([hosting.where])
        with pytest.raises(MembershipChanged, match="changed meanwhile"):
            hosting.outcome.result()
    assert desk.members() == ["desk"]


# --------------------------------------------------------------------------------------------------
# Attacks on a pairing, as real clients on real sockets: nobody gets in, and nobody is kept out.

STRANGER = "127.0.0.9"
CODE_WORDS = (b"guitar", b"harbor")
MESSAGES = 7  # of a whole pairing, in both directions


@pytest.fixture
def attacks_desk(tmp_path: Path) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path, "desk")


@pytest.fixture
def attacks_laptop(tmp_path: Path) -> Home:
    """The machine on which it is typed."""
    return Home(tmp_path, "laptop")


# --- in the middle ---

Tamper = Callable[[int, bytes], bytes]


class Relay:
    """A machine between guest and host that sees every message, and may change it."""

    def __init__(self, host: Address, tamper: Tamper) -> None:
        self.seen: list[bytes] = []
        self._tamper = tamper
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(10)
        self.where = Address(*self._door.getsockname())
        self._working = Background(lambda: self._serve(host))

    def _serve(self, host: Address) -> None:
        with self._door, self._door.accept()[0] as guest, call(host) as upstream:
            there = Background(lambda: self._forward(guest, upstream))
            self._forward(upstream, guest)
            there.result()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as file:
            while head := file.read(4):
                message = file.read(int.from_bytes(head, "big"))
                self.seen.append(message)
                changed = self._tamper(len(self.seen), message)
                target.sendall(framed(changed))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Wait for both directions to end."""
        self._working.result()


@contextlib.contextmanager
def in_the_middle(hosting: Hosting, tamper: Tamper) -> Iterator[Relay]:
    """A relay in front of a host."""
    relay = Relay(hosting.where, tamper)
    yield relay
    relay.end()


def test_who_only_relays_learns_nothing(attacks_desk: Home, attacks_laptop: Home) -> None:
    """The pairing succeeds, between the two, and nothing secret has passed by."""
    with (
        Hosting(attacks_desk) as hosting,
        in_the_middle(hosting, lambda _, message: message) as relay,
    ):
        membership = attacks_laptop.join(relay.where)
        hosting.outcome.result()
    assert membership.namespace == attacks_desk.namespace()
    assert len(relay.seen) == MESSAGES
    seen = b"".join(relay.seen)
    for hidden in (
        attacks_desk.namespace().secret,
        *CODE_WORDS,
        b"home",
        membership.roster.to_bytes()[:40],
    ):
        assert hidden not in seen
    for public in (b"desk", b"laptop"):  # which is why the line above means something
        assert public in seen


@pytest.mark.parametrize("number", range(1, MESSAGES + 1))
def test_who_changes_anything_ends_it(
    attacks_desk: Home, attacks_laptop: Home, number: int
) -> None:
    """A bit in any of the messages: the guest is not in, and nothing is stored there."""

    def flip(index: int, message: bytes) -> bytes:
        return message[:-1] + bytes([message[-1] ^ 1]) if index == number else message

    with (
        Hosting(attacks_desk) as hosting,
        in_the_middle(hosting, flip) as relay,
        pytest.raises(PairingFailed),
    ):
        attacks_laptop.join(relay.where)
    assert not (attacks_laptop.path / "namespaces").exists()
    # The last message says that the guest is written down; before it, nobody was.
    assert attacks_desk.members() == (["desk", "laptop"] if number == MESSAGES else ["desk"])


def test_who_stands_in_for_both_sides_has_one_guess(
    attacks_desk: Home, attacks_laptop: Home, tmp_path: Path
) -> None:
    """A machine that plays host to the guest and guest to the host, with a guess at the code."""
    middle = Home(tmp_path, "middle")
    with Hosting(attacks_desk) as hosting, Hosting(middle, WRONG) as fake:
        with pytest.raises(PairingFailed, match="did not accept the code"):
            attacks_laptop.join(fake.where)
        with pytest.raises(PairingFailed):
            middle.join(hosting.where, WRONG)
        eventually(lambda: len(hosting.failures) == len(fake.failures) == 1)
        attacks_laptop.join(hosting.where)
        hosting.outcome.result()
    assert attacks_desk.members() == ["desk", "laptop"]


def test_a_recorded_pairing_cannot_be_repeated(attacks_desk: Home, attacks_laptop: Home) -> None:
    """Even if a code should come twice: the other side's share is new."""
    sent: list[bytes] = []

    def record(_index: int, message: bytes) -> bytes:
        sent.append(message)
        return message

    with Hosting(attacks_desk) as hosting, in_the_middle(hosting, record) as relay:
        attacks_laptop.join(relay.where)
        hosting.outcome.result()
    before = attacks_desk.membership().roster
    with Hosting(attacks_desk) as hosting, call(hosting.where) as replay:
        for message in (sent[0], sent[2], sent[5]):  # what the guest said
            with contextlib.suppress(ConnectionError):
                replay.sendall(framed(message))
        eventually(lambda: hosting.failures == ['"laptop" does not know the code.'])
    assert attacks_desk.membership().roster == before


# --- crowds ---


def test_two_hundred_silent_callers_do_not_delay_a_guest(
    attacks_desk: Home, attacks_laptop: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """From another address, or from the guest's own; each refusal is logged with a reason."""
    caplog.set_level("INFO")
    for source in (STRANGER, "127.0.0.1"):
        with Hosting(attacks_desk) as hosting, contextlib.ExitStack() as crowd:
            for _ in range(200):
                crowd.enter_context(call(hosting.where, source))
            begin = time.monotonic()
            attacks_laptop.join(hosting.where)
            assert time.monotonic() - begin < 5
            crowd.close()
            hosting.outcome.result()
            assert hosting.failures == []
    assert f"{STRANGER}:" in caplog.text
    assert "had to make room" in caplog.text


def test_a_crowd_that_keeps_coming_costs_little_memory(attacks_desk: Home) -> None:
    """Each announces as much as is allowed and sends all but the last byte."""
    piece = (PUBLIC_LIMIT).to_bytes(4, "big") + bytes(PUBLIC_LIMIT - 1)
    tracemalloc.start()
    try:
        with Hosting(attacks_desk) as hosting, contextlib.ExitStack() as crowd:
            for number in range(200):
                caller = crowd.enter_context(call(hosting.where, f"127.0.1.{number % 50 + 1}"))
                with contextlib.suppress(ConnectionError):
                    caller.sendall(piece)
            eventually(lambda: len(hosting.listener._calls) == 8)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
            assert hosting.failures == []
    finally:
        tracemalloc.stop()


CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: desk\r\n\r\n",
    "tls": CLIENT_HELLO,
    "huge": b"\xff\xff\xff\xff" + bytes(1000),
    "empty": bytes(4),
    "not ours": (20).to_bytes(4, "big") + bytes(20),
    "half": (100).to_bytes(4, "big") + b"half",
    "noise": os.urandom(5000),
    "wrong slot": encode(PairingHello(VERSION, 8, "a" * 32, "x", bytes(33))),  # type: ignore[arg-type]
    "wrong version": encode(PairingHello(99, 7, "a" * 32, "x", bytes(33))),  # type: ignore[arg-type]
    "no point": encode(PairingHello(VERSION, 7, "a" * 32, "x", b"A" + b"\xff" * 32)),  # type: ignore[arg-type]
}


def test_garbage_costs_no_try(attacks_desk: Home, attacks_laptop: Home) -> None:
    """Programs that knock at every port cannot use up a code; the guest comes after them all."""
    with Hosting(attacks_desk) as hosting:
        for name, data in GARBAGE.items():
            is_message = name in {"wrong slot", "wrong version", "no point"}
            with call(hosting.where, STRANGER) as caller, contextlib.suppress(OSError):
                caller.sendall(framed(data) if is_message else data)
                caller.shutdown(socket.SHUT_WR)  # fails if he was hung up on already
                while caller.recv(1000):
                    pass
        attacks_laptop.join(hosting.where)
        hosting.outcome.result()
        assert ["protocol 99" in each for each in hosting.failures] == [True]
    assert attacks_desk.members() == ["desk", "laptop"]


def test_a_hello_that_is_never_followed_up_costs_a_try(
    attacks_desk: Home, attacks_laptop: Home
) -> None:
    """Our share is out, so it was a guess; three of those, and a new code is needed."""
    with Hosting(attacks_desk) as hosting:
        for _ in range(2):
            before = len(hosting.failures)
            with call(hosting.where) as caller:
                caller.sendall(hello_of(attacks_laptop))
                assert caller.recv(1000)
            eventually(lambda before=before: len(hosting.failures) > before)  # type: ignore[misc]
        attacks_laptop.join(hosting.where)
        hosting.outcome.result()
        assert set(hosting.failures) == {'"laptop" hung up before the end.'}


def test_a_proof_that_does_not_come_in_five_seconds_costs_a_try(
    attacks_desk: Home, attacks_laptop: Home
) -> None:
    """He who makes us wait blocks others for that long, and three times at most."""
    with Hosting(attacks_desk) as hosting, call(hosting.where) as caller:
        caller.sendall(hello_of(attacks_laptop))
        assert caller.recv(1000)
        hosting.clock.push(5.1)
        eventually(lambda: len(hosting.failures) == 1)
        assert hosting.failures == ['"laptop" took too long to send a proof of the code.']


# --------------------------------------------------------------------------------------------------
# Typing a code: finding the right machine among those who answer, and giving strangers little.


@pytest.fixture
def guest_desk(tmp_path: Path) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path, "desk")


@pytest.fixture
def a_guest(tmp_path: Path) -> Guest:
    """Somebody who types it."""
    return Guest(Home(tmp_path, "laptop"))


@contextlib.contextmanager
def stranger(answer: bytes) -> Iterator[tuple[Address, list[int]]]:
    """Somebody at a port who answers every hello with the same bytes, and counts them."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            while True:
                try:
                    caller, _ = door.accept()
                except OSError:
                    return
                with caller, contextlib.suppress(OSError):
                    calls.append(len(caller.recv(1 << 16)))
                    caller.sendall(answer)

        serving = Background(serve)
        yield Address(*door.getsockname()), calls
        door.shutdown(socket.SHUT_RDWR)
    serving.result()


# --- one exchange ---


def test_a_guest_that_declines_is_not_in(guest_desk: Home, a_guest: Guest) -> None:
    """Both sides say who chose so."""
    with Hosting(guest_desk) as hosting:
        with pytest.raises(PairingFailed, match='You chose not to join "home"'):
            a_guest.application(decide=lambda _: False).at([hosting.where])
        with pytest.raises(PairingFailed, match='"laptop" chose not to join'):
            hosting.outcome.result()
    assert guest_desk.members() == ["desk"]


@pytest.mark.parametrize("error", [LookupError("no room"), KeyboardInterrupt()])
def test_an_error_while_deciding_declines(
    guest_desk: Home, a_guest: Guest, error: BaseException
) -> None:
    """The other machine does not wait for its timeout, and the error comes out here."""

    def fail(_offered: Offered) -> bool:
        raise error

    with Hosting(guest_desk) as hosting:
        with pytest.raises(type(error)):
            a_guest.application(decide=fail).at([hosting.where])
        with pytest.raises(PairingFailed, match="chose not to join"):
            hosting.outcome.result()


def test_a_busy_machine_is_knocked_at_again(
    guest_desk: Home, a_guest: Guest, tmp_path: Path
) -> None:
    """While another guest makes up its mind; here that one joins, and the code is used up."""
    offered, answered = threading.Event(), threading.Event()
    first = Guest(Home(tmp_path, "nas"))

    def hesitate(offer: Offered) -> bool:
        offered.set()
        answered.wait(30)
        return first.decide(offer)

    pauses: list[float] = []
    with Hosting(guest_desk) as hosting:
        joining = Background(lambda: first.application(decide=hesitate).at([hosting.where]))
        assert offered.wait(30)
        with pytest.raises(PairingFailed, match="pairing with another one right now"):
            a_guest.application(pause=pauses.append).at([hosting.where])
        answered.set()
        joining.result()
        hosting.outcome.result()
        assert hosting.failures == []  # being busy costs nobody a try
    assert pauses == list(PAUSES)
    assert sum("Trying again" in sentence for sentence in a_guest.said) == len(PAUSES)


def test_a_machine_cannot_pair_with_itself(guest_desk: Home) -> None:
    """The sentence says so on both sides."""
    with Hosting(guest_desk) as hosting, pytest.raises(PairingFailed, match="the same machine"):
        guest_desk.join(hosting.where)


def test_somebody_who_hangs_up_at_once_costs_nothing(a_guest: Guest) -> None:
    """He has learned nothing, so he is tried again, a few times."""
    with stranger(b"") as (where, calls):
        with pytest.raises(PairingFailed, match="hung up where a reply was due") as caught:
            a_guest.application().at([where])
        assert caught.value.retry
        assert len(calls) == len(PAUSES) + 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff" * 100,
        (1 << 31).to_bytes(4, "big") + bytes(1000),
        framed(b"nonsense"),
        framed(bytes(4096)),
    ],
    ids=["http", "noise", "huge", "nonsense", "zeros"],
)
def test_an_answer_that_is_none_ends_the_exchange(a_guest: Guest, answer: bytes) -> None:
    """In bounded memory and time."""
    tracemalloc.start()
    try:
        with stranger(answer) as (where, _), pytest.raises(PairingFailed):
            a_guest.application().at([where])
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_refusal_is_told_in_our_own_words(a_guest: Guest) -> None:
    """A stranger writes nothing on our terminal."""
    answer = framed(encode(PairingRefused(Refusal.VERSION)))
    with stranger(answer) as (where, calls):
        with pytest.raises(PairingFailed, match="upgrade the older one: pip install"):
            a_guest.application().at([where])
        assert len(calls) == 1


def test_the_first_address_that_answers_is_taken(guest_desk: Home, a_guest: Guest) -> None:
    """A machine has several, and not all of them can be reached."""
    dead = Address("127.0.0.1", free_port())
    with Hosting(guest_desk) as hosting:
        a_guest.store(a_guest.application().at([dead, hosting.where]))
    assert guest_desk.members() == ["desk", "laptop"]
    with pytest.raises(NoConnection):
        a_guest.application().at([dead])
    with pytest.raises(PairingFailed, match="no address"):
        a_guest.application().at([])


def test_who_answers_nothing_is_left_after_a_while(
    a_guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's patience, seen from here."""
    monkeypatch.setattr("potluck.trust.pairing_protocol.STEP_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        pytest.raises(PairingFailed, match="took too long to send a reply"),
    ):
        a_guest.application().at([Address(*door.getsockname())])


# --- searching ---


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only loopback, and a service type of this test's own: another run must not be found."""
    service = f"_pl{secrets.token_hex(4)}._tcp.local."
    monkeypatch.setattr(pairing_net, "SERVICE", service)
    monkeypatch.setattr(pairing_net, "usable_hosts", list)
    for pause in ("_REGISTER_TIME", "_UNREGISTER_TIME"):
        monkeypatch.setattr(f"zeroconf._core.{pause}", 10)
    monkeypatch.setattr(pairing, "SEARCH_SECONDS", 10.0)
    monkeypatch.setattr(pairing, "OTHERS_SECONDS", 0.5)


@pytest.mark.usefixtures("network")
def test_the_machine_with_the_number_is_found(guest_desk: Home, a_guest: Guest) -> None:
    """No address is needed."""
    with (
        Hosting(guest_desk) as hosting,
        PairingDiscovery() as shown,
        PairingDiscovery() as searched,
    ):
        shown.announce(7, hosting.where.port, 1)
        a_guest.store(a_guest.application().search(searched))
        hosting.outcome.result()
    assert guest_desk.members() == ["desk", "laptop"]
    assert a_guest.said[0] == "Looking for the machine that shows the number 7 …"


@pytest.mark.usefixtures("network")
def test_strangers_who_answer_first_do_not_stop_it(
    guest_desk: Home, a_guest: Guest, tmp_path: Path
) -> None:
    """A dead port costs nothing; somebody with another code of that number has one guess."""
    neighbour = Home(tmp_path, "neighbour")
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(Hosting(neighbour, WRONG))
        right = stack.enter_context(Hosting(guest_desk))
        searched = stack.enter_context(PairingDiscovery())
        for port in (free_port(), wrong.where.port, right.where.port):
            stack.enter_context(PairingDiscovery()).announce(7, port, 1)
        a_guest.store(a_guest.application().search(searched))
        right.outcome.result()
        assert len(wrong.failures) <= 1
        assert right.failures == []
    assert guest_desk.members() == ["desk", "laptop"]
    assert neighbour.members() == ["neighbour"]


@pytest.mark.usefixtures("network")
def test_only_a_few_strangers_get_a_guess(a_guest: Guest, tmp_path: Path) -> None:
    """Then a person decides, and knows why: each answer that fails is a guess given away."""
    with contextlib.ExitStack() as stack:
        searched = stack.enter_context(PairingDiscovery())
        shown = stack.enter_context(PairingDiscovery())
        strangers = []
        for number in range(GUESSES + 2):
            home = Home(tmp_path, f"stranger{number}")
            strangers.append(stack.enter_context(Hosting(home, WRONG)))
            shown.announce(7, strangers[-1].where.port, 1)
        with pytest.raises(PairingFailed, match=r"3 machines answered .* --host ADDRESS"):
            a_guest.application().search(searched)
        # The last refusal may still be on its way to the other thread.
        eventually(lambda: sum(len(each.failures) for each in strangers) == GUESSES)


@pytest.mark.usefixtures("network")
def test_one_who_fails_is_told_as_such(a_guest: Guest, tmp_path: Path) -> None:
    """Most often the code was simply mistyped: no talk of strangers then."""
    with Hosting(Home(tmp_path, "desk"), WRONG) as hosting:
        with PairingDiscovery() as shown, PairingDiscovery() as searched:
            shown.announce(7, hosting.where.port, 1)
            with pytest.raises(PairingFailed, match="did not accept the code; read it once more"):
                a_guest.application().search(searched)
        eventually(lambda: len(hosting.failures) == 1)


@pytest.mark.usefixtures("network")
def test_nobody_answers(a_guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to check and what else can be done."""
    monkeypatch.setattr(pairing, "SEARCH_SECONDS", 0.2)
    with (
        PairingDiscovery() as searched,
        pytest.raises(PairingFailed, match=r"shows the number 7 answered.*--host ADDRESS"),
    ):
        a_guest.application().search(searched)


@pytest.mark.usefixtures("network")
def test_once_the_right_machine_was_found_no_other_is_tried(
    guest_desk: Home, a_guest: Guest, tmp_path: Path
) -> None:
    """Saying no is an answer, not a failure to be repaired."""
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(Hosting(home)) for home in (guest_desk, Home(tmp_path, "nas"))]
        searched = stack.enter_context(PairingDiscovery())
        shown = stack.enter_context(PairingDiscovery())
        for hosting in hosts:
            shown.announce(7, hosting.where.port, 1)
        asked: list[str] = []

        def decline(offered: Offered) -> bool:
            asked.append(offered.peer.name)
            return False

        with pytest.raises(PairingFailed, match="You chose not to join"):
            a_guest.application(CODE, decide=decline).search(searched)
        assert len(asked) == 1
