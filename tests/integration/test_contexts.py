"""Contexts in real processes: arrays of every kind, objects, and groups written down by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedConfig, DistributedContext, RingBackend
from support.engine_suite import random_program
from support.place import Place
from support.ports import free_port
from support.programs import compare, run
from support.ranks import Ranks


def run_random_calls(place: Place, seed: int) -> bool:
    """Many collectives one after the other on one group."""
    program = random_program(place.world_size, seed)
    with DistributedContext(place.join()) as context:
        compare(program, context.rank, run(program, context))
        context.barrier()
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_random_calls_give_what_numpy_says(ranks: Ranks, size: int) -> None:
    """Over sealed connections, of all types, uneven, strided, started and waited for."""
    assert ranks.run(run_random_calls, size, 7) == [True] * size


def train_a_little(place: Place) -> list[float]:
    """What a user of PyTorch does by hand: one start, the mean of all gradients, the same end."""
    torch.manual_seed(place.rank)  # every rank starts with other parameters
    model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
    with DistributedContext(place.join()) as context:
        for parameter in model.parameters():
            context.broadcast(parameter)
        for step in range(3):
            loss = model(torch.full((1, 4), step + place.rank, dtype=torch.bfloat16)).sum()
            model.zero_grad()
            loss.backward()
            works = [
                context.all_reduce(parameter.grad, "mean", async_op=True)
                for parameter in model.parameters()
            ]
            for work in works:
                work.wait(30)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
        context.barrier()
    return [float(value) for parameter in model.parameters() for value in parameter.reshape(-1)]


def test_replicas_stay_equal(ranks: Ranks) -> None:
    """After a few steps by hand all ranks have the same parameters, bit by bit."""
    first, *others = ranks.run(train_a_little, 3)
    assert others == [first, first]


def exchange_in_a_ring(place: Place, peers: list[str]) -> list[Any]:
    """Form a group from a list of addresses."""
    with RingBackend(DistributedConfig(peers, place.rank)) as ring:
        array = np.full(1000, ring.rank + 1.0)
        ring.all_reduce(array)
        told = ring.all_gather_object({"rank": ring.rank, "pair": (1, 2**70)})
        ring.barrier()
        return [float(array[0]), [each["rank"] for each in told], told[0]["pair"] == (1, 2**70)]


def test_a_group_can_be_written_down_by_hand(ranks: Ranks) -> None:
    """Every process has the same list and its own rank."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    assert ranks.run(exchange_in_a_ring, 3, peers) == [[6.0, [0, 1, 2], True]] * 3
