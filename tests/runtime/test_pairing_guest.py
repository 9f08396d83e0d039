"""Typing a code: finding the right machine among those who answer, and giving strangers little."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.core.pairing import Offered
from potluck.core.pairing_messages import Refusal, Refused, encode
from potluck.errors import NoConnection
from potluck.net import pairing_discovery
from potluck.net.addresses import Address
from potluck.net.pairing_discovery import PairingDiscovery
from potluck.runtime import pairing_guest
from potluck.runtime.pairing import PairingFailed
from potluck.runtime.pairing_guest import GUESSES, PAUSES
from support.homes import CODE, WRONG, Guest, Home, Hosting, framed
from support.ports import free_port
from support.threads import Background, eventually


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path, "desk")


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
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


def test_a_guest_that_declines_is_not_in(desk: Home, guest: Guest) -> None:
    """Both sides say who chose so."""
    with Hosting(desk) as hosting:
        with pytest.raises(PairingFailed, match='You chose not to join "home"'):
            guest.application(decide=lambda _: False).at([hosting.where])
        with pytest.raises(PairingFailed, match='"laptop" chose not to join'):
            hosting.outcome.result()
    assert desk.members() == ["desk"]


@pytest.mark.parametrize("error", [LookupError("no room"), KeyboardInterrupt()])
def test_an_error_while_deciding_declines(desk: Home, guest: Guest, error: BaseException) -> None:
    """The other machine does not wait for its timeout, and the error comes out here."""

    def fail(_offered: Offered) -> bool:
        raise error

    with Hosting(desk) as hosting:
        with pytest.raises(type(error)):
            guest.application(decide=fail).at([hosting.where])
        with pytest.raises(PairingFailed, match="chose not to join"):
            hosting.outcome.result()


def test_a_busy_machine_is_knocked_at_again(desk: Home, guest: Guest, tmp_path: Path) -> None:
    """While another guest makes up its mind; here that one joins, and the code is used up."""
    offered, answered = threading.Event(), threading.Event()
    first = Guest(Home(tmp_path, "nas"))

    def hesitate(offer: Offered) -> bool:
        offered.set()
        answered.wait(30)
        return first.decide(offer)

    pauses: list[float] = []
    with Hosting(desk) as hosting:
        joining = Background(lambda: first.application(decide=hesitate).at([hosting.where]))
        assert offered.wait(30)
        with pytest.raises(PairingFailed, match="pairing with somebody else right now"):
            guest.application(pause=pauses.append).at([hosting.where])
        answered.set()
        joining.result()
        hosting.outcome.result()
        assert hosting.failures == []  # being busy costs nobody a try
    assert pauses == list(PAUSES)
    assert sum("Trying again" in sentence for sentence in guest.said) == len(PAUSES)


def test_a_machine_cannot_pair_with_itself(desk: Home) -> None:
    """The sentence says so on both sides."""
    with Hosting(desk) as hosting, pytest.raises(PairingFailed, match="the same machine"):
        desk.join(hosting.where)


def test_somebody_who_hangs_up_at_once_costs_nothing(guest: Guest) -> None:
    """He has learned nothing, so he is tried again, a few times."""
    with stranger(b"") as (where, calls):
        with pytest.raises(PairingFailed, match="hung up where a reply was due") as caught:
            guest.application().at([where])
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
def test_an_answer_that_is_none_ends_the_exchange(guest: Guest, answer: bytes) -> None:
    """In bounded memory and time."""
    tracemalloc.start()
    try:
        with stranger(answer) as (where, _), pytest.raises(PairingFailed):
            guest.application().at([where])
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_refusal_is_told_in_our_own_words(guest: Guest) -> None:
    """A stranger writes nothing on our terminal."""
    answer = framed(encode(Refused(Refusal.VERSION)))
    with stranger(answer) as (where, calls):
        with pytest.raises(PairingFailed, match="same version of potluck on both"):
            guest.application().at([where])
        assert len(calls) == 1


def test_the_first_address_that_answers_is_taken(desk: Home, guest: Guest) -> None:
    """A machine has several, and not all of them can be reached."""
    dead = Address("127.0.0.1", free_port())
    with Hosting(desk) as hosting:
        guest.store(guest.application().at([dead, hosting.where]))
    assert desk.members() == ["desk", "laptop"]
    with pytest.raises(NoConnection):
        guest.application().at([dead])
    with pytest.raises(PairingFailed, match="no address"):
        guest.application().at([])


def test_who_answers_nothing_is_left_after_a_while(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core's patience, seen from here."""
    monkeypatch.setattr("potluck.core.pairing_guest.STEP_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        pytest.raises(PairingFailed, match="took too long to send a reply"),
    ):
        guest.application().at([Address(*door.getsockname())])


