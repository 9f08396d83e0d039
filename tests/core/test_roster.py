"""The roster: who is in, who brought whom, and what happens when somebody is revoked."""

from __future__ import annotations

import functools

import pytest

from potluck.core.cards import Card
from potluck.core.roster import MAX_FILE_BYTES, Roster, RosterRefused, Status
from potluck.core.roster_exchange import Verdict
from support.circle import Circle, commitment, secret
from support.machines import TOY_VERIFIER, machine

# --- admitting ---


def test_the_founder_is_the_first_member() -> None:
    """It stands for itself and knows the secret."""
    roster = Circle("anna").rosters["anna"]
    (anna,) = roster.members
    assert (anna.name, anna.sponsor, anna.generation) == ("anna", anna.node_id, 0)
    assert roster.is_secret(secret())
    assert not roster.is_secret(secret(1))
    assert roster.explain(anna.node_id) == "anna is a member; it founded this circle."


def test_whoever_is_brought_in_is_a_member_with_a_sponsor() -> None:
    """Members bring in members, and everybody sees by whom."""
    circle = Circle("anna", "ben")
    circle.pair("ben", "cleo")
    circle.gossip()
    for viewer in circle.rosters:
        assert circle.names(viewer) == ["anna", "ben", "cleo"]
    roster = circle.rosters["anna"]
    assert roster.generation.members[circle.id("cleo")].sponsor == circle.id("ben")
    assert roster.explain(circle.id("cleo")) == (
        "cleo is a member since generation 0, brought in by ben."
    )


def test_a_stranger_is_nobody_and_brings_in_nobody() -> None:
    """Only members sign admissions."""
    circle, eve = Circle("anna", "ben"), machine("eve")
    roster = circle.rosters["anna"]
    assert not roster.is_member(eve.node_id)
    assert roster.status(eve.node_id) is Status.STRANGER
    assert roster.explain(eve.node_id) == (
        f"No machine with the id {eve.node_id} has been in this circle."
    )
    with pytest.raises(RosterRefused, match="has been in this circle"):
        roster.admit(machine("fay").card, eve)
    with pytest.raises(RosterRefused, match="itself"):
        roster.admit(circle.signers["anna"].card, circle.signers["anna"])


def test_nobody_can_rename_another_machine() -> None:
    """A second admission adds a sponsor and nothing else, so `revoke laptop` means one machine."""
    circle = Circle("anna", "ben", "cleo")
    cleo = circle.signers["cleo"].card
    misleading = Card(cleo.node_id, cleo.public_key, "anna")
    roster = circle.rosters["ben"].admit(misleading, circle.signers["ben"])
    member = roster.generation.members[cleo.node_id]
    assert member.name == "cleo"
    assert member.sponsors == {circle.id("anna"), circle.id("ben")}


def test_machines_of_the_same_name_are_told_apart_by_their_ids() -> None:
    """In every sentence; nobody passes for another by its name, however that is spelled."""
    circle = Circle("anna", "nas", "cleo")
    (anna, nas), twin = (circle.signers[name] for name in ("anna", "nas")), machine("NAS", "twin")
    shown = f"nas ({nas.node_id[:8]})"
    sly = machine(shown, "sly")
    assert circle.rosters["anna"].history.name_of(nas.node_id) == "nas"
    roster = circle.rosters["anna"].admit(twin.card, anna).admit(sly.card, anna)
    assert roster.history.name_of(nas.node_id) == shown
    assert roster.history.name_of(twin.node_id) == f"NAS ({twin.node_id[:8]})"
    assert roster.history.name_of(sly.node_id) == f"{shown} ({sly.node_id[:8]})"
    (pending,) = roster.revoke(nas.node_id, anna, commitment(1)).pending
    assert f"Revoking {shown} needs" in pending.reason
    assert f"NAS ({twin.node_id[:8]})" in pending.reason


# --- revoking ---


def test_with_two_machines_the_other_one_decides_alone() -> None:
    """The revoked one does not count, so one of one is a majority; the revoked one is told."""
    circle = Circle("anna", "ben")
    circle.revoke("anna", "ben")
    assert circle.rosters["anna"].generation.number == 1
    assert circle.rosters["anna"].status(circle.id("ben")) is Status.REVOKED
    assert circle.rosters["anna"].explain(circle.id("ben")) == (
        "ben was revoked by anna; only pairing it again brings it back."
    )
    taken = circle.tell("anna", "ben")
    assert taken.verdict is Verdict.REVOKED
    assert taken.reason == "anna and the others it needed revoked this machine."
    assert taken.roster.is_member(circle.id("ben")), "a machine does not put itself out"
    assert taken.roster.pending[0].reason == "Revoking ben has the signatures it needs."


def test_the_one_who_was_brought_in_may_revoke_the_founder() -> None:
    """With a stolen first machine the second goes on alone, and stays a member."""
    circle = Circle("anna", "ben")
    circle.revoke("ben", "anna")
    assert circle.names("ben") == ["ben"]
    assert circle.rosters["ben"].explain(circle.id("ben")) == (
        "ben is a member; it stayed when it revoked the machine that brought it in."
    )


