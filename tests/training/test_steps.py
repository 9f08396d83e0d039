"""Which of several training states counts, and what is lost with the others."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership.messages import MAX_BRANCHES
from potluck.training.steps import (
    FRESH,
    Discarded,
    Milestone,
    Position,
    StepHistory,
    StepReport,
    SyncAction,
    ancestry_in,
    best,
    decide,
    explain,
    order,
    ranked,
)

A, B, C, D = (letter * 32 for letter in "abcd")


def grown(steps: Sequence[tuple[str, int, int]], samples: int = 10) -> StepHistory:
    """A state that was trained through these positions, with so many samples per step."""
    made = StepHistory()
    for position in steps:
        lineage, _, step = position
        same = lineage == made.position.lineage
        ancestry = made.ancestry if same else made.branches
        made = made.extended(Position(*position), ancestry, step * samples)
    return made


def chosen(*histories: StepHistory, ancestry: Sequence[tuple[str, int]] = ()) -> StepHistory:
    """What counts, which is the same in every order."""
    found = {best(each, ancestry) for each in itertools.permutations(histories)}
    assert len(found) == 1
    return found.pop()


def test_a_history_knows_what_it_consists_of() -> None:
    """Every earlier lineage leaves its last step, with the samples up to it."""
    child = grown([(A, 1, 3), (A, 3, 120), (B, 1, 121), (B, 2, 130)])
    assert child.trail == (Milestone(A, 3, 120, 1200),)
    assert child.ancestry == (Branch(A, 3),)
    assert child.branches == (Branch(A, 3), Branch(B, 2))
    assert child.chain[-1] == Milestone(B, 2, 130, 1300)
    assert child.contains(child)
    for part in (FRESH, Position(A, 1, 3), Position(A, 3, 120)):
        assert child.contains(StepHistory(part))
    for foreign in ((A, 3, 121), (A, 4, 100), (A, 2, 121), (C, 1, 1)):
        assert not child.contains(StepHistory(Position(*foreign)))
    assert not child.contains(grown([(A, 3, 120), (B, 2, 131)]))
    assert (StepHistory().chain, StepHistory().branches) == ((), ())


def test_a_lineage_that_continues_with_another_state_contains_nothing_of_its_first_one() -> None:
    """Those that had it ended; what is left of it, in a checkpoint, shares nothing with the new."""
    first = grown([(A, 1, 4)])
    other = grown([(B, 1, 3), (A, 3, 5)])
    child = grown([(A, 1, 4), (C, 1, 8)])
    assert not other.contains(first)
    assert first.discarded_by(other) == (4, 40)
    assert child.discarded_by(other) == (8, 80)
    assert chosen(first, other) == other
    again = grown([(A, 1, 4), (B, 1, 5), (A, 3, 6)])  # a lineage may be continued twice
    assert again.contains(first)
    assert not again.contains(other)


def test_a_long_trail_keeps_its_newest_part() -> None:
    """It travels with every report, so it is bounded."""
    through = [(f"{number:032d}", 1, number) for number in range(1, MAX_BRANCHES + 9)]
    made = grown(through)
    assert len(made.trail) == len(made.ancestry) == MAX_BRANCHES
    assert made.trail[-1][:3] == through[-2]


def test_the_last_common_point_of_two_states() -> None:
    """What was made since is lost when the other state counts."""
    main = grown([(A, 3, 120), (A, 5, 140)])
    apart = grown([(A, 3, 120), (B, 1, 157)])
    assert apart.parting(main) == Milestone(A, 3, 120, 1200)
    assert main.parting(apart) == Milestone(A, 3, 120, 1200)
    assert apart.parting(grown([(C, 1, 9)])) == Milestone(*FRESH)
    assert grown([(A, 1, 9)]).parting(main) == Milestone(A, 1, 9, 90)


def test_what_is_lost_is_counted_from_the_last_common_point() -> None:
    """Steps and samples; nothing is lost with a state that contains mine."""
    main, apart = grown([(A, 3, 120), (A, 5, 140)]), grown([(A, 3, 120), (B, 1, 157)])
    assert apart.discarded_by(main) == Discarded(37, 370)
    assert main.discarded_by(apart) == Discarded(20, 200)
    assert main.discarded_by(main) is None
    fewer = StepHistory(Position(B, 1, 157), samples=1100, trail=apart.trail)
    assert fewer.discarded_by(main) == Discarded(37, 0)  # it has not counted all that it shares


def test_what_has_not_begun_is_at_step_zero_with_no_samples() -> None:
    """In no lineage, and in no view."""
    assert Position("", 0, 0) == FRESH
    assert str(FRESH) == "step 0 (not begun)"
    assert StepHistory() == StepHistory(FRESH, (), 0, ())
    assert Milestone(A, 1, 2) == Milestone(A, 1, 2, 0)


def test_a_lineage_without_a_parent_is_a_child_of_what_it_loaded() -> None:
    """Before its first step and after it; never a child of itself."""
    loaded = grown([(A, 3, 120)])
    assert loaded.origin_of(B) == (Branch(A, 3),)
    assert loaded.extended(Position(B, 1, 121), loaded.branches, 0).origin_of(B) == (Branch(A, 3),)
    assert grown([(A, 3, 120), (B, 1, 121)]).origin_of(A) == ()
    assert StepHistory().origin_of(B) == ()


def test_what_contains_the_other_counts() -> None:
    """Machines resume from what each has: nothing is lost, whatever the view is a child of."""
    before, after = grown([(A, 1, 100)]), grown([(A, 1, 100), (B, 1, 200)])
    assert chosen(before, after, StepHistory()) == after
    assert chosen(before, after, ancestry=[(A, 1)]) == after
    assert chosen(grown([(A, 1, 60)]), grown([(A, 2, 40)])).position == (A, 2, 40)


def test_the_side_that_followed_the_ancestor_longer_counts() -> None:
    """However many steps and members the other side has."""
    main = grown([(A, 3, 120), (A, 5, 121)])
    alone = grown([(A, 3, 120), (B, 1, 9000)])
    assert chosen(main, alone, alone, alone) == main
    # The ancestor itself counts before a child that left it in the same epoch, but earlier.
    ahead = grown([(A, 3, 123)])
    assert chosen(ahead, alone, alone) == ahead
    # Of two children that left in the same epoch, the one with more of the ancestor's steps.
    late = grown([(A, 3, 123), (C, 1, 124)])
    assert chosen(ahead, alone, alone, late) == chosen(alone, late) == late
    # Views in which no step was made count as well.
    waited = StepHistory(Position(C, 1, 121), (Branch(A, 4),), 1, (Milestone(A, 3, 120, 1),))
    assert chosen(alone, waited) == waited
    # And so do those of an ancestor without any step.
    root = grown([(D, 1, 7)])
    early = root.extended(Position(B, 1, 99), (Branch(D, 1), Branch(A, 2)), 99)
    later = root.extended(Position(C, 1, 8), (Branch(D, 1), Branch(A, 4)), 8)
    assert chosen(early, later) == later
    grandchild = grown([(A, 3, 120), (B, 1, 130), (C, 1, 140)])
    assert chosen(grandchild, grown([(A, 3, 120), (B, 2, 135)])).position == (B, 2, 135)


def test_the_nearest_ancestor_of_the_view_counts() -> None:
    """Before one that is further away, and before what has nothing to do with it."""
    far, near, foreign = grown([(A, 3, 500)]), grown([(B, 2, 10)]), grown([(C, 1, 9000)])
    view = [(A, 3), (B, 2)]
    assert chosen(far, near, foreign, foreign, ancestry=view) == near
    assert chosen(far, foreign, foreign, ancestry=view) == far


def test_unrelated_states_are_compared_by_samples_members_and_id() -> None:
    """Steps say nothing: batches differ in size."""
    steps, samples = grown([(A, 1, 90)], samples=1), grown([(B, 1, 10)], samples=32)
    assert chosen(steps, steps, samples) == samples
    few, many = grown([(A, 1, 10)]), grown([(B, 1, 10)])
    assert chosen(few, many, many) == many
    assert chosen(few, many) == few
    assert chosen(StepHistory(), few, StepHistory()) == few
    assert chosen(StepHistory(), StepHistory()) == StepHistory()


def test_members_that_contradict_each_other_come_to_one_result() -> None:
    """Each says that it contains the other, or that it followed the other one longer."""
    one = StepHistory(Position(A, 1, 5), samples=5, trail=(Milestone(B, 9, 9),))
    other = StepHistory(Position(B, 1, 5), samples=6, trail=(Milestone(A, 9, 9),))
    assert chosen(one, other) == other
    # Ancestries in a circle: a before b, b before c, c before a.
    left = StepHistory(Position(A, 1, 1), (Branch(D, 5), Branch(B, 1)), 3)
    middle = StepHistory(Position(B, 9, 1), (Branch(C, 1), Branch(D, 3)), 2)
    right = StepHistory(Position(C, 9, 1), (Branch(A, 0), Branch(D, 4)), 1)
    histories = [left, middle, right]
    assert len({chosen(*each) for each in itertools.permutations(histories)}) == 1


def test_lineages_in_order() -> None:
    """The best first, then the best of the rest."""
    main, alone = grown([(A, 3, 120), (A, 5, 121)]), grown([(A, 3, 120), (B, 1, 9000)])
    other = grown([(C, 1, 400)])
    for each in itertools.permutations([main, alone, other, grown([(A, 1, 2)])]):
        assert ranked(each) == [C, A, B]
    assert ranked([]) == []


@pytest.mark.parametrize(
    ("mine", "target", "words"),
    [
        (grown([(A, 1, 9)]), grown([(A, 2, 8)]), "other members of this lineage"),
        (
            grown([(A, 3, 120), (B, 1, 157)]),
            grown([(A, 5, 140)]),
            "which the others followed to view 5 and this machine to view 3",
        ),
        (
            grown([(A, 3, 120), (B, 1, 157)]),
            grown([(A, 3, 140)]),
            "which the others followed to step 140 and this machine to step 120",
        ),
        (
            StepHistory(Position(B, 1, 157), (Branch(A, 3),)),
            StepHistory(Position(A, 3, 100)),
            "a common past, which the others continued",
        ),
        (grown([(A, 1, 9)]), grown([(D, 1, 2)]), "continues the lineage that it belongs to"),
        (
            grown([(A, 1, 9)]),
            grown([(B, 1, 2000)]),
            "the others have 20,000 committed samples, this machine 90",
        ),
        (grown([(A, 1, 9)]), grown([(B, 1, 9)]), "equally many committed samples"),
    ],
)
def test_the_reason_is_said(mine: StepHistory, target: StepHistory, words: str) -> None:
    """In words, with numbers."""
    assert words in explain(mine, target, D)


# --- any histories ---

histories_lineages = st.sampled_from(["", A, B, C, D])
histories_numbers = st.integers(0, 3)
positions = st.builds(Position, histories_lineages, histories_numbers, histories_numbers)
histories = st.builds(
    StepHistory,
    positions,
    st.lists(st.builds(Branch, histories_lineages, histories_numbers), max_size=3).map(tuple),
    histories_numbers,
    st.lists(
        st.builds(
            Milestone, histories_lineages, histories_numbers, histories_numbers, histories_numbers
        ),
        max_size=2,
    ).map(tuple),
)


@given(st.lists(histories, min_size=1, max_size=6), st.data())
def test_the_order_does_not_matter(made: list[StepHistory], data: st.DataObject) -> None:
    """Whatever members report, all of them choose the same state, and one that a member has."""
    ancestry = data.draw(st.lists(st.tuples(histories_lineages, histories_numbers), max_size=3))
    first = best(made, ancestry)
    assert first == best(data.draw(st.permutations(made)), ancestry)
    assert first.position in {each.position for each in made}
    assert sorted(ranked(made)) == sorted({each.position.lineage for each in made})
    for each in made:
        assert explain(each, first, A)
        assert each.parting(first).step <= max(each.position.step, *(m.step for m in each.trail), 0)


@st.composite
def families(draw: st.DrawFn) -> list[StepHistory]:
    """States that grew from one beginning: each continues another, in its lineage or a child."""
    made = [grown([(A, 1, 1)])]
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from(made))
        lineage, epoch, step = parent.position
        steps = step + draw(st.integers(1, 50))
        if draw(st.booleans()):
            furthest = max(each.position for each in made if each.position.lineage == lineage)
            if parent.position == furthest:  # a lineage has one continuation
                position = Position(lineage, epoch + draw(st.integers(0, 2)), steps)
                made.append(parent.extended(position, parent.ancestry, steps))
                continue
        child = Position(f"{number:032d}", 1, steps)
        made.append(parent.extended(child, parent.branches, steps))
    return made


@given(families())
def test_nothing_that_followed_longer_is_replaced(made: list[StepHistory]) -> None:
    """What counts loses to no other: neither is it contained in one, nor did one follow longer."""
    first = best(made)
    for each in made:
        if each.position.lineage != first.position.lineage and not first.contains(each):
            assert not each.contains(first)
            assert order(each, first) <= 0


@given(families())
def test_the_order_of_states_has_no_circle(made: list[StepHistory]) -> None:
    """Of any three: what comes before another one comes before what that comes before."""
    for one, two, three in itertools.permutations(made, 3):
        assert order(one, two) == -order(two, one)
        if order(one, two) > 0 and order(two, three) > 0:
            assert order(one, three) > 0


def test_views_without_a_step_count_as_followed() -> None:
    """A side that left the ancestor in a later view counts, though it made no step there."""
    one = StepHistory(Position("b", 1, 121), (Branch("a", 5),), 1, (Milestone("a", 3, 120),))
    other = StepHistory(Position("c", 1, 130), (Branch("a", 4),), 1, (Milestone("a", 3, 125),))
    assert (order(one, other), order(other, one)) == (1, -1)
    strange = StepHistory(Position("d", 1, 121), (Branch("z", 9),), 1, (Milestone("a", 3, 120),))
    assert order(other, strange) == 1


def test_a_state_that_continues_from_mine_is_said_to_continue() -> None:
    """Both followed the common past to the same view and step."""
    mine = StepHistory(Position("a", 3, 130), samples=5)
    target = StepHistory(Position("c", 1, 131), (Branch("a", 3),), 6, (Milestone("a", 3, 130),))
    assert explain(mine, target, "c").endswith("which the others continued")


def test_a_state_whose_beginning_is_not_kept_any_more_contains_what_may_be_its_beginning() -> None:
    """Of a long trail the oldest lineages are dropped."""
    trail = tuple(Milestone(f"{number:032}", 1, number, number) for number in range(MAX_BRANCHES))
    long = StepHistory(Position(A, 1, 99), samples=99, trail=trail)
    oldest = trail[0]
    early = StepHistory(
        Position(*oldest[:3]), samples=oldest.samples, trail=(Milestone(B, 1, 0, 0),)
    )
    assert long.contains(early)
    assert not replace(long, trail=trail[:-1]).contains(early)


# --------------------------------------------------------------------------------------------------
# The commit rule: by all or by none, wherever a death is placed.

LINE = "f" * 32
KEEP, APPLY, RECEIVE = SyncAction


def view(epoch: int, lineage: str = LINE, members: int = 3) -> View:
    """A view; who is in it does not matter to the decision."""
    return View(lineage, epoch, tuple(ProcessId(NodeId("a" * 32), n) for n in range(members)))


def at(step: int, epoch: int = 1, lineage: str = LINE) -> Position:
    """A step of a view."""
    return Position(lineage, epoch, step)


def standing(step: int, epoch: int = 1, lineage: str = LINE) -> StepReport:
    """A member that has applied a step and begun nothing since."""
    return StepReport(at(step, epoch, lineage), (lineage, epoch))


# --- a state that is away ---


def newcomer(*missing: str, insists: bool = False) -> StepReport:
    """A member that came in by a merge, and has never settled in this lineage."""
    away = tuple((ProcessId(NodeId(name[0] * 32), 1), name) for name in missing)
    return replace(standing(9, lineage="e" * 32), missing=away, insists=insists)


def test_members_without_the_state_wait_for_one_that_may_have_it() -> None:
    """It was left out while it was silent: its steps count, and those here have none of them."""
    decision = decide(view(3), [newcomer("den"), newcomer("den", "barn")])
    assert [name for _, name in decision.missing] == ["barn", "den"]
    assert "barn, den may have it" in decision.reason
    assert decision.sources == ()


def test_who_has_the_state_of_the_lineage_brings_it_also_if_it_made_steps_elsewhere() -> None:
    """It continued alone as asked, and is back; the others never had that state, and made more."""
    before = StepHistory(at(38, 1), samples=38)
    alone = before.extended(Position("c" * 32, 1, 39), (Branch(LINE, 2),), 39)
    back = replace(StepReport().at(alone), attended=("c" * 32, 1))
    many = StepReport().at(StepHistory(at(900, 1, "e" * 32), samples=900))
    decision = decide(view(4), [many, back])
    assert decision.target == alone.position
    assert decision.sources == (1,)


@pytest.mark.parametrize(
    "other",
    [
        newcomer("barn", insists=True),  # a person said so
        replace(newcomer("barn"), attended=(LINE, 2)),  # it has had the state of this lineage
        replace(newcomer("barn"), founder=True),  # there is no earlier state
        standing(4),
    ],
)
def test_nobody_is_waited_for_if_the_state_is_here_or_a_person_says_so(other: StepReport) -> None:
    """Nor if nobody is missing, nor in the first view of a lineage."""
    assert decide(view(3), [newcomer("den"), other]).missing == ()
    assert decide(view(3), [newcomer(), newcomer()]).missing == ()
    assert decide(view(1), [newcomer("den"), newcomer("den")]).missing == ()


def test_a_state_from_a_checkpoint_does_not_replace_one_that_may_be_alive() -> None:
    """A member was restarted and loaded step 4; the one that was left out may have made step 5."""
    loaded = replace(standing(4), attended=("", 0))
    decision = decide(view(4), [newcomer("den"), loaded])
    assert [name for _, name in decision.missing] == ["den"]
    assert decide(view(4), [newcomer(), loaded]).target == loaded.position


def test_one_that_a_member_knows_to_have_ended_is_not_waited_for() -> None:
    """The others need not know it; for those that may be alive they wait on."""
    den, barn = newcomer("den", "barn").missing
    told = replace(newcomer("barn"), ended=(den[0],))
    assert decide(view(3), [newcomer("den", "barn"), told]).missing == (barn,)
    assert decide(view(3), [newcomer("den"), replace(told, missing=())]).missing == ()


def test_one_that_is_in_the_view_again_is_not_waited_for() -> None:
    """Its own report says what it has."""
    here = replace(newcomer(), missing=((view(3).members[0], "attic"),))
    assert decide(view(3), [here, here, here]).missing == ()


# --- deaths, placed ---


def test_a_death_in_the_middle_of_the_averaging() -> None:
    """Nobody holds the result: nothing has been applied, and the survivors average again."""
    begun = replace(standing(7), attempt=at(8))
    decision = decide(view(2), [begun, begun])
    assert decision.target == at(7)
    assert decision.actions == (KEEP, KEEP)
    assert decision.reason.startswith("2 of 2 survivors lack step 8 (view 1 of ffffffff)")


def test_a_death_after_some_have_finished_the_averaging() -> None:
    """One survivor lacks the result, so no barrier was passed: those who hold it drop it."""
    holds = replace(standing(7), attempt=at(8), holds=True)
    decision = decide(view(2), [holds, replace(standing(7), attempt=at(8)), holds])
    assert decision.target == at(7)
    assert decision.actions == (KEEP, KEEP, KEEP)
    # A survivor that was still computing lacks it as well.
    assert decide(view(2), [holds, standing(7)]).target == at(7)


def test_a_death_between_result_and_commit() -> None:
    """All survivors hold it; the dead one may have applied it: so it counts."""
    holds = replace(standing(7), attempt=at(8), holds=True)
    decision = decide(view(2), [holds, holds])
    assert decision.target == at(8)
    assert decision.actions == (APPLY, APPLY)
    assert decision.reason == "all 2 survivors hold step 8 (view 1 of ffffffff): it counts"


def test_a_death_between_commit_and_apply() -> None:
    """Some have applied it, the others hold it and do the same now."""
    holds = replace(standing(7), attempt=at(8), holds=True)
    applied = replace(standing(8), attempt=at(8))
    decision = decide(view(2), [holds, applied, holds])
    assert decision.target == at(8)
    assert decision.actions == (APPLY, KEEP, APPLY)


# --- who comes, and who comes back ---


def test_a_newcomer_gets_the_state_and_has_no_say() -> None:
    """It holds nothing, which is no reason to average again."""
    holds = replace(standing(7), attempt=at(8), holds=True)
    decision = decide(view(2), [holds, StepReport(), holds])
    assert decision.target == at(8)
    assert decision.actions == (APPLY, RECEIVE, APPLY)
    assert (decision.sources, decision.receivers) == ((0, 2), (1,))


def test_one_who_was_away_has_no_say() -> None:
    """It stands where the others stood but was not in the view of the step."""
    holds = replace(standing(7), attended=(LINE, 2), attempt=at(8, 2), holds=True)
    away = standing(7)
    decision = decide(view(3), [holds, away])
    assert decision.target == at(8, 2)
    assert decision.actions == (APPLY, RECEIVE)


def test_one_who_was_cut_off_after_applying_and_comes_back_has_what_all_have() -> None:
    """Nothing has to be sent to it if nothing has happened since."""
    applied = replace(standing(8), attempt=at(8))
    assert decide(view(3), [replace(applied, attended=(LINE, 2)), applied]).actions == (KEEP, KEEP)


def test_a_result_of_another_attempt_is_not_applied() -> None:
    """One comes back with the result of a try that was repeated without it."""
    stale = replace(standing(7), attempt=at(8), holds=True)
    decision = decide(view(3), [standing(8, 2), stale])
    assert decision.target == at(8, 2)
    assert decision.actions == (KEEP, RECEIVE)


def test_the_last_try_counts() -> None:
    """Who holds an earlier one has missed that it is repeated."""
    again = StepReport(at(7), (LINE, 2), at(8, 2))
    earlier = StepReport(at(7), (LINE, 2), at(8, 1), holds=True)
    assert decide(view(3), [again, earlier]).target == at(7)


def test_a_try_in_a_lineage_that_the_view_does_not_come_from_counts_last() -> None:
    """However late the epoch is in which it was made."""
    here = StepReport(at(3), (LINE, 1), at(4), holds=True, samples_held=40)
    elsewhere = StepReport(at(3), (LINE, 1), at(4, 9, "0" * 32), holds=True)
    decision = decide(view(2), [here, elsewhere])
    assert decision.target == at(3)
    assert f"1 of 2 survivors lack {at(4)}" in decision.reason
    assert f"1 of 2 survivors lack {at(4)}" in decide(view(1, "c" * 32), [here, elsewhere]).reason


def test_a_member_that_has_just_come_has_nothing_to_report() -> None:
    """It took part in nothing, holds nothing, and insists on nothing."""
    report = StepReport()
    assert (report.position, report.attended, report.attempt) == (FRESH, ("", 0), None)
    assert (report.samples, report.samples_held, report.holds) == (0, 0, False)
    assert (report.founder, report.insists) == (False, False)


def test_the_samples_of_a_step_that_counts_are_those_of_the_member_that_knows_most() -> None:
    """Whatever the order of the reports."""
    held = [StepReport(at(3), (LINE, 1), at(4), holds=True, samples_held=n) for n in (30, 40, 0)]
    for reports in itertools.permutations(held):
        decision = decide(view(2), reports)
        assert (decision.target, decision.history.samples) == (at(4), 40)


def test_the_first_ones_weights_count_at_the_beginning() -> None:
    """Before the first step each may have begun from numbers of its own."""
    decision = decide(view(1), [StepReport(founder=True), StepReport(), StepReport()])
    assert decision.target == FRESH
    assert decision.actions == (KEEP, RECEIVE, RECEIVE)
    assert str(decision.target) == "step 0 (not begun)"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_raw_number_of_steps_says_nothing(order: tuple[int, int]) -> None:
    """The lineage of the view wins over one with more steps; within it, the later epoch."""
    for stale in (standing(500, 9, "a" * 32), standing(500, 1), StepReport()):
        reports = [standing(120, 2), stale]
        decision = decide(view(3), [reports[place] for place in order])
        assert decision.target == at(120, 2)
        assert [decision.actions[order.index(place)] for place in (0, 1)] == [KEEP, RECEIVE]


def test_a_new_lineage_continues_from_most_samples() -> None:
    """No member is of it yet: samples win over steps and members, anything over nothing."""
    young = view(1, "c" * 32)
    few = replace(standing(500, 4, "a" * 32), samples=500)
    many = replace(standing(90, 2, "b" * 32), samples=900)
    assert decide(young, [few, many, few]).target == at(90, 2, "b" * 32)
    assert decide(young, [StepReport(), few]).target == at(500, 4, "a" * 32)
    assert decide(young, [StepReport(), few]).history == few.history
    # Members that continued by themselves finish the step that all of them hold.
    holds = replace(many, attempt=at(91, 2, "b" * 32), holds=True, samples_held=910)
    decision = decide(young, [holds, holds, few])
    assert decision.target == at(91, 2, "b" * 32)
    assert decision.history == StepHistory(decision.target, samples=910)


def test_one_that_made_many_steps_alone_does_not_win() -> None:
    """Its lineage left the others' in view 3; they followed it to view 5."""
    alone = StepReport(
        at(9000, 1, "a" * 32), ("a" * 32, 1), ancestry=(Branch(LINE, 3),), samples=90_000
    )
    others = replace(standing(121, 5), samples=1210)
    for reports in itertools.permutations([alone, alone, others]):
        decision = decide(view(6), reports)
        assert decision.target == at(121, 5)
        assert decision.actions == tuple(KEEP if each is others else RECEIVE for each in reports)
        # The same in a lineage that is new to all of them.
        assert decide(view(1, "c" * 32), reports).target == at(121, 5)


