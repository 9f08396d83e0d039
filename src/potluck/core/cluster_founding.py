"""The beginning of a lineage: processes without a view that hear each other form one at once.

The most senior of a mutually connected group proposes the group as the first view; all of it must
agree, and whoever has agreed agrees to nothing else for a moment.  A lineage is named by a hash of
its founding, so two foundings are two lineages, which merge when they meet; nobody is harmed when
one of them fails.  Where there is a cluster already, nobody founds another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_events import ClusterState
from potluck.core.cluster_messages import MAX_MEMBERS, Commit, Found, Founded, Phase, Proposal, clip
from potluck.core.cluster_situation import Situation
from potluck.core.cluster_tenure import Tenure
from potluck.core.membership_mesh import largest_mutual
from potluck.vocabulary import ProcessId

__all__ = ["Founding"]

_LINEAGE_DIGITS = 32
_PATIENCE = 5  # connection delays to wait for those who are connected to us but not to all
_PAUSED_PATIENCE = 5  # times pause_after to wait for paused clusters, which may go on with us

_Key = tuple[int, int, ProcessId]


@dataclass(slots=True)
class _Attempt:
    lineage: str
    proposal: Proposal
    until: float
    agreed: set[ProcessId] = field(default_factory=set)


class Founding:
    """Founds a cluster where there is none."""

    def __init__(self, situation: Situation, tenure: Tenure) -> None:
        self._situation = situation
        self._tenure = tenure
        self._group: frozenset[ProcessId] = frozenset({situation.id})
        self._group_since = situation.time
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._pledge: tuple[ProcessId, float] | None = None  # to whom, and until when
        self._look_at: float | None = None

    def begin(self) -> None:
        """A view was installed or left."""
        self._attempt = self._pledge = self._look_at = None
        self._group = frozenset({self._situation.id})
        self._group_since = self._situation.time

    @property
    def deadlines(self) -> list[float]:
        """When something is due."""
        times = [self._look_at]
        if self._attempt is not None:
            times.append(self._attempt.until)
        return [time for time in times if time is not None]

    # --- what is due ---

    def review(self) -> None:
        """Found a cluster if it is on us and it is time."""
        s = self._situation
        self._look_at = None
        if s.state is not ClusterState.JOINING or s.is_observer:
            return
        self._expire()
        if s.phase is not Phase.JOINING:
            self._wait(s.ready_at, f"waiting a moment before entering again: {s.reason}")
            return
        if self._attempt is not None or self._is_pledged():
            return
        held = self._held_back()
        if held:
            s.note_once("founding", held)
            s.reason = held
            return
        self._maybe_found()

    def _expire(self) -> None:
        s = self._situation
        if self._attempt is not None and s.time >= self._attempt.until:
            self._attempt = None
            self._group_since = s.time
        if self._pledge is not None:
            founder, until = self._pledge
            if s.time >= until or not s.contacts.is_heard(founder):
                self._pledge = None

    def _is_pledged(self) -> bool:
        if self._pledge is None:
            return False
        self._look_at = self._pledge[1]
        return True

    def _held_back(self) -> str:
        """Why nothing is to be founded: there is a cluster that can let us in."""
        s = self._situation
        patience = self._tenure.since + _PAUSED_PATIENCE * s.pause_after
        for contact in s.contacts:
            beat = contact.beat
            if beat is None or not s.contacts.is_heard(contact.process):
                continue
            if contact.card.schema != s.me.schema:
                continue
            if beat.phase is Phase.ACTIVE:
                leader = "its leader" if beat.leader is None else s.name(beat.leader)
                return f"waiting for {leader} to let us into a cluster of {beat.size}"
            if beat.phase is Phase.PAUSED and s.time < patience:
                self._look_at = patience
                return f"waiting for {contact.card}, which is paused"
        return ""

    def _maybe_found(self) -> None:
        s = self._situation
        joiners = s.joiners()
        keys = {contact.process: _key(contact) for contact in joiners}
        keys[s.id] = -s.steps, s.seniority or _LAST, s.id
        order = sorted(keys, key=lambda who: keys[who])
        group = largest_mutual(order, s.contacts.hears, must=[s.id])[:MAX_MEMBERS]
        if frozenset(group) != self._group:
            self._group, self._group_since = frozenset(group), s.time
        wants = self._wanted(joiners)
        if len(group) < wants:
            words = f"{len(group)} of at least {wants} processes are here"
            s.note_once("founding", f"{words}; waiting for the others")
            s.reason = f"{words}; waiting for the others"
        elif group[0] == s.id:
            self._found_when_due(group)
        else:
            s.reason = f"{s.name(group[0])} is to begin a cluster of {len(group)}"

    def _wanted(self, joiners: list[Contact]) -> int:
        s = self._situation
        mine = 1 if s.seniority else s.config.min_nodes
        wishes = [c.beat.wants for c in joiners if c.beat is not None and c.process in self._group]
        return max([mine, *wishes])

    def _found_when_due(self, group: tuple[ProcessId, ...]) -> None:
        s = self._situation
        delay = s.config.election.connection_delay
        due = self._group_since + delay
        if len(group) == 1:
            due = max(due, self._tenure.since + s.config.solo_delay)
        if self._strangers(group):
            due = max(due, self._group_since + _PATIENCE * delay)
        if s.time < due:
            self._wait(due, f"{len(group)} here; looking for more before beginning")
            return
        self._found(group)

    def _strangers(self, group: tuple[ProcessId, ...]) -> bool:
        """Whether somebody is connected and without a view, but not in the group yet."""
        s = self._situation
        waiting = {None, Phase.JOINING, Phase.WAITING}
        return any(
            contact.is_connected
            and contact.is_member
            and contact.process not in group
            and (contact.beat.phase if contact.beat else None) in waiting
            for contact in s.contacts
        )

    def _wait(self, until: float, reason: str) -> None:
        self._look_at = until
        self._situation.reason = reason

    def _found(self, group: tuple[ProcessId, ...]) -> None:
        s = self._situation
        self._attempts += 1
        text = f"{s.id.node}/{s.id.incarnation} {self._attempts} {group}"
        lineage = hashlib.sha256(text.encode()).hexdigest()[:_LINEAGE_DIGITS]
        names = s.names(group)
        proposal = Proposal(group, clip(f"begun by {s.name(s.id)} with {names}"))
        until = s.time + s.config.election.election_timeout
        self._attempt = _Attempt(lineage, proposal, until, {s.id})
        s.tell(group, Found(lineage, proposal))
        self._maybe_begin()

    def _maybe_begin(self) -> None:
        s = self._situation
        attempt = self._attempt
        if attempt is not None and attempt.agreed >= set(attempt.proposal.members):
            commit = Commit(attempt.lineage, 1, attempt.proposal)
            s.tell(attempt.proposal.members, commit)
            self._tenure.install(commit)

    # --- messages ---

    def take_found(self, sender: ProcessId, message: Found) -> None:
        """Somebody proposes to begin together."""
        s = self._situation
        refusal = self._why_not(sender, message)
        if not refusal:
            self._attempt = None
            self._pledge = sender, s.time + 2 * s.config.election.election_timeout
        s.send(sender, Founded(message.lineage, not refusal, refusal))

    def _why_not(self, sender: ProcessId, message: Found) -> str:
        s = self._situation
        members = message.proposal.members
        if s.phase is not Phase.JOINING:
            return "it is not looking for a cluster now"
        if s.id not in members or sender not in members:
            return "one of us is not in it"
        if self._pledge is not None and self._pledge[0] != sender:
            return "it has agreed to another founding"
        if self._attempt is not None and not self._comes_first(sender):
            return "it is founding itself"
        unheard = [who for who in members if who != s.id and not s.contacts.is_heard(who)]
        return f"it does not hear {s.names(unheard)}" if unheard else ""

    def _comes_first(self, sender: ProcessId) -> bool:
        s = self._situation
        mine = -s.steps, s.seniority or _LAST, s.id
        return _key(s.contacts.of(sender)) < mine

    def take_founded(self, sender: ProcessId, message: Founded) -> None:
        """An answer to our founding."""
        attempt = self._attempt
        if attempt is None or message.lineage != attempt.lineage:
            return
        if message.is_agreed:
            attempt.agreed.add(sender)
            self._maybe_begin()
        else:
            self._attempt = None
            self._group_since = self._situation.time
            self._situation.note_once("founding", f"the founding waits: {message.reason}", sender)


_LAST = 1 << 62  # the seniority of those who never had a rank


def _key(contact: Contact) -> _Key:
    """Who is to be first: most steps behind it, then the senior one, then by id."""
    beat = contact.beat
    steps, seniority = (0, 0) if beat is None else (beat.steps, beat.seniority)
    return -steps, seniority or _LAST, contact.process
