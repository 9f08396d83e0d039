"""DistributedContext: any backend, with collectives, counted if wanted."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from potluck import (
    Aborted,
    Backend,
    ChannelClosed,
    CollectiveConfig,
    CollectiveMismatch,
    DistributedBackend,
    DistributedContext,
    DistributedMetrics,
    MetricsSnapshot,
    NetworkNamespace,
    SimulatedBackend,
    SubBackend,
    TcpBackend,
    Timeout,
    UnsupportedOperation,
)
from potluck.runtime.group import Group
from potluck.runtime.notices import sweep
from support.contexts import in_group
from support.ports import free_port
from support.threads import PATIENCE, Background, eventually, together


def test_a_context_knows_who_it_is() -> None:
    """Rank 0 is the master."""
    told = in_group(3, lambda context: (context.rank, context.world_size, context.is_master))
    assert told == [(0, 3, True), (1, 3, False), (2, 3, False)]
    (shown,) = in_group(1, repr)
    assert shown == "<DistributedContext, rank 0 of 1 on SimulatedBackend>"


def test_a_context_is_a_backend_with_collectives() -> None:
    """Whoever takes a Backend takes it, so contexts and subgroups can be stacked."""

    def act(context: DistributedContext) -> Any:
        assert isinstance(context, Backend)
        assert isinstance(context, DistributedBackend)
        again = DistributedContext(context)
        assert again.group is context.group
        pair = SubBackend(context, [0, 2]) if context.rank != 1 else None
        return again.all_reduce(1), pair and DistributedContext(pair).all_reduce(context.rank)

    assert in_group(3, act) == [(3, 2), (3, None), (3, 2)]


class Native(DistributedBackend, SimulatedBackend):
    """A backend that derives its collectives from the interface."""


def test_a_backend_can_have_collectives_of_its_own() -> None:
    """Whoever derives from the interface has them all, and a context on top runs in its group."""
    group = Native.create_group(2)

    def act(backend: Native) -> Any:
        context = DistributedContext(backend)
        assert context.group is backend.group
        backend.barrier()
        backend.send(np.ones(2), 1 - backend.rank)
        backend.recv(np.ones(2), 1 - backend.rank)
        return backend.all_reduce(1), backend.all_gather_object(backend.rank), context.all_reduce(2)

    try:
        results = together(*(lambda rank=rank: act(rank) for rank in group))
        assert results == [(2, [0, 1], 4)] * 2
    finally:
        for backend in group:
            DistributedContext(backend).close()


def test_a_group_s_own_barrier_meets_that_of_a_context() -> None:
    """Both are the same operation."""

    def act(context: DistributedContext) -> None:
        (context.group if context.rank else context).barrier()

    in_group(2, act)


def test_a_context_passes_on_what_a_backend_offers() -> None:
    """Posted operations, a barrier of some, names and losses of peers, and its end."""
    closed: list[int] = []

    def act(context: DistributedContext) -> None:
        inbox = bytearray(2)
        arriving = context.post_recv_into(inbox, 1 - context.rank)
        context.post_send(b"hi", 1 - context.rank).wait(30)
        arriving.wait(30)
        context.post_barrier(members=[0, 1]).wait(30)
        context.progress()
        assert inbox == b"hi"
        assert context.peer_name(1) == context.backend.peer_name(1)
        assert context.loss_of(1 - context.rank) is None
        context.on_close(lambda: closed.append(context.rank))
        context.timeout = 7.0
        assert context.backend.timeout == context.timeout == 7.0

    in_group(2, act)
    assert sorted(closed) == [0, 1]


def test_a_context_takes_backends_only() -> None:
    """The sentence says what it wants."""
    with pytest.raises(TypeError, match=r"not on a list"):
        DistributedContext([])  # type: ignore[arg-type]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.filterwarnings("ignore::potluck.SecurityWarning")
def test_real_sockets_serve_as_well(sealed: bool) -> None:
    """In clear and sealed, the same calls give the same results."""
    namespace = None if sealed else NetworkNamespace.insecure()
    master = f"127.0.0.1:{free_port()}"

    def act(rank: int) -> Any:
        backend = TcpBackend(rank, 3, master, namespace=namespace)
        with DistributedContext(backend) as context:
            context.barrier()
            results = (
                context.all_reduce(torch.ones(1000)).sum().item(),
                context.all_gather_object(context.rank),
                context.all_to_all(np.arange(3)).tolist(),
            )
            context.barrier()
            return results

    results = together(*(lambda rank=rank: act(rank) for rank in range(3)))
    assert results == [(3000, [0, 1, 2], [rank] * 3) for rank in range(3)]


def test_subgroups_work_beside_the_whole() -> None:
    """Overlapping groups are kept apart from each other."""

    def act(context: DistributedContext) -> tuple[int, int, int]:
        low = context.subgroup([0, 1, 2]) if context.rank < 3 else None
        high = context.subgroup([1, 2, 3]) if context.rank > 0 else None
        one = low.all_reduce(1 << context.rank) if low else 0
        other = high.all_reduce(1 << context.rank) if high else 0
        for group in (low, high):
            if group is not None:
                group.barrier()
        return one, other, context.all_reduce(1 << context.rank)

    assert in_group(4, act) == [(7, 0, 15), (7, 14, 15), (7, 14, 15), (0, 14, 15)]


def test_subgroups_end_with_the_context_they_are_of() -> None:
    """Nobody has to remember them; closing one before ends it alone."""
    left, right = (DistributedContext(each) for each in SimulatedBackend.create_group(2))
    subs = [each.subgroup([0, 1]) for each in (left, right)]
    gone = [each.subgroup([0, 1]) for each in (left, right)]
    assert together(*(lambda sub=sub: sub.all_reduce(1) for sub in (*subs, *gone))) == [2] * 4
    for each in gone:
        each.close()
    assert together(*(lambda sub=sub: sub.all_reduce(1) for sub in subs)) == [2, 2]
    for each in (left, right):
        each.close()
    with pytest.raises(ChannelClosed):
        subs[0].barrier()


def test_subgroups_made_in_several_ways_are_not_confused() -> None:
    """Of the same members, by a context, by hand on it and by hand below it: three groups."""

    def act(context: DistributedContext) -> list[int]:
        groups = [
            context.subgroup([0, 1]),
            DistributedContext(SubBackend(context, [0, 1])),
            DistributedContext(SubBackend(context.backend, [0, 1])),
        ]
        groups.append(DistributedContext(SubBackend(groups[0], [0, 1])))
        numbers = {each.backend._group for each in groups if isinstance(each.backend, SubBackend)}
        assert len(numbers) == 4
        works = [each.all_reduce(1 << n, async_op=True) for n, each in enumerate(groups)]
        results = [work.wait(30) for work in works]
        for group in groups:
            group.group.close()
        return results

    assert in_group(2, act) == [[2, 4, 8, 16]] * 2


def test_closing_a_context_closes_its_backend() -> None:
    """It may be done twice, and the backend may be closed as well."""
    (backend,) = SimulatedBackend.create_group(1)
    with backend, DistributedContext(backend) as context:
        context.barrier()
        context.close()
        with pytest.raises(Exception, match="closed"):
            backend.barrier()


def test_a_configuration_can_be_given() -> None:
    """It names strategies for all calls that do not name their own."""
    group = SimulatedBackend.create_group(2)
    config = CollectiveConfig.single_node(2)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(DistributedContext(each, config)) for each in group]
        assert together(*(lambda rank=rank: rank.all_reduce(1) for rank in ranks)) == [2, 2]


def test_the_patience_of_a_configuration_counts() -> None:
    """A call without a time-out of its own gives up after that of the group, started or not."""
    left, right = SimulatedBackend.create_group(2)
    with DistributedContext(left, CollectiveConfig(timeout=0.05)) as context, right:
        with pytest.raises(Timeout):
            context.all_reduce(1)
        work = context.all_reduce(1, async_op=True)
        with pytest.raises(Timeout, match="all_reduce"):
            work.wait(30)


def test_a_backend_has_one_configuration() -> None:
    """A second one would be ignored in silence; the same one, or none, joins the first."""
    config = CollectiveConfig.single_node(2)
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend, config):
        DistributedContext(backend, CollectiveConfig.single_node(2)).barrier()
        DistributedContext(backend).barrier()
        with pytest.raises(ValueError, match="another configuration"):
            DistributedContext(backend, CollectiveConfig.single_node(3))


def test_an_operation_can_be_aborted_from_another_thread() -> None:
    """It ends with one error on each rank, also where it had not begun; then the group goes on."""
    over = threading.Event()

    def act(context: DistributedContext) -> int:
        if context.rank == 0:
            waiting = Background(lambda: context.all_reduce(np.ones(3)))
            eventually(lambda: context.group._is_busy)
            context.abort("changed my mind")
            with pytest.raises(Aborted, match="changed my mind"):
                waiting.result()
            over.set()
        else:
            over.wait(30)
            with pytest.raises(Aborted, match="changed my mind"):
                context.barrier()
        return context.all_reduce(1)

    assert in_group(2, act) == [2, 2]


def test_work_can_be_awaited() -> None:
    """From a coroutine, several at once."""

    def act(context: DistributedContext) -> list[float]:
        async def both() -> list[float]:
            works = [context.all_reduce(float(each), async_op=True) for each in (1, 2)]
            return [await work for work in works]

        return asyncio.run(both())

    assert in_group(2, act) == [[2, 4], [2, 4]]


# --- metrics ---


def test_without_metrics_there_is_no_snapshot() -> None:
    """Nothing is counted that nobody asked for."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        context.barrier()
        assert context.metrics is None
        assert context.metrics_snapshot() is None


