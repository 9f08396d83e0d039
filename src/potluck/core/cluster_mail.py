"""What arrives is sorted here: to whom it goes, and what is answered to those who are behind.

Messages of strangers and of views other than ours are never acted upon.  Whoever is behind in our
lineage, or in one that we have left, is told the newest view that we know.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from potluck.core.cluster_campaign import Campaign
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_effects import Meet, Send
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_evidence import Evidence
from potluck.core.cluster_founding import Founding
from potluck.core.cluster_merging import Merging
from potluck.core.cluster_messages import (
    MAX_CONTACTS,
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
    Phase,
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
        *,
        evidence: Evidence,
    ) -> None:
        self._situation = situation
        self._tenure = tenure
        self._campaign = campaign
        self._succession = succession
        self._evidence = evidence
        self.observed: dict[str, View] = {}
        self._behind: dict[ProcessId, float] = {}  # since when, of those we cannot tell all
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
        if message.origin in s.expelled:
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
            if not self._says_that_it_left(sender, message.lineage, message.epoch):
                self._help_along(sender, message.lineage, message.epoch)
            return False
        return sender in view.members and sender not in s.proofs

    def _says_that_it_left(self, who: ProcessId, lineage: str, epoch: int) -> bool:
        """Tell a process that counts on us in its view that we left it, and want to come in again.

        We left it for a child, without a word.  The child has ended in the lineage it came from.
        """
        s = self._situation
        bound, word = s.bound, s.archive.last_word(lineage)
        is_back = s.view is None and bound is not None and bound.lineage == lineage
        if word is None or not (is_back and s.archive.has_come_back(lineage, epoch)):
            return False
        s.send(who, word)
        return True

    def _help_along(self, who: ProcessId, lineage: str, epoch: int) -> None:
        """Tell a process that is behind what followed its view, and the newest, once in a beat."""
        s = self._situation
        contact = s.contacts.of(who)
        known = s.archive.following(lineage, epoch)
        if not known:
            is_idle = contact.beat is not None and contact.beat.phase is not Phase.ACTIVE
            heir = s.archive.successor(lineage, epoch) if is_idle else None
            known = () if heir is None else (heir,)
        if not known or s.time - contact.helped_at < s.interval / 2:
            return
        is_next = known[0].lineage != lineage or known[0].epoch == epoch + 1
        if not is_next and not self._has_waited(who):
            return  # others may know what followed its view, and tell it first
        contact.helped_at = s.time
        self._behind.pop(who, None)
        if is_next and len(known) > 1:
            s.send(who, known[0])
        s.send(who, known[-1])

    def _has_waited(self, who: ProcessId) -> bool:
        """Whether a process was seen to be behind a beat ago; notes it if it was not."""
        s = self._situation
        if len(self._behind) > MAX_CONTACTS:
            self._behind.clear()
        return s.time - self._behind.setdefault(who, s.time) >= s.interval / 2

    def _catch_up(self, who: ProcessId, beat: Heartbeat, *, is_first: bool) -> None:
        """Tell a process where its lineage is, or where ours is if it is in none."""
        s = self._situation
        bound = s.bound
        if beat.bound:
            self._help_along(who, beat.bound, beat.bound_epoch)
        if is_first and bound is not None and beat.bound != bound.lineage:
            s.send(who, bound)

    # --- heartbeats ---

    def _take_heartbeat(self, contact: Contact, beat: Heartbeat) -> None:
        s = self._situation
        before = contact.beat
        was_heard = s.contacts.is_heard(contact.process)
        counts, doubted = self._counts(beat), s.is_doubtful(contact.process)
        if not s.contacts.heard(contact, beat, s.now, s.time, counts=counts):
            return
        if before is None or not was_heard or _is_news(before, beat, s.view):
            s.is_dirty = True
        if before is None or not was_heard or doubted is not s.is_doubtful(contact.process):
            s.beat_soon()
        if s.is_observer:
            return
        self._catch_up(contact.process, beat, is_first=before is None)
        self._evidence.take_ended(contact, beat.ended)
        if s.view is not None:
            self._compare_views(contact, beat, s.view)
        elif s.bound is not None:
            self._remind(contact, beat, s.bound)

    def _remind(self, contact: Contact, beat: Heartbeat, bound: Commit) -> None:
        """A member of the view that we wait for is elsewhere: it says whether it has left."""
        s = self._situation
        who = contact.process
        is_elsewhere = beat.bound not in {"", bound.lineage}
        if is_elsewhere and who in bound.view.members and who not in s.departed:
            self._help_along(who, bound.lineage, 0)

    def _compare_views(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """Look where the sender is, from our own view."""
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
            sentence = f"{contact.card} has stopped its operations"
            s.abort(None, sentence, orderly=beat.orderly, by=contact.process)
        elif beat.orderly:
            sentence = f"{s.name(beat.lost)} left, as {contact.card} says"
            s.abort(beat.lost, sentence, orderly=True, by=contact.process)
        else:
            sentence = f"{contact.card} has lost {s.name(beat.lost)}"
            s.abort(beat.lost, sentence, by=contact.process)

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
            s.contacts.remember(card)
            known = s.contacts.get(card.process)
            if known is not None and known.is_connected:
                continue
            if card.process == s.id or card.process in s.ended or s.contacts.is_full:
                continue
            if not any(contact.card.succeeds(card) for contact in s.contacts):
                s.out.append(Meet(card))

    def _take_lost(self, sender: ProcessId, message: Lost) -> None:
        s = self._situation
        if message.is_expelled:
            self._evidence.accused(sender, message.who, message.reason)
            self._campaign.loss_reported(sender)
            return
        s.abort(message.who, f"{s.name(sender)} reports: {message.reason}", by=sender)
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
        view, bound = s.view, s.bound
        if bound is not None and message.lineage == bound.lineage and message.epoch >= bound.epoch:
            s.departed.add(sender)
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
        s.view = s.bound = None
        s.state, s.reason = ClusterState.LEFT, "we left"


def _differ(one: Heartbeat, other: Heartbeat) -> bool:
    """Whether a heartbeat brings news that decisions may hang on."""
    return _news(one) != _news(other)


_news = attrgetter(
    "phase", "hears", "lineage", "epoch", "view", "bound", "bound_epoch", "ended", "wants",
    "aborted", "term", "withholds",
)  # fmt: skip


def _is_news(before: Heartbeat, beat: Heartbeat, view: View | None) -> bool:
    """The same; how much it has trained matters only outside of our lineage."""
    is_ours = view is not None and beat.lineage == view.lineage
    return _differ(before, beat) or (before.samples != beat.samples and not is_ours)
