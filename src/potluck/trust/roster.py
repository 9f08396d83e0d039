"""The roster: who belongs to a namespace, by whom they were brought in, and which secret is theirs.

A roster never changes; each method returns another.  It has three parts: *records*, signed and
merged by union (:mod:`potluck.trust.roster_records`); the *chain* of rotations this machine
accepts, from which members follow (:mod:`potluck.trust.roster_records`); and whose votes *count*
for this machine, the rules for which are argued in :mod:`potluck.trust.roster_records`.  What other
machines tell comes in through :func:`potluck.trust.roster.take`.

The roster holds no secret, only hashes of secrets.  A member with the new secret sends it only to
:meth:`Roster.members_after` the rotation, over a connection on which the receiver has proved its
node key; the receiver checks it with :meth:`Roster.is_secret`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import msgspec

from potluck._decode import decode_msgpack
from potluck._types import NodeId
from potluck.errors import MalformedFrame
from potluck.trust.roster_records import (
    Admission,
    Card,
    Digest,
    FoundingRecord,
    Generation,
    RecordFile,
    Records,
    RosterHistory,
    RosterMember,
    RosterRefused,
    Rotation,
    RotationVotes,
    Signer,
    Status,
    Verifier,
    WireId,
    advance,
    commitment_to,
    is_placed,
    lacks,
    objection,
    open_rotations,
    signed_by,
    statement,
    successor,
    tally,
)

# --------------------------------------------------------------------------------------------------
# The sentences about a roster that people read: in the log, the command and the dashboard.


def explain(history: RosterHistory, node_id: NodeId) -> str:
    """Whether a machine is a member of the group and why, in one sentence."""
    name = history.name_of(node_id)
    match history.status(node_id):
        case Status.MEMBER:
            return _explain_member(history, node_id, name)
        case Status.STRANGER:
            return f"No machine with the id {node_id} has ever been in this group."
        case Status.REVOKED:
            by = history.dropped_by(node_id)
            assert by is not None
            return (
                f"{name} was revoked by {history.name_of(by.proposer)}; "
                "only pairing it again brings it back."
            )
    return _explain_dropped(history, node_id, name)


def _explain_member(history: RosterHistory, node_id: NodeId, name: str) -> str:
    member = history.present.members[node_id]
    if node_id == history.records.founding.founder.node_id:
        return f"{name} is a member; it started this group."
    if not member.sponsors:
        return f"{name} is a member; it stayed when it revoked the machine that added it."
    sponsors = listed(history.name_of(sponsor) for sponsor in member.sponsors)
    return f"{name} is a member, added by {sponsors}."


def _explain_dropped(history: RosterHistory, node_id: NodeId, name: str) -> str:
    rotation = history.dropped_by(node_id)
    assert rotation is not None
    if node_id not in rotation.electorate:
        return (
            f"{name} was added while the secret was being changed; "
            "it has to be paired again, or renewed by the machine that added it."
        )
    assert rotation.revokes is not None  # nothing else drops a machine that had a vote
    revoked = history.name_of(rotation.revokes)
    return f"{name} was added through {revoked}, which was revoked; it has to be paired again."


def aim(history: RosterHistory, rotation: Rotation) -> str:
    """What a rotation is for."""
    if rotation.revokes is None:
        return f"The new secret that {history.name_of(rotation.proposer)} proposed"
    return f"Revoking {history.name_of(rotation.revokes)}"


def progress(history: RosterHistory, rotation: Rotation, votes: RotationVotes) -> str:
    """What a pending rotation waits for."""
    if not votes.lacking:
        return f"{aim(history, rotation)} has the signatures it needs."
    missing = listed(history.name_of(node_id) for node_id in votes.missing)
    more = "one more signature" if votes.lacking == 1 else f"{votes.lacking} more signatures"
    return f"{aim(history, rotation)} needs {more}. These machines have not signed: {missing}."


def shortfall(history: RosterHistory, rotation: Rotation, votes: RotationVotes) -> str:
    """Why a rotation that others have accepted is not accepted here."""
    signed = listed(history.name_of(node_id) for node_id in votes.signed)
    return (
        f"{aim(history, rotation)} is signed by {signed}, but {votes.needed} signatures of "
        "machines that this one knew are needed"
    )


def listed(names: Iterable[str]) -> str:
    """Names for a sentence.

    >>> listed(["nas", "desktop", "laptop"])
    'desktop, laptop and nas'
    """
    *most, last = sorted(names) or ["none"]
    return f"{', '.join(most)} and {last}" if most else last


# --------------------------------------------------------------------------------------------------

MAX_BYTES = 56 << 10  # what fits into a pairing: 16 machines and about 30 rotations
MAX_FILE_BYTES = 1 << 20  # with what this machine alone remembers
ROSTER_VERSION = 1


@dataclass(frozen=True, slots=True)
class PendingRotation:
    """A rotation that waits for signatures."""

    name: bytes
    rotation: Rotation
    reason: str


class _Trust(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    counted: tuple[WireId, ...]
    unconfirmed: tuple[tuple[WireId, WireId], ...]


class _File(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: Literal[1]  # a change raises HOME_FORMAT and OLDEST_PROTOCOL, for it is also sent
    records: RecordFile
    chain: tuple[Digest, ...]
    trust: _Trust | None


def _version_of(data: bytes) -> int | None:
    """The version of a member list that cannot be read, if that can be: its second byte."""
    is_list = len(data) > 1 and data[0] & 0xF0 == 0x90 and data[1] < 0x80  # noqa: PLR2004
    return data[1] if is_list else None


@dataclass(frozen=True)
class Roster:
    """A namespace's members as one machine sees them."""

    history: RosterHistory
    counted: frozenset[NodeId]
    """Whose votes count here; a machine that is no longer a member has no vote all the same."""
    unconfirmed: frozenset[tuple[NodeId, NodeId]] = frozenset()
    """(of whom, from whom): members that do not count yet, and which of those who count tell so."""

    @classmethod
    def found(cls, founder: Signer, commitment: bytes, nonce: bytes) -> Roster:
        """A new group with one member; ``nonce`` is 32 random bytes."""
        founding = FoundingRecord(founder.card, commitment, nonce)
        records = Records(founding, founder.sign(statement(founding)))
        return cls(RosterHistory(records), frozenset({founder.node_id}))

    @classmethod
    def from_bytes(cls, data: bytes, verifier: Verifier, *, limit: int = MAX_BYTES) -> Roster:
        """The roster in ``data``, every signature checked; raises :class:`MalformedFrame`.

        What this machine wrote ``with_trust`` is read with ``limit=MAX_FILE_BYTES``.
        """
        if len(data) > limit:
            raise MalformedFrame(f"A member list has at most {limit} bytes, not {len(data)}")
        try:
            file = decode_msgpack(data, _File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedFrame(
                "This is not a member list of a known version", got=_version_of(data)
            ) from error
        history = RosterHistory(Records.from_file(file.records, verifier))
        for name in file.chain:
            rotation = history.records.rotations.get(name)
            if rotation is None or not is_placed(history.present, rotation):
                raise MalformedFrame("The member list is not valid: its rotations are not a chain")
            if lacks(history, name):
                raise MalformedFrame("The member list is not valid: a rotation lacks its majority")
            history = replace(history, chain=(*history.chain, name))
        if file.trust is None:
            return cls(history, frozenset(history.present.members))
        return cls(history, frozenset(file.trust.counted), frozenset(file.trust.unconfirmed))

    def to_bytes(self, *, with_trust: bool = False) -> bytes:
        """For others, or ``with_trust`` for this machine's own disk; equal rosters, equal bytes."""
        trust = _Trust(tuple(sorted(self.counted)), tuple(sorted(self.unconfirmed)))
        file = _File(
            1, self.history.records.to_file(), self.history.chain, trust if with_trust else None
        )
        return msgspec.msgpack.encode(file)

    def adopted(self) -> Roster:
        """As the guest of a pairing stores it: all its members count."""
        return Roster(self.history, frozenset(self.history.present.members))

    # --- questions ---

    @property
    def group_id(self) -> bytes:
        """The id of the group; it stays the same when the secret changes."""
        return self.history.records.group_id

    @property
    def generation(self) -> Generation:
        """The present generation."""
        return self.history.present

    @property
    def members(self) -> tuple[RosterMember, ...]:
        """The machines of the group, by name."""
        return tuple(sorted(self.generation.members.values(), key=lambda m: (m.name, m.node_id)))

    def is_member(self, node_id: NodeId) -> bool:
        """Whether a machine that proves this id belongs to the group."""
        return self.history.is_member(node_id)

    def status(self, node_id: NodeId) -> Status:
        """Whether a machine is a member, and if not, why."""
        return self.history.status(node_id)

    def explain(self, node_id: NodeId) -> str:
        """The same in one sentence."""
        return explain(self.history, node_id)

    def is_secret(self, secret: bytes) -> bool:
        """Whether this is the secret of the present generation."""
        return commitment_to(secret) == self.generation.commitment

    @property
    def pending(self) -> tuple[PendingRotation, ...]:
        """The rotations that wait for signatures, each with its reason."""
        return tuple(
            PendingRotation(name, rotation, progress(self.history, rotation, votes))
            for name in open_rotations(self.history)
            for rotation in [self.history.records.rotations[name]]
            for votes in [tally(self.history, name, self.counted)]
        )

    def members_after(self, name: bytes) -> frozenset[NodeId]:
        """Who may be given the secret of a rotation: those who are members after it."""
        rotation = self.history.records.rotations[name]
        for generation in self.history.generations:
            if is_placed(generation, rotation):
                return frozenset(successor(generation, rotation).members)
        return frozenset()

    def objection(self, name: bytes, me: NodeId) -> str | None:
        """Why this machine may not sign a rotation, in words; None if it may."""
        return objection(self.history, name, me, self.counted)

    # --- changes by this machine ---

    def admit(self, card: Card, sponsor: Signer) -> Roster:
        """Add a machine that was paired here."""
        self._require_member(sponsor.node_id)
        if card.node_id == sponsor.node_id:
            raise RosterRefused("A machine cannot add itself")
        admission = Admission(self.group_id, self.generation.name, card, sponsor.node_id)
        records = self.history.records.with_admission(admission, sponsor.sign(statement(admission)))
        roster = self._changed(records, sponsor.node_id)
        return replace(roster, counted=roster.counted | {card.node_id})

    def rotate(self, by: Signer, commitment: bytes) -> Roster:
        """Propose a new secret for everybody."""
        return self._propose(by, commitment, None, ())

    def revoke(
        self, target: NodeId, by: Signer, commitment: bytes, keeps: Iterable[NodeId] = ()
    ) -> Roster:
        """Propose a new secret for everybody but one, and those who are here only through it.

        ``keeps`` are such machines that shall stay all the same.
        """
        if not self.is_member(target):
            raise RosterRefused(self.explain(target), got=target)
        if target == by.node_id:
            raise RosterRefused("A machine cannot revoke itself", hint="Use `potluck unpair`.")
        return self._propose(by, commitment, target, keeps)

    def sign(self, name: bytes, by: Signer) -> Roster:
        """Vote for a rotation that another machine proposed."""
        if problem := self.objection(name, by.node_id):
            raise RosterRefused(f"The change cannot be signed: {problem}")
        rotation = self.history.records.rotations[name]
        records = self.history.records.with_vote(rotation, by.node_id, by.sign(statement(rotation)))
        return self._changed(records, by.node_id)

    def renew(self, by: Signer) -> Roster:
        """Bring in again whom ``by`` brought in while the secret was being changed."""
        roster = self
        for generation in self.history.generations[:-1]:
            for member in generation.members.values():
                rotation = self.history.dropped_by(member.node_id)
                if (
                    by.node_id in member.sponsors
                    and self.status(member.node_id) is Status.NEEDS_PAIRING
                    and rotation is not None
                    and member.node_id not in rotation.electorate
                ):
                    roster = roster.admit(member.card, by)
        return roster

    def _propose(
        self, by: Signer, commitment: bytes, revokes: NodeId | None, keeps: Iterable[NodeId]
    ) -> Roster:
        self._require_member(by.node_id)
        electorate = self.generation.members.keys() - {revokes}
        kept = tuple(sorted(set(keeps)))
        if strangers := set(kept) - electorate:
            raise RosterRefused(f"{min(strangers)} cannot be kept: it is not a member")
        rotation = Rotation(
            self.group_id,
            self.generation.name,
            by.node_id,
            self._attempt(by.node_id),
            tuple(sorted(electorate)),
            revokes,
            kept,
            commitment,
        )
        signature = by.sign(statement(rotation))
        records = self.history.records.with_vote(rotation, by.node_id, signature)
        return self._changed(records, by.node_id)

    def _attempt(self, me: NodeId) -> int:
        """The number of our next proposal; refused while others rely on an earlier vote of ours."""
        records = self.history.records
        earlier = signed_by(self.history, me)
        for name in earlier:
            if records.voters(name) != {me}:
                votes = tally(self.history, name, self.counted)
                reason = progress(self.history, records.rotations[name], votes)
                raise RosterRefused(f"Another change is pending. {reason}")
        return max((records.rotations[name].attempt + 1 for name in earlier), default=0)

    def _changed(self, records: Records, me: NodeId) -> Roster:
        """With more records, and every rotation accepted that can be."""
        history, counted = advance(RosterHistory(records, self.history.chain), self.counted, me)
        roster = replace(self, history=history, counted=counted)
        if len(roster.to_bytes()) > MAX_BYTES:
            raise RosterRefused(
                "The history of this group is full",
                hint="Start a new one: `potluck unpair` on each machine, then pair them again.",
            )
        return roster

    def _require_member(self, me: NodeId) -> None:
        if not self.is_member(me):
            raise RosterRefused(self.explain(me), got=me)


# --------------------------------------------------------------------------------------------------
# What a machine does with the roster that another one shows it, whenever two members connect.
#
# Records are merged by union, no matter which machine sent them; which rotations are *accepted* is
# judged by what this machine knew before.  That is the whole protection of an absentee, so this
# function is the only way in for a roster from outside (a pairing excepted, where a person vouched
# for the host).


class MergeOutcome(StrEnum):
    """What an offered roster means for this machine."""

    CURRENT = "current"
    """We are where the other is, or further."""
    MOVED_ON = "moved_on"
    """We have accepted a new secret: ask the sender for it."""
    SIGN = "sign"
    """The other is further; our signature would let us follow."""
    PAIR_AGAIN = "pair_again"
    """The other is further, and we cannot follow without a person."""
    REVOKED = "revoked"
    """We are revoked, by all the votes that we count."""
    REFUSED = "refused"
    """The other is not a member of our group; nothing was merged."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The roster after an offer, what it means, and why."""

    roster: Roster
    outcome: MergeOutcome
    reason: str


def take(mine: Roster, offered: Roster, sender: NodeId, me: NodeId) -> Taken:
    """Merge what ``sender``, who has proved its id, offers to this machine ``me``."""
    if offered.group_id != mine.group_id:
        return Taken(
            mine, MergeOutcome.REFUSED, "The member list offered is that of another group."
        )
    records = mine.history.records.union(offered.history.records)
    history, counted = advance(RosterHistory(records, mine.history.chain), mine.counted, me)
    merged = replace(mine, history=history, counted=counted)
    # A machine whose own vote ends its membership must still be able to deliver that vote.
    if not (mine.is_member(sender) or merged.is_member(sender)):
        return Taken(mine, MergeOutcome.REFUSED, merged.explain(sender))
    if len(merged.to_bytes()) > MAX_BYTES:
        reason = "The two member lists together have too long a history. Pair this machine again."
        return Taken(mine, MergeOutcome.PAIR_AGAIN, reason)
    # Whom the sender tells of counts from the next offer on, never for this one.
    outcome, reason = _judge(mine, merged, offered, me)
    return Taken(_heard(merged, offered, sender, me), outcome, reason)


def _judge(before: Roster, merged: Roster, offered: Roster, me: NodeId) -> tuple[MergeOutcome, str]:
    ours, theirs = merged.history.chain, offered.history.chain
    if not merged.is_member(me):
        return MergeOutcome.PAIR_AGAIN, merged.explain(me)
    if ours[: len(theirs)] == theirs:
        moved = ours != before.history.chain
        reason = "This machine has accepted every change that the other one has."
        return (MergeOutcome.MOVED_ON if moved else MergeOutcome.CURRENT), reason
    if theirs[: len(ours)] != ours:
        reason = "The group has split: the other machine accepted another change of the secret."
        return MergeOutcome.PAIR_AGAIN, f"{reason} Pair again with one side."
    name = theirs[len(ours)]
    rotation = merged.history.records.rotations[name]
    votes = tally(merged.history, name, merged.counted)
    if not votes.lacking:  # only our own revocation is not accepted in spite of its votes
        proposer = merged.history.name_of(rotation.proposer)
        return (
            MergeOutcome.REVOKED,
            f"{proposer} and a majority of the machines revoked this machine.",
        )
    reason = shortfall(merged.history, rotation, votes)
    if merged.objection(name, me) is None:
        return MergeOutcome.SIGN, f"{reason}; this machine may sign it too."
    return MergeOutcome.PAIR_AGAIN, f"{reason}. Pair this machine again."


def _heard(merged: Roster, offered: Roster, sender: NodeId, me: NodeId) -> Roster:
    """Remember whom the sender lists, and count those whom most of those who count list."""
    members = merged.generation.members.keys()
    unknown = (offered.generation.members.keys() & members) - merged.counted
    told = {(of, sender) for of in unknown} if sender in merged.counted else set()
    unconfirmed = merged.unconfirmed | told
    judges = (merged.counted & members) - {me}
    confirmed = {
        node_id
        for node_id in members - merged.counted
        if 2 * sum(of == node_id and by in judges for of, by in unconfirmed) > len(judges)
    }
    left = frozenset((of, by) for of, by in unconfirmed if of in members - confirmed)
    return replace(merged, counted=merged.counted | confirmed, unconfirmed=left)