def test_completed_operations_are_counted() -> None:
    """How often, how long and how many bytes, for each kind."""

    def act(context: DistributedContext) -> MetricsSnapshot | None:
        context.all_reduce(np.ones(100))
        context.all_reduce(np.ones(50, "f4"), async_op=True).wait(30)
        context.barrier()
        context.all_gather(np.ones(10))
        return context.metrics_snapshot()

    for snapshot in in_group(2, act):
        assert snapshot is not None
        assert snapshot.all_reduce.completed == 2
        assert snapshot.all_reduce.failed == 0
        assert snapshot.all_reduce.bytes_processed == 1000
        assert snapshot.all_reduce.mean_ms > 0
        assert snapshot.barrier.completed == 1
        assert snapshot.all_gather.bytes_processed == 160
        assert snapshot.reduce.completed == 0


def test_failed_operations_are_counted() -> None:
    """The time until the failure counts too; and each once."""

    def act(context: DistributedContext) -> MetricsSnapshot | None:
        with pytest.raises(UnsupportedOperation):
            context.all_reduce(np.ones(2, int), "mean")
        with pytest.raises(Exception, match="all_reduce"):
            context.all_reduce(np.ones(context.rank + 1))
        return context.metrics_snapshot()

    for snapshot in in_group(2, act):
        assert snapshot is not None
        assert snapshot.all_reduce.completed == 0
        assert snapshot.all_reduce.failed == 2
        errors = {"UnsupportedOperation": 1, "CollectiveMismatch": 1}
        assert snapshot.all_reduce.errors == errors


