"""Cards: who is who, and names that are safe to show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import NodeId
from potluck.errors import MalformedFrame
from potluck.trust.roster import MAX_BYTES, Roster
from potluck.trust.roster_records import (
    NAME_LIMIT,
    Admission,
    Card,
    Record,
    RecordFile,
    Records,
    RosterHistory,
    RosterRefused,
    Rotation,
    Signer,
    advance,
    clean_name,
    record_id,
    statement,
)
from support.machines import TOY_VERIFIER, machine
from support.toy_group import ToyGroup, commitment


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Anna's MacBook", "Anna's MacBook"),
        ("  two\n lines ", "two lines"),
        ("\x1b]0;owned\x07", "]0;owned"),
        ("evil\u202etxt", "eviltxt"),
        ("", "unnamed"),
        ("\x00", "unnamed"),
        ("x" * 100, "x" * 64),
        ("Küche", "Küche"),
    ],
)
def test_names_are_fit_for_a_terminal(text: str, clean: str) -> None:
    """Control, invisible and surplus characters are gone; letters of all languages stay."""
    assert clean_name(text) == clean


@given(st.text())
def test_a_clean_name_stays_as_it_is(text: str) -> None:
    """Cleaning twice changes nothing, so a receiver can check by cleaning."""
    name = clean_name(text)
    assert clean_name(name) == name
    assert 1 <= len(name) <= NAME_LIMIT
    assert name.isprintable()


def test_a_card_belongs_to_whoever_signs_with_its_key() -> None:
    """The id must be that of the key, and the key must have signed the message."""
    anna, eve = machine("anna"), machine("eve")
    assert TOY_VERIFIER.owns(anna.card, anna.sign(b"x"), b"x")
    assert not TOY_VERIFIER.owns(anna.card, anna.sign(b"x"), b"y")
    assert not TOY_VERIFIER.owns(anna.card, eve.sign(b"x"), b"x")
    borrowed = Card(anna.node_id, eve.card.public_key, "anna")
    assert not TOY_VERIFIER.owns(borrowed, eve.sign(b"x"), b"x")


def test_a_signer_shows_no_key() -> None:
    """Its text has the card and nothing else."""
    assert "sign" not in repr(machine("anna")).replace("Signer", "")


# --------------------------------------------------------------------------------------------------
# Records: signed, checked, in one encoding, and merged in any order with the same result.


@functools.cache
def world() -> Records:
    """A group with some history: admissions, a finished rotation, a pending one."""
    group = ToyGroup("anna", "ben", "cleo", "dora")
    group.pair("ben", "emil")
    group.gossip()
    name = group.revoke("anna", "dora")
    for voter in ("ben", "cleo"):
        group.meet("anna", voter)
        group.sign(voter, name)
        group.meet("anna", voter)
    group.pair("cleo", "fay")
    group.meet("anna", "cleo")
    group.rotate("anna")
    return group.rosters["anna"].history.records


@st.composite
def parts(draw: st.DrawFn) -> Records:
    """Some of the records of that group, some of them with another valid signature."""
    whole = world()
    admissions = draw(st.sets(st.sampled_from(sorted(whole.admissions))))
    rotations = draw(st.sets(st.sampled_from(sorted(whole.rotations))))
    votes = [key for key in sorted(whole.votes) if key[0] in rotations and draw(st.booleans())]
    return Records(
        whole.founding,
        draw(st.sampled_from([whole.signature, bytes(64)])),
        {name: whole.admissions[name] for name in admissions},
        {n: draw(st.sampled_from([whole.sponsorings[n], bytes(64)])) for n in admissions},
        {name: whole.rotations[name] for name in rotations},
        {key: draw(st.sampled_from([whole.votes[key], b"\xff" * 64])) for key in votes},
    )


@given(parts(), parts())
def test_merging_is_commutative(one: Records, other: Records) -> None:
    """Who tells whom first does not matter."""
    assert one.union(other) == other.union(one)


@given(parts(), parts(), parts())
def test_merging_is_associative(one: Records, two: Records, three: Records) -> None:
    """Nor does the order in which three machines meet."""
    assert one.union(two).union(three) == one.union(two.union(three))


@given(parts(), parts())
def test_merging_is_idempotent(one: Records, other: Records) -> None:
    """Hearing the same thing again changes nothing."""
    merged = one.union(other)
    assert one.union(one) == one
    assert merged.union(other) == merged.union(one) == merged


@given(st.permutations(range(6)))
@settings(max_examples=30)
def test_equal_records_are_equal_bytes_and_mean_the_same(order: list[int]) -> None:
    """Whatever the order in which they were learned."""
    whole = world()
    names = sorted(whole.admissions)
    pieces = [
        Records(
            whole.founding, whole.signature, {n: whole.admissions[n]}, {n: whole.sponsorings[n]}
        )
        for n in names
    ] + [Records(whole.founding, whole.signature, {}, {}, whole.rotations, whole.votes)]
    assert len(pieces) == 6
    merged = functools.reduce(Records.union, [pieces[place] for place in order])
    assert msgspec.msgpack.encode(merged.to_file()) == msgspec.msgpack.encode(whole.to_file())
    assert RosterHistory(merged).generations == RosterHistory(whole).generations


def test_two_groups_are_not_merged() -> None:
    """They have nothing in common."""
    other = ToyGroup("ben").rosters["ben"].history.records
    with pytest.raises(RosterRefused, match="two different groups"):
        world().union(other)


# --- what is not valid ---


ANNA, BEN, EVE = machine("anna"), machine("ben"), machine("eve")
Change = Callable[[RecordFile], RecordFile]


def small() -> RecordFile:
    """Anna has brought in ben and proposed a rotation."""
    group = ToyGroup("anna", "ben")
    group.rotate("anna")
    return group.rosters["anna"].history.records.to_file()


def admission(signer: Signer = ANNA, **changes: Any) -> Change:
    """The admission with something changed, signed by ``signer``."""

    def change(file: RecordFile) -> RecordFile:
        changed = msgspec.structs.replace(file.admissions[0][0], **changes)
        signed = (changed, signer.sign(statement(changed)))
        return msgspec.structs.replace(file, admissions=(signed,), rotations=())

    return change


def rotation(voter: NodeId = ANNA.node_id, signer: Signer = ANNA, **changes: Any) -> Change:
    """The rotation with something changed, and one vote."""

    def change(file: RecordFile) -> RecordFile:
        changed = msgspec.structs.replace(file.rotations[0][0], **changes)
        vote = (voter, signer.sign(statement(changed)))
        return msgspec.structs.replace(file, rotations=((changed, (vote,)),))

    return change


def founding(file: RecordFile) -> RecordFile:
    """The founding with another's signature."""
    return msgspec.structs.replace(
        file, founding=(file.founding[0], EVE.sign(statement(file.founding[0])))
    )


