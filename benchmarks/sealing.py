"""What encryption costs: a sealed TcpBackend beside a plain one, in one interleaved run.

    python benchmarks/sealing.py [--quick] [--json FILE]

Two processes hold both groups and alternate between them, so that a busy machine disturbs both
alike; a ratio is the median of the ratios within each round.  First over loopback, where nothing
but the processor is in the way; then between two emulated hosts with a cable of 1 Gbit/s each
(this part needs root and the program ``ip``, and is left out otherwise).  FILE may be ``-``.

Over loopback each side has to seal (or open) and to copy, one after the other on one core, so about
sealing / (sealing + plain) is the best that can be expected: the table calls it the bound.
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
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potluck import NetworkNamespace, SecurityWarning, TcpBackend
from potluck.backend.framing import SEALED_PIECE
from potluck.net.aead import TAG_SIZE, derive_keys, preferred_cipher

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the emulated hosts

from support.hosts import Hosts

PATIENCE = 60  # seconds without a byte after which the measurement is given up
PLAIN, SEALED = "plain", "sealed"
LOOPBACK, CABLE = "loopback", "1 Gbit/s"
BARS = {LOOPBACK: 0.6, CABLE: 0.97}  # of the plain group's throughput, at least
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Case:
    """One thing to measure: ``count`` messages of ``mebibytes`` make a slice."""

    place: str
    mebibytes: int
    count: int
    both_ways: bool = False

    @property
    def octets(self) -> int:
        """What moves in a slice."""
        return self.mebibytes * self.count * MEBIBYTE * (2 if self.both_ways else 1)


CASES = [
    *(Case(LOOPBACK, size, 128 // size) for size in (1, 4, 16, 64)),
    *(Case(LOOPBACK, size, 64 // size, both_ways=True) for size in (1, 4, 16, 64)),
    Case(CABLE, 1, 16),
    Case(CABLE, 16, 1),
    Case(CABLE, 64, 1),
    Case(CABLE, 16, 4, both_ways=True),  # several: two streams that share a queue need a while
]
LARGEST = max(case.mebibytes for case in CASES)

Wrap = Callable[[list[str]], list[str]]
Samples = list[tuple[float, float, float]]
"""Bytes per second, round by round: plain, sealed, and of sealing alone on one core."""


# -- one of the two processes ----------------------------------------------------------------------


class Side:
    """Both go through the same slices; the clock of rank 0 counts."""

    def __init__(self, groups: dict[str, TcpBackend], rank: int) -> None:
        self._groups = groups
        self._rank = rank
        self._out = memoryview(bytearray(os.urandom(MEBIBYTE) * LARGEST))
        self._into = memoryview(bytearray(self._out))  # written once: no page is new in a slice

    def run(self, case: Case, name: str) -> float:
        """One slice: bytes per second."""
        backend, peer = self._groups[name], 1 - self._rank
        size = case.mebibytes * MEBIBYTE
        out, into = self._out[:size], self._into[:size]
        backend.barrier(PATIENCE)
        started = time.perf_counter()
        for _ in range(case.count):
            if case.both_ways:
                arriving = backend.post_recv_into(into, peer)
                backend.send(out, peer, timeout=PATIENCE)
                arriving.wait(PATIENCE)
            elif self._rank == 0:
                backend.send(out, peer, timeout=PATIENCE)
            else:
                backend.recv(into, peer, timeout=PATIENCE)
        backend.barrier(PATIENCE)  # only then has everything arrived
        return case.octets / (time.perf_counter() - started)

    def seal(self) -> float:
        """Nothing but sealing, of data that is not in cache: bytes per second."""
        sealer, _ = derive_keys(
            bytes(32), bytes(32), context=b"", initiator=True, cipher=preferred_cipher()
        )
        room = memoryview(bytearray(SEALED_PIECE + TAG_SIZE))
        started = time.perf_counter()
        for place in range(0, len(self._out), SEALED_PIECE):
            sealer.seal_into(b"", self._out[place : place + SEALED_PIECE], room)
        return len(self._out) / (time.perf_counter() - started)


def measure(side: Side, place: str, rounds: int) -> dict[int, Samples]:
    """All rounds at one place, by the number of the case."""
    samples: dict[int, Samples] = {}
    for number in range(rounds + 1):
        sealing = side.seal()
        order = (PLAIN, SEALED) if number % 2 else (SEALED, PLAIN)
        for index, case in enumerate(CASES):
            if case.place == place:
                rates = {name: side.run(case, name) for name in order}
                if number:  # the first round warms up
                    samples.setdefault(index, []).append((rates[PLAIN], rates[SEALED], sealing))
    return samples


def take_part(rank: int, masters: list[str], place: str, rounds: int) -> None:
    """Be one of the two; rank 0 prints what was measured."""
    logging.disable(logging.WARNING)  # plain TCP warns twice, and it is meant
    warnings.simplefilter("ignore", SecurityWarning)
    plain = NetworkNamespace.insecure()
    with (
        TcpBackend(rank, 2, masters[0], timeout=PATIENCE, namespace=plain) as in_clear,
        TcpBackend(rank, 2, masters[1], timeout=PATIENCE) as sealed,
    ):
        samples = measure(Side({PLAIN: in_clear, SEALED: sealed}, rank), place, rounds)
    if rank == 0:
        print(json.dumps(samples))


# -- the process that starts the two ---------------------------------------------------------------


def run_pair(place: str, host: str, wraps: tuple[Wrap, Wrap], rounds: int) -> dict[int, Samples]:
    """Start both, each in its own place, and collect what rank 0 prints."""
    masters = ",".join(f"{host}:{port}" for port in free_ports(2))
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as home:  # one circle for both, made for this run
        environment = {**os.environ, "POTLUCK_HOME": home}
        environment.pop("POTLUCK_NAMESPACE", None)
        try:
            for rank, wrap in enumerate(wraps):
                facts = [str(rank), masters, place, str(rounds)]
                command = wrap([sys.executable, __file__, "--side", *facts])
                started.append(
                    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
                )
            printed = [process.communicate(timeout=20 * PATIENCE)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    if any(process.returncode for process in started):
        msg = f"The measurement over {place} failed"
        raise SystemExit(msg)
    return {int(index): pairs for index, pairs in json.loads(printed[0]).items()}


def free_ports(count: int) -> list[int]:
    """Ports to be used at once."""
    with contextlib.ExitStack() as held:
        made = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in made]


def unchanged(command: list[str]) -> list[str]:
    """A process on this machine."""
    return command


def run_all(rounds: int, cable_rounds: int) -> tuple[dict[int, Samples], str]:
    """Both places; and why the second is missing, if it is."""
    samples = run_pair(LOOPBACK, "127.0.0.1", (unchanged, unchanged), rounds)
    try:
        with Hosts("desk laptop", rate="1gbit") as hosts:
            desk, laptop = hosts["desk"], hosts["laptop"]
            wraps = desk.command, laptop.command
            samples |= run_pair(CABLE, desk.ipv4, wraps, cable_rounds)
    except (OSError, RuntimeError) as error:
        return samples, f"{CABLE} was not measured: {error}"
    return samples, ""


# -- the report ------------------------------------------------------------------------------------


def summary(case: Case, samples: Samples) -> dict[str, Any]:
    """One line of the report."""
    ratios = sorted(sealed / plain for plain, sealed, _ in samples)
    ratio = statistics.median(ratios)
    bound = statistics.median(sealing / (sealing + plain) for plain, _, sealing in samples)
    return {
        **asdict(case),
        "unit": "B/s",
        PLAIN: statistics.median(plain for plain, _, _ in samples),
        SEALED: statistics.median(sealed for _, sealed, _ in samples),
        "sealing_alone": statistics.median(sealing for _, _, sealing in samples),
        "ratio": ratio,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[len(ratios) * 3 // 4]],
        "ratio_bound": bound if case.place == LOOPBACK else 1.0,
        "rounds": len(samples),
        "bar": BARS[case.place],
        "met": ratio >= BARS[case.place],
    }


def report(samples: dict[int, Samples], left_out: str) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "benchmark": "sealing",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "left_out": left_out,
        "results": [summary(CASES[index], rounds) for index, rounds in samples.items()],
    }


def _cells(row: dict[str, Any]) -> Iterator[str]:
    way = "both ways" if row["both_ways"] else "one way"
    yield f"{row['place']} {row['mebibytes']} MiB {way}"
    for side in (PLAIN, SEALED):
        yield f"{row[side] / 1e9:.2f}"
    yield f"{row['ratio']:.2f}"
    yield "–".join(f"{quartile:.2f}" for quartile in row["ratio_quartiles"])
    yield f"{row['ratio_bound']:.2f}"
    yield f"{row['bar']} " + ("[green]met" if row["met"] else "[red]missed")


def draw(figures: dict[str, Any]) -> Table:
    """The report as a table."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.title = "A stream between two processes, sealed beside plain TCP, GB/s"
    rate = figures["results"][0]["sealing_alone"] / 1e9
    table.caption = f"medians of interleaved rounds; one core alone seals {rate:.1f} GB/s"
    if figures["left_out"]:
        table.caption += f"\n{figures['left_out']}"
    table.add_column("", no_wrap=True)
    for title in (PLAIN, SEALED, "ratio", "quartiles", "bound", "wanted"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in figures["results"]:
        table.add_row(*_cells(row))
    return table


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds instead of 20")
    parser.add_argument("--rounds", type=int, help="so many rounds")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        rank, masters, place, rounds = options.side
        take_part(int(rank), masters.split(","), place, int(rounds))
        return
    rounds = options.rounds or (5 if options.quick else 20)
    samples, left_out = run_all(rounds, options.rounds or (3 if options.quick else 10))
    figures = report(samples, left_out)
    if options.json != "-":
        Console().print(draw(figures))
    if options.json:
        text = json.dumps(figures, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)


if __name__ == "__main__":
    main()
