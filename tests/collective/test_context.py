"""DistributedConfig: who takes part."""

import asyncio
import contextlib
import gc
import inspect
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import potluck
from potluck import (
    Aborted,
    AllReduceStrategy,
    AutoDiscoveryBackend,
    AutoDiscoveryConfig,
    Backend,
    ChannelClosed,
    CollectiveConfig,
    CollectiveMismatch,
    DistributedBackend,
    DistributedConfig,
    DistributedContext,
    DistributedError,
    DistributedMetrics,
    InvalidRank,
    InvalidWorldSize,
    IoError,
    MetricsSnapshot,
    NetworkNamespace,
    PeerLost,
    RingBackend,
    SimulatedBackend,
    SubBackend,
    TcpBackend,
    Timeout,
    UnsupportedOperation,
)
from potluck.collective import context
from potluck.collective.context import DEFAULT_PORT
from potluck.collective.fingerprint import sweep
from potluck.collective.group import Group
from support.contexts import in_group
from support.ports import free_port
from support.threads import PATIENCE, Background, eventually, together


def test_a_configuration_knows_its_ranks() -> None:
    """Addresses without a port get the one that everybody expects."""
    config = DistributedConfig(["desk", "10.0.0.2:7000", "[::1]:8"], rank=2).validate()
    assert config.world_size == 3
    assert [str(each) for each in config.addresses] == ["desk:52416", "10.0.0.2:7000", "[::1]:8"]
    assert DEFAULT_PORT == 52416


def test_a_rank_alone_is_possible() -> None:
    """A group of one is a group."""
    assert DistributedConfig(["localhost"], 0).validate().world_size == 1


