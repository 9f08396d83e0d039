"""Attacks on a pairing: whoever does not know the code gets one guess for each try, and no more."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core import pairing_guest, pairing_host
from potluck.core.cards import Card, Signer
from potluck.core.pairing import Ended, HangUp, Paired, PairingHost, TryFailed
from potluck.core.pairing_effects import TRIES
from potluck.core.pairing_messages import (
    PUBLIC_LIMIT,
    Accept,
    Admitted,
    Decline,
    Hello,
    Offer,
    Reply,
    Sealed,
    decode,
    encode,
)
from support.machines import machine
from support.pairing_table import (
    CODE,
    DESKTOP,
    LAPTOP,
    Table,
    To,
    make_guest,
    make_host,
    only,
    sent,
)

EVE = machine("eve")
FEW = settings(max_examples=60)  # an exchange costs 40 ms of arithmetic


PAIRS: tuple[tuple[To, To], ...] = (("host", "guest"), ("guest", "host"))

# --- a machine in the middle ---


def in_the_middle(host: PairingHost, guess: str, seed: int) -> tuple[Table, Table]:
    """Eve poses as the guest to the host and as the host to the guest, with a guessed code."""
    towards_host = Table(host, make_guest(guess, EVE, seed), link=seed).run()
    towards_guest = Table(make_host(guess, EVE, seed), make_guest(seed=100 + seed)).run()
    return towards_host, towards_guest


def test_a_machine_in_the_middle_has_three_guesses_and_neither_side_completes() -> None:
    """Each guess costs a try; after the third even the right code is useless."""
    host = make_host()
    guesses = ["7-guitar-garden", "7-harbor-guitar", "7-zebra-anchor", CODE]
    for seed, guess in enumerate(guesses[:TRIES]):
        towards_host, towards_guest = in_the_middle(host, guess, seed)
        for table in (towards_host, towards_guest):
            assert table.outcome("host") is None
            assert table.outcome("guest") is None
        assert only(TryFailed, towards_host.host_effects).tries_left == TRIES - 1 - seed
        assert "did not accept the code" in only(Ended, towards_guest.guest_effects).reason
    assert host.is_over
    fourth, _ = in_the_middle(host, guesses[3], 3)
    assert fourth.outcome("host") is None


def test_the_right_guess_does_get_in_so_the_simulation_is_fair() -> None:
    """What protects the code is its size and its tries, nothing hidden in these tests."""
    towards_host, towards_guest = in_the_middle(make_host(), CODE, 1)
    assert towards_host.outcome("host") is not None
    assert towards_guest.outcome("guest") is not None


def test_a_host_that_skips_the_guests_proof_learns_nothing_it_can_use() -> None:
    """An impostor cannot make the host's proof from the guest's, nor send its own back."""
    for steal in (False, True):
        impostor, guest = make_host("7-zebra-anchor", EVE), make_guest()
        impostor.connected(1, 0)
        reply = sent(impostor.receive(1, sent(guest.start(0))[0], 0))[0]
        proof = sent(guest.receive(reply, 0))[0]
        effects = guest.receive(proof if steal else encode(Sealed(bytes(64))), 0)
        assert isinstance(effects[-1], Ended)
        assert not effects[-1].retry


@pytest.mark.parametrize("field", ["node_id", "name", "share"])
@pytest.mark.parametrize("victim", ["host", "guest"])
def test_a_relay_that_changes_an_id_a_name_or_a_share_is_noticed(field: str, victim: To) -> None:
    """The exact bytes of both first messages are part of the key."""
    values = {"node_id": EVE.node_id, "name": "eve"}

    def tamper(to: To, message: bytes) -> list[tuple[To, bytes]]:
        decoded = decode(message, 1 << 16)
        if to == victim and isinstance(decoded, Hello | Reply):
            share = sent(make_guest(me=EVE, seed=8).start(0))[0]
            donor = decode(share, PUBLIC_LIMIT)
            assert isinstance(donor, Hello)
            other = donor.share if to == "host" else b"B" + donor.share[1:]
            changed = {field: values.get(field, other)}
            message = encode(msgspec.structs.replace(decoded, **changed))
        return [(to, message)]

    table = Table(tamper=tamper).run()
    assert table.outcome("host") is None
    assert table.outcome("guest") is None


def test_messages_of_an_earlier_pairing_are_worthless() -> None:
    """Replayed to a new host with the same code, or to a new guest, they fail."""
    recorded = Table().run()
    host, guest = make_host(seed=21), make_guest(seed=22)
    host.connected(1, 0)
    host_effects = [e for message in recorded.said["guest"] for e in host.receive(1, message, 0)]
    assert only(TryFailed, host_effects).reason == '"laptop" does not know the code.'
    guest.start(0)
    guest_effects = [e for message in recorded.said["host"] for e in guest.receive(message, 0)]
    assert not any(isinstance(effect, Paired) for effect in [*host_effects, *guest_effects])


# --- whatever happens on the cable ---


@given(st.data())
@FEW
def test_a_side_completes_only_if_it_heard_exactly_what_the_other_said(data: st.DataObject) -> None:
    """Lost, doubled, swapped, reflected or altered messages never persuade anybody."""
    kept: list[tuple[To, bytes]] = []

    def tamper(to: To, message: bytes) -> list[tuple[To, bytes]]:
        actions = ["pass", "pass", "pass", "drop", "twice", "reflect", "keep", "release", "alter"]
        action = data.draw(st.sampled_from(actions))
        other: To = "guest" if to == "host" else "host"
        if action == "keep":
            kept.append((to, message))
        if action == "alter":
            place = data.draw(st.integers(0, len(message) - 1))
            change = data.draw(st.integers(1, 255))
            message = message[:place] + bytes([message[place] ^ change]) + message[place + 1 :]
        return {
            "drop": [],
            "keep": [],
            "twice": [(to, message), (to, message)],
            "reflect": [(other, message)],
            "release": [*kept, (to, message)],
        }.get(action, [(to, message)])

    table = Table(tamper=tamper).run()
    for side, other in PAIRS:
        heard, said = table.heard[side], table.said[other]
        if table.outcome(side) is not None:
            assert heard == said[: len(heard)]


@given(st.integers(0, 6), st.integers(0, 10_000), st.integers(1, 255))
@FEW
def test_one_altered_byte_anywhere_stops_the_pairing(which: int, place: int, change: int) -> None:
    """Whoever received it does not complete; before the last message, neither side does."""
    count = 0

    def tamper(to: To, message: bytes) -> list[tuple[To, bytes]]:
        nonlocal count
        if count == which:
            i = place % len(message)
            message = message[:i] + bytes([message[i] ^ change]) + message[i + 1 :]
        count += 1
        return [(to, message)]

    table = Table(tamper=tamper).run()
    assert table.outcome("guest") is None
    assert (table.outcome("host") is None) or which == 6


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_never_raise_and_never_cost_a_try(data: bytes) -> None:
    """Whatever is sent first, the host survives it."""
    host = make_host()
    host.connected(1, 0)
    effects = host.receive(1, data, 0)
    assert isinstance(effects[-1], HangUp)
    assert host.tries_left == TRIES


@given(st.binary(min_size=32, max_size=32), st.sampled_from([b"A", b"B", b"S", b"\0"]))
@FEW
def test_any_share_is_either_a_point_or_refused(point: bytes, side: bytes) -> None:
    """Points off the curve or of small order cost us nothing but a moment."""
    host = make_host()
    host.connected(1, 0)
    effects = host.receive(1, encode(Hello(1, 7, LAPTOP.node_id, "x", side + point)), 0)
    assert len(effects) == (1 if host.tries_left < TRIES else 2)


# --- somebody who knows the code and lies about who he is ---


def test_a_guest_cannot_take_anothers_id() -> None:
    """The key must belong to the id, and the signature to this exchange."""
    other_key = Signer(Card(LAPTOP.node_id, EVE.card.public_key, "laptop"), EVE.sign)
    no_key = Signer(LAPTOP.card, EVE.sign)
    for liar in (other_key, no_key):
        table = Table(guest=make_guest(me=liar)).run()
        assert table.outcome("host") is None
        assert table.outcome("guest") is None
        assert "could not prove" in only(TryFailed, table.host_effects).reason


def test_a_guest_cannot_change_its_id_between_hello_and_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The id that was said first is the one that counts."""
    monkeypatch.setattr(pairing_guest, "Accept", lambda _, *rest: Accept(EVE.node_id, *rest))
    table = Table().run()
    assert table.outcome("host") is None
    assert "could not prove" in only(TryFailed, table.host_effects).reason


