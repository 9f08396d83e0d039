"""A training of the demo as one node runs it: an elastic trainer on numpy arrays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import potluck
from potluck.apps.cli.demo_mail import Mail
from potluck.apps.cli.demo_messages import Committed, Finished, LinkLine, Progress, Setup
from potluck.apps.cli.demo_model import Model, spirals
from potluck.runtime.survey import FAST, QUICKEST

__all__ = ["Training"]

BATCH = 192
"""Points of all nodes together in one step."""

POINTS, UNSEEN = 12 * BATCH, 1000
"""Points to learn from, and points for the accuracy at the end."""

LAST = 10
"""The last tenth of the steps, and at least so many, show how much the loss wobbles."""

NEWS_EVERY, LINKS_EVERY = 0.1, 0.5
"""Seconds between two lines of progress, and between two looks at the links."""


class Training:
    """One run from the first parameters on; all nodes make the same ones from the seed."""

    def __init__(self, run: str, setup: Setup, cluster: potluck.Cluster, mail: Mail) -> None:
        self._run, self.cluster, self._mail = run, cluster, mail
        self._points, self._labels = spirals(POINTS, setup.seed)
        self._unseen = spirals(UNSEEN, setup.seed + 1)
        self._model = Model(setup.seed)
        self._sums = np.empty(self._model.size, np.float32)
        self._sampler = potluck.ElasticSampler(POINTS, seed=setup.seed)
        self._end = np.zeros(1, np.float32)  # part of the state: whoever gets that knows it, too
        state = potluck.TrainingState(model={**self._model.tree, "end": self._end})
        self.trainer = potluck.ElasticTrainer(
            cluster, state, self._apply, sampler=self._sampler, batch=BATCH
        )
        self._losses: list[float] = []
        self._weight = 0.0
        self._reporter = _Reporter(run, cluster, mail)

    @property
    def step_count(self) -> int:
        """Steps that are committed."""
        return self.trainer.step_count

    def start(self) -> None:
        """Meet the others, and get the state if they have begun."""
        self.trainer.start()

    def run(self, is_done: Callable[[int], bool], *, pace: float) -> None:
        """Train until one of the nodes finds that it is done, and tell the result.

        The wish to end is averaged like the gradients, so all nodes end after the same step.
        """
        began, due = time.monotonic(), time.monotonic()
        has_all = self.step_count == 0  # whether all steps are counted here
        epoch = 0
        while not self._end[0]:
            due = max(time.monotonic(), due + pace) if pace else 0.0
            indices = self.trainer.take()
            wants_to_end = is_done(self.step_count + 1)
            outcome = self.trainer.step(self._gradients(indices, wants_to_end=wants_to_end))
            self._weight += outcome.weight
            has_all = has_all and outcome.counted
            if self.trainer.position.epoch != epoch:
                epoch, now = self.trainer.position.epoch, time.monotonic()
                self._mail.tell(Committed(outcome.step, epoch, outcome.world_size, now))
            if self._losses:
                last = len(indices), self._losses[-1], bool(self._end[0])
                self._reporter.report(self.trainer, last)
            time.sleep(max(0.0, due - time.monotonic()))
        self._mail.tell(self._result(time.monotonic() - began, self._weight if has_all else 0.0))

    def _gradients(self, indices: Any, *, wants_to_end: bool) -> dict[str, Any]:
        count = max(1, len(indices))
        loss = self._model.gradient(self._points[indices], self._labels[indices], self._sums)
        return {
            "gradient": self._sums / np.float32(count),
            "loss": np.array([loss / count], np.float32),
            "end": np.array([wants_to_end], np.float32),
        }

    def _apply(self, mean: Any) -> None:
        """For committed steps alone, on every node with the same bits."""
        self._model.update(mean["gradient"])
        self._end[:] = mean["end"] > 0
        self._losses.append(float(mean["loss"][0]))

    def _result(self, seconds: float, weight: float) -> Finished:
        model, sampler = self._model, self._sampler
        last = self._losses[-max(LAST, self.step_count // LAST) :] or [0.0]
        return Finished(
            run=self._run,
            step=self.step_count,
            loss=model.loss(self._points, self._labels),
            wobble=max(last) - min(last),
            accuracy=model.accuracy(*self._unseen),
            fingerprint=model.fingerprint,
            samples=sampler.epoch * POINTS + POINTS - sampler.remaining,
            weight=weight,
            averaged=self._reporter.averaged,
            seconds=seconds,
        )


class _Reporter:
    """Tells how training goes, not too often."""

    def __init__(self, run: str, cluster: potluck.Cluster, mail: Mail) -> None:
        self._run, self._cluster, self._mail = run, cluster, mail
        self._told = self._looked = time.monotonic()
        self._step: int | None = None
        self._links: list[LinkLine] = []
        self._rates = 0, 0
        self._is_limit = False

    @property
    def averaged(self) -> int:
        """Bytes of the arrays that went through collectives in this process."""
        snapshot = self._cluster.metrics_snapshot()
        return sum(each.bytes_processed for each in snapshot.operations.values()) if snapshot else 0

    @property
    def _rate(self) -> float:
        snapshot = self._cluster.metrics_snapshot()
        return snapshot.all_reduce.bytes_per_second if snapshot else 0.0

    def report(self, trainer: potluck.ElasticTrainer, last: tuple[int, float, bool]) -> None:
        """Tell if the last news is old enough, or if this is the end."""
        now, (share, loss, is_over) = time.monotonic(), last
        elapsed = now - self._told
        if elapsed < NEWS_EVERY and not is_over and self._step is not None:
            return
        if now - self._looked >= LINKS_EVERY or self._step is None:
            self._look()
            self._looked = now
        step, before = trainer.step_count, self._step
        view, me = self._cluster.view, self._cluster.process
        rank = view.rank_of(me) if view is not None else None
        self._mail.tell(
            Progress(
                run=self._run,
                step=step,
                loss=loss,
                epoch=trainer.position.epoch,
                rank=-1 if rank is None else rank,
                share=share,
                averaged=self.averaged,
                rate=self._rate,
                speed=0.0 if before is None else (step - before) / elapsed,
                up=self._rates[0],
                down=self._rates[1],
                is_limit=self._is_limit,
                links=self._links,
            )
        )
        self._told, self._step = now, step

    def _look(self) -> None:
        """How the links are: heartbeats say how long, collectives how much."""
        self._links = [
            LinkLine(str(each.peer), each.status.value, each.reason, each.round_trip)
            for each in self._cluster.health.peers
        ]
        with contextlib.suppress(potluck.DistributedError):  # a view that ends just now
            links, view = self._cluster.group.links, self._cluster.view
            rank = None if view is None else view.rank_of(self._cluster.process)
            if rank is not None and rank < len(links.up):
                self._is_limit = min(links.up[rank], links.down[rank]) < QUICKEST
                self._rates = min(links.up[rank], FAST), min(links.down[rank], FAST)
