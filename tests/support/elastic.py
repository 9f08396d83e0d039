"""A small model in plain numpy that members train together, and that can be compared by bits."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np

from potluck import DistributedContext
from potluck.training.elastic import ElasticTrainer
from potluck.training.sampler import ElasticSampler
from potluck.training.state import TrainingState

SAMPLES, FEATURES = 96, 8
RATE, MOMENTUM = 0.1, 0.5


class LoggingSampler(ElasticSampler):
    """Remembers every sample that counted, whoever brought it."""

    def __init__(self, size: int, *, seed: int = 0) -> None:
        super().__init__(size, seed=seed)
        self.log: list[tuple[int, int]] = []

    def commit(self, shares: Any) -> None:
        """Count, and remember."""
        shares = list(shares)
        self.log += [(self.epoch, int(i)) for share in shares for i in self.indices(share)]
        super().commit(shares)

    def check(self) -> None:
        """Every sample of every complete epoch has counted once, and no other more than that."""
        seen = Counter(self.log)
        assert set(seen.values()) <= {1}
        complete = {(epoch, sample) for epoch in range(self.epoch) for sample in range(self.size)}
        assert complete <= set(seen)


class Regression:
    """Linear regression with momentum: model, optimiser and a trainer around them."""

    def __init__(self, group: DistributedContext, seed: int = 0, **options: Any) -> None:
        source = np.random.default_rng(5)
        self.inputs = source.normal(size=(SAMPLES, FEATURES))
        self.targets = self.inputs @ source.normal(size=FEATURES) + 0.1 * source.normal(
            size=SAMPLES
        )
        self.weights = np.random.default_rng(seed).normal(size=FEATURES)
        self.speed = np.zeros(FEATURES)
        self.rate = options.pop("rate", RATE)
        self.counted: list[tuple[int, int]] = []
        self.sampler = LoggingSampler(SAMPLES, seed=3)
        self.trainer = ElasticTrainer(
            group,
            TrainingState(model=self.weights, optimizer={"speed": self.speed}),
            self.apply,
            sampler=self.sampler,
            batch=options.pop("batch", 12),
            **options,
        )

    def apply(self, gradient: Any) -> None:
        """One step of momentum."""
        self.speed *= MOMENTUM
        self.speed += gradient["w"]
        self.weights -= self.rate * self.speed

    def gradient(self, indices: Any) -> dict[str, Any]:
        """The mean gradient over some samples; nothing for none."""
        rows = self.inputs[indices]
        if not len(rows):
            return {"w": np.full(FEATURES, np.nan)}
        return {"w": rows.T @ (rows @ self.weights - self.targets[indices]) / len(rows)}

    def step(self) -> Any:
        """Take samples, compute, and average."""
        indices = self.trainer.take()
        epoch = self.sampler.epoch
        outcome = self.trainer.step(self.gradient(indices))
        if outcome.counted:
            self.counted += [(epoch, int(index)) for index in indices]
        return outcome

    @property
    def loss(self) -> float:
        """Over all samples."""
        return float(np.mean((self.inputs @ self.weights - self.targets) ** 2))

    @property
    def fingerprint(self) -> str:
        """Of model and optimiser, bit by bit."""
        return hashlib.blake2b(self.weights.tobytes() + self.speed.tobytes()).hexdigest()[:16]
