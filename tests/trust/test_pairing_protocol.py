"""Pairing: two machines and a short code, from the hello to the shared namespace."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck._version import PROTOCOL as VERSION
from potluck._version import Build, __version__
from potluck.errors import MalformedFrame, UnsupportedOperation
from potluck.identity.node import NodeIdentity, node_id
from potluck.trust import pairing_protocol
from potluck.trust.pairing_code import parse_code
from potluck.trust.pairing_protocol import (
    ANSWER_SECONDS,
    BAD_SHARES,
    CODE_SECONDS,
    DECISION_SECONDS,
    ENCRYPTED_LIMIT,
    MAX_LINKS,
    PUBLIC_LIMIT,
    SENTENCES,
    STEP_SECONDS,
    TRIES,
    Accept,
    Admitted,
    AlreadyMember,
    AskUser,
    Belonging,
    Box,
    CallerDiffers,
    Confirm,
    Decline,
    Effect,
    EncryptedMessage,
    HangUp,
    Message,
    Namespace,
    NamespaceOffer,
    Offered,
    Paired,
    PairingEnded,
    PairingGuest,
    PairingHello,
    PairingHost,
    PairingRefused,
    PairingRole,
    PairingSession,
    Refusal,
    Replace,
    Reply,
    Secret,
    ShareMaker,
    TryFailed,
    decide_adoption,
    decode,
    decode_secret,
    encode,
)
from potluck.trust.roster_records import Card, Signer, Verifier
from support.machines import entropy, machine
from support.pairing_table import (
    CODE,
    DESKTOP,
    LAPTOP,
    Table,
    To,
    make_guest,
    make_host,
    one_of_each,
    only,
    reason_of,
    sent,
    until_offer,
)
from support.pairing_table import HOME as PAIRING_TABLE_HOME


def test_two_machines_with_the_same_code_end_in_one_namespace() -> None:
    """Both learn the other's name and id; the guest gets the secret and the roster with itself."""
    table = Table().run()
    host, guest = table.outcome("host"), table.outcome("guest")
    assert host is not None
    assert guest is not None
    assert (host.peer, guest.peer) == (LAPTOP.card, DESKTOP.card)
    assert guest.namespace == Namespace(
        "home", PAIRING_TABLE_HOME.secret, b"the roster with laptop"
    )
    assert host.namespace == guest.namespace
    assert host.reason == '"laptop" joined "home".'
    assert guest.reason == 'This machine joined "home" through "desktop".'
    assert table.host.is_over
    assert table.guest.is_over


def test_it_works_with_real_keys() -> None:
    """The node identity's own functions fit the two doors."""
    ours, theirs = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    verifier = Verifier(node_id, NodeIdentity.verify)
    signers = [
        Signer(Card(who.id, who.public_key, name), who.sign)
        for name, who in (("desktop", ours), ("laptop", theirs))
    ]
    host = make_host(me=signers[0])
    host._verifier = verifier
    guest = PairingGuest(parse_code(CODE), signers[1], verifier=verifier, entropy=entropy(2))
    table = Table(host, guest).run()
    assert table.outcome("host") is not None
    assert table.outcome("guest") is not None


def test_the_host_has_stored_the_guest_before_the_guest_is_told() -> None:
    """Effects are carried out in order, and the outcome comes before the last message."""
    kinds = [type(effect).__name__ for effect in Table().run().host_effects]
    assert kinds == ["SendBytes", "SendBytes", "SendBytes", "Paired", "SendBytes", "HangUp"]


def test_the_guest_may_decline() -> None:
    """Both sides end without a pairing, and the code is not usable again."""
    table = Table(accepts=False).run()
    assert table.outcome("host") is None
    assert table.outcome("guest") is None
    assert reason_of(table.guest_effects) == 'You chose not to join "home".'
    assert only(PairingEnded, table.host_effects).reason == '"laptop" chose not to join.'


def test_secrets_stay_out_of_what_may_be_logged() -> None:
    """Neither effects nor messages nor codes show a secret in their text."""
    table = Table().run()
    text = repr([table.host_effects, table.guest_effects, table.host.code])
    assert repr(PAIRING_TABLE_HOME.secret)[2:-1] not in text
    assert "harbor" not in text


