"""What the demo trains: a small network that tells two interleaved spirals apart, in plain numpy.

Everything follows from the seed.  The state of a model is a tree of arrays, changed in place.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Array", "Model", "spirals"]

Array: TypeAlias = NDArray[np.floating]

HIDDEN = 256
"""Units in each of the two hidden layers: a gradient of 267 KB, a step of a few milliseconds."""

TURNS = 1.25
NOISE = 0.02
"""How far a spiral winds, and how much its points scatter around it."""

SPREAD = 4.0
"""How far the first layer's weights spread, so that some of its units bend within the spirals."""

RATE, FIRST_DECAY, SECOND_DECAY, TINY = 2e-3, 0.9, 0.99, 1e-8
"""The constants of Adam, the rule by which a gradient changes the parameters."""


def spirals(count: int, seed: int, dtype: DTypeLike = np.float32) -> tuple[Array, Array]:
    """Points of two interleaved spirals, and which spiral each belongs to (0 or 1).

    >>> points, labels = spirals(6, seed=1)
    >>> points.shape, labels.ravel().tolist()
    ((6, 2), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    """
    source = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    radius = np.sqrt(source.uniform(0.05, 1.0, count))
    angle = radius * TURNS * 2 * np.pi + labels * np.pi
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    points += source.normal(0.0, NOISE, points.shape)
    return points.astype(dtype), labels.astype(dtype)[:, None]


class Model:
    """Two hidden layers, one output: the probability that a point is on spiral 1."""

    def __init__(self, seed: int, hidden: int = HIDDEN, dtype: DTypeLike = np.float32) -> None:
        shapes = [(2, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden, 1), (1,)]
        self._cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
        self._shapes = shapes
        self.state: Array = np.zeros((3, self._cuts[-1]), dtype)
        """Parameters, and Adam's two running averages."""
        self._steps = np.zeros(1, np.int64)
        self._parameters = self._views(self.state[0])
        source = np.random.default_rng(seed)
        for weights in self._parameters[::2]:
            scale = SPREAD if weights.shape[0] == 2 else 1 / np.sqrt(weights.shape[0])  # noqa: PLR2004
            weights[...] = source.normal(0.0, scale, weights.shape)

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return int(self.state.shape[1])

    @property
    def tree(self) -> dict[str, Any]:
        """All there is to know, in arrays that stay the same ones."""
        return {"arrays": self.state, "steps": self._steps}

    @property
    def fingerprint(self) -> str:
        """A hash of the parameters: equal only if every bit is."""
        return hashlib.blake2b(self.state[0].tobytes(), digest_size=8).hexdigest()

    def _views(self, flat: Array) -> list[Array]:
        parts = np.split(flat, self._cuts[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _forward(self, points: Array) -> tuple[Array, Array, Array]:
        first, first_bias, second, second_bias, last, last_bias = self._parameters
        low = np.tanh(points @ first + first_bias)
        high = np.tanh(low @ second + second_bias)
        return low, high, high @ last + last_bias

    def gradient(self, points: Array, labels: Array, out: Array) -> float:
        """Write the gradient, summed over the points, to ``out``; return the summed loss."""
        low, high, score = self._forward(points)
        parts = self._views(out)
        error = 1 / (1 + np.exp(-score)) - labels
        for place, (below, weights) in enumerate(((high, 4), (low, 2), (points, 0))):
            np.matmul(below.T, error, out=parts[weights])
            np.sum(error, axis=0, out=parts[weights + 1])
            if place < 2:  # noqa: PLR2004 - the points themselves are not trained
                error = (error @ self._parameters[weights].T) * (1 - below * below)
        return _summed_loss(score, labels)

    def update(self, gradient: Array) -> None:
        """Take one step against the mean gradient."""
        self._steps += 1
        step = int(self._steps[0])
        parameters, first, second = self.state
        first += (1 - FIRST_DECAY) * (gradient - first)
        second += (1 - SECOND_DECAY) * (gradient * gradient - second)
        scale = RATE * np.sqrt(1 - SECOND_DECAY**step) / (1 - FIRST_DECAY**step)
        parameters -= scale * first / (np.sqrt(second) + TINY)

    def loss(self, points: Array, labels: Array) -> float:
        """The mean loss over these points."""
        return _summed_loss(self._forward(points)[2], labels) / len(points)

    def accuracy(self, points: Array, labels: Array) -> float:
        """The share of points put on the right spiral."""
        return float(np.mean((self._forward(points)[2] > 0) == (labels > 0.5)))  # noqa: PLR2004


def _summed_loss(score: Array, labels: Array) -> float:
    # log(1 + e^s) - y s, written so that a large score overflows nothing
    return float(np.sum(np.logaddexp(0, score) - labels * score))
