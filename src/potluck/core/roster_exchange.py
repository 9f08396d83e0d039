"""What a machine does with the roster that another one shows it, whenever two members connect.

Records are merged by union, whoever brought them; which rotations are *accepted* is judged by what
this machine knew before.  That is the whole protection of an absentee, so this function is the only
way in for a roster from outside (a pairing excepted, where a person vouched for the host).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from potluck.core.roster import MAX_BYTES, Roster
from potluck.core.roster_history import History
from potluck.core.roster_votes import advance, tally
from potluck.core.roster_words import shortfall
from potluck.vocabulary import NodeId

__all__ = ["Taken", "Verdict", "take"]


class Verdict(StrEnum):
    """What an offered roster means for this machine."""

    CURRENT = "current"
    """We are where the other is, or further."""
    MOVED_ON = "moved_on"
    """We have accepted a new secret: ask the teller for it."""
    SIGN = "sign"
    """The other is further; our signature would let us follow."""
    PAIR_AGAIN = "pair_again"
    """The other is further, and we cannot follow without a person."""
    REVOKED = "revoked"
    """We are no longer wanted, by all the votes that we count."""
    REFUSED = "refused"
    """The other has no business with us; nothing was merged."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The roster after an offer, what it means, and why."""

    roster: Roster
    verdict: Verdict
    reason: str


def take(mine: Roster, offered: Roster, teller: NodeId, me: NodeId) -> Taken:
    """Merge what ``teller``, who has proved its id, offers to this machine ``me``."""
    if offered.circle != mine.circle:
        return Taken(mine, Verdict.REFUSED, "The roster offered is that of another circle.")
    records = mine.history.records.union(offered.history.records)
    history, counted = advance(History(records, mine.history.chain), mine.counted, me)
    merged = replace(mine, history=history, counted=counted)
    # Somebody whose own vote ends its membership must still be able to deliver that vote.
    if not (mine.is_member(teller) or merged.is_member(teller)):
        return Taken(mine, Verdict.REFUSED, merged.explain(teller))
    if len(merged.to_bytes()) > MAX_BYTES:
        reason = "Both rosters together have too long a history. Pair this machine again."
        return Taken(mine, Verdict.PAIR_AGAIN, reason)
    # Whom the teller tells of counts from the next offer on, never for this one.
    verdict, reason = _judge(mine, merged, offered, me)
    return Taken(_heard(merged, offered, teller, me), verdict, reason)


def _judge(before: Roster, merged: Roster, offered: Roster, me: NodeId) -> tuple[Verdict, str]:
    ours, theirs = merged.history.chain, offered.history.chain
    if not merged.is_member(me):
        return Verdict.PAIR_AGAIN, merged.explain(me)
    if ours[: len(theirs)] == theirs:
        moved = ours != before.history.chain
        reason = f"This machine is in generation {merged.generation.number} of the circle."
        return (Verdict.MOVED_ON if moved else Verdict.CURRENT), reason
    if theirs[: len(ours)] != ours:
        reason = "The circle has split: the other machine follows another change of the secret."
        return Verdict.PAIR_AGAIN, f"{reason} Pair again with one side."
    name = theirs[len(ours)]
    rotation = merged.history.records.rotations[name]
    votes = tally(merged.history, name, merged.counted)
    if not votes.lacking:  # only our own revocation is not accepted in spite of its votes
        proposer = merged.history.name_of(rotation.proposer)
        return Verdict.REVOKED, f"{proposer} and the others it needed revoked this machine."
    reason = shortfall(merged.history, rotation, votes)
    if merged.objection(name, me) is None:
        return Verdict.SIGN, f"{reason}; this machine may sign too."
    return Verdict.PAIR_AGAIN, f"{reason}. Pair this machine again."


def _heard(merged: Roster, offered: Roster, teller: NodeId, me: NodeId) -> Roster:
    """Remember of whom the teller tells, and count whom most of those who count tell of."""
    members = merged.generation.members.keys()
    unknown = (offered.generation.members.keys() & members) - merged.counted
    told = {(of, teller) for of in unknown} if teller in merged.counted else set()
    hearsay = merged.hearsay | told
    judges = (merged.counted & members) - {me}
    confirmed = {
        node_id
        for node_id in members - merged.counted
        if 2 * sum(of == node_id and by in judges for of, by in hearsay) > len(judges)
    }
    left = frozenset((of, by) for of, by in hearsay if of in members - confirmed)
    return replace(merged, counted=merged.counted | confirmed, hearsay=left)