def test_nothing_secret_crosses_the_cable_in_the_clear() -> None:
    """Neither the secret, nor the words, nor the roster, nor the namespace's name."""
    table = Table().run()
    wire = b"".join(table.said["host"] + table.said["guest"])
    assert not any(
        part in wire
        for part in (PAIRING_TABLE_HOME.secret, b"guitar", b"harbor", b"the roster", b"home")
    )


@pytest.mark.parametrize(
    ("name", "secret", "roster", "words"),
    [
        ("\x1b[2J", bytes(32), b"", "cannot be shown"),
        ("home", bytes(31), b"", "32 bytes"),
        ("home", bytes(32), bytes(ENCRYPTED_LIMIT), "too large"),
    ],
)
def test_a_namespace_that_cannot_travel_is_refused_at_once(
    name: str, secret: bytes, roster: bytes, words: str
) -> None:
    """The fault is shown where it is made, not at the other end."""
    with pytest.raises(ValueError, match=words):
        Namespace(name, secret, roster)


# --------------------------------------------------------------------------------------------------
# Adoption: when joining another namespace needs a question, and when it does not.

PRIVATE = Belonging("private", b"mine", b"secret 0", unused=True)
HOME = Belonging("home", b"group", b"secret 1", others=2)


def test_a_private_namespace_that_is_unused_gives_way_silently() -> None:
    """It was made without asking, and goes without asking."""
    assert decide_adoption(PRIVATE, HOME) == Replace()
    assert isinstance(decide_adoption(None, HOME), Replace)


@pytest.mark.parametrize(
    ("current", "company"),
    [
        (replace(PRIVATE, unused=False, others=2), "with 2 other machines"),
        (replace(PRIVATE, unused=False, others=1), "with one other machine"),
        (replace(PRIVATE, unused=False), "alone"),
    ],
)
def test_leaving_company_or_something_made_on_purpose_is_asked(
    current: Belonging, company: str
) -> None:
    """The question names both."""
    assert decide_adoption(current, HOME) == AskUser(
        f'This machine is in "private" {company}. Join "home" instead?'
    )


def test_a_member_stays_a_member() -> None:
    """Nothing is replaced when group and secret are the same."""
    assert isinstance(decide_adoption(HOME, HOME), AlreadyMember)


def test_pairing_again_after_a_rotation_brings_the_new_secret() -> None:
    """The group is the same, so nobody is asked."""
    newer = replace(HOME, commitment=b"secret 2")
    assert decide_adoption(HOME, newer) == Replace(
        '"home" has a new secret; this machine has it now.'
    )


# --------------------------------------------------------------------------------------------------
# Attacks on a pairing: whoever does not know the code gets one guess for each try, and no more.

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
        assert "did not accept the code" in only(PairingEnded, towards_guest.guest_effects).reason
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
        effects = guest.receive(proof if steal else encode(EncryptedMessage(bytes(64))), 0)
        assert isinstance(effects[-1], PairingEnded)
        assert not effects[-1].retry


@pytest.mark.parametrize("field", ["node_id", "name", "share"])
@pytest.mark.parametrize("victim", ["host", "guest"])
def test_a_relay_that_changes_an_id_a_name_or_a_share_is_noticed(field: str, victim: To) -> None:
    """The exact bytes of both first messages are part of the key."""
    values = {"node_id": EVE.node_id, "name": "eve"}

    def tamper(to: To, message: bytes) -> list[tuple[To, bytes]]:
        decoded = decode(message, 1 << 16)
        if to == victim and isinstance(decoded, PairingHello | Reply):
            share = sent(make_guest(me=EVE, seed=8).start(0))[0]
            donor = decode(share, PUBLIC_LIMIT)
            assert isinstance(donor, PairingHello)
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
    effects = host.receive(1, encode(PairingHello(1, 7, LAPTOP.node_id, "x", side + point)), 0)
    assert len(effects) == (1 if host.tries_left < TRIES else 2)


# --- somebody who knows the code and lies about who he is ---


def instead_of(kind: type, make: Callable[..., object]) -> type:
    """A class that makes something else, and still recognises what it stands for."""

    class Meta(type):
        def __call__(cls, *given: object) -> object:
            return make(*given)

        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, kind)

    return Meta(kind.__name__, (), {})


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
    monkeypatch.setattr(
        pairing_protocol, "Accept", instead_of(Accept, lambda _, *rest: Accept(EVE.node_id, *rest))
    )
    table = Table().run()
    assert table.outcome("host") is None
    assert "could not prove" in only(TryFailed, table.host_effects).reason


