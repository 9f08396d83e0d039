"""What a remote call costs: beside torch.distributed.rpc, gRPC and ZeroMQ, on loopback.

    python benchmarks/rpc.py [--quick] [--json FILE]

Two processes hold all connections at once, and the systems take turns in slices of a fraction of a
second, so that a busy machine disturbs all alike.  All are in clear; Potluck's figures with its
encryption are reported beside them.  Figures are medians of the rounds; a ratio is the median of
the ratios within each round.  FILE may be ``-`` for the terminal.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from _rpc_systems import PATIENCE, SYSTEMS, Client, Potluck, available

ECHO, FLOOD, ARRAY = "64 B echo, p50", "64 B echo, 64 in flight", "64 MiB array"
BESIDE = "64 B echo beside 512 MiB, p99"
UNITS = {ECHO: "s", FLOOD: "calls/s", ARRAY: "B/s", BESIDE: "s"}

LONGEST_BESIDE = 0.02
"""Seconds that Potluck may need for it."""

LARGE = 512 << 20
ROUNDS_BESIDE = 3


@dataclass(frozen=True)
class Bar:
    """What is wanted of Potluck, as a multiple of another system's figure."""

    case: str
    beside: str
    factor: float

    def is_met(self, ratio: float) -> bool:
        """Times are to be at most so long, rates at least so high."""
        return ratio <= self.factor if UNITS[self.case] == "s" else ratio >= self.factor


BARS = [
    Bar(ECHO, "torch", 0.8),
    Bar(ECHO, "gRPC", 0.3),
    Bar(FLOOD, "torch", 1.0),
    Bar(FLOOD, "gRPC", 3.0),
    Bar(ARRAY, "gRPC", 1.5),
]

Samples = dict[str, dict[str, list[float]]]
"""Case -> system -> its figure in each round."""


def echo(client: Client, count: int = 200) -> float:
    """Seconds of a typical call, one after the other."""
    payload, taken = bytes(64), []
    for _ in range(count):
        started = time.perf_counter()
        client.echo(payload)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def flood(client: Client, count: int = 1500) -> float:
    """Calls per second, 64 under way."""
    started = time.perf_counter()
    client.flood(bytes(64), count)
    return count / (time.perf_counter() - started)


ARRAY_TO_SEND = np.ones(16 << 20, np.float32)


def array(client: Client) -> float:
    """Bytes per second of an array that is sent."""
    started = time.perf_counter()
    client.take(ARRAY_TO_SEND)
    return ARRAY_TO_SEND.nbytes / (time.perf_counter() - started)


def beside(client: Potluck) -> float:
    """Seconds of one of the slowest calls that are made while a large array is sent."""
    done, taken = client.begin_taking(LARGE), []
    while not done():
        started = time.perf_counter()
        client.echo(bytes(64))
        taken.append(time.perf_counter() - started)
    return statistics.quantiles(taken, n=100)[-1] if len(taken) > 1 else taken[0]


def measure_beside(clients: dict[str, Client]) -> dict[str, list[float]]:
    """The same for those that can; the first round warms up."""
    able = {name: client for name, client in clients.items() if isinstance(client, Potluck)}
    rounds = [
        {name: beside(client) for name, client in able.items()} for _ in range(ROUNDS_BESIDE + 1)
    ]
    return {name: [each[name] for each in rounds[1:]] for name in able}


CASES = {ECHO: echo, FLOOD: flood, ARRAY: array}


def measure(clients: dict[str, Client], rounds: int) -> Samples:
    """Let the systems take turns; the first round warms up."""
    samples: Samples = {case: {name: [] for name in clients} for case in CASES}
    for number in range(rounds + 1):
        order = list(clients)
        order = order[number % len(order) :] + order[: number % len(order)]
        for case, run in CASES.items():
            for name in order:
                figure = run(clients[name])
                if number:
                    samples[case][name].append(figure)
    samples[BESIDE] = measure_beside(clients)
    return samples


def ratio(samples: Samples, case: str, name: str, beside: str) -> float:
    """One system's figure as a multiple of another's, within each round."""
    pairs = zip(samples[case][name], samples[case][beside], strict=True)
    return statistics.median(one / other for one, other in pairs)


