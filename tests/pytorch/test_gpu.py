"""Tensors on a device; here the device is the processor, or one that has no memory at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from potluck import DistributedContext, HybridBackend, SimulatedBackend, TorchBackend
from potluck.torch import gpu
from support.gloo import gloo_groups
from support.threads import together


def test_a_tensor_is_added_up_by_the_engine_that_takes_it(tmp_path: Path) -> None:
    """Also in a hybrid, and through a context."""
    groups = gloo_groups(tmp_path, 2)
    engines = together(*(lambda group=group: TorchBackend(group) for group in groups))
    hybrids = [
        HybridBackend(messages, engine)
        for messages, engine in zip(SimulatedBackend.create_group(2), engines, strict=True)
    ]

    def work(backend: HybridBackend) -> list[list[float]]:
        with DistributedContext(backend) as context:
            total = gpu.gpu_allreduce(torch.full((3,), backend.rank + 1.0), context, timeout=20)
            mean = gpu.gpu_allreduce(torch.full((2,), float(backend.rank)), backend, "mean")
            told = gpu.gpu_broadcast(torch.full((1,), float(backend.rank)), backend, root=1)
            context.barrier()
            return [total.tolist(), mean.tolist(), told.tolist()]

    results = together(*(lambda hybrid=hybrid: work(hybrid) for hybrid in hybrids))
    assert results == [[[3.0] * 3, [0.5] * 2, [1.0]]] * 2


def test_without_an_engine_a_tensor_goes_through_the_host() -> None:
    """On the processor that needs no word."""

    def work(backend: SimulatedBackend) -> float:
        with backend:
            tensor = torch.ones(4, dtype=torch.bfloat16).reshape(2, 2).t()
            gpu.gpu_allreduce(tensor, backend)
            gpu.gpu_broadcast(tensor, backend)
            backend.barrier()
            return float(tensor.sum())

    ranks = SimulatedBackend.create_group(2)
    assert together(*(lambda rank=rank: work(rank) for rank in ranks)) == [8.0, 8.0]


def test_a_detour_through_the_host_is_mentioned_once() -> None:
    """Whoever has a device wants to know why it is slow."""
    with pytest.warns(UserWarning, match="host's memory"):
        gpu._warn(torch.device("meta"))
    gpu._warn(torch.device("meta"))
