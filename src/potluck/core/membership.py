"""Who should be in the next view: what the leader of a term proposes, with the reason.

* Whoever is proved dead, has departed or was removed for what it sent is left out at once; whoever
  has been silent for twice the time after which it pauses itself is left out too.  For anybody who
  is silent for less we wait.
* Where some members have not heard each other for long, the largest mutually connected set stays;
  the others have to accept their exclusion.
* Newcomers come in when they and all who stay hear each other, several at a time.
* Nothing is proposed before all who stay were heard just now, after the loss if there was one: who
  stands still without being missed yet could not accept, and until that is known for certain nobody
  could agree on anything else.
* Those who stay keep their order; newcomers follow in the order of their ids.
* A proposal says of every member that it leaves out why, as data: errors are made from that alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.core.ancestry import Branch
from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_messages import MAX_MEMBERS, Cause, CauseCode, Proposal, clip
from potluck.core.cluster_situation import Situation
from potluck.core.membership_mesh import largest_mutual
from potluck.vocabulary import ProcessId, View

__all__ = ["Planner"]

_BEATS = 1.5  # whoever beats was heard within so many intervals
_CALM = 30.0  # seconds in one view after which earlier changes do not count any more
_AT_ONE_PAUSE = 4  # changes in a row that are a pause apart; each further one twice as long,
_MOST_PAUSES = 16  # at most, in pauses

_Pair = tuple[ProcessId, ProcessId]
_Why = tuple[CauseCode, str]


class Planner:
    """Plans the next view; remembers since when links are missing and newcomers are ready."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._missing: dict[_Pair, float] = {}
        self._ready: dict[ProcessId, float] = {}
        self.is_stepping_down = False
        """Whether the first member wants to become the last."""
        self._members: frozenset[ProcessId] = frozenset()
        self._begun_at = float("-inf")  # when the last view was installed that did not only lose
        self._in_a_row = 0  # views since the last calm, the present one included
        self._not_before: float | None = None  # what was planned waits until then

    def begin(self) -> None:
        """A new view was installed: the memories were of the old one."""
        s = self._situation
        members = frozenset(s.view.members) if s.view is not None else frozenset()
        if not members < self._members:  # losing members does not count
            self._in_a_row = self._in_a_row + 1 if s.time - self._begun_at < _CALM else 1
            self._begun_at = s.time
        self._members, self._not_before = members, None
        self._missing.clear()
        self._ready.clear()
        self.is_stepping_down = False

    @property
    def next_look(self) -> float | None:
        """When a newcomer will have waited for others long enough."""
        delay = self._situation.config.election.connection_delay
        look = min(self._ready.values()) + delay if self._ready else None
        if self._not_before is None:
            return look
        return self._not_before if look is None else max(look, self._not_before)

    def _may_change(self) -> bool:
        """Whether a view may follow the present one that nobody's death or farewell asks for.

        At most one in a pause, and ever fewer while they follow each other without calm.
        """
        s = self._situation
        if self._in_a_row <= 1:
            return True
        pauses: int = min(2 ** max(0, self._in_a_row - _AT_ONE_PAUSE), _MOST_PAUSES)
        due = self._begun_at + pauses * s.pause_after
        self._not_before = due if s.time < due else None
        return s.time >= due

    def plan(self, view: View, *, must_change: bool) -> Proposal | None:
        """The next view to propose; None if there is nothing to change, or not yet."""
        s = self._situation
        out = {who: why for who in view.members if (why := self._why_out(who)) is not None}
        staying = [member for member in view.members if member not in out]
        limbo = [who for who in staying if who != s.id and self._is_unclear(who)]
        if limbo:
            names = s.names(limbo)
            s.note_once("limbo", f"the next view waits until it is clear what became of {names}")
            return None
        mesh = self._mesh(staying)
        if mesh is None and must_change:
            s.note_once("mesh", "the next view waits until all members hear each other again")
            return None
        kept = staying if mesh is None else list(mesh)
        out |= {who: self._why_unreachable(who, kept) for who in staying if who not in kept}
        if kept == [who for who in kept if who != s.id][:1]:
            return None  # one other that does not hear us: it will be clear soon who is silent
        ready = self._newcomers(kept)
        urgent = must_change or bool(out) or self.is_stepping_down
        new = sorted(contact.process for contact in ready) if urgent or self._is_time() else []
        if not (urgent or new):
            return None
        if not (any(self._is_gone(who) for who in out) or self._may_change()):
            return None
        if self.is_stepping_down and kept[0] == s.id:
            kept = [*kept[1:], s.id]
        if not all(self._is_fresh(who) for who in kept if who != s.id):
            return None
        members = tuple([*kept, *new][:MAX_MEMBERS])
        causes = s.causes((who, *out[who]) for who in view.members if who in out)
        interval, pause = s.pace_for(members)
        return Proposal(
            members,
            clip(self._reason(out, new)),
            causes=causes,
            interval=interval,
            pause_after=pause,
        )

    def _why_out(self, who: ProcessId) -> _Why | None:
        """Why a member cannot stay; None if it can."""
        s = self._situation
        if who == s.id:
            return None
        if who in s.expelled:
            return CauseCode.MISBEHAVED, s.expelled[who]
        if who in s.proofs:
            return CauseCode.ENDED, s.proofs[who]
        if who in s.election.departed:
            return CauseCode.LEFT, s.election.departed[who].reason or "it left"
        if who in s.reported and not s.contacts.is_heard(who):
            return CauseCode.ENDED, "another member has proved that it is dead"
        return self._why_silent(who) if s.is_silent(who) else None

    def _why_silent(self, who: ProcessId) -> _Why:
        """Of a member that we do not hear."""
        s = self._situation
        if who in s.ended:
            return CauseCode.ENDED, f"its process has ended ({s.ended[who][0]})"
        return CauseCode.SILENT, s.why_doubtful(who)

    def _why_unreachable(self, who: ProcessId, kept: list[ProcessId]) -> _Why:
        """Of a member that lives, but does not hear all who stay."""
        apart = self._apart(who, kept)
        return (
            CauseCode.UNREACHABLE,
            f"it and {self._situation.names(apart)} do not hear each other",
        )

    def missing(self, view: View) -> tuple[Cause, ...]:
        """Members that are out of contact now, and why: a next view may wait for them."""
        s = self._situation
        found = []
        for who in view.members:
            why = self._why_out(who)
            if why is None and who != s.id and self._is_unclear(who):
                why = self._why_silent(who)
            if why is not None:
                found.append(s.cause(who, *why))
        return tuple(found)

    def _is_gone(self, who: ProcessId) -> bool:
        """Whether a member has died or left: the others are not kept waiting for that."""
        s = self._situation
        is_known = who in s.proofs or who in s.election.departed or who in s.reported
        return is_known or who in s.expelled

    def _is_unclear(self, who: ProcessId) -> bool:
        s = self._situation
        return s.is_doubtful(who) or not s.contacts.is_heard(who)

    def _is_fresh(self, who: ProcessId) -> bool:
        """Whether a member was heard after operations were aborted, or within the last beats."""
        s = self._situation
        longest = s.time - s.aborted_at if s.is_aborted else _BEATS * s.interval
        return s.health.silence(who, s.now) <= longest

    def _mesh(self, staying: list[ProcessId]) -> tuple[ProcessId, ...] | None:
        """The largest mutually connected set; None while that is not clear."""
        s = self._situation
        missing: dict[_Pair, float] = {}
        for one, other in self._pairs(staying):
            missing[one, other] = self._missing.get((one, other), s.time)
        self._missing = missing
        if not missing:
            return tuple(staying)
        long = {pair for pair, since in missing.items() if s.time - since >= s.pause_after}
        if not long:
            return None
        return largest_mutual(
            staying, lambda one, other: (one, other) not in long and (other, one) not in long
        )

    def _pairs(self, staying: list[ProcessId]) -> Iterator[_Pair]:
        """Members that do not hear each other."""
        links = self._situation.contacts.links(staying)
        for index, one in enumerate(staying):
            linked, later = links[index] >> index, staying[index + 1 :]
            if linked.bit_count() < len(later):
                apart = [other for place, other in enumerate(later, 1) if not linked >> place & 1]
                yield from ((one, other) for other in apart)

    def _newcomers(self, kept: list[ProcessId]) -> list[Contact]:
        """Those who can come in now; says why of those who cannot."""
        s = self._situation
        ready: list[Contact] = []
        outsiders = [c for c in s.joiners() if not s.is_member(c.process) and self._may_come(c)]
        for contact in sorted(outsiders, key=lambda c: c.process):
            apart = self._apart(contact.process, [*kept, *(c.process for c in ready)])
            if apart:
                s.note_once(
                    f"newcomer {contact.process}",
                    f"{contact.card} cannot come in yet: it and {s.names(apart)} "
                    "do not hear each other",
                    contact.process,
                )
            else:
                ready.append(contact)
        self._ready = {c.process: self._ready.get(c.process, s.time) for c in ready}
        return ready

    def _may_come(self, contact: Contact) -> bool:
        """Whether a process may enter our lineage: it is free, or bound to it or to an ancestor."""
        s = self._situation
        beat, bound = contact.beat, s.bound
        assert beat is not None
        assert bound is not None
        if contact.card.quorum != s.quorum:
            topic, why = f"newcomer {contact.process}", s.why_other_quorum(contact)
            s.note_once(topic, f"{contact.card} is refused: {why}", contact.process)
            return False
        branches = (*bound.charter.ancestry, Branch(bound.lineage, bound.epoch))
        return not beat.bound or any(
            branch.lineage == beat.bound and branch.epoch >= beat.bound_epoch for branch in branches
        )

    def _apart(self, newcomer: ProcessId, others: list[ProcessId]) -> list[ProcessId]:
        hears = self._situation.contacts.hears
        return [
            other for other in others if not (hears(newcomer, other) and hears(other, newcomer))
        ]

    def _is_time(self) -> bool:
        look = self.next_look
        return look is not None and self._situation.time >= look

    def _reason(self, out: dict[ProcessId, _Why], new: list[ProcessId]) -> str:
        s = self._situation
        parts = [f"without {s.name(who)}: {why}" for who, (_, why) in out.items()]
        if new:
            parts.append(f"{s.names(new)} joined")
        if self.is_stepping_down:
            parts.append(f"{s.name(s.id)} hands over the first rank")
        return "; ".join(parts) or self._why_again()

    def _why_again(self) -> str:
        """Why the same members follow once more."""
        s = self._situation
        if s.lost is not None and s.lost_by is not None:
            if s.lost_by == s.lost:
                return f"the connection to {s.name(s.lost)} broke and is back"
            ends = f"{s.name(s.lost_by)} and {s.name(s.lost)}"
            return f"the connection between {ends} broke and is back"
        if s.stopped_because:
            return s.stopped_because
        if s.election.term:
            return f"{s.name(s.election.view.leader)} was out of contact and is back"
        return "a fresh start with the same members"
