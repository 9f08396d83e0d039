"""One rank of the benchmark of training steps: the same model on both backends, turn by turn."""

from __future__ import annotations

import copy
import functools
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["COMPUTING", "GLOO", "OURS", "PATIENCE", "SUMS", "Part", "run_rank"]

GLOO, OURS = "Gloo", "potluck"
COMPUTING, SUMS = "computing", "sums"
"""A step without the sums, and the sums without a step."""
PATIENCE = 300.0  # seconds
WARM_UP = 3
"""Steps that do not count: in the first, buckets are cut anew and links measured; in the next two,
memory for what compression leaves behind is touched for the first time."""


@dataclass(frozen=True)
class Part:
    """One comparison."""

    ranks: int
    model: str
    layers: int
    width: int
    rounds: int
    bar: float
    """What our step may take, as a part of Gloo's."""
    what: str = ""
    """In words."""
    rate: str | None = None
    """Of each cable, in the words of ``tc``; None on loopback."""
    compression: str = ""


def make_model(part: Part) -> Any:
    """Linear layers, or many small ones that go back through Python."""
    import torch
    from torch import nn

    class Slow(torch.autograd.Function):
        """Does nothing, in Python."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            total = 0
            for number in range(2000):  # about what a small layer written in Python does
                total += number
            return gradients[0]

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(part.width, part.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slowed: torch.Tensor = Slow.apply(torch.tanh(self.layer(x)))  # type: ignore[no-untyped-call]
            return slowed

    torch.manual_seed(0)
    if part.model == "small":
        return nn.Sequential(*(Small() for _ in range(part.layers)))
    return nn.Sequential(*(nn.Linear(part.width, part.width) for _ in range(part.layers)))


def make_contenders(part: Part, rank: int, master: str) -> dict[str, Any]:
    """The same model twice, each on a backend of its own."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import potluck.torch

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{master}",
        rank=rank,
        world_size=part.ranks,
        timeout=timedelta(seconds=PATIENCE),
    )
    options = potluck.torch.Options(namespace="insecure")
    ours = dist.new_group(backend="potluck", pg_options=options)
    model = make_model(part)
    made = {
        name: DistributedDataParallel(
            copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True
        )
        for name, group in ((GLOO, dist.group.WORLD), (OURS, ours))
    }
    if part.compression:
        hook = potluck.torch.compress_hook(part.compression, process_group=ours)
        made[OURS].register_comm_hook(None, hook)
    return made


def run_rank(rank: int, master: str, part: Part, folder: Path) -> None:
    """One of the processes that measure; leaves what it saw in a file."""
    logging.disable()
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    models = make_contenders(part, rank, master)
    x = torch.randn(8, part.width, generator=torch.Generator().manual_seed(rank))
    taken: dict[str, list[tuple[float, float]]] = {}
    for number in range(WARM_UP + part.rounds):
        order = list(models) if number % 2 else list(models)[::-1]
        actions: dict[str, Callable[[], None]] = {
            name: functools.partial(step, models[name], x) for name in order
        }
        if not part.compression:
            actions[COMPUTING] = functools.partial(step_alone, models[GLOO], x)
            for name in order:
                actions[f"{SUMS} {name}"] = functools.partial(sum_up, models[name])
        for name, action in actions.items():
            took = timed(action)
            if number >= WARM_UP:
                taken.setdefault(name, []).append(took)
    difference = max(
        float((mine - theirs).abs().max())
        for mine, theirs in zip(models[OURS].parameters(), models[GLOO].parameters(), strict=True)
    )
    dist.barrier()
    facts: dict[str, Any] = {"taken": taken, "difference": difference}
    facts["parameters"] = sum(each.numel() for each in models[OURS].parameters())
    (folder / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of processors in all threads; begun by all ranks at once."""
    import torch.distributed as dist

    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - start, time.process_time() - worked


def step(model: Any, x: Any, rate: float = 0.01) -> None:
    """One step of training."""
    import torch

    model.zero_grad(set_to_none=False)
    model(x).square().mean().backward()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(each.grad, alpha=-rate)


def step_alone(model: Any, x: Any) -> None:
    """The same without the others, and without learning from it."""
    with model.no_sync():
        step(model, x, rate=0.0)


def sum_up(model: Any) -> None:
    """As many bytes as a step sends, and nothing else."""
    import torch
    import torch.distributed as dist

    count = sum(each.numel() for each in model.parameters())
    bucket = 25 << 18  # 25 MiB of float32, as DistributedDataParallel cuts them
    vector = torch.zeros(min(bucket, count))
    for start in range(0, count, bucket):
        dist.all_reduce(vector[: min(bucket, count - start)], group=model.process_group)
