"""One node of ``potluck demo``: an elastic training script, in NumPy alone.

The demo starts it once for each node, as ``python -m potluck.apps.cli.demo_node SETTINGS``.  It
prints a line of JSON after each step and after each run, and ends when its standard input does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

import potluck

Array: TypeAlias = NDArray[np.floating]

BATCH = 192  # samples of one step, over all nodes
POINTS, UNSEEN = 12 * BATCH, 1000  # to learn from, and for the accuracy at the end
TOGETHER = 10  # steps that a view has made before the training may end
RATE, DECAY_1, DECAY_2, TINY = 2e-3, 0.9, 0.99, 1e-8  # the constants of Adam


def spirals(count: int, seed: int, dtype: DTypeLike = np.float32) -> tuple[Array, Array]:
    """Points of two interleaved spirals, and which spiral each belongs to (0 or 1).

    >>> points, labels = spirals(6, seed=1)
    >>> points.shape, labels.ravel().tolist()
    ((6, 2), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    """
    source = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    radius = np.sqrt(source.uniform(0.05, 1.0, count))
    angle = radius * 2.5 * np.pi + labels * np.pi
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    points += source.normal(0.0, 0.02, points.shape)
    return points.astype(dtype), labels.astype(dtype)[:, None]


class Model:
    """Two hidden layers, and one output: the score that a point is on spiral 1."""

    def __init__(self, seed: int, hidden: int = 256, dtype: DTypeLike = np.float32) -> None:
        self._shapes = [(2, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden, 1), (1,)]
        self.size = sum(map(math.prod, self._shapes))
        self.state: Array = np.zeros((3, self.size), dtype)  # parameters, and Adam's two averages
        self.steps = np.zeros(1, np.int64)
        source = np.random.default_rng(seed)
        for weights in self._layers()[::2]:
            # The first layer starts wide, so that some of its units bend within the spirals.
            spread = 4.0 if len(weights) == 2 else 1 / math.sqrt(len(weights))  # noqa: PLR2004
            weights[...] = source.normal(0.0, spread, weights.shape)

    def _layers(self) -> list[Array]:
        parts = np.split(self.state[0], np.cumsum([math.prod(each) for each in self._shapes])[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def learn(self, points: Array, labels: Array) -> tuple[float, Array, int]:
        """The loss and its gradient, summed over these points, and how many are put right."""
        first, first_bias, second, second_bias, last, last_bias = self._layers()
        low = np.tanh(points @ first + first_bias)
        high = np.tanh(low @ second + second_bias)
        score = high @ last + last_bias
        error = 1 / (1 + np.exp(-score)) - labels
        high_error = (error @ last.T) * (1 - high * high)
        low_error = (high_error @ second.T) * (1 - low * low)
        pairs = (points, low_error), (low, high_error), (high, error)
        parts = [part for x, e in pairs for part in ((x.T @ e).ravel(), e.sum(axis=0))]
        # log(1 + e^s) - y s, written so that a large score does not overflow
        loss = float(np.sum(np.logaddexp(0, score) - labels * score))
        return loss, np.concatenate(parts), int(np.sum((score > 0) == (labels > 0)))

    def update(self, gradient: Array) -> None:
        """Take one step of Adam against the mean gradient."""
        self.steps += 1
        step = int(self.steps[0])
        parameters, first, second = self.state
        first += (1 - DECAY_1) * (gradient - first)
        second += (1 - DECAY_2) * (gradient * gradient - second)
        rate = RATE * math.sqrt(1 - DECAY_2**step) / (1 - DECAY_1**step)
        parameters -= rate * first / (np.sqrt(second) + TINY)


def train(cluster: potluck.Cluster, wanted: dict[str, Any], run: str) -> Iterator[dict[str, Any]]:
    """Make the wanted steps, and more until the nodes are in that view; tells of each step."""
    seed, (points, labels) = wanted["seed"], spirals(POINTS, wanted["seed"])
    model, losses = Model(seed), [0.0]
    # The wish to end is averaged like the gradients, so all nodes end after the same step.
    ends = np.zeros(1, np.float32)

    def apply(mean: Any) -> None:  # for each committed step, on every node with the same bits
        model.update(mean["gradient"])
        ends[:] = mean["ends"] > 0
        losses.append(float(mean["loss"][0]))

    sampler = potluck.ElasticSampler(POINTS, seed=seed)
    state = potluck.TrainingState(model={"model": model.state, "steps": model.steps, "ends": ends})
    trainer = potluck.ElasticTrainer(cluster, state, apply, sampler=sampler, batch=BATCH)
    trainer.start()  # gets the state of nodes that already train
    began, weight, made_all = time.monotonic(), 0.0, trainer.step_count == 0
    view, since = 0, 0
    while not ends[0]:
        due = time.monotonic() + wanted["pace"]
        indices = trainer.take()
        if trainer.position.epoch != view:
            view, since = trainer.position.epoch, trainer.step_count
        is_over = trainer.step_count + 1 >= max(wanted["steps"], since + TOGETHER)
        loss, gradient, _ = model.learn(points[indices], labels[indices])
        count = np.float32(max(1, len(indices)))  # a small batch may leave a node without samples
        mean = {"gradient": gradient / count, "loss": np.array([loss / count], np.float32)}
        end = np.array([is_over and view >= wanted["view"]], np.float32)
        outcome = trainer.step({**mean, "ends": end})
        weight += outcome.weight
        made_all = made_all and outcome.counted
        trainer.note_loss(losses[-1])
        told = {"step": outcome.step, "loss": losses[-1], "share": len(indices)}
        yield {**told, "run": run, "view": trainer.position.epoch}
        time.sleep(max(0.0, due - time.monotonic()))
    wanted["steps"] = trainer.step_count
    yield {
        "run": run,
        "steps": trainer.step_count,
        "seconds": time.monotonic() - began,
        "loss": model.learn(points, labels)[0] / POINTS,
        "accuracy": model.learn(*spirals(UNSEEN, seed + 1))[2] / UNSEEN,
        "fingerprint": hashlib.blake2b(model.state[0].tobytes(), digest_size=8).hexdigest(),
        "samples": sampler.epoch * POINTS + POINTS - sampler.remaining,
        "weight": weight if made_all else 0.0,  # the same sum, from the steps themselves
    }


def _end_with_the_demo() -> None:
    # No buffer: its lock, held by a thread that reads, would upset a process that ends.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        pipe.read()
    os._exit(1)


def main() -> None:
    """Join the other nodes; train at a pace to watch, then once more at full speed."""
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    wanted = json.loads(sys.argv[1])
    with potluck.join(timeout=60.0, **wanted["join"]) as cluster:
        for run in ("story", "undisturbed"):
            for facts in train(cluster, wanted, run):
                assert cluster.metrics is not None
                averaged = cluster.metrics.all_reduce.snapshot().bytes_processed
                told = {**facts, "averaged": averaged, "time": time.time()}
                print(json.dumps(told), flush=True)  # noqa: T201 - the demo reads it
            wanted |= {"view": 0, "pace": 0.0}
        cluster.barrier()  # a node that left early would disturb those that still train


if __name__ == "__main__":
    main()
