"""Elastic training under many random kills, pauses and joins, which do not wait for each other.

A few of them are part of `make test-all`; `make soak` does 200 of them with each of three seeds.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import Counter

import pytest

from support.clusters import new_job
from support.elastic_programs import Crew, check, undisturbed
from support.ranks import Rank, Ranks

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

EVENTS = int(os.environ.get("POTLUCK_SOAK_EVENTS", "200"))
A_FEW = 20
FEWEST, MOST = 3, 5
LULL = 0.2, 1.6  # seconds from one event to the next
NAP, SLEEP = (0.05, 0.8), (2.0, 4.0)  # seconds of a pause that is sat out, and of one that is not
RATE = 2e-4  # so slow that the loss still falls at the end: a step more or less would show
NOISE = 0.05  # of the loss: batches are made up differently when members change


class Storm:
    """Everything that happens to the members but the first."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew = crew
        self._chance = random.Random(seed)
        self.members = crew.start(4, 4, seed=0)  # as the undisturbed run begins
        self.asleep: dict[int, tuple[float, Rank]] = {}
        self.done: Counter[str] = Counter()

    def blow(self, events: int) -> None:
        """So many kills, pauses and joins, then calm."""
        for member in self.members:
            self._crew.follow(member, 4)
        for _ in range(events):
            kind = self._chance.choice(self._possible())
            getattr(self, f"_{kind}")()
            self.done[kind] += 1
            self._wait(self._chance.uniform(*LULL))
        while self.asleep:
            self._wait(min(end for end, _ in self.asleep.values()) - time.monotonic())
        for member in self.members:
            self._crew.follow(member, len(self.members), steps=2)

    def _possible(self) -> list[str]:
        kinds = ["kill", "pause"] * (len(self.members) > FEWEST)
        return kinds + ["join"] * (len(self.members) < MOST)

    def _join(self) -> None:
        self.members += self._crew.start(1, 2)

    def _kill(self) -> None:
        victim = self.members.pop(self._chance.randrange(1, len(self.members)))
        self.asleep.pop(victim.pid, None)
        victim.kill()

    def _pause(self) -> None:
        sleeper = self.members[self._chance.randrange(1, len(self.members))]
        duration = self._chance.uniform(*self._chance.choice([NAP, NAP, SLEEP]))
        self.asleep[sleeper.pid] = time.monotonic() + duration, sleeper
        sleeper.send_signal(signal.SIGSTOP)

    def _wait(self, seconds: float) -> None:
        """Listen to everybody, and wake those whose time has come."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for due, sleeper in list(self.asleep.values()):
                if due <= now:
                    sleeper.send_signal(signal.SIGCONT)
                    del self.asleep[sleeper.pid]
            for member in self.members:
                self._crew.overhear(member)
            time.sleep(0.02)  # the rhythm of listening


LONG = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("events", "seed"),
    [
        pytest.param(A_FEW, 0, marks=pytest.mark.timeout(180)),
        *(pytest.param(EVENTS, seed, marks=LONG) for seed in (1, 2, 3)),
    ],
)
def test_kills_pauses_and_joins_lose_nothing(ranks: Ranks, events: int, seed: int) -> None:
    """Whatever happens to all but the first member, all end alike and at the same loss."""
    crew = Crew(ranks, new_job(), RATE)
    storm = Storm(crew, seed)
    storm.blow(events)
    assert set(storm.done) == {"kill", "pause", "join"}
    results = crew.finish(storm.members)
    check(crew, results)
    expected = undisturbed(results[0]["step"], RATE)
    assert abs(results[0]["loss"] / expected - 1) <= NOISE, (results[0]["loss"], expected)
    logger.info("%s: %d steps, loss %.4f", dict(storm.done), results[0]["step"], results[0]["loss"])
