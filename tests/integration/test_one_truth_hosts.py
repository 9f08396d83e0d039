"""One cluster, one truth: machines that are cut off, switched off and told to continue alone.

Four emulated machines train with the default quorum, each with a home of its own.  What counts is
what their trainers commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.agreement import tell_errors
from support.clusters import new_job
from support.firewalls import drop
from support.hosts import Host, Hosts
from support.ranks import Rank, Ranks
from support.teams import LARGE, SMALL, Site, Team

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240), pytest.mark.slow]

NAMES = ("alpha", "beta", "gamma", "delta")
FIRST_PORT = 52600
PROVED = "another member has proved that it is dead"


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Four paired machines, for all tests of this file."""
    with Hosts(NAMES) as made:
        yield Site(list(made.values()), tmp_path_factory.mktemp("homes"))


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    """The same, with all cables in place."""
    yield whole_site
    whole_site.heal_all()


@pytest.fixture
def team(ranks: Ranks, site: Site) -> Team:
    """A member on each machine, at work."""
    made = Team(ranks, site, new_job())
    made.start(site.hosts, 4)
    made.wait_for_steps(site.hosts, 4)
    return made


def cut_for(team: Team, site: Site, host: Host, seconds: float) -> None:
    """Cut a machine off for some time, in which it must not commit a step.

    One that was agreed on just before may be told a moment later.
    """
    site.cut(host)
    begin = time.monotonic()
    team.listen(seconds)
    end = time.monotonic()
    site.heal(host)
    alone = team.between(host, begin, end)
    assert len(alone) <= 1, f"{host.name} committed {len(alone)} steps while it was cut off"


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_machine_that_returns_for_a_moment_never_trains_alone(
    ranks: Ranks, site: Site, size: int
) -> None:
    """It learns that it was left out, and is cut off again: it waits, and all end alike."""
    team = Team(ranks, site, new_job(), size)
    team.start(site.hosts, 4)
    team.wait_for_steps(site.hosts, 4)
    victim, others = site.hosts[1], [each for each in site.hosts if each is not site.hosts[1]]
    begin = time.monotonic()
    cut_for(team, site, victim, 3.0)
    team.listen(0.5)
    cut_for(team, site, victim, 7.0)
    for host in others:
        assert team.between(host, begin, time.monotonic()), f"{host.name} made no step meanwhile"
    team.wait_for_steps(site.hosts, 4)
    team.finish()
    team.check_one_truth()


def flap(team: Team, site: Site, times: int) -> None:
    """A cable of one machine that works for two seconds, and then does not for two."""
    victim = site.hosts[2]
    for _ in range(times):
        cut_for(team, site, victim, 2.0)
        team.listen(2.0)
    team.wait_for_steps(site.hosts, 4)
    team.finish()
    team.check_one_truth()


def test_a_cable_that_flaps_makes_no_second_cluster(team: Team, site: Site) -> None:
    """The short form of the test below."""
    flap(team, site, 2)


@pytest.mark.soak
@pytest.mark.parametrize("times", [4, 8])
def test_a_cable_that_flaps_for_long_makes_no_second_cluster(
    team: Team, site: Site, times: int
) -> None:
    """Every return is a chance to conclude something wrong."""
    flap(team, site, times)


def test_the_last_machine_waits_for_those_switched_off_until_a_person_says_continue(
    team: Team, site: Site
) -> None:
    """It says for whom, since when, and the command; those who are started again join it."""
    survivor, others = site.hosts[3], site.hosts[:3]
    site.cut(survivor)
    team.kill(others)
    team.wait_until(lambda: bool(team.words(survivor, "told")), "the survivor says why it waits")
    made = len(team.steps[survivor.name])
    status = site.potluck(survivor, "status", "--job", team.job)
    assert status.returncode == 0, status.stderr
    for host in others:
        assert f"{host.name} (silent since " in status.stdout, status.stdout
    assert "potluck continue" in status.stdout
    told = team.words(survivor, "told")[-1]
    assert told["kind"] == "NoQuorum", told
    assert all(host.name in told["text"] for host in others), told["text"]
    team.listen()
    assert len(team.steps[survivor.name]) == made, "it trained alone before a person said so"
    answer = site.potluck(survivor, "continue", "--yes", "--job", team.job)
    assert answer.returncode == 0, answer.stderr
    assert f"{team.job} continues with {survivor.name}" in answer.stdout
    team.wait_for_steps([survivor], 1)
    site.heal(survivor)
    team.start(others, 4)
    team.wait_for_steps(site.hosts, 4)
    team.finish()
    assert not team.words(survivor, "discarded")


