"""Quorums share a living member, or leave nobody alive to object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.quorum import has_quorum
from potluck.vocabulary import NodeId, ProcessId

EVERYBODY = [ProcessId(NodeId(letter), 1) for letter in "abcdefg"]
sizes = st.integers(1, 7)
subsets = st.sets(st.sampled_from(EVERYBODY))


@given(sizes, subsets, subsets)
def test_two_quorums_without_deaths_share_a_member(
    size: int, one: set[ProcessId], other: set[ProcessId]
) -> None:
    """Majorities, and halves with the first member, always intersect."""
    members = EVERYBODY[:size]
    if has_quorum(members, one, set()) and has_quorum(members, other, set()):
        assert one & other & set(members)


@given(sizes, subsets, subsets, subsets)
def test_a_quorum_of_the_living_leaves_only_dead_behind(
    size: int, one: set[ProcessId], other: set[ProcessId], dead: set[ProcessId]
) -> None:
    """Where two quorums share nobody, all living votes of one of them have died since."""
    members = EVERYBODY[:size]
    if has_quorum(members, one, set()) and has_quorum(members, other, dead):
        assert (one & other & set(members)) - dead or not (one & set(members)) - dead - other


@given(sizes, subsets, subsets)
def test_the_dead_never_vote(size: int, present: set[ProcessId], dead: set[ProcessId]) -> None:
    """A vote of somebody proved dead changes nothing."""
    members = EVERYBODY[:size]
    assert has_quorum(members, present, dead) == has_quorum(members, present - dead, dead)


def test_nobody_is_no_quorum() -> None:
    """Even when all are dead."""
    assert not has_quorum(EVERYBODY, set(), set(EVERYBODY))
