"""The roster: who is in, who brought whom, and what happens when somebody is revoked."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck.trust import roster
from potluck.trust.roster import MAX_FILE_BYTES, MergeOutcome, Roster, take
from potluck.trust.roster_records import (
    Admission,
    Card,
    Records,
    RosterHistory,
    RosterRefused,
    Rotation,
    Signer,
    Status,
    record_id,
    statement,
)
from support.machines import TOY_VERIFIER, machine
from support.toy_group import ToyGroup, commitment, secret

# --- admitting ---


def test_the_founder_is_the_first_member() -> None:
    """It stands for itself and knows the secret."""
    roster = ToyGroup("anna").rosters["anna"]
    (anna,) = roster.members
    assert (anna.name, anna.sponsor, anna.generation) == ("anna", anna.node_id, 0)
    assert roster.is_secret(secret())
    assert not roster.is_secret(secret(1))
    assert roster.explain(anna.node_id) == "anna is a member; it started this group."


def test_whoever_is_brought_in_is_a_member_with_a_sponsor() -> None:
    """Members bring in members, and everybody sees by whom."""
    group = ToyGroup("anna", "ben")
    group.pair("ben", "cleo")
    group.gossip()
    for viewer in group.rosters:
        assert group.names(viewer) == ["anna", "ben", "cleo"]
    roster = group.rosters["anna"]
    assert roster.generation.members[group.id("cleo")].sponsor == group.id("ben")
    assert roster.explain(group.id("cleo")) == ("cleo is a member, added by ben.")


def test_a_stranger_is_nobody_and_brings_in_nobody() -> None:
    """Only members sign admissions."""
    group, eve = ToyGroup("anna", "ben"), machine("eve")
    roster = group.rosters["anna"]
    assert not roster.is_member(eve.node_id)
    assert roster.status(eve.node_id) is Status.STRANGER
    assert roster.explain(eve.node_id) == (
        f"No machine with the id {eve.node_id} has ever been in this group."
    )
    with pytest.raises(RosterRefused, match="has ever been in this group"):
        roster.admit(machine("fay").card, eve)
    with pytest.raises(RosterRefused, match="itself"):
        roster.admit(group.signers["anna"].card, group.signers["anna"])


def test_nobody_can_rename_another_machine() -> None:
    """A second admission adds a sponsor and nothing else, so `revoke laptop` means one machine."""
    group = ToyGroup("anna", "ben", "cleo")
    cleo = group.signers["cleo"].card
    misleading = Card(cleo.node_id, cleo.public_key, "anna")
    roster = group.rosters["ben"].admit(misleading, group.signers["ben"])
    member = roster.generation.members[cleo.node_id]
    assert member.name == "cleo"
    assert member.sponsors == {group.id("anna"), group.id("ben")}


def test_machines_of_the_same_name_are_told_apart_by_their_ids() -> None:
    """In every sentence; nobody passes for another by its name, however that is spelled."""
    group = ToyGroup("anna", "nas", "cleo")
    (anna, nas), twin = (group.signers[name] for name in ("anna", "nas")), machine("NAS", "twin")
    shown = f"nas ({nas.node_id[:8]})"
    sly = machine(shown, "sly")
    assert group.rosters["anna"].history.name_of(nas.node_id) == "nas"
    roster = group.rosters["anna"].admit(twin.card, anna).admit(sly.card, anna)
    assert roster.history.name_of(nas.node_id) == shown
    assert roster.history.name_of(twin.node_id) == f"NAS ({twin.node_id[:8]})"
    assert roster.history.name_of(sly.node_id) == f"{shown} ({sly.node_id[:8]})"
    (pending,) = roster.revoke(nas.node_id, anna, commitment(1)).pending
    assert f"Revoking {shown} needs" in pending.reason
    assert f"NAS ({twin.node_id[:8]})" in pending.reason


# --- revoking ---


def test_with_two_machines_the_other_one_decides_alone() -> None:
    """The revoked one does not count, so one of one is a majority; the revoked one is told."""
    group = ToyGroup("anna", "ben")
    group.revoke("anna", "ben")
    assert group.rosters["anna"].generation.number == 1
    assert group.rosters["anna"].status(group.id("ben")) is Status.REVOKED
    assert group.rosters["anna"].explain(group.id("ben")) == (
        "ben was revoked by anna; only pairing it again brings it back."
    )
    taken = group.tell("anna", "ben")
    assert taken.outcome is MergeOutcome.REVOKED
    assert taken.reason == "anna and a majority of the machines revoked this machine."
    assert taken.roster.is_member(group.id("ben")), "a machine does not put itself out"
    assert taken.roster.pending[0].reason == "Revoking ben has the signatures it needs."


def test_the_one_who_was_brought_in_may_revoke_the_founder() -> None:
    """With a stolen first machine the second goes on alone, and stays a member."""
    group = ToyGroup("anna", "ben")
    group.revoke("ben", "anna")
    assert group.names("ben") == ["ben"]
    assert group.rosters["ben"].explain(group.id("ben")) == (
        "ben is a member; it stayed when it revoked the machine that added it."
    )


def test_with_three_machines_both_others_must_sign() -> None:
    """Until then nothing changes, and the reason is given in words."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.revoke("anna", "ben")
    (pending,) = group.rosters["anna"].pending
    assert pending.reason == (
        "Revoking ben needs one more signature. These machines have not signed: cleo."
    )
    assert group.rosters["anna"].is_member(group.id("ben"))
    group.meet("anna", "cleo")
    assert group.rosters["cleo"].objection(name, group.id("cleo")) is None
    group.sign("cleo", name)
    assert group.rosters["cleo"].status(group.id("ben")) is Status.REVOKED
    taken, _ = group.meet("anna", "cleo")
    assert taken.outcome is MergeOutcome.MOVED_ON
    assert taken.reason == "This machine has accepted every change that the other one has."
    assert group.names("anna") == group.names("cleo") == ["anna", "cleo"]
    assert group.rosters["anna"].pending == ()


