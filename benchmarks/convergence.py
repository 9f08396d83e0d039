"""Convergence: whether training with compressed gradients reaches the same loss.

    python benchmarks/convergence.py [--quick] [--seeds 3] [--steps 1000] [--json FILE] [--plot]

Four workers train one small network on data that is made up as it goes: points labelled by another,
fixed network.  Each worker compresses its own gradients; what is averaged is what a receiver would
decode.  Every method is run with error feedback and without.  The gap is that of the final loss, on
points that nobody trained on, to the loss without compression from the same seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potluck import GradientCompressor

Array = npt.NDArray[np.float32]
Curve = list[tuple[int, float]]

PLOT = Path(__file__).resolve().parents[1] / "docs" / "convergence.svg"
WORKERS = 4
BATCH = 64
SIDES = (24, 96, 96, 8)
RATE = 0.03
MOMENTUM = 0.9
TEMPERATURE = 0.5  # of the labels: noise that keeps the loss away from zero
METHODS = ("none", "int8", "onebit", "topk:0.01", "powersgd:4")
BAR = 0.01  # of the final loss
POINTS = 30  # of a curve
JUDGED = ("int8", "topk:0.01", "powersgd:4")


class Network:
    """Fully connected, with tanh between the layers."""

    def __init__(self, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self.weights = [
            (dice.standard_normal((before, after)) / before**0.5).astype(np.float32)
            for before, after in itertools.pairwise(SIDES)
        ]

    def layers(self, points: Array) -> list[Array]:
        """What each layer puts out, the points first."""
        outputs = [points]
        for index, weight in enumerate(self.weights):
            sums = outputs[-1] @ weight
            outputs.append(np.tanh(sums) if index < len(self.weights) - 1 else sums)
        return outputs

    def loss(self, points: Array, labels: npt.NDArray[np.int64]) -> float:
        """Cross entropy."""
        likely = chances(self.layers(points)[-1])
        return float(-np.log(likely[np.arange(labels.size), labels] + 1e-12).mean())

    def gradients(self, points: Array, labels: npt.NDArray[np.int64]) -> list[Array]:
        """Of every weight."""
        outputs = self.layers(points)
        error = chances(outputs[-1])
        error[np.arange(labels.size), labels] -= 1.0
        error /= np.float32(labels.size)
        found: list[Array] = []
        for weight, before in zip(reversed(self.weights), reversed(outputs[:-1]), strict=True):
            found.append(before.T @ error)
            error = (error @ weight.T) * (1 - before * before)
        return found[::-1]


def chances(sums: Array) -> Array:
    """Softmax."""
    powers = np.exp(sums - sums.max(axis=1, keepdims=True))
    made: Array = powers / powers.sum(axis=1, keepdims=True)
    return made


class World:
    """Where points and their labels come from."""

    def __init__(self, seed: int) -> None:
        self._teacher = Network(1000 + seed)
        self._dice = np.random.default_rng(2000 + seed)

    def points(self, count: int) -> tuple[Array, npt.NDArray[np.int64]]:
        """Some more."""
        points = self._dice.standard_normal((count, SIDES[0])).astype(np.float32)
        sums = 4 * self._teacher.layers(points)[-1]
        noise = self._dice.gumbel(size=sums.shape) * TEMPERATURE
        return points, np.argmax(sums + noise, axis=1)


def train(method: str, seed: int, steps: int, *, has_feedback: bool) -> tuple[float, Curve]:
    """The final loss, and how it came about."""
    world, network = World(seed), Network(seed)
    test = world.points(2048)
    workers = [GradientCompressor(method, has_feedback, seed=seed) for _ in range(WORKERS)]
    speeds = [np.zeros_like(weight) for weight in network.weights]
    curve: Curve = []
    for step in range(steps):
        means = [np.zeros_like(weight) for weight in network.weights]
        for worker in workers:
            for index, gradient in enumerate(network.gradients(*world.points(BATCH))):
                sent = worker.decompress(worker.compress(gradient, f"layer {index}"))
                means[index] += sent / np.float32(WORKERS)
        rate = np.float32(RATE * (1 - step / steps))
        for index, mean in enumerate(means):
            speeds[index] = np.float32(MOMENTUM) * speeds[index] + mean
            network.weights[index] -= rate * speeds[index]
        if step % max(1, steps // POINTS) == 0:
            curve.append((step, network.loss(*test)))
    final = network.loss(*test)
    return final, [*curve, (steps, final)]


def study(seeds: int, steps: int) -> list[dict[str, Any]]:
    """All methods and seeds."""
    rows: list[dict[str, Any]] = []
    exact: list[float] = []
    for method in METHODS:
        for has_feedback in (True, False) if method != "none" else (True,):
            runs = [train(method, seed, steps, has_feedback=has_feedback) for seed in range(seeds)]
            losses = [loss for loss, _ in runs]
            exact = exact or losses
            gaps = [loss / best - 1 for loss, best in zip(losses, exact, strict=True)]
            rows.append(
                {
                    "method": method,
                    "feedback": has_feedback and method != "none",
                    "loss": statistics.mean(losses),
                    "gap": statistics.mean(gaps),
                    "bar": BAR if has_feedback and method in JUDGED else None,
                    "curve": runs[0][1],
                }
            )
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """The loss over the steps, as SVG; dashed without error feedback."""
    colours = dict(zip(METHODS, ("#000", "#06c", "#393", "#c60", "#90c"), strict=True))
    steps = rows[0]["curve"][-1][0]
    top = rows[0]["curve"][0][1]
    low = 0.95 * min(row["curve"][-1][1] for row in rows)
    lines = []
    for number, row in enumerate(rows):
        path = " ".join(
            f"{60 + 560 * step / steps:.1f},{40 + 300 * max(0.0, (top - loss) / (top - low)):.1f}"
            for step, loss in row["curve"]
        )
        dashes = "" if row["feedback"] or row["method"] == "none" else ' stroke-dasharray="5 4"'
        colour = colours[row["method"]]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dashes}/>')
        label = f"{row['method']}{'' if not dashes else ', no feedback'}: {row['gap']:+.1%}"
        place = f'x="400" y="{60 + 16 * number}" fill="{colour}"'
        lines.append(f"<text {place}>{label}</text>")
    axes = (
        '<rect width="660" height="370" fill="white"/>'
        f'<text x="60" y="24">loss, from {top:.2f} down to {low:.2f}, over {steps} steps</text>'
        '<path d="M60 40V340H620" fill="none" stroke="#888"/>'
    )
    style = 'font-family="sans-serif" font-size="12"'
    size = 'width="660" height="370" viewBox="0 0 660 370"'
    body = "\n".join([axes, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="one seed, few steps")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--json", metavar="FILE", help="also write the figures here")
    made.add_argument("--plot", nargs="?", const=PLOT, type=Path, help=f"draw into {PLOT.name}")
    return made


def main() -> None:
    """Run from the command line."""
    options = parser().parse_args()
    rows = study(1, 20) if options.quick else study(options.seeds, options.steps)
    table = Table(title="convergence", box=SIMPLE_HEAD, title_justify="left")
    for column in ("method", "feedback", "final loss", "gap", "bar"):
        table.add_column(column)
    for row in rows:
        bar = "" if row["bar"] is None else f"≤ {row['bar']:.0%}"
        feedback = "yes" if row["feedback"] else "no"
        table.add_row(row["method"], feedback, f"{row['loss']:.4f}", f"{row['gap']:+.2%}", bar)
    Console().print(table)
    if options.plot:
        options.plot.write_text(draw(rows), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
