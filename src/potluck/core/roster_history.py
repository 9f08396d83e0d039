"""What the records of a roster mean: generations, one after another, and who is a member in each.

A generation begins with the founding or with a rotation that was accepted.  Its members are those
who stayed, and whomever they brought in since.  Who stays after a rotation: the voters' list,
except those who are members only through the revoked machine.  "Through" is taken literally:
whoever can still be reached from the founder along sponsors without the revoked one stays.  The
proposer stays too, and so do those whom the rotation keeps by name; they count as brought in by
the proposer from then on.

Everything here is a function of records and of the chain of accepted rotations, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from potluck.core.cards import Card
from potluck.core.roster_records import Admission, Records, Rotation, record_id
from potluck.vocabulary import NodeId

__all__ = ["ID_SHOWN", "Generation", "History", "Member", "Status"]

ID_SHOWN = 8
"""Characters of an id that people are shown; enough for `potluck revoke`."""


class Status(StrEnum):
    """How a machine stands to the circle."""

    MEMBER = "member"
    NEEDS_PAIRING = "needs_pairing"
    REVOKED = "revoked"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class Member:
    """A machine of the circle."""

    card: Card
    sponsors: frozenset[NodeId]  # who brought it in, as far as they are members; none: a founder
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
        """One who brought it in; a founder stands for itself."""
        return min(self.sponsors, default=self.node_id)


@dataclass(frozen=True, slots=True)
class Generation:
    """The time between two rotations."""

    number: int
    name: bytes  # the id of the record that began it
    commitment: bytes  # the hash of its secret
    members: Mapping[NodeId, Member]
    roots: frozenset[NodeId]  # members that need no sponsor


@dataclass(frozen=True)
class History:
    """Records and the rotations that this machine accepts, in order."""

    records: Records
    chain: tuple[bytes, ...] = ()

    @cached_property
    def generations(self) -> tuple[Generation, ...]:
        """All of them, the present one last."""
        founding = self.records.founding
        founder = Member(founding.founder, frozenset(), 0)
        first = Generation(
            0,
            self.records.circle,
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
        """Whether the machine belongs to the circle now."""
        return node_id in self.present.members

    def status(self, node_id: NodeId) -> Status:
        """How the machine stands to the circle now."""
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
        """What people call the machine; its id if nobody ever brought it in.

        Where another has the same name the beginning of the id tells them apart, so that nobody
        can be taken for another by calling itself like it; a name cannot pretend to be that either.
        """
        name = self.names.get(node_id)
        if name is None:
            return str(node_id)
        namesakes = sum(name.casefold() == other.casefold() for other in self.names.values())
        return f"{name} ({node_id[:ID_SHOWN]})" if namesakes > 1 or "(" in name else name

    @cached_property
    def names(self) -> dict[NodeId, str]:
        """Everybody who ever was a member, by the name it had last."""
        return {
            node_id: member.name
            for generation in self.generations
            for node_id, member in generation.members.items()
        }


def successor(before: Generation, rotation: Rotation) -> Generation:
    """The generation that begins with ``rotation``, before anybody is admitted to it."""
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


def _reached(roots: Iterable[NodeId], members: Mapping[NodeId, Member]) -> frozenset[NodeId]:
    """The roots and everybody whom somebody reached has brought in."""
    reached = set(roots)
    while more := {
        node_id
        for node_id, member in members.items()
        if node_id not in reached and member.sponsors & reached
    }:
        reached |= more
    return frozenset(reached)


def _grown(generation: Generation, records: Records) -> Generation:
    """The generation with everybody who was admitted to it by its members."""
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


def _admit(members: dict[NodeId, Member], admission: Admission, number: int) -> None:
    card, sponsor = admission.card, frozenset({admission.sponsor})
    known = members.get(card.node_id)
    # Whoever is admitted again has one sponsor more, and keeps its place and its name: otherwise
    # any member could give any other a misleading one.
    members[card.node_id] = (
        replace(known, sponsors=known.sponsors | sponsor)
        if known
        else Member(card, sponsor, number)
    )
