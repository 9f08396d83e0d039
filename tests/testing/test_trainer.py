"""The simulated trainer makes steps as transactions, and the step_log finds whatever it loses."""

from __future__ import annotations

import pytest

from potluck._types import Branch, View
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.process import Violation
from potluck.testing.scenario import Scenario, play
from potluck.testing.trainer import DATASET, States
from potluck.training.steps import Position

ONE, TWO = "1" * 32, "2" * 32


def trained(story: str) -> SimulatedCluster:
    """The cluster at the end of a story with trainers."""
    return play(Scenario.parse(f"trainers saving\nnodes a b c\n{story}"))


def test_all_members_make_the_same_steps() -> None:
    """Several in a second, each with samples of all."""
    cluster = trained("within 3 expect a b c in one view\nwait 5")
    trainers = [cluster.trainer_of(name) for name in "abc"]
    depths = {each.value.depth for each in trainers if each is not None}
    assert min(depths) > 15
    assert max(depths) - min(depths) <= 1
    core = cluster.place("a").core
    assert core is not None
    assert core.samples == trainers[0].value.samples > DATASET  # type: ignore[union-attr]


def test_a_newcomer_gets_the_state_and_survivors_keep_theirs() -> None:
    """Over a kill, a restart, a cut and its mending."""
    cluster = trained(
        "wait 2\nkill c\nwait 1\nrestart c\nwait 2\ncut a | b c\nwait 4\nheal\nsettle\nwait 1"
    )
    values = {cluster.trainer_of(name).value.depth for name in "abc"}  # type: ignore[union-attr]
    assert min(values) > 20
    assert cluster.invariants.step_log.taken_back == 0


def test_a_restart_of_all_begins_with_what_was_saved() -> None:
    """The first step of the new lineage follows one of the old."""
    cluster = trained("wait 3\nunplug a b c\nrestart a b c\nwait 2")
    value = cluster.trainer_of("a").value  # type: ignore[union-attr]
    lineages = set()
    while value.parent is not None:
        lineages.add(value.position.lineage)
        value = value.parent
    assert len(lineages) == 2


def test_a_message_that_is_lost_is_sent_again() -> None:
    """A cut that loses everything and is too short for a pause does not stop the training."""
    cluster = trained("wait 1\ncut a | b c losing\nwait 0.3\nheal\nwait 4")
    assert cluster.in_one_view("a", "b", "c")
    assert cluster.trainer_of("b").value.depth > 15  # type: ignore[union-attr]


def test_a_sample_that_is_used_twice_is_found() -> None:
    """In one step, or in two of one pass."""
    states = States()
    first = states.after(states.fresh(), Position(ONE, 1, 1), ((0,), (1,)))
    assert first.free({2})[0] == 3
    with pytest.raises(Violation, match="Sample 1 is used twice in pass 0"):
        states.after(first, Position(ONE, 1, 2), ((2,), (1,)))


def test_a_pass_over_the_data_ends_and_another_begins() -> None:
    """Then all samples are free again."""
    states = States()
    value = states.after(states.fresh(), Position(ONE, 1, 1), (tuple(range(DATASET)),))
    assert (value.passes, value.mask, value.samples) == (1, 0, DATASET)


class Stage:
    """A cluster whose step_log is told what trainers do."""

    def __init__(self) -> None:
        self.cluster = SimulatedCluster(1)
        self.cluster.start("a", "b", "c")
        self.step_log = self.cluster.invariants.step_log
        # These processes are in no view.
        self.step_log._check_at_work = lambda *_: None
        self.states = States()
        self.begin = self.states.fresh()
        self.one = self.states.after(self.begin, Position(ONE, 1, 1), ((0,),))

    def view(self, epoch: int, names: str, lineage: str = ONE) -> View:
        """A view of these."""
        members = tuple(self.cluster.place(name).process for name in names)
        return View(lineage, epoch, members)

    def apply(self, names: str) -> None:
        """Let members apply the first step."""
        for name in names:
            self.step_log.applied(self.cluster.place(name), self.view(1, "abc"), self.one)


