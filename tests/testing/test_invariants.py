"""A cluster neither waits nor works without need: each bound is shown one that breaks it."""

from __future__ import annotations

from random import Random

import pytest

from potluck._types import Branch, ProcessId, View
from potluck.membership import events as effects
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, ClusterState, ElectionEvent, ElectionKind
from potluck.membership.health import HealthConfig
from potluck.membership.messages import (
    Accepted,
    Cause,
    CauseCode,
    Commit,
    Departed,
    ProcessInfo,
    ProcessRole,
    Proposal,
    Propose,
    Relayed,
    Vote,
    encode,
)
from potluck.testing.clock import VirtualClock
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.invariants import (
    BEATS_PER_PEER,
    ERRANDS,
    VIEWS_PER_FAULT,
    Bounds,
    Invariants,
    QuietCheck,
)
from potluck.testing.network import LinkQuality, LossyNetwork
from potluck.testing.process import SimulatedProcess, Violation


def formed() -> tuple[SimulatedCluster, QuietCheck, View]:
    """Three in one view, quiet for a minute."""
    cluster = SimulatedCluster(1)
    cluster.start("a", "b", "c")
    cluster.run(60.0)
    view = cluster.view_of("a")
    assert view is not None
    return cluster, cluster.invariants.calm, view


def test_a_view_without_a_cause_is_found() -> None:
    """Nothing has happened for a minute; on a lossy network that proves nothing."""
    cluster, calm, view = formed()
    with pytest.raises(Violation, match=r"although nothing has happened for 60\.0 s"):
        calm.agreed(view)
    cluster.network.shape("a", "b", cluster.network.quality)
    calm.agreed(view)


def test_more_views_than_faults_are_found() -> None:
    """Each thing that happens is good for two."""
    _, calm, view = formed()
    calm.disturbed()
    calm.views = VIEWS_PER_FAULT * (calm.disturbances + 3)
    with pytest.raises(Violation, match="is number 15 after only 4 things"):
        calm.agreed(view)


def test_a_process_that_chatters_is_found() -> None:
    """Whatever happens to it."""
    cluster, calm, _ = formed()
    most = 2 * BEATS_PER_PEER + ERRANDS
    calm.counted(cluster.place("a"), most)
    with pytest.raises(Violation, match=f"a has sent {most + 1} messages within a second"):
        calm.counted(cluster.place("a"), most + 1)


def test_a_healthy_quorum_that_stays_paused_is_found() -> None:
    """Not if something happened to one of them, or to the link between them, meanwhile."""
    cluster, calm, view = formed()
    place = cluster.place("a")
    assert place.core is not None
    place.core._state.state = ClusterState.PAUSED
    cluster.pause("c")
    calm._watch(place, view)
    since = cluster.clock.now
    with pytest.raises(Violation, match=r"a has been paused in view .* although"):
        calm._check_paused(place, since, view)
    cluster.cut(["a"], ["b"])
    cluster.heal()
    calm._check_paused(place, since, view)


# --------------------------------------------------------------------------------------------------
# One founding, one set at work: each rule is shown a cluster that breaks it.

ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32


class FamiliesPuppet(ClusterCore):
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


class FamiliesStage:
    """Some puppets, and the invariants that watch them."""

    def __init__(self, *names: str, min_nodes: int = 1, is_one_at_work: bool = True) -> None:
        self.world = SimulatedCluster(
            core=FamiliesPuppet, config=ClusterConfig(min_nodes=min_nodes)
        )
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
        assert isinstance(place.core, FamiliesPuppet)
        place.core.shown = place.seen = view, state
        self.rules.changed(place)


def test_two_sets_of_one_founding_at_work_are_found() -> None:
    """The one that was left out continues alone, as a child that it may not begin."""
    stage = FamiliesStage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.put("c", None, ClusterState.JOINING)
    with pytest.raises(Violation, match=r"Two sets of one founding are at work: a in .* and c in"):
        stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))


