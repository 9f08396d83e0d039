"""How fast a cluster forms, and goes on without a machine: cold starts, kills, stops, cut cables.

    python benchmarks/cluster.py [--quick] [--trials N] [--parts start kill …] [--json FILE]

Real processes on this machine, and one on each of several emulated hosts (that needs root and the
program ip; without them those rows are missing).  A cold start ends when every process has returned
from ``potluck.join()``.  A loss is *seen* when the last survivor has the error that names it, and
over with the *next sum* of the last survivor.  Each figure is of the slowest process in a trial;
the table shows how the trials are distributed.  FILE may be ``-`` for the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import potluck

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # processes and hosts

from support.cluster_programs import Crowd
from support.hosts import INTERFACE, Hosts
from support.place import Place
from support.ranks import Rank, Ranks, Wrap, start_together

TRIALS, QUICK_TRIALS = 10, 1
PATIENCE = 60.0  # seconds after which a process that has not joined counts as lost
REST = 10.0  # seconds without a fault before a member falls silent
SIZES = 4, 8  # processes that lose one of them
ON_PROCESSES, ON_HOSTS = (3, 5, 8), (3, 5)
ON_CABLES = 3, 8  # hosts of which one loses its cable
FORMED = 3.0
SEEN, LEADER_SEEN, SILENCE_SEEN = 0.1, 0.25, 2.5
NEXT, NEXT_AFTER_SILENCE = 2.0, 3.0
"""Seconds that are wanted: for a cold start and for losses, in the middle of the trials."""

_jobs = (f"bench-{os.getpid()}-{number}" for number in itertools.count(1))


@dataclass
class Figures:
    """What the trials gave, in seconds, by what was measured."""

    trials: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    wanted: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, which: str, bar: float) -> None:
        """One trial, and what is wanted of all of them."""
        self.samples.setdefault(name, []).append(seconds)
        self.wanted[name] = which, bar

    def add_loss(self, name: str, found: tuple[float, float], seen: float, after: float) -> None:
        """Two figures of one trial."""
        self.add(f"{name}, seen", found[0], "median", seen)
        self.add(f"{name}, next sum", found[1], "median", after)


# --- cold starts ---


def meet(place: Place, job: str, count: int) -> list[float]:
    """Join with nothing but the namespace of this machine; when it began, and when it was in."""
    place.wait_for_start()
    began = time.monotonic()
    with potluck.join(count, job=job, timeout=PATIENCE) as cluster:
        joined = time.monotonic()
        assert cluster.all_reduce(1) == count
        place.say("joined")
        place.hear("leave")
        return [began, joined]


def cold_start(ranks: Ranks, wraps: Sequence[Wrap | None]) -> float:
    """Seconds until all are in, from the moment at which the first began to look around."""
    job, count = next(_jobs), len(wraps)
    nodes = [ranks.take(wrap) for wrap in wraps]
    for number, node in enumerate(nodes):
        node.begin(meet, number, count, "", job, count)
    start_together(nodes)
    for node in nodes:
        node.expect("joined")
    for node in nodes:
        node.tell("leave")
    times = [node.value() for node in nodes]
    return float(max(joined for _, joined in times) - min(began for began, _ in times))


def starts(figures: Figures, ranks: Ranks, *, quick: bool) -> None:
    """Processes on loopback, and emulated hosts."""
    for count in ON_PROCESSES[: 1 if quick else None]:
        for _ in range(figures.trials):
            taken = cold_start(ranks, [None] * count)
            figures.add(f"cold start of {count} processes", taken, "median", FORMED)
    for count in ON_HOSTS[: 1 if quick else None] if has_hosts() else ():
        with Hosts([f"host{number}" for number in range(count)]) as hosts:
            for _ in range(figures.trials):
                taken = cold_start(ranks, [host.command for host in hosts.values()])
                figures.add(f"cold start of {count} hosts", taken, "median", FORMED)


# --- losses ---

Loss = Callable[[Figures, Ranks, int], None]
"""Measures one kind of loss in a group of this size."""


def after_loss(moment: float, survivors: Sequence[Rank]) -> tuple[float, float]:
    """Seconds from a moment until all survivors had the error, and until all had their next sum."""
    seen, over = [], []
    for node in survivors:
        while (said := node.hear_any())["word"] != "told":
            pass
        seen.append(said["at"])
        while said["word"] != "view" or said["size"] != len(survivors):
            said = node.hear_any()
        over.append(said["at"])
    return max(seen) - moment, max(over) - moment


def rest(nodes: Sequence[Rank]) -> None:
    """Let a while go by without a fault: a member that woke up late asks for patience first."""
    until = time.monotonic() + REST
    for node in nodes:
        while node.hear_any()["at"] < until:
            pass


def kills(figures: Figures, ranks: Ranks, size: int) -> None:
    """A member, the leader, and a leader that has forked; another process takes its place."""
    crowd = Crowd(ranks, next(_jobs))
    nodes = crowd.start(size, size)
    for _ in range(figures.trials):
        for name, rank in (("member", 2), ("leader", 0), ("leader, forked", 0)):
            victim = crowd.views(nodes, size)[rank]
            if "forked" in name:
                victim.tell("fork")
                for _ in range(2):  # the word is taken between two sums
                    victim.hear_any()
            nodes.remove(victim)
            found = after_loss(victim.kill(), nodes)
            bar = SEEN if rank else LEADER_SEEN
            figures.add_loss(f"killed {name}, of {size}", found, bar, NEXT)
            nodes += crowd.start(1, 2)
    crowd.views(nodes, size)
    crowd.stop(nodes)


def stops(figures: Figures, ranks: Ranks, size: int) -> None:
    """A process stands still, and comes back when it continues."""
    crowd = Crowd(ranks, next(_jobs))
    nodes = crowd.start(size, size)
    for _ in range(figures.trials):
        for name, rank in (("member", 2), ("leader", 0)):
            victim = crowd.views(nodes, size)[rank]
            rest(nodes)
            survivors = [node for node in nodes if node is not victim]
            found = after_loss(victim.send_signal(signal.SIGSTOP), survivors)
            victim.send_signal(signal.SIGCONT)
            label = f"stopped {name}, of {size}"
            figures.add_loss(label, found, SILENCE_SEEN, NEXT_AFTER_SILENCE)
    crowd.views(nodes, size)
    crowd.stop(nodes)


def cables(figures: Figures, ranks: Ranks, size: int) -> None:
    """The cable of a host is pulled out, and plugged in again."""
    if not has_hosts():
        return
    with Hosts([f"host{number}" for number in range(size)]) as hosts:
        crowd = Crowd(ranks, next(_jobs), multicast=True, neighbours=False)
        nodes = crowd.start(size, size, [host.command for host in hosts.values()])
        places = dict(zip(nodes, hosts.values(), strict=True))
        for trial in range(figures.trials):
            victim = crowd.views(nodes, size)[trial % size]
            rest(nodes)
            moment = time.monotonic()
            places[victim].unplug()
            found = after_loss(moment, [node for node in nodes if node is not victim])
            label = f"pulled cable, of {size}"
            figures.add_loss(label, found, SILENCE_SEEN, NEXT_AFTER_SILENCE)
            places[victim].ip("link", "set", INTERFACE, "up")
        crowd.views(nodes, size)
        crowd.stop(nodes)


def has_hosts() -> bool:
    """Whether machines can be emulated here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