def report(samples: Samples, rounds: int) -> dict[str, Any]:
    """Everything measured, and on what."""
    names = list(samples[ECHO])
    bars = []
    for bar in BARS:
        if bar.beside in names:
            value = ratio(samples, bar.case, "potluck", bar.beside)
            bars.append(
                {
                    "case": bar.case,
                    "beside": bar.beside,
                    "bar": bar.factor,
                    "ratio": value,
                    "met": bar.is_met(value),
                }
            )
    beside = {name: statistics.median(values) for name, values in samples[BESIDE].items()}
    slowest = beside["potluck"]
    return {
        "benchmark": "rpc",
        "beside": {
            "case": BESIDE,
            "bar": LONGEST_BESIDE,
            "met": slowest <= LONGEST_BESIDE,
            **beside,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "rounds": rounds,
        "missing": [name for name in SYSTEMS if name not in names],
        "results": [
            {
                "case": case,
                "unit": UNITS[case],
                **{name: statistics.median(values) for name, values in figures.items()},
            }
            for case, figures in samples.items()
            if case in CASES
        ],
        "bars": bars,
    }


# --- two processes ---


def free_addresses(count: int) -> list[str]:
    """Addresses to be used at once."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


@contextlib.contextmanager
def connected(rank: int, addresses: dict[str, str]) -> Iterator[dict[str, Client]]:
    """All systems at once."""
    logging.disable(logging.WARNING)  # Potluck says that it is in clear, which is meant
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(SYSTEMS[name](rank, address))
            for name, address in addresses.items()
        }


def lead(rounds: int) -> Samples:
    """Measure, beside a partner that serves."""
    names = available()
    addresses = dict(zip(names, free_addresses(len(names)), strict=True))
    command = [sys.executable, __file__, "--partner", json.dumps(addresses)]
    partner = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        with connected(0, addresses) as clients:
            samples = measure(clients, rounds)
            assert partner.stdin is not None
            partner.stdin.close()  # the partner leaves as well
        partner.wait(PATIENCE)
    finally:
        partner.kill()
        partner.wait()
    return samples


def follow(addresses: dict[str, str]) -> None:
    """Be the partner: serve until the leader has measured."""
    with connected(1, addresses):
        sys.stdin.read()


# --- for people ---


def _cell(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.0f} µs"
    return f"{value:,.0f}/s" if unit == "calls/s" else f"{value / 1e9:.2f} GB/s"


def draw(figures: dict[str, Any]) -> Iterator[Table]:
    """The report as tables."""
    names = [name for name in SYSTEMS if name not in figures["missing"]]
    table = Table("", *names, box=SIMPLE_HEAD, pad_edge=False)
    table.title = "A remote call between two processes on loopback"
    table.caption = f"medians of {figures['rounds']} interleaved rounds"
    for row in figures["results"]:
        table.add_row(row["case"], *(_cell(row[name], row["unit"]) for name in names))
    bar = figures["beside"]
    table.add_row(BESIDE, *(_cell(bar[name], "s") if name in bar else "" for name in names))
    yield table
    bars = Table("Potluck beside", "", "ratio", "wanted", box=SIMPLE_HEAD, pad_edge=False)
    for each in figures["bars"]:
        sign = "≤" if UNITS[each["case"]] == "s" else "≥"
        verdict = "[green]met" if each["met"] else "[red]missed"
        wanted = f"{sign} {each['bar']} {verdict}"
        bars.add_row(each["beside"], each["case"], f"{each['ratio']:.2f}", wanted)
    verdict = "[green]met" if bar["met"] else "[red]missed"
    wanted = f"≤ {bar['bar'] * 1e3:.0f} ms {verdict}"
    bars.add_row("", BESIDE, f"{bar['potluck'] * 1e3:.1f} ms", wanted)
    yield bars
    if figures["missing"]:
        yield Table(f"not installed: {', '.join(figures['missing'])}", box=None)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 15")
    parser.add_argument("--rounds", type=int, help="so many rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--partner", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.partner:
        follow(options.partner)
        return
    rounds = options.rounds or (3 if options.quick else 15)
    figures = report(lead(rounds), rounds)
    if options.json != "-":
        for table in draw(figures):
            Console().print(table)
    if options.json:
        text = json.dumps(figures, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)


if __name__ == "__main__":
    main()
