"""Being in a view: entering it, pausing in it, being put out of it.

A view that was agreed on, here or in :mod:`~potluck.membership.bootstrap`, is installed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import TypeVar

import msgspec

from potluck._types import Branch, ProcessId, View
from potluck.membership.election import has_quorum
from potluck.membership.events import (
    ClusterState,
    ElectionRole,
    Installed,
    MembershipChange,
    Paused,
    Removed,
    ViewResumed,
)
from potluck.membership.messages import (
    MAX_MEMBERS,
    Accepted,
    Cause,
    CauseCode,
    Charter,
    Commit,
    Departed,
    Heartbeat,
    Phase,
    PreVote,
    PreVoteReply,
    Proposal,
    Propose,
    Vote,
    VoteRequest,
    clip,
)
from potluck.membership.state import Contact, MembershipState, view_mark

_FIRST_BACKOFF = 0.25  # seconds until a removed process may enter again; doubles each time
_LAST_BACKOFF = 8.0
_LEFT_OUT_KEPT = 64  # processes; the latest
_MAY_LIVE = CauseCode.SILENT, CauseCode.UNREACHABLE
_SETTLED = 30.0  # seconds in a view after which earlier removals are forgotten


class ViewInstaller:
    """The time of this process in views."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state
        self._removals = 0
        self.since = state.time
        """When the present view was installed, or left."""
        self.paused_at = 0.0

    # --- coming and going ---

    def install(self, commit: Commit) -> None:
        """Enter an agreed view that we are in."""
        s = self._state
        view = commit.view
        if s.view is not None and s.view.lineage != commit.lineage:
            # Not told to those who stay behind: they are to follow, not to continue without us.
            word = self.last_word("it continues in another lineage", is_followed=True)
            s.history.depart(word)
        s.history.record(commit)
        commits = self._since(commit)
        s.is_constant = self._stays_constant(commits)
        s.view, s.pledge, s.released_at, s.is_insisting = view, None, None, False
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

    def _stays_constant(self, commits: Sequence[Commit]) -> bool:
        """Whether we are in every view of the lineage with these, which we are about to enter."""
        s = self._state
        if commits[-1].epoch == 1:
            return s.bound is None or s.is_constant  # a member of the last view of its parent
        if s.view is None or s.view.lineage != commits[-1].lineage:
            return False
        epochs = [each.epoch for each in commits]
        return (
            s.is_constant
            and epochs == list(range(s.view.epoch + 1, s.view.epoch + 1 + len(epochs)))
            and all(s.id in each.proposal.members for each in commits)
        )

    def _note_left_out(self, commits: Sequence[Commit]) -> None:
        """Remember who may be alive without us: it may have a state that no one here has."""
        s = self._state
        found = dict(s.left_out)  # another thread may look at the last one
        for each in commits:
            causes = filter(self._may_live, each.proposal.causes)
            found |= {cause.who: cause.name for cause in causes}
        members = commits[-1].proposal.members
        latest = list(found.items())[-_LEFT_OUT_KEPT:]
        s.left_out = {who: name for who, name in latest if who not in members}

    def _may_live(self, cause: Cause) -> bool:
        """Whether a member that is not in the next view may be at work elsewhere."""
        if cause.code is CauseCode.LEFT:  # its process ended, or it went to another lineage
            return cause.who not in self._state.ended
        return cause.code in _MAY_LIVE

    def take_commit(self, sender: ProcessId, commit: Commit) -> None:
        """A process says that a view was agreed."""
        s = self._state
        view, bound = s.view, s.bound
        is_ours = bound is not None and commit.lineage == bound.lineage
        is_entrance = s.id in commit.proposal.members and not commit.proposal.into
        if is_entrance and s.is_pledged and not s.has_agreed_to(commit.lineage):
            return  # as if it were still on its way: it will be told again
        if view is not None and commit.lineage == view.lineage:
            if commit.epoch > view.epoch:
                self._succeed(commit)
            elif commit.epoch == view.epoch and commit.view != view:
                self.split(sender, f"{s.name(sender)} has another view {view.epoch}")
        elif is_entrance:
            if self._may_install(commit):
                self.install(commit)
            else:
                self._decline(sender, commit)
        else:
            s.history.record(commit)  # a process that tells us of an earlier one is behind
            is_later = bound is not None and is_ours and commit.epoch > bound.epoch
            is_heir = bool(commit.proposal.into) and s.is_descendant(commit.charter)
            if is_later or (is_heir and s.state is not ClusterState.ACTIVE):
                self._follow(commit)

    def _may_install(self, commit: Commit) -> bool:
        """Whether we may enter a view that is not the successor of the one we are in."""
        s = self._state
        if commit.charter.quorum != s.quorum:
            return False
        if s.history.is_closed(commit.lineage, commit.epoch):
            return False
        if s.bound is None or commit.lineage == s.bound.lineage:
            return s.view is None
        # A child of ours: as one of its founders, or let in later.
        has_agreed = commit.epoch == 1 and s.has_agreed_to(commit.lineage)
        is_waiting = s.view is None and commit.epoch > 1
        return (has_agreed or is_waiting) and s.is_descendant(commit.charter)

    def _succeed(self, commit: Commit) -> None:
        """The next view of our lineage, or a later one, was agreed."""
        s = self._state
        if commit.proposal.into:
            self._follow(commit)
        elif s.id in commit.proposal.members:
            self.install(commit)
        else:
            self._removals = 1 if s.time - self.since > _SETTLED else self._removals + 1
            backoff = min(_LAST_BACKOFF, _FIRST_BACKOFF * 2 ** (self._removals - 1))
            s.history.depart(never_in(commit, "we were excluded"))
            self._follow(commit, backoff)

    def _follow(self, commit: Commit, backoff: float = 0.0) -> None:
        """Our lineage has a later view without us, or has ended in another one."""
        s = self._state
        s.history.record(commit)
        successor, reason = commit, f"we were excluded: {commit.proposal.reason}"
        if commit.proposal.into:
            s.tell_observers(commit)
            s.history.depart(never_in(commit, "the lineage dissolved into another"))
            reason, commit = commit.proposal.reason, s.history.followed(commit)
        s.bind(commit)
        s.is_dirty = True
        if s.view is not None:
            self._step_out(reason, backoff, successor)

    def step_aside(self, reason: str) -> None:
        """Leave a view in which we are paused, to enter a child of its lineage."""
        self._state.history.depart(self.last_word(reason, is_followed=True))
        self._step_out(reason, 0.0)

    def give_way(self, reason: str) -> None:
        """Leave a view that must not exist, with a last word, and wait for the right one."""
        s = self._state
        word = self.last_word(reason)
        s.history.depart(word)
        s.tell(s.others(), word)
        self._step_out(reason, 0.0)

    def last_word(
        self, reason: str, *, is_leaving: bool = False, is_followed: bool = False
    ) -> Departed:
        """What we had promised and accepted in our view; nothing if we are in none."""
        view, ballot = self._state.election.view, self._state.election.ballot
        return Departed(
            view.lineage,
            view.epoch,
            ballot.promised,
            ballot.accepted_term,
            ballot.accepted,
            clip(reason),
            is_leaving,
            is_followed,
        )

    def _decline(self, sender: ProcessId, commit: Commit) -> None:
        """Others count on us in a view that we did not enter and never will."""
        s = self._state
        newest, beat = s.history.successor(commit.lineage, commit.epoch), s.contacts.of(sender).beat
        is_at_work = beat is not None and beat.phase is Phase.ACTIVE
        if newest is not None and (newest.lineage == commit.lineage or not is_at_work):
            s.send(sender, newest)  # the sender is behind, or may follow
            return
        word = s.history.last_word(commit.lineage)
        if word is None or word.epoch < commit.epoch:
            word = never_in(commit, "it has entered another view meanwhile")
            s.history.depart(word)
            s.history.record(commit)  # the others in it may be at work
        s.send(sender, word)

    def _since(self, commit: Commit) -> tuple[Commit, ...]:
        """What followed the view we are in, up to this commit; nothing else if we are in none."""
        view = self._state.view
        if view is None or view.lineage != commit.lineage:
            return (commit,)
        return self._state.history.following(view.lineage, view.epoch)

    def _step_out(self, reason: str, backoff: float, commit: Commit | None = None) -> None:
        s = self._state
        successor = None if commit is None else self._since(commit)[0]
        s.abort(None, reason)
        s.view, s.is_constant = None, False
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
        s = self._state
        beat, view = s.contacts.of(sender).beat, s.election.view
        s.election.split_brain(f"split brain: {sentence}")
        if beat is None or (beat.lineage, beat.epoch) != (view.lineage, view.epoch):
            return
        mine = s.announced_samples, len(view.members), view_mark(view)
        if (beat.samples, beat.size, beat.view) > mine:
            self.give_way(f"{sentence}; our view is given up")

    # --- pausing ---

    def present(self, members: Iterable[ProcessId]) -> set[ProcessId]:
        """Those that cannot have given us up, as far as we know; we are one of them."""
        s = self._state
        contacts = map(s.contacts.get, members)
        held = {c.process for c in contacts if c is not None and s.has_lease(c)} - s.absent
        held.add(s.id)
        return held

    def review(self, view: View) -> None:
        """Pause without a quorum in contact, resume with one."""
        s = self._state
        present = self.present(view.members)
        if has_quorum(view.members, present, s.uncounted) and self._holds_next():
            if s.state is ClusterState.PAUSED:
                s.state, s.reason = ClusterState.ACTIVE, "a quorum of the view is in contact again"
                s.released_at = None  # what a person said was about those who were missing then
                s.out.append(ViewResumed(s.reason))
                s.note(MembershipChange.RESUMED, f"resumed: {s.reason}")
                s.election.encourage()
                s.beat_soon()
            return
        missing = [who for who in view.members if who not in present and who not in s.absent]
        if s.state is ClusterState.ACTIVE:
            self._pause(self._why_paused(view, missing))

    def _why_paused(self, view: View, missing: list[ProcessId]) -> str:
        s = self._state
        if self._has_agreed_to_go():
            return "we have agreed to be left out of the next view"
        if not missing:
            return "we have agreed to a next view, and have no quorum of it in contact"
        here = sum(who not in missing and who not in s.absent for who in view.members)
        reasons = "; ".join(f"{s.name(who)}: {s.why_doubtful(who)}" for who in missing)
        return (
            f"{here} of {len(view.members)} members are in contact, less than a quorum; "
            f"the others may continue without us ({reasons})"
        )

    def _holds_next(self) -> bool:
        """Whether the next view that we have accepted, and that may be agreed, would hold too."""
        s = self._state
        accepted = s.election.ballot.accepted
        if accepted is None:
            return True
        members = accepted.members
        return s.id in members and has_quorum(members, self.present(members), s.uncounted)

    def _has_agreed_to_go(self) -> bool:
        """Whether we have accepted a next view without us: then we may count for nothing more."""
        s = self._state
        accepted = s.election.ballot.accepted
        return accepted is not None and s.id not in accepted.members

    def _pause(self, reason: str) -> None:
        s = self._state
        s.state, s.reason = ClusterState.PAUSED, reason
        self.paused_at = s.time
        s.out.append(Paused(s.reason))
        s.note(MembershipChange.PAUSED, f"paused: {s.reason}")
        s.beat_soon()