@pytest.mark.parametrize(
    ("peers", "rank", "options", "kind", "reason"),
    [
        ([], 0, {}, InvalidWorldSize, "including this one"),
        (["a", "b"], 2, {}, InvalidRank, "Rank 2"),
        (["a", "b"], -1, {}, InvalidRank, "Rank -1"),
        (["a", "b", "a"], 0, {}, ValueError, r"peers\[0\] and peers\[2\] cannot both be a:52416"),
        (["a", "a:52416"], 0, {}, ValueError, "cannot both"),
        (["a:0"], 0, {}, ValueError, "must have a fixed port"),
        (["a", "a b"], 0, {}, ValueError, r"peers\[1\]: 'a b' is not an address"),
        (["a", ("b", 70000)], 0, {}, ValueError, r"peers\[1\] must be .*, got \('b', 70000\)"),
        (["a", ("b", "x")], 0, {}, TypeError, r"peers\[1\]: port must be an integer"),
        (["a", ("b", 1, 2)], 0, {}, ValueError, r"peers\[1\]"),
        (["a", 7], 0, {}, TypeError, r"peers\[1\] must be .*, got 7"),
        (["a", None], 0, {}, TypeError, r"peers\[1\] must be .*, got None"),
        (["a"], "0", {}, TypeError, "rank must be an integer, got '0'"),
        (["a", "b"], True, {}, TypeError, "rank must be an integer, got True"),
        ("desk:1", 0, {}, TypeError, "list of addresses"),
        (7, 0, {}, TypeError, "list of addresses"),
        (["a"], 0, {"timeout": 0}, ValueError, "more than zero"),
        (["a"], 0, {"timeout": float("nan")}, ValueError, "more than zero"),
    ],
)
def test_what_makes_no_sense_is_refused(
    peers: Any, rank: int, options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """At once, with a sentence that names the fault."""
    with pytest.raises(kind, match=reason):
        DistributedConfig(peers, rank, **options)


def test_a_host_and_its_port_may_be_a_pair() -> None:
    """As sockets have them; also of IPv6."""
    config = DistributedConfig([("desk", 7000), ("::1", 8), "10.0.0.2"], 0)
    assert [str(each) for each in config.addresses] == ["desk:7000", "[::1]:8", "10.0.0.2:52416"]


# --------------------------------------------------------------------------------------------------
# DistributedContext: any backend, with collectives, counted if wanted.


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
    with pytest.raises(TypeError, match=r"must be a potluck\.Backend, got list"):
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
    config = CollectiveConfig(tree_arity=3)
    (backend,) = SimulatedBackend.create_group(1)
    with DistributedContext(backend, config):
        DistributedContext(backend, CollectiveConfig(tree_arity=3)).barrier()
        DistributedContext(backend).barrier()
        with pytest.raises(ValueError, match="another configuration"):
            DistributedContext(backend, CollectiveConfig(tree_arity=4))


def test_machines_that_cannot_be_those_of_the_group_are_refused() -> None:
    """With the ranks that there would have to be."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, pytest.raises(InvalidWorldSize, match="2 nodes with 3 ranks each, 6 in all"):
        DistributedContext(left, CollectiveConfig.multi_node(2, num_devices=3))


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
        metrics = context.metrics
        assert metrics is not None
        # The thread that ends an asynchronous operation counts it, perhaps after it woke this one.
        eventually(lambda: metrics.snapshot().all_reduce.completed == 2)
        return metrics.snapshot()

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
        with pytest.raises(Timeout, match="timed out after"):
            context.all_reduce(1)


def test_something_else_than_a_configuration_is_refused() -> None:
    """Before anything runs with it."""
    (backend,) = SimulatedBackend.create_group(1)
    with backend, pytest.raises(TypeError, match="CollectiveConfig, got dict"):
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


# --------------------------------------------------------------------------------------------------
# What a short operation costs: on a busy machine calls can be counted, and times cannot.

MOST_CALLS = 72
"""Functions of Potluck that a rank of two calls for an all-reduce of one number, at least."""


def calls_of(action: Callable[[], object]) -> int:
    """How many functions of Potluck it calls on this thread."""
    source = str(Path(potluck.__file__).parent)
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(source)

    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_short_operation_takes_few_calls() -> None:
    """They take most of its time; the fewest are those where no rank waits for the other."""
    master = f"127.0.0.1:{free_port()}"

    def connected(rank: int) -> int:
        number = np.ones(1, np.float32)
        with DistributedContext(TcpBackend(rank, 2, master)) as context:
            counts = [calls_of(lambda: context.all_reduce(number)) for _ in range(100)]
            context.barrier()
        return min(counts)

    for fewest in together(*(lambda rank=rank: connected(rank) for rank in range(2))):
        assert fewest <= MOST_CALLS


# --------------------------------------------------------------------------------------------------
# Collectives as functions, on any backend.


def on_each(group: list[Any], action: Any) -> list[Any]:
    """What every rank of a group of backends returns; the backends are closed afterwards."""
    try:
        return together(*(lambda rank=rank: action(rank) for rank in group))
    finally:
        for backend in group:
            DistributedContext(backend).close()


def act(backend: Backend) -> dict[str, Any]:
    """Call every function once."""
    rank, size = backend.rank, backend.world_size
    whole = np.arange(size * 2)
    out = np.zeros(2, int)
    potluck.barrier(backend)
    return {
        "all_reduce": potluck.all_reduce(backend, whole + rank).tolist(),
        "allreduce": potluck.allreduce(backend, rank, "max"),
        "reduce": potluck.reduce(backend, rank + 1, 0),
        "reduce_scatter": potluck.reduce_scatter(backend, whole).tolist(),
        "broadcast": potluck.broadcast(backend, rank + 5, 0),
        "all_gather": potluck.all_gather(backend, np.array(rank)).tolist(),
        "gather": potluck.gather(backend, np.array([rank]), 0) is not None,
        "scatter": potluck.scatter(backend, whole if rank == 0 else None, out=out).tolist(),
        "all_to_all": potluck.all_to_all(backend, whole).tolist(),
    }


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective_is_a_function(size: int) -> None:
    """On a plain backend, which has no collectives of its own."""
    whole = np.arange(size * 2)
    for rank, result in enumerate(on_each(list(SimulatedBackend.create_group(size)), act)):
        assert result == {
            "all_reduce": (whole * size + sum(range(size))).tolist(),
            "allreduce": size - 1,
            "reduce": sum(range(1, size + 1)) if rank == 0 else None,
            "reduce_scatter": [2 * rank * size, (2 * rank + 1) * size],
            "broadcast": 5,
            "all_gather": list(range(size)),
            "gather": rank == 0,
            "scatter": [2 * rank, 2 * rank + 1],
            "all_to_all": [2 * rank, 2 * rank + 1] * size,
        }


def test_functions_work_within_a_subgroup() -> None:
    """A subgroup is a backend like any other."""
    parents = SimulatedBackend.create_group(3)
    subs = [SubBackend(parents[rank], [0, 2]) for rank in (0, 2)]
    try:
        assert on_each(subs, lambda sub: potluck.all_reduce(sub, sub.rank + 1)) == [3, 3]
    finally:
        for parent in parents:
            parent.close()


def test_a_raw_buffer_has_its_type_named() -> None:
    """As in the origin, where buffers were bytes."""

    def sum_up(backend: Backend) -> list[float]:
        buffer = bytearray(np.array([1, 2], "f4").tobytes())
        context.all_reduce(backend, buffer, dtype="float32")
        part = context.reduce_scatter(backend, buffer, dtype=np.float32)
        return [*np.frombuffer(buffer, "f4").tolist(), *np.asarray(part).tolist()]

    first, second = on_each(list(SimulatedBackend.create_group(2)), sum_up)
    assert first == [2, 4, 4]
    assert second == [2, 4, 8]


def test_functions_take_what_the_methods_take() -> None:
    """Every option of a method is one of the function, but for asynchronous work."""
    for name in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "allreduce",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    ):
        function = inspect.signature(getattr(context, name))
        method = inspect.signature(getattr(DistributedContext, name.replace("allr", "all_r")))
        expected = [each for each in method.parameters if each not in {"self", "async_op"}]
        assert list(function.parameters)[1:] == expected


# --------------------------------------------------------------------------------------------------
# A backend whose author wrote all_reduce or barrier anew: a context calls that.


class Doubling(SimulatedBackend):
    """As the origin has it: one buffer, in place, no options."""

    barriers = 0

    def all_reduce(self, buffer: Any) -> None:
        """Double it."""
        buffer *= 2

    def barrier(self) -> None:  # type: ignore[override]
        """Count it."""
        self.barriers += 1


def test_a_context_calls_what_the_backend_has_written_anew() -> None:
    """Blocking, asynchronous, and by the functions; the array comes back."""
    backend = Doubling(0, 1)
    with DistributedContext(backend) as context:
        array = np.ones(2)
        assert context.all_reduce(array) is array
        assert context.all_reduce(array, "sum").tolist() == [4, 4]
        assert context.all_reduce(array, async_op=True).wait(30).tolist() == [8, 8]
        assert potluck.all_reduce(backend, array).tolist() == [16, 16]
        context.barrier()
        context.barrier(timeout=None)
        potluck.barrier(backend)
        assert backend.barriers == 3
        assert DistributedContext(context).all_reduce(array).tolist() == [32, 32]


def test_an_option_it_does_not_know_is_not_dropped() -> None:
    """The caller would get another result than asked for."""
    with DistributedContext(Doubling(0, 1)) as context, pytest.raises(TypeError):
        context.all_reduce(np.ones(2), "max")


def test_what_it_does_is_counted() -> None:
    """With its bytes; and what it raises."""

    class Failing(Doubling):
        def barrier(self) -> None:  # type: ignore[override]
            raise ConnectionError

    metrics = DistributedMetrics()
    with DistributedContext.with_metrics(Failing(0, 1), metrics) as context:
        context.all_reduce(np.ones(2))
        with pytest.raises(ConnectionError):
            context.barrier()
    seen = metrics.snapshot()
    assert (seen.all_reduce.completed, seen.all_reduce.bytes_processed) == (1, 16)
    assert (seen.barrier.completed, seen.barrier.failed) == (0, 1)


def test_it_may_call_the_librarys_own() -> None:
    """On a backend that has collectives."""

    class Noting(SimulatedBackend, DistributedBackend):
        calls = 0

        def all_reduce(self, array: Any, op: Any = "sum", **options: Any) -> Any:
            self.calls += 1
            return super().all_reduce(array, op, **options)

    backend = Noting(0, 1)
    with DistributedContext(backend) as context:
        assert context.all_reduce(3.0, "mean") == 3.0
        assert backend.calls == 1


def test_a_ring_of_a_users_own_kind_is_respected_too() -> None:
    """Whatever it derives from."""

    class Ring(RingBackend):
        def barrier(self, *_: Any, **__: Any) -> Any:
            return "mine"

    with Ring(potluck.DistributedConfig(["127.0.0.1:9"], 0)) as ring:
        assert DistributedContext(ring).barrier() == "mine"


def test_a_cluster_respects_it_too() -> None:
    """Although its ranks change."""

    class Node(AutoDiscoveryBackend):
        def all_reduce(self, array: Any, op: Any = "sum", **options: Any) -> Any:
            return -super().all_reduce(array, op, **options)

    alone = AutoDiscoveryConfig(job="overriding", multicast=False, solo_delay=0.0)
    with DistributedContext(Node(alone)) as cluster:
        assert cluster.all_reduce(2.0) == -2.0


# --------------------------------------------------------------------------------------------------
# RingBackend: a group written down by hand.


@contextlib.contextmanager
def ring(size: int, collectives: CollectiveConfig | None = None) -> Iterator[list[RingBackend]]:
    """All ranks of a group on this machine, over sealed TCP."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    ranks = together(
        *(
            lambda rank=rank: RingBackend(DistributedConfig(peers, rank), collectives)
            for rank in range(size)
        )
    )
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.enter_context(rank)
        yield ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_has_collectives_of_its_own(size: int) -> None:
    """The same as a context has, and a context on top uses them."""
    with ring(size) as ranks:
        assert [rank.config.rank for rank in ranks] == list(range(size))

        def act(rank: RingBackend) -> tuple[float, int]:
            array = np.ones(5)
            rank.all_reduce(array)
            rank.barrier()
            return array[0], DistributedContext(rank).all_reduce(rank.rank)

        results = together(*(lambda rank=rank: act(rank) for rank in ranks))
        assert results == [(size, sum(range(size)))] * size


