"""Being in a view: entering it, pausing in it, being put out of it.

Whoever agreed on a view (:mod:`cluster_succession`, :mod:`cluster_founding`) hands it over here.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.cluster_effects import Installed, Paused, Removed, Resumed
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_messages import Commit, Departed, Heartbeat, clip
from potluck.core.cluster_situation import Situation, view_mark
from potluck.core.quorum import has_quorum
from potluck.vocabulary import ProcessId, View

__all__ = ["Tenure", "never_in"]

_FIRST_BACKOFF = 0.25  # seconds until a removed process may enter again; doubles each time
_LAST_BACKOFF = 8.0
_SETTLED = 30.0  # seconds in a view after which earlier removals are forgotten


class Tenure:
    """The time of this process in views."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._removals = 0
        self.since = situation.time
        """When the present view was installed, or left."""
        self.paused_at = 0.0

    # --- coming and going ---

    def install(self, commit: Commit) -> None:
        """Enter an agreed view that we are in."""
        s = self._situation
        view = commit.view
        s.archive.record(commit)
        s.view = view
        s.state, s.reason = ClusterState.ACTIVE, commit.proposal.reason
        s.forget_evidence()
        s.seniority = view.members.index(s.id) + 1
        s.forget_told()
        s.forget_unconnected()
        for member in s.others():
            contact = s.contacts.know(s.contacts.last_card(member), s.now)
            if contact.beat is not None and _is_ahead(contact.beat, view):
                s.contacts.write_off(contact)
        s.election.begin(view, commit.proposal.reason)
        self.since = s.time
        s.tell_observers(commit)
        s.out.append(Installed(view, s.reason))
        s.note(
            MembershipChange.INSTALLED,
            f"view {view.epoch} with {len(view.members)} "
            f"{'member' if len(view.members) == 1 else 'members'}: {s.reason}",
        )
        s.beat()
        s.is_dirty = True

    def take_commit(self, sender: ProcessId, commit: Commit) -> None:
        """Somebody says that a view was agreed."""
        s = self._situation
        view = s.view
        if view is not None and commit.lineage == view.lineage:
            if commit.epoch > view.epoch:
                self._succeed(commit)
            elif commit.epoch == view.epoch and commit.view != view:
                self.split(sender, f"{s.name(sender)} has another view {view.epoch}")
        elif s.id in commit.proposal.members and not commit.proposal.into:
            if view is None and not s.archive.is_closed(commit.lineage, commit.epoch):
                self.install(commit)
            else:
                self._decline(sender, commit)
        elif view is None:
            s.archive.record(commit)  # whoever tells us of an earlier one is behind

    def _succeed(self, commit: Commit) -> None:
        """The next view of our lineage, or a later one, was agreed."""
        s = self._situation
        if commit.proposal.into:
            self.dissolve(commit)
        elif s.id in commit.proposal.members:
            self.install(commit)
        else:
            s.archive.record(commit)
            self._removals = 1 if s.time - self.since > _SETTLED else self._removals + 1
            backoff = min(_LAST_BACKOFF, _FIRST_BACKOFF * 2 ** (self._removals - 1))
            s.archive.depart(never_in(commit, "we were excluded"))
            self._step_out(f"we were excluded: {commit.proposal.reason}", backoff)

    def dissolve(self, commit: Commit) -> None:
        """Our lineage has ended in another one."""
        s = self._situation
        s.archive.record(commit)
        s.tell_observers(commit)
        s.archive.depart(never_in(commit, "the lineage dissolved into another"))
        self._step_out(commit.proposal.reason, 0.0)

    def abandon(self, reason: str) -> None:
        """Leave our lineage for good, with a last word, and look for another."""
        s = self._situation
        word = self.last_word(reason)
        s.archive.depart(word)
        s.tell(s.others(), word)
        self._step_out(reason, 0.0)

    def last_word(self, reason: str, *, is_leaving: bool = False) -> Departed:
        """What we had promised and accepted in our view; nothing if we are in none."""
        view, ballot = self._situation.election.view, self._situation.election.ballot
        return Departed(
            view.lineage,
            view.epoch,
            ballot.promised,
            ballot.accepted_term,
            ballot.accepted,
            clip(reason),
            is_leaving,
        )

    def _decline(self, sender: ProcessId, commit: Commit) -> None:
        """Others count on us in a view that we did not enter and never will."""
        s = self._situation
        word = s.archive.last_word(commit.lineage)
        if word is None or word.epoch < commit.epoch:
            word = never_in(commit, "it has gone another way meanwhile")
            s.archive.depart(word)
        s.send(sender, word)

    def _step_out(self, reason: str, backoff: float) -> None:
        s = self._situation
        s.abort(None, reason)
        s.view = None
        s.forget_unconnected()
        s.state, s.reason = ClusterState.JOINING, reason
        s.ready_at = s.time + backoff
        s.forget_evidence()
        s.election.end(reason)
        s.forget_told()
        self.since = s.time
        s.out.append(Removed(reason))
        s.note(MembershipChange.REMOVED, reason)
        s.beat_soon()
        s.is_dirty = True

    def split(self, sender: ProcessId, sentence: str) -> None:
        """Two views of one number: it must not happen, and if it does, the lesser one gives way."""
        s = self._situation
        beat, view = s.contacts.of(sender).beat, s.election.view
        s.election.split_brain(f"split brain: {sentence}")
        if beat is None or (beat.lineage, beat.epoch) != (view.lineage, view.epoch):
            return
        mine = s.steps, len(view.members), view_mark(view)
        if (beat.steps, beat.size, beat.view) > mine:
            self.abandon(f"{sentence}; ours gives way")

    # --- pausing ---

    def present(self, members: Iterable[ProcessId]) -> set[ProcessId]:
        """Those that cannot have given us up, as far as we know; we are one of them."""
        s = self._situation
        oldest = s.time - s.pause_after
        contacts = [s.contacts.get(member) for member in members]
        held = {c.process for c in contacts if c is not None and c.leased_at >= oldest}
        return {s.id} | held - s.absent

    def review(self) -> None:
        """Pause without a quorum in contact, resume with one, give up where nobody is left."""
        s = self._situation
        view = s.view
        if view is None:
            return
        present = self.present(view.members)
        if has_quorum(view.members, present, s.absent) and self._holds_next():
            if s.state is ClusterState.PAUSED:
                s.state, s.reason = ClusterState.ACTIVE, "a quorum of the view is in contact again"
                s.out.append(Resumed(s.reason))
                s.note(MembershipChange.RESUMED, f"resumed: {s.reason}")
                s.beat_soon()
            return
        missing = [who for who in view.members if who not in present and who not in s.absent]
        if s.state is ClusterState.ACTIVE:
            self._pause(self._why_paused(view, missing))
        elif s.time - self.paused_at >= 2 * s.pause_after:
            self._maybe_go_on_alone(view)

    def _why_paused(self, view: View, missing: list[ProcessId]) -> str:
        s = self._situation
        if self._has_agreed_to_go():
            return "we have agreed to be left out of the next view"
        if not missing:
            return "we have agreed to a next view, and have no quorum of it in contact"
        here = sum(who not in missing and who not in s.absent for who in view.members)
        reasons = "; ".join(f"{s.name(who)}: {s.why_doubtful(who)}" for who in missing)
        return (
            f"{here} of {len(view.members)} members are in contact, which is no quorum; "
            f"the others may be going on without us ({reasons})"
        )

    def _holds_next(self) -> bool:
        """Whether the next view that we have accepted, and that may be agreed, would hold too."""
        s = self._situation
        accepted = s.election.ballot.accepted
        if accepted is None:
            return True
        members = accepted.members
        return s.id in members and has_quorum(members, self.present(members), s.absent)

    def _has_agreed_to_go(self) -> bool:
        """Whether we have accepted a next view without us: then we may count for nothing more."""
        s = self._situation
        accepted = s.election.ballot.accepted
        return accepted is not None and s.id not in accepted.members

    def _pause(self, reason: str) -> None:
        s = self._situation
        s.state, s.reason = ClusterState.PAUSED, reason
        self.paused_at = s.time
        s.out.append(Paused(s.reason))
        s.note(MembershipChange.PAUSED, f"paused: {s.reason}")
        s.beat_soon()

    def _maybe_go_on_alone(self, view: View) -> None:
        """Where it is allowed, or everybody we miss has ended, go on as a new lineage."""
        s = self._situation
        others = [who for who in s.others() if who not in s.absent]
        missing = [who for who in others if s.is_doubtful(who) or not s.contacts.is_heard(who)]
        here = set(view.members).difference(missing)
        if self._has_agreed_to_go():
            self.abandon("we have agreed to be left out, and heard no more of it")
        elif has_quorum(view.members, here, s.absent):
            return  # enough are here again: whoever leads will come to a decision
        elif s.config.quorum == "any":
            self.abandon(f"cut off from {s.names(missing)}, we go on as a new lineage")
        elif all(self.is_known_dead(who) for who in missing):
            self.abandon(
                f"{s.names(missing)} ended while we were out of contact; "
                "whoever is left goes on as a new lineage"
            )

    def is_known_dead(self, who: ProcessId) -> bool:
        """Whether a process has ended, be it after a silence in which it may have done much."""
        return who in self._situation.ended


def _is_ahead(beat: Heartbeat, view: View) -> bool:
    return beat.lineage == view.lineage and beat.epoch > view.epoch


def never_in(view: View | Commit, reason: str, *, is_leaving: bool = False) -> Departed:
    """The last word of somebody in a view in which it never was: nothing promised or accepted."""
    return Departed(view.lineage, view.epoch, -1, -1, None, reason, is_leaving)
