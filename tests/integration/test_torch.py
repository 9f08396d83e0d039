"""The backend of PyTorch among real processes: everything compared with what Gloo gives."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.place import Place
from support.ranks import Ranks
from support.torch_ranks import on_both, torch_group

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file through which the ranks find each other."""
    return str(tmp_path / "store")


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small numbers that every type can add up, different on each rank."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + rank * 3) % 11).reshape(shape).to(dtype)


# -- collectives ---------------------------------------------------------------------------------


def same(first: Any, second: Any) -> bool:
    """Whether two results are the same, tensors within rounding."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.allclose(
            first.double() if not first.is_complex() else first,
            second.double() if not second.is_complex() else second,
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def reduce_everything() -> list[Any]:
    """All reductions of all types, in all forms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for dtype, op in itertools.product(TYPES, ops):
        tensor = numbers(rank, 3, 2, dtype=dtype) % 4
        dist.all_reduce(tensor, op)
        found.append(tensor)
    for dtype, op in itertools.product(
        (torch.int32, torch.uint8), (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    ):
        tensor = numbers(rank, 5, dtype=dtype)
        dist.all_reduce(tensor, op)
        found.append(tensor)
    tensor = numbers(rank, 4).to(torch.complex64) * (1 + 2j)
    dist.all_reduce(tensor)
    found.append(tensor)
    tensor = numbers(rank, 4)
    dist.reduce(tensor, dst=1)
    found.append(tensor if rank == 1 else None)
    out = torch.empty(2)
    dist.reduce_scatter(out, [numbers(rank + part, 2) for part in range(size)])
    found.append(out)
    out = torch.empty(2, 3)
    dist.reduce_scatter_tensor(out, numbers(rank, 2 * size, 3))
    found.append(out)
    empty = torch.empty(0)
    dist.all_reduce(empty)
    found.append(empty)
    return found


def move_everything() -> list[Any]:
    """All collectives in which values only move, in all forms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []
    for dtype in (*TYPES, torch.bool, torch.complex64):
        tensor = numbers(rank, 2, 2, dtype=dtype)
        dist.broadcast(tensor, src=1)
        found.append(tensor)
        into = [torch.empty(3, dtype=dtype) for _ in range(size)]
        dist.all_gather(into, numbers(rank, 3, dtype=dtype))
        found.append(into)
    single = torch.empty(2 * size, 2)
    dist.all_gather_into_tensor(single, numbers(rank, 2, 2))
    found.append(single)
    into = [torch.empty(3) for _ in range(size)]
    dist.gather(numbers(rank, 3), into if rank == 1 else None, dst=1)
    found.append(into if rank == 1 else None)
    out = torch.empty(3)
    dist.scatter(out, [numbers(part, 3) for part in range(size)] if rank == 0 else None, src=0)
    found.append(out)
    into = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(into, [numbers(rank + part, 2) for part in range(size)])
    found.append(into)
    whole = torch.empty(size, 2)
    dist.all_to_all_single(whole, numbers(rank, size, 2))
    found.append(whole)
    uneven = torch.empty((rank + 1) * size, 2)
    sizes = [part + 1 for part in range(size)]
    source = numbers(rank, sum(sizes), 2)
    dist.all_to_all_single(uneven, source, [rank + 1] * size, sizes)
    found.append(uneven)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "list": [1] * rank})
    found.append(objects)
    told: list[Any] = [f"from {rank}", rank]
    dist.broadcast_object_list(told, src=1)
    found.append(told)
    given: list[Any] = [None]
    dist.scatter_object_list(given, list("abcd"[:size]) if rank == 0 else None, src=0)
    found.append(given)
    return found


def compare(place: Place, store: str) -> int:
    """Run everything on both backends; how many results there were."""
    checked = 0
    for index, program in enumerate((reduce_everything, move_everything)):
        expected, found = on_both(place, f"{store}{index}", program)
        assert len(expected) == len(found) > 10
        for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
            assert same(theirs, ours), (program.__name__, number, theirs, ours)
        checked += len(found)
    return checked


def test_collectives_give_what_gloo_gives(ranks: Ranks, store: str) -> None:
    """Every collective, reduction and type that Gloo has, on three ranks."""
    results = ranks.run(compare, 3, store)
    assert results[0] > 50
    assert results == results[:1] * 3


def go_beyond(place: Place, store: str) -> list[Any]:
    """What Gloo refuses or does otherwise."""
    with torch_group(place, store):
        rank, size = place.rank, place.world_size
        mean = numbers(rank, 4)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        scaled = torch.ones(2)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
        spread = numbers(rank, 4, 6)[:, ::2].t()
        expected = sum(numbers(each, 4, 6)[:, ::2].t() for each in range(size))
        dist.all_reduce(spread)
        truth = torch.tensor([rank == 0, True, False])
        dist.all_reduce(truth, dist.ReduceOp.MIN)
        uneven = [torch.empty(each + 1) for each in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        parts = [torch.full((each + 1,), 1.0) for each in range(size)]
        own = torch.empty(rank + 1)
        dist.reduce_scatter(own, parts)
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[rank, 0]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
        )
        dist.all_reduce(sparse)
        letters = [torch.empty(rank + 1) for _ in range(size)]
        dist.all_to_all(letters, [torch.full((each + 1,), float(rank)) for each in range(size)])
        assert [each.tolist() for each in letters] == [[float(n)] * (rank + 1) for n in range(size)]
        truths = torch.ones(1, dtype=torch.bool)
        failure = place.failure_of(dist.all_reduce, truths, dist.ReduceOp.AVG)
        assert torch.equal(spread, expected)  # type: ignore[arg-type]
        return [
            mean.tolist(),
            scaled.tolist(),
            truth.tolist(),
            [each.tolist() for each in uneven],
            own.tolist(),
            sparse.to_dense().tolist(),
            failure["kind"],
        ]


def test_uneven_and_sparse_and_strided_tensors(ranks: Ranks, store: str) -> None:
    """Means, scaled sums, truth values, strides, sizes that differ, sparse sums."""
    means = sum(numbers(rank, 4) for rank in range(3)) / 3
    for rank, result in enumerate(ranks.run(go_beyond, 3, store)):
        assert result[0] == pytest.approx(means.tolist())  # type: ignore[union-attr]
        assert result[1] == [1.5, 1.5]
        assert result[2] == [False, True, False]
        assert result[3] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        assert result[4] == [3.0] * (rank + 1)
        assert result[5] == [7.0, 1.0, 1.0, 0.0]
        assert result[6] == "UnsupportedOperation"


WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def average_integers(place: Place, store: str) -> list[Any]:
    """Means of integers, in each form."""
    with torch_group(place, store):
        average = dist.ReduceOp.AVG
        found = []
        for dtype in WHOLE:
            whole = torch.tensor([7, 0, 1 + place.rank, 40], dtype=dtype)
            if dtype.is_signed:
                whole[1] = -3 - place.rank
            dist.all_reduce(whole, average)
            found.append(whole.tolist())
        large = torch.full((20_000,), 2**60 + 1 + place.rank)
        dist.all_reduce(large, average)
        root = torch.tensor([5 + place.rank])
        dist.reduce(root, 0, average)
        part = torch.zeros(1, dtype=torch.int64)
        dist.reduce_scatter_tensor(part, torch.tensor([1, 2, 3]) * place.rank, average)
        parts = [torch.zeros(1, dtype=torch.int64)]
        dist.all_reduce_coalesced([parts[0].fill_(place.rank)], average)
        return [found, sorted(set(large.tolist())), root.item(), part.item(), parts[0].item()]


def test_the_mean_of_integers_is_truncated_as_by_nccl(ranks: Ranks, store: str) -> None:
    """Lightning asks for it wherever the backend is not Gloo: it counts batches in int64."""
    for rank, result in enumerate(ranks.run(average_integers, 3, store)):
        found, large, root, part, single = result
        for dtype, mean in zip(WHOLE, found, strict=True):
            # In eight bits a sum of 120 fits, and one of -12 is rounded towards zero.
            assert mean == [7, -4 if dtype.is_signed else 0, 2, 40], dtype
        assert large == [2**60 + 2]
        assert root == (6 if rank == 0 else 5 + rank)
        assert part == [1, 2, 3][rank]
        assert single == 1


def receive_less() -> list[Any]:
    """Short messages into long tensors: small, large, strided, from any rank, and too long ones."""
    found: list[Any] = []
    for count in (3, 300_000):
        into = torch.full((count + 5,), -1.0)
        strided = torch.full((count + 5, 2), -1.0)[:, 1]
        if dist.get_backend() == "gloo":  # which takes none
            strided = strided.contiguous()
        if dist.get_rank() == 0:
            for _ in range(4):
                dist.send(torch.arange(float(count)), 1)
        else:
            waiting = dist.irecv(into, 0)
            assert waiting is not None
            waiting.wait()
            dist.recv(strided, 0)
            anywhere = torch.full((count + 5,), -1.0)
            assert dist.recv(anywhere) == 0
            late = torch.full((count + 5,), -1.0)
            dist.recv(late, 0)
            found += [into, strided, anywhere, late]
    return found


def compare_less(place: Place, store: str) -> int:
    """The same on both backends; how many tensors were compared."""
    expected, found = on_both(place, store, receive_less)
    assert all(map(torch.equal, expected, found))
    assert all(each[-5:].tolist() == [-1.0] * 5 for each in found)
    return len(found)


def test_a_longer_tensor_receives_a_shorter_message_as_on_gloo(ranks: Ranks, store: str) -> None:
    """The message fills its beginning, the rest stays."""
    assert ranks.run(compare_less, 2, store) == [0, 8]


def receive_more(place: Place, store: str) -> str:
    """A message that is longer than the tensor for it."""
    with torch_group(place, store):
        if place.rank == 0:
            dist.send(torch.ones(4), 1)
            return ""
        return str(place.failure_of(dist.recv, torch.ones(3), 0)["text"])


def test_a_message_that_does_not_fit_is_refused(ranks: Ranks, store: str) -> None:
    """Nothing is cut off."""
    _, words = ranks.run(receive_more, 2, store)
    assert "16 bytes" in words
    assert "12" in words


def coalesce(place: Place, store: str) -> list[Any]:
    """Several tensors in one call, and calls within a context."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    with torch_group(place, store) as world:
        rank, size = place.rank, place.world_size
        sums = [torch.ones(2), torch.ones(3, 3)]
        with _coalescing_manager(world):
            for tensor in sums:
                dist.all_reduce(tensor)
        shares = [torch.full((2,), float(rank)), torch.full((1,), float(rank))]
        wholes = [torch.empty(2 * size), torch.empty(size)]
        with _coalescing_manager(world, async_ops=True) as manager:
            for whole, share in zip(wholes, shares, strict=True):
                dist.all_gather_into_tensor(whole, share)
        manager.wait()
        outs = [torch.empty(2), torch.empty(1)]
        with _coalescing_manager(world):
            for out, length in zip(outs, (2, 1), strict=True):
                dist.reduce_scatter_tensor(out, torch.arange(float(length * size)))
        with _coalescing_manager(world, torch.device("cpu")):
            dist.broadcast(sums[0], src=0)
        return [[each.tolist() for each in group] for group in (sums, wholes, outs)]


def test_coalesced_operations(ranks: Ranks, store: str) -> None:
    """What belongs to each tensor ends up there."""
    for rank, (sums, wholes, outs) in enumerate(ranks.run(coalesce, 2, store)):
        assert sums == [[2.0] * 2, [[2.0] * 3] * 3]
        assert wholes == [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0]]
        assert outs == [[4.0 * rank, 4.0 * rank + 2], [2.0 * rank]]


