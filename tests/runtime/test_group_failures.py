"""Groups when something goes wrong: every rank hears the same, nobody hangs, and it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck.backend.simulated import SimulatedBackend, SimulatedFaults
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Task
from potluck.errors import Aborted, CollectiveMismatch, DistributedError, PeerLost, Timeout
from potluck.runtime.call import Call
from potluck.runtime.group import Group
from potluck.runtime.work import Work
from support.groups import LIMIT, in_world, on_backends, sum_call
from support.threads import Background, eventually

SHORT, LONG = 5, 300_000
"""Elements of an operation that is done from top to bottom, and of one that is pumped."""


def all_reduce(
    count: int, dtype: str = "f4", op: ReduceOp = ReduceOp.SUM, strategy: str | None = None
) -> Callable[[Group], None]:
    """One all-reduce."""

    def act(group: Group) -> None:
        array = np.ones(count, dtype)
        task = Task.whole(Collective.ALL_REDUCE, group.world_size, count)
        chosen = Strategy(strategy) if strategy else None
        group.run(Call(task, array, array, Reducer.of(op, dtype), chosen), LIMIT)

    return act


def broadcast(count: int, root: int) -> Callable[[Group], None]:
    """One broadcast."""

    def act(group: Group) -> None:
        task = Task.whole(Collective.BROADCAST, group.world_size, count, root)
        given = np.ones(count if group.rank == root else 0, "f4")
        group.run(Call(task, given, np.zeros(count, "f4")), LIMIT)

    return act


def gather(count: int, root: int) -> Callable[[Group], None]:
    """One gathering."""

    def act(group: Group) -> None:
        size = group.world_size
        task = Task.blocks(Collective.GATHER, (count,) * size, root)
        target = np.zeros(count * size if group.rank == root else 0, "f4")
        group.run(Call(task, np.ones(count, "f4"), target), LIMIT)

    return act


CALLS = {
    "another collective": (all_reduce(SHORT), broadcast(SHORT, 0)),
    "another reduction": (all_reduce(SHORT), all_reduce(SHORT, op=ReduceOp.MAX)),
    "another type": (all_reduce(SHORT), all_reduce(SHORT, "i4")),
    "another count": (all_reduce(SHORT), all_reduce(SHORT + 1)),
    "another count, long": (all_reduce(LONG), all_reduce(LONG + 1)),
    "short and long": (all_reduce(SHORT), all_reduce(LONG)),
    "nothing and something": (all_reduce(0), all_reduce(SHORT)),
    "another root": (broadcast(SHORT, 0), broadcast(SHORT, 1)),
    "another root, long": (broadcast(LONG, 0), broadcast(LONG, 2)),
    "another root to gather": (gather(SHORT, 0), gather(SHORT, 2)),
    "another strategy": (all_reduce(SHORT), all_reduce(SHORT, strategy="ring")),
}


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("case", CALLS)
def test_ranks_that_disagree_all_hear_of_it(case: str, odd: int) -> None:
    """Each gets an error that names both sides; nobody returns success, nobody hangs."""
    usual, other = CALLS[case]

    def action(group: Group) -> None:
        (other if group.rank == odd else usual)(group)

    for rank, got in enumerate(in_world(4, action)):
        assert isinstance(got, CollectiveMismatch), (rank, got)
        assert "called" in str(got)
        assert f"rank {odd}" in str(got)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("case", CALLS)
def test_where_ranks_ask_around_most_of_them_know_the_odd_one(case: str, odd: int) -> None:
    """All but the odd one itself, or some of them: then no other rank is named."""
    usual, other = CALLS[case]

    def action(group: Group) -> None:
        group.ask_around()
        all_reduce(SHORT)(group)
        (other if group.rank == odd else usual)(group)

    found: list[Any] = in_world(4, action)
    assert all(isinstance(got, CollectiveMismatch) for got in found)
    named = [got.ballot.odd_one() for got in found]
    assert named.pop(odd) is None
    assert not found[odd].ballot.has_most
    assert {each and each[0] for each in named} <= {odd, None}
    assert any(named)


@pytest.mark.parametrize("size", [2, 4])
def test_without_a_majority_no_rank_is_the_odd_one(size: int) -> None:
    """One against one, and two against two."""

    def action(group: Group) -> None:
        group.ask_around()
        all_reduce(SHORT + group.rank % 2)(group)

    for got in in_world(size, action):
        assert isinstance(got, CollectiveMismatch)
        assert got.ballot.odd_one() is None
        assert not got.ballot.has_most


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_is_a_call_ahead_is_named(odd: int) -> None:
    """It left out a call that the others make."""

    def action(group: Group) -> None:
        all_reduce(SHORT)(group)
        if group.rank != odd:
            broadcast(SHORT, 1)(group)
        all_reduce(SHORT)(group)

    for got in in_world(3, action):
        assert isinstance(got, CollectiveMismatch)


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("strategy", ["ring", "tree", "doubling", "direct", "central"])
def test_a_rank_that_vanishes_is_named_by_all(strategy: str, count: int) -> None:
    """Also by those who have no stream to it."""

    def action(group: Group) -> None:
        all_reduce(count, strategy=strategy)(group)
        if group.rank == 2:
            assert isinstance(group.backend, SimulatedBackend)
            group.backend.lose()
            return
        all_reduce(count, strategy=strategy)(group)

    got = in_world(4, action)
    for rank in (0, 1, 3):
        error = got[rank]
        assert isinstance(error, PeerLost), error
        assert error.rank == 2


@pytest.mark.parametrize("writes", [3, 8, 20, 45])
def test_a_rank_that_vanishes_in_the_middle_leaves_nobody_behind(writes: int) -> None:
    """After any number of writes; the others hear of it, or had what they needed."""

    def action(group: Group) -> str:
        for _ in range(4):
            all_reduce(LONG)(group)
        return "done"

    got = in_world(3, action, faults=SimulatedFaults(lose={1: writes}))
    for rank in (0, 2):
        error = got[rank]
        assert isinstance(error, PeerLost), error
        assert error.rank == 1


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_a_rank_that_does_not_come_is_named(count: int) -> None:
    """At the deadline, with the call and who was missing."""
    gone = threading.Event()

    def action(group: Group) -> None:
        if group.rank == 1:
            gone.wait(LIMIT)
            return
        array = np.ones(count, "f4")
        try:
            group.run(sum_call(array, group.world_size), 0.3)
        finally:
            gone.set()

    got = in_world(2, action)
    error = got[0]
    assert isinstance(error, Timeout)
    assert error.missing == (1,)
    assert "rank 1" in str(error).lower()


@pytest.mark.parametrize("world_size", [3, 4, 5])
@pytest.mark.parametrize("count", [0, SHORT, LONG])
def test_only_who_does_not_come_is_named(world_size: int, count: int) -> None:
    """On all ranks, and not somebody who waits for it as well."""
    absent, gone = world_size - 1, threading.Barrier(world_size)

    def action(group: Group) -> tuple[int, ...] | None:
        missing: tuple[int, ...] | None = None
        if group.rank != absent:
            try:
                group.run(sum_call(np.ones(count, "f4"), world_size), 0.4)
            except Timeout as error:
                missing = tuple(error.missing)
        gone.wait(LIMIT)
        return missing

    assert in_world(world_size, action) == [(absent,)] * absent + [None]


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_an_abort_ends_the_operation_on_all_ranks(count: int) -> None:
    """From another thread, at once; afterwards the group is as good as new."""
    aborted = threading.Event()

    def action(group: Group) -> float:
        array = np.ones(count, "f4")
        if group.rank == 0:
            waiting = Background(lambda: group.run(sum_call(array, 3), LIMIT))
            eventually(lambda: group._is_busy)
            group.abort("somebody closed the lid")
            aborted.set()
            with pytest.raises(Aborted, match="closed the lid"):
                waiting.result()
        else:
            if group.rank == 2:
                aborted.wait(LIMIT)  # it comes when all is over
            with pytest.raises(Aborted, match="closed the lid"):
                group.run(sum_call(array, 3), LIMIT)
        array = np.ones(count, "f4")
        group.run(sum_call(array, 3), LIMIT)
        return float(array[0])

    assert in_world(3, action) == [3.0] * 3


def test_what_was_started_is_aborted_as_well() -> None:
    """All that waits in line fails with the same error."""
    aborted = threading.Event()

    def action(group: Group) -> list[str]:
        if group.rank == 1:
            aborted.wait(LIMIT)
            with pytest.raises(Aborted):
                group.barrier(LIMIT)
            return ["Aborted"] * 3
        works: list[Work[None]] = [group.start(sum_call(np.ones(SHORT), 2)) for _ in range(3)]
        eventually(lambda: group._is_busy)
        group.abort("enough")
        aborted.set()
        kinds = []
        for work in works:
            with pytest.raises(DistributedError) as caught:
                work.wait(LIMIT)
            kinds.append(type(caught.value).__name__)
        return kinds

    assert in_world(2, action) == [["Aborted"] * 3] * 2


def test_a_group_that_is_left_says_so() -> None:
    """Those who still call are told that this rank has left, not that it died."""

    def action(group: Group) -> None:
        group.barrier(LIMIT)
        if group.rank == 0:
            return
        all_reduce(SHORT)(group)

    error = in_world(2, action)[1]
    assert isinstance(error, Aborted)
    assert "left the group" in str(error)


def test_errors_of_different_ranks_do_not_mix_epochs() -> None:
    """After a mismatch all ranks go on together, several times."""

    def action(group: Group) -> list[float]:
        sums = []
        for number in range(5):
            with pytest.raises(CollectiveMismatch):
                (all_reduce(SHORT) if group.rank != number % 3 else broadcast(SHORT, 0))(group)
            array = np.full(LONG, group.rank + 1.0)
            group.run(sum_call(array, group.world_size), LIMIT)
            sums.append(float(array[-1]))
        return sums

    assert in_world(3, action) == [[6.0] * 5] * 3


def test_closing_the_backend_ends_an_operation() -> None:
    """Ours, while a thread waits in it."""
    backends = SimulatedBackend.create_group(2)

    def action(group: Group) -> None:
        if group.rank == 1:
            backends[0].close()
            return
        group.run(sum_call(np.ones(SHORT), 2), LIMIT)

    error = on_backends(backends, action)[0]
    assert isinstance(error, DistributedError)
    backends[1].close()
