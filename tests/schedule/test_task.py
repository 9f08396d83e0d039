"""CollectiveConfig: the caller's say in how a group works."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import LinkMatrix
from potluck.collective.program import PlanCache
from potluck.errors import InvalidRank, InvalidWorldSize
from potluck.schedule import planner
from potluck.schedule.planner import CollectiveConfig
from potluck.schedule.task import (
    AlgorithmSettings,
    AllReduceStrategy,
    BroadcastStrategy,
    Collective,
    ReduceStrategy,
    Span,
    Strategy,
    Task,
    cut,
    facing,
    split,
)
from support.groups import sum_call


def test_left_alone_everything_is_automatic() -> None:
    """One device, no nodes, measured links, as many levels as pay, the backend's limit."""
    config = CollectiveConfig().validate()
    assert config == CollectiveConfig(
        num_devices=1,
        local_all_reduce=AllReduceStrategy.AUTO,
        local_reduce=ReduceStrategy.AUTO,
        local_broadcast=BroadcastStrategy.AUTO,
        num_nodes=None,
        global_all_reduce=None,
        global_reduce=None,
        global_broadcast=None,
        tree_threshold_bytes=None,
        tree_arity=2,
        two_levels=True,
        measure_links=True,
        timeout=None,
    )


def test_presets_say_where_the_ranks_are() -> None:
    """On one machine, or on several."""
    assert CollectiveConfig.single_node(4) == CollectiveConfig(num_devices=4)
    several = CollectiveConfig.multi_node(3, num_devices=2)
    assert (several.num_nodes, several.num_devices) == (3, 2)
    assert several.global_all_reduce == AllReduceStrategy.AUTO


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_devices": 0}, InvalidWorldSize),
        ({"num_nodes": 0}, InvalidWorldSize),
        ({"two_levels": 1}, TypeError),
        ({"measure_links": None}, TypeError),
        (
            {
                "two_levels": False,
                "local_all_reduce": AllReduceStrategy.RING,
                "global_all_reduce": AllReduceStrategy.AUTO,
            },
            ValueError,
        ),
        (
            {
                "local_all_reduce": AllReduceStrategy.DOUBLING,
                "global_all_reduce": AllReduceStrategy.RING,
            },
            ValueError,
        ),
        (
            {
                "local_reduce": ReduceStrategy.DIRECT,
                "global_reduce": ReduceStrategy.RING,
            },
            ValueError,
        ),
        (
            {
                "local_reduce": ReduceStrategy.TREE,
                "global_reduce": ReduceStrategy.DIRECT,
            },
            ValueError,
        ),
        (
            {
                "local_all_reduce": AllReduceStrategy.two_level(),
                "global_all_reduce": AllReduceStrategy.RING,
            },
            ValueError,
        ),
        ({"tree_threshold_bytes": -1}, ValueError),
        ({"tree_arity": 0}, ValueError),
        ({"timeout": 0.0}, ValueError),
        ({"timeout": float("nan")}, ValueError),
        ({"timeout": "20"}, TypeError),
        ({"num_devices": 1.5}, TypeError),
        ({"num_nodes": True}, TypeError),
        ({"local_all_reduce": "ring"}, TypeError),
        ({"local_reduce": None}, TypeError),
        ({"local_all_reduce": BroadcastStrategy.AUTO}, TypeError),
        ({"num_nodes": 2, "global_broadcast": "tree"}, TypeError),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    """When it is written down, with the field and its value."""
    with pytest.raises(error, match=r"World size|must be"):
        CollectiveConfig(**change)


@pytest.mark.parametrize("timeout", [None, 1, 0.5])
def test_a_timeout_is_a_number_of_seconds_or_none(timeout: float | None) -> None:
    """Whole or not."""
    assert CollectiveConfig(timeout=timeout).timeout == timeout


def links(machines: tuple[int, ...] = (), size: int = 6) -> LinkMatrix:
    """Equal cables of 1 Gbit/s, with short ways within machines."""
    known = LinkMatrix.uniform(size, rate=125_000_000, latency=100_000)
    if not machines:
        return known
    near = [
        [0 if a == b else 20_000 if machines[a] == machines[b] else 100_000 for b in range(size)]
        for a in range(size)
    ]
    return replace(known, latency=tuple(map(tuple, near)), machines=machines)