# -- works ---------------------------------------------------------------------------------------


def start_several(place: Place, store: str) -> list[Any]:
    """Works and futures of operations that are under way at the same time."""
    with torch_group(place, store):
        tensors = [torch.full((50_000,), float(number)) for number in range(6)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        doubled = works[3].get_future().then(lambda done: done.value()[0] * 2)
        barrier = dist.barrier(async_op=True)
        barrier.wait()
        assert all(work.is_completed() and work.is_success() for work in works)
        assert works[0].wait(timedelta(0))
        assert works[1].exception() is None
        assert works[1].result()[0] is tensors[1]

        def nest(done: Any) -> torch.Tensor:  # on the thread that does the works
            again: torch.Tensor = done.value()[0].clone()
            dist.all_reduce(again, async_op=True).get_future().wait()
            dist.all_reduce(again)
            return again

        first = dist.all_reduce(torch.ones(2), async_op=True)
        nested = first.get_future().then(nest).wait().tolist()
        return [doubled.wait()[0].item(), [t[7].item() for t in tensors], nested]


def test_several_works_are_under_way_at_once(ranks: Ranks, store: str) -> None:
    """They end in order, have futures, and a callback may start and await further ones."""
    for doubled, sums, nested in ranks.run(start_several, 2, store):
        assert doubled == 12.0
        assert sums == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert nested == [8.0, 8.0]


def wait_in_vain(place: Place, store: str) -> Any:
    """Rank 0 waits for an operation that the others do not start."""
    with torch_group(place, store) as world:
        dist.barrier()
        failures, work = [], None
        world.set_timeout(timedelta(seconds=0.4))
        if place.rank == 0:
            failures.append(place.failure_of(dist.all_reduce, torch.ones(2)))
            world.set_timeout(timedelta(seconds=20))
            work = dist.all_reduce(torch.ones(2), async_op=True)
            failures.append(place.failure_of(work.wait, timedelta(seconds=0.1)))
        place.wait_for_start()
        if place.rank == 0:
            assert work is not None
            work.wait()
        else:
            world.set_timeout(timedelta(seconds=20))
            place.failure_of(dist.all_reduce, torch.ones(2))
            dist.all_reduce(torch.ones(2))
        return failures


def test_a_timeout_names_who_is_missing(ranks: Ranks, store: str) -> None:
    """The limit of the group ends an operation; that of a wait leaves it under way."""
    both = ranks.start(wait_in_vain, 2, store)
    for rank in both:
        rank.expect("ready")
    for rank in both:
        rank.tell("go")
    first, second = both[0].value()
    both[1].value()
    assert "Timeout" in first["kinds"]
    assert first["rank"] == 1
    assert "timed out after" in first["text"]
    assert "the timeout of the call or of the process group" in first["text"]
    assert "Timeout" in second["kinds"]


def profile_operations(place: Place, store: str) -> list[str]:
    """The names of operations in a profile."""
    with torch_group(place, store):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 4))
            if place.rank == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(torch.ones(2), 0)
        dist.barrier()
        events = [event for event in profile.function_events if event.name.startswith("potluck:")]
        assert all(event.is_async for event in events)
        return sorted(f"{event.name} {event.input_shapes}" for event in events)


def test_a_profile_names_operations(ranks: Ranks, store: str) -> None:
    """With the shapes of their tensors."""
    first, second = ranks.run(profile_operations, 2, store)
    assert first == ["potluck:all_reduce [[3, 4]]", "potluck:send [[2]]"]
    assert second == ["potluck:all_reduce [[3, 4]]", "potluck:recv [[2]]"]
