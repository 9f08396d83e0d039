"""Showing a code: real sockets, real files; three tries, five minutes, at most one guest."""

from __future__ import annotations

import contextlib
import stat
import threading

import pytest

from potluck.backend.circles import CircleChanged
from potluck.core.pairing import Offered, TryFailed
from potluck.core.pairing_messages import PUBLIC_LIMIT, Refusal, Refused, decode
from potluck.errors import Disconnected
from potluck.net.namespace_files import UnknownNamespace
from potluck.runtime.pairing import Notice, PairingFailed, Waiting
from support.homes import WRONG, Guest, Home, Hosting, call
from support.threads import Background, eventually


@pytest.fixture
def desk(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path_factory.mktemp("desk"), "desk")


@pytest.fixture
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The machine on which it is typed."""
    return Home(tmp_path_factory.mktemp("laptop"), "laptop")


def test_two_machines_end_in_one_circle(desk: Home, laptop: Home) -> None:
    """Both learn who the other is; both disks have the secret and the roster, for us alone."""
    with Hosting(desk) as hosting:
        circle = laptop.join(hosting.where)
        outcome = hosting.outcome.result()
    assert outcome.peer == laptop.me.card
    assert outcome.reason == '"laptop" joined "home".'
    assert circle.namespace == desk.namespace()
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
        assert isinstance(first, Waiting)
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
    assert isinstance(message, Refused)
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
    """Two people, two codes, one circle: nobody is lost."""
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
        circle = desk.circle()
        circle.propose(lambda roster, secret: roster.rotate(circle.me, secret))
        return guest.decide(offered)

    with contextlib.suppress(CircleChanged), Hosting(desk) as hosting:
        guest = Guest(laptop)
        with pytest.raises(PairingFailed):
            guest.application(decide=rotate).at([hosting.where])
        with pytest.raises(CircleChanged, match="changed meanwhile"):
            hosting.outcome.result()
    assert desk.members() == ["desk"]