def test_a_host_cannot_take_anothers_id() -> None:
    """The guest checks the host in the same way."""
    liar = Signer(DESKTOP.card, EVE.sign)
    table = Table(host=make_host(me=liar)).run()
    assert table.outcome("host") is None
    assert only(PairingEnded, table.guest_effects).reason == (
        '"desktop" could not prove that its identity is its own.'
    )


def test_a_machine_does_not_pair_with_itself() -> None:
    """Neither side plays along, whoever relays."""
    guest = make_guest(me=DESKTOP)
    guest.start(0)
    reply = encode(Reply(DESKTOP.node_id, "desktop", bytes(33)))
    assert only(PairingEnded, guest.receive(reply, 0)).reason == (
        "Both ends of this pairing are the same machine."
    )


# --- somebody who knows the code and speaks out of turn ---


def test_a_sealed_message_of_the_wrong_kind_is_refused_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An admission is not an answer; the try is lost."""
    monkeypatch.setattr(pairing_protocol, "Accept", instead_of(Accept, lambda *_: Admitted(b"")))
    table = Table().run()
    assert table.outcome("host") is None
    assert "sent admitted where an answer" in only(TryFailed, table.host_effects).reason


@pytest.mark.parametrize("replaced", ["NamespaceOffer", "Admitted"])
def test_a_sealed_message_of_the_wrong_kind_is_refused_by_the_guest(
    monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """Neither in place of the offer nor in place of the admission."""
    monkeypatch.setattr(
        pairing_protocol,
        replaced,
        instead_of(getattr(pairing_protocol, replaced), lambda *_: Decline()),
    )
    table = Table().run()
    assert table.outcome("guest") is None
    assert "encrypted a message" in only(PairingEnded, table.guest_effects).reason


def test_an_offer_with_a_name_for_the_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a host that knows the code writes no control characters on our screen."""
    monkeypatch.setattr(
        pairing_protocol,
        "NamespaceOffer",
        instead_of(NamespaceOffer, lambda _, *rest: NamespaceOffer("\x1b[2J", *rest)),
    )
    table = Table().run()
    assert table.outcome("guest") is None
    assert "not an offer" in only(PairingEnded, table.guest_effects).reason


# --------------------------------------------------------------------------------------------------
# The guest of a pairing: it believes nothing too early, and nobody waits for ever.

# --- time ---


def test_a_person_has_time_to_answer_even_beyond_the_codes_life() -> None:
    """Whoever proved the code may finish; if nothing comes, the code ends after all."""
    start = CODE_SECONDS - 1
    host, guest = make_host(), make_guest()
    assert host.limit(1) == guest.limit == PUBLIC_LIMIT
    assert until_offer(host, guest, start).namespace == PAIRING_TABLE_HOME
    assert host.limit(1) == guest.limit == ENCRYPTED_LIMIT
    assert host.deadline == start + ANSWER_SECONDS
    assert guest.deadline == start + DECISION_SECONDS
    later = start + 100
    assert host.tick(later) == []
    effects = host.receive(1, sent(guest.accept(later))[0], later)
    assert only(Paired, effects).peer == LAPTOP.card
    assert only(Paired, guest.receive(sent(effects)[0], later)).peer == DESKTOP.card


def test_a_question_nobody_answers_ends_on_both_sides() -> None:
    """The guest says so in time; its answer afterwards is too late."""
    host, guest = make_host(), make_guest()
    until_offer(host, guest)
    effects = guest.accept(DECISION_SECONDS)
    assert only(PairingEnded, effects).reason == "The question was not answered in time."
    told = host.receive(1, sent(effects)[0], DECISION_SECONDS)
    assert only(TryFailed, told).reason == SENTENCES[Refusal.TOO_SLOW]
    with pytest.raises(UnsupportedOperation, match="no offer"):
        guest.decline(DECISION_SECONDS)


def test_a_no_that_comes_too_late_changes_nothing() -> None:
    """The guest has given up by then and says so."""
    host, guest = make_host(), make_guest()
    until_offer(host, guest)
    late = guest.decline(DECISION_SECONDS)
    assert only(PairingEnded, late).reason == "The question was not answered in time."