def test_of_two_machines_the_second_continues_when_the_first_is_started_again(
    ranks: Ranks, site: Site
) -> None:
    """Nobody is asked: the new process proves that the old one has ended."""
    pair = site.hosts[:2]
    team = Team(ranks, site, new_job())
    team.start(pair[:1], 1)
    team.wait_for_steps(pair[:1], 1)  # so it is the first of the view
    team.start(pair[1:], 2)
    team.wait_for_steps(pair, 2)
    first, second = pair
    site.cut(first)
    team.kill([first])
    team.wait_until(lambda: bool(team.words(second, "told")), "the second says why it waits")
    assert team.steps[second.name][-1]["size"] == 2, "it continued without the first one"
    site.heal(first)
    team.start([first], 2)
    team.wait_for_steps(pair, 2)
    team.finish()
    assert not team.words(second, "discarded")


def test_a_side_that_a_person_told_to_continue_loses_to_those_who_stayed(
    team: Team, site: Site
) -> None:
    """It trains alone, and when they meet the state of the others counts; it is told."""
    lone, others = site.hosts[0], site.hosts[1:]
    site.cut(lone)
    team.wait_for_steps(others, 3)
    team.wait_until(lambda: bool(team.words(lone, "told")), "the one cut off says why it waits")
    answer = site.potluck(lone, "continue", "--yes", "--job", team.job)
    assert answer.returncode == 0, answer.stderr
    team.wait_for_steps([lone], 1, count=20)
    site.heal(lone)
    team.wait_for_steps(site.hosts, 4)
    results = dict(zip(team.nodes, team.finish(), strict=True))
    (discarded,) = team.words(lone, "discarded")
    assert discarded["steps"] >= 20
    assert "discarded" in team.nodes[lone.name].log  # the warning
    assert not any(results[host.name]["discarded"] for host in others)
    del team.steps[lone.name]
    team.check_one_truth()


@pytest.fixture
def stateless(ranks: Ranks, site: Site) -> Team:
    """Three members of a lineage whose state only the machine has that is cut off: alpha.

    It trained longer, so the lineage of the three lost the merge; none of them has got its state.
    """
    winner, losers = site.hosts[0], site.hosts[1:]
    team = Team(ranks, site, new_job())
    site.cut(winner)
    team.start([winner], 1)
    team.wait_for_steps([winner], 1, count=100)
    team.start(losers, 3, held=True)
    team.wait_for_steps(losers, 3)
    site.heal(winner)
    team.wait_until(
        lambda: all(team.words(host, "entering") for host in losers), "the two lineages merge"
    )
    site.cut(winner)
    for host in losers:
        team.nodes[host.name].tell("enter")
    team.wait_until(
        lambda: all(team.words(host, "told") for host in losers), "the three say why they wait"
    )
    for host in losers:
        told = team.words(host, "told")[-1]
        assert told["kind"] == "NoQuorum", told
        assert f"{winner.name} may have it, and is not known to have ended" in told["text"], told
        assert "potluck continue" in told["text"], told
    return team


def steps_in(team: Team, host: Host, lineage: str) -> list[int]:
    """The steps of a lineage that a member has applied."""
    return [each["step"] for each in team.steps[host.name] if each["view"][0] == lineage]


def test_members_without_the_state_of_their_lineage_wait_for_the_machine_that_has_it(
    stateless: Team, site: Site
) -> None:
    """They are a quorum of the view, and make no step in it until that machine is back."""
    team, winner, losers = stateless, site.hosts[0], site.hosts[1:]
    lineage = team.steps[winner.name][-1]["view"][0]
    last = team.steps[winner.name][-1]["step"]
    team.listen(3.0)
    assert not any(steps_in(team, host, lineage) for host in losers), team.summary()
    site.heal(winner)
    team.wait_for_steps(site.hosts, 4)
    team.finish()
    assert not team.words(winner, "discarded")
    for host in losers:
        assert min(steps_in(team, host, lineage)) >= last, "they did not begin with its state"
        assert team.words(host, "discarded")


