"""Compression: how fast it encodes, and what it gains between emulated hosts, in one run.

    python benchmarks/compression.py [--quick] [--json FILE] [--parts encoders,gigabit,...]

Encoders run on one core, in this process.  Then four hosts with cables of 1 Gbit/s, 100 Mbit/s and
50 Mbit/s, and four processes on loopback, add up the same gradients uncompressed and compressed,
turn by turn, so that a busy machine disturbs all alike; a ratio is the median of the ratios within
each round.  Hosts need root and the programs ``ip`` and ``tc``, and are left out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potluck import DistributedContext, GradientCompressor, NetworkNamespace, TcpBackend
from potluck.compression.base import CompressionContext, Floats
from potluck.compression.choice import method_for
from potluck.compression.codecs import codec_for
from potluck.compression.strategy import CompressionStrategy
from potluck.schedule.reduce import quiet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the emulated hosts

from support.hosts import Hosts

Figures = list[dict[str, Any]]

RANKS = 4
PATIENCE = 120.0  # seconds
NONE = "none"
FEEDBACK = "+feedback"


@dataclass(frozen=True)
class Part:
    """One place, with what is compared there."""

    rate: str | None
    """Of each cable, in the words of ``tc``; None on loopback."""
    mebibytes: int
    contenders: tuple[str, ...]
    rounds: int


TOPK = f"topk:0.01{FEEDBACK}"
AUTO = "auto"
ALL = (NONE, "int8", "bfloat16", AUTO, TOPK, f"{AUTO}{FEEDBACK}")
PARTS = {
    "gigabit": Part("1gbit", 64, (*ALL, f"int8{FEEDBACK}"), 7),
    "fast": Part("100mbit", 64, (NONE, TOPK, "int8"), 3),
    "slow": Part("50mbit", 8, ALL, 3),
    "loopback": Part(None, 64, ALL, 7),
}
BARS = {
    ("gigabit", "int8"): 3.0,
    ("gigabit", "bfloat16"): 1.8,
    ("fast", TOPK): 15.0,
}
OF_BEST = 0.95  # of the speed of the best fixed choice, for auto
ENCODER_BARS = {"int8": 1.5, "topk:0.01": 0.6}  # GB/s


# -- encoders ----------------------------------------------------------------------------------


def encoders(*, is_quick: bool) -> Figures:
    """GB of float32 per second on one core, the median of several."""
    values = np.random.default_rng(0).standard_normal(1 << (20 if is_quick else 24))
    gradient = values.astype(np.float32)
    rows = []
    for name in ("float16", "bfloat16", "int8", "onebit", "topk:0.01", "topk:0.001", "random:0.01"):
        encode, decode = actions(CompressionStrategy.named(name), gradient)
        repeats = 3 if is_quick else 7
        rates = [gradient.nbytes / median_time(each, repeats) / 1e9 for each in (encode, decode)]
        bar = ENCODER_BARS.get(name)
        rows.append({"method": name, "encode_gbs": rates[0], "decode_gbs": rates[1], "bar": bar})
    return rows


def actions(
    strategy: CompressionStrategy, gradient: Floats
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Encode and decode, into memory that is there."""
    if strategy.quantization is not None:
        codec = codec_for(strategy.quantization)
        out, back = codec.packed(gradient), np.empty_like(gradient)
        return lambda: codec.encode(gradient, out), lambda: codec.decode(out, back)
    method, turn = method_for(strategy), CompressionContext(gradient.shape)
    data = method.encode(gradient, turn)
    return lambda: method.encode(gradient, turn), lambda: method.decode(data, gradient.size)


def median_time(action: Callable[[], object], repeats: int) -> float:
    """Seconds."""
    times = []
    with quiet():
        for _ in range(repeats + 1):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# -- ranks -------------------------------------------------------------------------------------