def test_under_the_quorum_any_both_sides_may_be_at_work() -> None:
    """That is what it is for."""
    stage = FamiliesStage("a", "b", "c", is_one_at_work=False)
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))


def test_two_foundings_may_be_at_work_at_once() -> None:
    """Until they meet they know nothing of each other."""
    stage = FamiliesStage("a", "b", "c")
    stage.install("ab", stage.view(ONE, 1, "ab"))
    stage.install("c", stage.view(TWO, 1, "c"))


def test_a_child_of_all_that_is_left_is_an_exception_and_counted() -> None:
    """Its founders knew no living member: the later view of d, which joined, is unknown to them."""
    stage = FamiliesStage("a", "b", "d")
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
    stage = FamiliesStage("a", "b", "d")
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
    stage = FamiliesStage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.put("c", None, ClusterState.JOINING)
    stage.rules.families.told_to_continue(stage.who("c"))
    stage.install("c", stage.view(TWO, 1, "c", ((ONE, 1),)))
    assert stage.rules.families.exceptions == {TWO}
    assert stage.rules.families.is_forced(TWO)


def test_whom_a_person_left_behind_may_give_up_what_it_did_before() -> None:
    """Not one that began with the others, nor what it did with them or with those that followed."""
    stage = FamiliesStage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    families = stage.rules.families
    families.told_to_continue(stage.who("b"))
    for name in "bc":
        stage.put(name, None, ClusterState.JOINING)
    stage.install("bc", stage.view(TWO, 1, "bc", ((ONE, 1),)))
    third = "3" * 32
    families.agreed(stage.view(third, 1, "abc", ((ONE, 1), (TWO, 2))))
    for lineage in (TWO, third):
        assert families.is_asked_for_without(stage.who("a"), lineage, ONE)
        assert not families.is_asked_for_without(stage.who("a"), lineage, TWO)
        assert not families.is_asked_for_without(stage.who("c"), lineage, ONE)
    assert not families.is_asked_for_without(stage.who("a"), third, third)
    assert not families.is_asked_for_without(stage.who("a"), ONE, ONE)


def test_who_has_just_woken_up_has_a_moment_to_notice_families() -> None:
    """And none after that."""
    stage = FamiliesStage("a", "b", "c")
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
    stage = FamiliesStage("a", "b", "c", min_nodes=3)
    with pytest.raises(Violation, match="fewer than the 3 members"):
        stage.install("a", stage.view(ONE, 1, "ab"))


def test_a_bound_process_does_not_enter_a_stranger_s_view() -> None:
    """It has to wait for its own lineage, or for what that has become."""
    stage = FamiliesStage("a", "b", "c")
    stage.install("ab", stage.view(ONE, 1, "ab"))
    stage.install("c", stage.view(TWO, 1, "c"))
    stage.put("a", None, ClusterState.JOINING)
    stage.put("b", None, ClusterState.JOINING)
    with pytest.raises(Violation, match="which does not come from there"):
        stage.install("b", stage.view(TWO, 2, "cb"))


def test_a_bound_process_follows_a_merge() -> None:
    """A dissolved lineage counts as the one it has dissolved into, also by way of a third."""
    stage = FamiliesStage("a", "b", "c")
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
    stage = FamiliesStage("a", "b", "c")
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
    stage = FamiliesStage("a", "b", "c")
    stage.install("abc", stage.view(ONE, 1, "abc"))
    stage.place("c").end("")
    stage.install("a", stage.view(ONE, 2, "ab"))
    members = (stage.who("a"), stage.who("b"))
    with pytest.raises(Violation, match="does not know the view between them"):
        stage.install("b", stage.view(ONE, 3, "ab"), Commit(ONE, 3, Proposal(members)))


# --------------------------------------------------------------------------------------------------
# The checker itself: every rule is shown a cluster that breaks it.

LINEAGE = "f" * 32
BOUNDS = Bounds(waking=1.0, settling=5.0, patience=10.0, converging=10.0)