def test_two_states_after_one_step_are_found() -> None:
    """Whoever applies the second one."""
    stage = Stage()
    stage.apply("a")
    other = stage.states.after(stage.begin, Position(ONE, 1, 1), ((1,),))
    with pytest.raises(Violation, match="on another state than"):
        stage.step_log.applied(stage.cluster.place("b"), stage.view(1, "abc"), other)


def test_a_step_that_a_later_view_lacks_is_found() -> None:
    """Unless all who applied it have ended."""
    stage = Stage()
    stage.apply("ab")
    place, later = stage.cluster.place("c"), stage.view(2, "bc")
    with pytest.raises(Violation, match="without step 1"):
        stage.step_log.settled(place, later, stage.begin)
    stage.cluster.kill("a", "b")
    stage.step_log.settled(place, later, stage.begin)


def test_members_that_begin_with_other_weights_are_found() -> None:
    """Before the first step as well."""
    stage = Stage()
    stage.step_log.settled(stage.cluster.place("a"), stage.view(1, "ab"), stage.begin)
    with pytest.raises(Violation, match="other weights"):
        stage.step_log.settled(stage.cluster.place("b"), stage.view(1, "ab"), stage.states.fresh())


def test_a_counted_step_is_given_up_only_after_a_lost_merge() -> None:
    """Then it is counted as taken back."""
    stage = Stage()
    stage.apply("a")
    place = stage.cluster.place("a")
    with pytest.raises(Violation, match="has not lost a merge"):
        stage.step_log.replaced(place, stage.one, stage.begin, 1)
    families = stage.cluster.invariants.families
    families.installed(place, stage.view(1, "a"))
    families.agreed(stage.view(2, "a"), TWO)
    stage.step_log.replaced(place, stage.one, stage.begin, 1)
    assert stage.step_log.taken_back == 1
    assert stage.step_log.losers == {place.process}


def test_a_state_is_not_lost_while_a_living_process_has_it() -> None:
    """Unless a person had the others continue without that one."""
    stage = Stage()
    stage.apply("a")
    cluster, families = stage.cluster, stage.cluster.invariants.families
    for name in "abc":
        families.installed(cluster.place(name), stage.view(1, "abc"))
    child = View(TWO, 1, stage.view(1, "b").members, (Branch(ONE, 1),))
    families.agreed(child)
    with pytest.raises(Violation, match=r"the state is lost, although \{a/1\} applied step 1"):
        stage.step_log.lost(cluster.place("b"), child)
    families.told_to_continue(cluster.place("c").process)
    child = View("3" * 32, 1, stage.view(1, "c").members, (Branch(ONE, 1),))
    families.agreed(child)
    stage.step_log.lost(cluster.place("c"), child)


@pytest.mark.parametrize("told", [0, 2])
def test_a_user_that_is_not_told_what_was_taken_back_is_found(told: int) -> None:
    """The number of steps must be right, also where the merge was lost as it should be."""
    stage = Stage()
    stage.apply("a")
    with pytest.raises(Violation, match=f"lacks 1 of its steps, and tells its user that {told}"):
        stage.step_log.replaced(stage.cluster.place("a"), stage.one, stage.begin, told)
    later = stage.states.after(stage.one, Position(ONE, 1, 2), ((1,),))
    with pytest.raises(Violation, match="lacks 0 of its steps"):
        stage.step_log.replaced(stage.cluster.place("a"), stage.one, later, 1)


def test_a_lineage_must_not_dissolve_into_one_that_left_it_earlier() -> None:
    """The other one began with a checkpoint of it, and has done much since."""
    stage = Stage()
    value = stage.one
    for step in range(2, 9):
        value = stage.states.after(value, Position(TWO, 1, step), ((step,),))
    stage.step_log.settled(stage.cluster.place("c"), stage.view(1, "c", TWO), value)
    with pytest.raises(Violation, match=r"followed their common ancestor further: 11111111\.3 and"):
        stage.step_log.dissolves(stage.view(3, "ab"), TWO, 1)
    assert stage.step_log._branches(TWO) == (Branch(ONE, 1),)
    stage.step_log.dissolves(stage.view(1, "c", TWO), ONE, 3)
