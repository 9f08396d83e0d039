"""The keys of a pairing: equal only for those who know the code and saw the same bytes."""

from __future__ import annotations

import itertools

import pytest

from potluck.core.pairing_code import parse_code
from potluck.core.pairing_keys import Box, Role, Session, ShareMaker
from potluck.errors import MalformedFrame
from support.machines import entropy


def sessions(
    guest_code: str = "7-guitar-harbor",
    host_code: str = "7-guitar-harbor",
    *,
    seen_by_host: bytes = b"hello",
    seed: int = 1,
) -> tuple[Session, Session]:
    """Guest and host after exchanging shares."""
    guest = ShareMaker(Role.GUEST, parse_code(guest_code), entropy(seed))
    host = ShareMaker(Role.HOST, parse_code(host_code), entropy(seed + 1))
    return (
        guest.finish(host.share, b"hello", b"reply"),
        host.finish(guest.share, seen_by_host, b"reply"),
    )


def test_both_sides_can_check_each_other() -> None:
    """Each proof holds for the other side, and not for the one that made it."""
    guest, host = sessions()
    assert host.is_proof_of_other(guest.proof(Role.GUEST))
    assert guest.is_proof_of_other(host.proof(Role.HOST))
    assert not guest.is_proof_of_other(guest.proof(Role.GUEST))
    assert guest.identity_statement(Role.HOST) == host.identity_statement(Role.HOST)


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
    assert not host.is_proof_of_other(guest.proof(Role.GUEST))
    assert guest.identity_statement(Role.GUEST) != host.identity_statement(Role.GUEST)
    with pytest.raises(MalformedFrame):
        guest.inbox().open(host.outbox().seal(b"x"))


def test_bytes_cannot_move_between_the_parts_of_a_transcript() -> None:
    """Each part is preceded by its length."""
    code = parse_code("7-guitar-harbor")
    other = ShareMaker(Role.HOST, code, entropy(1)).share
    made = [
        ShareMaker(Role.GUEST, code, entropy(2)).finish(other, *parts).transcript
        for parts in ((b"ab", b"c"), (b"a", b"bc"))
    ]
    assert made[0] != made[1]


def test_every_key_is_for_one_purpose_and_every_session_is_fresh() -> None:
    """Proofs, statements and seals of two sessions are all different."""
    made = [
        value
        for guest, host in (sessions(seed=1), sessions(seed=5))
        for value in (
            guest.proof(Role.GUEST),
            guest.proof(Role.HOST),
            guest.identity_statement(Role.GUEST),
            guest.identity_statement(Role.HOST),
            guest.outbox().seal(b"same"),
            host.outbox().seal(b"same"),
        )
    ]
    assert len(set(made)) == len(made)


def test_sealed_messages_open_once_in_order_and_on_the_other_side() -> None:
    """Repeated, skipped, swapped or reflected ones do not."""
    guest, host = sessions()
    outbox = guest.outbox()
    one, two = outbox.seal(b"same"), outbox.seal(b"same")
    assert one != two, "each has a nonce of its own"
    inbox = host.inbox()
    assert [inbox.open(one), inbox.open(two)] == [b"same", b"same"]
    for wrong in ([one, one], [two], [two, one]):
        fresh = host.inbox()
        with pytest.raises(MalformedFrame, match="damaged or out of order"):
            _open_all(fresh, wrong)
    with pytest.raises(MalformedFrame):
        guest.inbox().open(one)


def _open_all(box: Box, sealed: list[bytes]) -> None:
    for message in sealed:
        box.open(message)


def test_a_broken_sequence_is_not_resumed() -> None:
    """After a failure the number has moved on, so the right message comes too late."""
    guest, host = sessions()
    sealed, inbox = guest.outbox().seal(b"x"), host.inbox()
    for damaged in (b"", b"short", sealed[:-1], sealed + b"x", sealed):
        with pytest.raises(MalformedFrame):
            inbox.open(damaged)


def test_a_share_of_the_own_side_is_refused() -> None:
    """Guest and host speak differently, so what is reflected fails at once."""
    code = parse_code("7-guitar-harbor")
    for role in Role:
        mine = ShareMaker(role, code, entropy(1))
        with pytest.raises(MalformedFrame, match="not a valid one"):
            mine.finish(mine.share, b"", b"")


def test_no_key_shows_in_a_text() -> None:
    """A session may be logged."""
    guest, _ = sessions()
    assert repr(guest) == "Session(role=<Role.GUEST: 'guest'>)"


def test_a_code_alone_does_not_repeat_a_session() -> None:
    """Shares differ with the entropy, so every exchange has other keys."""
    code = parse_code("7-guitar-harbor")
    shares = [ShareMaker(Role.GUEST, code, entropy(seed)).share for seed in range(3)]
    assert all(one != other for one, other in itertools.combinations(shares, 2))