class Puppet(ClusterCore):
    """A core that is in whatever view and state it is told."""

    view_shown: View | None = None
    state_shown = ClusterState.JOINING
    missing_shown: tuple[Cause, ...] = ()

    @property
    def view(self) -> View | None:
        """The view it was told."""
        return self.view_shown

    @property
    def state(self) -> ClusterState:
        """The state it was told."""
        return self.state_shown

    def missing(self, now: float) -> tuple[Cause, ...]:
        """Whom it was told to miss."""
        return self.missing_shown


class Stage:
    """Some puppets, and the invariants that watch them."""

    def __init__(self, *names: str, role: ProcessRole = ProcessRole.MEMBER) -> None:
        self.world = SimulatedCluster(core=Puppet)
        self.world.start(*names, role=role)
        self.clock = VirtualClock(10.0)
        network = LossyNetwork(self.clock, Random(1))
        self.rules = Invariants(self.world.places, network, BOUNDS)

    def place(self, name: str) -> SimulatedProcess:
        """Where a puppet lives."""
        return self.world.place(name)

    def who(self, name: str) -> ProcessId:
        """The id of a puppet."""
        return self.place(name).process

    def view(self, epoch: int, *names: str) -> View:
        """A view of these."""
        return View(LINEAGE, epoch, tuple(map(self.who, names)))

    def put(self, name: str, view: View | None, state: ClusterState = ClusterState.ACTIVE) -> None:
        """Let a puppet stand in a view."""
        core = self.place(name).core
        assert isinstance(core, Puppet)
        core.view_shown, core.state_shown = view, state

    def miss(self, name: str, *missing: str) -> None:
        """Let a puppet miss others."""
        core = self.place(name).core
        assert isinstance(core, Puppet)
        core.missing_shown = tuple(Cause(self.who(each), CauseCode.SILENT) for each in missing)

    def install(self, name: str, view: View) -> None:
        """Let a puppet install a view, as a core does."""
        place = self.place(name)
        self.rules.tells(place, effects.Installed(view, "because"))
        self.put(name, view)
        place.seen = view, ClusterState.ACTIVE
        self.rules.changed(place)


def test_two_successors_of_a_view_are_found() -> None:
    """Wherever the second one shows up."""
    stage = Stage("a", "b")
    stage.install("a", stage.view(2, "a"))
    with pytest.raises(Violation, match=r"View 1 of ffffffff has two successors"):
        stage.rules.tells(stage.place("b"), effects.Installed(stage.view(2, "b"), "why"))


def test_a_commit_counts_before_anybody_has_installed_it() -> None:
    """Who says that a view is agreed has agreed on it."""
    stage = Stage("a", "b")
    mine, other = (Proposal(stage.view(2, name).members) for name in "ab")
    stage.rules.sends(stage.place("a"), stage.who("b"), Commit(LINEAGE, 2, mine))
    with pytest.raises(Violation, match="two successors"):
        stage.rules.sends(stage.place("b"), stage.who("a"), Commit(LINEAGE, 2, other))


def test_members_agree_on_ranks() -> None:
    """The same members in another order are another view."""
    stage = Stage("a", "b")
    stage.install("a", stage.view(1, "a", "b"))
    with pytest.raises(Violation, match="two successors"):
        stage.install("b", stage.view(1, "b", "a"))


def test_two_leaders_of_a_term_are_found() -> None:
    """And so is one who proposes two things in it."""
    stage = Stage("a", "b")
    rules, one, other = stage.rules, stage.place("a"), stage.place("b")
    both, alone = (Proposal(stage.view(2, *names).members) for names in ("ab", "a"))
    rules.sends(one, stage.who("b"), Propose(LINEAGE, 1, 3, both))
    rules.sends(one, stage.who("b"), Propose(LINEAGE, 1, 3, both))
    rules.sends(other, stage.who("a"), Propose(LINEAGE, 1, 4, both))
    with pytest.raises(Violation, match=r"Term 1\.3 of ffffffff has two leaders: a/1 and b"):
        rules.sends(other, stage.who("a"), Propose(LINEAGE, 1, 3, both))
    with pytest.raises(Violation, match=r"a proposes two things in term 1\.3"):
        rules.sends(one, stage.who("b"), Propose(LINEAGE, 1, 3, alone))


