"""What stands on ``torch.distributed`` runs on the backend unchanged: the weights are the same."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import potluck
import potluck.torch
from support.place import Place
from support.ranks import Ranks
from support.torch_ranks import Squares, on_both, torch_group

pytestmark = pytest.mark.slow

STEPS = 4
BATCH = 4
COMPRESSIONS = (
    *("none", "bfloat16", "float16", "int8", "onebit"),
    *("topk:0.2", "random:0.5", "powersgd:2", "auto"),
)

NEAR = {"none": 1e-4, "auto": 1e-4, "bfloat16": 0.05, "float16": 0.02, "int8": 0.2}
"""How far the weights may be from those of a plain training, as a part of the way there."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file through which the ranks find each other."""
    return str(tmp_path / "store")


class Model(nn.Module):
    """A small network; one layer is used only on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 8)
        self.rare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, rare: bool = True) -> torch.Tensor:
        """Three layers, or four."""
        x = torch.relu(self.second(torch.relu(self.first(x))))
        x = self.rare(x) if rare else x
        out: torch.Tensor = self.last(x)
        return out


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank learns from in a step."""
    source = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(BATCH, 6, generator=source)
    return x, x[:, :4] * 2 - 1


def weights(model: nn.Module) -> list[float]:
    """All parameters as numbers."""
    return [value for each in model.parameters() for value in each.detach().flatten().tolist()]


def train(
    model: nn.Module, steps: int = STEPS, *, again: bool = False, **options: Any
) -> list[list[float]]:
    """Train a replica, or ``again`` and again on one batch; its weights after every step."""
    rate = 0.03 if again else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    seen = []
    for step in range(steps):
        x, y = batch(0 if again else step, dist.get_rank())
        optimizer.zero_grad()
        ((model(x, **options) - y) ** 2).mean().backward()
        optimizer.step()
        seen.append(weights(model))
    return seen


def train_alone(world_size: int) -> list[list[float]]:
    """A single process on the joined batch."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        parts = [batch(step, rank) for rank in range(world_size)]
        x, y = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        seen.append(weights(model))
    return seen


# -- DistributedDataParallel ---------------------------------------------------------------------


def train_replicas(place: Place, store: str) -> list[Any]:
    """The same training in several ways, on both backends."""

    def everything() -> list[Any]:
        plain = train(DistributedDataParallel(Model(), bucket_cap_mb=0.001))
        view = train(
            DistributedDataParallel(Model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        )
        unused = train(
            DistributedDataParallel(Model(), find_unused_parameters=True),
            rare=dist.get_rank() == 0,
        )
        static = train(DistributedDataParallel(Model(), static_graph=True))
        joined = [join_uneven(), join_uneven(divide_by_initial_world_size=False)]
        return [plain, view, unused, static, accumulate(), *joined, zero_redundancy()]

    theirs, ours = on_both(place, store, everything)
    return [theirs, ours]


def accumulate() -> list[float]:
    """Two batches for each step, the first one without communication."""
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(0, STEPS, 2):
        optimizer.zero_grad()
        for part in (0, 1):
            x, y = batch(step + part, dist.get_rank())
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return weights(model)


def join_uneven(**options: bool) -> list[float]:
    """One rank has more batches than the others."""
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**options):
        for step in range(2 + dist.get_rank()):
            x, y = batch(step, dist.get_rank())
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    return weights(model)


def zero_redundancy() -> list[float]:
    """Each rank keeps the optimizer's state of a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return weights(model)


def test_replicas_train_as_on_gloo_and_as_one_process(ranks: Ranks, store: str) -> None:
    """Step by step: overlapped, as views, with unused layers, accumulated, with uneven inputs."""
    alone = train_alone(3)
    for theirs, ours in ranks.run(train_replicas, 3, store):
        for name, expected, found in zip(
            ("plain", "view", "unused", "static", "accumulated", "joined", "divided", "zero"),
            theirs,
            ours,
            strict=True,
        ):
            assert torch.allclose(torch.tensor(expected), torch.tensor(found), atol=1e-5), name
        assert torch.allclose(torch.tensor(alone), torch.tensor(ours[0]), atol=1e-5)