def test_a_guest_gives_up_on_a_silent_host() -> None:
    """Every step has its deadline."""
    guest = make_guest()
    assert guest.deadline is None
    guest.start(0)
    assert guest.deadline == STEP_SECONDS
    assert only(PairingEnded, guest.closed(STEP_SECONDS)).reason == (
        "The other machine took too long to send a reply."
    )
    assert guest.deadline is None
    assert guest.closed(9) == guest.receive(b"late", 9) == []


def test_a_guest_retries_by_itself_only_while_nothing_was_given_away() -> None:
    """Before its proof a lost connection is harmless; afterwards a person decides."""
    early, late = make_guest(), make_guest()
    early.start(0)
    assert early.closed(0) == [
        PairingEnded("The other machine hung up where a reply was due.", retry=True)
    ]
    host = make_host()
    host.connected(1, 0)
    late.receive(sent(host.receive(1, sent(late.start(0))[0], 0))[0], 0)
    assert late.closed(0) == [
        PairingEnded("The other machine hung up where a proof of the code was due.", retry=False)
    ]


# --- the table ---


@pytest.mark.parametrize(
    ("steps", "due", "legal"),
    [(0, "a reply", "reply"), (1, "a proof of the code", "confirm"), (2, "an offer", "sealed")],
)
def test_the_guest_refuses_every_message_that_is_not_due(steps: int, due: str, legal: str) -> None:
    """The same on the other side."""
    for kind, message in one_of_each().items():
        host, guest = make_host(), make_guest()
        host.connected(1, 0)
        words = guest.start(0)
        for _ in range(steps):
            words = guest.receive(sent(host.receive(1, sent(words)[0], 0))[0], 0) or words
        effects = guest.receive(encode(message), 0)
        if kind != legal:
            assert f"sent {kind} where {due}" in only(PairingEnded, effects).reason
        assert not any(isinstance(effect, Paired | Offered) for effect in effects)


def test_a_message_before_our_answer_ends_the_exchange() -> None:
    """While a person decides, the host has nothing to say."""
    host, guest = make_host(), make_guest()
    until_offer(host, guest)
    effects = guest.receive(encode(Confirm(bytes(32))), 0)
    assert "nothing before our answer" in only(PairingEnded, effects).reason


def test_a_guest_is_started_once() -> None:
    """A second start would send the same share twice."""
    guest = make_guest()
    with pytest.raises(UnsupportedOperation, match="no offer"):
        guest.accept(0)
    guest.start(0)
    with pytest.raises(UnsupportedOperation, match="started already"):
        guest.start(0)


# --------------------------------------------------------------------------------------------------
# The host of a pairing: what costs a try, what ends the code, and what does no harm.

WRONG = "7-guitar-garden"


def hello(slot: int = 7, version: int = VERSION, me: Signer = LAPTOP) -> bytes:
    """A hello with a valid share."""
    share = decode(sent(make_guest().start(0))[0], PUBLIC_LIMIT)
    assert isinstance(share, PairingHello)
    return encode(PairingHello(version, slot, me.node_id, me.card.name, share.share))


def refusal(effects: list[Effect]) -> Refusal:
    """The word that goes to the other side."""
    message = decode(sent(effects)[-1], PUBLIC_LIMIT)
    assert isinstance(message, PairingRefused)
    return message.why


# --- tries ---


def test_a_wrong_code_costs_a_try_and_says_so_on_both_sides() -> None:
    """The other words are still there to be tried."""
    table = Table(guest=make_guest(WRONG)).run()
    failed = only(TryFailed, table.host_effects)
    assert failed == TryFailed('"laptop" does not know the code.', 2)
    assert only(PairingEnded, table.guest_effects) == PairingEnded(SENTENCES[Refusal.WRONG_CODE])
    assert Table(table.host, make_guest(seed=3)).run().outcome("guest") is not None


def test_the_third_wrong_try_ends_the_code_and_a_fourth_is_refused() -> None:
    """Even the right code comes too late then."""
    host = make_host()
    tables = [Table(host, make_guest(WRONG, seed=n), link=n).run() for n in range(TRIES)]
    assert only(PairingEnded, tables[-1].host_effects).reason == "All 3 tries are used."
    assert host.is_over
    late = Table(host, make_guest(seed=9), link=9).run()
    assert late.outcome("guest") is None
    assert reason_of(late.guest_effects) == SENTENCES[Refusal.CODE_DEAD]


