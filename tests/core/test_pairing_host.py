"""The host of a pairing: what costs a try, what ends the code, and what does no harm."""

from __future__ import annotations

import pytest

from potluck.core.pairing import (
    Effect,
    Ended,
    HangUp,
    Signer,
    TryFailed,
)
from potluck.core.pairing_effects import (
    BAD_SHARES,
    CODE_SECONDS,
    MAX_LINKS,
    SENTENCES,
    STEP_SECONDS,
    TRIES,
)
from potluck.core.pairing_messages import (
    PUBLIC_LIMIT,
    VERSION,
    Hello,
    Refusal,
    Refused,
    decode,
    encode,
)
from support.pairing_table import (
    DESKTOP,
    LAPTOP,
    Table,
    make_guest,
    make_host,
    one_of_each,
    only,
    reason_of,
    sent,
)

WRONG = "7-guitar-garden"


def hello(slot: int = 7, version: int = VERSION, me: Signer = LAPTOP) -> bytes:
    """A hello with a valid share."""
    share = decode(sent(make_guest().start(0))[0], PUBLIC_LIMIT)
    assert isinstance(share, Hello)
    return encode(Hello(version, slot, me.node_id, me.card.name, share.share))


def refusal(effects: list[Effect]) -> Refusal:
    """The word that goes to the other side."""
    message = decode(sent(effects)[-1], PUBLIC_LIMIT)
    assert isinstance(message, Refused)
    return message.why


# --- tries ---


def test_a_wrong_code_costs_a_try_and_says_so_on_both_sides() -> None:
    """The other words are still there to be tried."""
    table = Table(guest=make_guest(WRONG)).run()
    failed = only(TryFailed, table.host_effects)
    assert failed == TryFailed('"laptop" does not know the code.', 2)
    assert only(Ended, table.guest_effects) == Ended(SENTENCES[Refusal.WRONG_CODE])
    assert Table(table.host, make_guest(seed=3)).run().outcome("guest") is not None


def test_the_third_wrong_try_ends_the_code_and_a_fourth_is_refused() -> None:
    """Even the right code comes too late then."""
    host = make_host()
    tables = [Table(host, make_guest(WRONG, seed=n), link=n).run() for n in range(TRIES)]
    assert only(Ended, tables[-1].host_effects).reason == "All 3 tries are used."
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
        bad = encode(Hello(VERSION, 7, LAPTOP.node_id, "laptop", share))
        assert refusal(host.receive(link, bad, 0)) is Refusal.MALFORMED
    assert host.tries_left == TRIES


def test_shares_that_are_none_are_computed_with_a_bounded_number_of_times() -> None:
    """Each takes milliseconds: after many of them callers are refused before that."""
    host = make_host()
    bad = encode(Hello(VERSION, 7, LAPTOP.node_id, "laptop", b"A" + b"\x02" + bytes(31)))
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
        (hello(version=2), Refusal.VERSION, "version 2"),
        (hello(me=DESKTOP), Refusal.SAME_MACHINE, "itself"),
        (b"GET / HTTP/1.1\r\n\r\n", Refusal.MALFORMED, "does not speak"),
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
    assert only(Ended, second.guest_effects) == Ended(SENTENCES[Refusal.BUSY], retry=True)
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
    assert only(Ended, effects).reason == "Pairing was stopped."
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
    assert host.tick(100 + CODE_SECONDS) == [Ended("The code was valid for 5 minutes.")]
    assert host.deadline is None
    assert refusal(host.connected(1, 500)) is Refusal.CODE_DEAD


def test_an_expired_code_is_dead_even_if_nobody_ticked() -> None:
    """A message that comes too late ends it."""
    host = make_host()
    host.connected(1, CODE_SECONDS - 1)
    effects = host.receive(1, hello(), CODE_SECONDS)
    assert isinstance(effects[-1], Ended)
    assert host.tries_left == TRIES


def test_a_silent_stranger_is_dropped_after_five_seconds() -> None:
    """It keeps nobody else waiting and costs no try."""
    host = make_host()
    host.connected(1, 0)
    assert host.deadline == STEP_SECONDS
    effects = host.tick(STEP_SECONDS)
    assert effects[-1] == HangUp("Somebody took too long to send a hello.", 1)
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
    assert only(Ended, effects).reason == "All 3 tries are used."


# --- the table ---


@pytest.mark.parametrize(
    ("steps", "due", "legal"),
    [(0, "a hello", "Hello"), (1, "a proof of the code", "Confirm"), (2, "an answer", "Sealed")],
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
