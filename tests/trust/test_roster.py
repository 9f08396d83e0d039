"""The roster: who is in, who brought whom, and what happens when somebody is revoked."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck.trust import roster
from potluck.trust.roster import MAX_FILE_BYTES, Roster, Verdict, take
from potluck.trust.roster_records import (
    Admission,
    Card,
    History,
    Records,
    RosterRefused,
    Rotation,
    Signer,
    Status,
    record_id,
    statement,
)
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


# --------------------------------------------------------------------------------------------------
# Exchanging rosters: absentees come back, forgers get nowhere, and all end up agreeing.


def rotated(circle: Circle, proposer: str, *voters: str) -> bytes:
    """A plain rotation that these have signed and told each other of."""
    name = circle.rotate(proposer)
    for voter in voters:
        circle.meet(proposer, voter)
        circle.sign(voter, name)
        circle.meet(proposer, voter)
    circle.gossip(proposer, *voters)
    return name


# --- coming back ---


def test_an_absentee_follows_what_a_majority_of_those_it_knew_has_signed() -> None:
    """Also over several rotations at once; the new secret is checked against the last one."""
    circle = Circle("anna", "ben", "cleo", "dora", "emil")
    rotated(circle, "anna", "ben", "cleo")
    name = circle.revoke("ben", "dora")
    for voter in ("anna", "cleo"):
        circle.meet("ben", voter)
        circle.sign(voter, name)
        circle.meet("ben", voter)
    taken = circle.tell("cleo", "emil")
    assert taken.verdict is Verdict.MOVED_ON
    assert taken.roster.generation.number == 2
    assert taken.roster.status(circle.id("dora")) is Status.REVOKED
    assert taken.roster.is_secret(secret_of(circle, name))
    assert not taken.roster.is_secret(secret())


def secret_of(circle: Circle, name: bytes) -> bytes:
    """The secret whose hash the rotation carries."""
    wanted = circle.rosters["ben"].history.records.rotations[name].commitment
    return next(secret(n) for n in range(10_000) if commitment(n) == wanted)


def test_who_knew_too_few_of_the_signers_may_sign_or_has_to_be_paired_again() -> None:
    """Emil knew two machines; five have changed the secret with one of his two."""
    circle = Circle("anna", "emil")
    for guest in ("ben", "cleo", "dora"):
        circle.pair("anna", guest)
    circle.gossip("anna", "ben", "cleo", "dora")
    name = rotated(circle, "anna", "ben", "cleo")
    taken = circle.tell("anna", "emil")
    assert taken.verdict is Verdict.SIGN
    assert taken.reason == (
        "The new secret proposed by anna is signed by 1 of the machines that this one knew (anna), "
        "and 2 are needed; this machine may sign too."
    )
    circle.sign("emil", name)
    assert circle.rosters["emil"].generation.number == 1


def test_who_came_later_is_a_stranger_to_an_absentee_that_cannot_follow_yet() -> None:
    """Emil has to hear it from somebody he knew."""
    circle = Circle("anna", "emil")
    circle.pair("anna", "ben")
    rotated(circle, "anna", "ben")
    circle.pair("anna", "fay")
    taken = circle.tell("fay", "emil")
    assert taken.verdict is Verdict.REFUSED
    assert "No machine with the id" in taken.reason
    assert circle.tell("anna", "emil").verdict is Verdict.SIGN


def test_a_member_told_of_nothing_new_is_current() -> None:
    """So is one that knows more than the teller."""
    circle = Circle("anna", "ben", "cleo")
    assert circle.tell("anna", "ben").verdict is Verdict.CURRENT
    rotated(circle, "anna", "ben")
    assert circle.tell("cleo", "anna").verdict is Verdict.CURRENT


def test_another_circle_is_none_of_our_business() -> None:
    """Nothing is merged."""
    ours, theirs = Circle("anna", "ben"), Circle("ben", "anna")
    taken = take(ours.rosters["anna"], theirs.rosters["ben"], ours.id("ben"), ours.id("anna"))
    assert taken.verdict is Verdict.REFUSED
    assert taken.reason == "The roster offered is that of another circle."


def test_histories_that_are_too_long_together_are_not_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound holds for what others bring too."""
    circle = Circle("anna", "ben")
    monkeypatch.setattr(roster, "MAX_BYTES", 10)
    taken = circle.tell("anna", "ben")
    assert taken.verdict is Verdict.PAIR_AGAIN
    assert "too long a history" in taken.reason