def _is_ahead(beat: Heartbeat, view: View) -> bool:
    return beat.lineage == view.lineage and beat.epoch > view.epoch


def never_in(view: View | Commit, reason: str) -> Departed:
    """The last word of a process in a view in which it never was: nothing promised or accepted."""
    return Departed(view.lineage, view.epoch, -1, -1, None, reason)


# --------------------------------------------------------------------------------------------------
# Finding a leader where there is none: when to campaign, and how to answer those who do.

LONGEST_CAMPAIGN = 2.0
"""Election timeouts after which the one that got our vote has won, and told us so, or lost."""


class ElectionDriver:
    """Campaigns when the leader is lost, the most senior member first."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state
        self.is_called = False
        """Whether a member asked for an election."""
        self._begun = state.time
        self._hopes_until = float("-inf")  # the one that got our vote may still be counting

    def begin(self) -> None:
        """A view was installed or left."""
        self.is_called = False
        self._begun = self._state.time

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is due."""
        election = self._state.election
        return election.until, election.not_before

    def review(self, view: View) -> None:
        """Follow the leader we have, or campaign in our turn."""
        s = self._state
        election = s.election
        if election.role is ElectionRole.CANVASSING and not self.why_leaderless():
            election.resume_following()
        if election.role is ElectionRole.CANVASSING or election.role is ElectionRole.CAMPAIGNING:
            self._pursue()
            return
        wanted = self.is_called or s.config.election.auto_elect_on_peer_loss
        lost = "" if not wanted else self.why_leaderless()
        if not lost:
            election.not_before = None
            return
        seniors = set(view.members[: view.members.index(s.id)]) - s.gone - {election.leader}
        election.wait_turn(sum(s.contacts.is_mutual(who) for who in seniors), s.time)
        if election.not_before is not None and s.time >= election.not_before:
            s.tell(s.others(), election.pre_vote(s.time, lost))
            self._pursue()

    def _pursue(self) -> None:
        """Continue our campaign as far as it carries."""
        s = self._state
        election = s.election
        if election.role is ElectionRole.CANVASSING and election.has_won(s.proofs.keys()):
            s.tell(s.others(), election.campaign(s.time))
        if election.role is ElectionRole.CAMPAIGNING and election.has_won(s.proofs.keys()):
            election.lead()
            s.is_dirty = True
        elif election.until is not None and s.time >= election.until:
            election.give_up(s.time)

    def why_leaderless(self) -> str:
        """Why the leader of the term does not lead, in words; empty if it does."""
        s = self._state
        leader = s.election.leader
        if leader == s.id:
            return ""
        if leader is None:
            return s.election.reason
        if leader in s.gone:
            return f"{s.name(leader)} is gone"
        if not s.contacts.is_heard(leader):
            return f"{s.name(leader)} is lost: {s.health.reason(leader)}"
        contact, view = s.contacts.of(leader), s.election.view
        beat = contact.beat
        if beat is None or not beat.size or contact.beat_at < self._begun:
            return ""  # it has not spoken yet since we are in this view
        if beat.lineage != view.lineage:
            return f"{s.name(leader)} has moved to another lineage"
        if beat.epoch != view.epoch:
            return ""
        if beat.term > s.election.term:
            return f"{s.name(leader)} voted for another machine"
        is_defeated = beat.term == s.election.term and beat.leader != leader
        if is_defeated and s.time >= self._hopes_until:
            return f"{s.name(leader)} had our vote and was not elected"
        return ""

    # --- messages; the sender is a member, lineage and epoch are ours ---

    def take_canvass(self, sender: ProcessId, message: PreVote) -> None:
        """A member considers a campaign."""
        s = self._state
        refusal = ""
        if s.election.leader != sender and not self.why_leaderless():
            refusal = "the leader is heard"
        answer = s.election.answer_pre_vote(
            sender, message, refusal=refusal, proofs=s.proofs.keys()
        )
        s.send(sender, answer)

    def take_leaning(self, sender: ProcessId, message: PreVoteReply) -> None:
        """An answer to our pre-vote."""
        self._state.election.take_leaning(sender, message)

    def take_vote_request(self, sender: ProcessId, message: VoteRequest) -> None:
        """A member campaigns."""
        s = self._state
        answer = s.election.answer_vote_request(sender, message, s.proofs.keys())
        if answer.is_granted:
            timeout = s.config.election.election_timeout + s.election.slack
            self._hopes_until = s.time + LONGEST_CAMPAIGN * timeout
        s.send(sender, answer)

    def take_vote(self, sender: ProcessId, message: Vote) -> None:
        """A vote for us, or the news that there is none."""
        election = self._state.election
        election.take_vote(sender, message)
        election.preempted(message.promised, "another machine campaigns in a later term")

    def loss_reported(self, sender: ProcessId) -> None:
        """A member reports a loss: if it is the leader's, it may vote for us now."""
        election = self._state.election
        if election.role is ElectionRole.CANVASSING and not election.has_answered(sender):
            self._state.send(sender, election.canvass_again())