@pytest.mark.parametrize("machines", [(), (0, 0, 0, 3, 3, 3), (0, 0, 0, 0, 4, 4), (0,) * 6])
@pytest.mark.parametrize("nbytes", [4, 4096, 1 << 17, 1 << 20, 1 << 24])
def test_the_strategy_selected_is_the_one_that_runs(nbytes: int, machines: tuple[int, ...]) -> None:
    """The plan of a group with this configuration, on these links, and no opinion beside it."""
    known = links(machines)
    for config in (
        CollectiveConfig(),
        CollectiveConfig(two_levels=False),
        CollectiveConfig(tree_threshold_bytes=1 << 20, tree_arity=3),
        CollectiveConfig(
            local_all_reduce=AllReduceStrategy.TREE, global_all_reduce=AllReduceStrategy.RING
        ),
    ):
        call = sum_call(np.zeros(nbytes // 4, np.float32), 6)
        plans = PlanCache(0, 6, config)
        plans.learn(known, call, 0)
        chosen = config.select_all_reduce(nbytes, 6, known)
        assert chosen == plans.plan(call).strategy
        assert AllReduceStrategy.named(str(chosen)) == chosen


def test_what_the_caller_asked_for_comes_first() -> None:
    """Locally within a machine, globally among machines, and one of them if there is one level."""
    config = replace(
        CollectiveConfig.multi_node(2, num_devices=4),
        local_all_reduce=AllReduceStrategy.CENTRALIZED,
        global_all_reduce=AllReduceStrategy.RING,
    )
    assert str(config.select_all_reduce(4, world_size=8)) == "centralized/ring"
    one = replace(config, num_nodes=1)
    assert one.select_all_reduce(4, world_size=4) == AllReduceStrategy.CENTRALIZED
    lone = replace(config, num_nodes=4, num_devices=1)
    assert lone.select_all_reduce(4, world_size=4) == AllReduceStrategy.RING
    local = replace(CollectiveConfig(), local_all_reduce=AllReduceStrategy.RING)
    assert local.select_all_reduce(4, 6, links((0, 0, 0, 3, 3, 3))) == AllReduceStrategy.RING


def test_two_levels_can_be_switched_off_or_pinned() -> None:
    """With one setting each; what is left to choose from is flat, or follows the wish."""
    known = links((0, 0, 0, 3, 3, 3))
    size = 1 << 26
    off = CollectiveConfig(two_levels=False).select_all_reduce(size, 6, known)
    assert off.among is None
    pinned = AllReduceStrategy.named("centralized/doubling")
    config = CollectiveConfig(local_all_reduce=pinned)
    assert config.select_all_reduce(size, 6, known) == pinned
    assert config.select_all_reduce(size, 6, links((0,) * 6)) == AllReduceStrategy.CENTRALIZED
    assert config.select_all_reduce(size, 6, links()) == AllReduceStrategy.DOUBLING


def test_short_vectors_use_a_tree_if_that_is_wanted() -> None:
    """Below the threshold, with the arity of the configuration; a strategy by name comes first."""
    config = CollectiveConfig(tree_threshold_bytes=4096, tree_arity=3)
    assert config.select_all_reduce(4092, 6) == AllReduceStrategy.tree(3)
    assert config.select_all_reduce(4096, 6) == CollectiveConfig().select_all_reduce(4096, 6)
    ring = replace(config, local_all_reduce=AllReduceStrategy.RING)
    assert ring.select_all_reduce(4, 6) == AllReduceStrategy.RING


def test_machines_that_are_written_down_count_for_the_whole_group_only() -> None:
    """A subgroup, or a cluster that lost a machine, finds its own; a fixed group is refused."""
    config = CollectiveConfig.multi_node(2, num_devices=3)
    assert config.machines(6) == (0, 0, 0, 3, 3, 3)
    assert config.machines(5) == CollectiveConfig().machines(1) == ()
    config.check_world_size(6)
    CollectiveConfig().check_world_size(5)
    with pytest.raises(InvalidWorldSize, match="2 nodes with 3 ranks each, 6 in all"):
        config.check_world_size(5)


def test_a_tree_without_arity_takes_that_of_the_configuration() -> None:
    """One that has its own keeps it."""
    config = CollectiveConfig(local_all_reduce=AllReduceStrategy.TREE, tree_arity=5)
    assert config.select_all_reduce(1 << 30, 4) == AllReduceStrategy.tree(5)
    own = replace(config, local_all_reduce=AllReduceStrategy.tree(3))
    assert own.select_all_reduce(1 << 30, 4) == AllReduceStrategy.tree(3)


# --------------------------------------------------------------------------------------------------
# Strategies name an algorithm, or leave the choice to the planner.

KINDS = {
    AllReduceStrategy: Collective.ALL_REDUCE,
    ReduceStrategy: Collective.REDUCE,
    BroadcastStrategy: Collective.BROADCAST,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_strategy_is_an_algorithm_that_offers_it(kind: type[Strategy]) -> None:
    """A new algorithm need not have a strategy of its own: the planner finds it."""
    named = [each for each in vars(kind).values() if isinstance(each, kind) and not each.is_auto]
    offering = {each.name for each in planner.offering(KINDS[kind])}
    assert len(named) > 3
    assert {each.algorithm for each in named} <= offering


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_a_strategy_can_be_written(kind: type[Strategy]) -> None:
    """In any case of letters; a tree with its arity."""
    assert kind.named("Auto").is_auto
    assert kind.named("ring").algorithm == "ring"
    assert kind.named(" CENTRALIZED ").algorithm == "central"
    assert kind.named("tree").arity is None
    assert kind.named("tree:5") == kind.tree(5)


def test_two_levels_can_be_written() -> None:
    """Within a machine before the slash, among machines behind it; what is open stays open."""
    both = AllReduceStrategy.two_level(AllReduceStrategy.tree(4), AllReduceStrategy.RING)
    assert AllReduceStrategy.named("tree:4/ring") == both
    assert (str(both), str(AllReduceStrategy.named("auto/auto"))) == ("tree:4/ring", "auto/auto")
    assert repr(both) == f"AllReduceStrategy.two_level({both.tree(4)!r}, AllReduceStrategy.RING)"
    assert not AllReduceStrategy.two_level().is_auto
    with pytest.raises(ValueError, match="not of two levels again"):
        AllReduceStrategy.two_level(both)


@pytest.mark.parametrize(
    "text",
    [
        "a/b",
        "ring/",
        "/ring",
        "",
        "quick",
        "ring:2",
        "tree:",
        "tree:x",
        "named",
        "tree:-1",
    ],
)
def test_what_is_no_strategy_is_refused(text: str) -> None:
    """The error lists those that are."""
    with pytest.raises(ValueError, match="auto, centralized, direct, doubling, ring, tree"):
        AllReduceStrategy.named(text)


def test_a_tree_has_branches() -> None:
    """One makes a chain, none makes nothing."""
    assert AllReduceStrategy.tree(1).arity == 1
    with pytest.raises(ValueError, match="at least one child"):
        AllReduceStrategy.tree(0)


def test_strategies_compare_by_what_they_mean() -> None:
    """And print as the expression that makes them."""
    assert AllReduceStrategy("ring") == AllReduceStrategy.RING
    assert len({AllReduceStrategy.RING, ReduceStrategy.RING}) == 2
    assert len({AllReduceStrategy.tree(2), AllReduceStrategy.tree(2)}) == 1
    assert repr(AllReduceStrategy.DOUBLING) == "AllReduceStrategy.DOUBLING"
    assert repr(ReduceStrategy.tree(3)) == "ReduceStrategy.tree(3)"
    assert repr(ReduceStrategy("own")) == "ReduceStrategy('own')"


# --------------------------------------------------------------------------------------------------
# Tasks say what lies where; layouts are the knobs.

counts = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@given(st.integers(0, 1000), st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1))
def test_a_split_covers_the_span_in_proportion(length: int, start: int, shares: list[int]) -> None:
    """Nothing is lost or counted twice; no part is off by more than one; zero gets nothing."""
    if not any(shares):
        shares[0] = 1
    spans = split(Span(start, start + length), shares)
    assert [span.start for span in spans] == [start, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == start + length
    for span, share in zip(spans, shares, strict=True):
        assert abs(span.length - length * share / sum(shares)) < 1
        assert share or not span.length


@given(st.integers(0, 1000), st.integers(1, 40))
def test_a_cut_covers_the_span_in_equal_parts(length: int, parts: int) -> None:
    """All but the last that is not empty have the same length."""
    spans = cut(Span(3, 3 + length), parts)
    assert len(spans) == parts
    assert spans[0].start == 3
    assert spans[-1].stop == 3 + length
    lengths = [span.length for span in spans if span.length]
    assert len(set(lengths[:-1])) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(counts)
def test_blocks_lie_side_by_side(sizes: list[int]) -> None:
    """Each rank's block begins where the one before ends, however uneven they are."""
    task = Task.blocks(Collective.ALL_GATHER, sizes)
    assert task.spans() == [task.block(rank) for rank in range(len(sizes))]
    assert [span.length for span in task.spans()] == sizes
    assert task.output(0) == Span(0, sum(sizes))


def test_each_collective_says_what_a_rank_brings_and_gets() -> None:
    """Coordinates of the input and the output, for a root and for another rank."""
    whole, mine, nothing = Span(0, 6), Span(2, 5), Span(0, 0)
    table = {
        Collective.ALL_REDUCE: (whole, whole, whole, whole),
        Collective.REDUCE: (whole, whole, whole, nothing),
        Collective.BROADCAST: (whole, whole, nothing, whole),
        Collective.ALL_GATHER: (Span(0, 2), whole, mine, whole),
        Collective.REDUCE_SCATTER: (whole, Span(0, 2), whole, mine),
        Collective.GATHER: (Span(0, 2), whole, mine, nothing),
        Collective.SCATTER: (whole, Span(0, 2), nothing, mine),
        Collective.BARRIER: (whole, whole, whole, whole),
    }
    for collective, expected in table.items():
        if collective.has_blocks:
            task = Task.blocks(collective, (2, 3, 1))
        else:
            task = Task.whole(collective, 3, 6)
        found = (task.input(0), task.output(0), task.input(1), task.output(1))
        assert found == expected
        assert task.in_place


def test_an_exchange_has_coordinates_for_each_rank() -> None:
    """What a rank keeps for itself lies at the same coordinates in input and output."""
    task = Task.exchange([[1, 2], [3, 4]])
    assert not task.in_place
    assert (task.sends(1), task.receives(1)) == ((3, 4), (2, 4))
    assert (task.input(1), task.output(1)) == (Span(0, 7), Span(1, 7))
    assert (task.input(0), task.output(0)) == facing(0, (1, 2), (1, 3))


@given(st.integers(1, 6), st.data())
def test_both_sides_of_a_rank_meet_where_it_faces_itself(size: int, data: st.DataObject) -> None:
    """No coordinate is negative."""
    rank = data.draw(st.integers(0, size - 1))
    sends = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    receives = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    brings, gets = facing(rank, sends, receives)
    assert brings.start + sum(sends[:rank]) == gets.start + sum(receives[:rank])
    assert min(brings.start, gets.start) == 0
    assert (brings.length, gets.length) == (sum(sends), sum(receives))


def test_what_a_collective_is() -> None:
    """Which combine values, which have a root, which have blocks."""
    assert {each for each in Collective if each.reduces} == {
        Collective.ALL_REDUCE,
        Collective.REDUCE,
        Collective.REDUCE_SCATTER,
        Collective.BARRIER,
    }
    assert sum(each.has_root for each in Collective) == 4
    assert sum(each.has_blocks for each in Collective) == 4


def test_an_impossible_task_is_refused() -> None:
    """No ranks, a root outside, too few counts, negative counts."""
    with pytest.raises(InvalidWorldSize):
        Task.whole(Collective.BARRIER, 0, 1)
    with pytest.raises(InvalidRank):
        Task.whole(Collective.REDUCE, 2, 1, root=2)
    with pytest.raises(ValueError, match="all_gather among 3 ranks needs 3 counts"):
        Task(Collective.ALL_GATHER, 3, (1, 2))
    with pytest.raises(ValueError, match="needs 4 counts"):
        Task.exchange([[1, 2], [3]])
    with pytest.raises(ValueError, match="zero or more"):
        Task.whole(Collective.ALL_REDUCE, 2, -1)


@pytest.mark.parametrize(
    ("order", "shares", "arity", "piece"),
    [
        ((0, 0), (1, 1), 2, 1),
        ((0, 2), (1, 1), 2, 1),
        ((0, 1), (1,), 2, 1),
        ((0, 1), (1, -1), 2, 1),
        ((0, 1), (0, 0), 2, 1),
        ((), (), 2, 1),
        ((0, 1), (1, 1), 0, 1),
        ((0, 1), (1, 1), 2, 0),
    ],
)
def test_an_impossible_layout_is_refused(
    order: tuple[int, ...], shares: tuple[int, ...], arity: int, piece: int
) -> None:
    """An order that is none, shares of nobody, trees without branches, empty pieces."""
    with pytest.raises(ValueError, match=r"order names|shares of zero|at least 1"):
        AlgorithmSettings(order, shares, arity, piece)


def test_an_order_can_begin_at_a_root() -> None:
    """For a tree the root moves to the front, a ring is entered there."""
    layout = AlgorithmSettings((2, 0, 3, 1), (1,) * 4)
    assert layout.headed_by(3) == (3, 2, 0, 1)
    assert layout.turned_to(3) == (3, 1, 2, 0)
