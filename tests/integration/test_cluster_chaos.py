"""Processes of a cluster are killed, stopped and started at random: nothing stalls, sums are right.

Every sum that a program gets is checked by the program itself: all members of one view took part,
each as another rank.  A seed that fails is printed; ``POTLUCK_SEED`` repeats its actions.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from support.cluster_programs import Crowd
from support.clusters import new_job
from support.ranks import Rank, Ranks
from support.threads import PATIENCE

STALL = 10.0  # seconds that nobody who runs may be without a sum
PAUSES = (0.5, 2.0)  # seconds between two actions
SLEEPS = (0.3, 4.0)  # seconds that a process is stopped for


class Chaos:
    """Things that happen to a crowd."""

    def __init__(self, crowd: Crowd, size: int, seed: int) -> None:
        self._crowd = crowd
        self._size = size
        self._random = random.Random(seed)
        self._alive = crowd.start(size, 2)
        self._seen = dict.fromkeys(self._alive, time.monotonic() + PATIENCE)
        self._asleep: dict[Rank, float] = {}
        self.actions = 0

    def run(self, seconds: float) -> list[Rank]:
        """Let things happen for a while; who is alive then, all of them awake."""
        end, next_at = time.monotonic() + seconds, time.monotonic() + 2.0
        while time.monotonic() < end:
            self._listen()
            if time.monotonic() >= next_at:
                self._act()
                next_at = time.monotonic() + self._random.uniform(*PAUSES)
        for node in list(self._asleep):
            self._wake(node)
        return self._alive

    def _listen(self) -> None:
        now = time.monotonic()
        for node in [node for node, until in self._asleep.items() if now >= until]:
            self._wake(node)
        for node in self._alive:
            while node.has_news():
                if node.hear_any()["word"] in {"beat", "view"}:
                    self._seen[node] = max(self._seen[node], time.monotonic())
            stalled = time.monotonic() - self._seen[node]
            assert stalled < STALL or node in self._asleep, f"{node.status()} has no sum"
        time.sleep(0.02)

    def _act(self) -> None:
        self.actions += 1
        awake = [node for node in self._alive if node not in self._asleep]
        what = self._random.choice(["kill", "stop", "start"])
        if what == "start" and len(self._alive) < self._size + 1:
            (node,) = self._crowd.start(1, 2)
            self._alive.append(node)
            self._seen[node] = time.monotonic() + PATIENCE  # an interpreter takes its time
        elif what == "stop" and len(awake) > self._size // 2 + 1:
            node = self._random.choice(awake)
            node.send_signal(signal.SIGSTOP)
            self._asleep[node] = time.monotonic() + self._random.uniform(*SLEEPS)
        elif len(awake) > 2:
            node = self._random.choice(awake)
            node.kill()
            self._alive.remove(node)

    def _wake(self, node: Rank) -> None:
        del self._asleep[node]
        node.send_signal(signal.SIGCONT)
        self._seen[node] = max(self._seen[node], time.monotonic())


def go_through(ranks: Ranks, size: int, seconds: float) -> None:
    """A crowd lives through it, becomes one view again, and ends together."""
    seed = int(os.environ.get("POTLUCK_SEED", random.randrange(1 << 32)))
    print(f"POTLUCK_SEED={seed}")  # noqa: T201 - pytest shows it with a failure
    crowd = Crowd(ranks, new_job())
    chaos = Chaos(crowd, size, seed)
    alive = chaos.run(seconds)
    assert chaos.actions > seconds / (2 * PAUSES[1])
    crowd.views(alive, len(alive))
    assert [result["size"] for result in crowd.stop(alive)] == [len(alive)] * len(alive)


def test_a_cluster_lives_through_a_few_bad_seconds(ranks: Ranks) -> None:
    """The short form of the soak below."""
    go_through(ranks, 4, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_cluster_lives_through_a_bad_half_hour(ranks: Ranks) -> None:
    """Eight processes; ``POTLUCK_SOAK`` gives the seconds."""
    go_through(ranks, 8, float(os.environ.get("POTLUCK_SOAK", "1800")))
