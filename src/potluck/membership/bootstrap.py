"""The beginning of a lineage: processes that hear each other found one, if all of them agree.

There are two kinds.  *Free* processes, which never were in a view, found a lineage without a
parent once as many are here as each of them asked for (``min_nodes``).  *Bound* processes, which
belong to a lineage, may only found a *child* of it, and only if they account for every member of
the newest view that any of them knows: it is among them, or it has ended.  Under ``quorum="any"``,
or when a person says so, no process need be accounted for.  Time alone frees no process.

The first of a mutually connected set proposes it as the first view; all of it must agree.  Each
checks the rules for itself, the founder again when it begins.  A process that has agreed agrees to
nothing else and enters no other view for longer than the founder waits for answers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from potluck._types import Branch, ProcessId, View
from potluck.membership.election import has_quorum
from potluck.membership.events import ClusterState, MembershipChange
from potluck.membership.messages import (
    MAX_MEMBERS,
    Cause,
    CauseCode,
    Charter,
    Claim,
    Commit,
    Found,
    Founded,
    MergeAnswer,
    MergeRequest,
    Phase,
    Proposal,
    branch_off,
    clip,
    outranks,
)
from potluck.membership.state import Contact, MembershipState, Pledge, view_mark
from potluck.membership.views import ViewInstaller, ViewProposer, largest_linked

_LINEAGE_DIGITS = 32
_CROWD = 8  # processes; up to this many every change is looked at at once
_PATIENCE = 5  # connection delays to wait for those who are connected to us but not to all
_AGAIN = "waiting a moment before entering again: "
_UNRANKED = MAX_MEMBERS  # comes after every rank of a view
_UNPLACED = 1 << 20  # comes after every place that a launcher gives


@dataclass(slots=True)
class _Attempt:
    message: Found
    until: float
    agreed: set[ProcessId] = field(default_factory=set)


class Bootstrap:
    """Founds a lineage where there is none that could take us in."""

    def __init__(self, state: MembershipState, installer: ViewInstaller) -> None:
        self._state = state
        self._installer = installer
        self._group: frozenset[ProcessId] = frozenset({state.id})
        self._group_since = state.time
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._look_at: float | None = None
        self._searched_at = float("-inf")
        self._known_group: tuple[ProcessId, ...] = (state.id,)

    def begin(self) -> None:
        """A view was installed or left."""
        self._attempt = self._look_at = None
        self._group = frozenset({self._state.id})
        self._group_since = self._state.time

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is due."""
        return self._look_at, None if self._attempt is None else self._attempt.until

    # --- what is due ---

    def review(self) -> None:
        """Found a lineage if it is our turn and it is time."""
        s = self._state
        self._look_at = None
        if s.state is ClusterState.ACTIVE or s.is_observer or s.state is ClusterState.LEFT:
            return
        self._expire()
        if not self._is_ready():
            return
        if self._attempt is not None or self._is_pledged():
            return
        held, host = self._held_back()
        if held:
            if host is not None and s.view is not None and not self._is_here(host, s.view):
                self._installer.step_aside(f"{host.card} continues this job in another view")
            s.note_once("founding", held)
            s.reason = held if s.view is None else s.reason
        elif s.bound is None:
            self._maybe_found()
        else:
            self._maybe_branch(s.bound)

    def _expire(self) -> None:
        s = self._state
        if self._attempt is not None and s.time >= self._attempt.until:
            self._attempt = None
            self._group_since = s.time

    def _is_ready(self) -> bool:
        """Whether we may begin something: not at once after leaving a view or losing contact."""
        s = self._state
        if s.state is ClusterState.JOINING and s.phase is not Phase.JOINING:
            self._wait(s.ready_at, _AGAIN + s.reason.removeprefix(_AGAIN))
            return False
        if s.bound is None:
            return True
        since = self._installer.since if s.view is None else self._installer.paused_at
        # A view that could still decide, or take us in, has that long to do so.
        due = since if s.is_released else since + 2 * s.pause_after
        if s.time < due:
            self._look_at = due
            return False
        return True

    def _is_pledged(self) -> bool:
        s = self._state
        if s.pledge is None or not s.is_pledged:
            return False
        self._look_at = s.pledge.until
        return True

    @staticmethod
    def _is_here(contact: Contact, view: View) -> bool:
        return contact.beat is not None and contact.beat.lineage == view.lineage

    def _held_back(self) -> tuple[str, Contact | None]:
        """Why nothing is to be founded, and which process at work can have us let in, if any."""
        s = self._state
        for contact in s.contacts:
            beat = contact.beat
            if beat is None or not contact.is_member or not s.contacts.is_heard(contact.process):
                continue
            if contact.card.schema != s.me.schema:
                continue
            if beat.phase is Phase.ACTIVE and s.may_enter(beat.lineage):
                if contact.card.quorum != s.quorum:
                    return s.why_other_quorum(contact), None
                leader = "its leader" if beat.leader is None else s.name(beat.leader)
                return f"waiting for {leader} to let us into a cluster of {beat.size}", contact
            if s.bound is None and beat.bound and beat.phase is not Phase.ACTIVE:
                return f"waiting for {contact.card}, which cannot continue yet", None
        return "", None

    def _order(self, contacts: list[Contact]) -> list[ProcessId]:
        """Who is to be first: by rank in the view we are bound to, by a launcher's wish, by id."""
        s = self._state
        return sorted([s.id, *(c.process for c in contacts)], key=self._key)

    def _key(self, process: ProcessId) -> tuple[int, int, ProcessId]:
        s = self._state
        rank = None if s.bound is None else s.bound.view.rank_of(process)
        contact = s.contacts.get(process)
        place = (s.me if contact is None else contact.card).place
        return (
            _UNRANKED if rank is None else rank,
            _UNPLACED if place < 0 else place,
            process,
        )

    def _mutual(self, contacts: list[Contact]) -> tuple[ProcessId, ...]:
        """The largest set with us that all hear each other, the founder first."""
        s = self._state
        order = self._order(contacts)
        group = self._largest(order)
        if frozenset(group) != self._group:
            self._group, self._group_since = frozenset(group), s.time
        return group

    # --- free processes ---

    def _maybe_found(self) -> None:
        """Found a lineage without a parent, with all who are free and hear each other."""
        s = self._state
        free = [c for c in s.joiners() if c.beat is not None and not c.beat.bound]
        others = [c for c in free if c.card.quorum != s.quorum]
        unlike = [s.why_other_quorum(c) for c in others]
        if any(c.beat is not None and c.beat.wants <= 1 and c.process < s.id for c in others):
            self._say(f"waiting: {unlike[0]}")  # that one begins alone; two clusters would not fit
            return
        joiners = [c for c in free if s.suits(c)]
        group = self._mutual(joiners)
        wants = self._wanted(joiners)
        if len(group) < wants:
            here = f"{len(group)} of at least {wants} processes are here"
            self._say("; ".join([here, *unlike[:1]]))
        elif group[0] == s.id:
            self._found_when_due(group, Charter(s.quorum), "")
        else:
            s.reason = f"{s.name(group[0])} starts a cluster of {len(group)}"

    def _largest(self, order: list[ProcessId]) -> tuple[ProcessId, ...]:
        """The group of these that all hear each other, with us.

        While a crowd gathers links come up all the time: then it is searched once in a beat.
        """
        s = self._state
        if len(order) > _CROWD and s.time < self._searched_at + s.interval:
            self._look_at = self._searched_at + s.interval
            return self._known_group
        self._searched_at = s.time
        links = s.contacts.links(order)
        self._known_group = largest_linked(order, links, must=[s.id])[:MAX_MEMBERS]
        return self._known_group

    def _wanted(self, joiners: list[Contact]) -> int:
        s = self._state
        wishes = [c.beat.wants for c in joiners if c.beat is not None and c.process in self._group]
        return max([s.config.min_nodes, *wishes])

    # --- bound processes ---

    def _maybe_branch(self, bound: Commit) -> None:
        """Found a child of our lineage, if no process of it can be at work without us."""
        s = self._state
        fellows = s.fellows()
        if any(c.beat is not None and c.beat.bound_epoch > bound.epoch for c in fellows):
            self._say(f"waiting to learn of a later view than {bound.epoch}")
            return
        group = self._mutual(fellows)
        missing = self._missing(bound, group)
        if self._can_decide(bound, group):
            return  # the leader of the view we have will come to a decision
        if missing and not self._is_unconditional:
            self._say(s.why_waiting(missing))
        elif group[0] == s.id or (missing and self._speaks_for(group)):
            ancestry = branch_off(bound.charter.ancestry, bound.lineage, bound.epoch)
            charter = Charter(s.quorum, ancestry, s.origin or bound.charter.origin)
            self._found_when_due(group, charter, self._why_branch(bound, group))
        else:
            s.reason = f"{s.name(group[0])} continues with {s.names(group)}"

    def _speaks_for(self, group: tuple[ProcessId, ...]) -> bool:
        """Whether we begin though others come first: a person told us, and perhaps not them.

        Those who were told as well have begun by then, each in its turn.
        """
        s = self._state
        if s.released_at is None:
            return False
        turn = s.released_at + 2 * s.config.election.election_timeout * group.index(s.id)
        if s.time < turn:
            self._look_at = turn
        return s.time >= turn

    @property
    def _is_unconditional(self) -> bool:
        s = self._state
        return s.is_released or s.quorum == "any"

    def _missing(self, bound: Commit, group: tuple[ProcessId, ...]) -> list[ProcessId]:
        """Members of the newest view that may be at work without us."""
        s = self._state
        return [
            who for who in bound.view.members if who not in group and not s.is_gone_for_good(who)
        ]

    def _can_decide(self, bound: Commit, group: tuple[ProcessId, ...]) -> bool:
        """Whether those of the group that are still in the view are a quorum of it."""
        s = self._state
        if s.view is None:
            return False
        mark = view_mark(s.view)
        voters = {s.id}
        for who in group:
            contact = s.contacts.get(who)
            if contact is not None and contact.beat is not None and contact.beat.view == mark:
                voters.add(who)
        return has_quorum(bound.view.members, voters, s.uncounted)

    def _why_branch(self, bound: Commit, group: tuple[ProcessId, ...]) -> str:
        s = self._state
        others = [who for who in bound.view.members if who not in group]
        removed = [who for who in others if who in s.expelled]
        ended = [who for who in others if who in s.ended and who not in removed]
        apart = [who for who in others if who not in s.ended and who not in removed]
        parts = [f"{s.names(ended)} ended"] if ended else []
        parts += [f"{s.name(who)} was removed: {s.expelled[who]}" for who in removed]
        if apart:
            asked = "as asked, " if s.is_released else ""
            parts.append(f"{asked}without waiting for {s.names(apart)}")
        return "; ".join(parts) or "all members of the last view are here again"

    def _causes(self, bound: Commit, group: tuple[ProcessId, ...]) -> tuple[Cause, ...]:
        """Why members of the view we were in are not in the next one."""
        s = self._state
        return s.causes(
            (who, *self._why_gone(who)) for who in bound.view.members if who not in group
        )

    def _why_gone(self, who: ProcessId) -> tuple[CauseCode, str]:
        s = self._state
        if who in s.expelled:
            return CauseCode.MISBEHAVED, s.expelled[who]
        if who in s.ended:
            return CauseCode.ENDED, f"its process has ended ({s.ended[who][0]})"
        if who in s.departed:
            return CauseCode.LEFT, "it left"
        return CauseCode.SILENT, s.why_doubtful(who)

    # --- founding ---

    def _say(self, reason: str) -> None:
        """Tell people what we wait for."""
        s = self._state
        waiting = reason if reason.startswith("waiting") else f"{reason}; waiting for the others"
        s.note_once("founding", waiting)
        s.reason = waiting

    def _found_when_due(self, group: tuple[ProcessId, ...], charter: Charter, why: str) -> None:
        s = self._state
        delay = s.config.election.connection_delay
        due = self._group_since + delay
        if len(group) == 1:
            due = max(due, self._installer.since + s.config.solo_delay)
        if self._strangers(group):
            due = max(due, self._group_since + _PATIENCE * delay)
        if s.time < due:
            self._wait(due, f"{len(group)} here; looking for more before starting")
            return
        self._found(group, charter, why)

    def _strangers(self, group: tuple[ProcessId, ...]) -> bool:
        """Whether a process is connected that could be in the group and is not yet."""
        s = self._state
        mine = "" if s.bound is None else s.bound.lineage
        waiting = {Phase.JOINING, Phase.WAITING, Phase.PAUSED}
        return any(
            contact.is_connected
            and contact.is_member
            and contact.process not in group
            and (
                contact.beat is None
                or (contact.beat.phase in waiting and contact.beat.bound == mine)
            )
            for contact in s.contacts
        )

    def _wait(self, until: float, reason: str) -> None:
        self._look_at = until
        self._state.reason = reason

    def _found(self, group: tuple[ProcessId, ...], charter: Charter, why: str) -> None:
        s = self._state
        self._attempts += 1
        text = f"{s.id.node}/{s.id.incarnation} {self._attempts} {group}"
        lineage = hashlib.sha256(text.encode()).hexdigest()[:_LINEAGE_DIGITS]
        reason = f"started by {s.name(s.id)} with {s.names(group)}"
        causes: tuple[Cause, ...] = ()
        if s.bound is not None:
            reason = f"{reason}, continuing view {s.bound.epoch}: {why}"
            causes = self._causes(s.bound, group)
        interval, pause = s.pace_for(group)
        proposal = Proposal(
            group, clip(reason), causes=causes, interval=interval, pause_after=pause
        )
        until = s.time + s.config.election.election_timeout
        message = Found(lineage, proposal, charter, s.is_released)
        self._attempt = _Attempt(message, until, {s.id})
        s.tell(group, message)
        self._maybe_begin()

    def _maybe_begin(self) -> None:
        s = self._state
        attempt = self._attempt
        if attempt is None or not attempt.agreed >= set(attempt.message.proposal.members):
            return
        message = attempt.message
        refusal = self._why_not_now(s.id, message)  # what we know may have changed meanwhile
        if refusal:
            self._give_up(refusal, s.id)
            return
        commit = Commit(message.lineage, 1, message.proposal, message.charter)
        s.tell(message.proposal.members, commit)
        self._installer.install(commit)

    def _give_up(self, why: str, process: ProcessId) -> None:
        """This founding comes to nothing; the next one may."""
        self._attempt = None
        self._group_since = self._state.time
        self._state.note_once("founding", f"waiting to start: {why}", process)

    # --- messages ---

    def take_found(self, sender: ProcessId, message: Found) -> None:
        """A process proposes to begin together."""
        s = self._state
        refusal = self._why_not(sender, message)
        if not refusal:
            self._attempt = None
            until = s.time + 2 * s.config.election.election_timeout
            s.pledge = Pledge(sender, message.lineage, until)
        s.send(sender, Founded(message.lineage, not refusal, clip(refusal)))

    def _why_not(self, sender: ProcessId, message: Found) -> str:
        s = self._state
        members = message.proposal.members
        if message.charter.quorum != s.quorum:
            return f"it uses quorum={s.quorum!r}"
        if s.id not in members or sender not in members:
            return "one of the two processes is not a member of it"
        if s.is_pledged and s.pledge is not None and s.pledge.founder != sender:
            return "it has agreed to another start"
        if self._attempt is not None and not self._comes_first(sender):
            return "it is starting the cluster itself"
        unheard = [who for who in members if who != s.id and not s.contacts.is_heard(who)]
        if unheard:
            return f"it does not hear {s.names(unheard)}"
        return self._why_not_now(sender, message)

    def _why_not_now(self, sender: ProcessId, message: Found) -> str:
        """Why we may not begin this with those who agree; the founder asks itself as well."""
        bound = self._state.bound
        if bound is None:
            refusal = self._why_not_free(message)
        else:
            refusal = self._why_not_bound(sender, message, bound)
        return refusal or self._held_back()[0]

    def _why_not_free(self, message: Found) -> str:
        s = self._state
        if s.phase is not Phase.JOINING:
            return "it is not looking for a cluster now"
        if message.charter.ancestry:
            return "it does not belong to the lineage that is to be continued"
        if len(message.proposal.members) < s.config.min_nodes:
            return f"it waits for {s.config.min_nodes} processes"
        return ""

    def _why_not_bound(self, sender: ProcessId, message: Found, bound: Commit) -> str:
        s = self._state
        ancestry = message.charter.ancestry
        parent = ancestry[-1] if ancestry else Branch("", 0)
        if parent.lineage != bound.lineage:
            return "it belongs to another lineage"
        if parent.epoch != bound.epoch:
            if parent.epoch < bound.epoch:
                s.send(sender, bound)
            return f"the newest view it knows is {bound.epoch}"
        if s.phase not in {Phase.JOINING, Phase.PAUSED}:
            return "it is active, or was a moment ago"
        group = message.proposal.members
        missing = self._missing(bound, group)
        if missing and not (message.is_forced or self._is_unconditional):
            return f"it does not know whether {s.names(missing)} ended"
        if self._can_decide(bound, group):
            return "the view it is in has a quorum"
        return ""

    def _comes_first(self, sender: ProcessId) -> bool:
        return self._key(sender) < self._key(self._state.id)

    def take_founded(self, sender: ProcessId, message: Founded) -> None:
        """An answer to our founding."""
        attempt = self._attempt
        if attempt is None or message.lineage != attempt.message.lineage:
            return
        if self._state.time >= attempt.until:
            return  # we were held up, and others are free by now to enter something else
        if message.is_agreed:
            attempt.agreed.add(sender)
            self._maybe_begin()
        else:
            self._give_up(message.reason, sender)


