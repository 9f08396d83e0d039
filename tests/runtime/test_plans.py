"""Plans of a group: made alike by all ranks, kept, and changed when the links do."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.collective import registry
from potluck.collective.config import CollectiveConfig
from potluck.collective.strategies import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
from potluck.collective.task import Collective, Task
from potluck.runtime.call import Call, Purpose
from potluck.runtime.plans import KEPT, Plans, confirmation, needs_confirming
from potluck.vocabulary import LinkMatrix
from support.groups import sum_call

FAST, SLOW = 125_000_000, 25_000_000


def links(*rates: int) -> LinkMatrix:
    """Links with these rates, both ways."""
    return LinkMatrix(rates, rates, LinkMatrix.uniform(len(rates), rate=1, latency=9).latency)


def large(size: int = 4) -> Call:
    """A sum of 16 MiB."""
    return sum_call(np.empty(4 << 20, "f4"), size)


def test_all_ranks_make_the_same_plan() -> None:
    """From the same links, so that their programs fit together."""
    plans = [Plans(rank, 4, None) for rank in range(4)]
    for each in plans:
        each.learn(links(FAST, FAST, FAST, SLOW), large(), 0)
    made = [each.compiled(large()) for each in plans]
    assert {(one.plan, one.packed) for one in made} == {(made[0].plan, made[0].packed)}
    assert made[0].plan.algorithm == "direct"
    assert made[0].plan.shares == (1, 1, 1, 0)
    assert made[0].nbytes == 16 << 20
    assert made[3].sent < made[0].sent


def test_what_was_compiled_is_kept() -> None:
    """For calls that look the same; the oldest are dropped in time."""
    plans = Plans(0, 2, None)
    first = plans.compiled(sum_call(np.zeros(3), 2))
    assert plans.compiled(sum_call(np.ones(3), 2)) is first
    assert plans.compiled(sum_call(np.zeros(3, "f4"), 2)) is not first
    for count in range(KEPT):
        plans.compiled(sum_call(np.zeros(count + 10), 2))
    assert plans.compiled(sum_call(np.zeros(3), 2)) is not first


def test_a_call_is_not_taken_for_one_that_is_gone() -> None:
    """Though its parts may stand where those of an earlier one stood in memory."""
    plans = Plans(0, 2, None)
    for count in range(1, 3 * KEPT):
        made = plans.compiled(sum_call(np.zeros(count), 2))
        assert made.nbytes == 8 * count
        assert made.fingerprint.elements == count


def test_what_is_part_of_another_call_has_a_fingerprint_of_its_own() -> None:
    """Though it is done in the same way."""
    plans, array = Plans(0, 2, None), np.zeros(3)
    task = Task.whole(Collective.BROADCAST, 2, 3)
    own = plans.compiled(Call(task, array, array))
    part = plans.compiled(Call(task, array, array, purpose=Purpose.BROADCAST_TREE))
    assert own.plan == part.plan
    assert own.packed != part.packed


@pytest.mark.parametrize("size", [2, 5, 9, 33])
@pytest.mark.parametrize(
    ("collective", "purpose"),
    [
        (Collective.BROADCAST, Purpose.BROADCAST_OBJECT),
        (Collective.ALL_GATHER, Purpose.ALL_GATHER_OBJECT),
        (Collective.ALL_GATHER, Purpose.TOP_K),
        (Collective.ALL_GATHER, Purpose.AUTO_COMPRESSION),
        (Collective.ALL_GATHER, Purpose.RECORDS),
    ],
)
def test_what_a_rank_is_blamed_for_comes_straight_from_it(
    size: int, collective: Collective, purpose: Purpose
) -> None:
    """Whatever the configuration prefers: no rank passes on what another one said."""
    counts = [1000] * size
    is_gathering = collective is Collective.ALL_GATHER
    task = Task.blocks(collective, counts) if is_gathering else Task.whole(collective, size, 1000)
    array = np.zeros(task.total, np.uint8)
    config = CollectiveConfig(local_broadcast=BroadcastStrategy.TREE)
    for rank in range(size):
        call = Call(task, array[:1000], array, purpose=purpose)
        plan = Plans(rank, size, config).plan(call)
        program = registry.schedule(plan.algorithm, task, plan.layout(1)).program(rank)
        for step in program.steps:
            owner = step.start // 1000 if is_gathering else 0
            assert step.sources in {(), (owner,)}
            assert not (step.sources and step.to)


def test_a_plan_changes_only_for_a_real_gain() -> None:
    """And not before it has been in use for a while."""
    plans = Plans(0, 4, None)
    plans.learn(links(FAST, FAST, FAST, FAST), large(), 0)
    plans.learn(links(FAST, FAST, FAST, FAST * 9 // 10), large(), 1000)
    assert set(plans.links.up) == {FAST}
    plans.learn(links(FAST, FAST, FAST, SLOW), large(), 10)
    assert set(plans.links.up) == {FAST}
    plans.learn(links(FAST, FAST, FAST, SLOW), large(), 1000)
    assert plans.links.up[3] == SLOW
    plans.forget()
    assert set(plans.links.up) == {0}
    assert not plans.is_surveyed


def test_the_call_decides_before_the_configuration() -> None:
    """And the configuration before the planner."""
    config = CollectiveConfig(
        local_all_reduce=AllReduceStrategy.RING,
        local_reduce=ReduceStrategy.tree(3),
        local_broadcast=BroadcastStrategy.CENTRALIZED,
        num_devices=4,
    )
    plans = Plans(0, 4, config)
    assert plans.plan(large()).algorithm == "ring"
    assert plans.plan(sum_call(np.zeros(9), 4, "tree")).algorithm == "tree"
    array = np.zeros(9)
    reduce = Call(Task.whole(Collective.REDUCE, 4, 9), array, array, large().reducer)
    assert (plans.plan(reduce).algorithm, plans.plan(reduce).arity) == ("tree", 3)
    broadcast = Call(Task.whole(Collective.BROADCAST, 4, 9), array, array)
    assert plans.plan(broadcast).algorithm == "central"
    gather = Call(Task.blocks(Collective.ALL_GATHER, (9,) * 4), array, np.zeros(36))
    assert plans.plan(gather).algorithm in {"direct", "doubling", "ring"}


def test_among_nodes_the_global_strategies_hold() -> None:
    """Where there are more ranks than one node has."""
    config = CollectiveConfig(
        num_nodes=2,
        num_devices=2,
        local_all_reduce=AllReduceStrategy.RING,
        global_all_reduce=AllReduceStrategy.tree(2),
    )
    assert Plans(0, 4, config).plan(large()).algorithm == "tree"
    assert Plans(0, 2, config).plan(large(2)).algorithm == "ring"


@pytest.mark.parametrize("collective", Collective)
def test_who_might_return_early_is_confirmed(collective: Collective) -> None:
    """Those with a root, and those that move nothing: all others hear from everybody anyway."""
    blocks = collective.has_blocks
    task = Task.blocks(collective, (1, 1)) if blocks else None
    if collective is Collective.ALL_TO_ALL:
        task = Task.exchange([[1, 1], [1, 1]])
    task = task or Task.whole(collective, 2, 1)
    assert needs_confirming(task) is collective.has_root
    assert needs_confirming(Task.whole(Collective.ALL_REDUCE, 2, 0))
    assert not needs_confirming(Task.whole(Collective.BROADCAST, 1, 1))


def test_a_confirmation_hears_of_everybody() -> None:
    """In as many exchanges as a barrier needs."""
    units = confirmation(0, 8)
    assert sorted(units.incoming) == [4, 6, 7]
    assert sorted(units.outgoing) == [1, 2, 4]
