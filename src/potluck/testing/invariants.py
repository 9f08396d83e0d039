"""What must hold in every cluster at every moment, checked from outside with full knowledge.

Safety is checked when it could break, at the very event:

* a view has at most one committed successor, and its members agree on their ranks;
* the rules of votes, proposals and quorums (:mod:`potluck.testing.invariants`);
* a process's views follow each other, it is in each of them, and no observer ever is;
* no process is active in a view from which a later view of the lineage has excluded it, so that two
  views of one lineage are never at work at once; a process that was stopped or suspended has the
  time it needs to notice (``Bounds.waking``).

Liveness is checked when the surroundings have not changed for as long as it may take, and the links
lose nothing:

* no process stays active in a view with a member that is dead, stopped, cut off or elsewhere;
* when all faults have ended, all processes are in one view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from potluck._types import Branch, ProcessId, View
from potluck.membership import events as effects
from potluck.membership.events import ClusterConfig, ClusterState, ElectionEvent, ElectionKind
from potluck.membership.health import LENGTHENED
from potluck.membership.messages import (
    Accepted,
    Commit,
    Departed,
    ProcessRole,
    Proposal,
    Propose,
    Relayed,
    Vote,
    compare,
    decode,
)
from potluck.testing.network import LossyNetwork
from potluck.testing.process import Dialling, Names, SimulatedProcess, Violation
from potluck.testing.trainer import TrainingValue
from potluck.training.steps import FRESH, Position

# --------------------------------------------------------------------------------------------------
# The rules of votes and proposals, checked on what the members of a simulated cluster say.
#
# * A term has one leader, who proposes one thing in it.
# * No member votes twice in a term.
# * What is announced as agreed was accepted, in one term, by a quorum of the view before: a
#   majority of it, half of it with its first member, or all of it but those who are dead (here:
#   really dead) or have departed for good.

_Term = tuple[str, int, int]


class VoteLog:
    """Everything that was ever proposed, voted and accepted."""

    def __init__(self, names: Names, is_alive: Callable[[ProcessId], bool]) -> None:
        self._names = names
        self._is_alive = is_alive
        self._proposals: dict[_Term, tuple[ProcessId, Proposal]] = {}
        self._votes: dict[tuple[ProcessId, _Term], ProcessId] = {}
        self._acceptors: dict[_Term, set[ProcessId]] = {}
        self._departed: set[tuple[str, ProcessId]] = set()

    def sends(self, process: SimulatedProcess, to: ProcessId, message: object) -> None:
        """Check a message that is about to leave."""
        if isinstance(message, Relayed):
            if message.origin == process.process:
                self.sends(process, message.to, decode(message.content))
        elif isinstance(message, Propose):
            self._proposes(process, message)
        elif isinstance(message, Vote) and message.is_granted:
            self._votes_for(process, to, message)
        elif isinstance(message, Accepted) and message.is_accepted:
            term = message.lineage, message.epoch, message.term
            self._acceptors.setdefault(term, set()).add(process.process)
        elif isinstance(message, Departed) and not message.is_followed:
            self._departed.add((message.lineage, process.process))

    def _proposes(self, process: SimulatedProcess, message: Propose) -> None:
        term = message.lineage, message.epoch, message.term
        leader, proposal = self._proposals.setdefault(term, (process.process, message.proposal))
        if leader != process.process:
            raise Violation(
                f"Term {message.epoch}.{message.term} of {message.lineage[:8]} has two leaders: "
                f"{self._names.who(leader)} and {process.name}"
            )
        if not _is_same(proposal, message.proposal):
            raise Violation(
                f"{process.name} proposes two things in term {message.epoch}.{message.term}: "
                f"{self._names.all(proposal.members)} and "
                f"{self._names.all(message.proposal.members)}"
            )

    def _votes_for(self, process: SimulatedProcess, to: ProcessId, message: Vote) -> None:
        key = process.process, (message.lineage, message.epoch, message.term)
        first = self._votes.setdefault(key, to)
        if first != to:
            raise Violation(
                f"{process.name} votes twice in term {message.epoch}.{message.term} of "
                f"{message.lineage[:8]}: for {self._names.who(first)} and for "
                f"{self._names.who(to)}"
            )

    def check_quorum(self, process: SimulatedProcess, before: View, agreed: Proposal) -> None:
        """Whether what is announced as the successor of a view was accepted by a quorum of it."""
        lineage = before.lineage
        gone = {
            who
            for who in before.members
            if not self._is_alive(who) or (lineage, who) in self._departed
        }
        alone = {process.process}  # who knows all others to be gone has no process to ask
        tallies = [alone, *self._tallies(before, agreed)]
        if not any(_is_quorum(before, accepted, gone) for accepted in tallies):
            heard = " or ".join(self._names.all(sorted(tally)) for tally in tallies)
            raise Violation(
                f"{process.name} takes {self._names.all(agreed.members)} for the successor of "
                f"{self._names.view(before)}, which only {heard} had accepted"
            )

    def _tallies(self, before: View, agreed: Proposal) -> Iterator[set[ProcessId]]:
        """For each term in which it was proposed: who accepted it; its leader did."""
        for (lineage, epoch, term), (leader, proposal) in self._proposals.items():
            if (lineage, epoch) == (before.lineage, before.epoch) and _is_same(proposal, agreed):
                yield {leader} | self._acceptors.get((lineage, epoch, term), set())


def _is_same(one: Proposal, other: Proposal) -> bool:
    return one.members == other.members and one.into == other.into


def _is_quorum(view: View, accepted: set[ProcessId], gone: set[ProcessId]) -> bool:
    members = set(view.members)
    votes = accepted & members
    twice = 2 * len(votes)
    return (
        twice > len(members)
        or (twice == len(members) and view.members[0] in votes)
        or (bool(votes) and votes >= members - gone)
    )


# --------------------------------------------------------------------------------------------------
# How much a cluster may do and wait: pauses, views and messages, each with its bound.
#
# * A quorum of a view whose members are healthy and hear each other all the time is not paused for
#   longer than ``Bounds.settling``, whatever happens to the others.
# * When nothing has happened for ``Bounds.converging``, no view follows another.  A story has at
#   most
#   ``VIEWS_PER_FAULT`` views for each process, and for each thing that happens in it.
# * A process sends at most ``BEATS_PER_PEER`` messages a second to each other process, and
#   ``ERRANDS`` beside that.

VIEWS_PER_FAULT = 2
BEATS_PER_PEER = 40
"""Messages a second: beats that come early, and campaigns and relays where links are missing."""
ERRANDS = 40
_QUICK = 0.05  # seconds; a network on which messages take longer may delay any decision


class QuietCheck:
    """Watches that a cluster neither waits nor works without need."""

    def __init__(
        self,
        places: Mapping[str, SimulatedProcess],
        network: LossyNetwork,
        names: Names,
        settling: float,
        converging: float,
    ) -> None:
        self._places = places
        self._network = network
        self._clock = network.clock
        self._names = names
        self._settling = settling
        self._converging = converging
        self._disturbed_at = 0.0
        self.disturbances = 0
        self.views = 0
        self._newest: dict[str, View] = {}
        self._paused: dict[ProcessId, tuple[View, float]] = {}  # in which view, since when

    def disturbed(self) -> None:
        """Something happens to the cluster from outside."""
        self.disturbances += 1
        self._disturbed_at = self._clock.now

    # --- views ---

    def agreed(self, view: View) -> None:
        """A view was agreed."""
        self.views += 1
        if self._newest.get(view.lineage, view).epoch <= view.epoch:
            self._newest[view.lineage] = view
        quiet = self._clock.now - self._disturbed_at
        if quiet > self._converging and self._is_orderly():
            raise Violation(
                f"{self._names.view(view)} follows although nothing has happened for {quiet:.1f} s"
            )
        if self.views > VIEWS_PER_FAULT * (self.disturbances + len(self._places)):
            raise Violation(
                f"{self._names.view(view)} is number {self.views} after only "
                f"{self.disturbances} things that happened"
            )

    def _is_orderly(self) -> bool:
        """Whether the network and all processes do what they do in time."""
        return self._network.is_quick(_QUICK) and all(
            place.share == 1 for place in self._places.values()
        )

    # --- pauses ---

    def changed(self, process: SimulatedProcess) -> None:
        """The state of a process has changed."""
        core = process.core
        who = process.process
        if core is None or core.state is not ClusterState.PAUSED:
            self._paused.pop(who, None)
        elif core.view is not None:
            known = self._paused.get(who)
            if known is None or known[0] is not core.view:
                self._watch(process, core.view)

    def _watch(self, process: SimulatedProcess, view: View) -> None:
        now = self._clock.now
        self._paused[process.process] = view, now
        self._clock.after(self._settling, self._check_paused, process, now, view)

    def _check_paused(self, process: SimulatedProcess, since: float, view: View) -> None:
        if self._paused.get(process.process) != (view, since) or process.core is None:
            return
        newest = self._newest.get(view.lineage, view)
        healthy = self._healthy(process, view, since - self._settling)
        if process.process in newest.members and _calm_is_quorum(
            view, healthy & set(newest.members)
        ):
            raise Violation(
                f"{process.name} has been paused in {self._names.view(view)} for "
                f"{self._clock.now - since:.1f} s, although {self._names.all(sorted(healthy))} "
                f"hear each other: {process.core.reason}"
            )

    def _healthy(self, process: SimulatedProcess, view: View, since: float) -> set[ProcessId]:
        """Members to whom nothing has happened, and who all hear each other; none if unclear."""
        if not self._network.is_quick(_QUICK):
            return set()
        members = [
            place
            for place in self._places.values()
            if place.core is not None
            and place.process in view.members
            and place.is_running
            and place.share == 1
            and place.touched_at < since
        ]
        if process not in members:
            return set()
        steady = self._network.is_steady
        heard = [place for place in members if steady(process.host, place.host, since)]
        if not all(steady(one.host, other.host, since) for one in heard for other in heard):
            return set()
        return {place.process for place in heard}

    # --- messages ---

    def counted(self, process: SimulatedProcess, sent: int) -> None:
        """A process has sent this many messages within a second."""
        if sent > BEATS_PER_PEER * (len(self._places) - 1) + ERRANDS:
            raise Violation(f"{process.name} has sent {sent} messages within a second")


def _calm_is_quorum(view: View, present: set[ProcessId]) -> bool:
    twice = 2 * len(present)
    size = len(view.members)
    return twice > size or (twice == size and view.members[0] in present)


# --------------------------------------------------------------------------------------------------
# One founding, one set at work: the promise against split brain, checked with full knowledge.
#
# A *family* is all lineages that come from one founding: a process that entered a view of one and
# then of another without leaving joins the two, and so does the ancestry of a child.  A lineage
# that has dissolved into another counts as that one.  Under the quorum "majority":
#
# * at any instant at most one lineage of a family has a member that is active, and only members
#   that
#   are active apply steps; a
#   process that was stopped or suspended has the time it needs to notice (``Bounds.waking``);
# * the only exception is a child whose founders are all that was left of the newest view that any
#   of
#   them knew.  Such a child is counted (``exceptions``), and so is one that a person asked for;
# * the merge of two related lineages is checked in :mod:`potluck.testing.invariants`.
#
# Under every quorum:
#
# * a lineage without a parent begins with at least ``min_nodes`` members, by the largest setting of
#   them;
# * a process that has been in a view enters only later views of that lineage, of one that it has
#   dissolved into, or of a child of these that began no earlier than the newest view it knew; or of
#   what such a child has dissolved into;
# * all members of the next view learn the same immediate successor of the view they were in, with
#   the
#   same causes.


class LineageCheck:
    """Which lineages belong together, and which of them are at work."""

    def __init__(
        self,
        places: Mapping[str, SimulatedProcess],
        names: Names,
        is_excused: Callable[[SimulatedProcess], bool],
    ) -> None:
        self._places = places
        self._names = names
        self._is_excused = is_excused
        self._parents: dict[str, str] = {}  # union-find over lineages
        self._into: dict[str, str] = {}  # a dissolved lineage -> the one it dissolved into
        self._last: dict[ProcessId, str] = {}  # the lineage that a process entered last
        self._visited: dict[ProcessId, set[str]] = {}
        self._known: dict[ProcessId, dict[str, int]] = {}  # newest epoch that a process knows
        self._ancestry: dict[str, tuple[Branch, ...]] = {}  # of children of bound processes
        self._newest: dict[str, View] = {}
        self._views: dict[tuple[str, int], View] = {}
        self._successors: dict[tuple[str, int], Commit] = {}
        self._forced: set[str] = set()
        self._told: set[ProcessId] = set()
        self._insisted: set[str] = set()
        """Lineages in which a person asked a member at work not to wait."""
        self._excused: set[str] = set()
        """Children whose founders knew no living member beside themselves."""
        self.exceptions: set[str] = set()
        """Children that were at work beside another lineage of their family, and might."""

    # --- what happens ---

    def agreed(self, view: View, into: str = "") -> None:
        """A view was agreed for the first time."""
        self._views[view.lineage, view.epoch] = view
        if into:
            self._into[view.lineage] = into
            return
        newest = self._newest.get(view.lineage)
        if newest is None or newest.epoch < view.epoch:
            self._newest[view.lineage] = view
        if newest is None:
            self._founded(view)

    def knows(self, process: ProcessId, lineage: str, epoch: int) -> None:
        """A process has been told of a view."""
        known = self._known.setdefault(process, {})
        known[lineage] = max(epoch, known.get(lineage, 0))

    def receives(self, process: ProcessId, commit: Commit) -> None:
        """A process is told of a view by another."""
        self.knows(process, commit.lineage, commit.epoch)

    def told_to_continue(self, process: ProcessId) -> None:
        """A person asked a process to continue without those it misses."""
        self._told.add(process)
        for place in self._places.values():
            core = place.core
            if core is None or place.process != process or core.view is None:
                continue
            if core.state is ClusterState.ACTIVE:
                self._insisted.add(core.view.lineage)

    def works(self, process: ProcessId) -> None:
        """A process is at work: what a person asked of it before is done."""
        self._told.discard(process)

    def insists(self, view: View | None) -> bool:
        """Whether a member of a view continues without those left out, whatever they have.

        What a person said in one view still shows in the next.
        """
        if view is not None and view.lineage in self._insisted:
            return True
        return view is not None and any(
            place.core is not None and place.core.is_insisting
            for place in self._places.values()
            if place.process in view.members
        )

    def has_been_in_a_view(self, process: ProcessId) -> bool:
        """Whether a process belongs to a lineage."""
        return process in self._last

    def installed(self, process: SimulatedProcess, view: View) -> None:
        """A process enters a view."""
        who = process.process
        before = self._last.get(who)
        if before is not None and before != view.lineage:
            self._check_bound(process, before, view)
            self._unite(before, view.lineage)
        self.knows(who, view.lineage, view.epoch)
        self._last[who] = view.lineage
        self._visited.setdefault(who, set()).add(view.lineage)

    def succeeded(self, process: SimulatedProcess, commits: tuple[Commit, ...]) -> None:
        """A process enters a view, and says which ones followed the one it was in."""
        before, view = process.entered, commits[-1].view
        if before is None or before.lineage != view.lineage:
            return
        first = commits[0]
        if first.epoch != before.epoch + 1:
            raise Violation(
                f"{process.name} enters {self._names.view(view)} after {self._names.view(before)}, "
                f"and does not know the view between them: it begins with {first.epoch}"
            )
        known = self._successors.setdefault((first.lineage, first.epoch), first)
        if known.proposal != first.proposal:
            raise Violation(
                f"{process.name} learns another successor of {self._names.view(before)} than "
                f"others: {first.proposal} and {known.proposal}"
            )

    def _check_bound(self, process: SimulatedProcess, before: str, view: View) -> None:
        """Whether a process may go from one lineage to another."""
        known = self._known.get(process.process, {})
        ways = {before}
        while True:
            further = {self._into[each] for each in ways if each in self._into}
            further |= {
                child
                for child, branches in self._ancestry.items()
                if any(_is_later(branch, ways, known) for branch in branches)
            }
            if further <= ways:
                break
            ways |= further
        if view.lineage not in ways and not any(
            _is_later(Branch(*each), ways, known) for each in view.ancestry
        ):
            raise Violation(
                f"{process.name} belongs to lineage {self._last[process.process][:8]}, of which it "
                f"knows view {known.get(self._last[process.process], 0)}, and enters "
                f"{self._names.view(view)}, which does not come from there"
            )

    def _living(self) -> set[ProcessId]:
        return {place.process for place in self._places.values() if place.core is not None}

    def _founded(self, view: View) -> None:
        """A lineage begins; with bound founders it is a child."""
        bound = [who for who in view.members if who in self._last]
        if not bound or not view.ancestry:
            self._check_founders(view)
        if not bound:
            return
        for who in bound:
            self._unite(self._last[who], view.lineage)
        ancestry = tuple(Branch(*each) for each in view.ancestry)
        for branch in ancestry:
            self._unite(branch.lineage, view.lineage)
        self._ancestry[view.lineage] = ancestry
        if not self._told.isdisjoint(view.members):
            self._forced.add(view.lineage)
        if view.ancestry and self._is_all_that_is_left(view):
            self._excused.add(view.lineage)

    def _check_founders(self, view: View) -> None:
        """Whether a lineage without a parent has as many members as each of them asked for."""
        cores = [p.core for p in self._places.values() if p.process in view.members]
        wanted = max((core.config.min_nodes for core in cores if core is not None), default=1)
        if len(view.members) < wanted:
            raise Violation(
                f"{self._names.view(view)} begins a lineage without a parent, with fewer than "
                f"the {wanted} members that one of them asked for"
            )

    def _is_all_that_is_left(self, view: View) -> bool:
        """Whether the founders of a child know no living member beside themselves."""
        parent, epoch = view.ancestry[-1]
        known = [self._known.get(who, {}).get(parent, 0) for who in view.members]
        last = self._views.get((parent, max(known)))
        if last is None or epoch < last.epoch:
            return False
        return self._living().intersection(last.members) <= set(view.members)

    # --- who is at work ---

    def check(self) -> None:
        """Whether at most one lineage of each family is at work."""
        working: dict[str, tuple[str, SimulatedProcess]] = {}
        for place in self._places.values():
            core = place.core
            if core is None or place.is_stopped or core.state is not ClusterState.ACTIVE:
                continue
            view = core.view
            if view is None or self._is_excused(place):
                continue
            lineage = self.heir(view.lineage)
            root = self.root(lineage)
            other, first = working.setdefault(root, (lineage, place))
            if other != lineage:
                self._two_at_work((other, first), (lineage, place))

    def _two_at_work(
        self, one: tuple[str, SimulatedProcess], two: tuple[str, SimulatedProcess]
    ) -> None:
        excused = [
            lineage
            for lineage, _ in (one, two)
            if lineage in self._excused or lineage in self._forced
        ]
        if excused:
            self.exceptions.update(excused)
            return
        words = [
            f"{place.name} in {self._names.view(place.core.view)}"
            for _, place in (one, two)
            if place.core is not None
        ]
        raise Violation(f"Two sets of one founding are at work: {' and '.join(words)}")

    def is_forced(self, lineage: str) -> bool:
        """Whether a person asked for a lineage, or for one that it comes from."""
        return not self._forced.isdisjoint({lineage, *(each for each, _ in self.ancestry(lineage))})

    def is_asked_for_without(self, process: ProcessId, lineage: str, former: str) -> bool:
        """Whether a person had others leave a process behind, between two lineages it was in."""
        path = [*(each for each, _ in self.ancestry(lineage)), lineage]
        for place, each in enumerate(path):
            first = self._views.get((each, 1))
            if each in self._forced and first is not None and process not in first.members:
                return former not in path[place:]
        return False

    def has_been_forced(self, process: ProcessId) -> bool:
        """Whether a process was in a lineage that a person asked for."""
        return any(map(self.is_forced, self._visited.get(process, ())))

    def ancestry(self, lineage: str) -> tuple[Branch, ...]:
        """Where a lineage of bound processes branched off."""
        return self._ancestry.get(lineage, ())

    def has_lost_a_merge(self, process: ProcessId) -> bool:
        """Whether a lineage that a process was in, or a child of it, has dissolved into another."""
        visited = self._visited.get(process, set())
        return any(
            lost in visited or any(branch.lineage in visited for branch in self.ancestry(lost))
            for lost in self._into
        )

    def newest_epoch(self, lineage: str) -> int:
        """The last view that was agreed in a lineage."""
        newest = self._newest.get(lineage)
        return 0 if newest is None else newest.epoch

    def heir(self, lineage: str) -> str:
        """The lineage itself, or the one that it has dissolved into."""
        seen = {lineage}
        while (into := self._into.get(lineage)) is not None and into not in seen:
            seen.add(into)
            lineage = into
        return lineage

    def root(self, lineage: str) -> str:
        """What all lineages of a family have in common."""
        parents = self._parents
        while (parent := parents.get(lineage, lineage)) != lineage:
            lineage = parent
        return lineage

    def _unite(self, one: str, other: str) -> None:
        left, right = self.root(one), self.root(other)
        if left != right:
            self._parents[left] = right


def _is_later(branch: Branch, lineages: set[str], known: Mapping[str, int]) -> bool:
    """Whether a child branched off one of these, no earlier than at the newest view known of it."""
    return branch.lineage in lineages and branch.epoch >= known.get(branch.lineage, 0)


# --------------------------------------------------------------------------------------------------
# What simulated trainers have counted, and the promises about it.
#
# * For each (lineage, epoch, step) there is one state, and no sample is used twice in one pass over
#   the data (see :mod:`potluck.testing.trainer`).
# * A step that a member has applied in a lineage is part of the state with which every later view
#   of
#   it begins, and every view of its children; it is lost only when all who applied it have ended.
# * Of two lineages with a common ancestor, by their foundings or by the checkpoint that one of them
#   began with, the one that followed it to the later view wins the merge.
# * A process that has counted a step gives it up only after a merge in which its lineage lost, or
#   when it enters a lineage that others began without it because a person said so.
# * Its user is told how many steps the new state lacks, whenever it lacks any.
# * A training is said to be lost only when no living process has applied a step of it, but for
#   those that were left behind because a person said so.


class _Step:
    """A step that was applied, and by which processes."""

    __slots__ = ("appliers", "value")

    def __init__(self, value: TrainingValue) -> None:
        self.value = value
        self.appliers: set[ProcessId] = set()


class StepLog:
    """Every step that was ever applied."""

    def __init__(
        self,
        names: Names,
        families: LineageCheck,
        is_alive: Callable[[ProcessId], bool],
        check_at_work: Callable[[SimulatedProcess, View], None],
        *,
        is_one_at_work: bool = True,
    ) -> None:
        self._names = names
        self._families = families
        self._is_alive = is_alive
        self._check_at_work = check_at_work
        self._is_one_at_work = is_one_at_work
        self._steps: dict[Position, _Step] = {}
        self._in_lineage: dict[str, list[_Step]] = {}
        self._begun: dict[tuple[str, int], TrainingValue] = {}
        self._states: dict[str, TrainingValue] = {}  # with which the last view of it began
        self._counted: dict[ProcessId, TrainingValue] = {}
        self.losers: set[ProcessId] = set()
        """Processes that gave up steps that they had counted, and told their users."""
        self.taken_back = 0
        """Times that a process gave up steps that it had counted, and told its user."""

    def applied(self, process: SimulatedProcess, view: View, value: TrainingValue) -> None:
        """A member applies a step."""
        position = value.position
        step = self._steps.get(position)
        if step is None:
            step = self._steps[position] = _Step(value)
            if position.lineage == view.lineage or self._speaks_for_its_parent(view.lineage):
                self._in_lineage.setdefault(position.lineage, []).append(step)
        elif step.value is not value:
            raise Violation(
                f"{process.name} applies {position} of other samples or on another state than "
                f"{self._names.all(sorted(step.appliers))}"
            )
        step.appliers.add(process.process)
        self._counted[process.process] = value
        self._check_at_work(process, view)

    def _speaks_for_its_parent(self, lineage: str) -> bool:
        """Whether a child may decide a step of its parent, as no other process of it is at work."""
        return self._is_one_at_work and not self._families.is_forced(lineage)

    def settled(self, process: SimulatedProcess, view: View, value: TrainingValue) -> None:
        """A member has the state with which a view begins."""
        self._states[view.lineage] = value
        known = self._begun.setdefault((view.lineage, view.epoch), value)
        if known is not value and value.position == FRESH:
            raise Violation(
                f"{process.name} begins {self._names.view(view)} with other weights than others"
            )
        self._check_kept(process, view, value, view.lineage, view.epoch)
        if self._speaks_for_its_parent(view.lineage):
            for lineage, epoch in self._families.ancestry(view.lineage):
                self._check_kept(process, view, value, lineage, epoch)

    def _check_kept(
        self,
        process: SimulatedProcess,
        view: View,
        value: TrainingValue,
        lineage: str,
        epoch: int,
    ) -> None:
        """Whether the last step of a lineage that a living process applied is in a state."""
        if self._families.insists(view):
            return
        for step in reversed(self._in_lineage.get(lineage, ())):
            if step.value.position.epoch > epoch or not any(map(self._is_alive, step.appliers)):
                continue
            if not value.contains(step.value):
                raise Violation(
                    f"{process.name} begins {self._names.view(view)} at {value.position}, without "
                    f"{step.value.position}, which {self._names.all(sorted(step.appliers))} applied"
                )
            return

    def lost(self, process: SimulatedProcess, view: View) -> None:
        """A member says that the state is gone: then no living process may have a step of it.

        Those may that were left behind because a person said so.
        """
        if self._families.insists(view):
            return
        lineages = [view.lineage, *(each for each, _ in self._families.ancestry(view.lineage))]
        for step in (step for each in lineages for step in self._in_lineage.get(each, ())):
            lineage = step.value.position.lineage
            living = [
                who
                for who in sorted(filter(self._is_alive, step.appliers))
                if not self._families.is_asked_for_without(who, view.lineage, lineage)
            ]
            if living:
                raise Violation(
                    f"{process.name} says in {self._names.view(view)} that the state is lost, "
                    f"although {self._names.all(living)} applied {step.value.position}"
                )

    def dissolves(self, view: View, into: str, epoch: int) -> None:
        """A lineage ends in another one: it must not have more of a common history."""
        lost = (*self._branches(view.lineage), Branch(view.lineage, view.epoch))
        won = (*self._branches(into), Branch(into, epoch))
        if compare(lost, won) > 0:
            raise Violation(
                f"{self._names.view(view)} dissolves into view {epoch} of {into[:8]}, although it "
                f"followed their common ancestor further: {_words(lost)} and {_words(won)}"
            )

    def _branches(self, lineage: str) -> tuple[Branch, ...]:
        """Where a lineage branched off, and what the state that it began with came from."""
        known = self._families.ancestry(lineage)
        value = self._states.get(lineage)
        passed: dict[str, int] = {}
        while value is not None and value.parent is not None:
            position = value.position
            passed.setdefault(position.lineage, position.epoch)  # the newest comes first
            value = value.parent
        passed.pop(lineage, None)
        for branch in known:
            passed.pop(branch.lineage, None)
        older = [Branch(*each) for each in reversed(passed.items())]
        return (*older, *known)

    def replaced(
        self, process: SimulatedProcess, old: TrainingValue, new: TrainingValue, told: int
    ) -> None:
        """A member gives up its state for another one, and says how many steps are not in it."""
        lost = old.depth - old.parting(new).depth
        # A side that continued as asked may have decided the step in hand by itself, under the name
        # that it had among all; the others make that step again, and it looks like theirs.
        strays = not self._is_one_at_work or self._families.has_been_forced(process.process)
        if told not in ((lost, lost - 1) if strays and lost else (lost,)):
            raise Violation(
                f"{process.name} gives up {old.position} for {new.position}, which lacks {lost} of "
                f"its steps, and tells its user that {told} steps are discarded"
            )
        counted = self._counted.get(process.process)
        if counted is None or new.contains(counted):
            return
        if not self._may_give_up(process, counted.position.lineage):
            raise Violation(
                f"{process.name} counted {counted.position}, and gives it up for {new.position} "
                f"although it has not lost a merge (it had {old.position})"
            )
        self.taken_back += 1
        self.losers.add(process.process)
        del self._counted[process.process]

    def _may_give_up(self, process: SimulatedProcess, lineage: str) -> bool:
        """Whether a process may give up a step that it counted in a lineage."""
        families, who = self._families, process.process
        view = None if process.core is None else process.core.view
        if families.has_lost_a_merge(who) or families.insists(view):
            return True
        return view is not None and families.is_asked_for_without(who, view.lineage, lineage)


def _words(branches: tuple[Branch, ...]) -> str:
    return " > ".join(f"{lineage[:8]}.{epoch}" for lineage, epoch in branches)


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may take, in seconds of the simulated time."""

    waking: float
    """From the end of a stop or suspension until a process has noticed that it was excluded."""
    settling: float
    """From the last change of the surroundings until views contain only who can work together."""
    patience: float
    """For this long after a process ran late, the others are patient with it, and it with them."""
    converging: float
    """From the end of all faults until all are in one view."""

    @classmethod
    def of(cls, config: ClusterConfig) -> Bounds:
        """The bounds that a configuration promises."""
        pause = config.health.pause_after
        return cls(
            waking=1.5 * pause,
            settling=4 * pause + 5 * config.election.election_timeout,
            patience=2 * LENGTHENED * pause + 2 * pause,
            converging=8 * pause + 10 * config.election.election_timeout + config.solo_delay,
        )


