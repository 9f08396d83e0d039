"""CollectiveConfig: the caller's say in how a group works."""

from dataclasses import replace
from typing import Any

import pytest

from potluck.collective.config import CollectiveConfig
from potluck.collective.strategies import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
from potluck.errors import InvalidWorldSize


def test_left_alone_everything_is_automatic() -> None:
    """One device, no nodes, a tree of two below a mebibyte, the backend's limit."""
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
        tree_threshold_bytes=1 << 20,
        tree_arity=2,
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
        ({"global_reduce": ReduceStrategy.AUTO}, ValueError),
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
    with pytest.raises(error, match=r"World size|needs num_nodes|must be"):
        CollectiveConfig(**change)


@pytest.mark.parametrize("timeout", [None, 1, 0.5])
def test_a_timeout_is_a_number_of_seconds_or_none(timeout: float | None) -> None:
    """Whole or not."""
    assert CollectiveConfig(timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    ("nbytes", "world_size", "chosen"),
    [
        (4096, 4, AllReduceStrategy.tree(2)),
        ((1 << 20) - 1, 2, AllReduceStrategy.tree(2)),
        (1 << 20, 2, AllReduceStrategy.DIRECT),
        (1 << 24, 16, AllReduceStrategy.DIRECT),
        (1 << 24, 17, AllReduceStrategy.RING),
    ],
)
def test_without_measurements_size_decides(
    nbytes: int, world_size: int, chosen: AllReduceStrategy
) -> None:
    """Short vectors along a tree, long ones straight, or round the ring if there are many."""
    assert CollectiveConfig().select_all_reduce(nbytes, world_size) == chosen


def test_what_the_caller_asked_for_comes_first() -> None:
    """Locally within a node, globally beyond it."""
    config = replace(
        CollectiveConfig.multi_node(2, num_devices=4),
        local_all_reduce=AllReduceStrategy.CENTRALIZED,
        global_all_reduce=AllReduceStrategy.RING,
    )
    assert config.select_all_reduce(4, world_size=4) == AllReduceStrategy.CENTRALIZED
    assert config.select_all_reduce(4, world_size=8) == AllReduceStrategy.RING
    local = replace(CollectiveConfig(), local_all_reduce=AllReduceStrategy.RING)
    assert local.select_all_reduce(4, world_size=8) == AllReduceStrategy.RING


def test_a_tree_without_arity_takes_that_of_the_configuration() -> None:
    """One that has its own keeps it."""
    config = CollectiveConfig(local_all_reduce=AllReduceStrategy.TREE, tree_arity=5)
    assert config.select_all_reduce(1 << 30, 4) == AllReduceStrategy.tree(5)
    own = replace(config, local_all_reduce=AllReduceStrategy.tree(3))
    assert own.select_all_reduce(1 << 30, 4) == AllReduceStrategy.tree(3)