def test_a_ring_can_be_asked_for() -> None:
    """Unless told so the algorithm follows from the links."""
    config = CollectiveConfig(local_all_reduce=AllReduceStrategy.RING)
    with ring(3, config) as ranks:
        results = together(*(lambda rank=rank: rank.all_reduce(2.0) for rank in ranks))
        assert results == [6.0] * 3


def test_every_rank_listens_where_the_others_expect_it() -> None:
    """At the port of its own address, so that a firewall can be told."""
    with ring(3) as ranks:
        ports = [address.port for address in ranks[0].config.addresses]
        for rank in ranks:
            backend = rank.backend
            assert isinstance(backend, TcpBackend)
            assert backend._port.port == ports[rank.rank]


def test_a_port_that_is_taken_is_named() -> None:
    """At once, and not as if rank 0 could not be reached."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    port = int(peers[1].rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(IoError, match=rf"Rank 1 could not listen on 127.0.0.1:{port} \(peers\[1\]"),
    ):
        RingBackend(DistributedConfig(peers, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_of_another_machine_is_refused_where_it_is_wrong(rank: int) -> None:
    """That rank says which entry it is; it does not listen elsewhere and blame another rank."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    peers[rank] = "203.0.113.77:29500"  # of a range that no machine has
    said = rf"Rank {rank} could not listen on {peers[rank]} \(peers\[{rank}\]\)"
    with pytest.raises(IoError, match=said) as caught:
        RingBackend(DistributedConfig(peers, rank))
    assert f"Start rank {rank} on the machine that has it" in str(caught.value.hint)


