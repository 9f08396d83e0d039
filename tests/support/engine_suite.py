"""What every backend must do, for those over an engine as for those over TCP.

Run by every rank of a group; under ``mpirun`` as a program of its own.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from potluck import DistributedContext, RpcAgent
from potluck.backend.base import Backend
from potluck.schedule.reduce import DTYPES
from support.programs import KINDS, Step, compare, run

PATIENCE = 30.0
STEPS = 40


def random_program(size: int, seed: int, steps: int = 60) -> list[Step]:
    """The same calls in every process."""
    dice = random.Random(seed)
    return [
        Step(
            kind=dice.choice(KINDS),
            dtype=dice.choice(DTYPES),
            counts=tuple(dice.choice([0, 1, 3, 50, 9000]) for _ in range(size)),
            width=dice.randrange(1, 4),
            root=dice.randrange(size),
            strided=dice.random() < 0.3,
            started=dice.random() < 0.3,
            seed=dice.randrange(1 << 32),
        )
        for _ in range(steps)
    ]


def exercise(backend: Backend, seed: int = 11) -> None:
    """Use everything, as a rank of a group in which all others do the same."""
    program = random_program(backend.world_size, seed, STEPS)
    with DistributedContext(backend) as context:
        compare(program, context.rank, run(program, context))
        add_up(context)
        pass_messages(context)
        split(context)
        call_each_other(context)
        context.barrier(PATIENCE)


def add_up(context: DistributedContext) -> None:
    """Sums of what an engine can add up itself, of what it cannot, and compressed."""
    size = context.world_size
    for dtype in ("f4", "f8", "i4", "u2", "f2"):
        array = np.full(5000, context.rank + 1, dtype)
        context.all_reduce(array, timeout=PATIENCE)
        assert (array == size * (size + 1) // 2).all()
    mean = np.full(3, context.rank, np.float32)
    assert context.all_reduce(mean, "mean", timeout=PATIENCE) is mean
    tree: dict[str, Any] = {"w": np.ones(3, np.float32), "layers": [np.full(2, 2, np.int16), 0.5]}
    total = context.all_reduce(tree, timeout=PATIENCE)
    assert total["w"] is tree["w"]
    assert (tree["w"] == size).all()
    assert total["layers"][1] == size / 2
    assert mean.tolist() == [(size - 1) / 2] * 3
    kept = np.arange(10.0) * context.rank
    result = np.zeros(10)
    context.all_reduce(kept, out=result, timeout=PATIENCE)
    assert kept[1] == context.rank
    assert result[1] == size * (size - 1) / 2
    rough = np.full(70_000, 1.0, np.float32)
    context.all_reduce(rough, compression="int8", timeout=PATIENCE)
    assert np.allclose(rough, size, rtol=0.02)
    told = context.all_gather_object({"rank": context.rank, "large": 2**70})
    assert [each["rank"] for each in told] == list(range(size))


def pass_messages(context: DistributedContext) -> None:
    """Around in a circle: small and large, by tags, the second taken first."""
    after, before = (context.rank + 1) % context.world_size, context.rank - 1
    large = np.arange(700_000.0)
    leaving = [context.isend(large, after, tag=5), context.isend(large[:3], after, tag=6)]
    small, whole = np.zeros(3), np.zeros(large.size)
    context.recv(small, before % context.world_size, tag=6, timeout=PATIENCE)
    context.recv(whole, before % context.world_size, tag=5, timeout=PATIENCE)
    for work in leaving:
        work.wait(PATIENCE)
    assert small.tolist() == [0, 1, 2]
    assert np.array_equal(whole, large)


def split(context: DistributedContext) -> None:
    """Some ranks as a group of their own."""
    members = [rank for rank in range(context.world_size) if rank != 1]
    if context.rank in members:
        with context.subgroup(members) as part:
            array = np.ones(4)
            part.all_reduce(array, timeout=PATIENCE)
            assert array.tolist() == [len(members)] * 4


def call_each_other(context: DistributedContext) -> None:
    """Everybody asks everybody."""
    with RpcAgent(context) as agent:
        agent.register("echo", lambda data: data + bytes([context.rank]))
        context.barrier(PATIENCE)
        for rank in range(context.world_size):
            assert agent.rpc_sync(rank, "echo", b"x" * 9999, PATIENCE)[-1] == rank
        context.barrier(PATIENCE)


if __name__ == "__main__":
    from potluck import MpiBackend

    exercise(MpiBackend())
    sys.stdout.write("everything was right\n")