def test_with_three_machines_both_others_must_sign() -> None:
    """Until then nothing changes, and the reason is given in words."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.revoke("anna", "ben")
    (pending,) = circle.rosters["anna"].pending
    assert pending.reason == (
        "Revoking ben needs one more signature, as soon as these connect and sign: cleo."
    )
    assert circle.rosters["anna"].is_member(circle.id("ben"))
    circle.meet("anna", "cleo")
    assert circle.rosters["cleo"].objection(name, circle.id("cleo")) is None
    circle.sign("cleo", name)
    assert circle.rosters["cleo"].status(circle.id("ben")) is Status.REVOKED
    taken, _ = circle.meet("anna", "cleo")
    assert taken.verdict is Verdict.MOVED_ON
    assert taken.reason == "This machine is in generation 1 of the circle."
    assert circle.names("anna") == circle.names("cleo") == ["anna", "cleo"]
    assert circle.rosters["anna"].pending == ()


def test_the_revoked_machine_does_not_vote_and_is_not_listened_to() -> None:
    """What it tells afterwards is not even merged."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.revoke("anna", "ben")
    circle.gossip()
    assert circle.rosters["ben"].objection(name, circle.id("ben")) == (
        "this machine has no vote in it"
    )
    circle.sign("cleo", name)
    circle.meet("anna", "cleo")
    circle.pair("ben", "mallory")
    before = circle.rosters["anna"]
    taken = circle.tell("ben", "anna")
    assert taken.verdict is Verdict.REFUSED
    assert taken.reason == "ben was revoked by anna; only pairing it again brings it back."
    assert circle.rosters["anna"] == before


def test_whoever_came_through_the_revoked_one_needs_pairing_again() -> None:
    """Also through several steps; who has another sponsor stays."""
    circle = Circle("anna", "ben", "cleo")
    circle.pair("ben", "dora")
    circle.pair("dora", "emil")
    circle.pair("ben", "fred")
    circle.pair("cleo", "fred")
    circle.gossip()
    name = circle.revoke("anna", "ben")
    for voter in ("cleo", "fred"):
        circle.meet("anna", voter)
        circle.sign(voter, name)
        circle.meet("anna", voter)
    roster = circle.rosters["anna"]
    assert circle.names("anna") == ["anna", "cleo", "fred"]
    assert roster.heirs(name) == {circle.id(n) for n in ("anna", "cleo", "fred")}
    for dropped in ("dora", "emil"):
        assert roster.status(circle.id(dropped)) is Status.NEEDS_PAIRING
    assert roster.explain(circle.id("dora")) == (
        "dora was brought in through ben, which was revoked; it has to be paired again."
    )
    taken = circle.tell("anna", "dora")
    assert taken.verdict is Verdict.PAIR_AGAIN
    assert "brought in through ben" in taken.reason


def test_two_who_bring_in_each_other_do_not_hold_each_other_up() -> None:
    """Only a way to the founder counts, not a circle of sponsors."""
    circle = Circle("anna", "ben")
    circle.pair("ben", "dora")
    circle.pair("dora", "emil")
    circle.pair("emil", "dora")
    circle.gossip()
    name = circle.revoke("anna", "ben")
    assert circle.rosters["anna"].heirs(name) == {circle.id("anna")}


def test_machines_of_the_revoked_one_stay_if_the_voters_keep_them() -> None:
    """The proposer vouches for them from then on."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.revoke("ben", "anna", keeps=["cleo"])
    circle.meet("ben", "cleo")
    circle.sign("cleo", name)
    circle.meet("ben", "cleo")
    assert circle.names("ben") == ["ben", "cleo"]
    assert circle.rosters["ben"].explain(circle.id("cleo")) == (
        "cleo is a member since generation 0, brought in by ben."
    )


def test_a_machine_that_was_revoked_can_be_paired_again() -> None:
    """A person vouches for it; its old place is not restored, it gets a new one."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.revoke("anna", "ben")
    circle.meet("anna", "cleo")
    circle.sign("cleo", name)
    circle.meet("anna", "cleo")
    circle.pair("cleo", "ben")
    circle.gossip("anna", "cleo", "ben")
    assert circle.rosters["anna"].explain(circle.id("ben")) == (
        "ben is a member since generation 1, brought in by cleo."
    )


def test_revoking_twice_names_the_later_one() -> None:
    """The history of a machine ends with what happened last."""
    circle = Circle("anna", "ben")
    circle.revoke("anna", "ben")
    circle.pair("anna", "ben")
    circle.revoke("anna", "ben")
    circle.rotate("anna")
    assert circle.rosters["anna"].generation.number == 3
    assert circle.rosters["anna"].status(circle.id("ben")) is Status.REVOKED