def test_the_revoked_machine_does_not_vote_and_is_not_listened_to() -> None:
    """What it tells afterwards is not even merged."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.revoke("anna", "ben")
    group.gossip()
    assert group.rosters["ben"].objection(name, group.id("ben")) == (
        "this machine has no vote in it"
    )
    group.sign("cleo", name)
    group.meet("anna", "cleo")
    group.pair("ben", "mallory")
    before = group.rosters["anna"]
    taken = group.tell("ben", "anna")
    assert taken.outcome is MergeOutcome.REFUSED
    assert taken.reason == "ben was revoked by anna; only pairing it again brings it back."
    assert group.rosters["anna"] == before


def test_whoever_came_through_the_revoked_one_needs_pairing_again() -> None:
    """Also through several steps; who has another sponsor stays."""
    group = ToyGroup("anna", "ben", "cleo")
    group.pair("ben", "dora")
    group.pair("dora", "emil")
    group.pair("ben", "fred")
    group.pair("cleo", "fred")
    group.gossip()
    name = group.revoke("anna", "ben")
    for voter in ("cleo", "fred"):
        group.meet("anna", voter)
        group.sign(voter, name)
        group.meet("anna", voter)
    roster = group.rosters["anna"]
    assert group.names("anna") == ["anna", "cleo", "fred"]
    assert roster.members_after(name) == {group.id(n) for n in ("anna", "cleo", "fred")}
    for dropped in ("dora", "emil"):
        assert roster.status(group.id(dropped)) is Status.NEEDS_PAIRING
    assert roster.explain(group.id("dora")) == (
        "dora was added through ben, which was revoked; it has to be paired again."
    )
    taken = group.tell("anna", "dora")
    assert taken.outcome is MergeOutcome.PAIR_AGAIN
    assert "added through ben" in taken.reason


def test_two_who_bring_in_each_other_do_not_hold_each_other_up() -> None:
    """Only a way to the founder counts, not a group of sponsors."""
    group = ToyGroup("anna", "ben")
    group.pair("ben", "dora")
    group.pair("dora", "emil")
    group.pair("emil", "dora")
    group.gossip()
    name = group.revoke("anna", "ben")
    assert group.rosters["anna"].members_after(name) == {group.id("anna")}


def test_machines_of_the_revoked_one_stay_if_the_voters_keep_them() -> None:
    """The proposer vouches for them from then on."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.revoke("ben", "anna", keeps=["cleo"])
    group.meet("ben", "cleo")
    group.sign("cleo", name)
    group.meet("ben", "cleo")
    assert group.names("ben") == ["ben", "cleo"]
    assert group.rosters["ben"].explain(group.id("cleo")) == ("cleo is a member, added by ben.")