def test_a_child_continues_from_its_parents_state() -> None:
    """Founders of a child have the state of the parent, or of an ancestor further away."""
    child = replace(view(1, "c" * 32), ancestry=(Branch("a" * 32, 2), Branch(LINE, 4)))
    parent, older = standing(20, 4), standing(90, 2, "a" * 32)
    foreign = replace(standing(900, 1, "b" * 32), samples=9000)
    assert decide(child, [older, parent, foreign]).target == at(20, 4)
    assert decide(child, [older, foreign]).target == at(90, 2, "a" * 32)
    # The step that all of them hold counts; it was begun in the parent, or in the child already.
    held = [
        replace(parent, attempt=at(21, 4), holds=True, samples_held=21),
        replace(
            parent,
            attended=("c" * 32, 1),
            attempt=at(21, 1, "c" * 32),
            holds=True,
            samples_held=22,
        ),
    ]
    in_parent, in_child = (decide(child, [each, each]).history for each in held)
    assert (in_parent.position, in_parent.ancestry) == (at(21, 4), (Branch("a" * 32, 2),))
    assert in_child.position == at(21, 1, "c" * 32)
    assert in_child.ancestry == (Branch("a" * 32, 2), Branch(LINE, 4))
    assert in_child.trail == (Milestone(LINE, 4, 20, 0),)
    # A try in the nearest lineage is the last one.
    assert decide(child, held).target == at(21, 1, "c" * 32)
    assert decide(child, held[::-1]).target == at(21, 1, "c" * 32)