def test_a_circle_that_split_says_so_on_both_sides() -> None:
    """Two of four revoke one of the others, and the others do the same."""
    circle = Circle("anna", "ben", "cleo", "dora")
    for one, other, target in (("anna", "ben", "cleo"), ("cleo", "dora", "anna")):
        name = circle.revoke(one, target, keeps=["ben", "dora"])
        circle.meet(one, other)
        circle.sign(other, name)
        circle.meet(one, other)
    for one, other in (("ben", "dora"), ("dora", "ben")):
        taken = circle.tell(one, other)
        assert taken.verdict is Verdict.PAIR_AGAIN
        assert taken.reason.startswith("The circle has split")


# --- whose votes count ---


def test_whom_most_of_those_who_count_tell_of_counts_too() -> None:
    """One teller of two is not enough, and a machine does not speak for itself."""
    circle = Circle("anna", "ben", "cleo")
    circle.pair("anna", "dora")
    dora = circle.id("dora")
    circle.tell("anna", "cleo")
    circle.tell("dora", "cleo")
    assert dora not in circle.rosters["cleo"].counted
    assert circle.rosters["cleo"].hearsay == {(dora, circle.id("anna"))}
    circle.tell("anna", "ben")
    circle.tell("ben", "cleo")
    assert dora in circle.rosters["cleo"].counted
    assert circle.rosters["cleo"].hearsay == frozenset()


def test_with_two_machines_one_teller_is_enough() -> None:
    """There is nobody else to ask."""
    circle = Circle("anna", "ben")
    circle.pair("anna", "cleo")
    circle.tell("anna", "ben")
    assert circle.id("cleo") in circle.rosters["ben"].counted


def test_the_voters_list_of_an_accepted_rotation_counts_from_then_on() -> None:
    """So an absentee can follow a circle that grew, as long as trust was handed on."""
    circle = Circle("anna", "ben", "emil")
    for guest in ("cleo", "dora"):
        circle.pair("anna", guest)
    circle.gossip("anna", "ben", "cleo", "dora")
    rotated(circle, "anna", "ben", "cleo")
    circle.gossip("anna", "ben", "cleo", "dora")
    rotated(circle, "anna", "cleo", "dora")
    taken = circle.tell("anna", "emil")
    assert taken.verdict is Verdict.MOVED_ON
    assert taken.roster.generation.number == 2
    assert taken.roster.counted == {circle.id(name) for name in circle.rosters}


# --- forgers ---


