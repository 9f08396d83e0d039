"""The signed records a roster is made of, their one encoding, and their union.

Three kinds: the *founding* of a circle, *admissions* (a member brings in a machine) and *rotations*
(a new secret, perhaps without one machine), the last with the *votes* of members.  A record names
the generation it belongs to by the hash of what began it, so it cannot be moved to another.

The records of two machines are merged by union; where a signer gave two valid signatures for the
same thing the smaller one is kept.  Union is commutative, associative and idempotent, so the order
in which machines meet does not matter.  What the records *mean* is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from potluck.core.cards import Card, Digest, Signature, Verifier, WireId, clean_name
from potluck.errors import DistributedError, MalformedFrame
from potluck.vocabulary import NodeId

__all__ = [
    "Admission",
    "Founding",
    "Record",
    "RecordFile",
    "Records",
    "RosterRefused",
    "Rotation",
    "commitment_to",
    "record_id",
    "statement",
]

_LABEL = b"potluck roster v1 "
_Ids = tuple[WireId, ...]
K = TypeVar("K")


class RosterRefused(DistributedError, ValueError):
    """The rules of the roster do not allow this; the text says which rule."""


class Founding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first member begins a circle; the hash of this record is the circle's id."""

    founder: Card
    commitment: Digest
    nonce: Digest


class Admission(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``sponsor`` brings in a machine, in the generation that ``parent`` began."""

    circle: Digest
    parent: Digest
    card: Card
    sponsor: WireId


class Rotation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A new secret for the members after ``parent``, perhaps without one of them."""

    circle: Digest
    parent: Digest
    proposer: WireId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]  # a later one withdraws the earlier
    electorate: _Ids  # who may vote: every member the proposer knew, without the revoked one
    revokes: WireId | None
    keeps: _Ids  # brought in by the revoked one, and vouched for by the voters
    commitment: Digest  # the hash of the new secret, so that nobody can slip in another


Record: TypeAlias = Founding | Admission | Rotation


class RecordFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All records as they are stored and sent."""

    founding: tuple[Founding, Signature]
    admissions: tuple[tuple[Admission, Signature], ...]
    rotations: tuple[tuple[Rotation, tuple[tuple[WireId, Signature], ...]], ...]


def commitment_to(secret: bytes) -> bytes:
    """What stands for a secret in a record; 256 random bits cannot be guessed from it."""
    return hashlib.sha256(_LABEL + b"secret\0" + secret).digest()


def statement(record: Record) -> bytes:
    """The bytes that are signed."""
    kind = type(record).__name__.lower().encode()
    return _LABEL + kind + b"\0" + msgspec.msgpack.encode(record)


def record_id(record: Record) -> bytes:
    """The hash by which others refer to the record."""
    return hashlib.sha256(statement(record)).digest()


@dataclass(frozen=True)
class Records:
    """A set of records, each with its signatures.  Never changed, only replaced."""

    founding: Founding
    signature: bytes
    admissions: Mapping[bytes, Admission] = field(default_factory=dict)
    sponsorings: Mapping[bytes, bytes] = field(default_factory=dict)  # signatures of admissions
    rotations: Mapping[bytes, Rotation] = field(default_factory=dict)
    votes: Mapping[tuple[bytes, NodeId], bytes] = field(default_factory=dict)

    @property
    def circle(self) -> bytes:
        """The id of the circle."""
        return record_id(self.founding)

    def cards(self) -> dict[NodeId, Card]:
        """Every machine that was ever brought in."""
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
        """Everything either side has.  Both must be of the same circle."""
        if self.founding != other.founding:
            raise RosterRefused("These are the rosters of two different circles")
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
            raise MalformedFrame(f"The roster is not valid: {fault}")
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
            yield "a name cannot be shown"
    for name, admission in records.admissions.items():
        yield from _admission_faults(records, admission, records.sponsorings[name], verifier)
    for rotation in records.rotations.values():
        yield from _rotation_faults(records, rotation)
    for (name, voter), signature in records.votes.items():
        rotation = records.rotations[name]
        if voter not in rotation.electorate:
            yield "somebody voted who may not"
        elif not verifier.owns(cards[voter], signature, statement(rotation)):
            yield "a vote is not signed by its voter"


def _admission_faults(
    records: Records, admission: Admission, signature: bytes, verifier: Verifier
) -> Iterator[str]:
    sponsor = records.cards().get(admission.sponsor)
    if admission.circle != records.circle:
        yield "an admission is of another circle"
    elif not _is_generation(records, admission.parent):
        yield "an admission is of an unknown generation"
    elif verifier.node_id_of(admission.card.public_key) != admission.card.node_id:
        yield "an id does not belong to its key"
    elif sponsor is None or admission.sponsor == admission.card.node_id:
        yield "a machine was brought in by nobody"
    elif not verifier.owns(sponsor, signature, statement(admission)):
        yield "an admission is not signed by its sponsor"


def _rotation_faults(records: Records, rotation: Rotation) -> Iterator[str]:
    electorate = set(rotation.electorate)
    if rotation.circle != records.circle:
        yield "a rotation is of another circle"
    elif not _is_generation(records, rotation.parent):
        yield "a rotation is of an unknown generation"
    elif not all(_is_sorted(ids) for ids in (rotation.electorate, rotation.keeps)):
        yield "the lists of a rotation are not in order"
    elif rotation.proposer not in electorate or not electorate >= set(rotation.keeps):
        yield "a rotation keeps or is proposed by somebody who may not vote"
    elif rotation.revokes in electorate:
        yield "a rotation lets the revoked machine vote"
    elif not electorate <= records.cards().keys():
        yield "a rotation names a machine that nobody brought in"
    elif rotation.proposer not in records.voters(record_id(rotation)):
        yield "a rotation is not signed by its proposer"


def _is_generation(records: Records, name: bytes) -> bool:
    return name == records.circle or name in records.rotations


def _is_sorted(ids: tuple[NodeId, ...]) -> bool:
    return list(ids) == sorted(set(ids))
