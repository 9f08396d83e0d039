"""Emulated hosts for the benchmark: their cables, and the time that nobody can undercut on them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from collectives.launch import Place
from support.hosts import Host, Hosts

__all__ = [
    "CABLES",
    "EQUAL",
    "LIMIT",
    "LOOPBACK",
    "MACHINES",
    "THREE",
    "TWO",
    "UNEQUAL",
    "Cables",
    "Machines",
    "four_hosts",
    "machines",
]

LOOPBACK = "loopback"
EQUAL, UNEQUAL = "four hosts, 1 Gbit/s", "four hosts, 1, 1, 1, 0.2 Gbit/s"
TWO, THREE = "two machines, 3 ranks each", "three machines, 4, 2, 1 ranks"
LIMIT = "limit"
"""The name under which the time that nobody can undercut stands beside the contenders."""

SECONDS = 2  # that iperf3 sends for, after one that does not count
NAMES = ("desk", "laptop", "tower", "attic")


@dataclass(frozen=True)
class Cables:
    """What each host's cable carries, in both directions."""

    megabits: tuple[int, ...]

    @property
    def share(self) -> float:
        """How often the vector crosses the slowest cable, at least, in each direction."""
        size = len(self.megabits)
        # With equal cables all own an equal part; a cable much slower than the others is best used
        # for nothing but its host's own numbers out and the sums in.
        return 2 * (size - 1) / size if len(set(self.megabits)) == 1 else 1.0


CABLES = {EQUAL: Cables((1000,) * 4), UNEQUAL: Cables((1000, 1000, 1000, 200))}


@dataclass(frozen=True)
class Machines:
    """Machines with several ranks each, on equal cables."""

    ranks: tuple[int, ...]
    megabits: int

    @property
    def share(self) -> float:
        """How often the vector crosses each cable, at least, in each direction."""
        return 2 * (len(self.ranks) - 1) / len(self.ranks)

    @property
    def flat_share(self) -> float:
        """The same for a ring of all ranks in the order of machines."""
        return 2 * (sum(self.ranks) - 1) / sum(self.ranks)


MACHINES = {
    TWO: Machines((3, 3), 1000),
    THREE: Machines((4, 2, 1), 1000),
}


@contextlib.contextmanager
def machines(which: Machines) -> Iterator[tuple[Place, float, str]]:
    """The machines, each rank with its own; seconds of a byte at least; what that rests on."""
    names = NAMES[: len(which.ranks)]
    with Hosts(names) as hosts:
        for name in names:
            hosts.limit(name, f"{which.megabits}mbit")
        first, second = (hosts[name] for name in names[:2])
        rate, source = which.megabits * 1e6 / 8, "the cable's rate"
        if shutil.which("iperf3"):
            rate, source = iperf3(first, second), "iperf3's rate between two machines"
        words = (
            f"N is the vector on a cable: {which.share:.2f} N at least, {which.flat_share:.2f} N "
            f"for a flat ring; the limit is {source}, {rate / 1e6:.1f} MB/s"
        )
        ranks = [
            hosts[name]
            for name, count in zip(names, which.ranks, strict=True)
            for _ in range(count)
        ]
        yield Place(tuple(ranks)), which.share / rate, words


@contextlib.contextmanager
def four_hosts(cables: Cables) -> Iterator[tuple[Place, float, str]]:
    """The hosts; seconds that a byte of an all-reduce takes at least; and what that rests on."""
    with Hosts(NAMES) as hosts:
        for name, megabits in zip(NAMES, cables.megabits, strict=True):
            hosts.limit(name, f"{megabits}mbit")
        slowest = hosts[NAMES[cables.megabits.index(min(cables.megabits))]]
        rate, source = min(cables.megabits) * 1e6 / 8, "the slowest cable's rate"
        if len(set(cables.megabits)) == 1 and shutil.which("iperf3"):
            other = next(host for host in hosts.values() if host is not slowest)
            rate, source = iperf3(slowest, other), "iperf3's rate between two hosts"
        words = (
            f"the limit is {source}, {rate / 1e6:.1f} MB/s, and {cables.share:g} times the vector"
        )
        yield Place(tuple(hosts.values())), cables.share / rate, words


def iperf3(server: Host, client: Host) -> float:
    """Bytes per second of data from one host to the other, as the receiver counted them."""
    serving = subprocess.Popen(
        server.command(["iperf3", "--server", "--one-off"]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    sending = ["iperf3", "--client", server.ipv4, "--time", str(SECONDS), "--omit", "1", "--json"]
    try:
        deadline = time.monotonic() + 10
        while True:
            answer = client.run(sending, check=False)
            facts = json.loads(answer.stdout or "{}")
            if "end" in facts and "sum_received" in facts["end"]:
                return float(facts["end"]["sum_received"]["bits_per_second"]) / 8
            if time.monotonic() > deadline:
                msg = f"iperf3 did not measure: {answer.stderr or facts.get('error')}"
                raise RuntimeError(msg)
            time.sleep(0.1)  # the server does not listen yet
    finally:
        serving.terminate()
        serving.wait()
