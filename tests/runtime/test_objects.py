"""Small objects: broadcast, all-gather, gather and scatter."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import CollectiveMismatch, DistributedContext, DistributedError
from potluck.collective.task import Collective, Task
from potluck.runtime.call import Purpose
from potluck.runtime.requests import part_of
from support.contexts import in_group, outcomes_in_group

WORLDS = range(1, 6)
THINGS = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(max_size=50) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_can_broadcast_an_object(size: int) -> None:
    """The others need not know what it is."""

    def act(context: DistributedContext) -> list[Any]:
        return [
            context.broadcast_object({"root": root} if context.rank == root else None, root)
            for root in range(size)
        ]

    assert in_group(size, act) == [[{"root": root} for root in range(size)]] * size


@pytest.mark.parametrize("size", WORLDS)
def test_all_objects_are_gathered_in_rank_order(size: int) -> None:
    """Of any length each."""
    everything = [{"rank": rank, "text": "x" * rank * 100} for rank in range(size)]

    def act(context: DistributedContext) -> tuple[Any, Any]:
        own = everything[context.rank]
        return context.all_gather_object(own), context.gather_object(own, size - 1)

    for rank, (gathered, at_root) in enumerate(in_group(size, act)):
        assert gathered == everything
        assert at_root == (everything if rank == size - 1 else None)


@pytest.mark.parametrize("size", WORLDS)
def test_objects_are_scattered(size: int) -> None:
    """Each rank gets its own, of its own length."""
    everything = [("part", rank, b"." * rank) for rank in range(size)]

    def act(context: DistributedContext) -> Any:
        return context.scatter_object(everything if context.rank == 0 else None)

    assert in_group(size, act) == everything


@settings(max_examples=15)
@given(st.lists(THINGS, min_size=2, max_size=2))
def test_any_objects_arrive(things: list[Any]) -> None:
    """Whatever can be written down."""
    assert in_group(2, lambda context: context.all_gather_object(things[context.rank])) == [
        things,
        things,
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda context, bad: context.broadcast_object(bad if context.rank == 1 else None, 1),
        lambda context, bad: context.all_gather_object(bad if context.rank == 1 else 0),
        lambda context, bad: context.gather_object(bad if context.rank == 1 else 0),
        lambda context, bad: context.scatter_object([bad] * 3 if context.rank == 1 else None, 1),
    ],
)
@pytest.mark.parametrize(
    ("bad", "kind"), [(object(), TypeError), ("x" * (20 << 20), ValueError)], ids=["type", "size"]
)
def test_an_object_that_cannot_travel_is_an_error_everywhere(
    call: Any, bad: Any, kind: type[Exception]
) -> None:
    """The rank that has it gets the reason, the others its rank; the group goes on."""

    def act(context: DistributedContext) -> Any:
        try:
            call(context, bad)
        except (DistributedError, TypeError, ValueError) as error:
            return error, context.all_reduce(1)
        return None, 0

    outcomes = in_group(3, act)
    assert [count for _, count in outcomes] == [3, 3, 3]
    assert isinstance(outcomes[1][0], kind)
    for rank in (0, 2):
        error = outcomes[rank][0]
        assert isinstance(error, DistributedError)
        assert error.rank == 1


def test_a_length_is_checked_before_anything_is_allocated() -> None:
    """A rank that allows less than the other sends refuses it."""

    def act(context: DistributedContext) -> Any:
        limit = 10 if context.rank else 1000
        return context.all_gather_object("x" * 100 if context.rank == 0 else "", limit=limit)

    _, refusal = outcomes_in_group_of_two(act)
    assert isinstance(refusal, DistributedError)
    assert "announced an object of 102 bytes; 10 are allowed" in str(refusal)


def outcomes_in_group_of_two(act: Any) -> list[Any]:
    """What two ranks return or raise, where the first may wait in vain for the second."""

    def hurried(context: DistributedContext) -> Any:
        context.timeout = 5.0
        try:
            return act(context)
        finally:
            context.abort("the test is over") if context.rank else None

    return list(outcomes_in_group(2, hurried))


def test_a_hostile_length_is_refused() -> None:
    """Whatever another rank says, no more than the limit is allocated."""

    def act(context: DistributedContext) -> Any:
        if context.rank == 0:
            length = np.array([1 << 62])
            task = Task.whole(Collective.BROADCAST, 2, 1)
            made = part_of(Purpose.BROADCAST_OBJECT, task, length, length)
            context._launch(made, 10, async_op=False)
            return None
        with pytest.raises(DistributedError, match="announced an object of"):
            context.broadcast_object()
        return None

    in_group(2, act)


@pytest.mark.parametrize(
    ("of_objects", "alike"),
    [
        (lambda it: it.broadcast_object("a"), lambda it: it.broadcast(np.array([5]))),
        (lambda it: it.all_gather_object("a"), lambda it: it.all_gather(np.array([5]))),
        (lambda it: it.gather_object("a"), lambda it: it.all_gather_object("a")),
        (lambda it: it.scatter_object("ab"), lambda it: it.broadcast(np.array([5, 6]))),
        (lambda it: it.all_gather_object("a"), lambda it: it.all_gather(np.ones(1), counts="ask")),
        (lambda it: it.gather(np.ones(1), counts="ask"), lambda it: it.all_gather(np.array([5]))),
        (
            lambda it: it.all_to_all(np.ones(2), send_counts=[1, 1]),
            lambda it: it.all_gather(np.array([5, 6])),
        ),
    ],
)
def test_no_other_collective_is_taken_for_a_part_of_one(
    of_objects: Callable[[DistributedContext], Any], alike: Callable[[DistributedContext], Any]
) -> None:
    """Lengths look like anybody's integers: who mixes the two up is told, on both ranks."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            (of_objects if context.rank == 0 else alike)(context)
        context.barrier(timeout=10)
        return str(caught.value)

    first, second = in_group(2, act)
    assert "called" in first
    assert "called" in second


def test_ranks_that_disagree_about_objects_read_what_they_wrote() -> None:
    """Not the collectives that their calls are made of."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            context.barrier() if context.rank else context.gather_object("a", root=1)
        return str(caught.value)

    for text in in_group(2, act):
        assert "called gather_object" in text
        assert "called barrier()" in text


def test_roots_of_objects_are_compared() -> None:
    """And both are named."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            context.gather_object("a", root=context.rank)
        return str(caught.value)

    assert all("with roots" in text for text in in_group(2, act))


@pytest.mark.parametrize(("values", "got"), [(None, "None"), ([1], "1"), ([1] * 3, "3"), (5, "5")])
def test_the_root_of_a_scatter_has_one_for_each(values: Any, got: str) -> None:
    """Too few, too many or none: it is told how many, and the others do not wait for them."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(ValueError, match=f"must pass 2 objects, not {got}"):
                context.scatter_object(values, timeout=10)
        else:
            with pytest.raises(DistributedError, match="Rank 0 has an object that cannot travel"):
                context.scatter_object(timeout=10)
        context.barrier(timeout=10)

    in_group(2, act)
