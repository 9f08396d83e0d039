"""The checker itself: every rule is shown a cluster that breaks it."""

from __future__ import annotations

from random import Random

import pytest

from potluck.core import cluster_effects as effects
from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_messages import (
    Accepted,
    Commit,
    Departed,
    Proposal,
    Propose,
    Relayed,
    Vote,
    encode,
)
from potluck.core.election_events import ElectionEvent, ElectionKind
from potluck.core.health_config import HealthConfig
from potluck.testing.clock import VirtualClock
from potluck.testing.invariants import Bounds, Invariants
from potluck.testing.network import LinkQuality, LossyNetwork
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Violation
from potluck.testing.world import SimulatedWorld
from potluck.vocabulary import ProcessId, View

LINEAGE = "f" * 32
BOUNDS = Bounds(waking=1.0, settling=5.0, patience=10.0, converging=10.0)


class Puppet(ClusterCore):
    """A core that is in whatever view and state it is told."""

    view_shown: View | None = None
    state_shown = ClusterState.JOINING
    reason_shown = "it was told so"

    @property
    def view(self) -> View | None:
        """The view it was told."""
        return self.view_shown

    @property
    def state(self) -> ClusterState:
        """The state it was told."""
        return self.state_shown

    @property
    def reason(self) -> str:
        """The reason it was told."""
        return self.reason_shown


class Stage:
    """Some puppets, and the invariants that watch them."""

    def __init__(self, *names: str, role: Role = Role.MEMBER) -> None:
        self.world = SimulatedWorld(core=Puppet)
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

    def say(self, name: str, reason: str) -> None:
        """Let a puppet have a reason."""
        core = self.place(name).core
        assert isinstance(core, Puppet)
        core.reason_shown = reason

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
    stage.world.start("o", role=Role.OBSERVER)
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


def test_a_process_that_waits_must_say_for_whom() -> None:
    """It names one that is dead, and of which nobody can know that."""
    stage = Stage("a", "b", "c")
    view = stage.view(1, "a", "b", "c")
    for name in "abc":
        stage.install(name, view)
    stage.put("a", view, ClusterState.PAUSED)
    stage.put("b", None)
    dialling = stage.world.dialling
    stage.place("b").end("", silently=True)
    stage.place("c").end("")
    stage.say("a", f"waiting for c ({stage.who('c')})")
    assert "a does not wait for one that is missing" in str(stage.rules.why_not_waiting(dialling))
    stage.say("a", f"waiting for b ({stage.who('b')})")
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

    world = SimulatedWorld(core=Insomniac)
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
    first: ProcessCard = stage.place("a").card
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
