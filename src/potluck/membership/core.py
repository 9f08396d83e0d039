"""Membership and election of one process in one job, as a pure state machine.

The driver of a :class:`ClusterCore` tells it what happens on the control connections and when,
carries out the effects it returns in their order, and calls ``tick`` at ``next_deadline``.  The
rules, and why they are safe, are in ``docs/internals/membership.md``.

The parts: :mod:`~potluck.membership.state` (what a process knows, and whom it hears),
:mod:`~potluck.membership.health`, :mod:`~potluck.membership.election` (who leads),
:mod:`~potluck.membership.views` (agreeing on the next view, and being in it),
:mod:`~potluck.membership.bootstrap` (founding and merging).  Here are the evidence of deaths, and
who gets which message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

from potluck._types import Branch, ProcessId, View
from potluck.errors import MalformedFrame
from potluck.membership.bootstrap import Bootstrap, LineageMerge
from potluck.membership.election import ElectionManager
from potluck.membership.events import (
    ClusterConfig,
    ClusterState,
    ConnectTo,
    Disconnect,
    Effect,
    MembershipChange,
    Note,
    ProbePort,
    SendMessage,
)
from potluck.membership.health import HealthMonitor
from potluck.membership.messages import (
    MAX_BRANCHES,
    MAX_CONTACTS,
    RELAYABLE,
    Accepted,
    Cause,
    CauseCode,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Founded,
    Heartbeat,
    KnownProcesses,
    Lost,
    MergeAnswer,
    MergeRequest,
    Phase,
    PreVote,
    PreVoteReply,
    ProcessInfo,
    ProcessRole,
    Propose,
    Relayed,
    Vote,
    VoteRequest,
    clip,
    decode,
)
from potluck.membership.state import Contact, MembershipState, view_mark
from potluck.membership.views import (
    ElectionDriver,
    NextViewPlanner,
    ViewInstaller,
    ViewProposer,
    never_in,
)

# --------------------------------------------------------------------------------------------------
# Who is there and who is dead: connections, probes, restarts, clones.
#
# That a process has *ended* is known from a refusal of its port or from a later start in its place.
# That is a *proof of death*, on which its fellow members may act, only if it comes so soon after
# our last contact that the dead one cannot have agreed on anything without us: it waits twice its
# pause for those it does not hear.

_MARGIN = 0.9  # of the time for which a proof holds; clocks may differ in speed by so much
_ASKED_AT_ONCE = 8  # processes that were left out; the others follow in turn
_CARDS_AT_ONCE = 8  # the longest card has some 5 KiB
_ENDED_KEPT = 1024
_EXPELLED_KEPT = 256
_WHY_LIMIT = 200  # characters; a view may have many causes


class FailureEvidence:
    """Keeps the table of contacts, and the proofs of death."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state
        self._probe_at = self._ask_at = float("-inf")
        self._asked = 0  # times that we probed a process that was left out
        self._successors: dict[ProcessId, str] = {}
        self._accused: dict[ProcessId, set[ProcessId]] = {}  # in this view, by whom

    # --- coming ---

    def connected(self, card: ProcessInfo) -> None:
        """A connection is open."""
        s = self._state
        process = card.process
        if process in s.expelled:  # people know
            s.out.append(Disconnect(process, s.expelled[process]))
            return
        refusal = self._why_refused(card)
        if refusal:
            s.out.append(Disconnect(process, refusal))
            s.note(MembershipChange.REFUSED, f"{card} is refused: {refusal}", process)
            return
        for contact in list(s.contacts):
            if card.succeeds(contact.card):
                self._superseded(contact, card)
        self._look_for_heirs([card])
        if s.ended.pop(process, None) is not None and s.proofs.pop(process, None) is not None:
            sentence = f"{card} was considered dead but is alive"
            s.note(MembershipChange.RETRACTED, sentence, process)
        known = s.contacts.get(process)
        if known is None or not known.is_connected:
            s.note(MembershipChange.MET, f"{card} is connected", process)
        s.contacts.connect(card, s.now)
        s.greet(process)
        self._introduce(process)
        if s.bound is not None and card.role is ProcessRole.OBSERVER:
            s.send(process, s.bound)  # a member says with its first beat what it has missed
        s.is_dirty = True

    def _why_refused(self, card: ProcessInfo) -> str:
        s = self._state
        if card.process == s.id or (card.node == s.me.node and card.machine != s.me.machine):
            return "it has the identity of this machine; was its key copied?"
        for contact in s.contacts:
            other = contact.card
            if other.node != card.node or other.process == card.process or not other.machine:
                continue
            if other.machine != card.machine:
                return f"the identity of {other} shows up on another machine; was its key copied?"
            if other.succeeds(card):
                return f"{other} started later in its place"
        if s.contacts.is_full and s.contacts.get(card.process) is None:
            return "too many processes are connected"
        return ""

    def _superseded(self, contact: Contact, card: ProcessInfo) -> None:
        """A later start in the same place shows that a process has ended."""
        s = self._state
        process, how = contact.process, f"{card} has started in its place"
        if contact.is_connected and contact.card.boot != card.boot and s.contacts.is_heard(process):
            # Two machines with one disk?  If it was a reboot, the old one will not be heard again.
            self._successors[process] = how
            return
        if contact.is_connected:
            s.out.append(Disconnect(process, how))
            self.disconnected(process, how)
        self._has_ended(process, how)

    def _look_for_heirs(self, cards: Iterable[ProcessInfo]) -> None:
        """A later start in the place of a process that was left out shows that it has ended."""
        s = self._state
        places = [(who, s.contacts.last_card(who)) for who in self._asked_after()]
        for card in cards if places else ():
            for who, known in places:
                if card.succeeds(known):
                    self._has_ended(who, f"{card} has started in its place")

    def _asked_after(self) -> list[ProcessId]:
        """Those that were left out, are not here, and are not known to have ended."""
        s = self._state
        out = [who for who in s.left_out if who not in s.ended]
        return [who for who in out if s.contacts.get(who) is None]

    def _introduce(self, newcomer: ProcessId) -> None:
        """Tell a newcomer of all that are here, so that everybody meets everybody."""
        s = self._state
        cards = [
            contact.card
            for contact in s.contacts
            if contact.process != newcomer
            and contact.is_member
            and s.contacts.is_heard(contact.process)
        ]
        for start in range(0, len(cards), _CARDS_AT_ONCE):
            s.send(newcomer, KnownProcesses(tuple(cards[start : start + _CARDS_AT_ONCE])))

    # --- going ---

    def disconnected(self, process: ProcessId, cause: str) -> None:
        """The last connection to a process ended."""
        s = self._state
        contact = s.contacts.get(process)
        if contact is None or not contact.is_connected:
            return
        s.contacts.disconnect(contact, cause, s.now)
        s.is_dirty = True
        s.beat_soon()
        if not s.is_kept(process):
            s.contacts.forget(process)
            return
        if s.is_member(process) and process not in s.gone:
            self._lose(process, f"the connection to {contact.card} ended: {cause}")
            s.out.append(ProbePort(process))
        self._review_successors()

    def _lose(self, process: ProcessId, sentence: str) -> None:
        s = self._state
        s.note(MembershipChange.LOST, sentence, process)
        s.abort(process, sentence)
        s.report_loss(process, sentence)

    # --- removing ---

    def expel(self, process: ProcessId, why: str, *, by: ProcessId | None = None) -> None:
        """Remove a process for what it sent: here, and from the view if it is a member.

        All members are told, unless one of them (``by``) has told us.  It stays out until it
        starts again.
        """
        s = self._state
        if process == s.id or process in s.expelled:
            return
        sentence = f"{s.name(process)} is removed: {why}"
        s.expelled[process] = clip(why, _WHY_LIMIT)
        if len(s.expelled) > _EXPELLED_KEPT:
            del s.expelled[next(iter(s.expelled))]
        s.out.append(Disconnect(process, sentence))
        s.note(MembershipChange.EXPELLED, sentence, process)
        contact = s.contacts.get(process)
        if contact is not None and contact.is_connected:
            s.contacts.disconnect(contact, why, s.now)
        s.is_dirty = True
        s.beat_soon()
        if not s.is_kept(process):
            s.contacts.forget(process)
        elif s.is_member(process):
            s.abort(process, sentence, by=by)
            if by is None:
                self._accuse(process)

    def _accuse(self, process: ProcessId) -> None:
        """Have the other members of the view remove a process as we did."""
        s = self._state
        view = s.election.view
        others = [who for who in s.others() if who not in s.expelled]
        why = s.expelled[process]
        s.tell(others, Lost(view.lineage, view.epoch, process, why, is_expelled=True))

    def accused(self, accuser: ProcessId, process: ProcessId, why: str) -> None:
        """A member has removed another one: do so as well.

        One member's word removes fewer than half of a view, and only a member's word counts against
        the one that we removed first.
        """
        s = self._state
        told = self._accused.setdefault(accuser, set())
        most = (len(s.election.view.members) - 1) // 2
        if accuser in s.expelled or not s.is_member(process) or len(told | {process}) > most:
            return
        told.add(process)
        self.expel(process, why, by=accuser)

    def probed_dead(self, process: ProcessId, how: str) -> None:
        """A probe showed that it has ended: its port refuses, or its slot is free."""
        s = self._state
        contact = s.contacts.get(process)
        if process in s.left_out if contact is None else not contact.is_connected:
            self._has_ended(process, how)

    def unreachable(self, process: ProcessId, why: str) -> None:
        """A probe proved nothing."""
        s = self._state
        if s.is_member(process) and process not in s.gone:
            sentence = f"it is not known whether {s.name(process)} ended: {why}"
            s.note_once(f"probe {process}", sentence, process)

    def take_ended(self, teller: Contact, marks: Collection[int]) -> None:
        """A process tells us who of the view that we are bound to has ended."""
        s = self._state
        told = set(marks)
        for process in s.kept() if told else ():
            contact = s.contacts.of(process)
            if contact.mark in told and process not in s.ended and not contact.is_connected:
                self._has_ended(process, f"{teller.card} reports that it has ended")

    def _has_ended(self, process: ProcessId, how: str) -> None:
        s = self._state
        s.ended.setdefault(process, (how, s.time))
        if len(s.ended) > _ENDED_KEPT:
            del s.ended[next(iter(s.ended))]
        s.is_dirty = True
        if not s.is_kept(process):
            s.contacts.forget(process)
        elif s.is_member(process) and process not in s.proofs and self._is_proof(process):
            sentence = f"{s.name(process)} is dead: {how}"
            s.proofs[process] = f"it is dead ({how})"
            s.note(MembershipChange.PROVED_DEAD, sentence, process)
            s.abort(process, sentence)
            s.report_loss(process, sentence, is_proved=True)

    def _is_proof(self, process: ProcessId) -> bool:
        """Whether the dead one cannot have agreed on anything without us."""
        s = self._state
        contact = s.contacts.of(process)
        _, learnt = s.ended[process]
        # It waits for twice the pause that our beat announced before it continues without us.
        shared = min(s.pause_after, contact.leased_for)
        return learnt - contact.leased_at < 2 * _MARGIN * shared

    # --- what is due ---

    def begin(self) -> None:
        """A view was installed: look who of it has been lost meanwhile."""
        s = self._state
        self._accused.clear()
        self._look_for_heirs(contact.card for contact in list(s.contacts))
        for process in s.others():
            contact = s.contacts.of(process)
            if contact.is_connected:
                continue
            if process in s.expelled:  # those who agreed on the view had not heard of it
                s.abort(process, f"{contact.card} is removed: {s.expelled[process]}")
                self._accuse(process)
                continue
            how = self._how_ended(contact)
            if how:
                self._has_ended(process, how)
            if process not in s.proofs:
                self._lose(process, f"there is no connection to {contact.card}")
                s.out.append(ProbePort(process))

    def _how_ended(self, contact: Contact) -> str:
        """How we know that a process has ended; empty if we do not."""
        s = self._state
        if contact.process in s.ended:
            return s.ended[contact.process][0]
        heirs = (other.card for other in s.contacts if other.card.succeeds(contact.card))
        return next((f"{heir} has started in its place" for heir in heirs), "")

    def review(self) -> None:
        """Notice who has fallen silent; probe those whose connection ended."""
        s = self._state
        self._review_successors()
        kept = s.kept()
        is_due = bool(kept) and s.time >= self._probe_at
        for process in kept:
            contact = s.contacts.of(process)
            if process in s.gone:
                continue
            if is_due and not contact.is_connected and process not in s.ended:
                s.out.append(ProbePort(process))
            if s.is_member(process) and not s.is_aborted and s.is_lost(process):
                self._lose(process, f"{contact.card} is lost: {s.why_doubtful(process)}")
        if is_due:
            slow = s.state is not ClusterState.ACTIVE
            self._probe_at = s.time + (s.pause_after if slow else s.interval)
        if s.time >= self._ask_at:
            self._ask_at = s.time + s.pause_after
            self._ask_after_those_left_out()

    def _ask_after_those_left_out(self) -> None:
        """Probe a few of them: a training may wait for one that is dead."""
        waiting = self._asked_after()
        first = self._asked % len(waiting) if waiting else 0
        for who in (waiting[first:] + waiting[:first])[:_ASKED_AT_ONCE]:
            self._state.out.append(ProbePort(who))
            self._asked += 1

    def _review_successors(self) -> None:
        """Processes whose place was taken while we still heard them."""
        for process, how in list(self._successors.items()):
            if not self._state.contacts.is_heard(process):
                del self._successors[process]
                self._has_ended(process, how)


