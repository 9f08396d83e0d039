"""Who should be in the next view: what the leader of a term proposes, with the reason.

* Whoever is proved dead or has departed is left out at once; whoever has been silent for twice the
  time after which it pauses itself is left out too.  For anybody who is silent for less we wait.
* Where some members have not heard each other for long, the largest mutually connected set stays;
  the others have to accept their exclusion.
* Newcomers come in when they and all who stay hear each other, several at a time.
* Nothing is proposed before all who stay were heard just now, after the loss if there was one: who
  stands still without being missed yet could not accept, and until that is known for certain nobody
  could agree on anything else.
* Those who stay keep their order; newcomers follow in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.core.cluster_contacts import Contact
from potluck.core.cluster_messages import MAX_MEMBERS, Proposal, clip
from potluck.core.cluster_situation import Situation
from potluck.core.membership_mesh import largest_mutual
from potluck.vocabulary import ProcessId, View

__all__ = ["Planner"]

_BEATS = 1.5  # whoever beats was heard within so many intervals

_Pair = tuple[ProcessId, ProcessId]


class Planner:
    """Plans the next view; remembers since when links are missing and newcomers are ready."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._missing: dict[_Pair, float] = {}
        self._ready: dict[ProcessId, float] = {}
        self.is_stepping_down = False
        """Whether the first member wants to become the last."""

    def begin(self) -> None:
        """A new view was installed: the memories were of the old one."""
        self._missing.clear()
        self._ready.clear()
        self.is_stepping_down = False

    @property
    def next_look(self) -> float | None:
        """When a newcomer will have waited for others long enough."""
        delay = self._situation.config.election.connection_delay
        return min(self._ready.values()) + delay if self._ready else None

    def plan(self, view: View, *, must_change: bool) -> Proposal | None:
        """The next view to propose; None if there is nothing to change, or not yet."""
        s = self._situation
        out = {who: why for who in view.members if (why := self._why_out(who))}
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
        out |= {who: "not all others hear it" for who in staying if who not in kept}
        if kept == [who for who in kept if who != s.id][:1]:
            return None  # one other that does not hear us: it will be clear soon who is silent
        ready = self._newcomers(kept)
        urgent = must_change or bool(out) or self.is_stepping_down
        new = sorted(contact.process for contact in ready) if urgent or self._is_time() else []
        if not (urgent or new):
            return None
        if self.is_stepping_down and kept[0] == s.id:
            kept = [*kept[1:], s.id]
        if not all(self._is_fresh(who) for who in kept if who != s.id):
            return None
        members = tuple([*kept, *new][:MAX_MEMBERS])
        return Proposal(members, clip(self._reason(out, new)))

    def _why_out(self, who: ProcessId) -> str:
        """Why a member cannot stay, in words; empty if it can."""
        s = self._situation
        if who == s.id:
            return ""
        if who in s.proofs:
            return s.proofs[who]
        if who in s.election.departed:
            return s.election.departed[who].reason or "it left"
        if who in s.reported and not s.contacts.is_heard(who):
            return "another member has proved that it is dead"
        return s.why_doubtful(who) if s.is_silent(who) else ""

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
        hears = self._situation.contacts.hears
        for index, one in enumerate(staying):
            for other in staying[index + 1 :]:
                if not (hears(one, other) and hears(other, one)):
                    yield one, other

    def _newcomers(self, kept: list[ProcessId]) -> list[Contact]:
        """Those who can come in now; says why of those who cannot."""
        s = self._situation
        ready: list[Contact] = []
        outsiders = [c for c in s.joiners() if not s.is_member(c.process)]
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

    def _apart(self, newcomer: ProcessId, others: list[ProcessId]) -> list[ProcessId]:
        hears = self._situation.contacts.hears
        return [
            other for other in others if not (hears(newcomer, other) and hears(other, newcomer))
        ]

    def _is_time(self) -> bool:
        look = self.next_look
        return look is not None and self._situation.time >= look

    def _reason(self, out: dict[ProcessId, str], new: list[ProcessId]) -> str:
        s = self._situation
        parts = [f"without {s.name(who)}: {why}" for who, why in out.items()]
        if new:
            parts.append(f"with {s.names(new)}, new")
        if self.is_stepping_down:
            parts.append(f"{s.name(s.id)} hands over the first rank")
        return "; ".join(parts) or "a fresh start with the same members"
