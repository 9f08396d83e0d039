"""The process group on ranks in one process: what it accepts, refuses and calls itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from potluck import SimulatedBackend
from potluck.errors import InvalidRank, UnsupportedOperation
from potluck.training.forming import Options
from potluck.training.process_group import ProcessGroup
from support.threads import together


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
        (lambda g: g.alltoall_base(torch.ones(3), torch.ones(3), [], []), "not the same for 2"),
        (lambda g: g.alltoall_base(torch.ones(2), torch.ones(2), [2], [1, 1]), "one tensor for"),
        (lambda g: g.alltoall_base(torch.ones(2), torch.ones(2), [1, 1], [2, 2]), "4 rows"),
        (lambda g: g.allreduce([torch.ones(1), torch.ones(1).int()]), "one type"),
        (lambda g: g.allreduce_coalesced([torch.ones(1).to_sparse()]), "one by one"),
        (lambda g: g.allreduce_coalesced([]), "at least one"),
        (lambda g: g.allgather([], torch.ones(1)), "one tensor for each"),
        (lambda g: g.reduce_scatter_single_coalesced([], []), "at least one"),
        (lambda g: g.all_gather_single_coalesced([], [torch.ones(1)]), "Each input needs"),
        (lambda g: g.allreduce(torch.ones(1).to_sparse(), dist.ReduceOp.MAX), "can be summed"),
        (lambda g: g.allreduce(torch.ones(1).bool(), dist.ReduceOp.AVG), "mean"),
        (lambda g: g.allreduce(torch.ones(1), "sum"), "no reduction"),
        (lambda g: g._get_backend(torch.device("cuda")), "of the CPU, not of cuda"),
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
