"""What the parts of a cluster core share: the table they sit around, and the way out.

The parts change it in turn, within one call of the core; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import msgspec

from potluck.core.ancestry import MAX_BRANCHES, Branch, Claim
from potluck.core.buckets import TokenBucket
from potluck.core.cluster_archive import Archive
from potluck.core.cluster_cards import ProcessCard, mark
from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_effects import Abort, Effect, Note, Send
from potluck.core.cluster_events import ClusterState, MembershipChange, MembershipEvent
from potluck.core.cluster_messages import (
    RELAYABLE,
    Cause,
    CauseCode,
    Charter,
    ClusterMessage,
    Commit,
    Heartbeat,
    Lost,
    Phase,
    Relayed,
    clip,
    encode,
)
from potluck.core.cluster_surroundings import Surroundings
from potluck.core.election import ElectionManager
from potluck.core.pace import lengthened
from potluck.vocabulary import ProcessId, View

__all__ = ["Situation"]

_DETAILED = 16  # causes in full; of more, each has a name only, so that a message holds them
_REASON_LIMIT = 200  # characters of the reason of one cause; a view may have many
_EAGER = 0.1  # of an interval: so soon after a beat the next may follow when something changed
_EAGER_BURST = 10  # beats out of turn at once,
_EAGER_RATE = 4.0  # and in a second after that
_EAGER_CROWD = 8  # contacts; with more, a round costs as many times more
_NOBODY: frozenset[ProcessId] = frozenset()
_TOLD_OF_LOSSES = 3  # members that hear of a loss: the leader, and who would succeed it


class Situation(Surroundings):
    """Everything that more than one part of a core needs."""

    left_out: dict[ProcessId, str]
    """Names of members of our lineage that a later view left out, though they may be alive."""
    is_insisting: bool
    """Whether a person asked us, while at work, to continue without those left out."""

    def __init__(self, me: ProcessCard, config: ClusterConfig, now: float) -> None:
        super().__init__(me, config, now)
        self.left_out, self.is_insisting = {}, False
        self.election = ElectionManager(self.id, config.election)
        self.archive = Archive()
        self.view: View | None = None
        self.state = ClusterState.JOINING
        self.reason = "it has met nobody yet"
        self.bound: Commit | None = None
        """The newest view known of the lineage that we belong to; None while we are free."""
        self.departed: set[ProcessId] = set()
        """Members of that view that have left the lineage."""
        self.agreed = ""
        """The last founding that we have agreed to."""
        self.is_released = False
        """Whether a person asked us to continue without waiting for those who are missing."""
        self.samples = 0
        """Committed training samples in our state."""
        self.announced_samples = 0
        """What our last heartbeats said of that: two leaders must compare the same numbers."""
        self.origin: tuple[Branch, ...] = ()
        """Where the checkpoint that was loaded came from, if there was one."""
        self.proofs: dict[ProcessId, str] = {}
        """Members whose death we can prove, and how."""
        self.reported: set[ProcessId] = set()
        """Members whose death somebody else can prove."""
        self.ended: dict[ProcessId, tuple[str, float]] = {}
        """Processes that have ended, proved or not, with how and when we learnt it."""
        self.expelled: dict[ProcessId, str] = {}
        """Processes that were removed for what they sent, and what it was; until they restart."""
        self.is_aborted = False
        """Whether operations of the view have been aborted, so that it needs a successor."""
        self.aborted_at = now
        self.lost: ProcessId | None = None
        """For whose loss; the first that we learnt of."""
        self.lost_by: ProcessId | None = None
        """Which process reported that; our own id if we saw it."""
        self.stopped_because = ""
        """Why operations were stopped, in words."""
        self.is_loss_orderly = False
        self.ready_at = now
        """When we may enter a view again."""
        self.out: list[Effect] = []
        self.is_dirty = True
        """Whether something changed that decisions hang on."""
        self.next_beat = now
        self._last_beat = float("-inf")
        self._regular_beat = now  # when the next beat is due that is not out of turn
        self._eager = TokenBucket(_EAGER_RATE, _EAGER_BURST, now)
        self._told: dict[str, str] = {}

    @property
    def phase(self) -> Phase:
        """What our heartbeats say of us."""
        if self.is_observer:
            return Phase.OBSERVING
        if self.state is ClusterState.ACTIVE:
            return Phase.ACTIVE
        if self.state is ClusterState.PAUSED:
            return Phase.PAUSED
        return Phase.JOINING if self.time >= self.ready_at else Phase.WAITING

    @property
    def gone(self) -> frozenset[ProcessId]:
        """Members that will never vote again: proved dead by us, or departed."""
        if not self.proofs and not self.election.departed:
            return _NOBODY
        return self.election.gone.union(self.proofs)

    @property
    def absent(self) -> frozenset[ProcessId]:
        """Members that are not in the view any more for all we know, whatever they had promised."""
        if not self.proofs and not self.election.departed:
            return _NOBODY
        return frozenset(self.election.departed).union(self.proofs)

    def is_member(self, process: ProcessId) -> bool:
        """Whether a process is in our view."""
        return self.view is not None and process in self.view.members

    # --- what binds us ---

    @property
    def quorum(self) -> Literal["majority", "any"]:
        """Fixed when our lineage was founded; before that, as configured."""
        return self.config.quorum if self.bound is None else self.bound.charter.quorum

    def bind(self, commit: Commit) -> None:
        """Belong to this lineage from now on, in this view or in one to come."""
        if self.bound is None or self.bound.lineage != commit.lineage:
            self.left_out, self.is_insisting = {}, False
        self.bound, self.departed = commit, set()
        self.keep_only_known()

    def kept(self) -> list[ProcessId]:
        """The other members of our view, or of the newest one that we are bound to."""
        members = () if self.bound is None else self.bound.view.members
        return [member for member in members if member != self.id]

    def is_kept(self, process: ProcessId) -> bool:
        """Whether a process is in our view, or in the newest one that we are bound to."""
        is_bound = self.bound is not None and process in self.bound.view.members
        return is_bound or self.is_member(process)

    def may_enter(self, lineage: str) -> bool:
        """Whether we may enter a lineage: ours, a child of it begun no earlier, any if free."""
        bound = self.bound
        if bound is None or lineage == bound.lineage:
            return True
        newest = self.archive.newest(lineage)
        return newest is not None and self.is_descendant(newest.charter)

    def is_descendant(self, charter: Charter) -> bool:
        """Whether a lineage branched off ours, at the newest view that we know or later."""
        bound = self.bound
        return bound is not None and any(
            branch.lineage == bound.lineage and branch.epoch >= bound.epoch
            for branch in charter.ancestry
        )

    def why_other_quorum(self, contact: Contact) -> str:
        """What to tell people of a process that was started with another setting."""
        return (
            f"this process was started with quorum={self.quorum!r}, {contact.card} with "
            f"quorum={contact.card.quorum!r}; all processes of a job need the same setting"
        )

    def fellows(self) -> list[Contact]:
        """Those bound to the same lineage who are not at work, and hear us as we hear them."""
        lineage = "" if self.bound is None else self.bound.lineage
        return [
            contact
            for contact in self.contacts
            if contact.beat is not None
            and contact.beat.bound == lineage
            and (contact.beat.phase is Phase.JOINING or contact.beat.phase is Phase.PAUSED)
            and contact.is_member
            and self.suits(contact)
            and self.contacts.is_mutual(contact.process)
            and not self.is_doubtful(contact.process)
        ]

    def suits(self, contact: Contact) -> bool:
        """Whether a process could be in one cluster with us, by its settings."""
        return contact.card.schema == self.me.schema and contact.card.quorum == self.quorum

    def why_waiting(self, missing: Iterable[ProcessId]) -> str:
        """What to tell people while members of the last view are missing."""
        who = list(missing)
        epoch = 0 if self.bound is None else self.bound.epoch
        one = len(who) == 1
        return (
            f"waiting for {self.names(who)}: {'it was' if one else 'they were'} in view {epoch} "
            f"and may still be running. To continue without {'it' if one else 'them'}: "
            "potluck continue"
        )

    def causes(self, out: Iterable[tuple[ProcessId, CauseCode, str]]) -> tuple[Cause, ...]:
        """Why members are not in the next view, in as much detail as a message holds."""
        causes = tuple(self.cause(*each) for each in out)
        if len(causes) <= _DETAILED:
            return causes
        return tuple(Cause(each.who, each.code, each.name) for each in causes)

    def cause(self, who: ProcessId, code: CauseCode, reason: str) -> Cause:
        """Why a member is not in the next view, as data."""
        is_me = who == self.id  # a leader may have to leave itself out
        card = self.me if is_me else self.contacts.of(who).card
        host = card.hosts[0] if card.hosts else ""
        silence = 0.0 if is_me else max(0.0, self.health.silence(who, self.now))
        return Cause(who, code, card.name, host, silence, clip(reason, _REASON_LIMIT))

    @property
    def ancestry(self) -> tuple[Branch, ...]:
        """Of our lineage, with where its checkpoint came from: this decides merges."""
        if self.bound is None:
            return self.origin
        charter = self.bound.charter
        return (*(self.origin or charter.origin), *charter.ancestry)[-MAX_BRANCHES:]

    @property
    def claim(self) -> Claim:
        """What our lineage has to say for itself when it meets another; we are in a view."""
        view = self.election.view
        branches = (*self.ancestry, Branch(view.lineage, view.epoch))
        return Claim(branches, self.announced_samples, len(view.members))

    def others(self) -> list[ProcessId]:
        """The other members of our view."""
        members = self.view.members if self.view is not None else ()
        return [member for member in members if member != self.id]

    # --- the way out ---

    def send(self, to: ProcessId, message: ClusterMessage) -> None:
        """Send, if there is a connection; to a member out of touch also by way of another."""
        if to == self.id:
            return
        contact = self.contacts.get(to)
        if contact is not None and contact.is_connected:
            self.out.append(Send(to, message))
        if (
            isinstance(message, RELAYABLE)
            and self.is_member(to)
            and not self.contacts.is_mutual(to)
        ):
            self._relay(to, message)

    def _relay(self, to: ProcessId, message: ClusterMessage) -> None:
        for member in self.others():
            if member in self.election.departed:
                continue  # it passes nothing on in a view that it has left
            if self.contacts.is_mutual(member) and self.contacts.hears(member, to):
                self.out.append(Send(member, Relayed(self.id, to, encode(message))))
                return

    def tell(self, recipients: Iterable[ProcessId], message: ClusterMessage) -> None:
        """Send to several."""
        for process in recipients:
            self.send(process, message)

    def tell_observers(self, message: ClusterMessage) -> None:
        """Send to all that look on."""
        self.tell([c.process for c in self.contacts if not c.is_member], message)

    def note(
        self, change: MembershipChange, sentence: str, process: ProcessId | None = None
    ) -> None:
        """Let people know."""
        self.note_elections()
        self.out.append(Note(MembershipEvent(change, sentence, process, self.view)))

    def note_elections(self) -> None:
        """Let people know what the election manager has to tell."""
        if self.election.events:
            self.out.extend(Note(event) for event in self.election.events)
            self.election.events.clear()

    def note_once(self, topic: str, sentence: str, process: ProcessId | None = None) -> None:
        """Let people know why something waits, unless the reason is what it was."""
        if self._told.get(topic) != sentence:
            self._told[topic] = sentence
            self.note(MembershipChange.WAITING, sentence, process)

    def forget_evidence(self) -> None:
        """What was known of members held in a view that is over."""
        self.proofs, self.reported = {}, set()
        self.is_aborted, self.lost, self.is_loss_orderly = False, None, False
        self.lost_by, self.stopped_because = None, ""

    def keep_only_known(self) -> None:
        """Keep those who are connected, or in the view that we are bound to; no others."""
        for contact in list(self.contacts):
            if not contact.is_connected and not self.is_kept(contact.process):
                self.contacts.forget(contact.process)
        for member in self.kept():
            self.contacts.know(self.contacts.last_card(member), self.now)

    def forget_told(self) -> None:
        """The next reasons are news again."""
        self._told.clear()

    # --- heartbeats ---

    def beat_soon(self) -> None:
        """Something changed that others should hear before the next regular beat.

        The number of beats out of turn is bounded; beyond that it waits.
        """
        if self._eager.has(self.time):
            soonest = self._last_beat + _EAGER * min(self.interval, self.config.health.interval)
            self.next_beat = min(self.next_beat, max(self.time, soonest))

    def beat(self) -> None:
        """Send a heartbeat to everybody."""
        if self.time < self._regular_beat:
            self._eager.take(self.time, max(1.0, len(self.contacts) / _EAGER_CROWD))
        round_ = self._compose()
        for contact in self.contacts:
            if contact.is_connected:
                self._beat_to(contact, round_)
        self._last_beat = self.time
        self.next_beat = self._regular_beat = self.time + self.interval

    def greet(self, process: ProcessId) -> None:
        """Send a heartbeat to one process at once, which is connected."""
        self._beat_to(self.contacts.of(process), self._compose())

    def _heard_marks(self) -> tuple[int, ...]:
        """Marks of all that we hear, without members that do not confirm hearing us."""
        return self.contacts.heard_marks(but=list(filter(self.is_doubtful, self.others())))

    def _compose(self) -> Heartbeat:
        """What a round of heartbeats says to everybody."""
        if self.view is None:
            self.follow_crowd()
        lateness = self.lateness
        self.election.slack = lateness if lateness > self.interval / 4 else 0.0
        pause = lengthened(self.pause_after, lateness)
        self.announced_samples = self.samples
        view, election = self.view, self.election
        message = Heartbeat(
            sequence=self.contacts.number_beat(self.time, pause),
            echo=0,
            held=0.0,
            phase=self.phase,
            hears=self._heard_marks(),
            samples=self.announced_samples,
            wants=self.config.min_nodes,
            bound="" if self.bound is None else self.bound.lineage,
            bound_epoch=0 if self.bound is None else self.bound.epoch,
            ended=self._ended_marks(),
            lateness=self.health.lateness,
            pause_after=pause,
        )
        if view is None:
            return message
        return msgspec.structs.replace(
            message,
            lineage=view.lineage,
            epoch=view.epoch,
            view=view_mark(view),
            size=len(view.members),
            leader=view.leader,
            term=election.term,
            aborted=self.is_aborted,
            lost=self.lost,
            orderly=self.is_loss_orderly,
            accepted=self.accepted_mark,
        )

    def _beat_to(self, contact: Contact, round_: Heartbeat) -> None:
        """Send one of a round of heartbeats: what differs is which of its beats we heard."""
        withholds = self._withholds(contact.process)
        if contact.newest and not withholds:
            self.contacts.confirmed(contact, self.pause_of(contact))
        message = msgspec.structs.replace(
            round_,
            echo=contact.newest,
            held=max(0.0, self.time - contact.beat_at) if contact.newest else 0.0,
            withholds=withholds,
        )
        view = self.view
        if view is not None and view.leader == self.id and contact.process not in view.members:
            message = msgspec.structs.replace(message, ancestry=self.ancestry)
        self.out.append(Send(contact.process, message))

    def _ended_marks(self) -> tuple[int, ...]:
        """Whom of the view that we are bound to we know to have ended, while that matters."""
        if self.state is ClusterState.ACTIVE:
            return ()
        return tuple(sorted(mark(who) for who in self.kept() if who in self.ended))

    def _withholds(self, process: ProcessId) -> bool:
        """Whether nobody may rely on this beat: we have doubts, or have accepted a next view.

        In the latter case those may who are in it with us, and have accepted it as well.
        """
        contact = self.contacts.of(process)
        # To the letter, without patience for ourselves: what is_silent() claims hangs on it.
        if self.time - contact.echoed_at >= self.pause_of(contact) or self._is_behind(contact):
            return True
        accepted = self.election.ballot.accepted
        if accepted is None or not self.is_member(process):
            return False
        beat = contact.beat
        is_shared = beat is not None and beat.accepted == self.accepted_mark != 0
        return not (is_shared and {self.id, process}.issubset(accepted.members))

    def _is_behind(self, contact: Contact) -> bool:
        """Whether it may be at work in a view of which we know a later one, in no view ourselves.

        What it says on a new connection shows where it stands.
        """
        beat = contact.beat
        if beat is None:
            return True
        newest = self.archive.newest(beat.lineage)
        return newest is not None and newest.epoch > beat.epoch

    @property
    def accepted_mark(self) -> int:
        """The next view that we have accepted, in 63 bits; 0 for none, and for the end of all."""
        accepted, view = self.election.ballot.accepted, self.view
        if accepted is None or accepted.into or view is None:
            return 0
        return view_mark(View(view.lineage, view.epoch + 1, accepted.members))

    # --- what everybody does ---

    def abort(
        self,
        lost: ProcessId | None,
        reason: str,
        *,
        orderly: bool = False,
        by: ProcessId | None = None,
    ) -> None:
        """Stop the operations of our view, here; nothing happens the second time."""
        if self.view is not None and not self.is_aborted:
            self.is_aborted = self.is_dirty = True
            self.aborted_at = self.time
            self.lost, self.is_loss_orderly = lost, orderly
            self.lost_by, self.stopped_because = by or self.id, reason
            self.out.append(Abort(self.view.epoch, lost, reason, orderly))
            self.beat_soon()

    def report_loss(self, who: ProcessId, reason: str, *, is_proved: bool = False) -> None:
        """Tell those who decide that a member of our view is lost to us.

        These are the leader and the next members in rank order that are not lost as well: one of
        them will lead if the leader is.  The others notice it themselves, or by our heartbeat.
        """
        view = self.election.view
        message = Lost(view.lineage, view.epoch, who, clip(reason), is_proved)
        lost = self.gone | {who}
        seniors = [m for m in self.others() if m not in lost and self._may_lead(m)]
        leader = self.election.leader
        first = [leader] if leader in seniors else []
        self.tell(list(dict.fromkeys([*first, *seniors]))[:_TOLD_OF_LOSSES], message)

    def _may_lead(self, member: ProcessId) -> bool:
        contact = self.contacts.of(member)
        return contact.is_connected and self.health.is_operational(member)


@lru_cache(maxsize=64)
def view_mark(view: View) -> int:
    """A view in 63 bits, for heartbeats."""
    return int.from_bytes(view.session[:8], "big") >> 1
