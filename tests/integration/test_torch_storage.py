"""The memory of tensors stays the user's: no operation changes what its storage can do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from potluck.arrays.torch import TensorMemory
from support.place import Place
from support.ranks import Ranks
from support.threads import eventually
from support.torch_ranks import on_both, torch_group

Tensors = list[torch.Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file through which the ranks find each other."""
    return str(tmp_path / "store")


# -- storages ------------------------------------------------------------------------------------


def reductions(one: Callable[..., torch.Tensor], size: int) -> Iterator[tuple[Tensors, Any]]:
    """Reductions under way, with their tensors."""
    op = dist.ReduceOp.BOR if one().dtype is torch.bool else dist.ReduceOp.SUM
    yield [t := one()], dist.all_reduce(t, op, async_op=True)
    yield [t := one()], dist.reduce(t, 0, op, async_op=True)
    parts = [one() for _ in range(size)]
    yield [t := one(), *parts], dist.reduce_scatter(t, parts, op, async_op=True)
    yield [t := one(), s := one(size)], dist.reduce_scatter_tensor(t, s, op, async_op=True)
    listed = [one(), one()]
    yield listed, dist.all_reduce_coalesced(listed, op, async_op=True)


def movements(one: Callable[..., torch.Tensor], size: int) -> Iterator[tuple[Tensors, Any]]:
    """Collectives that only move values, with their tensors."""
    rank = dist.get_rank()
    yield [t := one()], dist.broadcast(t, 0, async_op=True)
    parts = [one() for _ in range(size)]
    yield [t := one(), *parts], dist.all_gather(parts, t, async_op=True)
    yield [t := one(), s := one(size)], dist.all_gather_into_tensor(s, t, async_op=True)
    parts = [one() for _ in range(size)] if rank == 0 else []
    yield [t := one(), *parts], dist.gather(t, parts or None, 0, async_op=True)
    yield [t := one(), *parts], dist.scatter(t, parts or None, 0, async_op=True)
    yield [t := one(size), s := one(size)], dist.all_to_all_single(s, t, async_op=True)


def exchanges(one: Callable[..., torch.Tensor], size: int) -> Iterator[tuple[Tensors, Any]]:
    """Collectives that ask for sizes first, and wait for that."""
    parts, into = [one() for _ in range(size)], [one() for _ in range(size)]
    yield [*parts, *into], dist.all_to_all(into, parts, async_op=True)


def messages(one: Callable[..., torch.Tensor]) -> Iterator[tuple[Tensors, Any]]:
    """Messages, with their tensors."""
    other = 1 - dist.get_rank()
    yield [t := one()], dist.isend(t, other)
    yield [t := one()], dist.irecv(t, other)
    yield [t := one()], dist.isend(t, other)
    yield [t := one()], dist.irecv(t)


def use_storages(place: Place, store: str) -> int:
    """Resize every storage after every operation; how many there were."""
    checked = 0
    with torch_group(place, store):
        for dtype in DTYPES:
            for count in (5, 20_000):

                def one(times: int = 1, dtype: Any = dtype, count: int = count) -> torch.Tensor:
                    return torch.ones(times * count, dtype=dtype)

                collectives = (reductions(one, 2), movements(one, 2), exchanges(one, 2))
                for tensors, work in chain(*collectives, messages(one)):
                    if work is not None:
                        work.wait()
                    check_storages(tensors)
                    checked += 1
        strided = torch.ones(8, 6)[:, ::2]
        dist.all_reduce(strided)
        parameter = nn.Parameter(torch.ones(4))
        dist.broadcast(parameter, 0)
        empty = torch.ones(0)
        dist.all_reduce(empty)
        check_storages([strided, parameter, empty])
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, TensorMemory)]
    return checked