# --------------------------------------------------------------------------------------------------
# The largest set of processes that all hear each other.
#
# Finding it exactly is exponential in the worst case, so the search has a budget; what it has found
# by then is mutually connected, though perhaps not the largest.  A mesh with few missing links,
# which is what real networks have, is solved long before.

_BUDGET = 5_000  # sets looked at; some 10 ms

P = TypeVar("P")


def largest_mutual(
    people: Sequence[P], is_linked: Callable[[P, P], bool], must: Sequence[P] = ()
) -> tuple[P, ...]:
    """The largest mutually linked part of ``people`` with all of ``must``, in the same order.

    Among equally large ones, the one whose members come first.

    >>> broken = {("b", "c"), ("c", "b")}
    >>> largest_mutual("abcd", lambda one, other: (one, other) not in broken)
    ('a', 'b', 'd')
    """
    size = len(people)
    links = [0] * size
    for i, j in combinations(range(size), 2):
        if is_linked(people[i], people[j]) and is_linked(people[j], people[i]):
            links[i] |= 1 << j
            links[j] |= 1 << i
    return largest_linked(people, links, must)


def largest_linked(people: Sequence[P], links: list[int], must: Sequence[P] = ()) -> tuple[P, ...]:
    """The same where ``links`` says for each, in bits, to whom it is linked in both directions.

    >>> largest_linked("abc", [0b110, 0b101, 0b011])
    ('a', 'b', 'c')
    """
    size = len(people)
    chosen, candidates = 0, (1 << size) - 1
    for one in must:
        index = people.index(one)
        chosen |= 1 << index
        candidates &= links[index]
    best = _Search(links).run(chosen, candidates & ~chosen)
    return tuple(people[i] for i in range(size) if best >> i & 1)


