"""The rules by which a rotation is signed and accepted, and the argument for them.

*A rotation is accepted* by a machine when (1) more than half of the voters it lists have signed,
(2) more than half of the machines that this machine **counts**, the revoked one left out, have
signed, and (3) it does not revoke this machine.  A machine counts itself, those it brought in, the
roster it got when it was paired, the voters' list of every rotation it accepted, and whoever most
of the other machines it counts tell of; pairing two machines directly makes them count each other
at once.  What was accepted stays accepted.  With two machines the revoked one is left out, so the
other decides alone; with three, both others must sign; with four, two of the three.  Who is absent
may sign later: the rotation waits for it.

*Why a forged rotation is refused by an absentee.*  The forger has the old secret and perhaps the
key of the machine that was revoked.  Votes need keys, so the secret alone gives none.  With one key
out of three or more machines it has one vote where two are needed.  It can bring in machines of its
own and let them vote; the absentee does not count them, because only the forger tells of them.

*Why two rotations of one generation are not both accepted.*  A machine signs at most one of them,
unless it withdraws a proposal of its own that, as far as it knows, nobody else has signed.  Two
groups that are each more than half of an odd number of machines have one in common.  With an even
number the halves can be disjoint if each revokes somebody of the other; then the circle splits,
both sides say so, and people pair again.

*What is not promised.*  A majority of machines in wrong hands rules the circle; so does one of two.
A member that is still trusted can bring in machines that come to be counted: every admission is
shown with its sponsor, and whatever a revoked machine brought in has to be paired again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from potluck.core.roster_history import Generation, History
from potluck.core.roster_records import Rotation
from potluck.vocabulary import NodeId

__all__ = [
    "Tally",
    "accepted_next",
    "advance",
    "is_placed",
    "lacks",
    "objection",
    "open_rotations",
    "signed_by",
    "tally",
]


@dataclass(frozen=True, slots=True)
class Tally:
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
    """Whether the rotation follows this generation and names nobody else than its members."""
    named = {*rotation.electorate, *([rotation.revokes] if rotation.revokes else [])}
    return rotation.parent == generation.name and named <= generation.members.keys()


def lacks(history: History, name: bytes) -> int:
    """How many signatures the rotation lacks to have more than half of the voters it lists."""
    voters = len(history.records.rotations[name].electorate)
    return max(0, majority(voters) - len(history.records.voters(name)))


def tally(history: History, name: bytes, counted: frozenset[NodeId]) -> Tally:
    """The votes, above all of those who count, the revoked one left out."""
    rotation = history.records.rotations[name]
    voters = history.records.voters(name)
    judges = (counted & history.present.members.keys()) - {rotation.revokes}
    needed = majority(len(judges))
    lacking = max(needed - len(voters & judges), lacks(history, name))
    return Tally(voters & judges, frozenset(rotation.electorate) - voters, needed, lacking)


def advance(
    history: History, counted: frozenset[NodeId], me: NodeId
) -> tuple[History, frozenset[NodeId]]:
    """The history with every rotation accepted that can be, and whose votes count then."""
    while (name := accepted_next(history, counted, me)) is not None:
        # Most of those who count have signed the voters' list, so they tell of everybody on it.
        counted |= frozenset(history.records.rotations[name].electorate)
        history = History(history.records, (*history.chain, name))
    return history, counted


def accepted_next(history: History, counted: frozenset[NodeId], me: NodeId) -> bytes | None:
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


def open_rotations(history: History) -> list[bytes]:
    """The rotations that wait for signatures; those their proposer withdrew are left out."""
    return [name for name, _ in _placed(history) if not _is_withdrawn(history, name)]


def objection(history: History, name: bytes, me: NodeId, counted: frozenset[NodeId]) -> str | None:
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
        return "it leaves out so many members that it can never be accepted"
    return None


def signed_by(history: History, me: NodeId) -> list[bytes]:
    """The rotations of the present generation that a machine has signed."""
    return [name for name, _ in _placed(history) if me in history.records.voters(name)]


def _placed(history: History) -> Iterator[tuple[bytes, Rotation]]:
    present = history.present
    for name in sorted(history.records.rotations):
        rotation = history.records.rotations[name]
        if is_placed(present, rotation):
            yield name, rotation


def _is_withdrawn(history: History, name: bytes) -> bool:
    rotation = history.records.rotations[name]
    return any(
        other.proposer == rotation.proposer and other.attempt > rotation.attempt
        for _, other in _placed(history)
    )


def _proposer(history: History, name: bytes) -> str:
    return history.name_of(history.records.rotations[name].proposer)
