"""Exchanging rosters: absentees come back, forgers get nowhere, and all end up agreeing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core import roster_exchange
from potluck.core.cards import Signer
from potluck.core.roster import Roster, Status
from potluck.core.roster_exchange import Verdict, take
from potluck.core.roster_history import History
from potluck.core.roster_records import Admission, Records, Rotation, record_id, statement
from potluck.vocabulary import NodeId
from support.circle import Circle, commitment, secret
from support.machines import TOY_VERIFIER, machine


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
    monkeypatch.setattr(roster_exchange, "MAX_BYTES", 10)
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