def test_a_person_frees_members_that_wait_for_the_state_of_their_lineage(
    stateless: Team, site: Site
) -> None:
    """They continue with what they have; the machine that comes back is told what is discarded."""
    team, winner, losers = stateless, site.hosts[0], site.hosts[1:]
    status = site.potluck(losers[1], "status", "--job", team.job)
    assert status.returncode == 0, status.stderr
    assert f"beta, delta and gamma wait for {winner.name} (silent since" in status.stdout
    assert "potluck continue" in status.stdout
    answer = site.potluck(losers[0], "continue", "--yes", "--job", team.job)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{team.job} continues with" in answer.stdout
    team.wait_for_steps(losers, 3)
    site.heal(winner)
    team.wait_for_steps(site.hosts, 4)
    team.finish()
    assert team.words(winner, "discarded")
    assert not any(team.words(host, "discarded") for host in losers)


def test_members_that_wait_for_a_state_continue_when_the_process_that_had_it_has_ended(
    stateless: Team, site: Site
) -> None:
    """Its machine is back and refuses its port: no step can come from it any more."""
    team, winner, losers = stateless, site.hosts[0], site.hosts[1:]
    team.nodes.pop(winner.name).kill()
    site.heal(winner)
    team.wait_for_steps(losers, 3)
    team.finish()


def test_a_process_with_another_quorum_is_refused_and_both_sides_say_why(
    ranks: Ranks, site: Site
) -> None:
    """It does not begin a cluster of its own either, though it may be alone."""
    pair, stranger = site.hosts[:2], site.hosts[2]
    team, other = Team(ranks, site, new_job()), Team(ranks, site, "")
    team.start(pair, 2)
    team.wait_for_steps(pair, 2)
    other.job = team.job
    other.start([stranger], 1, quorum="any", timeout=6.0)
    failure = other.nodes[stranger.name].failure()
    for setting in ("quorum='any'", "quorum='majority'"):
        assert setting in failure["text"], failure["text"]
    for host in pair:
        team.nodes[host.name].tell("events")
    team.wait_until(lambda: all(team.words(host, "events") for host in pair), "events are told")
    texts = [text for host in pair for text in team.words(host, "events")[0]["texts"]]
    refusals = [text for text in texts if "is refused" in text and stranger.name in text]
    assert refusals, texts  # by the leader
    assert "quorum='any'" in refusals[0]
    team.wait_for_steps(pair, 2)
    team.finish()


def excluded(witness: Rank, count: int) -> str:
    """Listen until a process is in a view of this many; what it was told of the last loss."""
    told = ""
    while (said := witness.hear_any())["word"] != "view" or said["size"] != count:
        if said["word"] == "told" and said["kind"] == "PeerLost":
            told = said["text"]
    return told


def test_a_neighbour_testifies_that_a_process_behind_a_firewall_has_ended(
    ranks: Ranks, site: Site
) -> None:
    """Its port does not refuse, but the lock of its slot is free, which its machine can see.

    Without a neighbour there is no such proof: the next one is excluded for its silence.
    """
    alpha, beta, gamma, _ = site.hosts
    job, nodes = new_job(), []
    for number, host in enumerate([alpha, alpha, beta, gamma]):
        node = ranks.take(host.command, {"POTLUCK_HOME": str(site.homes[host.name])})
        options = {"multicast": True, "neighbours": False, "port": FIRST_PORT + number}
        node.begin(tell_errors, number, 4, "", job, 4, options)
        nodes.append(node)
    for node in nodes:
        excluded(node, 4)
    told: list[str] = []
    for host, number in ((alpha, 1), (gamma, 3)):
        drop(host, f"tcp dport {FIRST_PORT + number} tcp flags & (syn|ack) == syn")
        try:
            nodes[number].kill()
            told.append(excluded(nodes[2], 3 - len(told)))
        finally:
            host.run(["nft", "delete", "table", "inet", "potluck"])
    assert "node-1-here" in told[0], told
    # By the neighbour itself if it leads, else by the leader that heard of it.
    assert any(each in told[0] for each in ("its slot on its machine is free", PROVED)), told
    assert "node-3-here" in told[1], told
    assert PROVED not in told[1], told
    assert "slot" not in told[1], told
    nodes[0].tell("stop")
    assert nodes[2].last_value() > 0