def test_whoever_hangs_up_after_our_share_has_used_a_try() -> None:
    """He had his guess; that he did not show its result changes nothing."""
    host = make_host()
    host.connected(1, 0)
    host.receive(1, hello(), 0)
    assert host.closed(1, 0) == [TryFailed('"laptop" hung up before the end.', 2)]
    assert host.closed(1, 0) == []


def test_a_share_that_is_no_share_costs_no_try() -> None:
    """We sent nothing, so nothing was learned."""
    host = make_host()
    for link, share in enumerate([b"A" + bytes(32), b"B" + bytes(32), b"A" + b"\x02" + bytes(31)]):
        host.connected(link, 0)
        bad = encode(PairingHello(VERSION, 7, LAPTOP.node_id, "laptop", share))
        assert refusal(host.receive(link, bad, 0)) is Refusal.MALFORMED
    assert host.tries_left == TRIES


def test_shares_that_are_none_are_computed_with_a_bounded_number_of_times() -> None:
    """Each takes milliseconds: after many of them callers are refused before that."""
    host = make_host()
    bad = encode(PairingHello(VERSION, 7, LAPTOP.node_id, "laptop", b"A" + b"\x02" + bytes(31)))
    for link in range(BAD_SHARES):
        host.connected(link, 0)
        assert refusal(host.receive(link, bad, 0)) is Refusal.MALFORMED
    host.connected(BAD_SHARES, 0)
    assert refusal(host.receive(BAD_SHARES, bad, 0)) is Refusal.BUSY
    assert host.tries_left == TRIES


@pytest.mark.parametrize(
    ("message", "why", "words"),
    [
        (hello(slot=8), Refusal.WRONG_SLOT, "number 8"),
        (hello(version=2), Refusal.VERSION, "(protocol 2): they cannot work together"),
        (hello(me=DESKTOP), Refusal.SAME_MACHINE, "itself"),
        (b"GET / HTTP/1.1\r\n\r\n", Refusal.MALFORMED, "does not use our"),
        (bytes(PUBLIC_LIMIT + 1), Refusal.MALFORMED, "at most 4096"),
    ],
)
def test_what_is_refused_before_our_share_costs_no_try(
    message: bytes, why: Refusal, words: str
) -> None:
    """Strangers, other versions and people with another code do no harm."""
    host = make_host()
    host.connected(1, 0)
    effects = host.receive(1, message, 0)
    assert refusal(effects) is why
    assert words in only(HangUp, effects).reason
    assert host.tries_left == TRIES
    assert host.receive(1, hello(), 0) == []  # the link is given up


def test_a_second_guest_waits_for_the_first() -> None:
    """It is told to come back, at no cost, and may do so without asking anybody."""
    host = make_host()
    host.connected(1, 0)
    host.receive(1, hello(), 0)
    second = Table(host, make_guest(seed=5), link=2).run()
    assert only(PairingEnded, second.guest_effects) == PairingEnded(
        SENTENCES[Refusal.BUSY], retry=True
    )
    assert host.tries_left == TRIES - 1


def test_connections_are_bounded_and_end_with_the_code() -> None:
    """The ninth is turned away; when the code ends, all are told."""
    host = make_host()
    for link in range(MAX_LINKS):
        assert host.connected(link, 0) == []
    assert refusal(host.connected(MAX_LINKS, 0)) is Refusal.BUSY
    effects = host.cancel()
    assert [effect.link for effect in effects if isinstance(effect, HangUp)] == [*range(MAX_LINKS)]
    assert refusal(effects) is Refusal.CODE_DEAD
    assert only(PairingEnded, effects).reason == "Pairing was stopped."
    assert host.cancel() == []


def test_a_success_turns_the_others_away() -> None:
    """A code works once."""
    host = make_host()
    host.connected(5, 0)
    table = Table(host).run()
    assert table.outcome("host") is not None
    assert table.host_effects[-1] == HangUp("The code is no longer valid.", 5)


# --- time ---


def test_the_code_lives_five_minutes() -> None:
    """The host tells when it wants to be woken, and ends then."""
    host = make_host(now=100)
    assert host.deadline == 100 + CODE_SECONDS
    assert host.tick(100 + CODE_SECONDS - 1) == []
    assert host.tick(100 + CODE_SECONDS) == [PairingEnded("The code was valid for 5 minutes.")]
    assert host.deadline is None
    assert refusal(host.connected(1, 500)) is Refusal.CODE_DEAD


