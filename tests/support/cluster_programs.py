"""A node of a cluster in a process of its own: adds up numbers again and again, and reports."""

from __future__ import annotations

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
PAUSE = 0.005  # seconds between two sums: this suite shares its cores


def add_up(place: Place, job: str, min_nodes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Sum until the test says "stop" to any node; say what the cluster tells, and every view.

    With the word "fork" the process gets a child that outlives it, as a data loader may.
    """
    cluster = potluck.join(min_nodes, job=job, timeout=PATIENCE, **{**OPTIONS, **options})
    seen, count, is_stopping, told, beat = "", 0, False, 0, 0.0
    with cluster:
        while True:
            word = place.next_word()
            is_stopping = is_stopping or word == "stop"
            if word == "fork":
                _leave_a_child_behind()
            try:
                mine = [1.0, float(is_stopping), float(cluster.rank)]
                sums = cluster.all_reduce(np.array(mine))
            except (potluck.PeerLost, potluck.ViewChanged) as error:
                told += 1
                place.say("told", **as_failure(error) | {"host": error.host, "node": error.node})
                continue
            count += 1
            size = int(sums[0])
            if f"{size} {told}" != seen or time.monotonic() >= beat:
                word = "beat" if f"{size} {told}" == seen else "view"
                seen, beat = f"{size} {told}", time.monotonic() + BEAT
                place.say(word, size=size, rank=int(mine[2]))
            if sums[1]:
                return {"told": told, "count": count, "size": size}
            # All took part as different ranks of one view: 0, 1, 2 and so on.
            assert sums[2] == size * (size - 1) / 2, (sums, mine)
            time.sleep(PAUSE)


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