def loss_of(model: nn.Module) -> float:
    """How far it is off on the first batches of all ranks, as all of them see it."""
    x, y = batch(0, dist.get_rank())
    with torch.no_grad():
        loss = ((model(x) - y) ** 2).mean()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return float(loss)


def train_compressed(place: Place, store: str, names: list[str]) -> dict[str, Any]:
    """Train with every compression; the last weights and the mean loss."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    found: dict[str, Any] = {}
    with torch_group(place, store):
        for name in names:
            model = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
            hook = potluck.torch.compress_hook(name)
            model.register_comm_hook(None, hook)
            found[name] = train(model, 30, again=True)[-1]
            found[f"loss of {name}"] = loss_of(model)
            other = potluck.torch.compress_hook(name)
            other.load_state_dict(copy.deepcopy(hook.state_dict()))
            assert other.state_dict()["step"] == hook.compressor.step
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found["theirs"] = train(model, 6)[-1]
        half = DistributedDataParallel(nn.Linear(4, 2).to(torch.bfloat16))
        half.register_comm_hook(None, potluck.torch.compress_hook("int8"))
        half(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        found["half"] = half.module.weight.grad.float().flatten().tolist()
        plain = DistributedDataParallel(Model())
        found["loss at first"] = loss_of(plain)
        found["plain"] = train(plain, 30, again=True)[-1]
    return found


def test_compressed_gradients_train_as_well(ranks: Ranks, store: str) -> None:
    """By every method, with the same weights on all ranks, near those of the plain training."""
    first, second = ranks.run(train_compressed, 2, store, list(COMPRESSIONS))
    assert first == second
    assert first["half"] == [1.0] * 8
    plain = torch.tensor(first["plain"])
    start = torch.tensor(weights(Model()))
    for name in COMPRESSIONS:
        off = (torch.tensor(first[name]) - plain).norm() / (start - plain).norm()
        assert off < NEAR.get(name, 2.0), name
        assert first[f"loss of {name}"] < first["loss at first"] / 2, name


def train_by_builtin_hooks(place: Place, store: str) -> list[Any]:
    """PyTorch's hooks of C++ on both backends."""
    from torch._C._distributed_c10d import BuiltinCommHookType

    def everything() -> list[Any]:
        found = []
        for kind in (BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS):
            model: Any = DistributedDataParallel(Model(), bucket_cap_mb=0.001)
            model._register_builtin_comm_hook(kind)
            found.append(train(model)[-1])
        return found

    return list(on_both(place, store, everything))


def test_builtin_hooks_train_as_on_gloo(ranks: Ranks, store: str) -> None:
    """Those that C++ runs: one of them travels as float16."""
    for theirs, ours in ranks.run(train_by_builtin_hooks, 2, store):
        assert torch.allclose(torch.tensor(theirs), torch.tensor(ours), atol=1e-4)


# -- sharded models ------------------------------------------------------------------------------


def train_shards(place: Place, store: str) -> list[Any]:
    """FSDP2 on one and two dimensions, on both backends."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def gathered(model: nn.Module) -> list[float]:
        return [
            value
            for each in model.parameters()
            for value in each.full_tensor().flatten().tolist()  # type: ignore[attr-defined]
        ]

    def sharded(shape: tuple[int, ...], names: tuple[str, ...]) -> list[list[float]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = Model()
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(STEPS):
            x, y = batch(step, dist.get_rank())
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            seen.append(gathered(model))
        return seen

    return list(on_both(place, store, lambda: [sharded((4,), ("s",)), sharded((2, 2), ("r", "s"))]))


def test_sharded_models_train_as_on_gloo_and_as_one_process(ranks: Ranks, store: str) -> None:
    """Fully sharded, and replicated over one dimension of a mesh while sharded over the other."""
    alone = torch.tensor(train_alone(4))
    for theirs, ours in ranks.run(train_shards, 4, store):
        assert torch.allclose(torch.tensor(theirs), torch.tensor(ours), atol=1e-5)
        for each in ours:
            assert torch.allclose(alone, torch.tensor(each), atol=1e-5)


def use_tensors(place: Place, store: str, folder: str) -> list[Any]:
    """DTensor, tensor parallel, functional collectives, a pipeline, checkpoints, batch norm."""
    with torch_group(place, store):
        return [
            distribute(),
            parallelize(),
            call_functions(),
            stage(place),
            save_and_load(folder),
        ]


def distribute() -> float:
    """A matrix that lies on all ranks in parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    turned = parts.redistribute(mesh, [Shard(1)])
    assert torch.equal(turned.redistribute(mesh, [Replicate()]).to_local(), whole)
    total: float = (parts @ parts.t()).sum().full_tensor().item()  # type: ignore[attr-defined]
    assert total == pytest.approx((whole @ whole.t()).sum().item())
    return total


