"""What a message costs: TcpBackend beside a bare Python socket pair, two processes, plain loopback.

    python benchmarks/p2p.py [--quick] [--json FILE]

The same two processes hold both connections and alternate between them in slices of milliseconds,
so that a busy machine disturbs both alike.  The bare side is what one would write by hand:
``sendall``, and ``recv_into`` in a loop into a buffer made beforehand.  Figures are medians; a
ratio is the median of the ratios within each round.  FILE may be ``-`` for the terminal.
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
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potluck import NetworkNamespace, SecurityWarning, TcpBackend

PATIENCE = 60  # seconds without a byte after which the measurement is given up
THROUGHPUT_BAR, LATENCY_BAR = 0.8, 1.5  # of the bare pair's figure: at least, at most


@dataclass(frozen=True)
class Case:
    """One thing to measure: ``count`` messages of ``size`` bytes make a slice."""

    kind: str
    size: int
    count: int
    bar: float | None = None


ROUND_TRIP, ONE_WAY, BOTH_WAYS = "round trip", "one way", "both ways"
CASES = [
    Case(ROUND_TRIP, 64, 300, bar=LATENCY_BAR),
    Case(ROUND_TRIP, 4 << 10, 200),
    Case(ROUND_TRIP, 64 << 10, 100),
    Case(ONE_WAY, 1 << 20, 64, bar=THROUGHPUT_BAR),
    Case(ONE_WAY, 16 << 20, 4, bar=THROUGHPUT_BAR),
    Case(ONE_WAY, 64 << 20, 2, bar=THROUGHPUT_BAR),
    Case(BOTH_WAYS, 16 << 20, 3),
]

Figures = dict[str, float]  # what one slice gave: seconds of a round trip, or bytes per second


class Bare:
    """A blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own time limit: Python's settimeout() would add a poll to every call.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PATIENCE, 0))
        self.send, self._recv_into = sock.sendall, sock.recv_into

    def recv(self, into: memoryview) -> None:
        """Receive in a loop: a stream hands out what has come so far."""
        missing = len(into)
        while missing:
            got = self._recv_into(into[-missing:])
            if not got:
                raise ConnectionError("the other process has gone")
            missing -= got

    def exchange(self, data: memoryview, into: memoryview) -> None:
        """One thread sends while this one receives."""
        sender = threading.Thread(target=self.send, args=(data,))
        sender.start()
        self.recv(into)
        sender.join()


def join(rank: int, master: str) -> TcpBackend:
    """A group of two without encryption, as the bare pair has none."""
    logging.disable(logging.WARNING)  # it says so twice, and it is meant
    warnings.simplefilter("ignore", SecurityWarning)
    plain = NetworkNamespace.insecure()
    return TcpBackend(rank, 2, master, timeout=PATIENCE, namespace=plain)


class Potluck:
    """The backend."""

    def __init__(self, backend: TcpBackend) -> None:
        backend.timeout = PATIENCE
        self._backend = backend
        self._peer = 1 - backend.rank

    def send(self, data: memoryview) -> None:
        """Send a message."""
        self._backend.send(data, self._peer)

    def recv(self, into: memoryview) -> None:
        """Receive one."""
        self._backend.recv(into, self._peer)

    def exchange(self, data: memoryview, into: memoryview) -> None:
        """Post the receive, then send."""
        arriving = self._backend.post_recv_into(into, self._peer)
        self._backend.send(data, self._peer)
        arriving.wait(PATIENCE)