def test_a_second_vote_in_a_term_is_found() -> None:
    """Repeating a vote is no second one, and a refusal is none at all."""
    stage = Stage("a", "b", "c")
    voter = stage.place("c")

    def vote(to: str, *, is_granted: bool = True) -> None:
        message = Vote(LINEAGE, 1, 3, is_granted, 3, -1, None, ())
        stage.rules.sends(voter, stage.who(to), message)

    vote("a")
    vote("a")
    vote("b", is_granted=False)
    with pytest.raises(Violation, match=r"c votes twice in term 1\.3 .*for a/1 and for b/1"):
        vote("b")


@pytest.mark.parametrize(
    ("names", "complaint"), [("b", "is not in it"), ("aba", "with a member twice")]
)
def test_a_view_that_makes_no_sense_is_found(names: str, complaint: str) -> None:
    """Nobody installs a view it is not in, or one with somebody twice."""
    stage = Stage("a", "b")
    with pytest.raises(Violation, match=complaint):
        stage.install("a", stage.view(1, *names))


def test_an_observer_in_a_view_is_found() -> None:
    """Observers are never members."""
    stage = Stage("a")
    stage.world.start("o", role=ProcessRole.OBSERVER)
    with pytest.raises(Violation, match="with an observer"):
        stage.install("a", stage.view(1, "a", "o"))


def test_going_back_is_found() -> None:
    """Epochs of a lineage only rise."""
    stage = Stage("a")
    stage.install("a", stage.view(3, "a"))
    with pytest.raises(Violation, match="a goes back from view"):
        stage.install("a", stage.view(2, "a"))


def test_being_active_without_agreement_is_found() -> None:
    """Without a view, or in one that nobody agreed on."""
    stage = Stage("a")
    stage.put("a", None)
    with pytest.raises(Violation, match="a is active without a view"):
        stage.rules.changed(stage.place("a"))
    stage.put("a", stage.view(1, "a"))
    with pytest.raises(Violation, match="which is not agreed"):
        stage.rules.changed(stage.place("a"))


def test_two_live_views_are_found() -> None:
    """Whoever is excluded must have stopped before the next view is agreed."""
    stage = Stage("a", "b")
    stage.install("a", stage.view(1, "a", "b"))
    stage.install("b", stage.view(1, "a", "b"))
    with pytest.raises(Violation, match=r"b is at work in view .* while it has been excluded"):
        stage.install("a", stage.view(2, "a"))


def test_a_paused_process_must_not_resume_in_a_view_that_is_over() -> None:
    """It is excluded however late it comes back to work."""
    stage = Stage("a", "b")
    stage.install("a", stage.view(1, "a", "b"))
    stage.install("b", stage.view(1, "a", "b"))
    stage.put("b", stage.view(1, "a", "b"), ClusterState.PAUSED)
    stage.install("a", stage.view(2, "a"))
    stage.put("b", stage.view(1, "a", "b"))
    with pytest.raises(Violation, match="b is at work"):
        stage.rules.changed(stage.place("b"))


def test_who_has_just_woken_up_has_a_moment_to_notice() -> None:
    """But no longer than the bound."""
    stage = Stage("a", "b")
    stage.install("a", stage.view(1, "a", "b"))
    stage.install("b", stage.view(1, "a", "b"))
    stage.place("b").woke_at = stage.clock.now
    stage.install("a", stage.view(2, "a"))
    stage.rules.woke(stage.place("b"))
    with pytest.raises(Violation, match="b is at work"):
        stage.clock.advance(BOUNDS.waking + 0.1)


