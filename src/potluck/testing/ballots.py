"""The rules of votes and proposals, checked on what the members of a simulated cluster say.

* A term has one leader, who proposes one thing in it.
* Nobody votes twice in a term.
* What is announced as agreed was accepted, in one term, by a quorum of the view before: a majority
  of it, half of it with its first member, or all of it but those who are dead (here: really dead)
  or have departed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.core.cluster_messages import (
    Accepted,
    Departed,
    Proposal,
    Propose,
    Relayed,
    Vote,
    decode,
)
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Names, Violation
from potluck.vocabulary import ProcessId, View

__all__ = ["Ballots"]

_Term = tuple[str, int, int]


class Ballots:
    """Everything that was ever proposed, voted and accepted."""

    def __init__(self, names: Names, is_alive: Callable[[ProcessId], bool]) -> None:
        self._names = names
        self._is_alive = is_alive
        self._proposals: dict[_Term, tuple[ProcessId, Proposal]] = {}
        self._votes: dict[tuple[ProcessId, _Term], ProcessId] = {}
        self._acceptors: dict[_Term, set[ProcessId]] = {}
        self._departed: set[tuple[str, ProcessId]] = set()

    def sends(self, process: SimulatedProcess, to: ProcessId, message: object) -> None:
        """Check a message that is about to leave."""
        if isinstance(message, Relayed):
            if message.origin == process.process:
                self.sends(process, message.to, decode(message.content))
        elif isinstance(message, Propose):
            self._proposes(process, message)
        elif isinstance(message, Vote) and message.is_granted:
            self._votes_for(process, to, message)
        elif isinstance(message, Accepted) and message.is_accepted:
            term = message.lineage, message.epoch, message.term
            self._acceptors.setdefault(term, set()).add(process.process)
        elif isinstance(message, Departed):
            self._departed.add((message.lineage, process.process))

    def _proposes(self, process: SimulatedProcess, message: Propose) -> None:
        term = message.lineage, message.epoch, message.term
        leader, proposal = self._proposals.setdefault(term, (process.process, message.proposal))
        if leader != process.process:
            raise Violation(
                f"Term {message.epoch}.{message.term} of {message.lineage[:8]} has two leaders: "
                f"{self._names.who(leader)} and {process.name}"
            )
        if not _is_same(proposal, message.proposal):
            raise Violation(
                f"{process.name} proposes two things in term {message.epoch}.{message.term}: "
                f"{self._names.all(proposal.members)} and "
                f"{self._names.all(message.proposal.members)}"
            )

    def _votes_for(self, process: SimulatedProcess, to: ProcessId, message: Vote) -> None:
        key = process.process, (message.lineage, message.epoch, message.term)
        first = self._votes.setdefault(key, to)
        if first != to:
            raise Violation(
                f"{process.name} votes twice in term {message.epoch}.{message.term} of "
                f"{message.lineage[:8]}: for {self._names.who(first)} and for "
                f"{self._names.who(to)}"
            )

    def check_quorum(self, process: SimulatedProcess, before: View, agreed: Proposal) -> None:
        """Whether what is announced as the successor of a view was accepted by a quorum of it."""
        lineage = before.lineage
        gone = {
            who
            for who in before.members
            if not self._is_alive(who) or (lineage, who) in self._departed
        }
        alone = {process.process}  # who knows all others to be gone has nobody to ask
        tallies = [alone, *self._tallies(before, agreed)]
        if not any(_is_quorum(before, accepted, gone) for accepted in tallies):
            heard = " or ".join(self._names.all(sorted(tally)) for tally in tallies)
            raise Violation(
                f"{process.name} takes {self._names.all(agreed.members)} for the successor of "
                f"{self._names.view(before)}, which only {heard} had accepted"
            )

    def _tallies(self, before: View, agreed: Proposal) -> Iterator[set[ProcessId]]:
        """For each term in which it was proposed: who accepted it; its leader did."""
        for (lineage, epoch, term), (leader, proposal) in self._proposals.items():
            if (lineage, epoch) == (before.lineage, before.epoch) and _is_same(proposal, agreed):
                yield {leader} | self._acceptors.get((lineage, epoch, term), set())


def _is_same(one: Proposal, other: Proposal) -> bool:
    return one.members == other.members and one.into == other.into


def _is_quorum(view: View, accepted: set[ProcessId], gone: set[ProcessId]) -> bool:
    members = set(view.members)
    votes = accepted & members
    twice = 2 * len(votes)
    return (
        twice > len(members)
        or (twice == len(members) and view.members[0] in votes)
        or (bool(votes) and votes >= members - gone)
    )