BOTH = tuple(sorted([ANNA.node_id, BEN.node_id]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (founding, "not signed by the founder"),
        (admission(group_id=bytes(32)), "admission is of another group"),
        (admission(parent=bytes(32)), "admission is of an unknown generation"),
        (admission(sponsor=EVE.node_id), "not added by a member"),
        (admission(sponsor=BEN.node_id, signer=BEN), "not added by a member"),
        (admission(signer=EVE), "not signed by its sponsor"),
        (
            admission(card=Card(BEN.node_id, EVE.card.public_key, "ben")),
            "does not belong to its key",
        ),
        (
            admission(card=Card(BEN.node_id, BEN.card.public_key, "\x1b[2J")),
            "unprintable characters",
        ),
        (rotation(group_id=bytes(32)), "rotation is of another group"),
        (rotation(parent=bytes(32)), "rotation is of an unknown generation"),
        (rotation(electorate=BOTH[::-1]), "not in order"),
        (rotation(electorate=(BEN.node_id,)), "that may not vote"),
        (rotation(electorate=(ANNA.node_id,), keeps=(BEN.node_id,)), "that may not vote"),
        (rotation(revokes=BEN.node_id), "lets the revoked machine vote"),
        (rotation(electorate=(*sorted([ANNA.node_id, EVE.node_id]),)), "was never added"),
        (rotation(voter=BEN.node_id, signer=BEN), "not signed by its proposer"),
        (rotation(signer=EVE), "not signed by its voter"),
        (
            lambda file: msgspec.structs.replace(
                file,
                rotations=(
                    (
                        file.rotations[0][0],
                        (*file.rotations[0][1], (EVE.node_id, bytes(64))),
                    ),
                ),
            ),
            "a machine voted that may not",
        ),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(change: Change, words: str) -> None:
    """One bad record is enough: an honest machine sends none."""
    with pytest.raises(MalformedFrame, match=words):
        Records.from_file(change(small()), TOY_VERIFIER)


def test_the_unchanged_file_is_valid() -> None:
    """So the cases above fail for the reason they name."""
    file = small()
    assert Records.from_file(file, TOY_VERIFIER).to_file() == file


def test_a_rotation_without_votes_is_not_kept() -> None:
    """Nobody stands for it."""
    file = small()
    bare = msgspec.structs.replace(file, rotations=((file.rotations[0][0], ()),))
    assert not Records.from_file(bare, TOY_VERIFIER).rotations


@pytest.mark.parametrize(
    ("chain", "words"),
    [((bytes(32),), "not a chain"), ("twice", "not a chain"), ("pending", "lacks its majority")],
)
def test_a_chain_that_does_not_hold_is_refused(chain: object, words: str) -> None:
    """Each accepted rotation follows the one before, with the votes it needs."""
    group = ToyGroup("anna", "ben")
    done = group.rotate("anna")
    group.meet("anna", "ben")
    group.sign("ben", done)
    group.meet("anna", "ben")
    pending = group.rotate("anna")
    names = {"twice": (done, done), "pending": (done, pending)}
    roster = group.rosters["anna"]
    claimed = names[chain] if isinstance(chain, str) else chain
    file = msgspec.msgpack.decode(roster.to_bytes())
    file[2] = list(claimed)  # type: ignore[call-overload]
    with pytest.raises(MalformedFrame, match=words):
        Roster.from_bytes(msgspec.msgpack.encode(file), TOY_VERIFIER)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_roster_or_a_malformed_frame(data: bytes) -> None:
    """No other error escapes."""
    with pytest.raises(MalformedFrame, match="not a member list"):
        Roster.from_bytes(data, TOY_VERIFIER)


@given(st.data())
def test_no_altered_roster_is_taken_for_the_original(data: st.DataObject) -> None:
    """A changed byte is noticed, or lies in what a machine only remembers for itself."""
    roster = ToyGroup("anna", "ben", "cleo").rosters["anna"]
    whole = roster.to_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.integers(1, 255))
    damaged = whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
    with pytest.raises(MalformedFrame):
        Roster.from_bytes(damaged, TOY_VERIFIER)


def test_a_roster_that_is_too_large_is_not_decoded() -> None:
    """The size is checked first."""
    with pytest.raises(MalformedFrame, match=f"at most {MAX_BYTES} bytes"):
        Roster.from_bytes(bytes(MAX_BYTES + 1), TOY_VERIFIER)


# --- what records mean ---


def test_admissions_by_strangers_are_kept_but_mean_nothing() -> None:
    """They may follow once their sponsor is known to be a member; until then nobody is in."""
    group = ToyGroup("anna", "ben")
    group.revoke("anna", "ben")
    roster = group.rosters["anna"]
    late = Admission(roster.group_id, roster.generation.name, EVE.card, BEN.node_id)
    records = roster.history.records.with_admission(late, BEN.sign(statement(late)))
    assert not RosterHistory(records, roster.history.chain).is_member(EVE.node_id)


def test_every_name_is_checked_also_where_a_machine_has_two() -> None:
    """Records are sorted by hashes: one that was tried long enough comes before the honest one."""
    roster = ToyGroup("anna", "ben").rosters["anna"]
    (honest,) = roster.history.records.admissions
    tried = (
        Admission(roster.group_id, roster.group_id, card, ANNA.node_id)
        for number in itertools.count()
        for card in [Card(BEN.node_id, BEN.card.public_key, f"ben\x1b[{number}J")]
    )
    sly = next(admission for admission in tried if record_id(admission) < honest)
    records = roster.history.records.with_admission(sly, ANNA.sign(statement(sly)))
    with pytest.raises(MalformedFrame, match="unprintable characters"):
        Records.from_file(records.to_file(), TOY_VERIFIER)


def test_every_kind_of_record_has_its_own_statement() -> None:
    """A signature for one cannot be used for another."""
    file = small()
    kinds: list[Record] = [file.founding[0], file.admissions[0][0], file.rotations[0][0]]
    assert len({statement(record)[:24] for record in kinds}) == 3
    assert len({record_id(record) for record in kinds}) == 3


def test_the_names_in_a_history_come_from_the_records() -> None:
    """Somebody was never added is called by its id."""
    history = RosterHistory(world())
    assert history.name_of(ANNA.node_id) == "anna"
    assert history.name_of(EVE.node_id) == EVE.node_id


def test_a_rotation_that_belongs_nowhere_has_no_heirs() -> None:
    """Its voters' list names somebody who is a member only later, so it can never be accepted."""
    group = ToyGroup("anna", "ben")
    roster = group.rosters["anna"]
    ids = tuple(sorted([ANNA.node_id, BEN.node_id]))
    odd = Rotation(
        roster.group_id, roster.group_id, ANNA.node_id, 0, ids, EVE.node_id, (), commitment(1)
    )
    records = roster.history.records.with_vote(odd, ANNA.node_id, ANNA.sign(statement(odd)))
    assert (
        Roster(RosterHistory(records), roster.counted).members_after(record_id(odd)) == frozenset()
    )


def test_records_know_their_cards() -> None:
    """Every machine that was ever brought in, once."""
    assert sorted(card.name for card in world().cards().values()) == [
        "anna",
        "ben",
        "cleo",
        "dora",
        "emil",
        "fay",
    ]


# --------------------------------------------------------------------------------------------------
# Votes: which rotation is accepted, and in which order if there are several.


def vote(records: Records, name: bytes, voter: Signer) -> Records:
    """A vote that the voter's own machine would not allow."""
    rotation = records.rotations[name]
    return records.with_vote(rotation, voter.node_id, voter.sign(statement(rotation)))


def accepted(history: RosterHistory, counted: frozenset[NodeId], me: NodeId) -> tuple[bytes, ...]:
    """The rotations that are accepted."""
    return advance(history, counted, me)[0].chain


def both(group: ToyGroup, one: str, other: str) -> tuple[bytes, bytes, RosterHistory]:
    """Two rotations of one generation, and a third machine that signed them both."""
    names = [name for name in group.rosters if name not in {one, other}]
    first, second = group.rotate(one), group.rotate(other)
    records = group.rosters[one].history.records.union(group.rosters[other].history.records)
    for name in (first, second):
        records = vote(records, name, group.signers[names[0]])
    return first, second, RosterHistory(records)


# --- accepting ---


def test_of_two_rotations_the_founders_comes_first() -> None:
    """Machines that learn of both at once choose alike."""
    group = ToyGroup("anna", "ben", "cleo")
    first, _, history = both(group, "anna", "ben")
    everybody = group.rosters["cleo"].counted
    assert accepted(history, everybody, group.id("cleo")) == (first,)


def test_then_the_one_of_the_member_that_came_first() -> None:
    """Earlier generations go before later ones."""
    group = ToyGroup("anna", "ben")
    name = group.rotate("anna")
    group.gossip()
    group.sign("ben", name)
    group.gossip()
    group.pair("anna", "cleo")
    group.gossip()
    first, _, history = both(group, "ben", "cleo")
    history = RosterHistory(history.records, (name,))
    everybody = group.rosters["anna"].counted
    assert accepted(history, everybody, group.id("anna")) == (name, first)


def test_then_the_later_attempt_of_the_same_proposer() -> None:
    """Whoever withdraws a proposal wants the newer one."""
    group = ToyGroup("anna", "ben", "cleo")
    names = [group.rotate("anna"), group.rotate("anna")]
    records = group.rosters["anna"].history.records
    for name in names:
        records = vote(records, name, group.signers["ben"])
    everybody = group.rosters["cleo"].counted
    assert accepted(RosterHistory(records), everybody, group.id("cleo")) == (names[1],)


def test_a_machine_never_accepts_its_own_revocation() -> None:
    """It would only lock itself out; the others need no agreement of its."""
    group = ToyGroup("anna", "ben")
    group.revoke("anna", "ben")
    records = group.rosters["anna"].history.records
    everybody = group.rosters["ben"].counted
    assert accepted(RosterHistory(records), everybody, group.id("ben")) == ()


def test_both_majorities_are_needed() -> None:
    """That of the voters' list, and that of the machines that count."""
    group = ToyGroup("anna", "ben", "cleo", "dora", "emil")
    name = group.rotate("anna")
    records = vote(group.rosters["anna"].history.records, name, group.signers["ben"])
    few = frozenset({group.id("anna"), group.id("ben")})
    everybody = group.rosters["emil"].counted
    me = group.id("emil")
    assert accepted(RosterHistory(records), few, me) == ()
    records = vote(records, name, group.signers["cleo"])
    assert accepted(RosterHistory(records), few, me) == (name,)
    assert accepted(RosterHistory(records), everybody, me) == (name,)
    strangers = frozenset({group.id("dora"), group.id("emil")})
    assert accepted(RosterHistory(records), strangers, me) == ()


def test_a_rotation_that_hides_too_many_members_is_not_signed() -> None:
    """It could never be accepted, and the vote would be lost."""
    group = ToyGroup("anna", "ben")
    name = group.rotate("anna")
    for guest in ("cleo", "dora", "emil"):
        group.pair("ben", guest)
    group.meet("anna", "ben")
    assert group.rosters["ben"].objection(name, group.id("ben")) == (
        "it leaves out too many members to be accepted"
    )


# --- one vote ---


def test_a_machine_signs_one_rotation_of_a_generation() -> None:
    """Otherwise two could be accepted."""
    group = ToyGroup("anna", "ben", "cleo", "dora", "emil")
    first, second = group.rotate("anna"), group.rotate("ben")
    group.gossip()
    group.sign("cleo", first)
    roster = group.rosters["cleo"]
    assert roster.objection(first, group.id("cleo")) == "this machine has signed it already"
    assert roster.objection(second, group.id("cleo")) == (
        "this machine has signed another one, proposed by anna"
    )
    with pytest.raises(RosterRefused, match="signed another one"):
        group.sign("cleo", second)
    with pytest.raises(RosterRefused, match=r"Another change is pending\. The new secret"):
        group.rotate("cleo")


def test_a_proposal_nobody_else_signed_can_be_replaced_by_its_proposer() -> None:
    """The later one counts; nobody is asked to sign the earlier one any more."""
    group = ToyGroup("anna", "ben", "cleo")
    first = group.revoke("anna", "ben")
    second = group.revoke("anna", "cleo")
    group.meet("anna", "ben")
    roster = group.rosters["ben"]
    assert [pending.name for pending in roster.pending] == [second]
    assert roster.objection(second, group.id("ben")) is None
    group.meet("anna", "cleo")
    assert group.rosters["cleo"].objection(first, group.id("cleo")) == (
        "its proposer has withdrawn it"
    )


def test_a_rotation_of_another_generation_is_not_signed() -> None:
    """Neither an old one nor one that nobody knows."""
    group = ToyGroup("anna", "ben", "cleo")
    old = group.rotate("anna")
    group.gossip()
    group.sign("ben", old)
    group.gossip()
    for name in (old, bytes(32)):
        assert group.rosters["cleo"].objection(name, group.id("cleo")) == (
            "it does not follow the present generation"
        )
