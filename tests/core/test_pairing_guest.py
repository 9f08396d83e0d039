"""The guest of a pairing: it believes nothing too early, and nobody waits for ever."""

from __future__ import annotations

import pytest

from potluck.core.pairing import (
    Ended,
    Offered,
    Paired,
    TryFailed,
)
from potluck.core.pairing_effects import (
    ANSWER_SECONDS,
    CODE_SECONDS,
    DECISION_SECONDS,
    SENTENCES,
    STEP_SECONDS,
)
from potluck.core.pairing_messages import (
    PUBLIC_LIMIT,
    SEALED_LIMIT,
    Confirm,
    Refusal,
    encode,
)
from potluck.errors import UnsupportedOperation
from support.pairing_table import (
    DESKTOP,
    HOME,
    LAPTOP,
    make_guest,
    make_host,
    one_of_each,
    only,
    sent,
    until_offer,
)

# --- time ---


def test_a_person_has_time_to_answer_even_beyond_the_codes_life() -> None:
    """Whoever proved the code may finish; if nothing comes, the code ends after all."""
    start = CODE_SECONDS - 1
    host, guest = make_host(), make_guest()
    assert host.limit(1) == guest.limit == PUBLIC_LIMIT
    assert until_offer(host, guest, start).namespace == HOME
    assert host.limit(1) == guest.limit == SEALED_LIMIT
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
    assert only(Ended, effects).reason == "Nobody answered the question in time."
    told = host.receive(1, sent(effects)[0], DECISION_SECONDS)
    assert only(TryFailed, told).reason == SENTENCES[Refusal.TOO_SLOW]
    with pytest.raises(UnsupportedOperation, match="no offer"):
        guest.decline(DECISION_SECONDS)


def test_a_no_that_comes_too_late_changes_nothing() -> None:
    """The guest has given up by then and says so."""
    host, guest = make_host(), make_guest()
    until_offer(host, guest)
    late = guest.decline(DECISION_SECONDS)
    assert only(Ended, late).reason == "Nobody answered the question in time."


def test_a_guest_gives_up_on_a_silent_host() -> None:
    """Every step has its deadline."""
    guest = make_guest()
    assert guest.deadline is None
    guest.start(0)
    assert guest.deadline == STEP_SECONDS
    assert only(Ended, guest.closed(STEP_SECONDS)).reason == (
        "The other machine took too long to send a reply."
    )
    assert guest.deadline is None
    assert guest.closed(9) == guest.receive(b"late", 9) == []


def test_a_guest_retries_by_itself_only_while_nothing_was_given_away() -> None:
    """Before its proof a lost connection is harmless; afterwards a person decides."""
    early, late = make_guest(), make_guest()
    early.start(0)
    assert early.closed(0) == [
        Ended("The other machine hung up where a reply was due.", retry=True)
    ]
    host = make_host()
    host.connected(1, 0)
    late.receive(sent(host.receive(1, sent(late.start(0))[0], 0))[0], 0)
    assert late.closed(0) == [
        Ended("The other machine hung up where a proof of the code was due.", retry=False)
    ]


# --- the table ---


@pytest.mark.parametrize(
    ("steps", "due", "legal"),
    [(0, "a reply", "Reply"), (1, "a proof of the code", "Confirm"), (2, "an offer", "Sealed")],
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
            assert f"sent {kind} where {due}" in only(Ended, effects).reason
        assert not any(isinstance(effect, Paired | Offered) for effect in effects)


def test_a_message_before_our_answer_ends_the_exchange() -> None:
    """While a person decides, the host has nothing to say."""
    host, guest = make_host(), make_guest()
    until_offer(host, guest)
    effects = guest.receive(encode(Confirm(bytes(32))), 0)
    assert "nothing before our answer" in only(Ended, effects).reason


def test_a_guest_is_started_once() -> None:
    """A second start would send the same share twice."""
    guest = make_guest()
    with pytest.raises(UnsupportedOperation, match="no offer"):
        guest.accept(0)
    guest.start(0)
    with pytest.raises(UnsupportedOperation, match="started already"):
        guest.start(0)
