"""The transformer of the convergence study, trained by averaging in every step and by DiLoCo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from _convergence_model import Text, Transformer
from potluck import DistributedContext, LocalSgd, SimulatedBackend

RATE, WARM_UP = 3e-3, 50  # of the optimiser, and steps until it is reached
BATCH = 8  # sentences of a member in a step
WAIT = 600.0


class Student:
    """A transformer, its optimiser, and the text of one member or of several."""

    def __init__(self, ranks: Sequence[int], seed: int, steps: int) -> None:
        torch.set_num_threads(1)
        self.model = Transformer(seed)
        self._texts, self._steps = [Text(seed) for _ in ranks], steps
        self._test = self._texts[0].sentences(256)  # nobody trains on these
        for rank, text in zip(ranks, self._texts, strict=True):
            text.throw_again(1000 * seed + rank)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.computing = 0.0
        """Seconds spent on computing."""

    def _rate(self, step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP) * max(0.05, 1 - step / self._steps)

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return 4 * sum(each.numel() for each in self.parameters)

    def learn(self, average: Callable[[], None] = lambda: None) -> None:
        """One step; gradients may be averaged before they are applied."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        sentences = torch.cat([text.sentences(BATCH) for text in self._texts])
        self.model.loss(sentences).backward()  # type: ignore[no-untyped-call]
        self.computing += time.perf_counter() - begun
        average()
        begun = time.perf_counter()
        self.optimizer.step()
        self._schedule.step()
        self.computing += time.perf_counter() - begun

    @property
    def loss(self) -> float:
        """On text that nobody trained on."""
        with torch.no_grad():
            return float(self.model.loss(self._test))


def every_step(
    group: DistributedContext,
    student: Student,
    steps: int,
    watch: Callable[[int], None] = lambda _: None,
) -> None:
    """What DDP does: the mean of all gradients in each step, all bits."""
    flat = np.empty(student.nbytes // 4, np.float32)

    def average() -> None:
        gradients = [each.grad for each in student.parameters if each.grad is not None]
        np.concatenate([each.numpy().ravel() for each in gradients], out=flat)
        group.all_reduce(flat, "mean")
        sizes = [each.numel() for each in gradients]
        parts = torch.from_numpy(flat).split(sizes)  # type: ignore[no-untyped-call]
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    for number in range(steps):
        watch(number)
        student.learn(average)


def rarely(
    group: DistributedContext,
    student: Student,
    steps: int,
    how: tuple[int, int],
    watch: Callable[[int], None] = lambda _: None,
) -> LocalSgd:
    """Meet every so many steps, compressed; so many steps of computing may overlap with it."""
    every, overlap = how
    parameters = [each.detach() for each in student.parameters]
    meetings = LocalSgd(group, parameters, every=every, overlap=overlap, timeout=WAIT)
    meetings.start()
    for number in range(steps):
        watch(number)
        student.learn()
        meetings.step(BATCH)
    meetings.finish()
    return meetings


def plain_loss(members: int, steps: int, seed: int) -> float:
    """The loss of one machine that takes the batches of all members: what DDP computes."""
    student = Student(range(members), seed, steps)
    for _ in range(steps):
        student.learn()
    return student.loss


def rare_loss(members: int, steps: int, every: int, overlap: int, seed: int) -> dict[str, Any]:
    """Loss of members in one process that meet rarely, and how many times fewer bytes they send."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(members)]
    students = [Student([rank], seed, steps) for rank in range(members)]
    with ThreadPoolExecutor(members) as threads:
        done = list(
            threads.map(
                lambda rank: rarely(contexts[rank], students[rank], steps, (every, overlap)),
                range(members),
            )
        )
    for context in contexts:
        context.close()
    compressor = done[0].compressor
    assert compressor is not None
    fewer = steps / done[0].trainer.step_count * compressor.compression_ratio
    return {"loss": students[0].loss, "fewer": fewer, "steps": steps, "overlap": overlap}
