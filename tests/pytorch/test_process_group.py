"""The process group on ranks in one process: what it accepts, refuses and calls itself."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from potluck import SimulatedBackend
from potluck.arrays.base import Access
from potluck.cluster.metrics_endpoint import process_metrics
from potluck.errors import InvalidRank, UnsupportedOperation
from potluck.torch.process_group import ProcessGroup, TensorBundle
from potluck.torch.store import Options
from support.ports import free_port
from support.threads import PATIENCE, eventually, together


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """Two ranks."""
    made = [
        ProcessGroup(backend, timedelta(seconds=20), "pair")
        for backend in SimulatedBackend.create_group(2)
    ]
    yield made
    for group in made:
        group.shutdown()


def on_all(groups: list[ProcessGroup], action: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Do the same on all ranks at once."""
    return together(*(lambda each=group: action(each) for group in groups))


def test_it_is_called_as_pytorch_calls_it(groups: list[ProcessGroup]) -> None:
    """With options, with arguments, with lists and with single tensors."""

    def everything(group: ProcessGroup) -> list[Any]:
        rank = group.rank()
        one, two, three, four = (torch.full((2,), rank + 1.0) for _ in range(4))
        group.allreduce(one).wait()
        group.allreduce([two], dist.ReduceOp.MAX).wait()
        group.reduce(three, 1, dist.ReduceOp.SUM).wait()
        group.broadcast(four, 1).wait()
        into = [torch.empty(2), torch.empty(2)]
        group.allgather(into, torch.full((2,), float(rank))).wait()
        lists = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
        group.allgather_coalesced(lists, [torch.ones(1) * rank, torch.ones(2) * rank]).wait()
        got = [torch.empty(2), torch.empty(2)]
        group.gather(got if rank == 0 else [], torch.full((2,), float(rank)), 0).wait()
        own = torch.empty(2)
        group.scatter(own, [torch.ones(2), torch.zeros(2)] if rank == 0 else [], 0).wait()
        part = torch.empty(1)
        group.reduce_scatter(part, [torch.ones(1), torch.ones(1) * 2]).wait()
        group.barrier().wait()
        assert group._get_sequence_number_for_group() == 10
        return [
            *(each.tolist() for each in (one, two, three, four, own, part)),
            [each.tolist() for each in into],
            [[each.tolist() for each in group] for group in lists],
            [each.tolist() for each in got] if rank == 0 else None,
        ]

    first, second = on_all(groups, everything)
    assert first[:6] == [[3.0] * 2, [2.0] * 2, [1.0] * 2, [2.0] * 2, [1.0] * 2, [2.0]]
    assert second[:6] == [[3.0] * 2, [2.0] * 2, [3.0] * 2, [2.0] * 2, [0.0] * 2, [4.0]]
    assert first[6] == second[6] == [[0.0] * 2, [1.0] * 2]
    assert first[7] == [[[0.0], [0.0] * 2], [[1.0], [1.0] * 2]]
    assert first[8] == [[0.0] * 2, [1.0] * 2]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda g: g.broadcast(torch.ones(1), 7), "Rank 7 does not exist"),
        (lambda g: g.allgather([torch.ones(1)], torch.ones(1)), "one tensor for each"),
        (lambda g: g.all_gather_single(torch.ones(3), torch.ones(1)), "2 times as large"),
        (lambda g: g.reduce_scatter_single(torch.ones(1), torch.ones(5)), "2 times as large"),
        (
            lambda g: g.alltoall_base(torch.ones(3), torch.ones(3), [], []),
            "split evenly over 2 ranks",
        ),
        (lambda g: g.alltoall_base(torch.ones(2), torch.ones(2), [2], [1, 1]), "one tensor for"),
        (lambda g: g.alltoall_base(torch.ones(2), torch.ones(2), [1, 1], [2, 2]), "4 rows"),
        (lambda g: g.allreduce([torch.ones(1), torch.ones(1).int()]), "the same dtype"),
        (lambda g: g.allreduce_coalesced([torch.ones(1).to_sparse()]), "one by one"),
        (lambda g: g.allreduce_coalesced([]), "at least one"),
        (lambda g: g.allgather([], torch.ones(1)), "one tensor for each"),
        (lambda g: g.reduce_scatter_single_coalesced([], []), "at least one"),
        (lambda g: g.all_gather_single_coalesced([], [torch.ones(1)]), "Each input needs"),
        (lambda g: g.allreduce(torch.ones(1).to_sparse(), dist.ReduceOp.MAX), "can be summed"),
        (lambda g: g.allreduce(torch.ones(1).bool(), dist.ReduceOp.AVG), "mean"),
        (lambda g: g.allreduce(torch.ones(1), "sum"), "not support the reduction"),
        (lambda g: g._get_backend(torch.device("cuda")), "CPU tensors only, got 'cuda'"),
    ],
)
def test_mistakes_are_refused_before_anything_moves(
    groups: list[ProcessGroup], call: Callable[[ProcessGroup], Any], reason: str
) -> None:
    """The rank that makes one gets the reason, and the others nothing to wait for."""
    kinds = (ValueError, TypeError, RuntimeError, InvalidRank, UnsupportedOperation)
    with pytest.raises(kinds, match=reason):
        call(groups[0])


