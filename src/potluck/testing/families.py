"""One founding, one set at work: the promise against split brain, checked with full knowledge.

A *family* is all lineages that come from one founding: a process that entered a view of one and
then of another without leaving joins the two, and so does the ancestry of a child.  A lineage that
has dissolved into another counts as that one.  Under the quorum "majority":

* at any instant at most one lineage of a family has a member that is active, and only members that
  are active apply steps; a
  process that was stopped or suspended has the time it needs to notice (``Bounds.waking``);
* the only exception is a child whose founders are all that was left of the newest view that any of
  them knew.  Such a child is counted (``exceptions``), and so is one that a person asked for;
* the merge of two related lineages is checked in :mod:`potluck.testing.ledger`.

Under every quorum:

* a lineage without a parent begins with at least ``min_nodes`` members, by the largest setting of
  them;
* a process that has been in a view enters only later views of that lineage, of one that it has
  dissolved into, or of a child of these that began no earlier than the newest view it knew; or of
  what such a child has dissolved into;
* all members of the next view learn the same immediate successor of the view they were in, with the
  same causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from potluck.core.ancestry import Branch
from potluck.core.cluster_events import ClusterState
from potluck.core.cluster_messages import Commit
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Names, Violation
from potluck.vocabulary import ProcessId, View

__all__ = ["Families"]


class Families:
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

    def insists(self, view: View | None) -> bool:
        """Whether a member of a view continues without those left out, whatever they have."""
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
        living = {place.process for place in self._places.values() if place.core is not None}
        return living.intersection(last.members) <= set(view.members)

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