def test_the_ancestry_of_a_lineage_that_loaded_a_checkpoint() -> None:
    """It was founded without a parent: it is a child of the checkpoint's lineage from then on."""
    loaded = StepHistory(at(20, 4), (Branch("a" * 32, 2),), 200)
    first = at(21, 1, "c" * 32)
    ancestry = ancestry_in(view(1, "c" * 32), first, loaded)
    assert ancestry == (Branch("a" * 32, 2), Branch(LINE, 4))
    after = loaded.extended(first, ancestry, 210)
    assert StepReport(founder=True).at(after) == StepReport(
        first, founder=True, ancestry=ancestry, samples=210, trail=(Milestone(LINE, 4, 20, 200),)
    )
    assert ancestry_in(view(2, "c" * 32), at(22, 2, "c" * 32), after) == ancestry
    assert ancestry_in(view(1), at(1), StepHistory()) == ()
    # The oldest ancestor that a view knows of: what came before is known from the state alone.
    old = replace(view(1, "c" * 32), ancestry=(Branch("a" * 32, 2), Branch(LINE, 4)))
    base = StepHistory(at(3, 1, "a" * 32), (Branch("b" * 32, 7),))
    assert ancestry_in(old, at(4, 2, "a" * 32), base) == (Branch("b" * 32, 7),)