def test_a_machine_that_was_revoked_can_be_paired_again() -> None:
    """A person vouches for it; its old place is not restored, it gets a new one."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.revoke("anna", "ben")
    group.meet("anna", "cleo")
    group.sign("cleo", name)
    group.meet("anna", "cleo")
    group.pair("cleo", "ben")
    group.gossip("anna", "cleo", "ben")
    assert group.rosters["anna"].explain(group.id("ben")) == ("ben is a member, added by cleo.")


def test_revoking_twice_names_the_later_one() -> None:
    """The history of a machine ends with what happened last."""
    group = ToyGroup("anna", "ben")
    group.revoke("anna", "ben")
    group.pair("anna", "ben")
    group.revoke("anna", "ben")
    group.rotate("anna")
    assert group.rosters["anna"].generation.number == 3
    assert group.rosters["anna"].status(group.id("ben")) is Status.REVOKED


@pytest.mark.parametrize(
    ("target", "keeps", "words"),
    [
        ("anna", [], "cannot revoke itself"),
        ("eve", [], "has ever been in"),
        ("ben", ["eve"], "not a member"),
    ],
)
def test_what_cannot_be_revoked_is_refused(target: str, keeps: list[str], words: str) -> None:
    """With the rule in the message."""
    group = ToyGroup("anna", "ben", "cleo")
    group.signers["eve"] = machine("eve")
    with pytest.raises(RosterRefused, match=words):
        group.revoke("anna", target, keeps)


# --- rotating without revoking ---


def test_a_plain_rotation_needs_more_than_half_of_all() -> None:
    """Two machines both sign; what the second says is what the first is told."""
    group = ToyGroup("anna", "ben")
    name = group.rotate("anna")
    assert group.rosters["anna"].pending[0].reason == (
        "The new secret that anna proposed needs one more signature. "
        "These machines have not signed: ben."
    )
    group.meet("anna", "ben")
    group.sign("ben", name)
    group.meet("anna", "ben")
    assert {group.rosters[n].generation.name for n in ("anna", "ben")} == {name}
    assert group.names("anna") == ["anna", "ben"]


def test_alone_everything_is_decided_at_once() -> None:
    """One of one."""
    group = ToyGroup("anna")
    group.rotate("anna")
    group.rotate("anna")
    assert group.rosters["anna"].generation.number == 2


def test_several_signatures_may_be_lacking() -> None:
    """The reason counts them."""
    group = ToyGroup("anna", "ben", "cleo", "dora")
    group.rotate("anna")
    assert "needs 2 more signatures" in group.rosters["anna"].pending[0].reason
    assert "ben, cleo and dora" in group.rosters["anna"].pending[0].reason


# --- admitted while the secret changes ---


def test_whoever_comes_in_during_a_rotation_is_renewed_by_its_sponsor() -> None:
    """It was not on the voters' list; one signature brings it back, and no person is needed."""
    group = ToyGroup("anna", "ben", "cleo")
    name = group.rotate("anna")
    group.pair("cleo", "dora")
    group.meet("anna", "ben")
    group.sign("ben", name)
    group.meet("ben", "cleo")
    assert group.rosters["cleo"].objection(name, group.id("cleo")) is None
    group.sign("cleo", name)
    roster = group.rosters["cleo"]
    assert roster.status(group.id("dora")) is Status.NEEDS_PAIRING
    assert roster.explain(group.id("dora")) == (
        "dora was added while the secret was being changed; "
        "it has to be paired again, or renewed by the machine that added it."
    )
    assert roster.renew(group.signers["ben"]) == roster
    group.rosters["cleo"] = roster.renew(group.signers["cleo"])
    group.gossip("anna", "ben", "cleo")
    assert group.names("anna") == ["anna", "ben", "cleo", "dora"]


