"""DistributedDataParallel: the time of a training step on Potluck beside Gloo, in one run.

    python benchmarks/ddp.py [--quick] [--json FILE] [--parts large-2,large-4,small,gigabit]

Both train copies of one model in the same processes, turn by turn, so that a busy machine disturbs
both alike; a ratio is the median of the ratios within each round, of what the slowest rank took.
Computing and sums are also measured apart, on the clock and as seconds of the processors in all
ranks together, which depend less on what else the machine does.

* ``large-2``, ``large-4``: a model of 50 million parameters, 2 and 4 processes, in clear.
* ``small``: many small layers whose way back is Python, so that it competes for the interpreter;
  also what part of the communication was hidden behind the computation.
* ``gigabit``: four emulated hosts at 1 Gbit/s, Potluck with the int8 hook, Gloo as it is.  Hosts
  need root and the programs ``ip`` and ``tc``, and are left out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from operator import truediv
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the emulated hosts

from _ddp_rank import COMPUTING, GLOO, OURS, PATIENCE, SUMS, Part, run_rank
from support.hosts import Hosts

NAMES = "desk laptop tower attic"
WIDTH = 120
"""Columns where there is no terminal to ask."""

Figures = dict[str, Any]

MILLIONS = "50 million parameters"

PARTS = {
    "large-2": Part(2, "large", 12, 2048, 9, 0.9, f"{MILLIONS}, 2 processes"),
    "large-4": Part(4, "large", 12, 2048, 7, 0.9, f"{MILLIONS}, 4 processes"),
    "small": Part(2, "small", 150, 64, 15, 1.1, "many small operations in Python, 2 processes"),
    "gigabit": Part(
        *(4, "large", 12, 2048, 3, 0.5, f"{MILLIONS}, 4 hosts at 1 Gbit/s, int8 hook"),
        rate="1gbit",
        compression="int8",
    ),
}
SMALLER: dict[str, dict[str, Any]] = {
    "large": {"layers": 4, "width": 512, "rounds": 2},
    "small": {"layers": 20, "rounds": 2},
}
"""For a glance."""


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
    rounds: dict[str, list[float]] = {}  # what the slowest rank took
    worked: dict[str, list[float]] = {}  # what all ranks took of the processors
    for what in seen[0]["taken"]:
        turns = list(zip(*(each["taken"][what] for each in seen), strict=True))
        rounds[what] = [max(seconds for seconds, _ in turn) for turn in turns]
        worked[what] = [sum(seconds for _, seconds in turn) for turn in turns]
    ratios = list(map(truediv, rounds[OURS], rounds[GLOO]))
    figures: Figures = {
        "part": name,
        "ranks": part.ranks,
        "parameters": seen[0]["parameters"],
        "median_seconds": {what: statistics.median(taken) for what, taken in rounds.items()},
        "processor_seconds": {what: statistics.median(taken) for what, taken in worked.items()},
        "ratio": statistics.median(ratios),
        "processor_ratio": statistics.median(map(truediv, worked[OURS], worked[GLOO])),
        "bar": part.bar,
        "what": part.what,
        "met": statistics.median(ratios) <= part.bar,
        "quartiles": quartiles(ratios),
        "difference": max(each["difference"] for each in seen),
        "hidden": {},
    }
    if not part.compression:
        for which in (GLOO, OURS):
            sums = rounds[f"{SUMS} {which}"]
            shares = map(hidden_share, rounds[COMPUTING], sums, rounds[which])
            figures["hidden"][which] = statistics.median(shares)
    return figures


def hidden_share(computing: float, sums: float, both: float) -> float:
    """How much of the shorter of two things was done beside the longer one, from 0 to 1.

    >>> hidden_share(3.0, 1.0, 3.25), hidden_share(3.0, 1.0, 4.5)
    (0.75, 0.0)
    """
    return min(1.0, max(0.0, (computing + sums - both) / min(computing, sums)))


def quartiles(ratios: list[float]) -> list[float]:
    """Between which the middle half of the rounds lies."""
    if len(ratios) < 2:
        return [ratios[0], ratios[0]]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return [first, third]


# -- the command -------------------------------------------------------------------------------


def draw_steps(rows: list[Figures]) -> Table:
    """Figures for people."""
    made = Table(title="A step of training", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "parameters", "Gloo ms", "potluck ms", "ratio", "quartiles", "hidden"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        taken, hidden = row["median_seconds"], row["hidden"]
        made.add_row(
            row["part"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{taken[GLOO] * 1e3:.1f}",
            f"{taken[OURS] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["quartiles"]),
            f"{hidden[OURS]:.0%} (Gloo {hidden[GLOO]:.0%})" if hidden else "",
        )
    return made


def draw_parts(rows: list[Figures]) -> Table:
    """Where a step's time goes: on the clock, and on the processors of all ranks together."""
    made = Table(title="Apart, ms (of processors)", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "computing", "sums Gloo", "sums potluck", "step Gloo", "step potluck"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    made.add_column("of processors", justify="right", no_wrap=True)
    for row in rows:
        seconds, worked = row["median_seconds"], row["processor_seconds"]
        kinds = (COMPUTING, f"{SUMS} {GLOO}", f"{SUMS} {OURS}", GLOO, OURS)
        cells = [
            f"{seconds[kind] * 1e3:.0f} ({worked[kind] * 1e3:.0f})" if kind in seconds else ""
            for kind in kinds
        ]
        made.add_row(row["part"], *cells, f"{row['processor_ratio']:.2f}")
    return made


def draw_targets(rows: list[Figures]) -> Table:
    """What is wanted of a step, and what was reached."""
    made = Table(title="What is wanted", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("a step of training", "against", "wanted", "reached", ""):
        made.add_column(column, no_wrap=True)
    for row in rows:
        verdict = "[green]met" if row["met"] else "[red]missed"
        made.add_row(row["what"], GLOO, f"≤ {row['bar']:.1f}", f"{row['ratio']:.2f}", verdict)
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
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    names = options.parts.split(",") if options.parts else list(PARTS)
    if unknown := set(names) - set(PARTS):
        sys.exit(f"There is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows = []
    for name in names:
        part = PARTS[name]
        if part.rate is not None and os.geteuid() != 0:
            console.print(f"{name} is left out: emulated hosts need root")
            continue
        if options.quick:
            part = replace(part, **SMALLER[part.model])
        if options.rounds:
            part = replace(part, rounds=options.rounds)
        rows.append(measure(name, part))
    console.print(draw_steps(rows))
    console.print(draw_parts(rows))
    console.print(draw_targets(rows))
    if options.json:
        figures = {
            "benchmark": "ddp",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "python": platform.python_version(),
            "results": rows,
        }
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
