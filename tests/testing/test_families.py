"""One founding, one set at work: each rule is shown a cluster that breaks it."""

from __future__ import annotations

import pytest

from potluck.core import cluster_effects as effects
from potluck.core.ancestry import Branch
from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_messages import Cause, CauseCode, Commit, Proposal
from potluck.testing.clock import VirtualClock
from potluck.testing.invariants import Bounds, Invariants
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Violation
from potluck.testing.world import SimulatedWorld
from potluck.vocabulary import ProcessId, View

ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32


class Puppet(ClusterCore):
    """A core that is in whatever view and state it is told."""

    shown: tuple[View | None, ClusterState] = (None, ClusterState.JOINING)

    @property
    def view(self) -> View | None:
        """The view it was told."""
        return self.shown[0]

    @property
    def state(self) -> ClusterState:
        """The state it was told."""
        return self.shown[1]


class Stage:
    """Some puppets, and the invariants that watch them."""

    def __init__(self, *names: str, min_nodes: int = 1, is_one_at_work: bool = True) -> None:
        self.world = SimulatedWorld(core=Puppet, config=ClusterConfig(min_nodes=min_nodes))
        self.world.start(*names)
        self.rules = Invariants(
            self.world.places,
            self.world.network,
            Bounds(waking=1.0, settling=5.0, patience=10.0, converging=10.0),
            is_one_at_work=is_one_at_work,
        )
        # These puppets do not vote.
        self.rules.ballots.check_quorum = lambda *_: None  # type: ignore[method-assign]

    @property
    def clock(self) -> VirtualClock:
        """The clock of the world."""
        return self.world.clock

    def who(self, name: str) -> ProcessId:
        """The id of a puppet."""
        return self.world.place(name).process

    def place(self, name: str) -> SimulatedProcess:
        """Where a puppet lives."""
        return self.world.place(name)

    def view(
        self, lineage: str, epoch: int, names: str, ancestry: tuple[tuple[str, int], ...] = ()
    ) -> View:
        """A view of these."""
        branches = tuple(Branch(*each) for each in ancestry)
        return View(lineage, epoch, tuple(map(self.who, names)), branches)

    def install(self, names: str, view: View, *commits: Commit) -> None:
        """Let puppets install a view, as cores do."""
        for name in names:
            place = self.place(name)
            self.rules.tells(place, effects.Installed(view, "because", commits))
            place.entered = view
            self.put(name, view)

    def put(self, name: str, view: View | None, state: ClusterState = ClusterState.ACTIVE) -> None:
        """Let a puppet stand in a view."""
        place = self.place(name)
        assert isinstance(place.core, Puppet)
        place.core.shown = place.seen = view, state
        self.rules.changed(place)


def test_two_sets_of_one_founding_at_work_are_found() -> None:
    """The one that was left out continues alone, as a child that it may not begin."""
    stage = Stage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.put("c", None, ClusterState.JOINING)
    with pytest.raises(Violation, match=r"Two sets of one founding are at work: a in .* and c in"):
        stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))


def test_under_the_quorum_any_both_sides_may_be_at_work() -> None:
    """That is what it is for."""
    stage = Stage("a", "b", "c", is_one_at_work=False)
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))


def test_two_foundings_may_be_at_work_at_once() -> None:
    """Until they meet they know nothing of each other."""
    stage = Stage("a", "b", "c")
    stage.install("ab", stage.view(ONE, 1, "ab"))
    stage.install("c", stage.view(TWO, 1, "c"))


def test_a_child_of_all_that_is_left_is_an_exception_and_counted() -> None:
    """Its founders knew no living member: the later view of d, which joined, is unknown to them."""
    stage = Stage("a", "b", "d")
    stage.install("ab", stage.view(ONE, 1, "ab"))
    stage.put("a", stage.view(ONE, 1, "ab"), ClusterState.PAUSED)
    later = stage.view(ONE, 2, "bd")
    stage.rules.families.agreed(later)
    stage.rules.committed[ONE, 2] = later
    stage.put("d", later)
    stage.place("b").end("")
    stage.install("a", stage.view(TWO, 1, "a", ((ONE, 1),)))
    assert stage.rules.families.exceptions == {TWO}