def test_an_expired_code_is_dead_even_if_nobody_ticked() -> None:
    """A message that comes too late ends it."""
    host = make_host()
    host.connected(1, CODE_SECONDS - 1)
    effects = host.receive(1, hello(), CODE_SECONDS)
    assert isinstance(effects[-1], PairingEnded)
    assert host.tries_left == TRIES


def test_a_silent_stranger_is_dropped_after_five_seconds() -> None:
    """It keeps nobody else waiting and costs no try."""
    host = make_host()
    host.connected(1, 0)
    assert host.deadline == STEP_SECONDS
    effects = host.tick(STEP_SECONDS)
    assert effects[-1] == HangUp("A caller took too long to send a hello.", 1)
    assert host.tries_left == TRIES


def test_a_stalled_last_try_ends_the_code_once() -> None:
    """Several overdue links and the last try end in one ending."""
    host = make_host()
    for attempt in range(TRIES - 1):
        Table(host, make_guest(WRONG, seed=attempt), link=attempt).run()
    host.connected(7, 0)
    host.connected(8, 0)
    host.receive(7, hello(), 0)
    effects = host.tick(STEP_SECONDS)
    assert only(TryFailed, effects).reason == '"laptop" took too long to send a proof of the code.'
    assert only(PairingEnded, effects).reason == "All 3 tries are used."


# --- the table ---


@pytest.mark.parametrize(
    ("steps", "due", "legal"),
    [(0, "a hello", "hello"), (1, "a proof of the code", "confirm"), (2, "an answer", "sealed")],
)
def test_the_host_refuses_every_message_that_is_not_due(steps: int, due: str, legal: str) -> None:
    """An illegal message ends the exchange with a sentence that names both."""
    for kind, message in one_of_each().items():
        host, guest = make_host(), make_guest()
        effects = [*host.connected(1, 0)]
        words = guest.start(0)
        for _ in range(steps):
            effects = host.receive(1, sent(words)[0], 0)
            words = guest.receive(sent(effects)[0], 0)
        effects = host.receive(1, encode(message), 0)
        if kind != legal:
            assert f"sent {kind} where {due}" in only(HangUp, effects).reason
            assert refusal(effects) is Refusal.MALFORMED
        assert host.tries_left == TRIES - bool(steps)


# --------------------------------------------------------------------------------------------------
# The keys of a pairing: equal only for those who know the code and saw the same bytes.


def sessions(
    guest_code: str = "7-guitar-harbor",
    host_code: str = "7-guitar-harbor",
    *,
    seen_by_host: bytes = b"hello",
    seed: int = 1,
) -> tuple[PairingSession, PairingSession]:
    """Guest and host after exchanging shares."""
    guest = ShareMaker(PairingRole.GUEST, parse_code(guest_code), entropy(seed))
    host = ShareMaker(PairingRole.HOST, parse_code(host_code), entropy(seed + 1))
    return (
        guest.finish(host.share, b"hello", b"reply"),
        host.finish(guest.share, seen_by_host, b"reply"),
    )


def test_both_sides_can_check_each_other() -> None:
    """Each proof holds for the other side, and not for the one that made it."""
    guest, host = sessions()
    assert host.is_proof_of_other(guest.proof(PairingRole.GUEST))
    assert guest.is_proof_of_other(host.proof(PairingRole.HOST))
    assert not guest.is_proof_of_other(guest.proof(PairingRole.GUEST))
    assert guest.identity_statement(PairingRole.HOST) == host.identity_statement(PairingRole.HOST)


@pytest.mark.parametrize(
    "changed",
    [
        {"guest_code": "7-guitar-garden"},
        {"guest_code": "8-guitar-harbor"},
        {"seen_by_host": b"hell0"},
    ],
)
def test_another_code_slot_or_transcript_gives_other_keys(changed: dict[str, str]) -> None:
    """Nothing one side makes is accepted by the other."""
    guest, host = sessions(**changed)  # type: ignore[arg-type]
    assert not host.is_proof_of_other(guest.proof(PairingRole.GUEST))
    assert guest.identity_statement(PairingRole.GUEST) != host.identity_statement(PairingRole.GUEST)
    with pytest.raises(MalformedFrame):
        guest.inbox().decrypt(host.outbox().encrypt(b"x"))


def test_bytes_cannot_move_between_the_parts_of_a_transcript() -> None:
    """Each part is preceded by its length."""
    code = parse_code("7-guitar-harbor")
    other = ShareMaker(PairingRole.HOST, code, entropy(1)).share
    made = [
        ShareMaker(PairingRole.GUEST, code, entropy(2)).finish(other, *parts).transcript
        for parts in ((b"ab", b"c"), (b"a", b"bc"))
    ]
    assert made[0] != made[1]


