"""Elastic training under many random kills, pauses and joins; `make soak` runs it."""

from __future__ import annotations

import os
import random
import signal

import pytest

from support.clusters import new_job
from support.elastic_programs import Crew, check, undisturbed
from support.ranks import Rank, Ranks

EVENTS = int(os.environ.get("POTLUCK_SOAK_EVENTS", "200"))
FEWEST, MOST = 3, 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_kills_pauses_and_joins_lose_nothing(ranks: Ranks, seed: int) -> None:
    """Whatever happens to all but the first member, all end alike and at the same loss."""
    chance = random.Random(seed)
    crew = Crew(ranks, new_job())
    members = crew.start(4, 4)
    settle(crew, members)
    for _ in range(EVENTS):
        kinds = ["kill", "pause"] * (len(members) > FEWEST) + ["join"] * (len(members) < MOST)
        kind = chance.choice(kinds)
        if kind == "join":
            members += crew.start(1, 2)
        elif kind == "kill":
            members.pop(chance.randrange(1, len(members))).kill()
        else:
            sleeper = members[chance.randrange(1, len(members))]
            others = [member for member in members if member is not sleeper]
            sleeper.send_signal(signal.SIGSTOP)
            settle(crew, others)
            sleeper.send_signal(signal.SIGCONT)
        settle(crew, members)
    results = crew.finish(members)
    check(crew, results)
    assert results[0]["loss"] <= undisturbed(results[0]["step"]) * 1.1


def settle(crew: Crew, members: list[Rank]) -> None:
    """Until all have made a step with each other."""
    for member in members:
        crew.follow(member, len(members))