def test_a_host_cannot_take_anothers_id() -> None:
    """The guest checks the host in the same way."""
    liar = Signer(DESKTOP.card, EVE.sign)
    table = Table(host=make_host(me=liar)).run()
    assert table.outcome("host") is None
    assert only(Ended, table.guest_effects).reason == (
        '"desktop" could not prove that its identity is its own.'
    )


def test_a_machine_does_not_pair_with_itself() -> None:
    """Neither side plays along, whoever relays."""
    guest = make_guest(me=DESKTOP)
    guest.start(0)
    reply = encode(Reply(DESKTOP.node_id, "desktop", bytes(33)))
    assert only(Ended, guest.receive(reply, 0)).reason == (
        "Both ends of this pairing are the same machine."
    )


# --- somebody who knows the code and speaks out of turn ---


def test_a_sealed_message_of_the_wrong_kind_is_refused_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An admission is not an answer; the try is lost."""
    monkeypatch.setattr(pairing_guest, "Accept", lambda *_: Admitted(b""))
    table = Table().run()
    assert table.outcome("host") is None
    assert "sealed Admitted" in only(TryFailed, table.host_effects).reason


@pytest.mark.parametrize("replaced", ["Offer", "Admitted"])
def test_a_sealed_message_of_the_wrong_kind_is_refused_by_the_guest(
    monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """Neither in place of the offer nor in place of the admission."""
    monkeypatch.setattr(pairing_host, replaced, lambda *_: Decline())
    table = Table().run()
    assert table.outcome("guest") is None
    assert "sealed something" in only(Ended, table.guest_effects).reason


def test_an_offer_with_a_name_for_the_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a host that knows the code writes no control characters on our screen."""
    monkeypatch.setattr(pairing_host, "Offer", lambda _, *rest: Offer("\x1b[2J", *rest))
    table = Table().run()
    assert table.outcome("guest") is None
    assert "not an offer" in only(Ended, table.guest_effects).reason
