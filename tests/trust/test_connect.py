"""Every opening agrees on who belongs, inside TLS, before anything is granted."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import HandshakeRefused
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.frames import FrameType
from potluck.net.listener import Acceptor
from potluck.net.opening import (
    HandshakeAction,
    HandshakeStep,
    answer,
    ask,
    hello_frame,
    opening_frame,
)
from potluck.net.secure_socket import OpeningSocket, Security
from potluck.net.tls import AnotherNamespace, TlsChannel
from potluck.trust.connect import (
    AdmissionHandshake,
    Declined,
    OutgoingCall,
    SecretChanged,
    dial,
    say_hello,
)
from potluck.trust.membership_store import TrustStore
from potluck.trust.roster import MAX_BYTES
from potluck.wire_messages import Introduction, OpenReply, OpenRequest, Sync, Told, pack, unpack
from support.group_machines import change_secret, impostor, members_of, soon
from support.homes import Home, pair
from support.threads import eventually

LANE = OpenRequest(session=bytes(16), rank=1, to=0)


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """A machine."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """Another one."""
    return Home(tmp_path, "laptop")


class Open:
    """A machine that listens, and grants whatever it is asked for."""

    def __init__(self, members: TrustStore) -> None:
        self.granted: list[bytes] = []
        self.acceptor = Acceptor(
            tcp.listen("127.0.0.1", 0),
            self._receive,
            members.security,
            lambda channel, where: AdmissionHandshake(members, channel, where),
        )
        self.address = Address("127.0.0.1", self.acceptor.port)

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        self.granted.append(payload)
        with contextlib.closing(sock):
            answer(sock, OpenReply(rank=7))


@contextlib.contextmanager
def listening(members: TrustStore) -> Iterator[Open]:
    """For the length of a test."""
    door = Open(members)
    with contextlib.closing(door.acceptor):
        yield door


def call(members: TrustStore, door: Open, request: OpenRequest | Sync = LANE) -> OpenReply:
    """Dial as one should."""
    with contextlib.closing(dial(members, OutgoingCall(door.address, soon()))) as sock:
        return say_hello(sock, request, OpenReply, members, soon())


# --- members ---


def test_members_who_agree_need_one_question_and_one_answer(
    desk: Home, laptop: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rosters are the same none is sent."""
    pair(desk, laptop)
    laptop.join_records_of(desk)
    monkeypatch.setattr(TrustStore, "tell", None)
    with listening(members_of(desk)) as door:
        assert call(members_of(laptop), door) == OpenReply(rank=7)
        assert unpack(door.granted[0], OpenRequest).session == LANE.session


def test_members_who_do_not_agree_tell_each_other(desk: Home, laptop: Home, tmp_path: Path) -> None:
    """Each knows of somebody the other does not; both know of everybody afterwards."""
    nas, tablet = Home(tmp_path, "nas"), Home(tmp_path, "tablet")
    pair(desk, laptop)
    pair(desk, nas)
    pair(laptop, tablet)
    with listening(members_of(desk)) as door:
        assert call(members_of(laptop), door) == OpenReply(rank=7)
    assert desk.members() == laptop.members() == ["desk", "laptop", "nas", "tablet"]