class Forger:
    """Has the keys of some members, and makes machines and rotations of its own."""

    def __init__(self, circle: Circle, owned: list[str]) -> None:
        self.keys: dict[NodeId, Signer] = {circle.id(n): circle.signers[n] for n in owned}
        self.roster = circle.copy(owned[0])
        self.records: Records = self.roster.history.records

    def bring_in(self, name: str, sponsor: NodeId) -> NodeId:
        """A machine that exists only on paper."""
        puppet = machine(name)
        generation = self.roster.generation.name
        admission = Admission(self.roster.circle, generation, puppet.card, sponsor)
        signature = self.keys[sponsor].sign(statement(admission))
        self.records = self.records.with_admission(admission, signature)
        self.keys[puppet.node_id] = puppet
        return puppet.node_id

    def forge(self, electorate: set[NodeId], revokes: NodeId | None) -> bytes:
        """A rotation with every vote the forger can cast."""
        voters = sorted(self.keys.keys() & electorate)
        rotation = Rotation(
            self.roster.circle,
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
        offered = replace(self.roster, history=History(self.records, chain))
        return Roster.from_bytes(offered.to_bytes(), TOY_VERIFIER)


def test_a_revoked_machine_cannot_lead_an_absentee_away() -> None:
    """Neither alone, nor with machines of its own, nor by telling of them first."""
    circle = Circle("anna", "ben", "cleo", "dora")
    name = circle.revoke("anna", "ben")
    circle.meet("anna", "cleo")
    circle.sign("cleo", name)
    circle.meet("anna", "cleo")
    forger, dora = Forger(circle, ["ben"]), circle.id("dora")
    mine = circle.rosters["dora"]

    puppets = {forger.bring_in(f"puppet {n}", circle.id("ben")) for n in range(9)}
    for _ in range(3):
        for teller in (circle.id("ben"), *puppets):
            mine = take(mine, forger.offer(()), teller, dora).roster
    assert not puppets & mine.counted

    members = {member.node_id for member in mine.members}
    forged = forger.forge(members - {circle.id("anna")}, circle.id("anna"))
    taken = take(mine, forger.offer((forged,)), circle.id("ben"), dora)
    assert taken.verdict is Verdict.SIGN
    assert "signed by 1 of the machines that this one knew (ben), and 2 are needed" in taken.reason
    assert taken.roster.generation.number == 0

    alone = forger.forge({circle.id("ben"), *puppets}, circle.id("anna"))
    taken = take(taken.roster, forger.offer((alone,)), circle.id("ben"), dora)
    assert taken.verdict is Verdict.PAIR_AGAIN
    assert taken.roster.generation.number == 0

    circle.rosters["dora"] = taken.roster
    assert circle.tell("anna", "dora").verdict is Verdict.MOVED_ON, "the true one still works"
    assert circle.rosters["dora"].status(circle.id("ben")) is Status.REVOKED


def test_a_claimed_revocation_without_votes_moves_nobody() -> None:
    """One machine says that we were revoked, with a voters' list of its own making."""
    circle = Circle("anna", "ben", "cleo")
    forger = Forger(circle, ["ben"])
    forged = forger.forge({circle.id("ben")}, circle.id("cleo"))
    taken = take(
        circle.rosters["cleo"], forger.offer((forged,)), circle.id("ben"), circle.id("cleo")
    )
    assert taken.verdict is Verdict.PAIR_AGAIN
    assert "signed by 1 of the machines that this one knew (ben), and 2 are needed" in taken.reason
    assert taken.roster.generation.number == 0


@given(st.data())
@settings(max_examples=40)
def test_no_minority_moves_an_absentee(data: st.DataObject) -> None:
    """Whatever fewer than half of the others forge, bring in and repeat, nothing is accepted."""
    size = data.draw(st.integers(3, 7))
    names = [f"m{n}" for n in range(size)]
    circle = Circle(*names)
    victim = data.draw(st.sampled_from(names))
    others = [name for name in names if name != victim]
    owned = data.draw(
        st.lists(st.sampled_from(others), min_size=1, max_size=(size - 1) // 2, unique=True)
    )
    forger, mine = Forger(circle, owned), circle.rosters[victim]
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
        teller = data.draw(st.sampled_from(sorted(forger.keys)))
        claimed = chain if chain and _is_claimable(forger, chain) else ()
        mine = take(mine, forger.offer(claimed), teller, circle.id(victim)).roster
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
    circle = Circle("m0", "m1", "m2")
    for step in range(data.draw(st.integers(1, 5))):
        names = sorted(circle.rosters)
        actor = data.draw(st.sampled_from(names))
        if data.draw(st.booleans()):
            circle.pair(actor, f"n{step}")
        else:
            others = [name for name in names if name != actor]
            target = data.draw(st.none() | st.sampled_from(others)) if len(names) > 3 else None
            _settle(circle, data, _change(circle, actor, target))
        circle.gossip()
        present = {member.name for member in circle.rosters[actor].members}
        circle.rosters = {n: r for n, r in circle.rosters.items() if n in present}
    assert len({roster.to_bytes() for roster in circle.rosters.values()}) == 1


def _change(circle: Circle, actor: str, target: str | None) -> bytes:
    if target is None:
        return circle.rotate(actor)
    keeps = [name for name in circle.rosters if name != target]
    return circle.revoke(actor, target, keeps)


def _settle(circle: Circle, data: st.DataObject, name: bytes) -> None:
    """Machines meet in a random order and sign what they are asked for."""
    names = sorted(circle.rosters)
    pairs = [(one, other) for one in names for other in names if one < other]
    for one, other in data.draw(st.permutations(pairs)) * 3:
        circle.meet(one, other)
        for voter in (one, other):
            if circle.rosters[voter].objection(name, circle.id(voter)) is None:
                circle.sign(voter, name)


def test_a_signature_reaches_the_others_even_if_its_signer_drops_out_by_it() -> None:
    """Dora came through ben, signs his revocation, and needs pairing again herself."""
    circle = Circle("anna", "ben")
    circle.pair("ben", "dora")
    circle.gossip()
    name = circle.revoke("anna", "ben")
    circle.meet("anna", "dora")
    circle.sign("dora", name)
    assert circle.tell("dora", "anna").verdict is Verdict.MOVED_ON
    assert circle.names("anna") == ["anna"]
    assert circle.rosters["anna"].status(circle.id("dora")) is Status.NEEDS_PAIRING