def test_a_split_brain_that_a_core_reports_is_found() -> None:
    """Its own alarm is a violation; its other news are not."""
    stage = Stage("a")
    news = ElectionEvent(ElectionKind.ELECTED, 1, 1, stage.who("a"), "we lead")
    stage.rules.tells(stage.place("a"), effects.Note(news))
    alarm = ElectionEvent(ElectionKind.SPLIT_BRAIN, 1, 1, None, "two views")
    with pytest.raises(Violation, match="a sees a split brain: two views"):
        stage.rules.tells(stage.place("a"), effects.Note(alarm))


def test_a_dead_member_in_an_active_view_is_found_after_the_bound() -> None:
    """Not before, and not when something has changed meanwhile."""
    stage = Stage("a", "b")
    for name in "ab":
        stage.install(name, stage.view(1, "a", "b"))
    stage.place("b").end("gone")
    stage.rules.disturbed()
    stage.clock.advance(BOUNDS.settling - 0.1)
    stage.rules.disturbed()
    stage.clock.advance(BOUNDS.settling - 0.1)
    with pytest.raises(Violation, match=r"a is still active .* although b/1 is dead"):
        stage.clock.advance(0.2)


def test_on_a_slow_network_a_view_has_twice_the_time() -> None:
    """Campaigns for one term meet where messages take as long as they do."""
    stage = Stage("a", "b")
    for name in "ab":
        stage.install(name, stage.view(1, "a", "b"))
    stage.place("b").end("gone")
    stage.rules._network.quality = LinkQuality(0.05, 0.2)
    stage.rules.disturbed()
    stage.clock.advance(2 * BOUNDS.settling - 0.1)
    with pytest.raises(Violation, match=r"a is still active .* although b/1 is dead"):
        stage.clock.advance(0.2)


def test_on_a_lossy_network_nothing_is_promised() -> None:
    """By bad luck every message about the next view may be lost."""
    stage = Stage("a", "b")
    for name in "ab":
        stage.install(name, stage.view(1, "a", "b"))
    stage.place("b").end("gone")
    stage.rules._network.quality = LinkQuality(loss=0.3)
    stage.rules.disturbed()
    stage.clock.advance(2 * BOUNDS.settling)


@pytest.mark.parametrize("trouble", ["is stopped", "cannot be reached", "is in no view"])
def test_a_member_that_cannot_take_part_is_found_too(trouble: str) -> None:
    """Stopped, cut off, or elsewhere."""
    stage = Stage("a", "b")
    for name in "ab":
        stage.install(name, stage.view(1, "a", "b"))
    if trouble == "is stopped":
        stage.place("b").stop()
    elif trouble == "cannot be reached":
        stage.rules._network.cut("a", "b")
    else:
        stage.put("b", None, ClusterState.JOINING)
    stage.rules.disturbed()
    with pytest.raises(Violation, match=trouble):
        stage.clock.advance(BOUNDS.settling)


def test_why_it_has_not_converged_is_said() -> None:
    """Somebody without a view, somebody missing, two views with the same members."""
    stage = Stage("a", "b")
    stage.put("a", stage.view(1, "a"))
    assert stage.rules.why_not_converged() == "a is in view ffffffff.1 {a/1}"
    stage.put("a", stage.view(1, "a", "b"))
    assert str(stage.rules.why_not_converged()).startswith("b is joining: ")
    stage.put("b", stage.view(2, "a", "b"))
    assert stage.rules.why_not_converged() == "two views have the same members"
    stage.put("b", stage.view(1, "a", "b"))
    assert stage.rules.why_not_converged() is None


def test_a_process_that_waits_must_miss_one() -> None:
    """One that is dead, and of which nobody can know that."""
    stage = Stage("a", "b", "c")
    view = stage.view(1, "a", "b", "c")
    for name in "abc":
        stage.install(name, view)
    stage.put("a", view, ClusterState.PAUSED)
    stage.put("b", None)
    dialling = stage.world.dialling
    stage.place("b").end("", silently=True)
    stage.place("c").end("")
    stage.miss("a", "c")
    assert "a does not wait for one that is missing" in str(stage.rules.why_not_waiting(dialling))
    stage.miss("a", "b")
    assert stage.rules.why_not_waiting(dialling) is None