def test_nobody_renews_what_came_through_a_revoked_machine() -> None:
    """That takes a person."""
    group = ToyGroup("anna", "ben")
    group.pair("ben", "dora")
    group.gossip()
    name = group.revoke("anna", "ben")
    group.meet("anna", "dora")
    group.sign("dora", name)
    group.meet("anna", "dora")
    roster = group.rosters["anna"]
    assert roster.generation.number == 1
    assert roster.renew(group.signers["anna"]) == roster


# --- storage ---


def test_a_roster_survives_the_disk() -> None:
    """With what this machine alone remembers, and in the same bytes."""
    group = ToyGroup("anna", "ben", "cleo")
    group.revoke("anna", "ben")
    group.gossip()
    roster = group.rosters["anna"]
    data = roster.to_bytes(with_trust=True)
    again = Roster.from_bytes(data, TOY_VERIFIER, limit=MAX_FILE_BYTES)
    assert again == roster
    assert again.to_bytes(with_trust=True) == data


def test_the_history_is_bounded() -> None:
    """A full roster says what to do; it never grows beyond what a pairing can carry."""
    group = ToyGroup("anna", *(f"machine {n}" for n in range(15)))
    roster, anna = group.rosters["anna"], group.signers["anna"]
    guests = [machine(f"guest {n}").card for n in range(300)]
    with pytest.raises(RosterRefused, match="history of this group is full"):
        functools.reduce(lambda grown, card: grown.admit(card, anna), guests, roster)
    fitting = functools.reduce(lambda grown, card: grown.admit(card, anna), guests[:100], roster)
    assert len(fitting.members) == 116


def test_sixteen_machines_change_their_secret_two_dozen_times() -> None:
    """That is the room the bound leaves."""
    names = ["anna", *(f"machine {n}" for n in range(15))]
    group = ToyGroup(*names)
    roster = group.rosters["anna"]
    for number in range(24):
        roster = roster.rotate(group.signers["anna"], commitment(number))
        (pending,) = roster.pending
        for voter in names[1:9]:
            roster = roster.sign(pending.name, group.signers[voter])
        assert roster.generation.number == number + 1


# --------------------------------------------------------------------------------------------------
# Exchanging rosters: absentees come back, forgers get nowhere, and all end up agreeing.


def rotated(group: ToyGroup, proposer: str, *voters: str) -> bytes:
    """A plain rotation that these have signed and told each other of."""
    name = group.rotate(proposer)
    for voter in voters:
        group.meet(proposer, voter)
        group.sign(voter, name)
        group.meet(proposer, voter)
    group.gossip(proposer, *voters)
    return name


# --- coming back ---


def test_an_absentee_follows_what_a_majority_of_those_it_knew_has_signed() -> None:
    """Also over several rotations at once; the new secret is checked against the last one."""
    group = ToyGroup("anna", "ben", "cleo", "dora", "emil")
    rotated(group, "anna", "ben", "cleo")
    name = group.revoke("ben", "dora")
    for voter in ("anna", "cleo"):
        group.meet("ben", voter)
        group.sign(voter, name)
        group.meet("ben", voter)
    taken = group.tell("cleo", "emil")
    assert taken.outcome is MergeOutcome.MOVED_ON
    assert taken.roster.generation.number == 2
    assert taken.roster.status(group.id("dora")) is Status.REVOKED
    assert taken.roster.is_secret(secret_of(group, name))
    assert not taken.roster.is_secret(secret())


def secret_of(group: ToyGroup, name: bytes) -> bytes:
    """The secret whose hash the rotation carries."""
    wanted = group.rosters["ben"].history.records.rotations[name].commitment
    return next(secret(n) for n in range(10_000) if commitment(n) == wanted)


def test_who_knew_too_few_of_the_signers_may_sign_or_has_to_be_paired_again() -> None:
    """Emil knew two machines; five have changed the secret with one of his two."""
    group = ToyGroup("anna", "emil")
    for guest in ("ben", "cleo", "dora"):
        group.pair("anna", guest)
    group.gossip("anna", "ben", "cleo", "dora")
    name = rotated(group, "anna", "ben", "cleo")
    taken = group.tell("anna", "emil")
    assert taken.outcome is MergeOutcome.SIGN
    assert taken.reason == (
        "The new secret that anna proposed is signed by anna, but 2 signatures of machines "
        "that this one knew are needed; this machine may sign it too."
    )
    group.sign("emil", name)
    assert group.rosters["emil"].generation.number == 1


