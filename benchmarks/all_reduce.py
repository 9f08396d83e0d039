"""Collectives side by side: Potluck, plain and sealed, Gloo, and Open MPI over TCP, in one run.

    python benchmarks/all_reduce.py [--quick] [--json FILE] [--plot]
    python benchmarks/all_reduce.py --ranks 2,4 --sizes 4,64KiB,1MiB --plain
    python benchmarks/all_reduce.py --parts hosts
    python benchmarks/all_reduce.py --parts machines --strategies ring,direct/doubling

The same processes hold all groups and work on the same buffers; contenders take turns in slices of
milliseconds, so that a busy machine disturbs all alike.  A ratio is the median of the ratios within
each round.  First over loopback, then between emulated hosts, one rank on each or several (that
needs root and the programs ``ip`` and ``tc``, and is left out otherwise).  Open MPI
(``openmpi-bin``) takes part where it is installed, ``iperf3`` says how fast a cable really is.
FILE may be ``-`` for the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from collectives.contenders import GLOO, OPEN_MPI, PLAIN, SEALED
from collectives.launch import missing_peers
from collectives.parts import PARTS, Run, Wishes
from collectives.places import MACHINES
from collectives.plan import octets
from collectives.plot import draw_plot
from collectives.tables import draw_machines, draw_rows, draw_targets
from collectives.targets import judge

PLOT = Path(__file__).resolve().parents[1] / "docs" / "internals" / "all_reduce.svg"
WIDTH = 140  # columns, where there is no terminal


def wishes_of(options: argparse.Namespace, missing: dict[str, str]) -> Wishes:
    """What the command line asks for."""
    both = options.plain == options.sealed
    ours = [
        name for name, asked in ((PLAIN, options.plain), (SEALED, options.sealed)) if both or asked
    ]
    peers = [name for name in (GLOO, OPEN_MPI) if _short(name) in options.peers.split(",")]
    return Wishes(
        ours=tuple(ours),
        peers=tuple(name for name in peers if name not in missing),
        worlds=tuple(int(word) for word in options.ranks.split(",")),
        sizes=tuple(octets(word) for word in options.sizes.split(",")) if options.sizes else (),
        rounds=options.rounds,
        is_quick=options.quick,
        is_bare=options.executor,
        megabits=options.megabits,
        strategies=tuple(options.strategies.split(",")) if options.strategies else (),
    )


def _short(name: str) -> str:
    return name.lower().replace(" ", "")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="few rounds, nothing above 16 MiB")
    made.add_argument("--rounds", type=int, help="so many rounds")
    made.add_argument("--ranks", default="2,4", help="world sizes on loopback")
    made.add_argument("--sizes", help="such as 4,64KiB,1MiB; only on loopback unless --parts")
    made.add_argument("--parts", help=f"some of {','.join(PARTS)}")
    made.add_argument("--plain", action="store_true", help="Potluck only without encryption")
    made.add_argument("--sealed", action="store_true", help="Potluck only with encryption")
    made.add_argument("--executor", action="store_true", help="Potluck without its outer layer")
    made.add_argument("--peers", default="gloo,openmpi", help="with whom to compare")
    made.add_argument("--strategies", help="what to compare on machines: ring,direct/doubling,...")
    made.add_argument("--megabits", type=int, help="of cables between machines; usually 1000")
    made.add_argument("--json", metavar="FILE", help="also write the figures here; - is stdout")
    made.add_argument("--plot", nargs="?", const=PLOT, type=Path, help=f"draw into {PLOT.name}")
    return made


def report(run: Run, missing: dict[str, str]) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "benchmark": "all_reduce",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "left_out": {**missing, **run.left_out},
        "results": run.rows,
        "targets": judge(run.rows, run.figures),
    }


def main() -> None:
    """Run from the command line."""
    options = parser().parse_args()
    missing = missing_peers()
    names = options.parts.split(",") if options.parts else ["loopback"] if options.sizes else PARTS
    run = Run(wishes_of(options, missing))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, quiet=options.json == "-")
    for name in names:
        for title, rows, notes in PARTS[name](run):
            if rows:
                draw = draw_machines if rows[0]["place"] in MACHINES else draw_rows
                console.print(draw(title, rows, [*notes, *_absences(missing)]))
            else:
                console.print("\n".join([title, *notes]))
    figures = report(run, missing)
    is_part = bool(options.parts or options.sizes)
    console.print(draw_targets(figures["targets"], is_part=is_part))
    if options.plot:
        options.plot.write_text(draw_plot(run.rows), encoding="utf-8")
    if options.json:
        text = json.dumps(figures, indent=2) + "\n"
        (sys.stdout.write if options.json == "-" else Path(options.json).write_text)(text)


def _absences(missing: dict[str, str]) -> list[str]:
    return [f"{name} did not take part: {reason}" for name, reason in missing.items()]


if __name__ == "__main__":
    main()