class Side:
    """One of the two processes; both go through the same slices, the leader's clock counts."""

    def __init__(self, control: Bare, bare: Bare, potluck: Potluck, *, leads: bool) -> None:
        self._control = control
        self._leads = leads
        self._out = memoryview(bytearray(os.urandom(1 << 20) * 64))  # the largest message
        self._into = memoryview(bytearray(self._out))  # written once: no page is new in a slice
        self._mark = memoryview(bytearray(1))
        self._channels: dict[str, Bare | Potluck] = {"bare": bare, "potluck": potluck}

    def run(self, case: Case, name: str) -> Figures:
        """One slice."""
        self._control.send(self._mark)  # start together
        self._control.recv(self._mark)
        slices = {ROUND_TRIP: self._round_trips, ONE_WAY: self._one_way, BOTH_WAYS: self._both_ways}
        return slices[case.kind](case, self._channels[name])

    def _round_trips(self, case: Case, channel: Bare | Potluck) -> Figures:
        out, into = self._out[: case.size], self._into[: case.size]
        clock, taken = time.perf_counter, []
        calls = (channel.send, out), (channel.recv, into)
        (first, one), (second, other) = calls if self._leads else reversed(calls)
        for _ in range(case.count):
            started = clock()
            first(one)
            second(other)
            taken.append(clock() - started)
        taken = sorted(taken[case.count // 10 :])  # the first ones warm up
        return {"p50": taken[len(taken) // 2], "p90": taken[len(taken) * 9 // 10]}

    def _one_way(self, case: Case, channel: Bare | Potluck) -> Figures:
        data = (self._out if self._leads else self._into)[: case.size]
        step = channel.send if self._leads else channel.recv
        started = time.perf_counter()
        for _ in range(case.count):
            step(data)
        # Only the acknowledgement says that everything has arrived.
        (channel.recv if self._leads else channel.send)(self._mark)
        return {"rate": case.size * case.count / (time.perf_counter() - started)}

    def _both_ways(self, case: Case, channel: Bare | Potluck) -> Figures:
        out, into = self._out[: case.size], self._into[: case.size]
        started = time.perf_counter()
        for _ in range(case.count):
            channel.exchange(out, into)
        return {"rate": 2 * case.size * case.count / (time.perf_counter() - started)}


# (case, figure) -> what the bare pair and the backend gave in each round
Samples = dict[tuple[Case, str], list[tuple[float, float]]]


def measure(side: Side, rounds: int) -> Samples:
    """Go through all rounds; both processes call this alike."""
    samples: Samples = {}
    for number in range(rounds + 1):
        order = ("bare", "potluck") if number % 2 else ("potluck", "bare")
        for case in CASES:
            taken = {name: side.run(case, name) for name in order}
            if number:  # the first round warms up
                for figure, value in taken["bare"].items():
                    samples.setdefault((case, figure), []).append((value, taken["potluck"][figure]))
    return samples


@contextlib.contextmanager
def leader(rounds: int) -> Iterator[Side]:
    """This process, with a partner that follows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        facts = ("--rounds", str(rounds), "--partner", str(listener.getsockname()[1]))
        partner = subprocess.Popen([sys.executable, __file__, *facts])
        try:
            with listener.accept()[0] as control, listener.accept()[0] as bare:
                with socket.create_server(("127.0.0.1", 0)) as free:  # to be used at once
                    master = f"127.0.0.1:{free.getsockname()[1]}"
                control.sendall(master.encode())
                with join(0, master) as backend:
                    yield Side(Bare(control), Bare(bare), Potluck(backend), leads=True)
            partner.wait(PATIENCE)
        finally:
            partner.kill()
            partner.wait()


def follow(port: int, rounds: int) -> None:
    """Be the partner."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE) as control,
        socket.create_connection(("127.0.0.1", port), PATIENCE) as bare,
        join(1, control.recv(100).decode()) as backend,
    ):
        measure(Side(Bare(control), Bare(bare), Potluck(backend), leads=False), rounds)


def summary(case: Case, figure: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """One line of the report."""
    ratios = sorted(potluck / bare for bare, potluck in pairs)
    ratio = statistics.median(ratios)
    bar = None if figure == "p90" else case.bar  # the bar is for what is typical
    return {
        "case": case.kind,
        "size_bytes": case.size,
        "figure": figure,
        "unit": "s" if case.kind == ROUND_TRIP else "B/s",
        "bare": statistics.median(bare for bare, _ in pairs),
        "potluck": statistics.median(potluck for _, potluck in pairs),
        "ratio": ratio,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]],
        "bar": bar,
        "met": bar is None or (ratio <= bar if case.kind == ROUND_TRIP else ratio >= bar),
    }


def report(samples: Samples, rounds: int) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "benchmark": "p2p",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "rounds": rounds,
        "results": [summary(case, figure, pairs) for (case, figure), pairs in samples.items()],
    }


def _cells(row: dict[str, Any]) -> Iterator[str]:
    timed, units = row["unit"] == "s", (("MiB", 20), ("KiB", 10), ("B", 0))
    size = next(f"{row['size_bytes'] >> by} {u}" for u, by in units if row["size_bytes"] >> by)
    yield f"{size} {row['case']}" + (f", {row['figure']}" if timed else "")
    for side in ("bare", "potluck"):
        digits = 1 if row[side] < 1e-3 else 0
        yield f"{row[side] * 1e6:.{digits}f} µs" if timed else f"{row[side] / 1e9:.2f} GB/s"
    yield f"{row['ratio']:.2f}"
    yield "–".join(f"{quartile:.2f}" for quartile in row["ratio_quartiles"])
    if row["bar"] is not None:
        verdict = "[green]met" if row["met"] else "[red]missed"
        yield f"{'≤' if timed else '≥'} {row['bar']} {verdict}"


def draw(figures: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title = "A message between two processes, plain TCP on loopback"
    table.caption = f"medians of {figures['rounds']} interleaved rounds"
    table.add_column("", no_wrap=True)
    for title in ("bare", "potluck", "ratio", "quartiles", "wanted"):
        table.add_column(title, justify="right")
    for row in figures["results"]:
        table.add_row(*_cells(row))
    return table


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five rounds instead of 25")
    parser.add_argument("--rounds", type=int, help="so many rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--partner", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.partner:
        follow(options.partner, options.rounds)
        return
    rounds = options.rounds or (5 if options.quick else 25)
    with leader(rounds) as side:
        figures = report(measure(side, rounds), rounds)
    if options.json != "-":
        Console().print(draw(figures))
    if options.json:
        text = json.dumps(figures, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)


if __name__ == "__main__":
    main()