class Invariants:
    """Watches a simulated cluster and raises :class:`Violation` when a rule is broken."""

    def __init__(
        self,
        places: Mapping[str, SimulatedProcess],
        network: LossyNetwork,
        bounds: Bounds,
        *,
        is_one_at_work: bool = True,
    ) -> None:
        self.bounds = bounds
        self._is_one_at_work = is_one_at_work  # not under the quorum "any"
        self.committed: dict[tuple[str, int], View] = {}
        """Every view that anybody installed or announced as agreed."""
        self._places = places
        self._network = network
        self._clock = network.clock
        self._newest: dict[str, int] = {}  # lineage -> the last committed epoch
        self.names = Names(places)
        self.ballots = VoteLog(self.names, self._is_alive)
        self.calm = QuietCheck(places, network, self.names, bounds.settling, bounds.converging)
        self.families = LineageCheck(places, self.names, self._is_waking)
        self.step_log = StepLog(
            self.names,
            self.families,
            self._is_alive,
            self._applies,
            is_one_at_work=is_one_at_work,
        )
        self._disturbances = 0
        self._patient_until = 0.0

    # --- at every event ---

    def sends(self, process: SimulatedProcess, to: ProcessId, message: object) -> None:
        """Check a message that is about to leave."""
        if isinstance(message, Commit):
            self._commits(process, message.view, message.proposal)
        else:
            self.ballots.sends(process, to, message)

    def tells(self, process: SimulatedProcess, effect: effects.Effect) -> None:
        """Check what a core has decided."""
        if isinstance(effect, effects.Installed):
            self._installs(process, effect.view)
            if effect.commits:
                self.families.succeeded(process, effect.commits)
        elif isinstance(effect, effects.Removed):
            self._leaves(process, effect.commit)
        elif isinstance(effect, effects.Note):
            event = effect.event
            if isinstance(event, ElectionEvent) and event.kind is ElectionKind.SPLIT_BRAIN:
                raise Violation(f"{process.name} sees a split brain: {event}")

    def changed(self, process: SimulatedProcess) -> None:
        """Check where a core stands after its view or state changed."""
        core = process.core
        self.calm.changed(process)
        if core is None or core.state is not ClusterState.ACTIVE:
            return
        view = core.view
        if view is None:
            raise Violation(f"{process.name} is active without a view")
        self.families.works(process.process)
        if self.committed.get((view.lineage, view.epoch)) != view:
            raise Violation(
                f"{process.name} is active in {self.names.view(view)}, which is not agreed"
            )
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def _applies(self, process: SimulatedProcess, view: View) -> None:
        """Check a process whose trainer applies a step in a view: then it is at work there."""
        core = process.core
        if core is None or core.view is None:
            raise Violation(f"{process.name} applies a step in no view")
        if (core.view.lineage, core.view.epoch) != (view.lineage, view.epoch):
            raise Violation(
                f"{process.name} applies a step in {self.names.view(view)}, although it is in "
                f"{self.names.view(core.view)}"
            )
        if core.state is not ClusterState.ACTIVE:
            raise Violation(f"{process.name} applies a step although it is {core.state.value}")
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def restless(self, process: SimulatedProcess) -> None:
        """A core that wants to be woken at once, again and again, would burn a processor."""
        core = process.core
        due = core.next_deadline if core is not None else None
        raise Violation(
            f"{process.name} was woken at {process.clock.now} by its clock, and wants to be woken "
            f"again at {due}, which has passed"
        )

    def woke(self, process: SimulatedProcess) -> None:
        """A process continues: it has a while to notice what it missed."""
        self._clock.after(self.bounds.waking, self._has_woken, process)

    def _has_woken(self, process: SimulatedProcess) -> None:
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def _is_waking(self, process: SimulatedProcess) -> bool:
        return self._clock.now < process.woke_at + self.bounds.waking

    def _installs(self, process: SimulatedProcess, view: View) -> None:
        if process.process not in view.members:
            raise Violation(f"{process.name} installs {self.names.view(view)} and is not in it")
        if len(set(view.members)) != len(view.members):
            raise Violation(f"{process.name} installs {self.names.view(view)}, with a member twice")
        for place in self._places.values():
            if place.card.role is ProcessRole.OBSERVER and place.process in view.members:
                raise Violation(f"{process.name} installs {self.names.view(view)} with an observer")
        before = process.seen[0]
        if before and before.lineage == view.lineage and before.epoch >= view.epoch:
            names = self.names
            raise Violation(
                f"{process.name} goes back from {names.view(before)} to {names.view(view)}"
            )
        self._commits(process, view)
        self.families.installed(process, view)

    def _leaves(self, process: SimulatedProcess, commit: Commit | None) -> None:
        """A process is in no view any more; a lineage of one dissolves without a message."""
        view = process.seen[0]
        if commit is None and view is not None and process.core is not None:
            commit = process.core._state.history.newest(view.lineage)  # noqa: SLF001
        if commit is not None and commit.proposal.into:
            self._commits(process, commit.view, commit.proposal)

    def _commits(
        self, process: SimulatedProcess, view: View, proposal: Proposal | None = None
    ) -> None:
        known = self.committed.get((view.lineage, view.epoch))
        if known is None:
            self._agrees(process, view, proposal or Proposal(view.members))
        elif known.members != view.members:
            raise Violation(
                f"View {view.epoch - 1} of {view.lineage[:8]} has two successors: "
                f"{self.names.view(known)}, and at {process.name} {self.names.view(view)}"
            )

    def _agrees(self, process: SimulatedProcess, view: View, proposal: Proposal) -> None:
        """A view is announced as agreed for the first time."""
        self.committed[view.lineage, view.epoch] = view
        self.calm.agreed(view)
        self.families.agreed(view, proposal.into)
        if proposal.into:
            newest = self.families.newest_epoch(proposal.into)
            self.step_log.dissolves(view, proposal.into, newest)
        before = self.committed.get((view.lineage, view.epoch - 1))
        if before is not None:
            self.ballots.check_quorum(process, before, proposal)
        if view.epoch > self._newest.get(view.lineage, 0) and not proposal.into:
            self._newest[view.lineage] = view.epoch
            for place in self._places.values():
                self._check_excluded(place)

    def _check_excluded(self, process: SimulatedProcess) -> None:
        """Whether it is at work in a view although a later one has excluded it."""
        core = process.core
        if core is None or process.is_stopped or core.state is not ClusterState.ACTIVE:
            return
        view = core.view
        if view is None or self._is_waking(process):
            return
        for epoch in range(view.epoch + 1, self._newest.get(view.lineage, 0) + 1):
            later = self.committed.get((view.lineage, epoch))
            if later is not None and process.process not in later.members:
                raise Violation(
                    f"{process.name} is at work in {self.names.view(view)} while it has been "
                    f"excluded from {self.names.view(later)}"
                )

    def _is_alive(self, process: ProcessId) -> bool:
        return any(
            place.process == process and place.core is not None for place in self._places.values()
        )

    # --- when nothing has changed for a while ---

    def ran_late(self) -> None:
        """A process was held up, or its clock leapt: all are patient for a while."""
        self._patient_until = self._clock.now + self.bounds.patience

    @property
    def patience(self) -> float:
        """Seconds for which decisions may still take longer."""
        return max(0.0, self._patient_until - self._clock.now)

    def disturbed(self) -> None:
        """The surroundings have changed: what must settle begins to settle now."""
        self._disturbances += 1
        self.calm.disturbed()
        self._clock.after(self._settling, self._check_settled, self._disturbances)

    @property
    def _settling(self) -> float:
        """Twice as long where messages take so long that campaigns for one term meet."""
        return self.bounds.settling * (1 if self._network.is_quick(_QUICK) else 2)

    def _check_settled(self, disturbance: int) -> None:
        if disturbance != self._disturbances or self._network.quality.loss:
            return  # with luck a lossy network prevents every agreement for ever
        if self.patience:
            self._clock.after(self.patience, self._check_settled, disturbance)
            return
        for process in self._places.values():
            core = process.core
            if core is None or process.is_stopped or core.state is not ClusterState.ACTIVE:
                continue
            if core.view is not None:
                self._check_members(process, core.view)

    def _check_members(self, process: SimulatedProcess, view: View) -> None:
        present = {place.process: place for place in self._places.values()}
        for member in view.members:
            place = present.get(member)
            if (trouble := self._trouble(process, place, view)) is not None:
                raise Violation(
                    f"{process.name} is still active in {self.names.view(view)} "
                    f"{self._settling:g} s after the last change, although "
                    f"{self.names.who(member)} {trouble}"
                )

    def _trouble(
        self, process: SimulatedProcess, place: SimulatedProcess | None, view: View
    ) -> str | None:
        if place is None or place.core is None:
            return "is dead"
        if place.is_stopped:
            return "is stopped"
        if not self._network.is_open(process.host, place.host):
            return "cannot be reached"
        if place.core.view != view:
            return f"is in {self.names.view(place.core.view)}"
        return None

    def why_not_waiting(self, dialling: Dialling) -> str | None:
        """Who does not wait as it should, for a process that may be at work; None if all do.

        At most one view is at work.  A process that was in a view and is not in this one misses one
        that is dead, which no process can know.
        """
        living = [
            place
            for place in self._places.values()
            if place.core is not None and place.card.role is ProcessRole.MEMBER
        ]
        unknown = self.unknown_deaths(dialling)
        working = set()
        for place in living:
            core = place.core
            assert core is not None
            if core.state is ClusterState.ACTIVE and core.view is not None:
                working.add(self.families.heir(core.view.lineage))
            elif self.families.has_been_in_a_view(place.process) and unknown.isdisjoint(
                cause.who for cause in core.missing(place.clock.now)
            ):
                return f"{place.name} does not wait for one that is missing: {core.reason}"
        return "two lineages are at work" if len(working) > 1 else None

    def unknown_deaths(self, dialling: Dialling) -> set[ProcessId]:
        """All starts of processes that are dead, which no process can know."""
        return {
            who
            for place in self._places.values()
            if self._is_unknown(place, dialling)
            for who in place.past
        }

    @staticmethod
    def _is_unknown(place: SimulatedProcess, dialling: Dialling) -> bool:
        return place.core is None and not dialling.is_provable(place)

    def why_not_converged(self) -> str | None:
        """What keeps the living members from being in one view; None if they are."""
        members = [
            place
            for place in self._places.values()
            if place.core is not None and place.card.role is ProcessRole.MEMBER
        ]
        wanted = {place.process for place in members}
        for place in members:
            core = place.core
            assert core is not None
            if core.state is not ClusterState.ACTIVE or core.view is None:
                return f"{place.name} is {core.state.value}: {core.reason}"
            if set(core.view.members) != wanted:
                return f"{place.name} is in {self.names.view(core.view)}"
        views = {place.core.view for place in members if place.core is not None}
        return None if len(views) <= 1 else "two views have the same members"
