"""What counting costs: an all-reduce of 4 KiB with metrics and without, two processes, loopback.

    python benchmarks/metrics_overhead.py [--quick] [--json FILE]

The two processes hold three groups at once, in clear, which is the fastest there is and so the
hardest for the metrics: one without metrics, one with, and another without.  They take turns in
slices of milliseconds.  The overhead is the median, over the rounds, of how much longer the
counting group took than the mean of its two neighbours; how much these two differ from each other
says how far to trust it.  FILE may be ``-`` for the terminal.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from rich.console import Console

from _overhead import Rounds, compare, join, run, take_turns
from potluck import DistributedContext, DistributedMetrics
from potluck.collective.call import Call
from potluck.collective.collectives import count
from potluck.metrics.instruments import LONG
from potluck.schedule.task import Collective, Task

BAR = 0.02
"""What the overhead may be at most."""

SLICES = 300
"""Slices of as many operations as a journal has room for, to learn what one costs by itself."""


def measure(rank: int, masters: list[str], rounds: int, count: int) -> Rounds:
    """For each round the seconds without, with, and again without metrics."""
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
        found = take_turns(contexts, rounds, count)
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
            count(metrics, call, time.monotonic())
        quickest = min(quickest, time.perf_counter() - began)
    return quickest / len(turns)


def report(found: Rounds) -> dict[str, Any]:
    """The figures of all rounds."""
    facts = compare("metrics overhead", found)
    alone, seconds = cost_of_counting(), facts["seconds"]
    share = 2 * alone / (seconds["without"] + seconds["without again"])
    return {
        **facts,
        "counting_seconds": alone,
        "counting_share": share,
        "bar": BAR,
        "met": facts["overhead"] <= BAR,
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


if __name__ == "__main__":
    run(__file__, __doc__ or "", measure, report, show)
