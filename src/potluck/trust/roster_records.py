"""The signed records a roster is made of, their one encoding, and their union.

Three kinds: the *founding* of a group, *admissions* (a member adds a machine) and *rotations*
(a new secret, perhaps without one machine), the last with the *votes* of members.  A record names
the generation it belongs to by the hash of what began it, so it cannot be moved to another.

The records of two machines are merged by union; where a signer gave two valid signatures for the
same thing the smaller one is kept.  Union is commutative, associative and idempotent, so the order
in which machines meet does not matter.  What the records *mean* is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from potluck._decode import Exact
from potluck._types import NodeId
from potluck.errors import DistributedError, MalformedFrame

# --------------------------------------------------------------------------------------------------
# Who is who, for decisions: a machine's card, and how it signs and is verified.
#
# A core never touches a private key.  Its driver passes in a :class:`Signer` (this machine) and a
# :class:`Verifier` (all others); both are thin covers of the node identity's functions.
# The types of wire fields that several messages share are here too, each with its bound.

NAME_LIMIT = 64  # characters, as long as a host name's label may be

WireId = Annotated[NodeId, msgspec.Meta(pattern="^[a-z2-7]{32}$")]  # 160 bits in base32
WireName = Annotated[Exact, msgspec.Meta(min_length=1, max_length=NAME_LIMIT)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # Ed25519, raw
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # Ed25519
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # SHA-256


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine as it introduces itself."""

    node_id: WireId
    public_key: PublicKey
    name: WireName


@dataclass(frozen=True, slots=True)
class Signer:
    """This machine: its card and the function that signs with its key."""

    card: Card
    sign: Callable[[bytes], bytes] = field(repr=False)

    @property
    def node_id(self) -> NodeId:
        """The id of this machine."""
        return self.card.node_id


@dataclass(frozen=True, slots=True)
class Verifier:
    """How to check what others claim."""

    node_id_of: Callable[[bytes], NodeId]
    """The id that belongs to a public key."""
    verify: Callable[[bytes, bytes, bytes], bool]
    """Whether (public key, signature, message) belong together."""

    def owns(self, card: Card, signature: bytes, message: bytes) -> bool:
        """Whether the card's id is that of its key, and this key signed the message."""
        return self.node_id_of(card.public_key) == card.node_id and self.verify(
            card.public_key, signature, message
        )


def clean_name(text: str) -> str:
    r"""A display name that is safe to print: no control or invisible characters, bounded.

    A machine cleans its own name before sending it; a received name that is not clean is refused.

    >>> clean_name("Anna's \x1b[31mlaptop")
    "Anna's [31mlaptop"
    """
    words = "".join(c for c in text if c.isprintable()).split()
    return " ".join(words)[:NAME_LIMIT].strip() or "unnamed"


# --------------------------------------------------------------------------------------------------

_LABEL = b"potluck roster v1 "
_Ids = tuple[WireId, ...]
K = TypeVar("K")


class RosterRefused(DistributedError, ValueError):
    """The rules of the roster do not allow this; the text says which rule."""


class FoundingRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first member starts a group; the hash of this record is the group's id."""

    founder: Card
    commitment: Digest
    nonce: Digest


