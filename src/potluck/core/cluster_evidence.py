"""Who is there and who is dead: connections, probes, restarts, clones.

That a process has *ended* is known from a refusal of its port or from a later start in its place.
That is a *proof of death*, on which its fellow members may act, only if it comes so soon after our
last contact that the dead one cannot have agreed on anything without us: it waits twice its pause
for those it does not hear.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_effects import Disconnect, Probe
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_messages import Acquaintances, Lost, clip
from potluck.core.cluster_situation import Situation
from potluck.vocabulary import ProcessId

__all__ = ["Evidence"]

_MARGIN = 0.9  # of the time for which a proof holds; clocks may differ in speed by so much
_ASKED_AT_ONCE = 8  # processes that were left out; the others follow in turn
_CARDS_AT_ONCE = 8  # the longest card has some 5 KiB
_ENDED_KEPT = 1024
_EXPELLED_KEPT = 256
_WHY_LIMIT = 200  # characters; a view may have many causes


class Evidence:
    """Keeps the table of contacts, and the proofs of death."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._probe_at = self._ask_at = float("-inf")
        self._asked = 0  # times that we probed a process that was left out
        self._successors: dict[ProcessId, str] = {}
        self._accused: dict[ProcessId, set[ProcessId]] = {}  # in this view, by whom

    # --- coming ---

    def connected(self, card: ProcessCard) -> None:
        """A lane is open."""
        s = self._situation
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
            sentence = f"{card} was taken for dead, but it is there"
            s.note(MembershipChange.RETRACTED, sentence, process)
        known = s.contacts.get(process)
        if known is None or not known.is_connected:
            s.note(MembershipChange.MET, f"{card} is connected", process)
        s.contacts.connect(card, s.now)
        s.greet(process)
        self._introduce(process)
        if s.bound is not None and card.role is Role.OBSERVER:
            s.send(process, s.bound)  # a member says with its first beat what it has missed
        s.is_dirty = True

    def _why_refused(self, card: ProcessCard) -> str:
        s = self._situation
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

    def _superseded(self, contact: Contact, card: ProcessCard) -> None:
        """A later start in the same place shows that a process has ended."""
        s = self._situation
        process, how = contact.process, f"{card} has started in its place"
        if contact.is_connected and contact.card.boot != card.boot and s.contacts.is_heard(process):
            # Two machines with one disk?  If it was a reboot, the old one will not be heard again.
            self._successors[process] = how
            return
        if contact.is_connected:
            s.out.append(Disconnect(process, how))
            self.disconnected(process, how)
        self._has_ended(process, how)

    def _look_for_heirs(self, cards: Iterable[ProcessCard]) -> None:
        """A later start in the place of a process that was left out shows that it has ended."""
        s = self._situation
        places = [(who, s.contacts.last_card(who)) for who in self._asked_after()]
        for card in cards if places else ():
            for who, known in places:
                if card.succeeds(known):
                    self._has_ended(who, f"{card} has started in its place")

    def _asked_after(self) -> list[ProcessId]:
        """Those that were left out, are not here, and are not known to have ended."""
        s = self._situation
        out = [who for who in s.left_out if who not in s.ended]
        return [who for who in out if s.contacts.get(who) is None]

    def _introduce(self, newcomer: ProcessId) -> None:
        """Tell a newcomer of all that are here, so that everybody meets everybody."""
        s = self._situation
        cards = [
            contact.card
            for contact in s.contacts
            if contact.process != newcomer
            and contact.is_member
            and s.contacts.is_heard(contact.process)
        ]
        for start in range(0, len(cards), _CARDS_AT_ONCE):
            s.send(newcomer, Acquaintances(tuple(cards[start : start + _CARDS_AT_ONCE])))

    # --- going ---

    def disconnected(self, process: ProcessId, cause: str) -> None:
        """The last lane to a process ended."""
        s = self._situation
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
            s.out.append(Probe(process))
        self._review_successors()

    def _lose(self, process: ProcessId, sentence: str) -> None:
        s = self._situation
        s.note(MembershipChange.LOST, sentence, process)
        s.abort(process, sentence)
        s.report_loss(process, sentence)

    # --- removing ---

    def expel(self, process: ProcessId, why: str, *, by: ProcessId | None = None) -> None:
        """Remove a process for what it sent: here, and from the view if it is a member.

        All members are told, unless one of them (``by``) has told us.  It stays out until it
        starts again.
        """
        s = self._situation
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
        s = self._situation
        view = s.election.view
        others = [who for who in s.others() if who not in s.expelled]
        why = s.expelled[process]
        s.tell(others, Lost(view.lineage, view.epoch, process, why, is_expelled=True))

    def accused(self, accuser: ProcessId, process: ProcessId, why: str) -> None:
        """A member has removed another one: do so as well.

        One member's word removes fewer than half of a view, and nobody else's word counts against
        the one that we removed first.
        """
        s = self._situation
        told = self._accused.setdefault(accuser, set())
        most = max(1, (len(s.election.view.members) - 1) // 2)
        if accuser in s.expelled or not s.is_member(process) or len(told | {process}) > most:
            return
        told.add(process)
        self.expel(process, why, by=accuser)

    def probed_dead(self, process: ProcessId, how: str) -> None:
        """A probe showed that it has ended: its port refuses, or its slot is free."""
        s = self._situation
        contact = s.contacts.get(process)
        if process in s.left_out if contact is None else not contact.is_connected:
            self._has_ended(process, how)

    def unreachable(self, process: ProcessId, why: str) -> None:
        """A probe proved nothing."""
        s = self._situation
        if s.is_member(process) and process not in s.gone:
            sentence = f"what became of {s.name(process)} is not known: {why}"
            s.note_once(f"probe {process}", sentence, process)

    def take_ended(self, teller: Contact, marks: Collection[int]) -> None:
        """A process tells us who of the view that we are bound to has ended."""
        s = self._situation
        told = set(marks)
        for process in s.kept() if told else ():
            contact = s.contacts.of(process)
            if contact.mark in told and process not in s.ended and not contact.is_connected:
                self._has_ended(process, f"{teller.card} knows that it has ended")

    def _has_ended(self, process: ProcessId, how: str) -> None:
        s = self._situation
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
        s = self._situation
        contact = s.contacts.of(process)
        _, learnt = s.ended[process]
        # It waits for twice the pause that our beat announced before it goes on without us.
        shared = min(s.pause_after, contact.leased_for)
        return learnt - contact.leased_at < 2 * _MARGIN * shared

    # --- what is due ---

    def begin(self) -> None:
        """A view was installed: look who of it has been lost meanwhile."""
        s = self._situation
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
                s.out.append(Probe(process))

    def _how_ended(self, contact: Contact) -> str:
        """How we know that a process has ended; empty if we do not."""
        s = self._situation
        if contact.process in s.ended:
            return s.ended[contact.process][0]
        heirs = (other.card for other in s.contacts if other.card.succeeds(contact.card))
        return next((f"{heir} has started in its place" for heir in heirs), "")

    def review(self) -> None:
        """Notice who has fallen silent; probe those whose connection ended."""
        s = self._situation
        self._review_successors()
        kept = s.kept()
        is_due = bool(kept) and s.time >= self._probe_at
        for process in kept:
            contact = s.contacts.of(process)
            if process in s.gone:
                continue
            if is_due and not contact.is_connected and process not in s.ended:
                s.out.append(Probe(process))
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
            self._situation.out.append(Probe(who))
            self._asked += 1

    def _review_successors(self) -> None:
        """Processes whose place was taken while we still heard them."""
        for process, how in list(self._successors.items()):
            if not self._situation.contacts.is_heard(process):
                del self._successors[process]
                self._has_ended(process, how)
