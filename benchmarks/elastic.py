"""Elastic training: how soon it goes on, what unequal machines reach, and how few bytes it needs.

    python benchmarks/elastic.py [--quick] [--json FILE] [--parts recovery,speeds,overlap,...]

* ``recovery``: four processes; one is killed again and again, and replaced.  Seconds from its
  death to the next committed step, of every survivor.
* ``speeds``: four processes of which one computes at a quarter of the others' speed (they sleep, so
  that few cores can show it); their summed throughput is 100 %.  DDP in the same processes.
* ``overlap``: a step of PyTorch with averaging during the backward pass and after it, turn by turn.
* ``diloco``: a transformer trained by four members, averaged in every step and by DiLoCo with int8:
  bytes, and the loss on text that nobody trained on.
* ``diloco-slow``: the same on four hosts at 20 Mbit/s: how much of the time is spent computing, and
  bytes that leave a host.

``overlap`` and ``diloco-slow`` need emulated hosts (root, ``ip`` and ``tc``), the last three need
PyTorch; they are left out otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the emulated hosts

from _elastic_table import rows_of
from support.hosts import Hosts

RANK = Path(__file__).with_name("_elastic_rank.py")
NAMES = "desk laptop tower attic"
PATIENCE = 300.0  # seconds for anything that is waited for
Figures = dict[str, Any]


class Member:
    """A process, and what it says."""

    def __init__(self, part: str, options: Figures, wrap: Callable[[list[str]], list[str]]) -> None:
        command = [sys.executable, str(RANK), part, json.dumps(options)]
        # What it computes is small: more threads would only wait for each other.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "POTLUCK_HOME": options["home"]}
        self._process = subprocess.Popen(wrap(command), stdout=subprocess.PIPE, env=environment)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def hear(self) -> Figures:
        """What it says next."""
        line = self._lines.get(timeout=PATIENCE)
        if not line:
            sys.exit(f"A member ended with {self._process.wait()}")
        said: Figures = json.loads(line)
        return said

    def kill(self) -> float:
        """End it without warning; the moment just before."""
        now = time.monotonic()
        self._process.kill()
        return now

    def end(self) -> None:
        """Be sure that it is gone."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def crew(
    part: str, count: int, rate: str | None = None, **options: Any
) -> Iterator[tuple[list[Member], Callable[[], Member]]]:
    """So many members, on hosts of their own where there is a rate; and how to start another."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        names = NAMES.split()[:count]
        hosts = stack.enter_context(Hosts(" ".join(names), rate=rate)) if rate else None
        port = free_port()
        first = "127.0.0.1" if hosts is None else hosts[names[0]].ipv4
        facts = {
            "home": home,
            "job": uuid.uuid4().hex,
            "nodes": count,
            "port": port,
            "master": f"{first}:{port}",
            **options,
        }

        def start(place: int = 0) -> Member:
            wrap = list if hosts is None else hosts[names[place]].command
            member = Member(part, {**facts, "rank": place}, wrap)
            stack.callback(member.end)
            return member

        yield [start(place) for place in range(count)], start


def has_hosts() -> bool:
    """Whether hosts can be emulated here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# -- the parts -------------------------------------------------------------------------------------


def recovery(*, quick: bool) -> Figures:
    """Kill, wait for the next committed step, start another, and again."""
    deaths, found = 2 if quick else 12, []
    with crew("recovery", 4) as (members, start):

        def settle(size: int) -> list[Figures]:
            said = []
            for member in members:
                while (each := member.hear())["size"] != size:
                    pass
                said.append(each)
            return said

        settle(4)
        for number in range(deaths):
            killed = members.pop(number % len(members)).kill()
            found += [each["at"] - killed for each in settle(3)]
            members.append(start())
            settle(4)
    ordered = sorted(found)
    return {
        "deaths": deaths,
        "seconds": ordered,
        "median": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "most": ordered[-1],
    }