def parallelize() -> bool:
    """Two layers divided between the ranks by columns and rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = Model(), torch.ones(3, 6)
    expected = model(x)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    found = model(x)
    found.sum().backward()
    return torch.allclose(expected, found, atol=1e-6)


def call_functions() -> list[Any]:
    """Collectives that return new tensors."""
    import torch.distributed._functional_collectives as functional

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    total = functional.all_reduce(torch.ones(2) * rank, "sum", group) + 0
    parts = functional.all_gather_single(torch.ones(1) * rank, 0, group) + 0
    own = functional.reduce_scatter_single(torch.ones(4), "avg", 0, group) + 0
    swapped = functional.all_to_all_single(torch.ones(2) * rank, None, None, group) + 0
    return [each.tolist() for each in (total, parts, own, swapped)]


def stage(place: Place) -> list[float]:
    """A model in two stages, each on a rank of its own."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(7)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.ones(4, 4)
    expected = layers[1](layers[0](x))
    part = PipelineStage(layers[place.rank], place.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(
        part, n_microbatches=2, loss_fn=lambda out, target: (out - target).sum()
    )
    losses: list[torch.Tensor] = []
    if place.rank == 0:
        schedule.step(x)
        return []
    schedule.step(target=torch.zeros(4, 4), losses=losses)
    assert sum(each.item() for each in losses) == pytest.approx(expected.sum().item(), rel=1e-4)
    return [each.item() for each in losses]


def save_and_load(folder: str) -> bool:
    """A sharded model saved at once and in the background, and loaded into another."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import async_save, save
    from torch.distributed.fsdp import fully_shard

    model, other = Model(), Model()
    fully_shard(model)
    fully_shard(other)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)
    save(model.state_dict(), checkpoint_id=f"{folder}/plain")
    async_save(model.state_dict(), checkpoint_id=f"{folder}/async").result()  # type: ignore[union-attr]
    state = other.state_dict()
    for kind in ("plain", "async"):
        load(state, checkpoint_id=f"{folder}/{kind}")
        other.load_state_dict(state)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs.full_tensor())  # type: ignore[attr-defined]
    return True


def test_distributed_tensors_run_on_it(ranks: Ranks, store: str, tmp_path: Path) -> None:
    """DTensor, tensor parallel, functional collectives, pipeline stages and checkpoints."""
    for rank, result in enumerate(ranks.run(use_tensors, 2, store, str(tmp_path / "saved"))):
        total, is_parallel, functions, losses, is_saved = result
        assert total > 0
        assert is_parallel
        assert functions == [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
        assert len(losses) == 2 * rank
        assert is_saved


# -- workers that load data ----------------------------------------------------------------------


def load_data(place: Place, store: str, method: str) -> float:
    """Sum what workers load, on all ranks, while the group is in use."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    with torch_group(place, store):
        total = torch.zeros(1)
        dist.all_reduce(total)
        data = Squares()
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)
        loader = DataLoader(
            data, batch_size=2, sampler=sampler, num_workers=1, multiprocessing_context=method
        )
        for loaded in loader:
            part = loaded.sum().reshape(1)
            dist.all_reduce(part)
            total += part
        return total.item()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_load_data_beside_it(ranks: Ranks, store: str, method: str) -> None:
    """Forked and spawned; the group goes on before, while and after they live."""
    expected = float(sum(n * n for n in range(12)))
    assert ranks.run(load_data, 2, store, method) == [expected, expected]
