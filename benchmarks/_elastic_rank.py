"""One member of the trainings that ``elastic.py`` measures; it reports as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import potluck
from potluck import (
    Cluster,
    DistributedContext,
    ElasticSampler,
    ElasticTrainer,
    TcpBackend,
    TrainingState,
)

Options = dict[str, Any]

WAIT = 180.0  # seconds for the others to come: they may be slow to start
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def say(**facts: Any) -> None:
    """Tell whoever measures."""
    print(json.dumps(facts), flush=True)


def join(options: Options) -> Cluster:
    """Meet the others."""
    return potluck.join(
        options["nodes"],
        job=options["job"],
        timeout=WAIT,
        known=False,
        solo_delay=0.2,
        multicast=False,
    )


def meet(options: Options) -> DistributedContext:
    """A group that stays: nobody comes or goes while links and losses are measured."""
    backend = TcpBackend(options["rank"], options["nodes"], options["master"], timeout=WAIT)
    return DistributedContext(backend)


def leave(cluster: DistributedContext) -> None:
    """End together; what was measured has been said."""
    with contextlib.suppress(potluck.DistributedError):
        cluster.barrier(WAIT)


# -- a member dies ---------------------------------------------------------------------------------


def recovery(options: Options) -> None:
    """Make steps until killed; say when each was committed, and among how many."""
    with join(options) as cluster:
        weights = np.zeros(1 << 16, np.float32)

        def apply(mean: Any) -> None:
            weights[:] -= 0.1 * mean

        trainer = ElasticTrainer(cluster, TrainingState(model=weights), apply)
        trainer.start()
        while True:
            time.sleep(0.005)  # what a step computes
            outcome = trainer.step(weights - 1)
            say(step=outcome.step, size=outcome.world_size, at=time.monotonic())


# -- unequal machines ------------------------------------------------------------------------------


def speeds(options: Options) -> None:
    """Samples per second with shares that follow speed, and by DDP with equal ones."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - it takes long, and nobody shall wait for it in a step
    with join(options) as cluster:
        rank, size = cluster.rank, cluster.world_size
        cost = options["cost"] * options["factors"][rank]
        weights = np.zeros(1000, np.float32)
        trainer = ElasticTrainer(
            cluster,
            TrainingState(model=weights),
            lambda _: None,
            sampler=ElasticSampler(1 << 30),
            batch=options["batch"],
        )
        trainer.start()
        begun = 0.0
        for number in range(options["warm_up"] + options["steps"]):
            if number == options["warm_up"]:
                begun = time.perf_counter()
            time.sleep(cost * len(trainer.take()))
            trainer.step(weights)
        elastic = options["steps"] * options["batch"] / (time.perf_counter() - begun)
        plain, how = lock_step(cluster, (rank, size), cost * options["batch"] / size, options)
        say(rank=rank, elastic=elastic, plain=plain, how=how)
        leave(cluster)


def lock_step(
    cluster: Cluster, place: tuple[int, int], seconds: float, options: Options
) -> tuple[float, str]:
    """Samples per second when every member computes the same share for so long."""
    steps = options["plain_steps"]
    try:
        step, how = ddp_step(*place, options), "DistributedDataParallel"
    except ImportError:
        gradient = np.zeros(1000, np.float32)

        def step(compute: Callable[[], None]) -> None:
            compute()
            cluster.all_reduce(gradient, "mean")

        how = "equal shares in lock-step (PyTorch is not installed)"
    step(lambda: None)
    begun = time.perf_counter()
    for _ in range(steps):
        step(lambda: time.sleep(seconds))
    return steps * options["batch"] / (time.perf_counter() - begun), how


def ddp_step(rank: int, size: int, options: Options) -> Callable[[Callable[[], None]], None]:
    """A step of PyTorch's DDP over our process group."""
    import torch
    import torch.distributed as dist

    import potluck.torch  # noqa: F401 - registers the backend

    master = f"tcp://127.0.0.1:{options['port']}"
    dist.init_process_group("potluck", init_method=master, rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))

    def step(compute: Callable[[], None]) -> None:
        loss = model(torch.ones(4, 100)).sum()
        compute()
        loss.backward()

    return step


# -- averaging during the backward pass ------------------------------------------------------------


def overlap(options: Options) -> None:
    """Seconds of steps with and without overlap, turn by turn."""
    import torch

    from potluck.torch.elastic import ElasticOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options["width"]
    layers = [torch.nn.Linear(width, width) for _ in range(options["layers"])]
    model = torch.nn.Sequential(*layers)
    with meet(options) as cluster:
        inner = torch.optim.SGD(model.parameters(), lr=1e-4)
        optimizer = ElasticOptimizer(inner, model, cluster, verify_every=0)
        optimizer.start()
        rows = torch.randn(options["rows"], width)
        times: dict[bool, list[float]] = {True: [], False: []}
        backwards = []
        for number in range(2 * options["rounds"] + 2):
            does_overlap = bool(number % 2)
            optimizer.zero_grad()
            cluster.barrier()
            begun = time.perf_counter()
            loss = model(rows).square().mean()
            with optimizer.overlap() if does_overlap else contextlib.nullcontext():
                loss.backward()
            if not does_overlap:
                backwards.append(time.perf_counter() - begun)
            optimizer.step()
            times[does_overlap].append(time.perf_counter() - begun)
        say(
            rank=cluster.rank,
            overlapped=times[True][1:],
            plain=times[False][1:],
            computing=backwards[1:],
            nbytes=4 * sum(each.numel() for each in model.parameters()),
        )
        leave(cluster)


# -- rare communication ----------------------------------------------------------------------------


def transformer(options: Options) -> None:
    """Train it by averaging every step, or by DiLoCo; what leaves this host, and when."""
    from _elastic_transformer import Student, every_step, rarely

    with meet(options) as cluster:
        student = Student([cluster.rank], options["seed"], options["steps"])
        begun = sent = 0.0
        warm_up = options["warm_up"]

        def watch(step: int) -> None:
            """Count from here on: links are measured once, when there is something to send."""
            nonlocal begun, sent
            if step == warm_up:
                cluster.barrier()
                student.computing = 0.0
                begun, sent = time.perf_counter(), int(COUNTER.read_text())

        steps = warm_up + options["only"]
        if options["how"] == "ddp":
            every_step(cluster, student, steps, watch)
        else:
            rarely(cluster, student, steps, (options["every"], options["overlap"]), watch)
        seconds, sent = time.perf_counter() - begun, int(COUNTER.read_text()) - sent
        say(
            rank=cluster.rank,
            nbytes=sent / options["only"],
            seconds=seconds / options["only"],
            utilisation=student.computing / seconds,
        )
        leave(cluster)


if __name__ == "__main__":
    {
        "recovery": recovery,
        "speeds": speeds,
        "overlap": overlap,
        "transformer": transformer,
    }[sys.argv[1]](json.loads(sys.argv[2]))