@pytest.mark.parametrize(
    ("target", "keeps", "words"),
    [
        ("anna", [], "cannot revoke itself"),
        ("eve", [], "has been in"),
        ("ben", ["eve"], "no member"),
    ],
)
def test_what_cannot_be_revoked_is_refused(target: str, keeps: list[str], words: str) -> None:
    """With the rule in the message."""
    circle = Circle("anna", "ben", "cleo")
    circle.signers["eve"] = machine("eve")
    with pytest.raises(RosterRefused, match=words):
        circle.revoke("anna", target, keeps)


# --- rotating without revoking ---


def test_a_plain_rotation_needs_more_than_half_of_all() -> None:
    """Two machines both sign; what the second says is what the first is told."""
    circle = Circle("anna", "ben")
    name = circle.rotate("anna")
    assert circle.rosters["anna"].pending[0].reason == (
        "The new secret proposed by anna needs one more signature, "
        "as soon as these connect and sign: ben."
    )
    circle.meet("anna", "ben")
    circle.sign("ben", name)
    circle.meet("anna", "ben")
    assert {circle.rosters[n].generation.name for n in ("anna", "ben")} == {name}
    assert circle.names("anna") == ["anna", "ben"]


def test_alone_everything_is_decided_at_once() -> None:
    """One of one."""
    circle = Circle("anna")
    circle.rotate("anna")
    circle.rotate("anna")
    assert circle.rosters["anna"].generation.number == 2


def test_several_signatures_may_be_lacking() -> None:
    """The reason counts them."""
    circle = Circle("anna", "ben", "cleo", "dora")
    circle.rotate("anna")
    assert "needs 2 more signatures" in circle.rosters["anna"].pending[0].reason
    assert "ben, cleo and dora" in circle.rosters["anna"].pending[0].reason


# --- admitted while the secret changes ---


def test_whoever_comes_in_during_a_rotation_is_renewed_by_its_sponsor() -> None:
    """It was not on the voters' list; one signature brings it back, and no person is needed."""
    circle = Circle("anna", "ben", "cleo")
    name = circle.rotate("anna")
    circle.pair("cleo", "dora")
    circle.meet("anna", "ben")
    circle.sign("ben", name)
    circle.meet("ben", "cleo")
    assert circle.rosters["cleo"].objection(name, circle.id("cleo")) is None
    circle.sign("cleo", name)
    roster = circle.rosters["cleo"]
    assert roster.status(circle.id("dora")) is Status.NEEDS_PAIRING
    assert roster.explain(circle.id("dora")) == (
        "dora was brought in while the secret was being changed; "
        "it has to be paired again, or renewed by the machine that brought it in."
    )
    assert roster.renew(circle.signers["ben"]) == roster
    circle.rosters["cleo"] = roster.renew(circle.signers["cleo"])
    circle.gossip("anna", "ben", "cleo")
    assert circle.names("anna") == ["anna", "ben", "cleo", "dora"]


def test_nobody_renews_what_came_through_a_revoked_machine() -> None:
    """That takes a person."""
    circle = Circle("anna", "ben")
    circle.pair("ben", "dora")
    circle.gossip()
    name = circle.revoke("anna", "ben")
    circle.meet("anna", "dora")
    circle.sign("dora", name)
    circle.meet("anna", "dora")
    roster = circle.rosters["anna"]
    assert roster.generation.number == 1
    assert roster.renew(circle.signers["anna"]) == roster


# --- storage ---


def test_a_roster_survives_the_disk() -> None:
    """With what this machine alone remembers, and in the same bytes."""
    circle = Circle("anna", "ben", "cleo")
    circle.revoke("anna", "ben")
    circle.gossip()
    roster = circle.rosters["anna"]
    data = roster.to_bytes(with_trust=True)
    again = Roster.from_bytes(data, TOY_VERIFIER, limit=MAX_FILE_BYTES)
    assert again == roster
    assert again.to_bytes(with_trust=True) == data


def test_the_history_is_bounded() -> None:
    """A full roster says what to do; it never grows beyond what a pairing can carry."""
    circle = Circle("anna", *(f"machine {n}" for n in range(15)))
    roster, anna = circle.rosters["anna"], circle.signers["anna"]
    guests = [machine(f"guest {n}").card for n in range(300)]
    with pytest.raises(RosterRefused, match="history of this circle is full"):
        functools.reduce(lambda grown, card: grown.admit(card, anna), guests, roster)
    fitting = functools.reduce(lambda grown, card: grown.admit(card, anna), guests[:100], roster)
    assert len(fitting.members) == 116


def test_sixteen_machines_change_their_secret_two_dozen_times() -> None:
    """That is the room the bound leaves."""
    names = ["anna", *(f"machine {n}" for n in range(15))]
    circle = Circle(*names)
    roster = circle.rosters["anna"]
    for number in range(24):
        roster = roster.rotate(circle.signers["anna"], commitment(number))
        (pending,) = roster.pending
        for voter in names[1:9]:
            roster = roster.sign(pending.name, circle.signers[voter])
        assert roster.generation.number == number + 1
