"""What the parts of a cluster core share: the table they sit around, and the way out.

The parts change it in turn, within one call of the core; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from potluck.core.cluster_archive import Archive
from potluck.core.cluster_cards import ProcessCard
from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_effects import Abort, Effect, Note, Send
from potluck.core.cluster_events import ClusterState, MembershipChange, MembershipEvent
from potluck.core.cluster_messages import (
    RELAYABLE,
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
from potluck.vocabulary import ProcessId, View

__all__ = ["Situation"]

_EAGER = 0.1  # of an interval: so soon after a beat the next may follow when something changed


class Situation(Surroundings):
    """Everything that more than one part of a core needs."""

    def __init__(self, me: ProcessCard, config: ClusterConfig, now: float) -> None:
        super().__init__(me, config, now)
        self.election = ElectionManager(self.id, config.election)
        self.archive = Archive()
        self.view: View | None = None
        self.state = ClusterState.JOINING
        self.reason = "it has met nobody yet"
        self.steps = 0
        self.proofs: dict[ProcessId, str] = {}
        """Members whose death we can prove, and how."""
        self.reported: set[ProcessId] = set()
        """Members whose death somebody else can prove."""
        self.ended: dict[ProcessId, tuple[str, float]] = {}
        """Processes that have ended, proved or not, with how and when we learnt it."""
        self.is_aborted = False
        """Whether operations of the view have been aborted, so that it needs a successor."""
        self.aborted_at = now
        self.lost: ProcessId | None = None
        """For whose loss; the first that we learnt of."""
        self.is_loss_orderly = False
        self.seniority = 0
        self.ready_at = now
        """When we may enter a view again."""
        self.out: list[Effect] = []
        self.is_dirty = True
        """Whether something changed that decisions hang on."""
        self.next_beat = now
        self._last_beat = float("-inf")
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
        return self.election.gone | self.proofs.keys()

    @property
    def absent(self) -> frozenset[ProcessId]:
        """Members that are not in the view any more for all we know, whatever they had promised."""
        return frozenset(self.election.departed) | self.proofs.keys()

    def is_member(self, process: ProcessId) -> bool:
        """Whether somebody is in our view."""
        return self.view is not None and process in self.view.members

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

    def forget_unconnected(self) -> None:
        """Of those who are neither connected nor members, nothing is kept."""
        for contact in list(self.contacts):
            if not contact.is_connected and not self.is_member(contact.process):
                self.contacts.forget(contact.process)

    def forget_told(self) -> None:
        """The next reasons are news again."""
        self._told.clear()

    # --- heartbeats ---

    def beat_soon(self) -> None:
        """Something changed that others should hear before the next regular beat."""
        soonest = self._last_beat + _EAGER * self.interval
        self.next_beat = min(self.next_beat, max(self.time, soonest))

    def beat(self) -> None:
        """Send a heartbeat to everybody."""
        sequence = self.contacts.number_beat(self.time)
        hears = self._heard_marks()
        for contact in self.contacts:
            self.beat_to(contact.process, sequence, hears)
        self._last_beat = self.time
        self.next_beat = self.time + self.interval

    def greet(self, process: ProcessId) -> None:
        """Send a heartbeat to one process at once."""
        sequence = self.contacts.number_beat(self.time)
        self.beat_to(process, sequence, self._heard_marks())

    def _heard_marks(self) -> tuple[int, ...]:
        """Marks of all that we hear, without members that do not confirm hearing us."""
        doubtful = {who for who in self.others() if self.is_doubtful(who)}
        return self.contacts.heard_marks(but=doubtful)

    def beat_to(self, process: ProcessId, sequence: int, hears: tuple[int, ...]) -> None:
        """Send one of a round of heartbeats."""
        contact = self.contacts.of(process)
        if not contact.is_connected:
            return
        view = self.view
        message = Heartbeat(
            sequence=sequence,
            echo=contact.newest,
            held=max(0.0, self.time - contact.beat_at) if contact.newest else 0.0,
            phase=self.phase,
            hears=hears,
            steps=self.steps,
            wants=1 if self.seniority else self.config.min_nodes,
            seniority=self.seniority,
            withholds=self._withholds(process),
        )
        if view is not None:
            message = _with_view(message, view, self)
        self.out.append(Send(process, message))

    def _withholds(self, process: ProcessId) -> bool:
        """Whether nobody may rely on this beat: we have doubts, or have accepted a next view.

        In the latter case those may who are in it with us, and have accepted it as well.
        """
        contact = self.contacts.of(process)
        # To the letter, without patience for ourselves: what is_silent() claims hangs on it.
        if self.time - contact.echoed_at >= self.pause_after or self._is_behind(contact):
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

    def abort(self, lost: ProcessId | None, reason: str, *, orderly: bool = False) -> None:
        """End the operations of our view, here; nothing happens the second time."""
        if self.view is not None and not self.is_aborted:
            self.is_aborted = self.is_dirty = True
            self.aborted_at = self.time
            self.lost, self.is_loss_orderly = lost, orderly
            self.out.append(Abort(self.view.epoch, lost, reason, orderly))
            self.beat_soon()

    def report_loss(self, who: ProcessId, reason: str, *, is_proved: bool = False) -> None:
        """Tell the members of our view that one of them is lost to us."""
        view = self.election.view
        message = Lost(view.lineage, view.epoch, who, clip(reason), is_proved)
        self.tell(self.others(), message)

    def newest_commit(self) -> Commit | None:
        """The commit of our view."""
        return None if self.view is None else self.archive.newest(self.view.lineage)


@lru_cache(maxsize=64)
def view_mark(view: View) -> int:
    """A view in 63 bits, for heartbeats."""
    return int.from_bytes(view.session[:8], "big") >> 1


def _with_view(message: Heartbeat, view: View, situation: Situation) -> Heartbeat:
    import msgspec

    return msgspec.structs.replace(
        message,
        lineage=view.lineage,
        epoch=view.epoch,
        view=view_mark(view),
        size=len(view.members),
        leader=view.leader,
        term=situation.election.term,
        aborted=situation.is_aborted,
        lost=situation.lost,
        orderly=situation.is_loss_orderly,
        accepted=situation.accepted_mark,
    )
