"""What members say to each other to agree on the next view: the messages of one Paxos instance.

Each names (lineage, epoch), the view whose members decide.  Terms count within an epoch.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import msgspec

from potluck.core.cluster_bounds import (
    MAX_MEMBERS,
    Ancestry,
    Count,
    Label,
    Lineage,
    Members,
    Message,
    Seconds,
    Sentence,
    Term,
)
from potluck.vocabulary import ProcessId, View

__all__ = [
    "Accepted",
    "Canvass",
    "Cause",
    "CauseCode",
    "Charter",
    "Commit",
    "Leaning",
    "Proposal",
    "Propose",
    "Vote",
    "VoteRequest",
]


class CauseCode(Enum):
    """Why a member of the last view is not in the next one."""

    ENDED = "ended"
    """Its process has ended without saying so: killed, crashed, restarted."""
    LEFT = "left"
    """Its script ended, or called ``leave``."""
    SILENT = "silent"
    """Nothing was heard from it for too long: asleep, unplugged, stopped, cut off."""
    UNREACHABLE = "unreachable"
    """It is alive, but some members that stay cannot reach it."""
    MISBEHAVED = "misbehaved"
    """It sent a member something that no correct process sends, and was removed for that."""


class Cause(Message, frozen=True):
    """Why one member of the last view is not in the next one, as the proposer decided."""

    who: ProcessId
    code: CauseCode
    name: Label = ""
    """What people call its machine."""
    host: Label = ""
    """Its address."""
    silent_for: Seconds = 0.0
    """Seconds since the proposer last heard from it."""
    reason: Sentence = ""
    """What was seen, in words: which link, which port."""


class Charter(Message, frozen=True):
    """What is fixed for a lineage when it is founded."""

    quorum: Literal["majority", "any"] = "majority"
    ancestry: Ancestry = ()
    """Where it branched off, oldest first; empty if free processes founded it."""
    origin: Ancestry = ()
    """Where the checkpoint came from with which its first ancestor began, oldest first."""


class Proposal(Message, frozen=True):
    """What the members of a view are to agree on: who is in the next one."""

    members: Members
    reason: Sentence = ""
    into: Lineage = ""
    """The lineage into which this one dissolves with this view; empty for all others."""
    into_epoch: Count = 0
    into_members: Members = ()
    """The newest view known of that lineage: its members take ours in."""
    causes: Annotated[tuple[Cause, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Why members of the last view are not in this one."""
    interval: Seconds = 0.0
    """Seconds between heartbeats in this view; 0 for the preset."""
    pause_after: Seconds = 0.0
    """Seconds without contact after which a member of this view pauses; 0 for the preset."""
    into_charter: Charter | None = None
    """Of the lineage into which this one dissolves."""


class Canvass(Message, frozen=True, tag="canvass"):
    """Would you vote for me in this term?  Nothing changes by the answer."""

    lineage: Lineage
    epoch: Count
    term: Count


class Leaning(Message, frozen=True, tag="leaning"):
    """The answer to a canvass."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_granted: bool
    promised: Count
    proofs: Members
    """Members whose death the sender can prove."""
    reason: Sentence = ""


class VoteRequest(Message, frozen=True, tag="request"):
    """Vote for me in this term."""

    lineage: Lineage
    epoch: Count
    term: Count


class Vote(Message, frozen=True, tag="vote"):
    """The answer to a vote request; reports any proposal accepted earlier in this epoch."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_granted: bool
    promised: Count
    accepted_term: Term
    accepted: Proposal | None
    proofs: Members


class Propose(Message, frozen=True, tag="propose"):
    """The leader of a term asks to accept the next view."""

    lineage: Lineage
    epoch: Count
    term: Count
    proposal: Proposal


class Accepted(Message, frozen=True, tag="accepted"):
    """The answer to a proposal."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_accepted: bool
    promised: Count
    proofs: Members
    silent: Members
    """Members that the sender has not heard for so long that they have paused themselves, or that
    have departed."""


class Commit(Message, frozen=True, tag="commit"):
    """A view is agreed: ``proposal`` is view ``epoch`` of the lineage."""

    lineage: Lineage
    epoch: Count
    proposal: Proposal
    charter: Charter = Charter()

    @property
    def view(self) -> View:
        """The view it installs."""
        return View(self.lineage, self.epoch, self.proposal.members, self.charter.ancestry)
