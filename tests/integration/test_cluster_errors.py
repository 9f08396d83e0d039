"""Errors of real processes that lose each other: the same on every member of the next view."""

from __future__ import annotations

import signal
import time

import pytest

from support.agreement import Witnesses
from support.clusters import new_job
from support.ranks import Ranks


@pytest.mark.parametrize("leads", [False, True])
def test_a_killed_process_is_named_alike_by_all_others(ranks: Ranks, leads: bool) -> None:
    """A member, or the leader."""
    witnesses = Witnesses(ranks, new_job())
    nodes = witnesses.start(4)
    victim = next(node for node in nodes if witnesses.places[node] == (0 if leads else 2))
    others = [node for node in nodes if node is not victim]
    victim.kill()
    witnesses.wait_for(others, 3)
    witnesses.check([victim])
    witnesses.check_named(others, victim)
    witnesses.stop(others)


@pytest.mark.parametrize(
    ("apart", "places"),
    [(0.0, (1, 3)), (0.0, (0, 1)), (0.02, (0, 1)), (0.05, (1, 0)), (0.1, (2, 4)), (0.2, (0, 1))],
)
def test_two_that_are_killed_are_named_alike_by_all_others(
    ranks: Ranks, apart: float, places: tuple[int, int]
) -> None:
    """At once or shortly after each other, by one error or by two; also leader and successor."""
    witnesses = Witnesses(ranks, new_job())
    nodes = witnesses.start(5)
    by_place = {witnesses.places[node]: node for node in nodes}
    victims = [by_place[place] for place in places]
    others = [node for node in nodes if node not in victims]
    victims[0].kill()
    time.sleep(apart)
    victims[1].kill()
    witnesses.wait_for(others, 3)
    witnesses.check(victims)
    witnesses.check_named(others, *victims)
    witnesses.stop(others)


def test_a_process_that_stands_still_is_named_by_the_others_and_learns_that_it_was_left_out(
    ranks: Ranks,
) -> None:
    """It never hears that those are gone who stay."""
    witnesses = Witnesses(ranks, new_job())
    nodes = witnesses.start(3)
    sleeper, others = nodes[1], [nodes[0], nodes[2]]
    sleeper.send_signal(signal.SIGSTOP)
    witnesses.wait_for(others, 2)
    sleeper.send_signal(signal.SIGCONT)
    left_out = witnesses.wait_until_told(sleeper, "LeftOut")
    assert "waits to be let in again" in left_out["text"]
    witnesses.wait_for(nodes, 3)
    witnesses.check([sleeper])
    witnesses.check_named(others, sleeper)
    assert witnesses.told[sleeper][0]["kind"] == "LeftOut"
    witnesses.stop(nodes)


def test_without_a_quorum_a_call_waits_and_then_names_whom_it_misses(ranks: Ranks) -> None:
    """Nothing is lost: when they are back, it continues with them."""
    witnesses = Witnesses(ranks, new_job(), limit=4.0)
    nodes = witnesses.start(3)
    survivor, missing = nodes[0], nodes[1:]
    for node in missing:
        node.send_signal(signal.SIGSTOP)
    told = witnesses.wait_until_told(survivor, "NoQuorum")
    for node in missing:
        assert witnesses.name(node) in told["text"]
    assert sorted(told["missing"]) == sorted(witnesses.places[node] for node in missing)
    assert "not heard for" in told["text"]
    assert "potluck continue" in told["text"]
    assert {error["kind"] for error in witnesses.told[survivor]} == {"NoQuorum"}
    for node in missing:
        node.send_signal(signal.SIGCONT)
    witnesses.wait_for(nodes, 3)
    witnesses.stop(nodes)
