"""Two clusters of one job that meet become one.

Ancestry decides which one stays (:mod:`potluck.core.ancestry`).  Samples count only between
lineages that left their common ancestor in the same epoch, or have none.  The lesser one dissolves:
its leader asks the other's to reserve the merge, and only then proposes a terminal view.  A cluster
that has reserved does not dissolve itself meanwhile, and one that has asked reserves nothing, so
two never dissolve into each other.  The members of the dissolved one then belong to the other, and
enter it as newcomers.
"""

from __future__ import annotations

from potluck.core.ancestry import Branch, Claim, outranks
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_messages import (
    Charter,
    MergeAnswer,
    MergeRequest,
    Phase,
    Proposal,
    clip,
)
from potluck.core.cluster_situation import Situation
from potluck.core.cluster_succession import Succession
from potluck.vocabulary import ProcessId

__all__ = ["Merging"]

_RESERVED_FOR = 5  # election timeouts; a terminal view is agreed in a fraction of one
_ASK_EVERY = 2  # election timeouts


class Merging:
    """Asks for merges, reserves them, and dissolves."""

    def __init__(self, situation: Situation, succession: Succession) -> None:
        self._situation = situation
        self._succession = succession
        self._reserved_until = float("-inf")
        self._asked: tuple[ProcessId, str] | None = None
        self._ask_again_at = float("-inf")

    def begin(self) -> None:
        """A view was installed or left."""
        self._asked = None

    def review(self) -> None:
        """Ask for a merge where ours is the lesser of two clusters."""
        s = self._situation
        if self._asked is not None and s.time >= self._ask_again_at:
            self._asked = None
        if not self._is_free() or s.time < self._ask_again_at:
            return
        greater = self._greater()
        if greater is None:
            return
        leader, into = self._asked = greater
        self._ask_again_at = s.time + _ASK_EVERY * s.config.election.election_timeout
        mine = s.claim
        own = mine.branches[-1]
        request = MergeRequest(
            own.lineage, own.epoch, into, mine.branches[:-1], mine.samples, mine.members
        )
        s.send(leader, request)

    def _is_free(self) -> bool:
        """Whether we speak for a cluster that nothing else happens to."""
        s = self._situation
        return (
            s.view is not None
            and s.state is ClusterState.ACTIVE
            and s.view.leader == s.id
            and s.election.is_leading
            and not self._succession.is_busy
            and not s.is_aborted
            and s.time >= self._reserved_until
        )

    def _greater(self) -> tuple[ProcessId, str] | None:
        """Leader and lineage of the greatest cluster we meet that is greater than ours."""
        s = self._situation
        view = s.election.view
        best = s.claim
        found: tuple[ProcessId, str] | None = None
        for contact in s.contacts:
            beat = contact.beat
            if (
                beat is None
                or beat.phase is not Phase.ACTIVE
                or beat.leader != contact.process
                or beat.lineage == view.lineage
                or not s.suits(contact)
                or not s.contacts.is_mutual(contact.process)
            ):
                continue
            branches = (*beat.ancestry, Branch(beat.lineage, beat.epoch))
            theirs = Claim(branches, beat.samples, beat.size)
            if outranks(theirs, best):
                best, found = theirs, (contact.process, beat.lineage)
        return found

    def take_request(self, sender: ProcessId, message: MergeRequest) -> None:
        """A lesser cluster asks whether it may dissolve into ours."""
        s = self._situation
        view = s.election.view
        branches = (*message.ancestry, Branch(message.lineage, message.epoch))
        theirs = Claim(branches, message.samples, message.members)
        reserved = (
            s.state is ClusterState.ACTIVE
            and message.into == view.lineage
            and view.leader == s.id
            and self._asked is None
            and outranks(s.claim, theirs)
        )
        if reserved:
            duration = _RESERVED_FOR * s.config.election.election_timeout
            self._reserved_until = s.time + duration
        members = view.members if reserved else ()
        reason = "" if reserved else "it is not free to take anybody in now"
        charter = Charter(s.quorum) if s.bound is None else s.bound.charter
        answer = MergeAnswer(
            message.lineage,
            message.epoch,
            message.into,
            reserved,
            members,
            reason,
            view.epoch,
            charter,
        )
        s.send(sender, answer)

    def take_answer(self, sender: ProcessId, message: MergeAnswer) -> None:
        """The other cluster has reserved the merge, or not."""
        s = self._situation
        view = s.election.view
        asked, self._asked = self._asked, None
        if asked != (sender, message.into) or not message.is_reserved:
            return
        if (message.lineage, message.epoch) != (view.lineage, view.epoch) or not self._is_free():
            return
        apart = self._apart(message.members)
        if apart:
            s.note_once("merge", f"cannot merge yet: {apart} do not hear each other")
            return
        reason = clip(
            f"this cluster of {len(view.members)} merges into the one of {s.name(sender)}, "
            f"which has {len(message.members)} members"
        )
        s.note(MembershipChange.MERGING, reason, sender)
        terminal = Proposal(
            view.members,
            reason,
            message.into,
            message.into_epoch,
            message.members,
            into_charter=message.charter,
        )
        self._succession.propose(view, terminal)

    def _apart(self, theirs: tuple[ProcessId, ...]) -> str:
        """Two processes that could not be in one view; empty if there are none."""
        s = self._situation
        hears = s.contacts.hears
        for one in s.election.view.members:
            for other in theirs:
                if one != other and not (hears(one, other) and hears(other, one)):
                    return s.names([one, other])
        return ""
