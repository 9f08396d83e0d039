"""DistributedDataParallel: the time of a training step on Potluck beside Gloo, in one run.

    python benchmarks/ddp.py [--quick] [--json FILE] [--parts large-2,large-4,small,gigabit]

Both train copies of one model in the same processes, turn by turn, so that a busy machine disturbs
both alike; a ratio is the median of the ratios within each round, of what the slowest rank took.

* ``large-2``, ``large-4``: a model of 50 million parameters, 2 and 4 processes, in clear.
* ``small``: many small layers whose way back is Python, so that it competes for the interpreter;
  also what part of the communication was hidden behind the computation.
* ``gigabit``: four emulated hosts at 1 Gbit/s, Potluck with the int8 hook, Gloo as it is.  Hosts
  need root and the programs ``ip`` and ``tc``, and are left out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the emulated hosts

from support.hosts import Hosts

GLOO, OURS = "Gloo", "potluck"
PATIENCE = 300.0  # seconds
NAMES = "desk laptop tower attic"

Figures = dict[str, Any]


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
    rate: str | None = None
    """Of each cable, in the words of ``tc``; None on loopback."""
    compression: str = ""


PARTS = {
    "large-2": Part(2, "large", 12, 2048, 9, bar=1.0),
    "large-4": Part(4, "large", 12, 2048, 7, bar=1.0),
    "small": Part(2, "small", 150, 64, 15, bar=1.1),
    "gigabit": Part(4, "large", 12, 2048, 3, bar=0.5, rate="1gbit", compression="int8"),
}
SMALLER: dict[str, dict[str, Any]] = {
    "large": {"layers": 4, "width": 512, "rounds": 2},
    "small": {"layers": 20, "rounds": 2},
}
"""For a glance."""


# -- ranks -------------------------------------------------------------------------------------


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
    seconds: dict[str, list[float]] = {name: [] for name in models}
    alone: dict[str, list[float]] = {"computing": [], **{f"sums {name}": [] for name in models}}
    for number in range(part.rounds + 2):  # the first cuts buckets and measures links
        order = list(models) if number % 2 else list(models)[::-1]
        for name in order:
            took = timed(lambda name=name: step(models[name], x))  # type: ignore[misc]
            if number >= 2:
                seconds[name].append(took)
        if number >= 2 and not part.compression:
            alone["computing"].append(timed(lambda: step_alone(models[GLOO], x)))
            for name, model in models.items():
                alone[f"sums {name}"].append(timed(lambda model=model: sum_up(model)))  # type: ignore[misc]
    difference = max(
        float((mine - theirs).abs().max())
        for mine, theirs in zip(models[OURS].parameters(), models[GLOO].parameters(), strict=True)
    )
    dist.barrier()
    facts = {"seconds": seconds, "alone": alone, "difference": difference}
    facts["parameters"] = sum(each.numel() for each in models[OURS].parameters())
    (folder / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    dist.destroy_process_group()


def timed(action: Callable[[], object]) -> float:
    """Seconds, begun by all ranks at once."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


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


# -- places ------------------------------------------------------------------------------------


@contextlib.contextmanager
def place(part: Part) -> Iterator[tuple[str, list[Callable[[list[str]], list[str]]]]]:
    """Where ranks run: the address of the first, and for each how a command is started there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    if part.rate is None:
        yield f"127.0.0.1:{port}", [list] * part.ranks
        return
    with Hosts(NAMES, rate=part.rate) as hosts:
        yield f"{hosts['desk'].ipv4}:{port}", [host.command for host in hosts.values()]


def measure(name: str, part: Part) -> Figures:
    """Start all ranks and wait for them."""
    with tempfile.TemporaryDirectory() as folder, place(part) as (master, starters):
        facts = json.dumps(asdict(part))
        own = [sys.executable, __file__, "--folder", folder, "--master", master, "--part", facts]
        environment = os.environ | {"POTLUCK_HOME": folder, "OMP_NUM_THREADS": "1"}
        if part.rate is not None:
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [
            subprocess.Popen(start([*own, "--rank", str(rank)]), env=environment)
            for rank, start in enumerate(starters)
        ]
        try:
            codes = [process.wait(PATIENCE * 3) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            sys.exit(f"A rank failed: {codes}")
        files = [Path(folder) / f"{rank}.json" for rank in range(part.ranks)]
        seen = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return report(name, part, seen)


def report(name: str, part: Part, seen: list[Figures]) -> Figures:
    """Medians and ratios."""

    def slowest(kind: str, which: str) -> list[float]:
        return [max(turn) for turn in zip(*(each[kind][which] for each in seen), strict=True)]

    rounds = {which: slowest("seconds", which) for which in (GLOO, OURS)}
    ratios = [mine / theirs for mine, theirs in zip(rounds[OURS], rounds[GLOO], strict=True)]
    figures: Figures = {
        "part": name,
        "ranks": part.ranks,
        "parameters": seen[0]["parameters"],
        "median_seconds": {which: statistics.median(taken) for which, taken in rounds.items()},
        "ratio": statistics.median(ratios),
        "bar": part.bar,
        "difference": max(each["difference"] for each in seen),
        "hidden": {},
    }
    if not part.compression:
        computing = statistics.median(slowest("alone", "computing"))
        for which in (GLOO, OURS):
            sums = statistics.median(slowest("alone", f"sums {which}"))
            both = computing + sums - figures["median_seconds"][which]
            figures["hidden"][which] = both / min(computing, sums)
    return figures


# -- the command -------------------------------------------------------------------------------


def table(rows: list[Figures]) -> Table:
    """Figures for people."""
    made = Table(title="A step of training", box=SIMPLE_HEAD, title_justify="left")
    for column in ("part", "parameters", "Gloo ms", "potluck ms", "ratio", "wanted", "hidden"):
        made.add_column(column, justify="left" if column == "part" else "right")
    for row in rows:
        taken = row["median_seconds"]
        hidden = row["hidden"].get(OURS)
        made.add_row(
            row["part"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{taken[GLOO] * 1e3:.1f}",
            f"{taken[OURS] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['bar']:.1f}",
            "" if hidden is None else f"{hidden:.0%}",
        )
    return made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="few rounds of small models")
    made.add_argument("--rounds", type=int, help="so many rounds")
    made.add_argument("--parts", help=f"some of {','.join(PARTS)}")
    made.add_argument("--json", metavar="FILE", help="also write the figures here")
    for name in ("--rank", "--master", "--part", "--folder"):
        made.add_argument(name, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Run from the command line."""
    options = parser().parse_args()
    if options.rank is not None:
        part = Part(**json.loads(options.part))
        run_rank(int(options.rank), options.master, part, Path(options.folder))
        return
    console = Console()
    rows = []
    for name in options.parts.split(",") if options.parts else PARTS:
        part = PARTS[name]
        if part.rate is not None and os.geteuid() != 0:
            console.print(f"{name} is left out: emulated hosts need root")
            continue
        if options.quick:
            part = replace(part, **SMALLER[part.model])
        if options.rounds:
            part = replace(part, rounds=options.rounds)
        rows.append(measure(name, part))
    console.print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
