"""The roster: who belongs to a namespace, by whom they were brought in, and which secret is theirs.

A roster never changes; each method returns another.  It has three parts: *records*, signed and
merged by union (:mod:`potluck.core.roster_records`); the *chain* of rotations this machine accepts,
from which members follow (:mod:`potluck.core.roster_history`); and whose votes *count* for this
machine, the rules for which are argued in :mod:`potluck.core.roster_votes`.  What other machines
tell comes in through :func:`potluck.core.roster_exchange.take`.

The roster holds no secret, only hashes of secrets.  A new secret is handed by whoever has it to
:meth:`Roster.heirs` of the rotation alone, over a connection on which the receiver has proved its
node key; the receiver checks it with :meth:`Roster.is_secret`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from potluck.core.cards import Card, Digest, Signer, Verifier, WireId
from potluck.core.roster_history import Generation, History, Member, Status, successor
from potluck.core.roster_records import (
    Admission,
    Founding,
    RecordFile,
    Records,
    RosterRefused,
    Rotation,
    commitment_to,
    statement,
)
from potluck.core.roster_votes import (
    advance,
    is_placed,
    lacks,
    objection,
    open_rotations,
    signed_by,
    tally,
)
from potluck.core.roster_words import explain, progress
from potluck.decoding import decode_msgpack
from potluck.errors import MalformedFrame
from potluck.vocabulary import NodeId

__all__ = [
    "MAX_BYTES",
    "MAX_FILE_BYTES",
    "Member",
    "Pending",
    "Roster",
    "RosterRefused",
    "Status",
    "commitment_to",
]

MAX_BYTES = 56 << 10  # what fits into a pairing: 16 machines and about 30 rotations
MAX_FILE_BYTES = 1 << 20  # with what this machine alone remembers


@dataclass(frozen=True, slots=True)
class Pending:
    """A rotation that waits for signatures."""

    name: bytes
    rotation: Rotation
    reason: str


class _Trust(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    counted: tuple[WireId, ...]
    hearsay: tuple[tuple[WireId, WireId], ...]


class _File(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: Literal[1]
    records: RecordFile
    chain: tuple[Digest, ...]
    trust: _Trust | None


@dataclass(frozen=True)
class Roster:
    """A namespace's members as one machine sees them."""

    history: History
    counted: frozenset[NodeId]
    """Whose votes count here; whoever is no member any more has none all the same."""
    hearsay: frozenset[tuple[NodeId, NodeId]] = frozenset()
    """(of whom, from whom): members that do not count yet, and which of those who count tell so."""

    @classmethod
    def found(cls, founder: Signer, commitment: bytes, nonce: bytes) -> Roster:
        """A new circle with one member; ``nonce`` is 32 random bytes."""
        founding = Founding(founder.card, commitment, nonce)
        records = Records(founding, founder.sign(statement(founding)))
        return cls(History(records), frozenset({founder.node_id}))

    @classmethod
    def from_bytes(cls, data: bytes, verifier: Verifier, *, limit: int = MAX_BYTES) -> Roster:
        """The roster in ``data``, every signature checked; raises :class:`MalformedFrame`.

        What this machine wrote ``with_trust`` is read with ``limit=MAX_FILE_BYTES``.
        """
        if len(data) > limit:
            raise MalformedFrame(f"A roster has at most {limit} bytes, not {len(data)}")
        try:
            file = decode_msgpack(data, _File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedFrame("This is not a roster of a version we know") from error
        history = History(Records.from_file(file.records, verifier))
        for name in file.chain:
            rotation = history.records.rotations.get(name)
            if rotation is None or not is_placed(history.present, rotation):
                raise MalformedFrame("The roster is not valid: its rotations are not a chain")
            if lacks(history, name):
                raise MalformedFrame("The roster is not valid: a rotation lacks its majority")
            history = replace(history, chain=(*history.chain, name))
        if file.trust is None:
            return cls(history, frozenset(history.present.members))
        return cls(history, frozenset(file.trust.counted), frozenset(file.trust.hearsay))

    def to_bytes(self, *, with_trust: bool = False) -> bytes:
        """For others, or ``with_trust`` for this machine's own disk; equal rosters, equal bytes."""
        trust = _Trust(tuple(sorted(self.counted)), tuple(sorted(self.hearsay)))
        file = _File(
            1, self.history.records.to_file(), self.history.chain, trust if with_trust else None
        )
        return msgspec.msgpack.encode(file)

    def adopted(self) -> Roster:
        """As the guest of a pairing takes it over: all its members count."""
        return Roster(self.history, frozenset(self.history.present.members))

    # --- questions ---

    @property
    def circle(self) -> bytes:
        """The id of the circle, the same whatever the secret is."""
        return self.history.records.circle

    @property
    def generation(self) -> Generation:
        """The present generation."""
        return self.history.present

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who belongs to the circle, by name."""
        return tuple(sorted(self.generation.members.values(), key=lambda m: (m.name, m.node_id)))

    def is_member(self, node_id: NodeId) -> bool:
        """Whether a machine that proves this id belongs to the circle."""
        return self.history.is_member(node_id)

    def status(self, node_id: NodeId) -> Status:
        """How a machine stands to the circle."""
        return self.history.status(node_id)

    def explain(self, node_id: NodeId) -> str:
        """The same in one sentence."""
        return explain(self.history, node_id)

    def is_secret(self, secret: bytes) -> bool:
        """Whether this is the secret of the present generation."""
        return commitment_to(secret) == self.generation.commitment

    @property
    def pending(self) -> tuple[Pending, ...]:
        """The rotations that wait for signatures, each with its reason."""
        return tuple(
            Pending(name, rotation, progress(self.history, rotation, votes))
            for name in open_rotations(self.history)
            for rotation in [self.history.records.rotations[name]]
            for votes in [tally(self.history, name, self.counted)]
        )

    def heirs(self, name: bytes) -> frozenset[NodeId]:
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
        """Bring in a machine that was paired here."""
        self._require_member(sponsor.node_id)
        if card.node_id == sponsor.node_id:
            raise RosterRefused("A machine cannot bring in itself")
        admission = Admission(self.circle, self.generation.name, card, sponsor.node_id)
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
        """Vote for a rotation somebody else proposed."""
        if problem := self.objection(name, by.node_id):
            raise RosterRefused(f"The rotation cannot be signed: {problem}")
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
            raise RosterRefused(f"{min(strangers)} cannot be kept: it is no member")
        rotation = Rotation(
            self.circle,
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
                raise RosterRefused(f"One change at a time. {reason}")
        return max((records.rotations[name].attempt + 1 for name in earlier), default=0)

    def _changed(self, records: Records, me: NodeId) -> Roster:
        """With more records, and every rotation accepted that can be."""
        history, counted = advance(History(records, self.history.chain), self.counted, me)
        roster = replace(self, history=history, counted=counted)
        if len(roster.to_bytes()) > MAX_BYTES:
            raise RosterRefused(
                "The history of this circle is full",
                hint="Begin a new one: `potluck unpair` on each machine, then pair them again.",
            )
        return roster

    def _require_member(self, me: NodeId) -> None:
        if not self.is_member(me):
            raise RosterRefused(self.explain(me), got=me)
