"""One member of the trainings that ``elastic.py`` measures; it reports as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import potluck
from potluck import Cluster, ElasticSampler, ElasticTrainer, LocalSgd, TrainingState

Options = dict[str, Any]

WAIT = 60.0  # seconds for the others to come
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
RATE, WARM_UP = 3e-3, 50  # of the transformer's optimiser, and steps until it is reached
BATCH = 8  # sentences of a step


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
        multicast=bool(options.get("hosts")),
    )


# -- a member dies ---------------------------------------------------------------------------------


def recovery(options: Options) -> None:
    """Make steps until killed; say when each was committed, and among how many."""
    with join(options) as cluster:
        weights = np.zeros(1 << 16, np.float32)

        def apply(mean: Any) -> None:
            weights[:] -= 0.1 * mean

        trainer = ElasticTrainer(cluster, TrainingState(model=weights), apply)
        while True:
            time.sleep(0.005)  # what a step computes
            outcome = trainer.step(weights - 1)
            say(step=outcome.step, size=outcome.world_size, at=time.monotonic())


# -- unequal machines ------------------------------------------------------------------------------


def speeds(options: Options) -> None:
    """Samples per second with shares that follow speed, and by DDP with equal ones."""
    with join(options) as cluster:
        rank, size = cluster.rank, cluster.world_size
        cost = options["cost"] * options["factors"][rank]
        weights = np.zeros(1000, np.float32)
        trainer = ElasticTrainer(
            cluster,
            TrainingState(model=weights),
            lambda mean: None,
            sampler=ElasticSampler(1 << 30),
            batch=options["batch"],
        )
        trainer.start()
        for number in range(options["warm_up"] + options["steps"]):
            if number == options["warm_up"]:
                begun = time.perf_counter()
            time.sleep(cost * len(trainer.take()))
            trainer.step(weights)
        elastic = options["steps"] * options["batch"] / (time.perf_counter() - begun)
        cluster.barrier()
        plain, how = lock_step(cluster, cost * options["batch"] / size, options)
        say(rank=rank, elastic=elastic, plain=plain, how=how)
        cluster.barrier()


def lock_step(cluster: Cluster, seconds: float, options: Options) -> tuple[float, str]:
    """Samples per second when every member computes the same share for so long."""
    steps = options["plain_steps"]
    try:
        step, how = ddp_step(cluster, options), "DistributedDataParallel"
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


def ddp_step(cluster: Cluster, options: Options) -> Callable[[Callable[[], None]], None]:
    """A step of PyTorch's DDP over our process group."""
    import torch
    import torch.distributed as dist

    import potluck.torch  # noqa: F401 - registers the backend

    master = f"tcp://127.0.0.1:{options['port']}"
    dist.init_process_group(
        "potluck", init_method=master, rank=cluster.rank, world_size=cluster.world_size
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))

    def step(compute: Callable[[], None]) -> None:
        loss = model(torch.ones(4, 100)).sum()
        compute()
        loss.backward()

    return step


# -- averaging during the backward pass ------------------------------------------------------------


def overlap(options: Options) -> None:
    """Seconds of steps with and without overlap, turn by turn."""
    import contextlib

    import torch

    from potluck.training.elastic_torch import ElasticOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options["width"]
    layers = [torch.nn.Linear(width, width) for _ in range(options["layers"])]
    model = torch.nn.Sequential(*layers)
    with join(options) as cluster:
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
        cluster.barrier()


# -- rare communication ----------------------------------------------------------------------------


class Student:
    """The transformer of one member, its text and its optimiser."""

    def __init__(self, rank: int, options: Options) -> None:
        import torch

        from _convergence_model import Text, Transformer

        torch.set_num_threads(1)
        seed = options["seed"]
        self.model = Transformer(seed)
        self._text, self._steps = Text(seed), options["steps"]
        self._test = self._text.sentences(256)  # nobody trains on these: the same for all
        self._text.throw_again(1000 * seed + rank)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.computing = 0.0
        """Seconds spent on computing."""

    def _rate(self, step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * max(0.05, 1 - step / self._steps)

    def learn(self, average: Callable[[], None] = lambda: None) -> None:
        """One step; gradients may be averaged before they are applied."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model.loss(self._text.sentences(BATCH)).backward()
        self.computing += time.perf_counter() - begun
        average()
        begun = time.perf_counter()
        self.optimizer.step()
        self._schedule.step()
        self.computing += time.perf_counter() - begun

    @property
    def loss(self) -> float:
        """On text that nobody trained on."""
        import torch

        with torch.no_grad():
            return float(self.model.loss(self._test))


def transformer(options: Options) -> None:
    """Train it by averaging every step, or by DiLoCo."""
    with join(options) as cluster:
        student = Student(cluster.rank, options)
        count = options.get("only", options["steps"])
        cluster.barrier()
        sent, begun = int(COUNTER.read_text()), time.perf_counter()
        (every_step if options["how"] == "ddp" else diloco)(cluster, student, count, options)
        seconds, sent = time.perf_counter() - begun, int(COUNTER.read_text()) - sent
        loss = student.loss
        say(
            rank=cluster.rank,
            loss=loss,
            nbytes=sent,
            seconds=seconds / count,
            utilisation=student.computing / seconds,
            raw=4 * sum(each.numel() for each in student.parameters),
        )
        cluster.barrier()


def every_step(cluster: Cluster, student: Student, count: int, _: Options) -> None:
    """What DDP does: the mean of all gradients in each step, all bits."""
    import torch

    size = sum(each.numel() for each in student.parameters)
    flat = np.empty(size, np.float32)

    def average() -> None:
        gradients = [each.grad for each in student.parameters if each.grad is not None]
        np.concatenate([each.numpy().ravel() for each in gradients], out=flat)
        cluster.all_reduce(flat, "mean")
        parts = torch.from_numpy(flat).split([each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    for _ in range(count):
        student.learn(average)


def diloco(cluster: Cluster, student: Student, count: int, options: Options) -> None:
    """Meet every so many steps, compressed."""
    parameters = [each.detach() for each in student.parameters]
    meetings = LocalSgd(
        cluster, parameters, every=options["every"], overlap=options["overlap"], timeout=WAIT
    )
    meetings.start()
    for _ in range(count):
        student.learn()
        meetings.step(BATCH)
    meetings.finish()


if __name__ == "__main__":
    {
        "recovery": recovery,
        "speeds": speeds,
        "overlap": overlap,
        "transformer": transformer,
    }[sys.argv[1]](json.loads(sys.argv[2]))