def test_those_who_never_got_the_state_do_not_begin_anew() -> None:
    """Every member that had it is gone: its work must not be overwritten by a beginning."""
    decision = decide(view(2), [StepReport(), StepReport()])
    assert decision.is_lost
    assert decision.sources == ()
    assert "those that had it are not here" in decision.reason
    assert not decide(view(2), [StepReport(), StepReport(attended=(LINE, 1))]).is_lost
    assert not decide(view(2), [StepReport(), standing(3, 1, "a" * 32)]).is_lost


def test_who_may_begin_in_a_child() -> None:
    """Members that took part in a parent, or founded everything; not newcomers of the parent."""
    child = replace(view(1, "c" * 32), ancestry=(Branch(LINE, 4),))
    assert decide(child, [StepReport(), StepReport()]).is_lost
    assert not decide(child, [StepReport(), StepReport(attended=(LINE, 3))]).is_lost
    assert not decide(child, [StepReport(), StepReport(founder=True)]).is_lost
    assert decide(child, [StepReport(), StepReport(attended=("b" * 32, 3))]).is_lost
    # Members of a side that lost a merge, whose winners have all ended, continue from their own.
    winner = view(7, "d" * 32)
    assert decide(winner, [standing(5), StepReport()]).target == at(5)
    assert decide(winner, [StepReport(attended=(LINE, 1))]).is_lost