# --------------------------------------------------------------------------------------------------
# What arrives is sorted here: to whom it goes, and what is answered to those who are behind.
#
# Messages of strangers and of views other than ours are never acted upon.  A member that is
# behind in our lineage, or in one that we have left, is told the newest view that we know.

_OBSERVED_KEPT = 64  # lineages

_Handler = Callable[[ProcessId, Any], None]


class MessageDispatch:
    """Sorts what arrives."""

    def __init__(
        self,
        state: MembershipState,
        installer: ViewInstaller,
        campaign: ElectionDriver,
        proposer: ViewProposer,
        founding: Bootstrap,
        merging: LineageMerge,
        *,
        evidence: FailureEvidence,
    ) -> None:
        self._state = state
        self._installer = installer
        self._campaign = campaign
        self._proposer = proposer
        self._evidence = evidence
        self.observed: dict[str, View] = {}
        self._behind: dict[ProcessId, float] = {}  # since when, of those we cannot tell all
        self._open: dict[type, _Handler] = {
            KnownProcesses: self._take_acquaintances,
            Commit: self._take_commit,
            Departed: self._take_departed,
            Found: founding.take_found,
            Founded: founding.take_founded,
            MergeRequest: merging.take_request,
            MergeAnswer: merging.take_answer,
        }
        self._among_members: dict[type, _Handler] = {
            Lost: self._take_lost,
            PreVote: campaign.take_canvass,
            PreVoteReply: campaign.take_leaning,
            VoteRequest: campaign.take_vote_request,
            Vote: campaign.take_vote,
            Propose: proposer.take_propose,
            Accepted: proposer.take_accepted,
        }

    def take(self, sender: ProcessId, message: ClusterMessage) -> None:
        """A message from a connected process."""
        s = self._state
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
        s = self._state
        if not (s.is_member(sender) and s.is_member(message.origin)) or message.origin == s.id:
            return
        if message.origin in s.expelled:
            return
        if message.to != s.id:
            if message.origin == sender and s.contacts.is_heard(message.to):
                s.out.append(SendMessage(message.to, message))
            return
        try:
            content = decode(message.content)
        except MalformedFrame:
            return
        if isinstance(content, RELAYABLE):
            self._sort(message.origin, content)

    def _sort(self, sender: ProcessId, message: ClusterMessage) -> None:
        s = self._state
        kind = type(message)
        if kind in self._open:
            s.is_dirty = True
            self._open[kind](sender, message)
        elif self._is_for_our_view(sender, message):
            s.is_dirty = True
            self._among_members[kind](sender, message)

    def _is_for_our_view(self, sender: ProcessId, message: Any) -> bool:
        s = self._state
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
        s = self._state
        bound, word = s.bound, s.history.last_word(lineage)
        is_back = s.view is None and bound is not None and bound.lineage == lineage
        if word is None or not (is_back and s.history.has_come_back(lineage, epoch)):
            return False
        s.send(who, word)
        return True

    def _help_along(self, who: ProcessId, lineage: str, epoch: int) -> None:
        """Tell a process that is behind what followed its view, and the newest, once in a beat."""
        s = self._state
        contact = s.contacts.of(who)
        known = s.history.following(lineage, epoch)
        if not known:
            is_idle = contact.beat is not None and contact.beat.phase is not Phase.ACTIVE
            heir = s.history.successor(lineage, epoch) if is_idle else None
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
        s = self._state
        if len(self._behind) > MAX_CONTACTS:
            self._behind.clear()
        return s.time - self._behind.setdefault(who, s.time) >= s.interval / 2

    def _catch_up(self, who: ProcessId, beat: Heartbeat, *, is_first: bool) -> None:
        """Tell a process where its lineage is, or where ours is if it is in none."""
        s = self._state
        bound = s.bound
        if beat.bound:
            self._help_along(who, beat.bound, beat.bound_epoch)
        if is_first and bound is not None and beat.bound != bound.lineage:
            s.send(who, bound)

    # --- heartbeats ---

    def _take_heartbeat(self, contact: Contact, beat: Heartbeat) -> None:
        s = self._state
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
        s = self._state
        who = contact.process
        is_elsewhere = beat.bound not in {"", bound.lineage}
        if is_elsewhere and who in bound.view.members and who not in s.departed | s.elsewhere:
            self._help_along(who, bound.lineage, 0)

    def _compare_views(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """Look where the sender is, from our own view."""
        if (beat.lineage, beat.epoch) != (view.lineage, view.epoch):
            self._take_other_view(contact, beat, view)
        elif beat.view != view_mark(view):
            self._installer.split(contact.process, f"{contact.card} has another view {view.epoch}")
        elif beat.aborted and contact.process in view.members:
            self._take_abort(contact, beat, view)

    def _take_abort(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """A member has ended what it did in our view, before we learned whom it lost."""
        s = self._state
        if beat.lost is None or beat.lost not in view.members:
            sentence = f"{contact.card} has stopped its operations"
            s.abort(None, sentence, orderly=beat.orderly, by=contact.process)
        elif beat.orderly:
            sentence = f"{s.name(beat.lost)} left, according to {contact.card}"
            s.abort(beat.lost, sentence, orderly=True, by=contact.process)
        else:
            sentence = f"{contact.card} has lost {s.name(beat.lost)}"
            s.abort(beat.lost, sentence, by=contact.process)

    def _counts(self, beat: Heartbeat) -> bool:
        """Whether the sender has neither continued without us nor agreed to."""
        view = self._state.view
        if beat.withholds:
            return False
        if view is None:
            return True
        return beat.epoch <= view.epoch if beat.lineage == view.lineage else not beat.size

    def _take_other_view(self, contact: Contact, beat: Heartbeat, view: View) -> None:
        """A process is elsewhere; if it is a member of our view, remind it."""
        s = self._state
        process = contact.process
        if process not in view.members or process in s.election.departed:
            return
        if beat.lineage != view.lineage:
            self._help_along(process, view.lineage, 0)

    # --- the others ---

    def _take_acquaintances(self, sender: ProcessId, message: KnownProcesses) -> None:  # noqa: ARG002
        s = self._state
        for card in message.cards:
            s.contacts.remember(card)
            known = s.contacts.get(card.process)
            if known is not None and known.is_connected:
                continue
            if card.process == s.id or card.process in s.ended or s.contacts.is_full:
                continue
            if not any(contact.card.succeeds(card) for contact in s.contacts):
                s.out.append(ConnectTo(card))

    def _take_lost(self, sender: ProcessId, message: Lost) -> None:
        s = self._state
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
        self._installer.take_commit(sender, message)

    def _take_departed(self, sender: ProcessId, message: Departed) -> None:
        s = self._state
        if message.is_leaving:
            s.ended[sender] = "it left", s.time
        view, bound = s.view, s.bound
        if bound is not None and message.lineage == bound.lineage and message.epoch >= bound.epoch:
            (s.elsewhere if message.is_followed else s.departed).add(sender)
        if view is None or message.lineage != view.lineage or sender not in view.members:
            return
        if message.epoch == view.epoch:
            self._proposer.take_departed(sender, message)
        elif message.is_leaving and message.epoch < view.epoch:
            # What it had promised and accepted was about our view, not about the next one.
            self._proposer.take_departed(sender, never_in(view, message.reason))
        elif message.epoch < view.epoch:
            self._help_along(sender, message.lineage, message.epoch)
        else:
            s.contacts.write_off(s.contacts.of(sender))  # it has been in a later view than ours

    def _observe(self, commit: Commit) -> None:
        """Keep what an observer is told."""
        s = self._state
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
        """Tell every process that we leave."""
        s = self._state
        word = self._installer.last_word(reason, is_leaving=True)
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


# --------------------------------------------------------------------------------------------------

_ROUNDS = 4  # a decision may make the next one possible, e.g. an election a proposal


class ClusterCore:
    """Who is in, agreed with the others.

    >>> from potluck._types import NodeId
    >>> me = ProcessInfo(node=NodeId("a" * 32), incarnation=1, name="attic")
    >>> core = ClusterCore(me, ClusterConfig(solo_delay=0.5), now=0.0)
    >>> _ = core.tick(0.5)
    >>> core.state.value, core.view.members == (me.process,), core.leader == me.process
    ('active', True, True)
    """

    def __init__(self, me: ProcessInfo, config: ClusterConfig, now: float) -> None:
        self.me = me
        self.config = config
        self._state = MembershipState(me, config, now)
        self._installer = ViewInstaller(self._state)
        self._planner = NextViewPlanner(self._state)
        self._campaign = ElectionDriver(self._state)
        self._proposer = ViewProposer(self._state, self._installer, self._planner, self._campaign)
        self._founding = Bootstrap(self._state, self._installer)
        self._merging = LineageMerge(self._state, self._proposer)
        self._evidence = FailureEvidence(self._state)
        self._dispatch = MessageDispatch(
            self._state,
            self._installer,
            self._campaign,
            self._proposer,
            self._founding,
            self._merging,
            evidence=self._evidence,
        )
        self._known_view: View | None = None
        self._timers: list[float] = []
        self._is_batch = False
        self._look_at_timers()

    # --- what one can ask ---

    @property
    def view(self) -> View | None:
        """The view we are in."""
        return self._state.view

    @property
    def state(self) -> ClusterState:
        """Where we stand."""
        return self._state.state

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self._state.reason

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0 of the view."""
        return self.view.leader if self.view is not None else None

    @property
    def health(self) -> HealthMonitor:
        """How our contacts are."""
        return self._state.health

    @property
    def election(self) -> ElectionManager:
        """Who leads in which term."""
        return self._state.election

    @property
    def observed(self) -> dict[str, View]:
        """The newest view of each lineage that an observer was told of."""
        return self._dispatch.observed

    @property
    def samples(self) -> int:
        """Committed training samples in our state; the driver keeps it current."""
        return self._state.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        self._state.samples = samples

    @property
    def origin(self) -> tuple[Branch, ...]:
        """Where the checkpoint that was loaded came from; the driver sets it."""
        return self._state.origin

    @origin.setter
    def origin(self, origin: tuple[Branch, ...]) -> None:
        self._state.origin = origin[-MAX_BRANCHES:]

    @property
    def bound(self) -> Commit | None:
        """The newest view known of the lineage that we belong to; None while we are free."""
        return self._state.bound

    def missing(self, now: float) -> tuple[Cause, ...]:
        """Members of our view that are out of contact, and why; of the last view if we wait."""
        s = self._state
        s.now = now
        if s.view is not None:
            return self._planner.missing(s.view)
        return tuple(
            s.cause(who, CauseCode.SILENT, s.why_doubtful(who))
            for who in s.kept()
            if who not in s.ended and who not in s.departed and not s.contacts.is_heard(who)
        )

    @property
    def is_constant(self) -> bool:
        """Whether we were in every view of our lineage, and of those it comes from."""
        return self._state.is_constant

    @property
    def can_be_let_in(self) -> bool:
        """Whether we hear a member at work of the view that we belong to: then we wait for it."""
        contacts = self._state.contacts
        heard = (contacts.of(who) for who in self._state.kept() if contacts.is_heard(who))
        return any(each.beat is not None and each.beat.phase is Phase.ACTIVE for each in heard)

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[dict[ProcessId, str], tuple[ProcessId, ...]]:
        """Processes that our lineage left out and that may be alive, and those that have ended.

        ``awaited`` are some that others have told of.  One that may be alive may have a state that
        no member has.
        """
        s = self._state
        found = {**awaited, **s.left_out}
        alive = {who: name for who, name in found.items() if not self.has_ended(who)}
        return alive, tuple(who for who in found if who in s.ended)

    def has_ended(self, process: ProcessId) -> bool:
        """Whether a process is known to have ended; one that went to another lineage has not."""
        return process in self._state.ended

    @property
    def is_insisting(self) -> bool:
        """Whether members that are left out need not be waited for, whatever they have."""
        return self._state.is_insisting or self._state.quorum == "any"

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` wants to be called next, by the clock of ``now``; None after leaving."""
        s = self._state
        if s.state is ClusterState.LEFT:
            return None
        # What is past has been looked at, or the next beat will be soon enough.
        time, due = s.time, s.next_beat
        for timer in self._timers:
            if time < timer < due:
                due = timer
        due = s.clock.on_the_wall(due)
        judged = s.health.next_deadline
        return due if judged is None else min(due, judged)

    def _look_at_timers(self) -> None:
        """Note when the parts want to be looked at; only their own decisions change that."""
        parts = self._campaign, self._proposer, self._founding
        self._timers = [time for part in parts for time in part.deadlines if time is not None]

    # --- what happens ---

    def begin_batch(self) -> None:
        """Take in several things before deciding: what is told from now on is only noted.

        Each call still returns its own effects, to be carried out in order.  A driver that finds
        much waiting tells it all and then calls :meth:`end_batch`: so no process is accused, and no
        pause begins, while the answer is among what waits.
        """
        self._is_batch = True

    def end_batch(self, now: float) -> list[Effect]:
        """Decide what follows from all that was told since :meth:`begin_batch`."""
        self._is_batch = False
        self._begin(now)
        return self._finish()

    def connected(self, peer: ProcessInfo, now: float) -> list[Effect]:
        """An authenticated control connection to a process is open."""
        if self._begin(now):
            self._evidence.connected(peer)
        return self._finish()

    def disconnected(self, peer: ProcessId, cause: str, now: float) -> list[Effect]:
        """The last control connection to a process ended."""
        if self._begin(now):
            self._evidence.disconnected(peer, cause)
        return self._finish()

    def expel(self, peer: ProcessId, why: str, now: float) -> list[Effect]:
        """Remove a process for what it sent; ``why`` says what, and is told to all members."""
        if self._begin(now):
            self._evidence.expel(peer, why)
        return self._finish()

    def ended(self, peer: ProcessId, how: str, now: float) -> list[Effect]:
        """A probe showed that a process has ended; ``how`` says by what."""
        if self._begin(now):
            self._evidence.probed_dead(peer, how)
        return self._finish()

    def unreachable(self, peer: ProcessId, why: str, now: float) -> list[Effect]:
        """A probe of its port proved nothing."""
        if self._begin(now):
            self._evidence.unreachable(peer, why)
        return self._finish()

    def receive(self, sender: ProcessId, message: ClusterMessage, now: float) -> list[Effect]:
        """A message arrived on the control connection."""
        if self._begin(now):
            self._dispatch.take(sender, message)
        return self._finish()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self._begin(now):
            s = self._state
            events = s.health.tick(now)
            s.out.extend(Note(event) for event in events)
            self._evidence.review()
            if s.time >= s.next_beat:
                s.beat()
            s.is_dirty = True
        return self._finish()

    def leave(self, now: float) -> list[Effect]:
        """Leave; after this the core does nothing more."""
        if self._begin(now):
            self._dispatch.leave("it left the job")
        return self._finish()

    def step_down(self, now: float) -> list[Effect]:
        """Hand rank 0 to the next member, if it is ours."""
        s = self._state
        if self._begin(now) and s.view is not None:
            if s.view.leader != s.id or len(s.view.members) == 1:
                why = "only the leader can hand over, and only to another member"
                s.note(MembershipChange.REFUSED, why, s.id)
            else:
                self._planner.is_stepping_down = s.is_dirty = True
                s.election.stepped_down(f"{s.me} hands over rank 0")
        return self._finish()

    def continue_without_missing(self, now: float) -> list[Effect]:
        """A person says: do not wait for members that are missing, continue with those here."""
        s = self._state
        if self._begin(now) and s.bound is not None:
            if s.state is ClusterState.ACTIVE:
                s.is_insisting = True
            elif s.released_at is None:
                s.released_at, s.is_dirty = s.time, True
        return self._finish()

    def call_election(self, now: float) -> list[Effect]:
        """Replace a lost leader, where that is not done without being asked to."""
        if self._begin(now):
            self._campaign.is_called = self._state.is_dirty = True
        return self._finish()

    def _begin(self, now: float) -> bool:
        """Take the time; whether anything still matters to us."""
        s = self._state
        s.now = now
        before = s.time
        time = s.clock.advance(now)
        if time - before > s.pause_after:
            s.woke_at = time
        s.out = []
        for timer in self._timers:
            if before < timer <= time:
                s.is_dirty = True
        return s.state is not ClusterState.LEFT

    def _finish(self) -> list[Effect]:
        """Decide what follows from what happened."""
        s = self._state
        if self._is_batch:
            self._notice_view()  # the next message may be of a view that this one installed
        elif s.is_dirty:
            self._decide()
            self._look_at_timers()
        if s.election.events:
            s.note_elections()
        return s.out

    def _decide(self) -> None:
        s = self._state
        for _ in range(_ROUNDS):
            if not s.is_dirty or s.state is ClusterState.LEFT:
                break
            s.is_dirty = False
            self._notice_view()
            if s.view is not None:
                self._installer.review(s.view)
                self._proposer.review(s.view)
                self._notice_view()
            self._founding.review()
            self._merging.review()
            self._notice_view()

    def _notice_view(self) -> None:
        """Let the parts forget what belonged to another view."""
        if self._state.view is not self._known_view:
            self._known_view = self._state.view
            self._campaign.begin()
            self._proposer.begin()
            self._founding.begin()
            self._merging.begin()
            self._evidence.begin()