class _Search:
    """Branch and bound over sets kept as bits; lower bits are tried first, so they win ties."""

    def __init__(self, links: list[int]) -> None:
        self._links = links
        self._best = 0
        self._budget = _BUDGET

    def run(self, chosen: int, candidates: int) -> int:
        self._extend(chosen, candidates)
        return self._best

    def _extend(self, chosen: int, candidates: int) -> None:
        self._budget -= 1
        if not candidates and chosen.bit_count() > self._best.bit_count():
            self._best = chosen
        while candidates:
            if self._budget < 0 and self._best:
                return
            if chosen.bit_count() + candidates.bit_count() <= self._best.bit_count():
                return
            lowest = candidates & -candidates
            links = self._links[lowest.bit_length() - 1]
            candidates &= ~lowest
            self._extend(chosen | lowest, candidates & links)


# --------------------------------------------------------------------------------------------------
# Who should be in the next view: what the leader of a term proposes, with the reason.
#
# * A member that is proved dead, has departed or was removed for what it sent is left out at once;
#   one that has been silent for twice the time after which it pauses itself is left out too.  We
#   wait for a member that has been silent for less.
# * Where some members have not heard each other for long, the largest mutually connected set stays;
#   the others have to accept their exclusion.
# * Newcomers come in when they and all who stay hear each other, several at a time.
# * Nothing is proposed before all who stay were heard just now, after the loss if there was one: a
#   member that stands still without being missed yet could not accept, and until that is known for
#   certain no other view could be agreed on.
# * Those who stay keep their order; newcomers follow in the order of their ids.
# * A proposal says of every member that it leaves out why, as data: errors are made from that
#   alone.