def test_those_who_wait_leave_at_most_one_lineage_at_work() -> None:
    """Two are too many, even of two foundings."""
    stage = Stage("a", "b", "c")
    stage.install("a", stage.view(1, "a"))
    stage.install("b", View("e" * 32, 1, (stage.who("b"),)))
    assert stage.rules.why_not_waiting(stage.world.dialling) == "two lineages are at work"


def test_a_core_that_never_sleeps_is_found() -> None:
    """One that wants to be woken at once, again and again, would burn a processor."""

    class Insomniac(ClusterCore):
        @property
        def next_deadline(self) -> float | None:
            return 0.0

    world = SimulatedCluster(core=Insomniac)
    world.start("a")
    with pytest.raises(Violation, match=r"a was woken at .* which has passed"):
        world.clock.advance(1.0)


def test_bounds_follow_the_configuration() -> None:
    """Who is slower to pause is given more time for everything."""
    quick = Bounds.of(ClusterConfig())
    slow = Bounds.of(ClusterConfig(health=HealthConfig.wifi()))
    assert quick.waking < slow.waking
    assert quick.settling < slow.settling
    assert quick.converging < slow.converging


def test_a_process_card_knows_its_place() -> None:
    """Restarts in one place succeed each other; that is what proofs rest on."""
    stage = Stage("a")
    first: ProcessInfo = stage.place("a").card
    stage.place("a").end("gone")
    stage.world.restart("a")
    assert stage.place("a").card.succeeds(first)


def accepted(stage: Stage, name: str, term: int) -> None:
    """Let a puppet accept what was proposed in a term of view 1."""
    message = Accepted(LINEAGE, 1, term, True, term, (), ())
    stage.rules.sends(stage.place(name), stage.who("a"), message)


def test_a_change_without_a_quorum_is_found() -> None:
    """What is announced must have been accepted by a quorum in one and the same term."""
    stage = Stage("a", "b", "c", "d", "e")
    stage.install("a", stage.view(1, *"abcde"))
    wanted = Proposal(stage.view(2, *"abc").members)
    for term in (1, 2):
        proposer = stage.place("ab"[term - 1])
        stage.rules.sends(proposer, stage.who("c"), Propose(LINEAGE, 1, term, wanted))
    accepted(stage, "c", 1)
    accepted(stage, "d", 2)
    with pytest.raises(Violation, match=r"which only \{a/1\} or \{a/1 c/1\} or \{b/1 d/1\} had"):
        stage.rules.sends(stage.place("a"), stage.who("b"), Commit(LINEAGE, 2, wanted))


def test_a_change_that_all_living_accepted_is_fine() -> None:
    """The dead, and those who departed, are not needed."""
    stage = Stage("a", "b", "c", "d", "e")
    stage.install("b", stage.view(1, *"abcde"))
    wanted = Proposal(stage.view(2, "b", "c").members)
    stage.rules.sends(stage.place("b"), stage.who("c"), Propose(LINEAGE, 1, 1, wanted))
    by_way_of_d = Relayed(stage.who("c"), stage.who("b"), encode(_word()))
    stage.rules.sends(stage.place("c"), stage.who("d"), by_way_of_d)
    stage.rules.sends(stage.place("d"), stage.who("b"), by_way_of_d)  # it passes it on
    stage.place("a").end("gone")
    stage.place("e").end("gone")
    goodbye = Departed(LINEAGE, 1, 0, -1, None, "goodbye")
    stage.rules.sends(stage.place("d"), stage.who("b"), goodbye)
    stage.rules.sends(stage.place("b"), stage.who("c"), Commit(LINEAGE, 2, wanted))
    assert stage.rules.committed[LINEAGE, 2].members == wanted.members


def _word() -> Accepted:
    return Accepted(LINEAGE, 1, 1, True, 1, (), ())