def test_a_step_beyond_the_next_is_never_applied() -> None:
    """What cannot be, such as a result two steps ahead, is not acted upon."""
    odd = replace(standing(7), attempt=at(9), holds=True)
    assert odd.pending is None
    assert decide(view(2), [odd, odd]).target == at(7)
    # Nor when nobody who stands at the base was in the view of the try.
    assert decide(view(2), [replace(odd, attempt=at(8, 5), holds=True)]).target == at(7)


# --- any reports ---

lineages = st.sampled_from(["", "a" * 32, "b" * 32, LINE])
numbers = st.integers(0, 2)
places = st.builds(Position, lineages, numbers, numbers)
branches = st.builds(Branch, lineages, numbers)
reports = st.builds(
    StepReport,
    places,
    st.tuples(lineages, numbers),
    st.none() | places,
    st.booleans(),
    st.booleans(),
    st.lists(branches, max_size=2).map(tuple),
    numbers,
    st.lists(st.builds(Milestone, lineages, numbers, numbers, numbers), max_size=2).map(tuple),
    numbers,
)


@given(st.lists(reports, min_size=1, max_size=5), st.data())
def test_all_ranks_decide_alike_whatever_the_order(
    made: list[StepReport], data: st.DataObject
) -> None:
    """The target, its history and what each member does are the same for every order of ranks."""
    ancestry = tuple(data.draw(st.lists(branches, max_size=2)))
    here = replace(view(data.draw(numbers), members=len(made)), ancestry=ancestry)
    order = data.draw(st.permutations(range(len(made))))
    one, other = decide(here, made), decide(here, [made[place] for place in order])
    assert (one.target, one.history, one.reason) == (other.target, other.history, other.reason)
    assert one.is_lost == other.is_lost
    if one.target != FRESH:
        assert [one.actions[place] for place in order] == list(other.actions)
        assert one.sources
        assert one.history.position == one.target


