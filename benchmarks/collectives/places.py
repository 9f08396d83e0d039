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

__all__ = ["CABLES", "EQUAL", "LIMIT", "LOOPBACK", "UNEQUAL", "Cables", "four_hosts"]

LOOPBACK = "loopback"
EQUAL, UNEQUAL = "four hosts, 1 Gbit/s", "four hosts, 1, 1, 1, 0.2 Gbit/s"
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
