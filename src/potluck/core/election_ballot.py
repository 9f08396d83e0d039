"""What one member has promised and accepted in one epoch: the acceptor of single-decree Paxos.

It lives as long as its process: a restarted process is a new member without a vote, so nothing
needs to be kept on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.cluster_messages import Proposal
from potluck.vocabulary import ProcessId

__all__ = ["Ballot"]


@dataclass(slots=True)
class Ballot:
    """Promises bind: after a vote in a term nothing is accepted in an earlier one."""

    promised: int = 0
    """The highest term voted or accepted in; term 0 is promised to the first member by all."""
    voted_for: ProcessId | None = None
    """Who got the vote in that term."""
    accepted_term: int = -1
    accepted: Proposal | None = None
    proposer: ProcessId | None = None
    """Whose proposal was accepted."""

    def vote(self, candidate: ProcessId, term: int) -> bool:
        """Vote, if no vote was given in this or a later term; asking again changes nothing."""
        if term > self.promised:
            self.promised, self.voted_for = term, candidate
        return term == self.promised and self.voted_for == candidate

    def accept(self, leader: ProcessId, term: int, proposal: Proposal) -> bool:
        """Accept a proposal, unless a later term was promised, or another one in this term."""
        if term < self.promised or self.contradicts(leader, term, proposal):
            return False
        if term > self.promised:
            self.promised, self.voted_for = term, leader
        self.accepted_term, self.accepted, self.proposer = term, proposal, leader
        return True

    def contradicts(self, leader: ProcessId, term: int, proposal: Proposal) -> bool:
        """Whether something else was accepted in this very term, which must not happen."""
        return term == self.accepted_term and (leader, proposal) != (self.proposer, self.accepted)