# --- the report ---


def summary(name: str, samples: list[float], which: str, bar: float) -> dict[str, Any]:
    """One row."""
    ordered = sorted(samples)
    row: dict[str, Any] = {
        "case": name,
        "trials": len(ordered),
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, -(-len(ordered) * 9 // 10) - 1)],
        "max": ordered[-1],
        "bar": bar,
        "bar_is_for": which,
        "seconds": samples,
    }
    return {**row, "met": row[which] <= bar}


def report(figures: Figures) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "benchmark": "cluster",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "results": [
            summary(name, samples, *figures.wanted[name])
            for name, samples in figures.samples.items()
        ],
    }


def draw(found: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title = "Forming a cluster, and going on without a machine: milliseconds"
    table.add_column("", no_wrap=True)
    for title in ("trials", "median", "p90", "max", "wanted"):
        table.add_column(title, justify="right")
    for row in found["results"]:
        times = (f"{row[which] * 1000:.0f}" for which in ("median", "p90", "max"))
        verdict = "[green]met" if row["met"] else "[red]missed"
        wanted = f"{row['bar_is_for']} ≤ {row['bar'] * 1000:.0f} {verdict}"
        table.add_row(row["case"], str(row["trials"]), *times, wanted)
    return table


@contextlib.contextmanager
def processes() -> Iterator[Ranks]:
    """Processes that end with this, in a home of their own."""
    idle: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as home:
        os.environ["POTLUCK_HOME"] = home
        logging.disable(logging.WARNING)  # whoever is killed has something to say
        ranks = Ranks(idle)
        try:
            yield ranks
        finally:
            ranks.clean_up()
            for process in idle:
                process.clean_up()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one trial of each, fewer sizes")
    parser.add_argument("--trials", type=int, help=f"trials of each case (default {TRIALS})")
    parts = ("start", "kill", "stop", "cable")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    options = parser.parse_args()
    figures = Figures(options.trials or (QUICK_TRIALS if options.quick else TRIALS))
    with processes() as ranks:
        if "start" in options.parts:
            starts(figures, ranks, quick=options.quick)
        losses: dict[str, tuple[Loss, tuple[int, ...]]] = {
            "kill": (kills, SIZES),
            "stop": (stops, SIZES),
            "cable": (cables, ON_CABLES),
        }
        for part, (measure, sizes) in losses.items():
            for size in sizes[: 1 if options.quick else None] if part in options.parts else ():
                measure(figures, ranks, size)
    found = report(figures)
    if options.json != "-":
        Console().print(draw(found))
    if options.json:
        text = json.dumps(found, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)


if __name__ == "__main__":
    main()