# --- searching ---


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only loopback, and a service type of this test's own: another run must not be found."""
    service = f"_pl{secrets.token_hex(4)}._tcp.local."
    monkeypatch.setattr(pairing_discovery, "SERVICE", service)
    monkeypatch.setattr(pairing_discovery, "usable_hosts", list)
    for pause in ("_REGISTER_TIME", "_UNREGISTER_TIME"):
        monkeypatch.setattr(f"zeroconf._core.{pause}", 10)
    monkeypatch.setattr(pairing_guest, "SEARCH_SECONDS", 10.0)
    monkeypatch.setattr(pairing_guest, "OTHERS_SECONDS", 0.5)


@pytest.mark.usefixtures("network")
def test_the_machine_with_the_number_is_found(desk: Home, guest: Guest) -> None:
    """No address is needed."""
    with Hosting(desk) as hosting, PairingDiscovery() as shown, PairingDiscovery() as searched:
        shown.announce(7, hosting.where.port, 1)
        guest.store(guest.application().search(searched))
        hosting.outcome.result()
    assert desk.members() == ["desk", "laptop"]
    assert guest.said[0] == "Looking for the machine that shows the number 7 …"


@pytest.mark.usefixtures("network")
def test_strangers_who_answer_first_do_not_stop_it(
    desk: Home, guest: Guest, tmp_path: Path
) -> None:
    """A dead port costs nothing; somebody with another code of that number has one guess."""
    neighbour = Home(tmp_path, "neighbour")
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(Hosting(neighbour, WRONG))
        right = stack.enter_context(Hosting(desk))
        searched = stack.enter_context(PairingDiscovery())
        for port in (free_port(), wrong.where.port, right.where.port):
            stack.enter_context(PairingDiscovery()).announce(7, port, 1)
        guest.store(guest.application().search(searched))
        right.outcome.result()
        assert len(wrong.failures) <= 1
        assert right.failures == []
    assert desk.members() == ["desk", "laptop"]
    assert neighbour.members() == ["neighbour"]


@pytest.mark.usefixtures("network")
def test_only_a_few_strangers_get_a_guess(guest: Guest, tmp_path: Path) -> None:
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
            guest.application().search(searched)
        # The last refusal may still be on its way to the other thread.
        eventually(lambda: sum(len(each.failures) for each in strangers) == GUESSES)


@pytest.mark.usefixtures("network")
def test_one_who_fails_is_told_as_such(guest: Guest, tmp_path: Path) -> None:
    """Most often the code was simply mistyped: no talk of strangers then."""
    with Hosting(Home(tmp_path, "desk"), WRONG) as hosting:
        with PairingDiscovery() as shown, PairingDiscovery() as searched:
            shown.announce(7, hosting.where.port, 1)
            with pytest.raises(PairingFailed, match="did not accept the code; read it once more"):
                guest.application().search(searched)
        eventually(lambda: len(hosting.failures) == 1)


@pytest.mark.usefixtures("network")
def test_nobody_answers(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to check and what else can be done."""
    monkeypatch.setattr(pairing_guest, "SEARCH_SECONDS", 0.2)
    with (
        PairingDiscovery() as searched,
        pytest.raises(PairingFailed, match=r"shows the number 7 answered.*--host ADDRESS"),
    ):
        guest.application().search(searched)


@pytest.mark.usefixtures("network")
def test_once_the_right_machine_was_found_no_other_is_tried(
    desk: Home, guest: Guest, tmp_path: Path
) -> None:
    """Saying no is an answer, not a failure to be repaired."""
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(Hosting(home)) for home in (desk, Home(tmp_path, "nas"))]
        searched = stack.enter_context(PairingDiscovery())
        shown = stack.enter_context(PairingDiscovery())
        for hosting in hosts:
            shown.announce(7, hosting.where.port, 1)
        asked: list[str] = []

        def decline(offered: Offered) -> bool:
            asked.append(offered.peer.name)
            return False

        with pytest.raises(PairingFailed, match="You chose not to join"):
            guest.application(CODE, decide=decline).search(searched)
        assert len(asked) == 1