def test_every_key_is_for_one_purpose_and_every_session_is_fresh() -> None:
    """Proofs, statements and seals of two sessions are all different."""
    made = [
        value
        for guest, host in (sessions(seed=1), sessions(seed=5))
        for value in (
            guest.proof(PairingRole.GUEST),
            guest.proof(PairingRole.HOST),
            guest.identity_statement(PairingRole.GUEST),
            guest.identity_statement(PairingRole.HOST),
            guest.outbox().encrypt(b"same"),
            host.outbox().encrypt(b"same"),
        )
    ]
    assert len(set(made)) == len(made)


def test_sealed_messages_open_once_in_order_and_on_the_other_side() -> None:
    """Repeated, skipped, swapped or reflected ones do not."""
    guest, host = sessions()
    outbox = guest.outbox()
    one, two = outbox.encrypt(b"same"), outbox.encrypt(b"same")
    assert one != two, "each has a nonce of its own"
    inbox = host.inbox()
    assert [inbox.decrypt(one), inbox.decrypt(two)] == [b"same", b"same"]
    for wrong in ([one, one], [two], [two, one]):
        fresh = host.inbox()
        with pytest.raises(MalformedFrame, match="damaged or out of order"):
            _open_all(fresh, wrong)
    with pytest.raises(MalformedFrame):
        guest.inbox().decrypt(one)


def _open_all(box: Box, sealed: list[bytes]) -> None:
    for message in sealed:
        box.decrypt(message)


def test_a_broken_sequence_is_not_resumed() -> None:
    """After a failure the number has moved on, so the right message comes too late."""
    guest, host = sessions()
    sealed, inbox = guest.outbox().encrypt(b"x"), host.inbox()
    for damaged in (b"", b"short", sealed[:-1], sealed + b"x", sealed):
        with pytest.raises(MalformedFrame):
            inbox.decrypt(damaged)


def test_a_share_of_the_own_side_is_refused() -> None:
    """Guest and host speak differently, so what is reflected fails at once."""
    code = parse_code("7-guitar-harbor")
    for role in PairingRole:
        mine = ShareMaker(role, code, entropy(1))
        with pytest.raises(MalformedFrame, match="key is not valid"):
            mine.finish(mine.share, b"", b"")


def test_no_key_shows_in_a_text() -> None:
    """A session may be logged."""
    guest, _ = sessions()
    assert repr(guest) == "PairingSession(role=<PairingRole.GUEST: 'guest'>)"


def test_a_code_alone_does_not_repeat_a_session() -> None:
    """Shares differ with the entropy, so every exchange has other keys."""
    code = parse_code("7-guitar-harbor")
    shares = [ShareMaker(PairingRole.GUEST, code, entropy(seed)).share for seed in range(3)]
    assert all(one != other for one, other in itertools.combinations(shares, 2))


# --------------------------------------------------------------------------------------------------
# Pairing messages: typed and bounded, and nothing a stranger sends gets further.

ID = NodeId("a" * 32)
PUBLIC: list[Message] = [
    PairingHello(1, 7, ID, "laptop", bytes(33)),
    Reply(ID, "desktop", bytes(33)),
    Confirm(bytes(32)),
    EncryptedMessage(b"box"),
    PairingRefused(Refusal.BUSY),
]
SECRET: list[Secret] = [
    NamespaceOffer("home", bytes(32), b"roster", bytes(32), bytes(64)),
    Accept(ID, bytes(32), bytes(64)),
    Decline(),
    Admitted(b"roster"),
]


def kind(message: object) -> str:
    """For the names of the cases."""
    return type(message).__name__


@pytest.mark.parametrize("message", PUBLIC, ids=kind)
def test_public_messages_survive_the_trip(message: Message) -> None:
    """What was encoded is what is decoded, and it is small."""
    assert decode(encode(message), 512) == message


@pytest.mark.parametrize("message", SECRET, ids=kind)
def test_sealed_messages_survive_the_trip(message: Secret) -> None:
    """What was encoded is what is decoded."""
    assert decode_secret(encode(message)) == message


