"""What the flight recorder costs: an all-reduce of 4 KiB with it and without, on loopback.

    python benchmarks/recorder_overhead.py [--quick] [--json FILE]

Two processes hold three groups at once, in clear, which is the fastest there is and so the hardest
for the recorder: one whose recorder is switched off, one as it is, and another switched off.  They
take turns in slices of milliseconds.  The overhead is the median, over the rounds, of how much
longer the recorded group took than the mean of its two neighbours; how much these differ from each
other says how far to trust it.  Beside it stands the time of one entry by itself, all of what is
added to a call, as a share of the call: that is far more exact.  FILE may be ``-`` for the
terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from metrics_overhead import free_address, join, slice_of
from potluck import DistributedContext
from potluck.collective.task import Collective, Task
from potluck.runtime.call import Call
from potluck.runtime.group import Group

BAR = 0.01
"""What the overhead may be at most."""

ROUNDS, QUICK_ROUNDS = 300, 40
ENTRIES = 100_000


def _nothing(*_: object) -> None:
    """Instead of an entry."""


def measure(rank: int, masters: list[str], rounds: int, count: int) -> list[list[float]]:
    """For each round the seconds without, with, and again without the recorder."""
    array = np.zeros(1024, np.float32)
    with contextlib.ExitStack() as stack:
        contexts = [
            stack.enter_context(DistributedContext(join(rank, master))) for master in masters
        ]
        for silent in (contexts[0], contexts[2]):
            vars(silent.group)["_record"] = _nothing
        for context in contexts:
            slice_of(context, array, 5 * count)
        found = []
        for turn in range(rounds):
            order = [0, 1, 2] if turn % 2 else [2, 1, 0]
            seconds = {which: slice_of(contexts[which], array, count) for which in order}
            found.append([seconds[which] for which in range(3)])
        return found


def cost_of_an_entry(group: Group) -> float:
    """Seconds that taking down one call adds to it; the best of some tries, as noise only adds."""
    array = np.zeros(1024, np.float32)
    call = Call(Task.whole(Collective.ALL_REDUCE, group.world_size, 1024), array, array)
    record, best = group._record, 1.0  # noqa: SLF001 - nothing else is to be measured
    for _ in range(10):
        began = time.perf_counter()
        for number in range(ENTRIES // 10):
            record(call, number, 0.0)
        best = min(best, (time.perf_counter() - began) / (ENTRIES // 10))
    return best


def report(found: list[list[float]]) -> dict[str, Any]:
    """The figures of all rounds."""
    without, recorded, again = (statistics.median(each) for each in zip(*found, strict=True))
    overhead = statistics.median(2 * one / (before + after) - 1 for before, one, after in found)
    from potluck import SimulatedBackend

    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        entry = cost_of_an_entry(context.group)
    return {
        "benchmark": "recorder overhead",
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "size_bytes": 4096,
        "rounds": len(found),
        "seconds": {"without": without, "with": recorded, "without again": again},
        "overhead": overhead,
        "noise": abs(statistics.median(b / a for a, _, b in found) - 1),
        "entry_seconds": entry,
        "share": entry / min(without, again),
        "bar": BAR,
        "met": entry / min(without, again) <= BAR,
    }


def show(facts: dict[str, Any]) -> None:
    """For people."""
    console = Console(highlight=False)
    console.print("All-reduce of 4 KiB, 2 ranks on loopback in clear, median of the rounds:")
    for name, value in facts["seconds"].items():
        console.print(f"  {name + ' recorder':24} {value * 1e6:8.1f} µs")
    console.print(
        f"Side by side {facts['overhead']:+.2%}; the two groups without differ by "
        f"{facts['noise']:.2%}.\nOne entry takes {facts['entry_seconds'] * 1e6:.2f} µs, which is "
        f"{facts['share']:.2%} of the call (bar {BAR:.0%}, {'met' if facts['met'] else 'NOT met'})."
    )


def main() -> None:
    """Measure, and say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
