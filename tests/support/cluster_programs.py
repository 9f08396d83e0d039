"""A node of a cluster in a process of its own: adds up numbers again and again, and reports."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import potluck
from support.clusters import OPTIONS
from support.place import Place, as_failure
from support.ranks import Rank, Ranks, Wrap
from support.threads import PATIENCE

BEAT = 0.5  # seconds between two signs of progress
EVERY = 32  # sums of one view after which all its members give a sign
PAUSE = 0.005  # seconds between two sums: this suite shares its cores


class Ledger:
    """All sums of one view so far, as one number that all its members must have."""

    def __init__(self) -> None:
        self.view = ""
        self.count = 0
        self._sums = hashlib.sha256()

    def enter(self, cluster: potluck.Cluster, sums: np.ndarray[Any, Any]) -> None:
        """Another sum, of the members of the last call."""
        view = cluster._sessions.read(PATIENCE).view.session.hex()
        if view != self.view:
            self.view, self.count, self._sums = view, 0, hashlib.sha256()
        self.count += 1
        self._sums.update(sums.tobytes())

    def facts(self) -> dict[str, Any]:
        """To be compared with those of the others."""
        return {"view": self.view, "count": self.count, "sums": self._sums.hexdigest()}


def add_up(place: Place, job: str, min_nodes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Sum until the test says "stop" to any node; say what the cluster tells, and every view.

    With the word "fork" the process gets a child that outlives it, as a data loader may.
    """
    options = {**OPTIONS, **options}
    pause, chance = options.pop("pause", PAUSE), np.random.default_rng()
    cluster = potluck.join(min_nodes, job=job, timeout=PATIENCE, **options)
    seen, count, is_stopping, told, beat = "", 0, False, 0, 0.0
    ledger = Ledger()
    with cluster:
        while True:
            word = place.next_word()
            is_stopping = is_stopping or word == "stop"
            if word == "fork":
                _leave_a_child_behind()
            try:
                mine = [1.0, float(is_stopping), float(cluster.rank), *chance.normal(size=61)]
                sums = cluster.all_reduce(np.array(mine))
            except (potluck.PeerLost, potluck.ViewChanged) as error:
                told += 1
                place.say("told", **as_failure(error) | {"host": error.host, "node": error.node})
                continue
            count += 1
            size = int(sums[0])
            ledger.enter(cluster, sums)
            is_new = f"{size} {told}" != seen
            if is_new or time.monotonic() >= beat or ledger.count % EVERY == 0:
                seen, beat = f"{size} {told}", time.monotonic() + BEAT
                facts = ledger.facts()
                place.say("view" if is_new else "beat", size=size, rank=int(mine[2]), **facts)
            if sums[1]:
                return {"told": told, "count": count, "size": size, "dials": _dials(cluster)}
            # All took part as different ranks of one view: 0, 1, 2 and so on.
            assert sums[2] == size * (size - 1) / 2, (sums, mine)
            time.sleep(pause)


def _dials(cluster: potluck.Cluster) -> int:
    snapshot = cluster.metrics_snapshot()
    assert snapshot is not None
    return snapshot.discovery.attempts


def _leave_a_child_behind() -> None:
    if os.fork() == 0:
        time.sleep(PATIENCE)
        os._exit(0)


class Crowd:
    """Nodes in processes of their own, by what they say."""

    def __init__(self, ranks: Ranks, job: str, **options: Any) -> None:
        self._ranks = ranks
        self._job = job
        self._options = options
        self.nodes: list[Rank] = []

    def start(self, count: int, min_nodes: int, wraps: Sequence[Wrap] = ()) -> list[Rank]:
        """So many more; ``wraps`` say how to start each process, such as inside a host."""
        started = []
        for number in range(count):
            process = self._ranks.take(wraps[number] if wraps else None)
            process.begin(add_up, len(self.nodes), count, "", self._job, min_nodes, self._options)
            self.nodes.append(process)
            started.append(process)
        return started

    def kill(self, node: Rank) -> None:
        """End one without warning, and forget it."""
        node.kill()
        self._ranks.bury(node)

    @staticmethod
    def views(nodes: list[Rank], size: int) -> dict[int, Rank]:
        """Wait until all are in a view of this size; who has which rank."""
        found: dict[int, Rank] = {}
        for node in nodes:
            while True:
                said = node.hear_any()
                if said["word"] in {"view", "beat"} and said["size"] == size:
                    found[said["rank"]] = node
                    break
        assert len(found) == len(nodes), "two nodes have the same rank"
        return found

    def stop(self, nodes: list[Rank]) -> list[dict[str, Any]]:
        """Let them come to an end together; what each returned."""
        nodes[0].tell("stop")
        return [node.last_value() for node in nodes]