def test_every_rank_is_reached_at_its_own_entry() -> None:
    """Also where ranks have different addresses; each listens there and nowhere else."""
    peers = [(f"127.0.0.{rank + 1}", free_port()) for rank in range(3)]
    ranks = together(
        *(lambda rank=rank: RingBackend(DistributedConfig(peers, rank)) for rank in range(3))
    )
    with contextlib.ExitStack() as stack:
        for each in ranks:
            stack.enter_context(each)
        assert "127.0.0.2" in ranks[2].peer_name(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", peers[1][1]))
        socket.create_connection(peers[1]).close()


def test_lists_that_differ_are_refused_by_the_entry() -> None:
    """Rank 0 tells the rank that came from elsewhere, and knows it when its time is up."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    other = [peers[0], f"127.0.0.1:{free_port()}"]

    def start(rank: int, listed: list[str]) -> str:
        with pytest.raises(DistributedError) as caught:
            RingBackend(DistributedConfig(listed, rank, timeout=1.5))
        return str(caught.value)

    first, second = together(lambda: start(0, peers), lambda: start(1, other))
    assert "peers[1] is 127.0.0.1, port" in first
    assert "peers[1] is 127.0.0.1, port" in second
    assert "give every rank the same list of peers" in second


def test_a_third_rank_with_another_list_is_refused_by_the_entry() -> None:
    """Rank 0 cannot see the lists of the others; each rank compares where all are."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    other = [peers[0], f"127.0.0.1:{free_port()}", peers[2]]

    def start(rank: int, listed: list[str]) -> str:
        with pytest.raises(DistributedError) as caught:
            RingBackend(DistributedConfig(listed, rank, timeout=1.5))
        return str(caught.value)

    said = together(lambda: start(0, peers), lambda: start(1, peers), lambda: start(2, other))
    assert "peers[1] is 127.0.0.1, port" in said[2]
    assert "on rank 2, but rank 1 listens on 127.0.0.1" in said[2]


def test_a_rank_that_does_not_come_is_named_with_its_entry() -> None:
    """So that a wrong address in all lists is found."""
    peers = [f"127.0.0.1:{free_port()}", "203.0.113.77:29500"]
    with pytest.raises(Timeout, match=r"rank 1 \(peers\[1\], 203.0.113.77:29500\)"):
        RingBackend(DistributedConfig(peers, 0, timeout=0.3))
    peers.reverse()
    peers[0] = f"127.0.0.1:{free_port()}"
    with pytest.raises(Timeout, match=rf"rank 0 at {peers[0]} \(peers\[0\]\)"):
        RingBackend(DistributedConfig(peers, 1, timeout=0.3))


def test_a_group_that_cannot_be_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections are closed before the error is passed on."""
    made = []

    def refuse(backend: Backend, config: object) -> Group:
        made.append(backend)
        raise PeerLost("gone already")

    monkeypatch.setattr(Group, "of", refuse)
    with pytest.raises(PeerLost):
        RingBackend(DistributedConfig(["127.0.0.1:9"], 0))
    (backend,) = made
    with pytest.raises(DistributedError):
        backend.post_send(b"", 0)


def test_a_wrong_configuration_opens_nothing() -> None:
    """It is looked at first."""
    with pytest.raises(InvalidRank):
        RingBackend(DistributedConfig(["127.0.0.1:1"], rank=4))