_BEATS = 1.5  # a beating peer was heard within this many intervals
_CALM = 30.0  # seconds in one view after which earlier changes do not count any more
_AT_ONE_PAUSE = 4  # changes in a row that are a pause apart; each further one twice as long,
_MOST_PAUSES = 16  # at most, in pauses

_Pair = tuple[ProcessId, ProcessId]
_Why = tuple[CauseCode, str]


class NextViewPlanner:
    """Plans the next view; remembers since when links are missing and newcomers are ready."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state
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
        s = self._state
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
        delay = self._state.config.election.connection_delay
        look = min(self._ready.values()) + delay if self._ready else None
        if self._not_before is None:
            return look
        return self._not_before if look is None else max(look, self._not_before)

    def _may_change(self) -> bool:
        """Whether a view may follow the present one that no death or farewell asks for.

        At most one in a pause, and ever fewer while they follow each other without calm.
        """
        s = self._state
        if self._in_a_row <= 1:
            return True
        pauses: int = min(2 ** max(0, self._in_a_row - _AT_ONE_PAUSE), _MOST_PAUSES)
        due = self._begun_at + pauses * s.pause_after
        self._not_before = due if s.time < due else None
        return s.time >= due

    def plan(self, view: View, *, must_change: bool) -> Proposal | None:
        """The next view to propose; None if there is nothing to change, or not yet."""
        s = self._state
        out = {who: why for who in view.members if (why := self._why_out(who)) is not None}
        staying = [member for member in view.members if member not in out]
        limbo = [who for who in staying if who != s.id and self._is_unclear(who)]
        if limbo:
            names = s.names(limbo)
            s.note_once("limbo", f"the next view waits until it is known whether {names} ended")
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
        s = self._state
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
        s = self._state
        if who in s.ended:
            return CauseCode.ENDED, f"its process has ended ({s.ended[who][0]})"
        return CauseCode.SILENT, s.why_doubtful(who)

    def _why_unreachable(self, who: ProcessId, kept: list[ProcessId]) -> _Why:
        """Of a member that lives, but does not hear all who stay."""
        apart = self._apart(who, kept)
        return (
            CauseCode.UNREACHABLE,
            f"it and {self._state.names(apart)} do not hear each other",
        )

    def missing(self, view: View) -> tuple[Cause, ...]:
        """Members that are out of contact now, and why: a next view may wait for them."""
        s = self._state
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
        s = self._state
        is_known = who in s.proofs or who in s.election.departed or who in s.reported
        return is_known or who in s.expelled

    def _is_unclear(self, who: ProcessId) -> bool:
        s = self._state
        return s.is_doubtful(who) or not s.contacts.is_heard(who)

    def _is_fresh(self, who: ProcessId) -> bool:
        """Whether a member was heard after operations were aborted, or within the last beats."""
        s = self._state
        longest = s.time - s.aborted_at if s.is_aborted else _BEATS * s.interval
        return s.health.silence(who, s.now) <= longest

    def _mesh(self, staying: list[ProcessId]) -> tuple[ProcessId, ...] | None:
        """The largest mutually connected set; None while that is not clear."""
        s = self._state
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
        links = self._state.contacts.links(staying)
        for index, one in enumerate(staying):
            linked, later = links[index] >> index, staying[index + 1 :]
            if linked.bit_count() < len(later):
                apart = [other for place, other in enumerate(later, 1) if not linked >> place & 1]
                yield from ((one, other) for other in apart)

    def _newcomers(self, kept: list[ProcessId]) -> list[Contact]:
        """Those who can come in now; says why of those who cannot."""
        s = self._state
        ready: list[Contact] = []
        outsiders = [c for c in s.joiners() if not s.is_member(c.process) and self._may_come(c)]
        for contact in sorted(outsiders, key=lambda c: c.process):
            apart = self._apart(contact.process, [*kept, *(c.process for c in ready)])
            if apart:
                s.note_once(
                    f"newcomer {contact.process}",
                    f"{contact.card} cannot join yet: it and {s.names(apart)} "
                    "do not hear each other",
                    contact.process,
                )
            else:
                ready.append(contact)
        self._ready = {c.process: self._ready.get(c.process, s.time) for c in ready}
        return ready

    def _may_come(self, contact: Contact) -> bool:
        """Whether a process may enter our lineage: it is free, or bound to it or to an ancestor."""
        s = self._state
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
        hears = self._state.contacts.hears
        return [
            other for other in others if not (hears(newcomer, other) and hears(other, newcomer))
        ]

    def _is_time(self) -> bool:
        look = self.next_look
        return look is not None and self._state.time >= look

    def _reason(self, out: dict[ProcessId, _Why], new: list[ProcessId]) -> str:
        s = self._state
        parts = [f"without {s.name(who)}: {why}" for who, (_, why) in out.items()]
        if new:
            parts.append(f"{s.names(new)} joined")
        if self.is_stepping_down:
            parts.append(f"{s.name(s.id)} hands over rank 0")
        return "; ".join(parts) or self._why_again()

    def _why_again(self) -> str:
        """Why the same members follow once more."""
        s = self._state
        if s.lost is not None and s.lost_by is not None:
            if s.lost_by == s.lost:
                return f"the connection to {s.name(s.lost)} broke and is back"
            ends = f"{s.name(s.lost_by)} and {s.name(s.lost)}"
            return f"the connection between {ends} broke and is back"
        if s.stopped_because:
            return s.stopped_because
        if s.election.term:
            return f"{s.name(s.election.view.leader)} was out of contact and is back"
        return "restarted with the same members"


# --------------------------------------------------------------------------------------------------
# From one view to the next: campaigns, proposals and commits, as one Paxos instance per epoch.
#
# A proposal is committed when a quorum has accepted it in its term **and** everybody else in the
# old view is proved dead, has departed, or has been silent for so long that it has paused itself.
# The second half is what makes a proof of death worth something: a member that was in contact until
# the end knows that nothing was agreed without it.


class ViewProposer:
    """Elects a leader where there is none, and carries its proposals through."""

    def __init__(
        self,
        state: MembershipState,
        installer: ViewInstaller,
        planner: NextViewPlanner,
        campaign: ElectionDriver,
    ) -> None:
        self._state = state
        self._campaign = campaign
        self._installer = installer
        self._planner = planner
        self._proposal: Proposal | None = None
        self._acceptors: dict[ProcessId, Accepted] = {}
        self._sworn: Accepted | None = None  # our last answer to the leader
        self._repeat_at = 0.0

    def begin(self) -> None:
        """A view was installed or left: what was under way belongs to the past."""
        self._proposal = None
        self._acceptors = {}
        self._sworn = None
        self._planner.begin()

    @property
    def is_busy(self) -> bool:
        """Whether a proposal of ours waits for answers."""
        return self._proposal is not None

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is due."""
        return self._planner.next_look, self._repeat_at if self.is_busy else None

    # --- what is due ---

    def review(self, view: View) -> None:
        """Do what the present state asks for."""
        s = self._state
        if s.election.is_leading:
            self._lead(view)
        else:
            self._proposal = None
            self._swear_again()
            self._campaign.review(view)

    def _lead(self, view: View) -> None:
        s = self._state
        if self._proposal is not None:
            if self._maybe_commit(view):
                return
            if s.time >= self._repeat_at:
                self._ask(view)
            return
        term = s.election.term
        plan = s.election.inherited
        if plan is None:
            plan = self._planner.plan(view, must_change=s.is_aborted or term > 0)
        if plan is not None:
            self.propose(view, plan)

    def propose(self, view: View, plan: Proposal) -> None:
        """Ask the members of a view to accept its successor, in the term that is ours."""
        s = self._state
        accepted = s.election.ballot.accept(s.id, s.election.term, plan)
        assert accepted, "a leader proposes once in its term"
        self._proposal = plan
        self._acceptors = {}
        s.note(MembershipChange.PROPOSED, f"proposed view {view.epoch + 1}: {plan.reason}")
        self._ask(view)
        self._maybe_commit(view)

    def _ask(self, view: View) -> None:
        s = self._state
        assert self._proposal is not None
        message = Propose(view.lineage, view.epoch, s.election.term, self._proposal)
        s.tell([who for who in s.others() if who not in s.gone], message)
        self._repeat_at = s.time + 2 * s.interval

    def _maybe_commit(self, view: View) -> bool:
        s = self._state
        proposal = self._proposal
        assert proposal is not None
        if s.is_pledged:
            return False  # this view may have ended with the founding that we agreed to
        if not self._is_agreed(view, dict(self._acceptors)):
            # An acceptor that has fallen silent cannot say any more who is silent to it.  It need
            # not, if the others are a quorum without it: then it is one of those left behind.
            heard = {w: a for w, a in self._acceptors.items() if not s.is_silent(w)}
            if len(heard) == len(self._acceptors) or not self._is_agreed(view, heard):
                return False
        charter = Charter() if s.bound is None else s.bound.charter
        commit = Commit(view.lineage, view.epoch + 1, proposal, charter)
        s.tell(dict.fromkeys([*s.others(), *proposal.members]), commit)
        self._installer.take_commit(s.id, commit)
        return True

    def _is_agreed(self, view: View, acceptors: dict[ProcessId, Accepted]) -> bool:
        """Whether we and these are a quorum to which everybody else is silent, or gone."""
        s = self._state
        proofs = frozenset(s.proofs).union(*(word.proofs for word in acceptors.values()))
        gone, elsewhere = s.gone | proofs, s.election.elsewhere
        uncounted = proofs | (gone - elsewhere)
        if not has_quorum(view.members, {s.id, *acceptors} - elsewhere, uncounted):
            return False
        voices = {who: word for who, word in acceptors.items() if who not in gone}
        living = [word for who, word in voices.items() if not self._has_long_ended(who)]
        silent = self._silent().intersection(*(word.silent for word in living))
        return gone | silent | {s.id, *acceptors} >= set(view.members)

    def _has_long_ended(self, who: ProcessId) -> bool:
        """Whether an acceptor ended so long ago that no process holds a lease of it any more."""
        s = self._state
        ended = s.ended.get(who)
        return ended is not None and s.time - ended[1] >= s.longest_lease

    def _silent(self) -> frozenset[ProcessId]:
        """Members that have paused themselves, if they are alive, for all we hear of them."""
        s = self._state
        return frozenset(who for who in s.others() if s.is_silent(who))

    def _swear_again(self) -> None:
        """What we know of the silent has changed since we accepted: the leader waits for it."""
        s = self._state
        word, leader = self._sworn, s.election.ballot.proposer
        if word is None or leader is None or word.term != s.election.ballot.promised:
            return
        again = self._accepted(word.term)
        if again != word:
            self._sworn = again
            s.send(leader, again)

    def _accepted(self, term: int) -> Accepted:
        s = self._state
        view = s.election.view
        return Accepted(
            lineage=view.lineage,
            epoch=view.epoch,
            term=term,
            is_accepted=True,
            promised=s.election.ballot.promised,
            proofs=tuple(sorted(s.proofs)),
            # A process that departed is at work no more, whether or not the leader has heard of it.
            silent=tuple(sorted(self._silent().union(s.election.departed))),
        )

    # --- messages; the sender is a member, lineage and epoch are ours ---

    def take_propose(self, sender: ProcessId, message: Propose) -> None:
        """The leader of a term asks us to accept the next view."""
        s = self._state
        view, ballot = s.election.view, s.election.ballot
        if not _is_sound(message.proposal) or (message.term == 0 and sender != view.leader):
            return
        if ballot.contradicts(sender, message.term, message.proposal):
            s.election.split_brain(
                f"split brain: {s.name(sender)} proposes in term {view.epoch}.{message.term}, "
                "in which something else was proposed before"
            )
            return
        if ballot.accept(sender, message.term, message.proposal):
            s.election.follow_proposer(sender, message.term)
            self._sworn = self._accepted(message.term)
            s.send(sender, self._sworn)
            s.beat_soon()
        else:
            refusal = msgspec.structs.replace(self._accepted(message.term), is_accepted=False)
            s.send(sender, refusal)

    def take_accepted(self, sender: ProcessId, message: Accepted) -> None:
        """An answer to our proposal."""
        election = self._state.election
        if self._proposal is None or message.term != election.term:
            return
        if message.is_accepted:
            self._acceptors[sender] = message
        else:
            election.preempted(message.promised, "it voted for another machine meanwhile")

    def take_departed(self, sender: ProcessId, message: Departed) -> None:
        """A member takes no part any more."""
        s = self._state
        s.election.depart(sender, message)
        sentence = f"{s.name(sender)} left: {message.reason or 'it left the job'}"
        s.note(MembershipChange.DEPARTED, sentence, sender)
        s.abort(sender, sentence, orderly=True)


def _is_sound(proposal: Proposal) -> bool:
    members = proposal.members
    return 0 < len(members) <= MAX_MEMBERS and len(set(members)) == len(members)