# --- every order of events ---

Applied = tuple[Position, ...]


class World(NamedTuple):
    """Members and one newcomer: where each stands, and the view that holds."""

    reports: tuple[StepReport, ...]
    histories: tuple[Applied, ...]
    """The steps that each one's state consists of."""
    members: tuple[int, ...]
    epoch: int
    told: tuple[tuple[StepReport, Applied] | None, ...]
    """What each has reported in this view."""

    def changed(self, member: int, report: StepReport, history: Applied | None = None) -> World:
        """The same with one member elsewhere."""
        made = list(self.histories)
        if history is not None:
            made[member] = history
        reports = (*self.reports[:member], report, *self.reports[member + 1 :])
        return self._replace(reports=reports, histories=tuple(made))


def take_part(world: World, member: int) -> World | None:
    """A member reports, or does what follows once all have."""
    mine = world.reports[member]
    if world.told[member] is None:
        word = mine, world.histories[member]
        return world._replace(told=(*world.told[:member], word, *world.told[member + 1 :]))
    words = [told for each in world.members if (told := world.told[each]) is not None]
    if len(words) < len(world.members):
        return None
    reports = [report for report, _ in words]
    decision = decide(view(world.epoch), reports)
    if decision.is_lost:
        return None
    before = world.histories[member]
    ahead = next(history for report, history in words if leads_to(report, decision.target))
    goal = ahead if decision.target in (*ahead, FRESH) else (*ahead, decision.target)
    if mine.attended == max(report.attended for report in reports):
        assert goal[: len(before)] == before, "somebody who was there loses what it has applied"
    there = replace(mine, attended=(LINE, world.epoch), position=decision.target)
    action = decision.actions[world.members.index(member)]
    if action is not KEEP:
        there = replace(there, holds=False)
    assert action is not KEEP or goal == before
    assert action is not APPLY or goal == (*before, decision.target)
    return world.changed(member, there, goal)