def speeds(*, quick: bool) -> Figures:
    """Throughput beside what the speeds add up to."""
    factors, cost, batch = [1, 1, 1, 4], 0.004, 104
    steps: Figures = {"warm_up": 6, "steps": 4 if quick else 30, "plain_steps": 2 if quick else 8}
    with crew("speeds", 4, cost=cost, factors=factors, batch=batch, **steps) as (members, _):
        said = [member.hear() for member in members]
    summed = sum(1 / (cost * factor) for factor in factors)
    elastic, plain = (min(each[kind] for each in said) for kind in ("elastic", "plain"))
    return {
        "summed": summed,
        "elastic": elastic / summed,
        "plain": plain / summed,
        "how": said[0]["how"],
    }


def overlap(*, quick: bool) -> Figures:
    """Steps with and without overlap on two hosts."""
    size: Figures = {"width": 256, "rows": 64} if quick else {"width": 1024, "rows": 1024}
    rounds = 2 if quick else 8
    with crew("overlap", 2, "500mbit", layers=8, rounds=rounds, **size) as (members, _):
        said = [member.hear() for member in members]
    slowest = {
        kind: [max(turn) for turn in zip(*(each[kind] for each in said), strict=True)]
        for kind in ("overlapped", "plain", "computing")
    }
    pairs = zip(slowest["overlapped"], slowest["plain"], strict=True)
    medians = {kind: statistics.median(times) for kind, times in slowest.items()}
    ratio = statistics.median(with_it / without for with_it, without in pairs)
    return {**medians, "ratio": ratio, "nbytes": said[0]["nbytes"]}


def diloco(*, quick: bool) -> Figures:
    """Bytes and loss of DiLoCo beside those of averaging every step."""
    from _elastic_transformer import plain_loss, rare_loss

    steps = 100 if quick else 1500
    plain = plain_loss(4, steps, seed=0)
    found: Figures = {"plain": plain}
    for name, overlap in (("rare", 0), ("overlapped", 25)):
        rare = rare_loss(4, steps, every=50, overlap=overlap, seed=0)
        found[name] = {**rare, "gap": rare["loss"] / plain - 1}
    return found


def diloco_slow(*, quick: bool) -> Figures:
    """The same over slow links: what leaves a host for each step, and the time for computing."""

    def trained(**options: Any) -> Figures:
        with crew("transformer", 4, "20mbit", steps=1500, every=50, seed=0, **options) as (all_, _):
            said = [member.hear() for member in all_]
        return {
            "nbytes": statistics.mean(each["nbytes"] for each in said),
            "seconds": max(each["seconds"] for each in said),
            "utilisation": statistics.mean(each["utilisation"] for each in said),
        }

    plain = trained(how="ddp", warm_up=5, only=10 if quick else 60)
    only = 50 if quick else 300
    rare, late = (
        trained(how="diloco", warm_up=75, only=only, overlap=overlap) for overlap in (0, 25)
    )
    fewer = plain["nbytes"] / rare["nbytes"]
    return {"plain": plain, "rare": rare, "overlapped": late, "fewer": fewer}


PARTS: dict[str, Callable[..., Figures]] = {
    "recovery": recovery,
    "speeds": speeds,
    "overlap": overlap,
    "diloco": diloco,
    "diloco-slow": diloco_slow,
}
ON_HOSTS, WITH_TORCH = ("overlap", "diloco-slow"), ("overlap", "diloco", "diloco-slow")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a glance: does it run")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, by commas")
    options = parser.parse_args()
    wanted = options.parts.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"There is no part {unknown[0]}; there are {', '.join(PARTS)}")
    console, results = Console(), {}
    table = Table(title="elastic training", box=SIMPLE_HEAD, title_justify="left")
    for column in ("what", "found", "bar"):
        table.add_column(column)
    for name in wanted:
        if (name in WITH_TORCH and not find_spec("torch")) or (
            name in ON_HOSTS and not has_hosts()
        ):
            console.print(f"{name} is left out: PyTorch, or root with ip and tc, is missing")
            continue
        results[name] = PARTS[name](quick=options.quick)
        for row in rows_of(name, results[name]):
            table.add_row(*row)
    console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
