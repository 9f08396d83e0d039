"""Votes: which rotation is accepted, and in which order if there are several."""

from __future__ import annotations

import pytest

from potluck.core.cards import Signer
from potluck.core.roster import RosterRefused
from potluck.core.roster_history import History
from potluck.core.roster_records import Records, statement
from potluck.core.roster_votes import advance
from potluck.vocabulary import NodeId
from support.circle import Circle


def vote(records: Records, name: bytes, voter: Signer) -> Records:
    """A vote that the voter's own machine would not allow."""
    rotation = records.rotations[name]
    return records.with_vote(rotation, voter.node_id, voter.sign(statement(rotation)))


def accepted(history: History, counted: frozenset[NodeId], me: NodeId) -> tuple[bytes, ...]:
    """The rotations that are accepted."""
    return advance(history, counted, me)[0].chain


def both(circle: Circle, one: str, other: str) -> tuple[bytes, bytes, History]:
    """Two rotations of one generation, and a third machine that signed them both."""
    names = [name for name in circle.rosters if name not in {one, other}]
    first, second = circle.rotate(one), circle.rotate(other)
    records = circle.rosters[one].history.records.union(circle.rosters[other].history.records)
    for name in (first, second):
        records = vote(records, name, circle.signers[names[0]])
    return first, second, History(records)


# --- accepting ---


def test_of_two_rotations_the_founders_comes_first() -> None:
    """Machines that learn of both at once choose alike."""
    circle = Circle("anna", "ben", "cleo")
    first, _, history = both(circle, "anna", "ben")
    everybody = circle.rosters["cleo"].counted
    assert accepted(history, everybody, circle.id("cleo")) == (first,)


def test_then_the_one_of_the_member_that_came_first() -> None:
    """Earlier generations go before later ones."""
    circle = Circle("anna", "ben")
    name = circle.rotate("anna")
    circle.gossip()
    circle.sign("ben", name)
    circle.gossip()
    circle.pair("anna", "cleo")
    circle.gossip()
    first, _, history = both(circle, "ben", "cleo")
    history = History(history.records, (name,))
    everybody = circle.rosters["anna"].counted
    assert accepted(history, everybody, circle.id("anna")) == (name, first)


def test_then_the_later_attempt_of_the_same_proposer() -> None:
    """Whoever withdraws a proposal wants the newer one."""
    circle = Circle("anna", "ben", "cleo")
    names = [circle.rotate("anna"), circle.rotate("anna")]
    records = circle.rosters["anna"].history.records
    for name in names:
        records = vote(records, name, circle.signers["ben"])
    everybody = circle.rosters["cleo"].counted
    assert accepted(History(records), everybody, circle.id("cleo")) == (names[1],)


def test_a_machine_never_accepts_its_own_revocation() -> None:
    """It would only lock itself out; the others need no agreement of its."""
    circle = Circle("anna", "ben")
    circle.revoke("anna", "ben")
    records = circle.rosters["anna"].history.records
    everybody = circle.rosters["ben"].counted
    assert accepted(History(records), everybody, circle.id("ben")) == ()


def test_both_majorities_are_needed() -> None:
    """That of the voters' list, and that of the machines that count."""
    circle = Circle("anna", "ben", "cleo", "dora", "emil")
    name = circle.rotate("anna")
    records = vote(circle.rosters["anna"].history.records, name, circle.signers["ben"])
    few = frozenset({circle.id("anna"), circle.id("ben")})
    everybody = circle.rosters["emil"].counted
    me = circle.id("emil")
    assert accepted(History(records), few, me) == ()
    records = vote(records, name, circle.signers["cleo"])
    assert accepted(History(records), few, me) == (name,)
    assert accepted(History(records), everybody, me) == (name,)
    strangers = frozenset({circle.id("dora"), circle.id("emil")})
    assert accepted(History(records), strangers, me) == ()


def test_a_rotation_that_hides_too_many_members_is_not_signed() -> None:
    """It could never be accepted, and the vote would be lost."""
    circle = Circle("anna", "ben")
    name = circle.rotate("anna")
    for guest in ("cleo", "dora", "emil"):
        circle.pair("ben", guest)
    circle.meet("anna", "ben")
    assert circle.rosters["ben"].objection(name, circle.id("ben")) == (
        "it leaves out so many members that it can never be accepted"
    )


# --- one vote ---


def test_a_machine_signs_one_rotation_of_a_generation() -> None:
    """Otherwise two could be accepted."""
    circle = Circle("anna", "ben", "cleo", "dora", "emil")
    first, second = circle.rotate("anna"), circle.rotate("ben")
    circle.gossip()
    circle.sign("cleo", first)
    roster = circle.rosters["cleo"]
    assert roster.objection(first, circle.id("cleo")) == "this machine has signed it already"
    assert roster.objection(second, circle.id("cleo")) == (
        "this machine has signed another one, proposed by anna"
    )
    with pytest.raises(RosterRefused, match="signed another one"):
        circle.sign("cleo", second)
    with pytest.raises(RosterRefused, match=r"One change at a time\. The new secret"):
        circle.rotate("cleo")


def test_a_proposal_nobody_else_signed_can_be_replaced_by_its_proposer() -> None:
    """The later one counts; nobody is asked to sign the earlier one any more."""
    circle = Circle("anna", "ben", "cleo")
    first = circle.revoke("anna", "ben")
    second = circle.revoke("anna", "cleo")
    circle.meet("anna", "ben")
    roster = circle.rosters["ben"]
    assert [pending.name for pending in roster.pending] == [second]
    assert roster.objection(second, circle.id("ben")) is None
    circle.meet("anna", "cleo")
    assert circle.rosters["cleo"].objection(first, circle.id("cleo")) == (
        "its proposer has withdrawn it"
    )


def test_a_rotation_of_another_generation_is_not_signed() -> None:
    """Neither an old one nor one that nobody knows."""
    circle = Circle("anna", "ben", "cleo")
    old = circle.rotate("anna")
    circle.gossip()
    circle.sign("ben", old)
    circle.gossip()
    for name in (old, bytes(32)):
        assert circle.rosters["cleo"].objection(name, circle.id("cleo")) == (
            "it does not follow the present generation"
        )
