"""What grows with the number of members, and how: forming, view changes, heartbeats, memory.

    python benchmarks/growth.py [--quick] [--real N …] [--simulated N …] [--json FILE] [--plot]

Real processes on this machine give seconds, memory, threads, connections and CPU time.  Simulated
members (:mod:`potluck.testing`, a virtual clock) give the same times without the cost of this
machine, and count every message.  A group has formed when all members are in one view.  A *view
change* is over when all survivors of a killed member are in the next one; for real processes, when
all of them have their next sum.  FILE may be ``-`` for the terminal; ``--plot`` redraws the picture
of docs/internals/growth.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import json
import logging
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import potluck
from potluck._types import ProcessId
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, Effect
from potluck.membership.messages import ClusterMessage
from potluck.testing import SimulatedCluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # processes

from support.place import Place
from support.ranks import Rank, Ranks, start_together

REAL, QUICK_REAL = (2, 4, 8, 16, 32), (2, 4)
SIMULATED, QUICK_SIMULATED = (2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16)
"""Of 128, about five minutes of computing; each time twice as many take five times as long."""
PATIENCE = 300.0  # seconds in which real processes have to join: all start on one machine
REST = 3.0  # seconds without work in which CPU time is measured
WITHIN = 60.0  # seconds of virtual time in which simulated members have to agree
INTERVALS = 3  # heartbeats of each member that are counted
FORMED_64 = 5.0
"""Seconds of virtual time in which 64 members must form a group."""
MESSAGES_EACH = 2.0
"""Messages for each other member and interval: more than a few would grow faster than the group."""
PLOT = Path(__file__).resolve().parents[1] / "docs" / "internals" / "growth.svg"

_jobs = (f"growth-{os.getpid()}-{number}" for number in itertools.count(1))

# --- simulated members ---


class CountingCore(ClusterCore):
    """Counts what all members receive."""

    received = 0

    def receive(self, sender: ProcessId, message: ClusterMessage, now: float) -> list[Effect]:
        """Take a message in."""
        CountingCore.received += 1
        return super().receive(sender, message, now)


def simulate(count: int) -> dict[str, Any]:
    """Form a group of this size, let it rest, and kill a member."""
    began = time.monotonic()
    cluster = SimulatedCluster(seed=count, config=ClusterConfig(min_nodes=count), core=CountingCore)
    names = [f"n{number:03d}" for number in range(count)]
    CountingCore.received = 0
    cluster.start(*names)
    if not cluster.run_until(lambda: cluster.in_one_view(*names), within=WITHIN):
        msg = f"{count} simulated members were not in one view after {WITHIN:g} s"
        raise RuntimeError(msg)
    formed, to_form = cluster.clock.now, CountingCore.received / count
    core = cluster.place(names[0]).core
    assert core is not None
    interval = core.health.config.interval
    cluster.run_until(lambda: False, within=interval)  # what forming has left to say
    before, since = CountingCore.received, cluster.clock.now
    cluster.run_until(lambda: False, within=INTERVALS * interval)
    beats = (cluster.clock.now - since) / interval
    resting = (CountingCore.received - before) / count / beats
    before, killed = CountingCore.received, cluster.clock.now
    cluster.kill(names[-1])
    cluster.run_until(lambda: cluster.in_one_view(*names[:-1]), within=WITHIN)
    return {
        "members": count,
        "formed": formed,
        "messages_to_form": to_form,
        "interval": interval,
        "messages_per_interval": resting,
        "view_change": cluster.clock.now - killed,
        "messages_of_view_change": (CountingCore.received - before) / max(1, count - 1),
        "took": time.monotonic() - began,
    }


# --- real processes ---


def footprint() -> dict[str, int]:
    """What this process holds."""
    me = psutil.Process()
    with me.oneshot():
        sockets = [each for each in me.net_connections("tcp") if each.status == "ESTABLISHED"]
        return {
            "memory": me.memory_info().rss,
            "threads": me.num_threads(),
            "connections": len(sockets),
            "descriptors": me.num_fds(),
        }


def grow(place: Place, job: str, count: int) -> None:
    """Join, rest, and go on without the one that is killed."""
    place.wait_for_start()
    began = time.monotonic()
    with potluck.join(count, job=job, timeout=PATIENCE) as cluster:
        joined, idle = time.monotonic(), footprint()
        cluster.all_reduce(1)
        place.say("joined", began=began, joined=joined, idle=idle, used=footprint())
        place.hear("rest")
        before = time.process_time()
        time.sleep(REST)
        place.say("rested", cpu=(time.process_time() - before) / REST)
        place.hear("work")
        size = count
        while size == count:
            with contextlib.suppress(potluck.PeerLost, potluck.ViewChanged):
                size = cluster.all_reduce(1)
        place.say("changed", at=time.monotonic())
        place.hear("leave")


def measure(ranks: Ranks, count: int) -> dict[str, Any]:
    """The same with processes."""
    job = next(_jobs)
    nodes = [ranks.take() for _ in range(count)]
    for number, node in enumerate(nodes):
        node.begin(grow, number, count, "", job, count)
    start_together(nodes)
    joined = [node.expect("joined", PATIENCE) for node in nodes]
    for node in nodes:
        node.tell("rest")
    rested = [node.expect("rested", PATIENCE) for node in nodes]
    for node in nodes:
        node.tell("work")
    time.sleep(1.0)  # all of them add up
    *survivors, victim = nodes
    killed = victim.kill()
    changed = [node.expect("changed", PATIENCE)["at"] for node in survivors]
    for node in survivors:
        node.tell("leave")
    for node in survivors:
        node.value()
    found = {
        f"{what}_{when}": statistics.median(each[when][what] for each in joined)
        for when in ("idle", "used")
        for what in ("memory", "threads", "connections", "descriptors")
    }
    return {
        "members": count,
        "formed": max(each["joined"] for each in joined) - min(each["began"] for each in joined),
        "view_change": max(changed) - killed,
        "cpu_at_rest": statistics.median(each["cpu"] for each in rested),
        **found,
    }


@contextlib.contextmanager
def processes() -> Iterator[Ranks]:
    """Processes that end with this, in a home of their own."""
    idle: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as home:
        os.environ["POTLUCK_HOME"] = home
        logging.disable(logging.WARNING)  # the one that is killed is missed
        ranks = Ranks(idle)
        try:
            yield ranks
        finally:
            ranks.clean_up()
            for process in idle:
                process.clean_up()


# --- the report ---


def verdicts(simulated: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is wanted, and whether it is so."""
    found = [
        {"what": "64 members form, virtual seconds", "is": row["formed"], "wanted": FORMED_64}
        for row in simulated
        if row["members"] == 64
    ]
    each = [row["messages_per_interval"] / (row["members"] - 1) for row in simulated]
    found.append(
        {
            "what": "messages per member and interval, for each other member",
            "is": max(each),
            "wanted": MESSAGES_EACH,
        }
    )
    return [{**row, "met": row["is"] <= row["wanted"]} for row in found]


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The report as tables."""
    table = _table("Simulated members: virtual seconds, and messages per member")
    for title in (
        *("members", "formed", "with messages", "interval", "with messages"),
        *("view change", "with messages"),
    ):
        table.add_column(title, justify="right")
    for row in found["simulated"]:
        table.add_row(
            str(row["members"]),
            f"{row['formed']:.2f}",
            f"{row['messages_to_form']:.0f}",
            f"{row['interval']:.2f}",
            f"{row['messages_per_interval']:.0f}",
            f"{row['view_change']:.2f}",
            f"{row['messages_of_view_change']:.0f}",
        )
    yield table
    table = _table("Real processes on this machine: seconds, and each one at rest / after a sum")
    titles = ("members", "formed", "view change", "MiB", "threads", "TCP", "descriptors", "CPU %")
    for title in titles:
        table.add_column(title, justify="right")
    for row in found["real"]:
        table.add_row(
            str(row["members"]),
            f"{row['formed']:.2f}",
            f"{row['view_change']:.2f}",
            f"{row['memory_idle'] / 2**20:.0f} / {row['memory_used'] / 2**20:.0f}",
            f"{row['threads_idle']:.0f} / {row['threads_used']:.0f}",
            f"{row['connections_idle']:.0f} / {row['connections_used']:.0f}",
            f"{row['descriptors_idle']:.0f} / {row['descriptors_used']:.0f}",
            f"{100 * row['cpu_at_rest']:.1f}",
        )
    yield table
    table = _table("Wanted")
    for title in ("", "is", "at most", ""):
        table.add_column(title)
    for row in found["wanted"]:
        verdict = "[green]met" if row["met"] else "[red]missed"
        table.add_row(row["what"], f"{row['is']:.2f}", f"{row['wanted']:g}", verdict)
    yield table


def _table(title: str) -> Table:
    return Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title=title)


# --- the picture ---

WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 260, 56, 64, 76

Line = tuple[str, str, list[tuple[float, float]]]  # name, colour, points


def draw(found: dict[str, Any]) -> str:
    """Two panels with logarithmic scales: times, and what each member has."""

    def points(rows: str, field: str, factor: float = 1.0) -> list[tuple[float, float]]:
        pairs = [(row["members"], row[field] * factor) for row in found[rows]]
        return [pair for pair in pairs if pair[1] > 0]

    seconds: list[Line] = [
        ("formed, real", "#0b7285", points("real", "formed")),
        ("formed, simulated", "#66d9e8", points("simulated", "formed")),
        ("view change, real", "#e8590c", points("real", "view_change")),
    ]
    amounts: list[Line] = [
        ("messages per interval", "#2f9e44", points("simulated", "messages_per_interval")),
        ("TCP connections", "#0b7285", points("real", "connections_used")),
        ("threads", "#868e96", points("real", "threads_used")),
        ("memory, MiB", "#e8590c", points("real", "memory_used", 2**-20)),
    ]
    width, height = LEFT + 2 * WIDTH + GAP + 24, TOP + HEIGHT + 44
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    parts = [
        head + 'font-family="sans-serif" font-size="11" fill="#495057">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_panel("seconds", seconds, LEFT),
        *_panel("for each member", amounts, LEFT + WIDTH + GAP),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, lines: Sequence[Line], left: float) -> Iterator[str]:
    every = [point for _, _, points in lines for point in points]
    last = max(math.log2(x) for x, _ in every)
    low = math.floor(min(math.log10(y) for _, y in every))
    high = math.ceil(max(math.log10(y) for _, y in every))

    def across(x: float) -> float:
        return left + (math.log2(x) - 1) / max(1.0, last - 1) * WIDTH

    def up(y: float) -> float:
        return TOP + HEIGHT - (math.log10(y) - low) / max(1, high - low) * HEIGHT

    yield f'<text x="{left}" y="16" font-weight="bold">{title}, by the number of members</text>'
    for number, (name, colour, _) in enumerate(lines):
        at, down = left + number % 2 * 180, 32 + number // 2 * 15
        yield f'<circle cx="{at + 4}" cy="{down - 4}" r="4" fill="{colour}"/>'
        yield f'<text x="{at + 13}" y="{down}">{name}</text>'
    for power in range(low, high + 1):
        y = up(10.0**power)
        ends = f'x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} stroke="#dee2e6"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for power in range(1, round(last) + 1):
        x = across(2.0**power)
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{2**power}</text>'
    for _, colour, points in lines:
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def main() -> int:
    """Run from the command line; 0 if what is wanted is so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and small groups")
    parser.add_argument("--real", type=int, nargs="*", metavar="N", help="groups of processes")
    parser.add_argument("--simulated", type=int, nargs="*", metavar="N", help="simulated groups")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--plot", action="store_true", help=f"redraw {PLOT.name}")
    options = parser.parse_args()
    real = options.real if options.real is not None else QUICK_REAL if options.quick else REAL
    simulated = options.simulated
    if simulated is None:
        simulated = QUICK_SIMULATED if options.quick else SIMULATED
    if not simulated:
        parser.error("at least one simulated group is needed")
    with processes() as ranks:
        measured = [measure(ranks, count) for count in real]
    found: dict[str, Any] = {
        "benchmark": "growth",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "real": measured,
        "simulated": [simulate(count) for count in simulated],
    }
    found["wanted"] = verdicts(found["simulated"])
    if options.json != "-":
        for table in tables(found):
            Console().print(table)
    if options.json:
        text = json.dumps(found, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)
    if options.plot:
        PLOT.write_text(draw(found), encoding="utf-8")
    return 0 if all(row["met"] for row in found["wanted"]) else 1


if __name__ == "__main__":
    sys.exit(main())
