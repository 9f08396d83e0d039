"""Which of two lineages stays, where its documentation shows no example."""

from __future__ import annotations

from potluck.core.ancestry import Branch, Claim, branch_off, compare, outranks

A, B = (Branch("a", 1),), (Branch("b", 1),)


def test_members_count_after_samples_and_the_lower_id_at_last() -> None:
    """What is not said counts as none."""
    assert outranks(Claim(B, members=2), Claim(A, samples=0, members=1))
    assert not outranks(Claim(A, members=9), Claim(B, samples=1))
    assert outranks(Claim(A, 5, 3), Claim(B, 5, 3))
    assert not outranks(Claim(B, 5, 3), Claim(A, 5, 3))
    assert not outranks(Claim(B), Claim(A, 0, 0))
    assert outranks(Claim(A), Claim(B, 0, 0))


def test_a_lineage_does_not_win_against_itself() -> None:
    """Two claims that say the same: neither outranks the other."""
    assert not outranks(Claim(A, 5, 3), Claim(A, 5, 3))


def test_a_living_ancestor_comes_before_a_child_of_the_same_epoch() -> None:
    """Whoever asks."""
    child = (Branch("a", 1), Branch("c", 7))
    assert (compare(A, child), compare(child, A)) == (1, -1)


def test_of_a_long_ancestry_the_newest_branches_are_kept() -> None:
    """32 of them, as many as a message may carry."""
    long = tuple(Branch(str(number), number) for number in range(32))
    child = branch_off(long, "x", 5)
    assert len(child) == 32
    assert child[-1] == Branch("x", 5)
    assert child[0] == long[1]


def test_the_lower_id_is_that_of_the_lineage_itself() -> None:
    """Not that of its first ancestor."""
    one, other = (Branch("a", 1), Branch("z", 1)), (Branch("b", 1), Branch("y", 1))
    assert outranks(Claim(other), Claim(one))
    assert not outranks(Claim(one), Claim(other))