def run_rank(rank: int, master: str, part: Part, folder: Path) -> None:
    """One of the processes that measure; leaves what it saw in a file."""
    logging.disable()
    warnings.simplefilter("ignore")
    count = part.mebibytes << 18
    gradient = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
    array = gradient.copy()
    compressions = {name: compression(name) for name in part.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in part.contenders}
    namespace = NetworkNamespace.insecure()
    backend = TcpBackend(rank, RANKS, master, timeout=PATIENCE, namespace=namespace)
    with DistributedContext(backend) as context:
        for number in range(part.rounds + 2):  # the first measures links, both touch memory
            turn = number % len(part.contenders)  # nobody always follows the same one
            for name in (part.contenders * 2)[turn : turn + len(part.contenders)]:
                np.copyto(array, gradient)
                context.barrier()
                start = time.perf_counter()
                context.all_reduce(array, compression=compressions[name])
                if number >= 2:
                    seconds[name].append(time.perf_counter() - start)
        np.copyto(array, gradient)
        context.all_reduce(array)
        exact, errors = array.copy(), {}
        for name in part.contenders:
            np.copyto(array, gradient)
            context.all_reduce(array, compression=compression(name))
            errors[name] = float(np.linalg.norm(array - exact) / np.linalg.norm(exact))
        context.barrier()
    facts = {"seconds": seconds, "errors": errors}
    (folder / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")


def compression(name: str) -> GradientCompressor | str:
    """What stands behind a contender's name."""
    method = name.removesuffix(FEEDBACK)
    return GradientCompressor(method) if name.endswith(FEEDBACK) else method


# -- places ------------------------------------------------------------------------------------


@contextlib.contextmanager
def place(rate: str | None) -> Iterator[tuple[str, list[Callable[[list[str]], list[str]]]]]:
    """Where ranks run: the address of the first, and for each how a command is started there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    if rate is None:
        yield f"127.0.0.1:{port}", [list] * RANKS
        return
    with Hosts("desk laptop tower attic", rate=rate) as hosts:
        yield f"{hosts['desk'].ipv4}:{port}", [host.command for host in hosts.values()]


def measure(name: str, part: Part) -> Figures:
    """Start all ranks and wait for them; the slowest rank of each round counts."""
    with tempfile.TemporaryDirectory() as folder, place(part.rate) as (master, starters):
        facts = json.dumps(asdict(part))
        own = [sys.executable, __file__, "--folder", folder, "--master", master, "--part", facts]
        environment = os.environ | {"POTLUCK_HOME": folder}
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
        seen = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    rounds = {
        each: [max(times) for times in zip(*(one["seconds"][each] for one in seen), strict=True)]
        for each in part.contenders
    }
    return [
        {
            "part": name,
            "mebibytes": part.mebibytes,
            "method": each,
            "median_seconds": statistics.median(times),
            "speedup": statistics.median(
                without / with_it for without, with_it in zip(rounds[NONE], times, strict=True)
            ),
            "error": seen[0]["errors"][each],
            "of_best": of_best(each, rounds),
            "bar": OF_BEST if each.startswith(AUTO) else BARS.get((name, each)),
        }
        for each, times in rounds.items()
    ]


def of_best(name: str, rounds: dict[str, list[float]]) -> float | None:
    """How near auto comes to the best of those that it can choose from; None for others."""
    if not name.startswith(AUTO):
        return None
    fixed = {each: times for each, times in rounds.items() if not each.startswith(AUTO)}
    if not name.endswith(FEEDBACK):
        fixed = {each: times for each, times in fixed.items() if not each.endswith(FEEDBACK)}
    best = min(fixed.values(), key=statistics.median)
    return statistics.median(theirs / ours for theirs, ours in zip(best, rounds[name], strict=True))


# -- the command -------------------------------------------------------------------------------


def table(title: str, rows: Figures, columns: dict[str, str]) -> Table:
    """Figures for people."""
    made = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        cells = [row[column] for column in columns]
        made.add_row(
            *(
                "" if cell is None else pattern.format(cell)
                for cell, pattern in zip(cells, columns.values(), strict=True)
            )
        )
    return made


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="few rounds of small gradients")
    made.add_argument("--rounds", type=int, help="so many rounds")
    made.add_argument("--parts", help=f"some of encoders,{','.join(PARTS)}")
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
    console = Console()
    wanted = options.parts.split(",") if options.parts else ["encoders", *PARTS]
    figures: dict[str, Figures] = {}
    for name in wanted:
        if name == "encoders":
            figures[name] = encoders(is_quick=options.quick)
            columns = {"method": "{}", "encode_gbs": "{:.2f}", "decode_gbs": "{:.2f}", "bar": "{}"}
        else:
            part = PARTS[name]
            if part.rate is not None and os.geteuid() != 0:
                console.print(f"{name} is left out: emulated hosts need root")
                continue
            if options.quick:
                part = replace(part, mebibytes=2, rounds=1)
            if options.rounds:
                part = replace(part, rounds=options.rounds)
            figures[name] = measure(name, part)
            columns = {
                "method": "{}",
                "median_seconds": "{:.3f}",
                "speedup": "{:.2f}",
                "error": "{:.4f}",
                "of_best": "{:.2f}",
                "bar": "{}",
            }
        console.print(table(name, figures[name], columns))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
