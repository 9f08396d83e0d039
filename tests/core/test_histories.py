"""Which of several training states counts, and what is lost with the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ancestry import MAX_BRANCHES, Branch
from potluck.core.histories import (
    FRESH,
    Discarded,
    History,
    Milestone,
    Position,
    best,
    explain,
    order,
    ranked,
)

A, B, C, D = (letter * 32 for letter in "abcd")


def grown(steps: Sequence[tuple[str, int, int]], samples: int = 10) -> History:
    """A state that was trained through these positions, with so many samples per step."""
    made = History()
    for position in steps:
        lineage, _, step = position
        same = lineage == made.position.lineage
        ancestry = made.ancestry if same else made.branches
        made = made.extended(Position(*position), ancestry, step * samples)
    return made


def chosen(*histories: History, ancestry: Sequence[tuple[str, int]] = ()) -> History:
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
        assert child.contains(History(part))
    for foreign in ((A, 3, 121), (A, 4, 100), (A, 2, 121), (C, 1, 1)):
        assert not child.contains(History(Position(*foreign)))
    assert not child.contains(grown([(A, 3, 120), (B, 2, 131)]))
    assert (History().chain, History().branches) == ((), ())


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
    fewer = History(Position(B, 1, 157), samples=1100, trail=apart.trail)
    assert fewer.discarded_by(main) == Discarded(37, 0)  # it has not counted all that it shares


def test_what_has_not_begun_is_at_step_zero_with_no_samples() -> None:
    """In no lineage, and in no view."""
    assert Position("", 0, 0) == FRESH
    assert str(FRESH) == "step 0 (not begun)"
    assert History() == History(FRESH, (), 0, ())
    assert Milestone(A, 1, 2) == Milestone(A, 1, 2, 0)


def test_a_lineage_without_a_parent_is_a_child_of_what_it_loaded() -> None:
    """Before its first step and after it; never a child of itself."""
    loaded = grown([(A, 3, 120)])
    assert loaded.origin_of(B) == (Branch(A, 3),)
    assert loaded.extended(Position(B, 1, 121), loaded.branches, 0).origin_of(B) == (Branch(A, 3),)
    assert grown([(A, 3, 120), (B, 1, 121)]).origin_of(A) == ()
    assert History().origin_of(B) == ()


def test_what_contains_the_other_counts() -> None:
    """Machines resume from what each has: nothing is lost, whatever the view is a child of."""
    before, after = grown([(A, 1, 100)]), grown([(A, 1, 100), (B, 1, 200)])
    assert chosen(before, after, History()) == after
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
    waited = History(Position(C, 1, 121), (Branch(A, 4),), 1, (Milestone(A, 3, 120, 1),))
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
    assert chosen(History(), few, History()) == few
    assert chosen(History(), History()) == History()


def test_members_that_contradict_each_other_come_to_one_result() -> None:
    """Each says that it contains the other, or that it followed the other one longer."""
    one = History(Position(A, 1, 5), samples=5, trail=(Milestone(B, 9, 9),))
    other = History(Position(B, 1, 5), samples=6, trail=(Milestone(A, 9, 9),))
    assert chosen(one, other) == other
    # Ancestries in a circle: a before b, b before c, c before a.
    left = History(Position(A, 1, 1), (Branch(D, 5), Branch(B, 1)), 3)
    middle = History(Position(B, 9, 1), (Branch(C, 1), Branch(D, 3)), 2)
    right = History(Position(C, 9, 1), (Branch(A, 0), Branch(D, 4)), 1)
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
            History(Position(B, 1, 157), (Branch(A, 3),)),
            History(Position(A, 3, 100)),
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
def test_the_reason_is_said(mine: History, target: History, words: str) -> None:
    """In words, with numbers."""
    assert words in explain(mine, target, D)


# --- any histories ---

lineages = st.sampled_from(["", A, B, C, D])
numbers = st.integers(0, 3)
positions = st.builds(Position, lineages, numbers, numbers)
histories = st.builds(
    History,
    positions,
    st.lists(st.builds(Branch, lineages, numbers), max_size=3).map(tuple),
    numbers,
    st.lists(st.builds(Milestone, lineages, numbers, numbers, numbers), max_size=2).map(tuple),
)


@given(st.lists(histories, min_size=1, max_size=6), st.data())
def test_the_order_does_not_matter(made: list[History], data: st.DataObject) -> None:
    """Whatever members report, all of them choose the same state, and one that a member has."""
    ancestry = data.draw(st.lists(st.tuples(lineages, numbers), max_size=3))
    first = best(made, ancestry)
    assert first == best(data.draw(st.permutations(made)), ancestry)
    assert first.position in {each.position for each in made}
    assert sorted(ranked(made)) == sorted({each.position.lineage for each in made})
    for each in made:
        assert explain(each, first, A)
        assert each.parting(first).step <= max(each.position.step, *(m.step for m in each.trail), 0)


@st.composite
def families(draw: st.DrawFn) -> list[History]:
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
def test_nothing_that_followed_longer_is_replaced(made: list[History]) -> None:
    """What counts loses to no other: neither is it contained in one, nor did one follow longer."""
    first = best(made)
    for each in made:
        if each.position.lineage != first.position.lineage and not first.contains(each):
            assert not each.contains(first)
            assert order(each, first) <= 0


@given(families())
def test_the_order_of_states_has_no_circle(made: list[History]) -> None:
    """Of any three: what comes before another one comes before what that comes before."""
    for one, two, three in itertools.permutations(made, 3):
        assert order(one, two) == -order(two, one)
        if order(one, two) > 0 and order(two, three) > 0:
            assert order(one, three) > 0


def test_views_without_a_step_count_as_followed() -> None:
    """A side that left the ancestor in a later view counts, though it made no step there."""
    one = History(Position("b", 1, 121), (Branch("a", 5),), 1, (Milestone("a", 3, 120),))
    other = History(Position("c", 1, 130), (Branch("a", 4),), 1, (Milestone("a", 3, 125),))
    assert (order(one, other), order(other, one)) == (1, -1)
    strange = History(Position("d", 1, 121), (Branch("z", 9),), 1, (Milestone("a", 3, 120),))
    assert order(other, strange) == 1


def test_a_state_that_continues_from_mine_is_said_to_continue() -> None:
    """Both followed the common past to the same view and step."""
    mine = History(Position("a", 3, 130), samples=5)
    target = History(Position("c", 1, 131), (Branch("a", 3),), 6, (Milestone("a", 3, 130),))
    assert explain(mine, target, "c").endswith("which the others continued")