def test_who_came_later_is_a_stranger_to_an_absentee_that_cannot_follow_yet() -> None:
    """Emil has to hear it from somebody he knew."""
    group = ToyGroup("anna", "emil")
    group.pair("anna", "ben")
    rotated(group, "anna", "ben")
    group.pair("anna", "fay")
    taken = group.tell("fay", "emil")
    assert taken.outcome is MergeOutcome.REFUSED
    assert "No machine with the id" in taken.reason
    assert group.tell("anna", "emil").outcome is MergeOutcome.SIGN


def test_a_member_told_of_nothing_new_is_current() -> None:
    """So is one that knows more than the sender."""
    group = ToyGroup("anna", "ben", "cleo")
    assert group.tell("anna", "ben").outcome is MergeOutcome.CURRENT
    rotated(group, "anna", "ben")
    assert group.tell("cleo", "anna").outcome is MergeOutcome.CURRENT


def test_another_group_is_none_of_our_business() -> None:
    """Nothing is merged."""
    ours, theirs = ToyGroup("anna", "ben"), ToyGroup("ben", "anna")
    taken = take(ours.rosters["anna"], theirs.rosters["ben"], ours.id("ben"), ours.id("anna"))
    assert taken.outcome is MergeOutcome.REFUSED
    assert taken.reason == "The member list offered is that of another group."