# --------------------------------------------------------------------------------------------------
# Two clusters of one job that meet become one.
#
# Ancestry decides which one stays (:mod:`potluck.membership.messages`).  Samples count only between
# lineages that left their common ancestor in the same epoch, or have none.  The lesser one
# dissolves: its leader asks the other's to reserve the merge, and only then proposes a terminal
# view.  A cluster that has reserved does not dissolve itself meanwhile, and one that has asked
# reserves nothing, so two never dissolve into each other.  The members of the dissolved one then
# belong to the other, and enter it as newcomers.

_RESERVED_FOR = 5  # election timeouts; a terminal view is agreed in a fraction of one
_ASK_EVERY = 2  # election timeouts


class LineageMerge:
    """Asks for merges, reserves them, and dissolves."""

    def __init__(self, state: MembershipState, proposer: ViewProposer) -> None:
        self._state = state
        self._proposer = proposer
        self._reserved_until = float("-inf")
        self._asked: tuple[ProcessId, str] | None = None
        self._ask_again_at = float("-inf")

    def begin(self) -> None:
        """A view was installed or left."""
        self._asked = None

    def review(self) -> None:
        """Ask for a merge where ours is the lesser of two clusters."""
        s = self._state
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
        s = self._state
        return (
            s.view is not None
            and s.state is ClusterState.ACTIVE
            and s.view.leader == s.id
            and s.election.is_leading
            and not self._proposer.is_busy
            and not s.is_aborted
            and s.time >= self._reserved_until
        )

    def _greater(self) -> tuple[ProcessId, str] | None:
        """Leader and lineage of the greatest cluster we meet that is greater than ours."""
        s = self._state
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
        s = self._state
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
        reason = "" if reserved else "it cannot admit other processes now"
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
        s = self._state
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
        self._proposer.propose(view, terminal)

    def _apart(self, theirs: tuple[ProcessId, ...]) -> str:
        """Two processes that could not be in one view; empty if there are none."""
        s = self._state
        hears = s.contacts.hears
        for one in s.election.view.members:
            for other in theirs:
                if one != other and not (hears(one, other) and hears(other, one)):
                    return s.names([one, other])
        return ""