@pytest.mark.parametrize("message", SECRET, ids=kind)
def test_what_belongs_under_a_seal_is_refused_outside(message: Secret) -> None:
    """And the other way round."""
    with pytest.raises(MalformedFrame, match="does not use our"):
        decode(encode(message), PUBLIC_LIMIT)
    with pytest.raises(MalformedFrame, match="does not use our"):
        decode_secret(encode(Confirm(bytes(32))))


def test_the_size_is_checked_before_anything_is_decoded() -> None:
    """A message one byte too long is not looked at."""
    box = encode(EncryptedMessage(bytes(ENCRYPTED_LIMIT)))
    with pytest.raises(MalformedFrame, match="at most 65536"):
        decode(box, ENCRYPTED_LIMIT)
    with pytest.raises(MalformedFrame, match="at most 4096"):
        decode(bytes(PUBLIC_LIMIT + 1), PUBLIC_LIMIT)


@pytest.mark.parametrize(
    "message",
    [
        PairingHello(1, -1, ID, "laptop", bytes(33)),
        PairingHello(1, 7, NodeId("A" * 32), "laptop", bytes(33)),
        PairingHello(1, 7, ID, "laptop", bytes(32)),
        PairingHello(1, 7, ID, "x" * 65, bytes(33)),
        PairingHello(1, 7, ID, "", bytes(33)),
        Reply(ID, "\x1b[31mred", bytes(33)),
        Reply(ID, " spaced ", bytes(33)),
        Confirm(bytes(31)),
    ],
    ids=repr,
)
def test_fields_out_of_bounds_are_refused(message: Message) -> None:
    """Ids, names, shares and proofs have one form."""
    with pytest.raises(MalformedFrame):
        decode(encode(message), PUBLIC_LIMIT)


def test_unknown_words_are_refused() -> None:
    """There is one way to say each thing."""
    for extra in ({"kind": "confirms", "proof": bytes(32)}, {"kind": "refused", "why": "x"}):
        with pytest.raises(MalformedFrame, match="does not use our"):
            decode(msgspec.msgpack.encode(extra), PUBLIC_LIMIT)


def test_fields_of_a_later_version_are_ignored() -> None:
    """It may say more, to those who understand it."""
    later = {"kind": "confirm", "proof": bytes(32), "later": 1}
    assert decode(msgspec.msgpack.encode(later), PUBLIC_LIMIT) == Confirm(bytes(32))


def test_both_sides_are_told_the_versions_that_cannot_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no cost to the code; and a stranger can say that only a few times."""
    host, later = make_host(), Build("9.8.7", 9, 8)
    effects: list[Effect] = []
    with monkeypatch.context() as patch:
        patch.setattr(pairing_protocol, "THIS_BUILD", later)
        guest = make_guest()
        (hello_of_later,) = sent(guest.start(0))
    for link in range(5):
        host.connected(link, 0)
        effects = host.receive(link, hello_of_later, 0)
        told = [effect for effect in effects if isinstance(effect, CallerDiffers)]
        assert len(told) == (link < TRIES)
        assert refusal(effects) is Refusal.VERSION
    assert host.tries_left == TRIES
    with monkeypatch.context() as patch:
        patch.setattr(pairing_protocol, "THIS_BUILD", later)
        ended = only(PairingEnded, guest.receive(sent(effects)[-1], 0)).reason
    for words in ("Potluck 9.8.7 (protocols 8 to 9)", f"Potluck {__version__} (protocol 1)"):
        assert words in ended
        assert words in only(HangUp, effects).reason
    assert "Upgrade the other machine: type `pip install" in ended


def test_an_offer_does_not_show_its_secret() -> None:
    """Its text is fit for a log."""
    assert repr(SECRET[0]) == "NamespaceOffer(namespace='home')"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_malformed_frame(data: bytes) -> None:
    """No other error escapes."""
    with contextlib.suppress(MalformedFrame):
        decode(data, PUBLIC_LIMIT)
    with contextlib.suppress(MalformedFrame):
        decode_secret(data)


def test_deeply_nested_bytes_are_refused_without_harm() -> None:
    """A thousand arrays inside each other do not exhaust the stack."""
    nested = b"\x82\xa4kind\xa7confirm\xa5proof" + b"\x91" * 3000 + b"\xc0"
    with pytest.raises(MalformedFrame):
        decode(nested, PUBLIC_LIMIT)
    with pytest.raises(MalformedFrame):
        decode(b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0", PUBLIC_LIMIT)