def test_a_newcomer_is_known_by_the_word_of_its_host(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """The desk has never heard of the tablet, which the laptop has let in; nor the other way."""
    tablet = Home(tmp_path, "tablet")
    pair(desk, laptop)
    pair(laptop, tablet)
    with listening(members_of(desk)) as door:
        call(members_of(tablet), door)
    desk.namespace().roster_path.unlink()
    with listening(members_of(tablet)) as door, pytest.raises(HandshakeRefused):
        call(members_of(desk), door)


def test_agreeing_may_be_all_that_is_wanted(desk: Home, laptop: Home) -> None:
    """Nothing is granted for it; the answer tells the time there."""
    pair(desk, laptop)
    with listening(members_of(desk)) as door:
        before = time.time()
        opened = call(members_of(laptop), door, Sync())
        assert isinstance(opened, OpenReply)
        assert before <= opened.clock <= time.time()
        assert door.granted == []


# --- absentees ---


def test_who_comes_with_an_earlier_secret_gets_the_present_one(desk: Home, laptop: Home) -> None:
    """And nothing else; under that it may call again."""
    pair(desk, laptop)
    change_secret(desk, laptop)
    theirs = members_of(laptop)
    assert laptop.namespace() != desk.namespace()
    with listening(members_of(desk)) as door:
        with pytest.raises(SecretChanged):
            call(theirs, door)
        assert door.granted == []
        assert laptop.namespace() == desk.namespace()
        assert call(theirs, door) == OpenReply(rank=7)


def test_whoever_is_called_under_an_earlier_secret_is_told(desk: Home, laptop: Home) -> None:
    """The dialler tries the secrets it had before, and hands over the present one."""
    pair(desk, laptop)
    change_secret(desk, laptop)
    with listening(members_of(laptop)) as door:
        assert call(members_of(desk), door) == OpenReply(rank=7)
    assert laptop.namespace() == desk.namespace()


def test_who_lacks_the_secret_itself_cannot_hand_it_over(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """It has heard of a second change, whose secret only the desk has."""
    nas = Home(tmp_path, "nas")
    pair(desk, laptop)
    pair(desk, nas)
    for home in (laptop, nas):
        home.join_records_of(desk)
    change_secret(desk, laptop)
    with listening(members_of(desk)) as door, contextlib.suppress(SecretChanged):
        call(members_of(laptop), door)
    change_secret(desk, laptop)
    assert not laptop.membership().has_secret
    refused = pytest.raises(HandshakeRefused, match="does not have it yet either")
    with listening(members_of(laptop)) as door, refused:
        call(members_of(nas), door)


def test_an_absentee_may_miss_several_changes(desk: Home, laptop: Home, tmp_path: Path) -> None:
    """It gets the last secret at once, by the signatures of those it knew."""
    nas, tablet = Home(tmp_path, "nas"), Home(tmp_path, "tablet")
    for guest in (laptop, nas, tablet):
        pair(desk, guest)
    for guest in (laptop, nas, tablet):
        guest.join_records_of(desk)
    for one, other in ((laptop, nas), (tablet, laptop), (nas, tablet)):
        one.join_records_of(other)
        other.join_records_of(one)
    for _ in range(3):
        change_secret(desk, nas, tablet)
    absent = members_of(laptop)
    with listening(members_of(desk)) as door:
        with pytest.raises(SecretChanged):
            call(absent, door)
        assert call(absent, door) == OpenReply(rank=7)
    assert laptop.membership().roster.generation.number == 3
    assert laptop.namespace() == desk.namespace()


def test_an_absentee_that_knew_too_few_follows_when_its_person_agrees(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """The laptop knew the desk alone; the desk and a newcomer have changed the secret since."""
    nas = Home(tmp_path, "nas")
    pair(desk, laptop)
    pair(desk, nas)
    change_secret(desk, nas)
    absent = members_of(laptop)
    with listening(members_of(desk)) as door:
        with pytest.raises(Declined, match="may sign it too"):
            call(absent, door)
        assert laptop.namespace() != desk.namespace()
        (pending,) = laptop.membership().roster.pending
        laptop.membership().sign(pending.name)
        with pytest.raises(SecretChanged):
            call(absent, door)
        assert call(absent, door) == OpenReply(rank=7)


def test_another_namespace_stays_another_namespace(desk: Home, laptop: Home) -> None:
    """Earlier secrets are tried, and none fits."""
    desk.membership()
    change_secret(desk)
    with listening(members_of(laptop)) as door, pytest.raises(AnotherNamespace):
        call(members_of(desk), door)


# --- strangers ---


@pytest.mark.parametrize("with_roster", [True, False])
def test_a_fresh_key_is_refused_and_both_are_told(
    desk: Home, tmp_path: Path, with_roster: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its secret is right; it may even show the desk's own roster."""
    fresh = impostor(tmp_path, desk)
    if with_roster:
        roster = desk.membership().namespace.roster_path.read_bytes()
        fresh.membership().namespace.roster_path.write_bytes(roster)
    before = desk.membership().namespace.roster_path.read_bytes()
    with listening(members_of(desk)) as door, caplog.at_level(logging.WARNING):
        with pytest.raises(HandshakeRefused, match="not a member") as error:
            call(members_of(fresh), door)
        eventually(lambda: f"refused {_name(fresh)}" in caplog.text or "declined" in caplog.text)
    assert not isinstance(error.value, SecretChanged)
    assert door.granted == []
    assert desk.namespace().roster_path.read_bytes() == before


def _name(home: Home) -> str:
    identity = members_of(home).security.identity
    return f"{identity.short_name} ({identity.id})"


def test_a_stranger_who_answers_is_declined_and_told(
    desk: Home, laptop: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """The laptop was revoked, and listens under the old secret at the address that we call."""
    pair(desk, laptop)
    desk.membership().propose(
        lambda roster, secret: roster.revoke(laptop.me.node_id, desk.me, secret)
    )
    theirs = members_of(laptop)
    with listening(theirs) as door, caplog.at_level(logging.WARNING):
        with pytest.raises(Declined, match="laptop was revoked by desk"):
            call(members_of(desk), door)
        eventually(lambda: theirs.last_refusal is not None)
    assert "it closed the connection: this machine declines" in (theirs.last_refusal or "")
    assert "laptop was revoked by desk" in caplog.text
    assert laptop.namespace() != desk.namespace()
    assert laptop.members() == ["desk", "laptop"], "it was told nothing but the sentence"


def test_who_claims_our_roster_without_being_on_it_is_declined(desk: Home, tmp_path: Path) -> None:
    """It welcomes everybody at once, as if both went by the same roster."""
    fresh = impostor(tmp_path, desk)
    security = Security(fresh.namespace(), members_of(fresh).security.identity)

    def welcome(sock: OpeningSocket, _: bytes) -> None:
        with contextlib.closing(sock):
            answer(sock, OpenReply(rank=7))

    acceptor = Acceptor(tcp.listen("127.0.0.1", 0), welcome, security)
    with contextlib.closing(acceptor):
        members = members_of(desk)
        where = OutgoingCall(Address("127.0.0.1", acceptor.port), soon())
        with contextlib.closing(dial(members, where)) as sock, pytest.raises(Declined):
            say_hello(sock, LANE, OpenReply, members, soon())


def test_a_machine_with_a_problem_of_its_own_says_so(
    desk: Home, laptop: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """Its roster was damaged while it runs; its log says what to do."""
    pair(desk, laptop)
    ours = members_of(desk)
    with listening(ours) as door:
        desk.namespace().roster_path.write_bytes(b"damaged")
        with pytest.raises(HandshakeRefused, match="has a problem; see its log"):
            call(members_of(laptop), door)
    assert "potluck unpair home" in caplog.text


# --- hostile members ---


def hostile_answers() -> list[tuple[FrameType, bytes]]:
    """What somebody who has the secret might say when it is asked for its roster."""
    return [
        (FrameType.HELLO, pack(LANE)),
        (FrameType.WELCOME, pack(OpenReply(rank=0))),
        (FrameType.ROSTER, b""),
        (FrameType.ROSTER, b"\xc1" * 100),
        (FrameType.ROSTER, pack(Told())),
        (FrameType.ROSTER, pack(Told(bytes(MAX_BYTES)))),
        (FrameType.ROSTER, msgspec.msgpack.encode({"roster": bytes(MAX_BYTES + 1)})),
        (FrameType.REFUSAL, b"\x1b[2J no"),
    ]


@pytest.mark.parametrize("said", hostile_answers())
def test_a_member_that_talks_nonsense_is_refused(
    desk: Home, laptop: Home, said: tuple[FrameType, bytes]
) -> None:
    """Nothing is granted, nothing is written, and others are answered as before."""
    pair(desk, laptop)
    laptop.join_records_of(desk)
    theirs = members_of(laptop)
    before = desk.namespace().roster_path.read_bytes()
    ours = members_of(desk)
    with listening(ours) as door:
        with contextlib.closing(dial(theirs, OutgoingCall(door.address, soon()))) as sock:
            other = OpenRequest(bytes(16), 1, 0, introduction=Introduction(b"d" * 32))
            assert ask(sock, soon(), hello_frame(other)).kind is FrameType.ROSTER
            kind, payload = said
            frame = opening_frame(kind, LANE)[:36]
            frame = frame[:32] + len(payload).to_bytes(4, "little") + payload
            with pytest.raises(HandshakeRefused) as error:
                ask(sock, soon(), frame)
            assert "\x1b" not in str(error.value)
        assert "\x1b" not in (ours.last_refusal or "")
        assert door.granted == []
        assert call(theirs, door) == OpenReply(rank=7)
    assert desk.namespace().roster_path.read_bytes() == before


class Talk:
    """A reception that takes one frame after another without a network."""

    def __init__(self, members: TrustStore, peer: Home) -> None:
        channel = SimpleNamespace(peer=peer.me.node_id, tag=peer.namespace().discovery_tag)
        self.reception = AdmissionHandshake(members, cast("TlsChannel", channel), "10.0.0.7:1")

    def say(self, kind: FrameType, payload: bytes) -> HandshakeStep:
        """The answer to a frame."""
        return self.reception.receive(kind, payload)


def test_no_bytes_of_a_member_break_the_conversation(tmp_path: Path) -> None:
    """As hello, and as roster: each is refused with a sentence or leads on, and raises nothing."""
    desk, laptop = Home(tmp_path, "desk"), Home(tmp_path, "laptop")
    pair(desk, laptop)
    ours = members_of(desk)
    asked = pack(OpenRequest(bytes(16), 1, 0, introduction=Introduction(b"d" * 32)))
    good = pack(Told(laptop.membership().roster.to_bytes()))

    @given(st.binary(max_size=300), st.integers(0, len(good) - 1), st.integers(1, 255))
    def attack(noise: bytes, place: int, change: int) -> None:
        assert Talk(ours, laptop).say(FrameType.HELLO, noise).next is HandshakeAction.REFUSE
        flipped = bytearray(good)
        flipped[place] ^= change
        for payload in (noise, bytes(flipped)):
            talk = Talk(ours, laptop)
            assert talk.say(FrameType.HELLO, asked).next is HandshakeAction.LISTEN
            assert talk.say(FrameType.ROSTER, payload).next in {
                HandshakeAction.REFUSE,
                HandshakeAction.GRANT,
            }

    attack()
    assert desk.members() == ["desk", "laptop"]


def test_a_hello_that_was_heard_before_is_bound_to_who_says_it(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """Another machine that repeats a member's hello, word for word, is still itself."""
    pair(desk, laptop)
    ours = members_of(desk)
    hello = pack(OpenRequest(bytes(16), 1, 0, introduction=members_of(laptop).introduction()))
    stranger = impostor(tmp_path, desk)
    assert Talk(ours, laptop).say(FrameType.HELLO, hello).next is not HandshakeAction.REFUSE
    talk = Talk(ours, stranger)
    assert talk.say(FrameType.HELLO, hello).next is HandshakeAction.LISTEN
    turn = talk.say(FrameType.ROSTER, pack(Told(laptop.membership().roster.to_bytes())))
    assert turn.next is HandshakeAction.REFUSE
    assert "No machine with the id" in turn.sentence


def test_agreement_takes_no_longer_than_a_caller_has(desk: Home, tmp_path: Path) -> None:
    """The longest roster there is, with every signature checked, and both sides write it down."""
    for number in range(12):
        desk.membership().admit(Home(tmp_path, f"machine {number}").me.card)
    laptop = Home(tmp_path, "laptop")
    pair(desk, laptop)
    desk.membership().admit(Home(tmp_path, "last").me.card)
    with listening(members_of(desk)) as door:
        begin = time.monotonic()
        call(members_of(laptop), door)
        assert time.monotonic() - begin < 5
    assert laptop.members() == desk.members()
