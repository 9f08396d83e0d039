"""Groups whose processors are nearly busy with heartbeats: views must stay as they are.

``python -m potluck.testing.load`` gives every process of a group so small a share of a processor
that the heartbeats of a group at rest take a given part of it.  Inputs queue up and are worked on
late.  After a minute nothing may change any more: views that follow each other because everybody is
slow would make everybody slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.membership.events import ClusterState
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.process import WORK

LOAD = 0.7
"""The part of its processor that a group at rest may take, at most."""
GROUPS = (4, 8, 16, 32)
_FORMING = 30.0  # seconds, at most
_MEASURING = 20.0  # seconds at rest in which inputs are counted
BEGINNING = 60.0
"""Seconds of constant load in which views may still change."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a group under load."""

    size: int
    load: float
    """The part of its processor that each process needed, on average."""
    views_at_first: int
    """That followed in the first minute."""
    views: int
    """That followed later."""
    paused: int
    """Processes that were not at work at the end."""

    def __str__(self) -> str:
        """One line of a table."""
        return (
            f"{self.size:3} processes, load {self.load:4.0%}: {self.views_at_first} views in the "
            f"first minute, {self.views} later, {self.paused} not at work at the end"
        )


def endure(size: int, *, load: float = LOAD, seconds: float = 600.0, seed: int = 1) -> LoadResult:
    """Form a group, give each process so much of a processor, and let time pass."""
    cluster = SimulatedCluster(seed)
    names = [f"n{number:02}" for number in range(size)]
    cluster.start(*names)
    if not cluster.run_until(lambda: cluster.in_one_view(*names), within=_FORMING):
        msg = f"{size} processes did not find each other within {_FORMING:g} s"
        raise RuntimeError(msg)
    before = _inputs(cluster)
    cluster.run(_MEASURING)
    rate = (_inputs(cluster) - before) / _MEASURING / size
    for name in names:
        cluster.slow(name, min(1.0, rate * WORK / load))
    calm, begun, views = cluster.invariants.calm, _inputs(cluster), cluster.invariants.calm.views
    cluster.run(BEGINNING)
    at_first = calm.views - views
    cluster.run(seconds)
    taken = (_inputs(cluster) - begun) / (BEGINNING + seconds) / size
    idle = sum(cluster.state_of(name) is not ClusterState.ACTIVE for name in names)
    return LoadResult(size, load * taken / rate, at_first, calm.views - views - at_first, idle)


def _inputs(cluster: SimulatedCluster) -> int:
    return sum(place.inputs for place in cluster.places.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a view followed after the first minute."""
    parser = argparse.ArgumentParser(prog="python -m potluck.testing.load", description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS, help="sizes of groups")
    parser.add_argument("--load", type=float, default=LOAD, help="part of a processor (0.7)")
    parser.add_argument("--seconds", type=float, default=600.0, help="after the first minute")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    restless = False
    for size in options.groups:
        outcome = endure(size, load=options.load, seconds=options.seconds, seed=options.seed)
        restless |= bool(outcome.views or outcome.paused)
        sys.stdout.write(f"{outcome}\n")
        sys.stdout.flush()
    return 1 if restless else 0


if __name__ == "__main__":
    sys.exit(main())
