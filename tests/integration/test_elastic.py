"""Elastic training of real processes: killed and joined in the middle, nothing lost."""

from __future__ import annotations

import itertools
import signal
import statistics
from typing import Any

from potluck import DistributedContext, SimulatedBackend
from support.clusters import new_job
from support.elastic import Regression
from support.elastic_programs import Crew
from support.ranks import Ranks

RECOVERED = 2.0  # seconds from a kill to the next committed step, the median of all survivors
AT_LATEST = 10.0  # the same for the slowest of them: other work shares these cores


def undisturbed(steps: int) -> float:
    """The loss that one machine reaches by itself in so many steps."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        run = Regression(alone)
        while run.trainer.step_count < steps:
            run.step()
        return run.loss


def check(crew: Crew, results: list[dict[str, Any]]) -> None:
    """All have the same bits after every step, and every sample of every epoch counted once.

    The first result is of a member that was there all the time.
    """
    assert len({result["print"] for result in results}) == 1
    assert all(len(prints) == 1 for prints in crew.prints.values())
    assert len({str((each["epoch"], each["committed"])) for each in results}) == 1
    log = [tuple(pair) for pair in results[0]["log"]]
    whole = itertools.product(range(results[0]["epoch"]), range(results[0]["size"]))
    assert len(log) == len(set(log))
    assert set(whole) <= set(log)
    assert all({tuple(pair) for pair in result["log"]} <= set(log) for result in results)
    counted = [tuple(pair) for result in results for pair in result["counted"]]
    assert len(counted) == len(set(counted))
    assert set(counted) <= set(log)


def test_members_are_killed_and_another_joins_in_the_middle(ranks: Ranks) -> None:
    """A member dies, another comes, and one more dies: nothing is lost, nothing counts twice."""
    crew = Crew(ranks, new_job())
    members = crew.start(4, 4)
    for member in members:
        crew.follow(member, 4, steps=3)
    killed = members.pop().kill()
    times = [crew.follow(each, 3)["at"] - killed for each in members]
    members += crew.start(1, 1)
    for member in members:
        crew.follow(member, 4, steps=3)
    killed = members.pop(1).kill()
    times += [crew.follow(each, 3)["at"] - killed for each in members]
    assert statistics.median(times) <= RECOVERED, times
    assert max(times) <= AT_LATEST, times
    results = crew.finish(members)
    check(crew, results)
    assert results[0]["loss"] <= undisturbed(results[0]["step"]) * 1.1


def test_a_stopped_member_is_left_behind_and_catches_up(ranks: Ranks) -> None:
    """It wakes up with an old state, gets the new one, and goes on with the others."""
    crew = Crew(ranks, new_job())
    members = crew.start(3, 3)
    for member in members:
        crew.follow(member, 3, steps=3)
    asleep = members.pop(1)
    asleep.send_signal(signal.SIGSTOP)
    for member in members:
        crew.follow(member, 2, steps=3)
    asleep.send_signal(signal.SIGCONT)
    members.append(asleep)
    for member in members:
        crew.follow(member, 3, steps=3)
    check(crew, crew.finish(members))
