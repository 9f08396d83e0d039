"""Convergence: whether training with compressed gradients reaches the same loss.

    python benchmarks/convergence.py [--quick] [--seeds 3] [--steps 1000] [--json FILE] [--plot]

Four workers train a small transformer.  Their gradients are averaged by the same all-reduce that a
program would call, among four ranks of this process.  Every method is run with error feedback and
without.  The gap is that of the final loss, on text that nobody trained on, to the loss without
compression from the same seed.  What never arrived is the difference between the sum of all
averages and the sum of all gradients, in parts of the latter.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from _convergence_model import Text, Transformer
from potluck import DistributedContext, GradientCompressor, SimulatedBackend

Array = npt.NDArray[np.float32]
Curve = list[tuple[int, float]]

PLOT = Path(__file__).resolve().parents[1] / "docs" / "internals" / "convergence.svg"
WORKERS = 4
BATCH = 8
RATE = 0.3
WARM_UP = 50  # steps
MOMENTUM = 0.9
METHODS = ("none", "int8", "onebit", "topk:0.01", "powersgd:4")
BAR = 0.01  # of the final loss
POINTS = 30  # of a curve
JUDGED = ("int8", "topk:0.01", "powersgd:4")


class Averages:
    """The workers as ranks: each has its own memory of what it left behind."""

    def __init__(
        self, contexts: list[DistributedContext], compressors: list[GradientCompressor]
    ) -> None:
        self._ranks = list(zip(contexts, compressors, strict=True))
        self._threads = ThreadPoolExecutor(len(contexts))

    @classmethod
    @contextmanager
    def of(cls, method: str, seed: int, *, has_feedback: bool) -> Iterator[Averages]:
        """A group for one run."""
        with ExitStack() as stack:
            contexts = [
                stack.enter_context(DistributedContext(backend))
                for backend in SimulatedBackend.create_group(WORKERS)
            ]
            compressors = [GradientCompressor(method, has_feedback, seed=seed) for _ in contexts]
            averages = cls(contexts, compressors)
            stack.callback(averages._threads.shutdown)
            yield averages

    def mean(self, gradients: list[Array], name: str) -> Array:
        """The average of one tensor."""

        def take_part(place: int) -> Array:
            context, compressor = self._ranks[place]
            mine = gradients[place].copy()
            context.all_reduce(mine, "mean", compression=compressor.tensor(name))
            return mine

        first, *others = self._threads.map(take_part, range(len(self._ranks)))
        assert all(np.array_equal(first, other, equal_nan=True) for other in others)
        return first


@dataclass(slots=True)
class Run:
    """How a training went."""

    loss: float
    missing: float
    """What never arrived, in parts of all there was."""
    curve: Curve


def train(method: str, seed: int, steps: int, *, has_feedback: bool) -> Run:
    """Train from the beginning."""
    text, model = Text(seed), Transformer(seed)
    test = text.sentences(256)
    weights = list(model.parameters())
    optimiser = torch.optim.SGD(weights, lr=RATE, momentum=MOMENTUM)
    curve: Curve = []
    wanted = arrived = np.zeros(sum(map(torch.numel, weights)), np.float32)
    with Averages.of(method, seed, has_feedback=has_feedback) as averages:
        for step in range(steps):
            if step % max(1, steps // POINTS) == 0:
                curve.append((step, judge(model, test)))
            gradients = [bucket(model, weights, text) for _ in range(WORKERS)]
            mean = averaged(averages, gradients, weights, by_tensor=method.startswith("powersgd"))
            wanted, arrived = wanted + sum(gradients) / np.float32(WORKERS), arrived + mean
            for group in optimiser.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - step / steps)
            hand_out(mean, weights)
            optimiser.step()
    missing = float(np.linalg.norm(wanted - arrived) / np.linalg.norm(wanted))
    final = judge(model, test)
    return Run(final, missing, [*curve, (steps, final)])


def judge(model: Transformer, sentences: torch.Tensor) -> float:
    """The loss on some text."""
    with torch.no_grad():
        return float(model.loss(sentences))


def bucket(model: Transformer, weights: list[torch.nn.Parameter], text: Text) -> Array:
    """The gradients of one worker, one after the other, as they would be sent."""
    found = torch.autograd.grad(model.loss(text.sentences(BATCH)), weights)
    return np.concatenate([gradient.numpy().ravel() for gradient in found])


def averaged(
    averages: Averages,
    gradients: list[Array],
    weights: list[torch.nn.Parameter],
    *,
    by_tensor: bool,
) -> Array:
    """The mean over all workers; tensor by tensor where the shape matters."""
    if not by_tensor:
        return averages.mean(gradients, "all")
    parts, start = [], 0
    for number, weight in enumerate(weights):
        stop = start + weight.numel()
        mine = [gradient[start:stop].reshape(weight.shape) for gradient in gradients]
        parts.append(averages.mean(mine, f"tensor {number}").ravel())
        start = stop
    return np.concatenate(parts)


def hand_out(mean: Array, weights: list[torch.nn.Parameter]) -> None:
    """Give every weight its part of a bucket."""
    start = 0
    for weight in weights:
        stop = start + math.prod(weight.shape)
        weight.grad = torch.from_numpy(mean[start:stop].reshape(weight.shape))
        start = stop


def study(seeds: int, steps: int) -> list[dict[str, Any]]:
    """All methods and seeds."""
    cases = [("none", False)]
    cases += [(method, feedback) for method in METHODS[1:] for feedback in (True, False)]
    rows: list[dict[str, Any]] = []
    exact: list[float] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("training", total=len(cases) * seeds)
        for method, has_feedback in cases:
            runs = []
            for seed in range(seeds):
                progress.update(bar, description=f"{method}, seed {seed}")
                runs.append(train(method, seed, steps, has_feedback=has_feedback))
                progress.advance(bar)
            losses = [run.loss for run in runs]
            exact = exact or losses
            gaps = [loss / best - 1 for loss, best in zip(losses, exact, strict=True)]
            rows.append(
                {
                    "method": method,
                    "feedback": has_feedback,
                    "loss": statistics.mean(losses),
                    "gap": statistics.mean(gaps),
                    "gaps": gaps,
                    "missing": statistics.mean(run.missing for run in runs),
                    "bar": BAR if has_feedback and method in JUDGED else None,
                    "curve": runs[0].curve,
                }
            )
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """The loss over the steps, as SVG; dashed without error feedback."""
    colours = dict(zip(METHODS, ("#000", "#06c", "#393", "#c60", "#90c"), strict=True))
    steps = rows[0]["curve"][-1][0]
    top = rows[0]["curve"][0][1]
    low = 0.95 * rows[0]["curve"][-1][1]
    lines = []
    for number, row in enumerate(rows):
        path = " ".join(
            f"{60 + 560 * step / steps:.1f},{40 + 300 * max(0.0, (top - loss) / (top - low)):.1f}"
            for step, loss in row["curve"]
            if math.isfinite(loss)
        )
        dashes = "" if row["feedback"] or row["method"] == "none" else ' stroke-dasharray="5 4"'
        colour = colours[row["method"]]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dashes}/>')
        ending = f"{row['gap']:+.1%}" if math.isfinite(row["gap"]) else "diverged"
        label = f"{row['method']}{'' if not dashes else ', no feedback'}: {ending}"
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
    torch.set_num_threads(1)  # of so small a model: more would only wait for each other
    rows = study(1, 3) if options.quick else study(options.seeds, options.steps)
    table = Table(title="convergence", box=SIMPLE_HEAD, title_justify="left")
    for column in ("method", "feedback", "final loss", "gap", "never arrived", "bar"):
        table.add_column(column)
    for row in rows:
        bar = "" if row["bar"] is None else f"≤ {row['bar']:.0%}"
        feedback = "yes" if row["feedback"] else "no"
        figures = (f"{row['loss']:.4f}", f"{row['gap']:+.2%}", f"{row['missing']:.2%}")
        if not math.isfinite(row["gap"]):
            figures = ("diverged", "", "")
        table.add_row(row["method"], feedback, *figures, bar)
    Console().print(table)
    if options.plot:
        options.plot.write_text(draw(rows), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
