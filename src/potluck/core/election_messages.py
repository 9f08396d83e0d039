"""What members say to each other to agree on the next view: the messages of one Paxos instance.

Each names (lineage, epoch), the view whose members decide.  Terms count within an epoch.
"""

from __future__ import annotations

from potluck.core.cluster_bounds import Count, Lineage, Members, Message, Sentence, Term
from potluck.vocabulary import View

__all__ = [
    "Accepted",
    "Canvass",
    "Commit",
    "Leaning",
    "Proposal",
    "Propose",
    "Vote",
    "VoteRequest",
]


class Proposal(Message, frozen=True):
    """What the members of a view are to agree on: who is in the next one."""

    members: Members
    reason: Sentence = ""
    into: Lineage = ""
    """The lineage into which this one dissolves with this view; empty for all others."""


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

    @property
    def view(self) -> View:
        """The view it installs."""
        return View(self.lineage, self.epoch, self.proposal.members)
