"""Small objects: broadcast, all-gather, gather and scatter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import DistributedContext, DistributedError
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
            context.broadcast(np.array([1 << 62]))
            return None
        with pytest.raises(DistributedError, match="announced an object of"):
            context.broadcast_object()
        return None

    in_group(2, act)


@pytest.mark.parametrize("values", [None, [1]])
def test_the_root_of_a_scatter_has_one_for_each(values: Any) -> None:
    """Too few or none is refused."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(ValueError, match="must pass 2 objects"):
                context.scatter_object(values)
        context.barrier()

    in_group(2, act)
