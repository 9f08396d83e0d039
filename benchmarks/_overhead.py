"""Side by side in slices of milliseconds: what something adds to an all-reduce of 4 KiB.

Two processes hold three groups at once, in clear, which is the fastest there is and so the hardest
for whatever is added: one without it, one with it, and another without.  How much the two without
differ from each other says how far to trust the rest.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from potluck import DistributedContext, NetworkNamespace, SecurityWarning, TcpBackend

PATIENCE = 60.0
"""Seconds after which a measurement is given up."""

ROUNDS, QUICK_ROUNDS = 300, 40

Rounds: TypeAlias = list[list[float]]
"""For each round the seconds without, with, and again without."""

Measure: TypeAlias = Callable[[int, list[str], int, int], Rounds]
"""(rank, where the three groups meet, rounds, operations in a slice)"""

Report: TypeAlias = Callable[[Rounds], dict[str, Any]]
Show: TypeAlias = Callable[[dict[str, Any]], None]


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


def take_turns(contexts: Sequence[DistributedContext], rounds: int, count: int) -> Rounds:
    """Let three groups run in slices, after some to warm up."""
    array = np.zeros(1024, np.float32)
    for context in contexts:
        slice_of(context, array, 5 * count)
    found = []
    for turn in range(rounds):
        order = [0, 1, 2] if turn % 2 else [2, 1, 0]
        seconds = {which: slice_of(contexts[which], array, count) for which in order}
        found.append([seconds[which] for which in range(3)])
    return found


def compare(name: str, found: Rounds) -> dict[str, Any]:
    """What the rounds say.

    The overhead is the median of how much longer the one in the middle took than the mean of its
    two neighbours.
    """
    without, added, again = (statistics.median(each) for each in zip(*found, strict=True))
    return {
        "benchmark": name,
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "size_bytes": 4096,
        "rounds": len(found),
        "seconds": {"without": without, "with": added, "without again": again},
        "overhead": statistics.median(
            2 * one / (before + after) - 1 for before, one, after in found
        ),
        "noise": abs(statistics.median(b / a for a, _, b in found) - 1),
    }


def free_address() -> str:
    """Where nobody listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def run(script: str, purpose: str, measure: Measure, report: Report, show: Show) -> None:
    """Measure with a second process, and say; the main program of both."""
    parser = argparse.ArgumentParser(description=purpose.partition("\n")[0])
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
    command = [sys.executable, script, "--second", *masters]
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
