"""Buckets: small arrays of one type together, large ones by themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from potluck import CollectiveMismatch, DistributedContext, GradientCompressor
from potluck.arrays.base import Access
from potluck.collective.trees import FULL, LARGE, Tree, packed
from support.contexts import in_group, outcomes_in_group

FLOAT, BYTE = np.dtype("float32"), np.dtype("uint8")


def test_a_thousand_small_arrays_are_one_bucket() -> None:
    """Of each type."""
    buckets = packed([(FLOAT, 10)] * 1000 + [(BYTE, 3)] * 1000)
    assert [(each.dtype, len(each.places), each.count) for each in buckets] == [
        (FLOAT, 1000, 10_000),
        (BYTE, 1000, 3000),
    ]


def test_a_full_bucket_takes_no_more() -> None:
    """Then the next one is begun; none is empty."""
    size = LARGE - 1
    buckets = packed([(BYTE, size)] * (2 * FULL // size + 1))
    assert len(buckets) == 3
    assert all(0 < each.count <= FULL for each in buckets)


ARRAYS = some.lists(
    some.tuples(some.sampled_from([FLOAT, BYTE]), some.integers(0, LARGE + LARGE // 2)), max_size=60
)


@given(ARRAYS)
def test_every_array_is_in_one_bucket_of_its_type(arrays: list[tuple[np.dtype, int]]) -> None:
    """In order; a large one is alone."""
    buckets = packed(arrays)
    assert sorted(place for each in buckets for place in each.places) == list(range(len(arrays)))
    for bucket in buckets:
        assert list(bucket.places) == sorted(bucket.places)
        assert {arrays[place][0] for place in bucket.places} == {bucket.dtype}
        assert bucket.count == sum(arrays[place][1] for place in bucket.places)
        is_large = any(arrays[place][1] * bucket.dtype.itemsize >= LARGE for place in bucket.places)
        assert not is_large or len(bucket.places) == 1


# --------------------------------------------------------------------------------------------------
# Collectives on trees: dicts, lists and tuples of arrays of several libraries, in one call.


class Pair(NamedTuple):
    """As libraries of optimisers use them."""

    mean: Any
    scale: Any


def tree_of(rank: int) -> dict[str, Any]:
    """Gradients, statistics, and what is no number; some arrays are large."""
    return {
        "weight": torch.full((3, 2), 1.0 + rank),
        "half": torch.full((5,), 2.0, dtype=torch.bfloat16),
        "layers": [np.arange(4.0) + rank, Pair(np.full(2, rank, np.float32), None)],
        "large": np.full(100_000, 1.0 + rank),
        "loss": 0.5 + rank,
        "name": "resnet",
        "nothing": None,
    }


def test_a_tree_is_reduced_in_place_and_numbers_come_back_anew() -> None:
    """Arrays are the ones that were given; containers and other values stay as they are."""

    def action(context: DistributedContext) -> None:
        tree = tree_of(context.rank)
        result = context.all_reduce(tree)
        assert result["weight"] is tree["weight"]
        assert tree["weight"].tolist() == [[6.0, 6.0]] * 3
        assert result["half"].tolist() == [6.0] * 5
        assert result["half"].dtype == torch.bfloat16
        assert tree["layers"][0].tolist() == [3.0, 6.0, 9.0, 12.0]
        assert isinstance(result["layers"][1], Pair)
        assert result["layers"][1].mean.tolist() == [3.0, 3.0]
        assert (tree["large"] == 6.0).all()
        assert (result["loss"], tree["loss"]) == (4.5, 0.5 + context.rank)
        assert (result["name"], result["nothing"]) == ("resnet", None)

    in_group(3, action)


def test_the_same_tree_comes_back_where_all_can_be_changed() -> None:
    """So `cluster.all_reduce(gradients)` alone will do."""

    def action(context: DistributedContext) -> None:
        gradients = [torch.ones(2) * context.rank, (np.ones(3),)]
        assert context.all_reduce(gradients, "mean") is gradients
        assert gradients[0].tolist() == [0.5, 0.5]  # type: ignore[attr-defined]
        empty: dict[str, Any] = {}
        assert context.all_reduce(empty) is empty

    in_group(2, action)


def test_a_thousand_small_arrays_cost_a_few_operations() -> None:
    """One to compare the trees, and one for each type of number."""

    def action(context: DistributedContext) -> int:
        tree = [np.full(3, float(n)) for n in range(1000)] + [np.ones(2, np.int32)] * 3
        assert len(Tree(tree, Access.UPDATE).buckets) == 2
        context.all_reduce(tree)
        assert all((each == 2.0 * n).all() for n, each in enumerate(tree[:1000]))
        snapshot = context.metrics_snapshot()
        assert snapshot is not None
        assert snapshot.all_reduce.bytes_processed == 1000 * 3 * 8 + 3 * 2 * 4
        return snapshot.all_reduce.completed

    assert in_group(2, action) == [1, 1]


def test_arrays_that_share_memory_are_reduced_once() -> None:
    """Tied weights, and views of one another, small and large."""

    def action(context: DistributedContext) -> None:
        small, large = np.full(4, 1.0), np.full(100_000, 1.0)
        tree = {"a": small, "b": small, "c": large, "d": large, "e": large[10:20]}
        assert context.all_reduce(tree) is tree
        assert (small == 2.0).all()
        assert (large == 2.0).all()

    in_group(2, action)


def test_a_broadcast_brings_the_tree_of_one_rank_to_all() -> None:
    """Its own arrays may be read-only; kinds of containers are kept."""

    def action(context: DistributedContext) -> None:
        tree: Any = defaultdict(list, a=np.full(3, float(context.rank)), b=context.rank)
        if context.rank == 1:
            tree["a"].flags.writeable = False
        result = context.broadcast(tree, root=1)
        assert result["a"].tolist() == [1.0, 1.0, 1.0]
        assert result["b"] == 1
        assert type(result) is defaultdict
        assert result["new"] == []

    in_group(3, action)


def test_trees_that_were_filled_in_another_order_are_the_same() -> None:
    """Names count, not the order of a dict."""

    def action(context: DistributedContext) -> None:
        tree = {"a": np.full(2, 1.0), "b": np.full(3, 2.0)}
        if context.rank:
            tree = dict(reversed(tree.items()))
        context.all_reduce(tree)
        assert (tree["a"].tolist(), tree["b"].tolist()) == ([2.0, 2.0], [4.0, 4.0, 4.0])

    in_group(2, action)


@pytest.mark.parametrize(
    ("odd", "here", "there"),
    [
        ({"a": np.ones(2), "b": np.ones(4)}, "b: float64[3]", "b: float64[4]"),
        ({"a": np.ones(2, np.int8), "b": np.ones(3)}, "a: float64[2]", "a: int8[2]"),
        ({"a": np.ones(2)}, "b: float64[3]", "no b"),
        ({"a": np.ones(2), "b": np.ones(3), "c": 1.5}, "no c", "c: float64[]"),
    ],
)
def test_trees_that_differ_are_named_on_both_sides(odd: Any, here: str, there: str) -> None:
    """On every rank, and the group goes on."""

    def action(context: DistributedContext) -> str:
        tree = {"a": np.ones(2), "b": np.ones(3)} if context.rank < 2 else dict(odd)
        with pytest.raises(CollectiveMismatch) as caught:
            context.all_reduce(tree)
        assert context.all_reduce(1) == 3
        return str(caught.value)

    for text in in_group(3, action):
        assert f"rank 0 has {here}, rank 2 (" in text
        assert f") has {there}." in text


def test_a_tree_is_not_taken_for_an_array() -> None:
    """Who calls one while others call the other hears what both called."""

    def action(context: DistributedContext) -> None:
        context.all_reduce([np.ones(2)] if context.rank else np.ones(2))

    for outcome in outcomes_in_group(2, action):
        assert isinstance(outcome, CollectiveMismatch)
        assert "all_reduce of a tree" in str(outcome)
        assert "all_reduce(sum, float64, 2 elements)" in str(outcome)


def test_what_cannot_be_reduced_is_refused_before_anything_moves() -> None:
    """With the place in the tree; nobody else is needed for that."""

    def action(context: DistributedContext) -> None:
        if context.rank == 0:
            ones = np.ones(2)
            with pytest.raises(Exception, match="mean is not defined for int64") as caught:
                context.all_reduce({"good": ones, "bad": [3]}, "mean")
            assert caught.value.__notes__ == ["It is at 'bad.0' in the tree."]
            with pytest.raises(TypeError, match="masked") as masked:
                context.all_reduce([np.ma.masked_array([1.0])])
            assert masked.value.__notes__ == ["It is at '0' in the tree."]
            with pytest.raises(TypeError, match="out= is for a single array"):
                context.all_reduce([ones], out=[ones])
            assert ones.tolist() == [1.0, 1.0]
        context.barrier()

    in_group(2, action)


def test_trees_may_be_compressed_and_started_like_arrays() -> None:
    """Whole numbers in them travel as they are; what is left behind is remembered by bucket."""

    def action(context: DistributedContext) -> None:
        compressor = GradientCompressor("int8")
        tree = {
            "w": np.full(70_000, 0.5, np.float32),
            "b": np.ones(9, np.float32),
            "n": np.int64(2),
        }
        work = context.all_reduce(tree, compression=compressor, async_op=True)
        result: Any = work.wait(20)
        assert np.allclose(result["w"], 1.0, atol=0.02)
        assert np.allclose(result["b"], 2.0, atol=0.05)
        assert result["n"] == 4
        assert sorted(compressor.state_dict()["residuals"]) == ["/0", "/2"]

    in_group(2, action)
