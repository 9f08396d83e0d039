"""Who takes part: Potluck, plain and sealed; Gloo as PyTorch ships it; Open MPI by mpi4py."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from collectives.memory import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Memory
from potluck import (
    AllReduceStrategy,
    CollectiveConfig,
    DistributedContext,
    NetworkNamespace,
    SecurityWarning,
    TcpBackend,
)
from potluck.collective.call import Call
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Task

__all__ = ["FLAT", "GLOO", "OPEN_MPI", "PINNED", "PLAIN", "SEALED", "Contender", "enter"]

PLAIN, SEALED, GLOO, OPEN_MPI = "potluck", "potluck sealed", "Gloo", "Open MPI"
PINNED = "potluck: "
"""Potluck in clear with one strategy for everything, whose name follows."""
FLAT = f"{PINNED}one level"
"""Potluck in clear, as it is with ``two_levels=False``."""
PATIENCE = 60  # seconds after which an operation gives up

Step = Callable[[], object]


class Contender(Protocol):
    """One library in one group of ranks."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def prepare(self, memory: Memory) -> Step:
        """What does the operation once."""

    def describe(self, memory: Memory) -> str:
        """How it is done, as far as that is known."""

    def close(self) -> None:
        """Leave."""


class Potluck:
    """A group over TCP, as users see it; or with ``is_bare`` its executor alone."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        master: str,
        *,
        is_bare: bool = False,
    ) -> None:
        logging.disable(logging.WARNING)  # plain TCP warns twice, and it is meant
        warnings.simplefilter("ignore", SecurityWarning)
        namespace = None if name == SEALED else NetworkNamespace.insecure()
        backend = TcpBackend(rank, world_size, master, timeout=PATIENCE, namespace=namespace)
        self._context = DistributedContext(backend, CollectiveConfig(two_levels=name != FLAT))
        is_pinned = name.startswith(PINNED) and name != FLAT
        self._strategy = AllReduceStrategy.named(name.removeprefix(PINNED)) if is_pinned else None
        self.group = self._context.group
        self._is_bare = is_bare

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.group.barrier(PATIENCE)

    def prepare(self, memory: Memory) -> Step:
        """What does the operation once."""
        call, context = replace(call_for(memory), strategy=self._strategy), self._context
        source, target = memory.source, memory.target
        if self._is_bare:
            return lambda: self.group.run(call, PATIENCE)
        steps: dict[str, Step] = {
            ALL_REDUCE: lambda: context.all_reduce(target, strategy=self._strategy),
            BROADCAST: lambda: context.broadcast(target, 0),
            REDUCE_SCATTER: lambda: context.reduce_scatter(source, out=target),
            ALL_GATHER: lambda: context.all_gather(source, out=target),
            ALL_TO_ALL: lambda: context.all_to_all(source, out=target),
        }
        return steps[memory.collective]

    def describe(self, memory: Memory) -> str:
        """The plan in a few words."""
        call = replace(call_for(memory), strategy=self._strategy)
        plan = self.group._plans.compiled(call).plan  # noqa: SLF001 - only to show it
        shares = ":".join(map(str, plan.shares)) if len(set(plan.shares)) > 1 else ""
        return f"{plan.strategy} {shares} {plan.piece >> 10}K".replace("  ", " ")

    def close(self) -> None:
        """Leave."""
        self._context.close()


def call_for(memory: Memory) -> Call:
    """A case as the executor wants it."""
    size, source, target = memory.world_size, memory.source, memory.target
    collective = Collective(memory.collective)
    if collective is Collective.ALL_TO_ALL:
        task = Task.exchange([[source.size // size] * size] * size)
    elif collective.has_blocks:
        task = Task.blocks(collective, [max(source.size, target.size) // size] * size)
    else:
        task = Task.whole(collective, size, source.size)
    reducer = Reducer.of(ReduceOp.SUM, source.dtype) if collective.reduces else None
    return Call(task, source[: task.input(memory.rank).length], target, reducer)


class Gloo:
    """``torch.distributed`` over TCP, in clear: it has nothing else."""

    def __init__(self, rank: int, world_size: int, master: str) -> None:
        warnings.simplefilter("ignore")
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._group = torch.distributed
        self._tensor = torch.from_numpy
        self._group.init_process_group(
            "gloo",
            init_method=f"tcp://{master}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE),
        )

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._group.barrier()

    def prepare(self, memory: Memory) -> Step:
        """What does the operation once."""
        source, target = self._tensor(memory.source), self._tensor(memory.target)
        dist: Any = self._group
        steps: dict[str, Step] = {
            ALL_REDUCE: lambda: dist.all_reduce(target),
            BROADCAST: lambda: dist.broadcast(target, 0),
            REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(target, source),
            ALL_GATHER: lambda: dist.all_gather_into_tensor(target, source),
            ALL_TO_ALL: lambda: dist.all_to_all_single(target, source),
        }
        return steps[memory.collective]

    def describe(self, memory: Memory) -> str:  # noqa: ARG002 - it does not say
        """It chooses by itself."""
        return ""

    def close(self) -> None:
        """Leave."""
        self._group.destroy_process_group()


class OpenMpi:
    """The world that ``mpirun`` started; over TCP, as its options say."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD
        self._in_place = MPI.IN_PLACE

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._world.Barrier()

    def prepare(self, memory: Memory) -> Step:
        """What does the operation once."""
        world, source, target = self._world, memory.source, memory.target
        steps: dict[str, Step] = {
            ALL_REDUCE: lambda: world.Allreduce(self._in_place, target),
            BROADCAST: lambda: world.Bcast(target, 0),
            REDUCE_SCATTER: lambda: world.Reduce_scatter_block(source, target),
            ALL_GATHER: lambda: world.Allgather(source, target),
            ALL_TO_ALL: lambda: world.Alltoall(source, target),
        }
        return steps[memory.collective]

    def describe(self, memory: Memory) -> str:  # noqa: ARG002 - it does not say
        """It chooses by itself."""
        return ""

    def close(self) -> None:
        """``mpi4py`` ends its world when the process ends."""


def enter(
    name: str, rank: int, world_size: int, master: str, *, is_bare: bool = False
) -> Contender:
    """Take part in the group of this name."""
    if name == OPEN_MPI:
        return OpenMpi()
    if name == GLOO:
        return Gloo(rank, world_size, master)
    return Potluck(name, rank, world_size, master, is_bare=is_bare)
