"""Strategies name an algorithm, or leave the choice to the planner."""

import pytest

from potluck.collective import registry
from potluck.collective.strategies import (
    AllReduceStrategy,
    BroadcastStrategy,
    ReduceStrategy,
    Strategy,
)
from potluck.collective.task import Collective

KINDS = {
    AllReduceStrategy: Collective.ALL_REDUCE,
    ReduceStrategy: Collective.REDUCE,
    BroadcastStrategy: Collective.BROADCAST,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_strategy_is_an_algorithm_that_offers_it(kind: type[Strategy]) -> None:
    """A new algorithm need not have a strategy of its own: the planner finds it."""
    named = [each for each in vars(kind).values() if isinstance(each, kind) and not each.is_auto]
    offering = {each.name for each in registry.offering(KINDS[kind])}
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


@pytest.mark.parametrize("text", ["", "quick", "ring:2", "tree:", "tree:x", "named", "tree:-1"])
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
