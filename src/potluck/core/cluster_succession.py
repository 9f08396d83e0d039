"""From one view to the next: campaigns, proposals and commits, as one Paxos instance per epoch.

A proposal is committed when a quorum has accepted it in its term **and** everybody else in the old
view is proved dead, has departed, or has been silent for so long that it has paused itself.  The
second half is what makes a proof of death worth something: a member that was in contact until the
end knows that nothing was agreed without it.
"""

from __future__ import annotations

import msgspec

from potluck.core.cluster_campaign import Campaign
from potluck.core.cluster_events import MembershipChange
from potluck.core.cluster_messages import (
    MAX_MEMBERS,
    Accepted,
    Charter,
    Commit,
    Departed,
    Proposal,
    Propose,
)
from potluck.core.cluster_situation import Situation
from potluck.core.cluster_tenure import Tenure
from potluck.core.membership import Planner
from potluck.core.quorum import has_quorum
from potluck.vocabulary import ProcessId, View

__all__ = ["Succession"]


class Succession:
    """Elects a leader where there is none, and carries its proposals through."""

    def __init__(
        self, situation: Situation, tenure: Tenure, planner: Planner, campaign: Campaign
    ) -> None:
        self._situation = situation
        self._campaign = campaign
        self._tenure = tenure
        self._planner = planner
        self._proposal: Proposal | None = None
        self._acceptors: dict[ProcessId, Accepted] = {}
        self._sworn: Accepted | None = None  # our last answer to the leader
        self._repeat_at = 0.0

    def begin(self) -> None:
        """A view was installed or left: what was under way belongs to the past."""
        self._proposal = None
        self._acceptors = {}
        self._sworn = None
        self._planner.begin()

    @property
    def is_busy(self) -> bool:
        """Whether a proposal of ours waits for answers."""
        return self._proposal is not None

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is due."""
        return self._planner.next_look, self._repeat_at if self.is_busy else None

    # --- what is due ---

    def review(self, view: View) -> None:
        """Do what the situation asks for."""
        s = self._situation
        if s.election.is_leading:
            self._lead(view)
        else:
            self._proposal = None
            self._swear_again()
            self._campaign.review(view)

    def _lead(self, view: View) -> None:
        s = self._situation
        if self._proposal is not None:
            if self._maybe_commit(view):
                return
            if s.time >= self._repeat_at:
                self._ask(view)
            return
        term = s.election.term
        plan = s.election.inherited
        if plan is None:
            plan = self._planner.plan(view, must_change=s.is_aborted or term > 0)
        if plan is not None:
            self.propose(view, plan)

    def propose(self, view: View, plan: Proposal) -> None:
        """Ask the members of a view to accept its successor, in the term that is ours."""
        s = self._situation
        accepted = s.election.ballot.accept(s.id, s.election.term, plan)
        assert accepted, "a leader proposes once in its term"
        self._proposal = plan
        self._acceptors = {}
        s.note(MembershipChange.PROPOSED, f"proposed view {view.epoch + 1}: {plan.reason}")
        self._ask(view)
        self._maybe_commit(view)

    def _ask(self, view: View) -> None:
        s = self._situation
        assert self._proposal is not None
        message = Propose(view.lineage, view.epoch, s.election.term, self._proposal)
        s.tell([who for who in s.others() if who not in s.gone], message)
        self._repeat_at = s.time + 2 * s.interval

    def _maybe_commit(self, view: View) -> bool:
        s = self._situation
        proposal = self._proposal
        assert proposal is not None
        if not self._is_agreed(view, dict(self._acceptors)):
            # An acceptor that has fallen silent cannot say any more who is silent to it.  It need
            # not, if the others are a quorum without it: then it is one of those left behind.
            heard = {w: a for w, a in self._acceptors.items() if not s.is_silent(w)}
            if len(heard) == len(self._acceptors) or not self._is_agreed(view, heard):
                return False
        charter = Charter() if s.bound is None else s.bound.charter
        commit = Commit(view.lineage, view.epoch + 1, proposal, charter)
        s.tell(dict.fromkeys([*s.others(), *proposal.members]), commit)
        self._tenure.take_commit(s.id, commit)
        return True

    def _is_agreed(self, view: View, acceptors: dict[ProcessId, Accepted]) -> bool:
        """Whether we and these are a quorum to which everybody else is silent, or gone."""
        s = self._situation
        gone = s.gone.union(*(word.proofs for word in acceptors.values()))
        if not has_quorum(view.members, {s.id, *acceptors}, gone):
            return False
        voices = {who: word for who, word in acceptors.items() if who not in gone}
        living = [word for who, word in voices.items() if not self._has_long_ended(who)]
        silent = self._silent().intersection(*(word.silent for word in living))
        return gone | silent | {s.id, *acceptors} >= set(view.members)

    def _has_long_ended(self, who: ProcessId) -> bool:
        """Whether an acceptor ended so long ago that nobody holds a lease of it any more."""
        s = self._situation
        ended = s.ended.get(who)
        return ended is not None and s.time - ended[1] >= s.longest_lease

    def _silent(self) -> frozenset[ProcessId]:
        """Members that have paused themselves, if they are alive, for all we hear of them."""
        s = self._situation
        return frozenset(who for who in s.others() if s.is_silent(who))

    def _swear_again(self) -> None:
        """What we know of the silent has changed since we accepted: the leader waits for it."""
        s = self._situation
        word, leader = self._sworn, s.election.ballot.proposer
        if word is None or leader is None or word.term != s.election.ballot.promised:
            return
        again = self._accepted(word.term)
        if again != word:
            self._sworn = again
            s.send(leader, again)

    def _accepted(self, term: int) -> Accepted:
        s = self._situation
        view = s.election.view
        return Accepted(
            lineage=view.lineage,
            epoch=view.epoch,
            term=term,
            is_accepted=True,
            promised=s.election.ballot.promised,
            proofs=tuple(sorted(s.proofs)),
            # Whoever departed is at work no more, whether or not the leader has heard of it.
            silent=tuple(sorted(self._silent().union(s.election.departed))),
        )

    # --- messages; the sender is a member, lineage and epoch are ours ---

    def take_propose(self, sender: ProcessId, message: Propose) -> None:
        """The leader of a term asks us to accept the next view."""
        s = self._situation
        view, ballot = s.election.view, s.election.ballot
        if not _is_sound(message.proposal) or (message.term == 0 and sender != view.leader):
            return
        if ballot.contradicts(sender, message.term, message.proposal):
            s.election.split_brain(
                f"split brain: {s.name(sender)} proposes in term {view.epoch}.{message.term}, "
                "in which something else was proposed before"
            )
            return
        if ballot.accept(sender, message.term, message.proposal):
            s.election.follow_proposer(sender, message.term)
            self._sworn = self._accepted(message.term)
            s.send(sender, self._sworn)
            s.beat_soon()
        else:
            refusal = msgspec.structs.replace(self._accepted(message.term), is_accepted=False)
            s.send(sender, refusal)

    def take_accepted(self, sender: ProcessId, message: Accepted) -> None:
        """An answer to our proposal."""
        election = self._situation.election
        if self._proposal is None or message.term != election.term:
            return
        if message.is_accepted:
            self._acceptors[sender] = message
        elif message.promised > election.term:
            election.preempted(message.promised, "somebody else was voted for meanwhile")

    def take_departed(self, sender: ProcessId, message: Departed) -> None:
        """A member takes no part any more."""
        s = self._situation
        s.election.depart(sender, message)
        sentence = f"{s.name(sender)} left: {message.reason or 'it said goodbye'}"
        s.note(MembershipChange.DEPARTED, sentence, sender)
        s.abort(sender, sentence, orderly=True)


def _is_sound(proposal: Proposal) -> bool:
    members = proposal.members
    return 0 < len(members) <= MAX_MEMBERS and len(set(members)) == len(members)