def test_histories_that_are_too_long_together_are_not_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound holds for what others bring too."""
    group = ToyGroup("anna", "ben")
    monkeypatch.setattr(roster, "MAX_BYTES", 10)
    taken = group.tell("anna", "ben")
    assert taken.outcome is MergeOutcome.PAIR_AGAIN
    assert "too long a history" in taken.reason


def test_a_group_that_split_says_so_on_both_sides() -> None:
    """Two of four revoke one of the others, and the others do the same."""
    group = ToyGroup("anna", "ben", "cleo", "dora")
    for one, other, target in (("anna", "ben", "cleo"), ("cleo", "dora", "anna")):
        name = group.revoke(one, target, keeps=["ben", "dora"])
        group.meet(one, other)
        group.sign(other, name)
        group.meet(one, other)
    for one, other in (("ben", "dora"), ("dora", "ben")):
        taken = group.tell(one, other)
        assert taken.outcome is MergeOutcome.PAIR_AGAIN
        assert taken.reason.startswith("The group has split")


# --- whose votes count ---


def test_whom_most_of_those_who_count_tell_of_counts_too() -> None:
    """One sender of two is not enough, and a machine does not use our for itself."""
    group = ToyGroup("anna", "ben", "cleo")
    group.pair("anna", "dora")
    dora = group.id("dora")
    group.tell("anna", "cleo")
    group.tell("dora", "cleo")
    assert dora not in group.rosters["cleo"].counted
    assert group.rosters["cleo"].unconfirmed == {(dora, group.id("anna"))}
    group.tell("anna", "ben")
    group.tell("ben", "cleo")
    assert dora in group.rosters["cleo"].counted
    assert group.rosters["cleo"].unconfirmed == frozenset()


def test_with_two_machines_one_teller_is_enough() -> None:
    """There is nobody else to ask."""
    group = ToyGroup("anna", "ben")
    group.pair("anna", "cleo")
    group.tell("anna", "ben")
    assert group.id("cleo") in group.rosters["ben"].counted


def test_the_voters_list_of_an_accepted_rotation_counts_from_then_on() -> None:
    """So an absentee can follow a group that grew, as long as trust was handed on."""
    group = ToyGroup("anna", "ben", "emil")
    for guest in ("cleo", "dora"):
        group.pair("anna", guest)
    group.gossip("anna", "ben", "cleo", "dora")
    rotated(group, "anna", "ben", "cleo")
    group.gossip("anna", "ben", "cleo", "dora")
    rotated(group, "anna", "cleo", "dora")
    taken = group.tell("anna", "emil")
    assert taken.outcome is MergeOutcome.MOVED_ON
    assert taken.roster.generation.number == 2
    assert taken.roster.counted == {group.id(name) for name in group.rosters}


# --- forgers ---


class Forger:
    """Has the keys of some members, and makes machines and rotations of its own."""

    def __init__(self, group: ToyGroup, owned: list[str]) -> None:
        self.keys: dict[NodeId, Signer] = {group.id(n): group.signers[n] for n in owned}
        self.roster = group.copy(owned[0])
        self.records: Records = self.roster.history.records

    def bring_in(self, name: str, sponsor: NodeId) -> NodeId:
        """A machine that exists only on paper."""
        puppet = machine(name)
        generation = self.roster.generation.name
        admission = Admission(self.roster.group_id, generation, puppet.card, sponsor)
        signature = self.keys[sponsor].sign(statement(admission))
        self.records = self.records.with_admission(admission, signature)
        self.keys[puppet.node_id] = puppet
        return puppet.node_id

    def forge(self, electorate: set[NodeId], revokes: NodeId | None) -> bytes:
        """A rotation with every vote the forger can cast."""
        voters = sorted(self.keys.keys() & electorate)
        rotation = Rotation(
            self.roster.group_id,
            self.roster.generation.name,
            voters[0],
            0,
            tuple(sorted(electorate)),
            revokes,
            tuple(sorted(self.keys.keys() & electorate)),
            commitment(666),
        )
        for voter in voters:
            signature = self.keys[voter].sign(statement(rotation))
            self.records = self.records.with_vote(rotation, voter, signature)
        return record_id(rotation)

    def offer(self, chain: tuple[bytes, ...]) -> Roster:
        """What the victim receives."""
        offered = replace(self.roster, history=RosterHistory(self.records, chain))
        return Roster.from_bytes(offered.to_bytes(), TOY_VERIFIER)


def test_a_revoked_machine_cannot_lead_an_absentee_away() -> None:
    """Neither alone, nor with machines of its own, nor by telling of them first."""
    group = ToyGroup("anna", "ben", "cleo", "dora")
    name = group.revoke("anna", "ben")
    group.meet("anna", "cleo")
    group.sign("cleo", name)
    group.meet("anna", "cleo")
    forger, dora = Forger(group, ["ben"]), group.id("dora")
    mine = group.rosters["dora"]

    puppets = {forger.bring_in(f"puppet {n}", group.id("ben")) for n in range(9)}
    for _ in range(3):
        for sender in (group.id("ben"), *puppets):
            mine = take(mine, forger.offer(()), sender, dora).roster
    assert not puppets & mine.counted

    members = {member.node_id for member in mine.members}
    forged = forger.forge(members - {group.id("anna")}, group.id("anna"))
    taken = take(mine, forger.offer((forged,)), group.id("ben"), dora)
    assert taken.outcome is MergeOutcome.SIGN
    assert (
        "is signed by ben, but 2 signatures of machines that this one knew are needed"
        in taken.reason
    )
    assert taken.roster.generation.number == 0

    alone = forger.forge({group.id("ben"), *puppets}, group.id("anna"))
    taken = take(taken.roster, forger.offer((alone,)), group.id("ben"), dora)
    assert taken.outcome is MergeOutcome.PAIR_AGAIN
    assert taken.roster.generation.number == 0

    group.rosters["dora"] = taken.roster
    assert group.tell("anna", "dora").outcome is MergeOutcome.MOVED_ON, "the true one still works"
    assert group.rosters["dora"].status(group.id("ben")) is Status.REVOKED


def test_a_claimed_revocation_without_votes_moves_nobody() -> None:
    """One machine says that we were revoked, with a voters' list of its own making."""
    group = ToyGroup("anna", "ben", "cleo")
    forger = Forger(group, ["ben"])
    forged = forger.forge({group.id("ben")}, group.id("cleo"))
    taken = take(group.rosters["cleo"], forger.offer((forged,)), group.id("ben"), group.id("cleo"))
    assert taken.outcome is MergeOutcome.PAIR_AGAIN
    assert (
        "is signed by ben, but 2 signatures of machines that this one knew are needed"
        in taken.reason
    )
    assert taken.roster.generation.number == 0


