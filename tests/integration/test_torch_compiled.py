"""``torch.compile`` and the backend: compiled programs give what they give on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.place import Place
from support.ranks import Ranks
from support.torch_ranks import on_both

pytestmark = pytest.mark.slow

Compile = Callable[[Any], Any]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file through which the ranks find each other."""
    return str(tmp_path / "store")


def network() -> nn.Sequential:
    """Two layers, the same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model: nn.Module) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        source = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 4, generator=source)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compiled_inside(compiled: Compile) -> list[float]:
    """A compiled module in DistributedDataParallel."""
    return train(DistributedDataParallel(compiled(network())))


def compiled_replica(compiled: Compile) -> list[float]:
    """DistributedDataParallel, compiled; its buffers are broadcast in every step."""
    return train(compiled(DistributedDataParallel(network())))


def functional_collectives(compiled: Compile) -> list[float]:
    """Collectives that return new tensors, within a graph."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None

    def program(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        parts = functional.all_gather_tensor(total + x, 0, group)
        own: torch.Tensor = functional.reduce_scatter_tensor(parts, "avg", 0, group)
        return own.cos()

    found: torch.Tensor = compiled(program)(torch.arange(4.0) + dist.get_rank())
    return found.tolist()


def collectives_in_place(compiled: Compile) -> list[float]:
    """Collectives that change their tensors, between parts of a program."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        whole = torch.empty(8)
        dist.all_gather_into_tensor(whole, y + x)
        part = torch.empty(4)
        dist.reduce_scatter_tensor(part, whole)
        work = dist.all_reduce(part, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(part, 1)
        return part.sin()

    found: torch.Tensor = compiled(program)(torch.arange(4.0) + dist.get_rank())
    return found.tolist()


def compiled_shards(compiled: Compile) -> list[float]:
    """FSDP 2."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0])
    fully_shard(model)
    return train(compiled(model))


def compiled_parallel(compiled: Compile) -> list[float]:
    """Tensor parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = compiled(model)
    x = torch.arange(12.0).reshape(3, 4)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.item()]


FORMS = {
    form.__name__: form
    for form in (
        compiled_inside,
        compiled_replica,
        functional_collectives,
        collectives_in_place,
        compiled_shards,
        compiled_parallel,
    )
}


def compile_forms(place: Place, store: str, engine: str, names: list[str]) -> list[Any]:
    """Some of the forms on both backends."""
    import torch._dynamo

    def run() -> list[list[float]]:
        found = []
        for name in names:
            torch._dynamo.reset()
            found.append(FORMS[name](lambda what: torch.compile(what, backend=engine)))
        return found

    return list(on_both(place, store, run))


def check_forms(ranks: Ranks, store: str, engine: str, names: list[str], patience: float) -> None:
    """Whether compiled forms give the same on both backends."""
    for theirs, ours in ranks.run(compile_forms, 2, store, engine, names, timeout=patience):
        for name, expected, found in zip(names, theirs, ours, strict=True):
            assert found == pytest.approx(expected, abs=1e-5), name


def test_compiled_programs_give_what_they_give_on_gloo(ranks: Ranks, store: str) -> None:
    """All six forms, with the compiler's own graphs run as they are."""
    check_forms(ranks, store, "aot_eager", list(FORMS), 120)


def test_a_replica_is_compiled_to_machine_code(ranks: Ranks, store: str) -> None:
    """By inductor, which needs a C++ compiler."""
    check_forms(ranks, store, "inductor", ["compiled_replica"], 120)


@pytest.mark.soak
def test_all_compiled_forms_run_as_machine_code(ranks: Ranks, store: str) -> None:
    """By inductor, all six."""
    check_forms(ranks, store, "inductor", list(FORMS), 600)