def test_coalesced_tensors_may_differ_in_type_and_layout(groups: list[ProcessGroup]) -> None:
    """As with Gloo: each of them gets what belongs to it."""

    def everything(group: ProcessGroup) -> list[Any]:
        rank = group.rank()
        whole, numbers = torch.empty(4), torch.empty(2, dtype=torch.int64)
        turned = torch.empty(2, 4).t()
        shares = [torch.full((2,), float(rank)), torch.tensor([rank])]
        group.allgather_into_tensor_coalesced([whole, numbers], shares).wait()
        block = torch.arange(4.0).reshape(2, 2) + 10 * rank
        group.allgather_into_tensor_coalesced([turned], [block]).wait()
        part, number = torch.empty(1), torch.empty(1, dtype=torch.int64)
        sources = [torch.arange(2.0), torch.arange(2)]
        group.reduce_scatter_tensor_coalesced([part, number], sources).wait()
        return [each.tolist() for each in (whole, numbers, turned, part, number)]

    first, second = on_all(groups, everything)
    assert first[:2] == second[:2] == [[0.0, 0.0, 1.0, 1.0], [0, 1]]
    assert first[2] == second[2] == [[0.0, 1.0], [2.0, 3.0], [10.0, 11.0], [12.0, 13.0]]
    assert (first[3:], second[3:]) == ([[0.0], [0]], [[2.0], [2]])


def test_a_group_has_names_and_limits(groups: list[ProcessGroup]) -> None:
    """They are those that PyTorch gives it."""
    group = groups[0]
    assert (group.name(), group.group_name, group.size()) == ("potluck", "pair", 2)
    group._set_group_desc("two of them")
    assert group.group_desc == "two of them"
    assert repr(group) == "<ProcessGroup 'pair', rank 0 of 2>"
    group.set_timeout(timedelta(0))
    assert group.context.timeout is None
    assert group._get_backend(torch.device("cpu")) is group
    assert group._device_types == [torch.device("cpu")]


def test_options_are_ours() -> None:
    """Those of another backend are refused by name."""
    assert Options.read(None) == Options()
    assert Options.read(Options("lab")).namespace == "lab"
    with pytest.raises(TypeError, match=r"potluck\.torch\.Options, not a dict"):
        Options.read({})


# --------------------------------------------------------------------------------------------------
# Metrics of process groups: all groups of a process count in one place.


@pytest.fixture
def fresh() -> Iterator[None]:
    """As in a process that has had no group yet."""
    process_metrics.cache_clear()
    yield
    process_metrics.cache_clear()


def reduce_on_two_ranks() -> None:
    """Once at once, once started and waited for."""
    groups = [
        ProcessGroup(backend, timedelta(seconds=20), "pair")
        for backend in SimulatedBackend.create_group(2)
    ]
    try:
        together(*(lambda each=group: each.allreduce(torch.ones(4)).wait() for group in groups))
        together(*(lambda each=group: each.barrier().wait() for group in groups))
    finally:
        for group in groups:
            group.shutdown()


def test_operations_of_all_groups_are_counted(fresh: None) -> None:
    """What is under way counts when it ends, on the thread that ends it."""
    reduce_on_two_ranks()
    reduce_on_two_ranks()
    metrics = process_metrics()
    eventually(lambda: metrics.snapshot().all_reduce.completed == 4)
    eventually(lambda: metrics.snapshot().barrier.completed == 4)
    assert metrics.snapshot().all_reduce.bytes_processed == 4 * 16


def test_they_are_served_where_the_environment_says_so(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script for PyTorch needs no change to be watched."""
    endings: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", endings.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    port = free_port()
    monkeypatch.setenv("POTLUCK_METRICS_PORT", str(port))
    try:
        reduce_on_two_ranks()
        url = f"http://127.0.0.1:{port}/metrics"
        page = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()
        assert "potluck_uptime_seconds" in page
    finally:
        (end,) = endings
        end()


# --------------------------------------------------------------------------------------------------
# Several tensors as one vector: in place where they lie side by side, through a copy elsewhere.


def test_neighbours_are_one_vector_without_a_copy() -> None:
    """Parts of one tensor, as sharded models have them, are used where they are."""
    whole = torch.arange(12.0)
    bundle = TensorBundle(whole.split([5, 0, 7]), Access.UPDATE)  # type: ignore[no-untyped-call]
    assert not bundle.is_copy
    assert bundle.vector.data_ptr() == whole.data_ptr()
    before = whole._version
    bundle.commit()
    assert whole._version > before


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.arange(3.0), torch.arange(4.0)],
        [torch.arange(8.0)[::2]],
        [torch.arange(6.0).reshape(2, 3).t()],
        [torch.arange(6.0)[3:], torch.arange(6.0)[:3]],
        [torch.tensor([1 + 2j]).conj()],
    ],
    ids=["apart", "strided", "turned", "swapped", "conjugated"],
)
def test_others_are_copied_there_and_back(tensors: list[torch.Tensor]) -> None:
    """What was in them is in the vector, and what was done to that is in them."""
    expected = [tensor.clone() * 2 for tensor in tensors]
    bundle = TensorBundle(tensors, Access.UPDATE)
    assert bundle.is_copy
    bundle.vector *= 2
    bundle.commit()
    assert all(map(torch.equal, tensors, expected))


def test_what_is_only_read_stays_as_it_is() -> None:
    """A copy that was scribbled on does not come home."""
    tensors = [torch.ones(2), torch.ones(3)]
    bundle = TensorBundle(tensors, Access.READ)
    bundle.vector.zero_()
    bundle.commit()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "at least one"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int32)], "the same dtype"),
        ([torch.ones(2, 2).to_sparse()], "accepts sparse tensors"),
    ],
)
def test_what_cannot_be_one_vector_is_refused(tensors: list[torch.Tensor], reason: str) -> None:
    """Before anything has moved."""
    with pytest.raises((ValueError, TypeError), match=reason):
        TensorBundle(tensors, Access.READ)