@given(st.data())
@settings(max_examples=40)
def test_no_minority_moves_an_absentee(data: st.DataObject) -> None:
    """Whatever fewer than half of the others forge, bring in and repeat, nothing is accepted."""
    size = data.draw(st.integers(3, 7))
    names = [f"m{n}" for n in range(size)]
    group = ToyGroup(*names)
    victim = data.draw(st.sampled_from(names))
    others = [name for name in names if name != victim]
    owned = data.draw(
        st.lists(st.sampled_from(others), min_size=1, max_size=(size - 1) // 2, unique=True)
    )
    forger, mine = Forger(group, owned), group.rosters[victim]
    chain: tuple[bytes, ...] = ()
    for step in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            forger.bring_in(f"puppet {step}", data.draw(st.sampled_from(sorted(forger.keys))))
        else:
            everybody = sorted(forger.records.cards())
            revokes = data.draw(st.none() | st.sampled_from(everybody))
            listed = set(data.draw(st.lists(st.sampled_from(everybody)))) - {revokes}
            hands = sorted(forger.keys.keys() - {revokes})
            if hands:
                chain = (forger.forge({*listed, hands[0]}, revokes),)
        sender = data.draw(st.sampled_from(sorted(forger.keys)))
        claimed = chain if chain and _is_claimable(forger, chain) else ()
        mine = take(mine, forger.offer(claimed), sender, group.id(victim)).roster
    assert mine.history.chain == ()
    assert {member.name for member in mine.members} >= set(names)


def _is_claimable(forger: Forger, chain: tuple[bytes, ...]) -> bool:
    rotation = forger.records.rotations[chain[0]]
    return 2 * len(forger.records.voters(chain[0])) > len(rotation.electorate)


# --- everybody ends up agreeing ---


@given(st.data())
@settings(max_examples=40)
def test_members_that_meet_in_any_order_end_up_with_the_same_roster(data: st.DataObject) -> None:
    """With one proposal in each generation and everybody signing what it may."""
    group = ToyGroup("m0", "m1", "m2")
    for step in range(data.draw(st.integers(1, 5))):
        names = sorted(group.rosters)
        actor = data.draw(st.sampled_from(names))
        if data.draw(st.booleans()):
            group.pair(actor, f"n{step}")
        else:
            others = [name for name in names if name != actor]
            target = data.draw(st.none() | st.sampled_from(others)) if len(names) > 3 else None
            _settle(group, data, _change(group, actor, target))
        group.gossip()
        present = {member.name for member in group.rosters[actor].members}
        group.rosters = {n: r for n, r in group.rosters.items() if n in present}
    assert len({roster.to_bytes() for roster in group.rosters.values()}) == 1


def _change(group: ToyGroup, actor: str, target: str | None) -> bytes:
    if target is None:
        return group.rotate(actor)
    keeps = [name for name in group.rosters if name != target]
    return group.revoke(actor, target, keeps)


def _settle(group: ToyGroup, data: st.DataObject, name: bytes) -> None:
    """Machines meet in a random order and sign what they are asked for."""
    names = sorted(group.rosters)
    pairs = [(one, other) for one in names for other in names if one < other]
    for one, other in data.draw(st.permutations(pairs)) * 3:
        group.meet(one, other)
        for voter in (one, other):
            if group.rosters[voter].objection(name, group.id(voter)) is None:
                group.sign(voter, name)


def test_a_signature_reaches_the_others_even_if_its_signer_drops_out_by_it() -> None:
    """Dora came through ben, signs his revocation, and needs pairing again herself."""
    group = ToyGroup("anna", "ben")
    group.pair("ben", "dora")
    group.gossip()
    name = group.revoke("anna", "ben")
    group.meet("anna", "dora")
    group.sign("dora", name)
    assert group.tell("dora", "anna").outcome is MergeOutcome.MOVED_ON
    assert group.names("anna") == ["anna"]
    assert group.rosters["anna"].status(group.id("dora")) is Status.NEEDS_PAIRING