class Admission(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``sponsor`` adds a machine, in the generation that ``parent`` began."""

    group_id: Digest
    parent: Digest
    card: Card
    sponsor: WireId


class Rotation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A new secret for the members after ``parent``, perhaps without one of them."""

    group_id: Digest
    parent: Digest
    proposer: WireId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # a later one withdraws the earlier
    electorate: _Ids  # who may vote: every member the proposer knew, without the revoked one
    revokes: WireId | None
    keeps: _Ids  # added by the revoked one, and vouched for by the voters
    commitment: Digest  # the hash of the new secret, so that no other can be slipped in


Record: TypeAlias = FoundingRecord | Admission | Rotation


class RecordFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All records as they are stored and sent."""

    founding: tuple[FoundingRecord, Signature]
    admissions: tuple[tuple[Admission, Signature], ...]
    rotations: tuple[tuple[Rotation, tuple[tuple[WireId, Signature], ...]], ...]


# Part of what is signed, so these never change.
_KINDS = {FoundingRecord: b"founding", Admission: b"admission", Rotation: b"rotation"}


def commitment_to(secret: bytes) -> bytes:
    """What stands for a secret in a record; 256 random bits cannot be guessed from it."""
    return hashlib.sha256(_LABEL + b"secret\0" + secret).digest()


def statement(record: Record) -> bytes:
    """The bytes that are signed."""
    return _LABEL + _KINDS[type(record)] + b"\0" + msgspec.msgpack.encode(record)


def record_id(record: Record) -> bytes:
    """The hash by which others refer to the record."""
    return hashlib.sha256(statement(record)).digest()


@dataclass(frozen=True)
class Records:
    """A set of records, each with its signatures.  Never changed, only replaced."""

    founding: FoundingRecord
    signature: bytes
    admissions: Mapping[bytes, Admission] = field(default_factory=dict)
    sponsorings: Mapping[bytes, bytes] = field(default_factory=dict)  # signatures of admissions
    rotations: Mapping[bytes, Rotation] = field(default_factory=dict)
    votes: Mapping[tuple[bytes, NodeId], bytes] = field(default_factory=dict)

    @property
    def group_id(self) -> bytes:
        """The id of the group."""
        return record_id(self.founding)

    def cards(self) -> dict[NodeId, Card]:
        """Every machine that was ever added."""
        cards = [self.admissions[name].card for name in sorted(self.admissions)]
        return {card.node_id: card for card in [*cards, self.founding.founder]}

    def voters(self, rotation: bytes) -> frozenset[NodeId]:
        """Who signed a rotation."""
        return frozenset(voter for voted, voter in self.votes if voted == rotation)

    def with_admission(self, admission: Admission, signature: bytes) -> Records:
        """These records and an admission."""
        name = record_id(admission)
        return replace(
            self,
            admissions={**self.admissions, name: admission},
            sponsorings={**self.sponsorings, name: signature},
        )

    def with_vote(self, rotation: Rotation, voter: NodeId, signature: bytes) -> Records:
        """These records and a vote for a rotation, which need not have been known."""
        name = record_id(rotation)
        return replace(
            self,
            rotations={**self.rotations, name: rotation},
            votes={**self.votes, (name, voter): signature},
        )

    def union(self, other: Records) -> Records:
        """Everything either side has.  Both must be of the same group."""
        if self.founding != other.founding:
            raise RosterRefused("These are the member lists of two different groups")
        return Records(
            self.founding,
            min(self.signature, other.signature),
            {**self.admissions, **other.admissions},
            _smaller(self.sponsorings, other.sponsorings),
            {**self.rotations, **other.rotations},
            _smaller(self.votes, other.votes),
        )

    def to_file(self) -> RecordFile:
        """In the one order that makes equal records equal bytes."""
        return RecordFile(
            (self.founding, self.signature),
            tuple((self.admissions[n], self.sponsorings[n]) for n in sorted(self.admissions)),
            tuple(
                (rotation, tuple(sorted(self._votes_for(name))))
                for name, rotation in sorted(self.rotations.items())
            ),
        )

    @classmethod
    def from_file(cls, file: RecordFile, verifier: Verifier) -> Records:
        """The records in a file; every one is checked.  Raises :class:`MalformedFrame`."""
        records = cls(*file.founding)
        for admission, signature in file.admissions:
            records = records.with_admission(admission, signature)
        for rotation, ballots in file.rotations:
            for voter, signature in ballots:
                records = records.with_vote(rotation, voter, signature)
        for fault in _faults(records, verifier):
            raise MalformedFrame(f"The member list is not valid: {fault}")
        return records

    def _votes_for(self, rotation: bytes) -> Iterator[tuple[NodeId, bytes]]:
        return (
            (voter, signature)
            for (voted, voter), signature in self.votes.items()
            if voted == rotation
        )


def _smaller(one: Mapping[K, bytes], other: Mapping[K, bytes]) -> dict[K, bytes]:
    """The union of two mappings; where both have a key, the smaller value."""
    shared = {key: min(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **shared}


def _faults(records: Records, verifier: Verifier) -> Iterator[str]:
    """What is wrong with records that came from outside, worst first; usually nothing."""
    cards = records.cards()
    founder = records.founding.founder
    if not verifier.owns(founder, records.signature, statement(records.founding)):
        yield "its founding is not signed by the founder"
    for card in (founder, *(admission.card for admission in records.admissions.values())):
        if card.name != clean_name(card.name):
            yield "a name has unprintable characters"
    for name, admission in records.admissions.items():
        yield from _admission_faults(records, admission, records.sponsorings[name], verifier)
    for rotation in records.rotations.values():
        yield from _rotation_faults(records, rotation)
    for (name, voter), signature in records.votes.items():
        rotation = records.rotations[name]
        if voter not in rotation.electorate:
            yield "a machine voted that may not"
        elif not verifier.owns(cards[voter], signature, statement(rotation)):
            yield "a vote is not signed by its voter"


def _admission_faults(
    records: Records, admission: Admission, signature: bytes, verifier: Verifier
) -> Iterator[str]:
    sponsor = records.cards().get(admission.sponsor)
    if admission.group_id != records.group_id:
        yield "an admission is of another group"
    elif not _is_generation(records, admission.parent):
        yield "an admission is of an unknown generation"
    elif verifier.node_id_of(admission.card.public_key) != admission.card.node_id:
        yield "an id does not belong to its key"
    elif sponsor is None or admission.sponsor == admission.card.node_id:
        yield "a machine was not added by a member"
    elif not verifier.owns(sponsor, signature, statement(admission)):
        yield "an admission is not signed by its sponsor"


def _rotation_faults(records: Records, rotation: Rotation) -> Iterator[str]:
    electorate = set(rotation.electorate)
    if rotation.group_id != records.group_id:
        yield "a rotation is of another group"
    elif not _is_generation(records, rotation.parent):
        yield "a rotation is of an unknown generation"
    elif not all(_is_sorted(ids) for ids in (rotation.electorate, rotation.keeps)):
        yield "the lists of a rotation are not in order"
    elif rotation.proposer not in electorate or not electorate >= set(rotation.keeps):
        yield "a rotation keeps or is proposed by a machine that may not vote"
    elif rotation.revokes in electorate:
        yield "a rotation lets the revoked machine vote"
    elif not electorate <= records.cards().keys():
        yield "a rotation names a machine that was never added"
    elif rotation.proposer not in records.voters(record_id(rotation)):
        yield "a rotation is not signed by its proposer"


def _is_generation(records: Records, name: bytes) -> bool:
    return name == records.group_id or name in records.rotations


def _is_sorted(ids: tuple[NodeId, ...]) -> bool:
    return list(ids) == sorted(set(ids))


# --------------------------------------------------------------------------------------------------
# What the records of a roster mean: generations, one after another, and who is a member in each.
#
# A generation begins with the founding or with a rotation that was accepted.  Its members are those
# who stayed, and those they added since.  Who stays after a rotation: the voters' list,
# except those who are members only through the revoked machine.  "Through" is taken literally:
# a machine that can still be reached from the founder along sponsors without the revoked one stays.
# The proposer stays too, and so do those that the rotation keeps by name; they count as added by
# the proposer from then on.
#
# Everything here is a function of records and of the chain of accepted rotations, nothing else.

ID_SHOWN = 8
"""Characters of an id that people are shown; enough for `potluck revoke`."""


class Status(StrEnum):
    """Whether a machine is a member of the group."""

    MEMBER = "member"
    NEEDS_PAIRING = "needs_pairing"
    REVOKED = "revoked"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class RosterMember:
    """A machine of the group."""

    card: Card
    sponsors: frozenset[NodeId]  # which members added it; none: a founder
    generation: int  # when it was admitted

    @property
    def node_id(self) -> NodeId:
        """Its id."""
        return self.card.node_id

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.card.name

    @property
    def sponsor(self) -> NodeId:
        """A member that added it; a founder stands for itself."""
        return min(self.sponsors, default=self.node_id)


@dataclass(frozen=True, slots=True)
class Generation:
    """The time between two rotations."""

    number: int
    name: bytes  # the id of the record that began it
    commitment: bytes  # the hash of its secret
    members: Mapping[NodeId, RosterMember]
    roots: frozenset[NodeId]  # members that need no sponsor


@dataclass(frozen=True)
class RosterHistory:
    """Records and the rotations that this machine accepts, in order."""

    records: Records
    chain: tuple[bytes, ...] = ()

    @cached_property
    def generations(self) -> tuple[Generation, ...]:
        """All of them, the present one last."""
        founding = self.records.founding
        founder = RosterMember(founding.founder, frozenset(), 0)
        first = Generation(
            0,
            self.records.group_id,
            founding.commitment,
            {founder.node_id: founder},
            frozenset({founder.node_id}),
        )
        found = [_grown(first, self.records)]
        for name in self.chain:
            found.append(_grown(successor(found[-1], self.records.rotations[name]), self.records))
        return tuple(found)

    @property
    def present(self) -> Generation:
        """The generation we are in."""
        return self.generations[-1]

    def is_member(self, node_id: NodeId) -> bool:
        """Whether the machine belongs to the group now."""
        return node_id in self.present.members

    def status(self, node_id: NodeId) -> Status:
        """Whether the machine is a member now, and if not, why."""
        if self.is_member(node_id):
            return Status.MEMBER
        dropped_by = self.dropped_by(node_id)
        if dropped_by is None:
            return Status.STRANGER
        return Status.REVOKED if dropped_by.revokes == node_id else Status.NEEDS_PAIRING

    def dropped_by(self, node_id: NodeId) -> Rotation | None:
        """The rotation with which the machine ceased to be a member, the last one if several."""
        for generation, name in zip(self.generations[-2::-1], self.chain[::-1], strict=True):
            if node_id in generation.members:
                return self.records.rotations[name]
        return None

    def name_of(self, node_id: NodeId) -> str:
        """What people call the machine; its id if it was never added.

        If another machine has the same name, the beginning of the id tells them apart, so that no
        machine passes for another by taking its name; a name cannot imitate that form either.
        """
        name = self.names.get(node_id)
        if name is None:
            return str(node_id)
        namesakes = sum(name.casefold() == other.casefold() for other in self.names.values())
        return f"{name} ({node_id[:ID_SHOWN]})" if namesakes > 1 or "(" in name else name

    @cached_property
    def names(self) -> dict[NodeId, str]:
        """Every machine that ever was a member, with its last name."""
        return {
            node_id: member.name
            for generation in self.generations
            for node_id, member in generation.members.items()
        }


def successor(before: Generation, rotation: Rotation) -> Generation:
    """The generation that begins with ``rotation``, before any machine is admitted to it."""
    present = {node_id: before.members[node_id] for node_id in rotation.electorate}
    roots = before.roots & present.keys()
    standing = _reached(roots, present)
    staying = _reached({*roots, rotation.proposer, *rotation.keeps}, present)
    vouched = set(rotation.keeps) - standing - {rotation.proposer}
    members = {
        node_id: replace(
            member,
            sponsors=(member.sponsors & staying)
            | ({rotation.proposer} if node_id in vouched else frozenset()),
        )
        for node_id, member in present.items()
        if node_id in staying
    }
    return Generation(
        before.number + 1,
        record_id(rotation),
        rotation.commitment,
        members,
        roots | ({rotation.proposer} - standing),
    )


def _reached(roots: Iterable[NodeId], members: Mapping[NodeId, RosterMember]) -> frozenset[NodeId]:
    """The roots, and all that were added by a machine that is reached."""
    reached = set(roots)
    while more := {
        node_id
        for node_id, member in members.items()
        if node_id not in reached and member.sponsors & reached
    }:
        reached |= more
    return frozenset(reached)


def _grown(generation: Generation, records: Records) -> Generation:
    """The generation with all machines that its members admitted to it."""
    members = dict(generation.members)
    waiting = [
        records.admissions[name]
        for name in sorted(records.admissions)
        if records.admissions[name].parent == generation.name
    ]
    while ready := [admission for admission in waiting if admission.sponsor in members]:
        for admission in ready:
            _admit(members, admission, generation.number)
        waiting = [admission for admission in waiting if admission not in ready]
    return replace(generation, members=members)


def _admit(members: dict[NodeId, RosterMember], admission: Admission, number: int) -> None:
    card, sponsor = admission.card, frozenset({admission.sponsor})
    known = members.get(card.node_id)
    # A machine that is admitted again has one sponsor more, and keeps its place and its name:
    # otherwise any member could give any other a misleading one.
    members[card.node_id] = (
        replace(known, sponsors=known.sponsors | sponsor)
        if known
        else RosterMember(card, sponsor, number)
    )


# --------------------------------------------------------------------------------------------------
# The rules by which a rotation is signed and accepted, and the argument for them.
#
# *A rotation is accepted* by a machine when (1) more than half of the voters it lists have signed,
# (2) more than half of the machines that this machine **counts**, the revoked one left out, have
# signed, and (3) it does not revoke this machine.  A machine counts itself, those it added, the
# roster it got when it was paired, the voters' list of every rotation it accepted, and those that
# most of the other machines it counts list; pairing two machines directly makes them count each
# other at once.  What was accepted stays accepted.  With two machines the revoked one is left out,
# so the other decides alone; with three, both others must sign; with four, two of the three.  A
# machine that is absent may sign later: the rotation waits for it.
#
# *Why a forged rotation is refused by an absentee.*  The forger has the old secret and perhaps the
# key of the machine that was revoked.  Votes need keys, so the secret alone gives none.  With one
# key out of three or more machines it has one vote where two are needed.  It can add machines of
# its own and let them vote; the absentee does not count them, because only the forger lists them.
#
# *Why two rotations of one generation are not both accepted.*  A machine signs at most one of them,
# unless it withdraws a proposal of its own that, as far as it knows, no other has signed.  Two
# majorities of an odd number of machines have one in common.  With an even number the halves can be
# disjoint if each revokes a machine of the other; then the group splits, both sides report it, and
# people pair again.
#
# *What is not promised.*  A majority of machines in wrong hands rules the group; so does one of
# two.  A member that is still trusted can add machines that come to be counted: every admission is
# shown with its sponsor, and whatever a revoked machine added has to be paired again.


@dataclass(frozen=True, slots=True)
class RotationVotes:
    """How far a rotation is, in the eyes of one machine."""

    signed: frozenset[NodeId]
    """Those who signed and count."""
    missing: frozenset[NodeId]
    """Those who may still sign."""
    needed: int
    """How many of those who count must sign."""
    lacking: int
    """How many signatures are lacking at least, for this machine and for the voters' list."""


def majority(voters: int) -> int:
    """The smallest number that is more than half."""
    return voters // 2 + 1


def is_placed(generation: Generation, rotation: Rotation) -> bool:
    """Whether the rotation follows this generation and names only its members."""
    named = {*rotation.electorate, *([rotation.revokes] if rotation.revokes else [])}
    return rotation.parent == generation.name and named <= generation.members.keys()


def lacks(history: RosterHistory, name: bytes) -> int:
    """How many signatures the rotation lacks to have more than half of the voters it lists."""
    voters = len(history.records.rotations[name].electorate)
    return max(0, majority(voters) - len(history.records.voters(name)))


def tally(history: RosterHistory, name: bytes, counted: frozenset[NodeId]) -> RotationVotes:
    """The votes, above all of those who count, the revoked one left out."""
    rotation = history.records.rotations[name]
    voters = history.records.voters(name)
    judges = (counted & history.present.members.keys()) - {rotation.revokes}
    needed = majority(len(judges))
    lacking = max(needed - len(voters & judges), lacks(history, name))
    return RotationVotes(voters & judges, frozenset(rotation.electorate) - voters, needed, lacking)


def advance(
    history: RosterHistory, counted: frozenset[NodeId], me: NodeId
) -> tuple[RosterHistory, frozenset[NodeId]]:
    """The history with every rotation accepted that can be, and whose votes count then."""
    while (name := accepted_next(history, counted, me)) is not None:
        # Most of those who count have signed the voters' list, so they vouch for all on it.
        counted |= frozenset(history.records.rotations[name].electorate)
        history = RosterHistory(history.records, (*history.chain, name))
    return history, counted


def accepted_next(history: RosterHistory, counted: frozenset[NodeId], me: NodeId) -> bytes | None:
    """The rotation that ends the present generation for this machine, if there is one.

    Of several, the one whose proposer has been a member longest; then the later attempt.
    """
    present = history.present

    def rank(name: bytes) -> tuple[bool, int, NodeId, int, bytes]:
        rotation = history.records.rotations[name]
        proposer = present.members[rotation.proposer]
        is_root = rotation.proposer in present.roots
        return not is_root, proposer.generation, proposer.node_id, -rotation.attempt, name

    reached = [
        name
        for name, rotation in _placed(history)
        if rotation.revokes != me and not tally(history, name, counted).lacking
    ]
    return min(reached, key=rank, default=None)


def open_rotations(history: RosterHistory) -> list[bytes]:
    """The rotations that wait for signatures; those their proposer withdrew are left out."""
    return [name for name, _ in _placed(history) if not _is_withdrawn(history, name)]


def objection(
    history: RosterHistory, name: bytes, me: NodeId, counted: frozenset[NodeId]
) -> str | None:
    """Why this machine may not sign the rotation, in words; None if it may."""
    rotation = history.records.rotations.get(name)
    if rotation is None or not is_placed(history.present, rotation):
        return "it does not follow the present generation"
    if me not in rotation.electorate:
        return "this machine has no vote in it"
    if me in history.records.voters(name):
        return "this machine has signed it already"
    if _is_withdrawn(history, name):
        return "its proposer has withdrawn it"
    if signed := signed_by(history, me):
        return f"this machine has signed another one, proposed by {_proposer(history, signed[0])}"
    votes = tally(history, name, counted)
    if len(votes.signed | (votes.missing & counted)) < votes.needed:
        return "it leaves out too many members to be accepted"
    return None


def signed_by(history: RosterHistory, me: NodeId) -> list[bytes]:
    """The rotations of the present generation that a machine has signed."""
    return [name for name, _ in _placed(history) if me in history.records.voters(name)]


def _placed(history: RosterHistory) -> Iterator[tuple[bytes, Rotation]]:
    present = history.present
    for name in sorted(history.records.rotations):
        rotation = history.records.rotations[name]
        if is_placed(present, rotation):
            yield name, rotation


def _is_withdrawn(history: RosterHistory, name: bytes) -> bool:
    rotation = history.records.rotations[name]
    return any(
        other.proposer == rotation.proposer and other.attempt > rotation.attempt
        for _, other in _placed(history)
    )


def _proposer(history: RosterHistory, name: bytes) -> str:
    return history.name_of(history.records.rotations[name].proposer)
