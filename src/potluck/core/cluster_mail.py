"""What arrives is sorted here: to whom it goes, and what is answered to those who are behind.

Messages of strangers and of views other than ours are never acted upon.  Whoever is behind in our
lineage, or in one that we have left, is told the newest view that we know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from potluck.core.cluster_campaign import Campaign
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_effects import Meet, Send
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_founding import Founding
from potluck.core.cluster_merging import Merging
from potluck.core.cluster_messages import (
    RELAYABLE,
    Accepted,
    Acquaintances,
    Canvass,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Founded,
    Heartbeat,
    Leaning,
    Lost,
    MergeAnswer,
    MergeRequest,
    Propose,
    Relayed,
    Vote,
    VoteRequest,
    decode,
)
from potluck.core.cluster_situation import Situation, view_mark
from potluck.core.cluster_succession import Succession
from potluck.core.cluster_tenure import Tenure, never_in
from potluck.errors import MalformedFrame
from potluck.vocabulary import ProcessId, View

__all__ = ["Mail"]

_OBSERVED_KEPT = 64  # lineages

_Handler = Callable[[ProcessId, Any], None]


class Mail:
    """Sorts what arrives."""

    def __init__(
        self,
        situation: Situation,
        tenure: Tenure,
        campaign: Campaign,
        succession: Succession,
        founding: Founding,
        merging: Merging,
    ) -> None:
        self._situation = situation
        self._tenure = tenure
        self._campaign = campaign
        self._succession = succession
        self.observed: dict[str, View] = {}
        self._open: dict[type, _Handler] = {
            Acquaintances: self._take_acquaintances,
            Commit: self._take_commit,
            Departed: self._take_departed,
            Found: founding.take_found,
            Founded: founding.take_founded,
            MergeRequest: merging.take_request,
            MergeAnswer: merging.take_answer,
        }
        self._among_members: dict[type, _Handler] = {
            Lost: self._take_lost,
            Canvass: campaign.take_canvass,
            Leaning: campaign.take_leaning,
            VoteRequest: campaign.take_vote_request,
            Vote: campaign.take_vote,
            Propose: succession.take_propose,
            Accepted: succession.take_accepted,
        }

    def take(self, sender: ProcessId, message: ClusterMessage) -> None:
        """A message of somebody who is connected."""
        s = self._situation
        contact = s.contacts.get(sender)
        if contact is None or not contact.is_connected:
            return
        if isinstance(message, Heartbeat):
            self._take_heartbeat(contact, message)
            return
        s.health.heard(sender, s.now)
        if s.is_observer:
            if isinstance(message, Commit):
                self._observe(message)
        elif isinstance(message, Relayed):
            self._take_relayed(sender, message)
        else:
            self._sort(sender, message)

    def _take_relayed(self, sender: ProcessId, message: Relayed) -> None:
        """Pass it on if both are members, or take it as if its origin had said it."""
        s = self._situation
        if not (s.is_member(sender) and s.is_member(message.origin)) or message.origin == s.id:
            return
        if message.to != s.id:
            if message.origin == sender and s.contacts.is_heard(message.to):
                s.out.append(Send(message.to, message))
            return
        try:
            content = decode(message.content)
        except MalformedFrame:
            return
        if isinstance(content, RELAYABLE):
            self._sort(message.origin, content)

    def _sort(self, sender: ProcessId, message: ClusterMessage) -> None:
        s = self._situation
        kind = type(message)
        if kind in self._open:
            s.is_dirty = True
            self._open[kind](sender, message)
        elif self._is_for_our_view(sender, message):
            s.is_dirty = True
            self._among_members[kind](sender, message)

    def _is_for_our_view(self, sender: ProcessId, message: Any) -> bool:
        s = self._situation
        view = s.view
        if view is None or (message.lineage, message.epoch) != (view.lineage, view.epoch):
            self._help_along(sender, message.lineage, message.epoch)
            return False
        return sender in view.members and sender not in s.proofs

    def _help_along(self, who: ProcessId, lineage: str, epoch: int) -> None:
        """Tell somebody who is behind what we know, once in a beat."""
        s = self._situation
        contact, newest = s.contacts.of(who), s.archive.newest(lineage)
        if newest is None or newest.epoch <= epoch:
            return
        if s.time - contact.helped_at >= s.interval / 2:
            contact.helped_at = s.time
            s.send(who, newest)

    # --- heartbeats ---

    def _take_heartbeat(self, contact: Contact, beat: Heartbeat) -> None:
        s = self._situation
        before = contact.beat
        was_heard = s.contacts.is_heard(contact.process)
        counts, doubted = self._counts(beat), s.is_doubtful(contact.process)
        if not s.contacts.heard(contact, beat, s.now, s.time, counts=counts):
            return
        news = before is None or not was_heard or _differ(before, beat)
        if news:
            s.is_dirty = True
        if before is None or not was_heard or doubted is not s.is_doubtful(contact.process):
            s.beat_soon()
        if s.is_observer:
            return
        if beat.lineage:
            self._help_along(contact.process, beat.lineage, beat.epoch)
        view = s.view
        if view is None:
            return
        if (beat.lineage, beat.epoch) != (view.lineage, view.epoch):
            self._take_other_view(contact, beat, view)
        elif beat.view != view_mark(view):
            self._tenure.split(contact.process, f"{contact.card} has another view {view.epoch}")
        elif beat.aborted and contact.process in view.members:
            self._take_abort(contact, beat, view)

    def _take_abort(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """A member has ended what it did in our view, before whoever it lost, or left, told us."""
        s = self._situation
        if beat.lost is None or beat.lost not in view.members:
            s.abort(None, f"{contact.card} says that operations were aborted", orderly=beat.orderly)
        elif beat.orderly:
            sentence = f"{s.name(beat.lost)} left, as {contact.card} says"
            s.abort(beat.lost, sentence, orderly=True)
        else:
            s.abort(beat.lost, f"{contact.card} has lost {s.name(beat.lost)}")

    def _counts(self, beat: Heartbeat) -> bool:
        """Whether the sender has neither gone on without us nor agreed to."""
        view = self._situation.view
        if beat.withholds:
            return False
        if view is None:
            return True
        return beat.epoch <= view.epoch if beat.lineage == view.lineage else not beat.size

    def _take_other_view(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """Somebody is elsewhere; if it is a member of our view, remind it."""
        s = self._situation
        process = contact.process
        if process not in view.members or process in s.election.departed:
            return
        if beat.lineage != view.lineage:
            self._help_along(process, view.lineage, 0)

    # --- the others ---

    def _take_acquaintances(self, sender: ProcessId, message: Acquaintances) -> None:  # noqa: ARG002
        s = self._situation
        for card in message.cards:
            known = s.contacts.get(card.process)
            if known is not None and known.is_connected:
                continue
            if card.process == s.id or card.process in s.ended or s.contacts.is_full:
                continue
            if not any(contact.card.succeeds(card) for contact in s.contacts):
                s.out.append(Meet(card))

    def _take_lost(self, sender: ProcessId, message: Lost) -> None:
        s = self._situation
        s.abort(message.who, f"{s.name(sender)} reports: {message.reason}")
        if message.is_proved and s.is_member(message.who):
            s.reported.add(message.who)
        s.contacts.unhear(sender, message.who)
        self._campaign.loss_reported(sender)

    def _take_commit(self, sender: ProcessId, message: Commit) -> None:
        self._tenure.take_commit(sender, message)

    def _take_departed(self, sender: ProcessId, message: Departed) -> None:
        s = self._situation
        if message.is_leaving:
            s.ended[sender] = "it left", s.time
        view = s.view
        if view is None or message.lineage != view.lineage or sender not in view.members:
            return
        if message.epoch == view.epoch:
            self._succession.take_departed(sender, message)
        elif message.is_leaving and message.epoch < view.epoch:
            # What it had promised and accepted was about our view, not about the next one.
            self._succession.take_departed(sender, never_in(view, message.reason, is_leaving=True))
        elif message.epoch < view.epoch:
            self._help_along(sender, message.lineage, message.epoch)
        else:
            s.contacts.write_off(s.contacts.of(sender))  # it has been in a later view than ours

    def _observe(self, commit: Commit) -> None:
        """Keep what an observer is told."""
        s = self._situation
        known = self.observed.get(commit.lineage)
        if commit.proposal.into:
            self.observed.pop(commit.lineage, None)
        elif known is None or known.epoch < commit.epoch:
            self.observed.pop(commit.lineage, None)
            self.observed[commit.lineage] = commit.view
            if len(self.observed) > _OBSERVED_KEPT:
                del self.observed[next(iter(self.observed))]
            s.note(MembershipChange.INSTALLED, f"view {commit.epoch}: {commit.proposal.reason}")

    def leave(self, reason: str) -> None:
        """Say goodbye to everybody."""
        s = self._situation
        word = self._tenure.last_word(reason, is_leaving=True)
        s.tell([contact.process for contact in s.contacts], word)
        s.abort(None, "we left")
        s.note(MembershipChange.LEFT, f"{s.me} left")
        s.election.end("we left")
        s.view, s.state, s.reason = None, ClusterState.LEFT, "we left"


def _differ(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether a heartbeat brings news that decisions may hang on."""
    return (
        one.phase is not other.phase
        or one.hears != other.hears
        or (one.lineage, one.epoch, one.view) != (other.lineage, other.epoch, other.view)
        or (one.steps, one.wants, one.seniority) != (other.steps, other.wants, other.seniority)
        or (one.aborted, one.term, one.withholds) != (other.aborted, other.term, other.withholds)
    )
