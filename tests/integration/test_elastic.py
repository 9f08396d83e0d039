"""Elastic training of real processes: killed and joined in the middle, nothing lost."""

from __future__ import annotations

import signal
import statistics

from support.clusters import new_job
from support.elastic_programs import Crew, check, undisturbed
from support.ranks import Ranks

RECOVERED = 2.0  # seconds from a kill to the next committed step, the median of all survivors
AT_LATEST = 10.0  # the same for the slowest of them: other work shares these cores


def test_members_are_killed_and_another_joins_in_the_middle(ranks: Ranks) -> None:
    """A member dies, another comes, and one more dies: nothing is lost, nothing counts twice."""
    crew = Crew(ranks, new_job())
    members = crew.start(4, 4)
    for member in members:
        crew.follow(member, 4, steps=3)
    killed = members.pop().kill()
    times = [crew.follow(each, 3)["at"] - killed for each in members]
    members += crew.start(1, 2)
    for member in members:
        crew.follow(member, 4, steps=3)
    killed = members.pop(1).kill()
    times += [crew.follow(each, 3)["at"] - killed for each in members]
    assert statistics.median(times) <= RECOVERED, times
    assert max(times) <= AT_LATEST, times
    for member in members:
        crew.follow(member, 3, steps=40)  # the loss falls steeply before: batches differ
    results = crew.finish(members)
    check(crew, results)
    assert results[0]["loss"] <= undisturbed(results[0]["step"]) * 1.1


def test_deaths_at_every_point_of_a_step(ranks: Ranks) -> None:
    """Killed before averaging, before the barrier, between commit and apply, and while deciding.

    The fourth dies while the survivors of the third decide what has become of its step.
    """
    crew = Crew(ranks, new_job())
    members = crew.start(1, 5)
    for point, step in (("averaging", 3), ("acknowledging", 6), ("applying", 9), ("settling", 9)):
        crew.start(1, 5, death=(point, step))
    crew.follow(members[0], 1, steps=3)  # it is the only one left
    results = crew.finish(members)
    check(crew, results)
    assert results[0]["step"] >= 12


def test_a_death_in_the_middle_of_the_averaging(ranks: Ranks) -> None:
    """Some pieces are added up and sent on, others are not: it is averaged again from the start."""
    crew = Crew(ranks, new_job())
    members = crew.start(2, 3, ballast=1 << 18)
    crew.start(1, 3, death=("adding up", 3), ballast=1 << 18)
    said = [crew.follow(member, 2) for member in members]
    assert {each["tries"] for each in said} == {2}, said
    check(crew, crew.finish(members))


def test_the_leader_is_killed_while_a_newcomer_gets_the_state(ranks: Ranks) -> None:
    """It is a source of the transfer as well; so is the next leader, which dies in the next try."""
    crew = Crew(ranks, new_job())
    members = crew.start(3, 3, death=("leading a transfer", 1))
    for member in members:
        crew.follow(member, 3)
    newcomer = crew.start(1, 2)[0]
    crew.follow(newcomer, 2, steps=2)
    left = [member for member in members if not member._has_ended()]
    assert len(left) == 1
    check(crew, crew.finish([*left, newcomer]))


def test_a_member_is_cut_off_right_after_applying_and_comes_back(ranks: Ranks) -> None:
    """The others went on without it: its step counted, and what it gets is theirs."""
    crew = Crew(ranks, new_job())
    members = crew.start(2, 3)
    asleep = crew.start(1, 3, death=("applied", 3))[0]
    for member in members:
        crew.follow(member, 2, steps=3)
    asleep.send_signal(signal.SIGCONT)
    members.append(asleep)
    for member in members:
        crew.follow(member, 3, steps=3)
    check(crew, crew.finish(members))


def test_a_source_is_killed_while_a_newcomer_gets_the_state(ranks: Ranks) -> None:
    """Of three who have the state two die in the transfer; the newcomer gets it nevertheless."""
    crew = Crew(ranks, new_job())
    members = crew.start(1, 3)
    crew.start(2, 3, death=("transferring", 1))
    crew.follow(members[0], 3)
    members += crew.start(1, 2)
    for member in members:
        crew.follow(member, 2, steps=3)
    check(crew, crew.finish(members))


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


def test_newcomers_that_began_apart_get_the_state_and_are_told_what_is_discarded(
    ranks: Ranks,
) -> None:
    """While all members stand still two newcomers hear each other alone, and begin a training.

    Its steps have the numbers of others; when the members are heard again, theirs count.
    """
    crew = Crew(ranks, new_job())
    members = crew.start(3, 3)
    for member in members:
        crew.follow(member, 3, steps=100)
    for member in members:
        member.send_signal(signal.SIGSTOP)
    newcomers = crew.start(2, 2)
    for newcomer in newcomers:
        crew.follow(newcomer, 2)
    for newcomer in newcomers:
        newcomer.send_signal(signal.SIGSTOP)  # before they have more samples than the others
    for member in (*members, *newcomers):
        member.send_signal(signal.SIGCONT)
    for member in (*members, *newcomers):
        crew.follow(member, 5)
    results = crew.finish([*members, *newcomers])
    check(crew, results)
    assert [len(each["lost"]) for each in results] == [0, 0, 0, 1, 1], results
    assert all(steps > 0 for each in results[3:] for steps, _ in each["lost"])
