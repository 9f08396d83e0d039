"""Finding a leader where there is none: when to campaign, and how to answer those who do."""

from __future__ import annotations

from potluck.core.cluster_messages import Canvass, Leaning, Vote, VoteRequest
from potluck.core.cluster_situation import Situation
from potluck.core.election_events import ElectionRole
from potluck.vocabulary import ProcessId, View

__all__ = ["Campaign"]


LONGEST_CAMPAIGN = 2.0
"""Election timeouts after which whoever got our vote has won, and told us so, or lost."""


class Campaign:
    """Campaigns when the leader is lost, the most senior member first."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self.is_called = False
        """Whether somebody asked for an election."""
        self._begun = situation.time
        self._hopes_until = float("-inf")  # whoever got our vote may still be counting

    def begin(self) -> None:
        """A view was installed or left."""
        self.is_called = False
        self._begun = self._situation.time

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is due."""
        election = self._situation.election
        return election.until, election.not_before

    def review(self, view: View) -> None:
        """Follow the leader we have, or campaign in our turn."""
        s = self._situation
        election = s.election
        if election.role is ElectionRole.CANVASSING and not self.why_leaderless():
            election.resume_following()
        if election.role is ElectionRole.CANVASSING or election.role is ElectionRole.CAMPAIGNING:
            self._pursue()
            return
        wanted = self.is_called or s.config.election.auto_elect_on_peer_loss
        lost = "" if not wanted else self.why_leaderless()
        if not lost:
            election.not_before = None
            return
        seniors = set(view.members[: view.members.index(s.id)]) - s.gone - {election.leader}
        election.wait_turn(sum(s.contacts.is_mutual(who) for who in seniors), s.time)
        if election.not_before is not None and s.time >= election.not_before:
            s.tell(s.others(), election.canvass(s.time, lost))
            self._pursue()

    def _pursue(self) -> None:
        """Go on with our campaign as far as it carries."""
        s = self._situation
        election = s.election
        if election.role is ElectionRole.CANVASSING and election.has_won(s.proofs.keys()):
            s.tell(s.others(), election.campaign(s.time))
        if election.role is ElectionRole.CAMPAIGNING and election.has_won(s.proofs.keys()):
            election.lead()
            s.is_dirty = True
        elif election.until is not None and s.time >= election.until:
            election.give_up(s.time)

    def why_leaderless(self) -> str:
        """Why the leader of the term is no leader, in words; empty if it is."""
        s = self._situation
        leader = s.election.leader
        if leader == s.id:
            return ""
        if leader is None:
            return s.election.reason
        if leader in s.gone:
            return f"{s.name(leader)} is gone"
        if not s.contacts.is_heard(leader):
            return f"{s.name(leader)} is lost: {s.health.reason(leader)}"
        contact, view = s.contacts.of(leader), s.election.view
        beat = contact.beat
        if beat is None or not beat.size or contact.beat_at < self._begun:
            return ""  # it has not spoken yet since we are in this view
        if beat.lineage != view.lineage:
            return f"{s.name(leader)} has gone to another lineage"
        if beat.epoch != view.epoch:
            return ""
        if beat.term > s.election.term:
            return f"{s.name(leader)} has given its vote to somebody else"
        is_defeated = beat.term == s.election.term and beat.leader != leader
        if is_defeated and s.time >= self._hopes_until:
            return f"{s.name(leader)} had our vote and was not elected"
        return ""

    # --- messages; the sender is a member, lineage and epoch are ours ---

    def take_canvass(self, sender: ProcessId, message: Canvass) -> None:
        """Somebody considers a campaign."""
        s = self._situation
        refusal = ""
        if s.election.leader != sender and not self.why_leaderless():
            refusal = "the leader is heard"
        answer = s.election.answer_canvass(sender, message, refusal=refusal, proofs=s.proofs.keys())
        s.send(sender, answer)

    def take_leaning(self, sender: ProcessId, message: Leaning) -> None:
        """An answer to our canvass."""
        self._situation.election.take_leaning(sender, message)

    def take_vote_request(self, sender: ProcessId, message: VoteRequest) -> None:
        """Somebody campaigns."""
        s = self._situation
        answer = s.election.answer_vote_request(sender, message, s.proofs.keys())
        if answer.is_granted:
            timeout = s.config.election.election_timeout + s.election.slack
            self._hopes_until = s.time + LONGEST_CAMPAIGN * timeout
        s.send(sender, answer)

    def take_vote(self, sender: ProcessId, message: Vote) -> None:
        """A vote for us, or the news that there is none."""
        election = self._situation.election
        election.take_vote(sender, message)
        if message.promised > election.term:
            election.preempted(message.promised, "somebody campaigns in a later term")

    def loss_reported(self, sender: ProcessId) -> None:
        """A member reports a loss: if it is the leader's, it may vote for us now."""
        election = self._situation.election
        if election.role is ElectionRole.CANVASSING and not election.has_answered(sender):
            self._situation.send(sender, election.canvass_again())