def test_a_child_is_no_exception_if_a_founder_knew_of_a_living_member() -> None:
    """It had been told of the later view with d."""
    stage = Stage("a", "b", "d")
    first, later = stage.view(ONE, 1, "ab"), stage.view(ONE, 2, "abd")
    stage.install("ab", first)
    stage.rules.families.agreed(later)
    stage.rules.committed[ONE, 2] = later
    stage.rules.families.receives(stage.who("a"), Commit(ONE, 2, Proposal(later.members)))
    stage.put("a", first, ClusterState.PAUSED)
    stage.put("d", later)
    stage.place("b").end("")
    with pytest.raises(Violation, match="belongs to lineage 11111111, of which it knows view 2"):
        stage.install("a", stage.view(TWO, 1, "a", ((ONE, 1),)))


def test_what_a_person_asked_for_is_counted_too() -> None:
    """It is at work beside the others, as asked."""
    stage = Stage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.put("c", None, ClusterState.JOINING)
    stage.rules.families.told_to_continue(stage.who("c"))
    stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))
    assert stage.rules.families.exceptions == {TWO}
    assert stage.rules.families.is_forced(TWO)


def test_who_has_just_woken_up_has_a_moment_to_notice() -> None:
    """And none after that."""
    stage = Stage("a", "b", "c")
    old = stage.view(ONE, 1, "abc")
    stage.install("abc", old)
    place = stage.place("c")
    place.stop()
    stage.put("a", None, ClusterState.JOINING)
    stage.put("b", None, ClusterState.JOINING)
    stage.install("ab", stage.view(TWO, 1, "ab", ((ONE, 1),)))
    place.is_stopped, place.woke_at = False, stage.clock.now
    stage.rules.woke(place)
    stage.rules.changed(place)
    with pytest.raises(Violation, match="Two sets"):
        stage.clock.advance(1.5)


def test_a_lineage_without_a_parent_needs_its_founders() -> None:
    """As many as the most demanding of them asked for."""
    stage = Stage("a", "b", "c", min_nodes=3)
    with pytest.raises(Violation, match="fewer than the 3 members"):
        stage.install("a", stage.view(ONE, 1, "ab"))


def test_a_bound_process_does_not_enter_a_stranger_s_view() -> None:
    """It has to wait for its own lineage, or for what that has become."""
    stage = Stage("a", "b", "c")
    stage.install("ab", stage.view(ONE, 1, "ab"))
    stage.install("c", stage.view(TWO, 1, "c"))
    stage.put("a", None, ClusterState.JOINING)
    stage.put("b", None, ClusterState.JOINING)
    with pytest.raises(Violation, match="which does not come from there"):
        stage.install("b", stage.view(TWO, 2, "cb"))


def test_a_bound_process_follows_a_merge() -> None:
    """A dissolved lineage counts as the one it has dissolved into, also by way of a third."""
    stage = Stage("a", "b", "c")
    stage.install("a", stage.view(ONE, 1, "a"))
    stage.install("c", stage.view(TWO, 1, "c"))
    families = stage.rules.families
    families.agreed(stage.view(ONE, 2, "a"), THREE)
    families.agreed(stage.view(THREE, 2, "b"), TWO)
    stage.put("a", None, ClusterState.JOINING)
    stage.install("ca", stage.view(TWO, 2, "ca"))
    assert families.heir(ONE) == TWO
    assert families.has_lost_a_merge(stage.who("a"))
    assert not families.has_lost_a_merge(stage.who("c"))


def test_all_learn_the_same_successor_with_the_same_causes() -> None:
    """One cause more is another error."""
    stage = Stage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    members = (stage.who("a"), stage.who("b"))
    stage.place("c").end("")
    cause = Cause(stage.who("c"), CauseCode.SILENT)
    stage.install("a", stage.view(ONE, 2, "ab"), Commit(ONE, 2, Proposal(members)))
    other = Commit(ONE, 2, Proposal(members, causes=(cause,)))
    with pytest.raises(Violation, match="another successor"):
        stage.install("b", stage.view(ONE, 2, "ab"), other)


def test_who_skips_a_view_learns_of_it() -> None:
    """The error is made from the immediate successor."""
    stage = Stage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.place("c").end("")
    stage.install("a", stage.view(ONE, 2, "ab"))
    members = (stage.who("a"), stage.who("b"))
    with pytest.raises(Violation, match="does not know the view between them"):
        stage.install("b", stage.view(ONE, 3, "ab"), Commit(ONE, 3, Proposal(members)))