def leads_to(report: StepReport, target: Position) -> bool:
    """Whether a member can be the source of what all will have."""
    return target in (report.position, report.pending)


def moves(world: World, steps: int) -> Iterator[World]:
    """Everything that members can do next."""
    for member in world.members:
        mine = world.reports[member]
        if mine.attended != (LINE, world.epoch):
            following = take_part(world, member)
            if following is not None:
                yield following
            continue
        now = Position(LINE, world.epoch, mine.position.step + 1)
        others = [world.reports[each] for each in world.members]
        if mine.attempt != now:
            if mine.position.step < steps:
                yield world.changed(member, replace(mine, attempt=now, holds=False))
        elif not mine.holds and all(now in (each.attempt, each.position) for each in others):
            yield world.changed(member, replace(mine, holds=True))
        elif mine.holds and all(now in (each.pending, each.position) for each in others):
            after = replace(mine, position=now, holds=False)
            yield world.changed(member, after, (*world.histories[member], now))


def changes(world: World) -> Iterator[World]:
    """Every next view: any of the members, with or without one who was not in."""
    everybody = range(len(world.reports))
    for size in range(1, len(world.members) + 1):
        for rest in itertools.combinations(world.members, size):
            absent = [each for each in everybody if each not in world.members]
            for extra in ((), *((each,) for each in absent)):
                yield world._replace(
                    members=tuple(sorted({*rest, *extra})),
                    epoch=world.epoch + 1,
                    told=(None,) * len(world.reports),
                )


@pytest.mark.parametrize(("founders", "views", "steps"), [(2, 3, 1), (3, 2, 1), (2, 2, 2)], ids=str)
def test_every_order_of_events_is_by_all_or_by_none(founders: int, views: int, steps: int) -> None:
    """Deaths and cuts at every point; those who were cut off stay as they are and may come back.

    Who is at the same step has the same history, and nobody who was in the latest decision ever
    loses what it has applied.
    """
    everybody = (*[StepReport(founder=True)] * founders, StepReport())
    nothing = ((),) * len(everybody)
    start = World(everybody, nothing, tuple(range(founders)), 1, (None,) * len(everybody))
    seen, waiting = {start}, deque([start])
    while waiting:
        world = waiting.popleft()
        known: dict[Position, Applied] = {}
        for report, history in zip(world.reports, world.histories, strict=True):
            assert history[-1:] == (() if report.position == FRESH else (report.position,))
            assert known.setdefault(report.position, history) == history
        following = [*moves(world, steps), *(changes(world) if world.epoch < views else ())]
        fresh = [each for each in following if each not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    assert len(seen) > 1000
