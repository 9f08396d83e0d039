"""Being in a view: entering it, pausing in it, being put out of it.

Whoever agreed on a view (:mod:`cluster_succession`, :mod:`cluster_founding`) hands it over here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from potluck.core.cluster_effects import Installed, Paused, Removed, Resumed
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_messages import Commit, Departed, Heartbeat, Phase, clip
from potluck.core.cluster_situation import Situation, view_mark
from potluck.core.election_messages import CauseCode
from potluck.core.quorum import has_quorum
from potluck.vocabulary import ProcessId, View

__all__ = ["Tenure", "never_in"]

_FIRST_BACKOFF = 0.25  # seconds until a removed process may enter again; doubles each time
_LAST_BACKOFF = 8.0
_LEFT_OUT_KEPT = 64  # processes; the latest
_MAY_LIVE = CauseCode.SILENT, CauseCode.UNREACHABLE
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
        if s.view is not None and s.view.lineage != commit.lineage:
            # Not told to those who stay behind: they are to follow, not to continue without us.
            s.archive.depart(self.last_word("it continues in another lineage"))
        s.archive.record(commit)
        commits = self._since(commit)
        s.view, s.agreed, s.is_released = view, "", False
        s.bind(commit)
        self._note_left_out(commits)
        s.keep_pace(commit.proposal)
        s.state, s.reason = ClusterState.ACTIVE, commit.proposal.reason
        s.forget_evidence()
        s.forget_told()
        for member in s.others():
            contact = s.contacts.of(member)
            if contact.beat is not None and _is_ahead(contact.beat, view):
                s.contacts.write_off(contact)
        s.election.begin(view, commit.proposal.reason)
        self.since = s.time
        s.tell_observers(commit)
        s.out.append(Installed(view, s.reason, commits))
        s.note(
            MembershipChange.INSTALLED,
            f"view {view.epoch} with {len(view.members)} "
            f"{'member' if len(view.members) == 1 else 'members'}: {s.reason}",
        )
        s.beat()
        s.is_dirty = True

    def _note_left_out(self, commits: Sequence[Commit]) -> None:
        """Remember who may be alive without us: it may have a state that nobody here has."""
        s = self._situation
        found = dict(s.left_out)  # another thread may look at the last one
        for each in commits:
            causes = (cause for cause in each.proposal.causes if cause.code in _MAY_LIVE)
            found |= {cause.who: cause.name for cause in causes}
        members = commits[-1].proposal.members
        latest = list(found.items())[-_LEFT_OUT_KEPT:]
        s.left_out = {who: name for who, name in latest if who not in members}

    def take_commit(self, sender: ProcessId, commit: Commit) -> None:
        """A process says that a view was agreed."""
        s = self._situation
        view, bound = s.view, s.bound
        is_ours = bound is not None and commit.lineage == bound.lineage
        if view is not None and commit.lineage == view.lineage:
            if commit.epoch > view.epoch:
                self._succeed(commit)
            elif commit.epoch == view.epoch and commit.view != view:
                self.split(sender, f"{s.name(sender)} has another view {view.epoch}")
        elif s.id in commit.proposal.members and not commit.proposal.into:
            if self._may_install(commit):
                self.install(commit)
            else:
                self._decline(sender, commit)
        else:
            s.archive.record(commit)  # a process that tells us of an earlier one is behind
            is_later = bound is not None and is_ours and commit.epoch > bound.epoch
            is_heir = bool(commit.proposal.into) and s.is_descendant(commit.charter)
            if is_later or (is_heir and s.state is not ClusterState.ACTIVE):
                self._follow(commit)

    def _may_install(self, commit: Commit) -> bool:
        """Whether we may enter a view that is not the successor of the one we are in."""
        s = self._situation
        if commit.charter.quorum != s.quorum:
            return False
        if s.archive.is_closed(commit.lineage, commit.epoch):
            return False
        if s.bound is None or commit.lineage == s.bound.lineage:
            return s.view is None
        # A child of ours: as one of its founders, or let in later.
        has_agreed = commit.epoch == 1 and s.agreed == commit.lineage
        is_waiting = s.view is None and commit.epoch > 1
        return (has_agreed or is_waiting) and s.is_descendant(commit.charter)

    def _succeed(self, commit: Commit) -> None:
        """The next view of our lineage, or a later one, was agreed."""
        s = self._situation
        if commit.proposal.into:
            self._follow(commit)
        elif s.id in commit.proposal.members:
            self.install(commit)
        else:
            self._removals = 1 if s.time - self.since > _SETTLED else self._removals + 1
            backoff = min(_LAST_BACKOFF, _FIRST_BACKOFF * 2 ** (self._removals - 1))
            s.archive.depart(never_in(commit, "we were excluded"))
            self._follow(commit, backoff)

    def _follow(self, commit: Commit, backoff: float = 0.0) -> None:
        """Our lineage has a later view without us, or has ended in another one."""
        s = self._situation
        s.archive.record(commit)
        successor, reason = commit, f"we were excluded: {commit.proposal.reason}"
        if commit.proposal.into:
            s.tell_observers(commit)
            s.archive.depart(never_in(commit, "the lineage dissolved into another"))
            reason, commit = commit.proposal.reason, s.archive.followed(commit)
        s.bind(commit)
        s.is_dirty = True
        if s.view is not None:
            self._step_out(reason, backoff, successor)

    def step_aside(self, reason: str) -> None:
        """Leave a view in which we are paused, to enter a child of its lineage."""
        self._situation.archive.depart(self.last_word(reason))
        self._step_out(reason, 0.0)

    def give_way(self, reason: str) -> None:
        """Leave a view that must not exist, with a last word, and wait for the right one."""
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
        newest, beat = s.archive.successor(commit.lineage, commit.epoch), s.contacts.of(sender).beat
        is_at_work = beat is not None and beat.phase is Phase.ACTIVE
        if newest is not None and (newest.lineage == commit.lineage or not is_at_work):
            s.send(sender, newest)  # the sender is behind, or may follow
            return
        word = s.archive.last_word(commit.lineage)
        if word is None or word.epoch < commit.epoch:
            word = never_in(commit, "it has gone another way meanwhile")
            s.archive.depart(word)
            s.archive.record(commit)  # the others in it may be at work
        s.send(sender, word)

    def _since(self, commit: Commit) -> tuple[Commit, ...]:
        """What followed the view we are in, up to this commit; nothing else if we are in none."""
        view = self._situation.view
        if view is None or view.lineage != commit.lineage:
            return (commit,)
        return self._situation.archive.following(view.lineage, view.epoch)

    def _step_out(self, reason: str, backoff: float, commit: Commit | None = None) -> None:
        s = self._situation
        successor = None if commit is None else self._since(commit)[0]
        s.abort(None, reason)
        s.view = None
        s.keep_only_known()
        s.keep_pace(None)
        s.state, s.reason = ClusterState.JOINING, reason
        s.ready_at = s.time + backoff
        s.forget_evidence()
        s.election.end(reason)
        s.forget_told()
        self.since = s.time
        s.out.append(Removed(reason, successor))
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
        mine = s.announced_samples, len(view.members), view_mark(view)
        if (beat.samples, beat.size, beat.view) > mine:
            self.give_way(f"{sentence}; ours gives way")

    # --- pausing ---

    def present(self, members: Iterable[ProcessId]) -> set[ProcessId]:
        """Those that cannot have given us up, as far as we know; we are one of them."""
        s = self._situation
        contacts = map(s.contacts.get, members)
        held = {c.process for c in contacts if c is not None and s.has_lease(c)} - s.absent
        held.add(s.id)
        return held

    def review(self, view: View) -> None:
        """Pause without a quorum in contact, resume with one."""
        s = self._situation
        present = self.present(view.members)
        if has_quorum(view.members, present, s.absent) and self._holds_next():
            if s.state is ClusterState.PAUSED:
                s.state, s.reason = ClusterState.ACTIVE, "a quorum of the view is in contact again"
                s.out.append(Resumed(s.reason))
                s.note(MembershipChange.RESUMED, f"resumed: {s.reason}")
                s.election.encourage()
                s.beat_soon()
            return
        missing = [who for who in view.members if who not in present and who not in s.absent]
        if s.state is ClusterState.ACTIVE:
            self._pause(self._why_paused(view, missing))

    def _why_paused(self, view: View, missing: list[ProcessId]) -> str:
        s = self._situation
        if self._has_agreed_to_go():
            return "we have agreed to be left out of the next view"
        if not missing:
            return "we have agreed to a next view, and have no quorum of it in contact"
        here = sum(who not in missing and who not in s.absent for who in view.members)
        reasons = "; ".join(f"{s.name(who)}: {s.why_doubtful(who)}" for who in missing)
        return (
            f"{here} of {len(view.members)} members are in contact, less than a quorum; "
            f"the others may be at work without us ({reasons})"
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


def _is_ahead(beat: Heartbeat, view: View) -> bool:
    return beat.lineage == view.lineage and beat.epoch > view.epoch


def never_in(view: View | Commit, reason: str, *, is_leaving: bool = False) -> Departed:
    """The last word of somebody in a view in which it never was: nothing promised or accepted."""
    return Departed(view.lineage, view.epoch, -1, -1, None, reason, is_leaving)
