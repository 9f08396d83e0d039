"""The sentences about a roster that people read: in the log, the command and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.roster_history import History, Status
from potluck.core.roster_records import Rotation
from potluck.core.roster_votes import Tally
from potluck.vocabulary import NodeId

__all__ = ["aim", "explain", "listed", "progress", "shortfall"]


def explain(history: History, node_id: NodeId) -> str:
    """How a machine stands to the circle, in one sentence."""
    name = history.name_of(node_id)
    match history.status(node_id):
        case Status.MEMBER:
            return _explain_member(history, node_id, name)
        case Status.STRANGER:
            return f"No machine with the id {node_id} has been in this circle."
        case Status.REVOKED:
            by = history.dropped_by(node_id)
            assert by is not None
            return (
                f"{name} was revoked by {history.name_of(by.proposer)}; "
                "only pairing it again brings it back."
            )
    return _explain_dropped(history, node_id, name)


def _explain_member(history: History, node_id: NodeId, name: str) -> str:
    member = history.present.members[node_id]
    if node_id == history.records.founding.founder.node_id:
        return f"{name} is a member; it founded this circle."
    if not member.sponsors:
        return f"{name} is a member; it stayed when it revoked the machine that brought it in."
    sponsors = listed(history.name_of(sponsor) for sponsor in member.sponsors)
    return f"{name} is a member since generation {member.generation}, brought in by {sponsors}."


def _explain_dropped(history: History, node_id: NodeId, name: str) -> str:
    rotation = history.dropped_by(node_id)
    assert rotation is not None
    if node_id not in rotation.electorate:
        return (
            f"{name} was brought in while the secret was being changed; "
            "it has to be paired again, or renewed by the machine that brought it in."
        )
    assert rotation.revokes is not None  # nothing else drops somebody who had a vote
    revoked = history.name_of(rotation.revokes)
    return f"{name} was brought in through {revoked}, which was revoked; it has to be paired again."


def aim(history: History, rotation: Rotation) -> str:
    """What a rotation is for."""
    if rotation.revokes is None:
        return f"The new secret proposed by {history.name_of(rotation.proposer)}"
    return f"Revoking {history.name_of(rotation.revokes)}"


def progress(history: History, rotation: Rotation, votes: Tally) -> str:
    """What a pending rotation waits for."""
    if not votes.lacking:
        return f"{aim(history, rotation)} has the signatures it needs."
    missing = listed(history.name_of(node_id) for node_id in votes.missing)
    more = "one more signature" if votes.lacking == 1 else f"{votes.lacking} more signatures"
    return f"{aim(history, rotation)} needs {more}, as soon as these connect and sign: {missing}."


def shortfall(history: History, rotation: Rotation, votes: Tally) -> str:
    """Why a rotation that others have accepted is not accepted here."""
    signed = listed(history.name_of(node_id) for node_id in votes.signed)
    return (
        f"{aim(history, rotation)} is signed by {len(votes.signed)} of the machines "
        f"that this one knew ({signed}), and {votes.needed} are needed"
    )


def listed(names: Iterable[str]) -> str:
    """Names as a person lists them.

    >>> listed(["nas", "desktop", "laptop"])
    'desktop, laptop and nas'
    """
    *most, last = sorted(names) or ["nobody"]
    return f"{', '.join(most)} and {last}" if most else last
