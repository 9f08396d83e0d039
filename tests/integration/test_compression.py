"""Compressed all-reduces among real processes, over TCP: sealed, plain, and when one is killed."""

import hashlib
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, GradientCompressor, NetworkNamespace, TcpBackend
from potluck.errors import DistributedError
from support.gradients import normal, relative_error
from support.place import Place, as_failure
from support.ranks import Ranks
from support.threads import PATIENCE

COUNT = 400_000
METHODS = (
    "float16",
    "bfloat16",
    "int8",
    "onebit",
    "topk:0.01",
    "random:0.01",
    "powersgd:2",
    "auto",
)


def train(place: Place, is_plain: bool) -> list[tuple[str, float]]:
    """Three steps by each method: what all ranks must have, and how far it is from the truth."""
    namespace = NetworkNamespace.insecure() if is_plain else None
    backend = TcpBackend(place.rank, place.world_size, place.master, namespace=namespace)
    wanted = sum(normal(COUNT, rank).astype(np.float64) for rank in range(place.world_size))
    ends = []
    with DistributedContext(backend) as context:
        for method in METHODS:
            compressor = GradientCompressor(method)
            total = np.zeros((800, 500))
            for _ in range(3):
                gradient = normal(COUNT, place.rank).reshape(800, 500)
                total += context.all_reduce(gradient, compression=compressor, timeout=PATIENCE)
            digest = hashlib.sha256(total.tobytes()).hexdigest()
            mean = (total / 3).reshape(-1).astype(np.float32)
            ends.append((digest, relative_error(mean, np.asarray(wanted, np.float32))))
        context.barrier()
    return ends


@pytest.mark.parametrize("is_plain", [False, True], ids=["sealed", "plain"])
def test_all_processes_end_with_the_same_bits(ranks: Ranks, *, is_plain: bool) -> None:
    """Whatever the method; those that keep every value come near to the sum as well."""
    results = ranks.run(train, 3, is_plain)
    for index, method in enumerate(METHODS):
        assert len({result[index][0] for result in results}) == 1, method
        if method in {"float16", "bfloat16", "int8"}:
            assert results[0][index][1] < 0.01, method


def sum_until_the_end(place: Place) -> Any:
    """Sum again and again; what went wrong."""
    with place.join() as backend, DistributedContext(backend) as context:
        compressor = GradientCompressor("int8", auto_commit=False)
        context.all_reduce(normal(COUNT), compression=compressor, timeout=PATIENCE)
        compressor.commit()
        before = compressor.state_dict()["residuals"][""].tobytes()
        place.say("going")
        try:
            while True:
                context.all_reduce(normal(COUNT), compression=compressor, timeout=PATIENCE)
        except DistributedError as error:
            compressor.discard()
            after = compressor.state_dict()["residuals"][""].tobytes()
            return as_failure(error), before == after


def test_a_killed_rank_leaves_the_memory_of_the_others_as_it_was(ranks: Ranks) -> None:
    """The step that failed never was."""
    processes = ranks.start(sum_until_the_end, 3)
    for process in processes:
        process.expect("going")
    processes[2].kill()
    for process in processes[:2]:
        failure, is_same = process.value()
        assert failure["rank"] == 2
        assert is_same