REFUSED: dict[str, Callable[[DistributedContext], object]] = {
    "all_reduce": lambda context: context.all_reduce(np.ones(2), "median"),
    "reduce": lambda context: context.reduce(np.ones(2), root=7),
    "reduce_scatter": lambda context: context.reduce_scatter("words"),
    "broadcast": lambda context: context.broadcast(np.ones(2), root=-1),
    "all_gather": lambda context: context.all_gather(np.ones(2), counts=[1, 2, 3]),
    "gather": lambda context: context.gather(np.ones(2), root="0"),  # type: ignore[call-overload]
    "scatter": lambda context: context.scatter(None),
    "all_to_all": lambda context: context.all_to_all(np.ones(2), counts=[[1]]),
    "barrier": lambda context: context.barrier(timeout=-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_is_refused_for_its_arguments_has_failed(name: str) -> None:
    """Whoever looks at the metrics of a program that fails sees it there."""
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext.with_metrics(backend) as context:
        with pytest.raises((TypeError, ValueError)):
            REFUSED[name](context)
        snapshot = context.metrics_snapshot()
    assert snapshot is not None
    seen = getattr(snapshot, name)
    assert (seen.completed, seen.failed) == (0, 1)


def test_a_configuration_without_a_limit_leaves_that_of_the_backend() -> None:
    """Half an hour unless the backend says otherwise; a call, and one that is started."""
    left, right = SimulatedBackend.create_group(2)
    left.timeout = 0.05
    with DistributedContext(left, CollectiveConfig()) as context, right:
        assert context.timeout == 0.05
        with pytest.raises(Timeout, match="was not done in time"):
            context.all_reduce(1)


def test_something_else_than_a_configuration_is_refused() -> None:
    """Before anything runs with it."""
    (backend,) = SimulatedBackend.create_group(1)
    with backend, pytest.raises(TypeError, match="CollectiveConfig, not a dict"):
        DistributedContext(backend, {"timeout": 3})  # type: ignore[arg-type]


def test_contexts_may_count_in_one_place() -> None:
    """As the threads of one process do."""
    metrics = DistributedMetrics()
    group = SimulatedBackend.create_group(3)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(DistributedContext.with_metrics(each, metrics)) for each in group
        ]
        started = time.perf_counter()
        together(*(lambda rank=rank: [rank.barrier() for _ in range(20)] for rank in ranks))
        spent_ms = (time.perf_counter() - started) * 1e3
    snapshot = metrics.snapshot()
    assert snapshot.barrier.completed == 60
    assert 0 < snapshot.barrier.p50_ms <= snapshot.barrier.p99_ms <= spent_ms


def test_subgroups_that_are_closed_leave_nothing_behind() -> None:
    """However many: neither here, nor as messages to those who have closed them as well."""
    many = 200

    def act(context: DistributedContext) -> None:
        for number in range(many):
            with context.subgroup([0, 1]) as part:
                if number % 10 == 0:
                    assert part.all_reduce(1) == 2
        context.barrier()

        def is_clean() -> bool:
            sweep(context.innermost)
            return not vars(context.innermost)["_past_notices"]

        eventually(is_clean)
        context.barrier()
        assert not context._subgroups
        assert list(vars(context.innermost)["_closing_actions"]) == [context.group.close]
        assert not context.innermost._inbox._mailbox.waiting_messages()  # type: ignore[attr-defined]
        context.barrier()

    in_group(2, act)
    gc.collect()
    assert sum(type(each) is Group for each in gc.get_objects()) < many // 10


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_subgroup_made_once_too_often_is_named(elsewhere: bool) -> None:
    """Both ranks hear of it long before their time is up, wherever the second one waits."""

    def act(context: DistributedContext) -> str:
        pair = context.subgroup([0, 1])
        if context.rank == 0:
            pair = context.subgroup([0, 1])
        waiting = context if elsewhere and context.rank == 1 else pair
        with pytest.raises(CollectiveMismatch) as caught:
            waiting.all_reduce(1, timeout=PATIENCE)
        return str(caught.value)

    master = f"127.0.0.1:{free_port()}"

    def connected(rank: int) -> str:
        with DistributedContext(TcpBackend(rank, 2, master)) as context:
            return act(context)

    over_tcp = together(*(lambda rank=rank: connected(rank) for rank in range(2)))
    for said in (*in_group(2, act), *over_tcp):
        assert "Rank 0 waits in subgroup number 2 of ranks [0, 1]" in said
        assert "which rank 1 has made only once" in said
