"""What counting costs: an all-reduce of 4 KiB with metrics and without, two processes, loopback.

    python benchmarks/metrics_overhead.py [--quick] [--json FILE]

The two processes hold three groups at once, in clear, which is the fastest there is and so the
hardest for the metrics: one without metrics, one with, and another without.  They take turns in
slices of milliseconds.  The overhead is the median, over the rounds, of how much longer the
counting group took than the mean of its two neighbours; how much these two differ from each other
says how far to trust it.  FILE may be ``-`` for the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from potluck import (
    DistributedContext,
    DistributedMetrics,
    NetworkNamespace,
    SecurityWarning,
    TcpBackend,
)
from potluck.collective.task import Collective, Task
from potluck.metrics.operations import LONG
from potluck.runtime.call import Call
from potluck.runtime.counting import count

PATIENCE = 60.0
"""Seconds after which a measurement is given up."""

BAR = 0.02
"""What the overhead may be at most."""

ROUNDS, QUICK_ROUNDS = 300, 40
SLICES = 300
"""Slices of as many operations as a journal has room for, to learn what one costs by itself."""


def join(rank: int, master: str) -> TcpBackend:
    """A group of two without encryption."""
    logging.disable(logging.WARNING)  # it says so twice, and it is meant
    warnings.simplefilter("ignore", SecurityWarning)
    return TcpBackend(rank, 2, master, timeout=PATIENCE, namespace=NetworkNamespace.insecure())


def slice_of(context: DistributedContext, array: np.ndarray[Any, Any], count: int) -> float:
    """Seconds of a typical operation."""
    taken = []
    context.barrier()
    for _ in range(count):
        began = time.perf_counter()
        context.all_reduce(array)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure(rank: int, masters: list[str], rounds: int, count: int) -> list[list[float]]:
    """For each round the seconds without, with, and again without metrics."""
    array = np.zeros(1024, np.float32)
    with contextlib.ExitStack() as stack:
        backends = [join(rank, master) for master in masters]
        contexts = [
            stack.enter_context(context)
            for context in (
                DistributedContext(backends[0]),
                DistributedContext.with_metrics(backends[1]),
                DistributedContext(backends[2]),
            )
        ]
        for context in contexts:
            slice_of(context, array, 5 * count)
        found = []
        for turn in range(rounds):
            order = [0, 1, 2] if turn % 2 else [2, 1, 0]
            seconds = {which: slice_of(contexts[which], array, count) for which in order}
            found.append([seconds[which] for which in range(3)])
        snapshot = contexts[1].metrics_snapshot()
        assert snapshot is not None
        assert snapshot.all_reduce.completed == (rounds + 5) * count
        return found


def cost_of_counting() -> float:
    """Seconds that counting adds to a call, working off the journal included.

    The quickest of many slices that are shorter than a turn of the processor: so a busy machine
    does not show.
    """
    array = np.zeros(1024, np.float32)
    call = Call(Task.whole(Collective.ALL_REDUCE, 1, array.size), array, array)
    turns, quickest = range(LONG + 1), float("inf")
    metrics = DistributedMetrics()
    for _ in range(SLICES):
        began = time.perf_counter()
        for _ in turns:
            count(metrics, call, time.perf_counter())
        quickest = min(quickest, time.perf_counter() - began)
    return quickest / len(turns)


def free_address() -> str:
    """Where nobody listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def report(found: list[list[float]]) -> dict[str, Any]:
    """The figures of all rounds."""
    without, counted, again = (statistics.median(each) for each in zip(*found, strict=True))
    overheads = [2 * one / (before + after) - 1 for before, one, after in found]
    overhead = statistics.median(overheads)
    return {
        "benchmark": "metrics overhead",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "size_bytes": 4096,
        "rounds": len(found),
        "seconds": {"without": without, "with": counted, "without again": again},
        "overhead": overhead,
        "noise": abs(statistics.median(b / a for a, _, b in found) - 1),
        "counting_seconds": (alone := cost_of_counting()),
        "counting_share": 2 * alone / (without + again),
        "bar": BAR,
        "met": overhead <= BAR,
    }


def show(facts: dict[str, Any]) -> None:
    """For people."""
    seconds = facts["seconds"]
    console = Console(highlight=False)
    console.print("All-reduce of 4 KiB, 2 ranks on loopback in clear, median of the rounds:")
    for name, value in seconds.items():
        console.print(f"  {name + ' metrics':24} {value * 1e6:8.1f} µs")
    console.print(
        f"Overhead {facts['overhead']:+.2%} (bar {BAR:.0%}, "
        f"{'met' if facts['met'] else 'NOT met'}); "
        f"the two groups without metrics differ by {facts['noise']:.2%}.\n"
        f"Counting by itself takes {facts['counting_seconds'] * 1e6:.2f} µs, "
        f"{facts['counting_share']:.2%} of an operation."
    )


def main() -> None:
    """Measure, and say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--rounds", type=int, default=None, metavar="N")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="operations in a slice")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there; - for the terminal"
    )
    parser.add_argument("--second", nargs=3, metavar="ADDRESS", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    if chosen.second:
        measure(1, chosen.second, rounds, chosen.count)
        return
    masters = [free_address() for _ in range(3)]
    command = [sys.executable, __file__, "--second", *masters]
    command += ["--rounds", str(rounds), "--count", str(chosen.count)]
    with subprocess.Popen(command) as second:
        try:
            facts = report(measure(0, masters, rounds, chosen.count))
        finally:
            second.terminate()
    if chosen.json == "-":
        print(json.dumps(facts))
        return
    show(facts)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