def check_storages(tensors: Tensors) -> None:
    """Each can be given away and taken again."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        assert storage.resizable()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)


def test_no_operation_changes_what_a_storage_can_do(ranks: Ranks, store: str) -> None:
    """Each collective and message, of several types and sizes; and no view of one is kept."""
    assert ranks.run(use_storages, 2, store) == [160, 160]


def start_early(one: Callable[..., torch.Tensor], size: int) -> Iterator[tuple[Tensors, Any]]:
    """Operations that rank 0 starts before rank 1 does, with their tensors."""
    for tensors, work in (*reductions(one, size), *movements(one, size)):
        if work is not None:
            yield tensors, work
    t = one(2)
    yield [t], dist.irecv(t[: t.numel() // 2], 1, tag=1)
    yield [t], dist.irecv(t[t.numel() // 2 :], 1, tag=2)


def resize_early(place: Place, store: str) -> list[int]:
    """Try to resize storages under operations that cannot end yet; how many there were."""
    signs = dist.FileStore(f"{store}.signs", 2)  # type: ignore[attr-defined]

    def one(times: int = 1) -> torch.Tensor:
        return torch.ones(times * 20_000)

    with torch_group(place, store):
        if place.rank == 0:
            under_way = list(start_early(one, 2))
            storages = [each.untyped_storage() for tensors, _ in under_way for each in tensors]
            refused = sum(map(is_refused, storages))  # they wait for the first, which cannot end
            signs.set("go", "")
            for _, work in under_way:
                work.wait()
            for tensors, _ in under_way:
                check_storages(tensors)
            return [len(under_way), len(storages), refused]
        signs.wait(["go"])
        for _, work in (*reductions(one, 2), *movements(one, 2)):
            if work is not None:
                work.wait()
        dist.send(one(), 0, tag=1)
        dist.send(one(), 0, tag=2)
        return []


def is_refused(storage: torch.UntypedStorage) -> bool:
    """Whether a storage cannot be given away now."""
    try:
        storage.resize_(0)
    except RuntimeError as error:
        return "not resizable" in str(error)
    return False


def test_a_storage_in_use_cannot_be_resized(ranks: Ranks, store: str) -> None:
    """PyTorch refuses it until the operation has ended: no byte lands in memory that was freed."""
    (under_way, storages, refused), _ = ranks.run(resize_early, 2, store)
    assert under_way == 13
    assert refused == storages > 20


def abort_early(place: Place, store: str) -> bool:
    """End an operation by force; whether its storage can be resized then."""
    with torch_group(place, store) as group:
        tensor = torch.ones(6)
        if place.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            assert is_refused(tensor.untyped_storage())
            group.abort()
            with pytest.raises(Exception, match="aborted"):
                work.wait()
            eventually(tensor.untyped_storage().resizable)
        is_free = tensor.untyped_storage().resizable()
        place.say("done")
        place.hear("leave")  # the other one must see the abort, not that we left
        return is_free


def test_a_storage_can_be_resized_after_a_failure(ranks: Ranks, store: str) -> None:
    """What the operation held is given back however it ends."""
    started = ranks.start(abort_early, 2, store)
    for rank in started:
        rank.expect("done")
    for rank in started:
        rank.tell("leave")
    assert [rank.value() for rank in started] == [True, True]


def move_early(place: Place, store: str) -> str:
    """Give a storage other memory under an operation that cannot end yet; what its work says."""
    with torch_group(place, store):
        tensor = torch.ones(6)
        if place.rank == 0:
            work = dist.irecv(tensor, 1)
            assert work is not None
            tensor.share_memory_()  # type: ignore[no-untyped-call]
            dist.barrier()
            try:
                work.wait()
            except RuntimeError as error:
                return str(error)
            return ""
        dist.barrier()
        dist.send(tensor, 0)
        return ""


def test_a_storage_that_is_moved_too_early_is_named(ranks: Ranks, store: str) -> None:
    """The result went to the former memory, which is kept until then: that is an error."""
    words, _ = ranks.run(move_early, 2, store)
    assert "moved while an operation used it" in words
    assert "call wait()" in words


# -- FSDP 1 --------------------------------------------------------------------------------------

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")


def train_shards(place: Place, store: str) -> list[Any]:
    """FullyShardedDataParallel in every strategy on both backends: losses and parameters."""
    return list(on_both(place, store, lambda: [shard(name) for name in STRATEGIES]))


def shard(name: str) -> list[float]:
    """The losses of a few steps, and the parameters in the end."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if "HYBRID" in name else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to use a GPU
        model = FullyShardedDataParallel(
            nn.Sequential(*layers),
            sharding_strategy=ShardingStrategy[name],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for step in range(3):
            source = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 6, generator=source)
            loss = ((model(x) - x[:, :4]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        with FullyShardedDataParallel.summon_full_params(model):
            found += [v for each in model.parameters() for v in each.detach().flatten().tolist()]
    return found


def test_every_strategy_of_fsdp_trains_as_on_gloo(ranks: Ranks, store: str) -> None:
    """Losses and parameters are the same; storages are given away and taken again in each step."""
    for theirs, ours in ranks.run(train_shards, 4, store):
        for name, expected, found in zip(STRATEGIES, theirs, ours, strict=True):
            assert torch.allclose(torch.tensor(expected), torch.tensor(found), atol=1e-5), name
