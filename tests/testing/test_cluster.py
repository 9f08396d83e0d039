"""The simulated cluster: what a test can do to it, and that it is the same every time."""

import subprocess
import sys

import pytest

from potluck._types import NodeId, ProcessId
from potluck.membership.events import ClusterConfig, ClusterState
from potluck.membership.messages import Commit, KnownProcesses, ProcessInfo, ProcessRole, Proposal
from potluck.testing.cluster import SimulatedCluster, in_short
from potluck.testing.network import LinkQuality
from potluck.testing.process import Names


def formed(*names: str, seed: int = 1, config: ClusterConfig | None = None) -> SimulatedCluster:
    """A cluster in which all are in one view."""
    cluster = SimulatedCluster(seed, config=config)
    cluster.start(*names)
    assert cluster.run_until(lambda: cluster.in_one_view(*names), within=5)
    return cluster


def test_a_killed_process_is_noticed_at_once() -> None:
    """Its machine closes its connections and refuses new ones: no deadline has to pass."""
    cluster = formed("a", "b", "c")
    cluster.kill("b")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "c"), within=0.2)
    assert cluster.state_of("b") is ClusterState.LEFT
    assert cluster.view_of("b") is None


def test_a_machine_without_power_is_noticed_by_its_silence() -> None:
    """Nobody says that it is gone; before twice the pausing time it cannot be left out."""
    cluster = formed("a", "b", "c")
    cluster.unplug("b")
    assert not cluster.run_until(lambda: cluster.in_one_view("a", "c"), within=1.5)
    assert cluster.run_until(lambda: cluster.in_one_view("a", "c"), within=3)


def test_a_restart_is_a_new_process_in_the_same_place() -> None:
    """Same node, later incarnation; restarting what lives changes nothing."""
    cluster = formed("a", "b")
    first = cluster.place("b").process
    cluster.restart("b")
    assert cluster.place("b").process == first
    cluster.kill("b")
    cluster.restart("b")
    second = cluster.place("b").process
    assert (second.node, second.incarnation) == (first.node, first.incarnation + 1)
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=3)


def test_a_stopped_process_finds_what_came_meanwhile() -> None:
    """It does nothing while it is stopped, and answers when it goes on."""
    cluster = formed("a", "b")
    cluster.pause("b")
    before = cluster.place("b").core
    assert before is not None
    view = before.view
    cluster.run(0.4)
    assert before.view == view
    cluster.wake("b")
    cluster.run(1.0)
    assert cluster.in_one_view("a", "b")


@pytest.mark.parametrize("verb", ["pause", "suspend"])
def test_who_sleeps_too_long_is_left_out_and_comes_back(verb: str) -> None:
    """Whether its clock went on or stood still."""
    cluster = formed("a", "b", "c")
    getattr(cluster, verb)("c")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=5)
    cluster.wake("c")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b", "c"), within=6)


def test_a_one_way_cut_is_a_cut() -> None:
    """Who is heard but does not hear cannot stay."""
    cluster = formed("a", "b", "c")
    cluster.cut(["a", "b"], ["c"], one_way=True)
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=6)
    cluster.heal(["a", "b"], ["c"])
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b", "c"), within=6)


def test_a_router_in_between_makes_a_refusal_no_proof() -> None:
    """Of two, the second cannot go on then: the first may be there."""
    cluster = formed("a", "b")
    cluster.dialling.is_routed = True
    cluster.kill("a")
    cluster.run(4.0)
    assert cluster.state_of("b") is ClusterState.PAUSED


def test_observers_are_never_in_a_view() -> None:
    """They connect, and nobody counts on them."""
    cluster = SimulatedCluster(3)
    cluster.start("o", role=ProcessRole.OBSERVER)
    cluster.start("a", "b")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=5)
    cluster.run(2.0)
    assert cluster.in_one_view("a", "b")
    assert cluster.view_of("o") is None


def test_clocks_that_are_wrong_do_no_harm() -> None:
    """Neither a leap of ten seconds nor a drift of ten per cent makes anybody leave."""
    cluster = formed("a", "b", "c")
    view = cluster.view_of("a")
    cluster.jump("a", 10.0)
    cluster.drift("b", 1.1)
    cluster.drift("c", 0.9)
    cluster.run(5.0)
    assert cluster.in_one_view("a", "b", "c")
    assert view is not None
    assert {who.incarnation for who in view.members} == {1}


def test_a_lossy_network_is_lived_with() -> None:
    """A tenth of all messages is lost, and the cluster forms all the same."""
    cluster = SimulatedCluster(5, quality=LinkQuality(0.001, 0.02, loss=0.1))
    cluster.start("a", "b", "c", "d")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "b", "c", "d"), within=10)


def test_something_can_happen_at_a_message() -> None:
    """Just before it leaves, once."""
    cluster = formed("a", "b", "c")
    seen: list[float] = []
    cluster.when_sends("a", "Propose", lambda: seen.append(cluster.clock.now))
    cluster.kill("c")
    cluster.run(1.0)
    cluster.restart("c")
    cluster.run(2.0)
    assert len(seen) == 1


def test_goodbyes_need_no_deadline() -> None:
    """A member that leaves, and a leader that hands over."""
    cluster = formed("a", "b", "c")
    cluster.step_down("a")
    assert cluster.run_until(lambda: cluster.in_one_view("b", "c", "a"), within=1)
    cluster.leave("b")
    assert cluster.run_until(lambda: cluster.in_one_view("a", "c"), within=1)


def test_the_trace_tells_the_story() -> None:
    """Every fault, message and note with its time."""
    lines: list[str] = []
    cluster = SimulatedCluster(1, tell=lines.append)
    cluster.start("a", "b")
    cluster.run(1.0)
    cluster.kill("b")
    cluster.run(1.0)
    story = "\n".join(lines)
    assert "b is killed" in story
    assert "Commit(" in story
    assert "is dead: its port refuses connections" in story


def test_nobody_is_started_twice_and_nobody_unknown_is_killed() -> None:
    """The errors name who is there."""
    cluster = SimulatedCluster()
    cluster.start("a")
    with pytest.raises(ValueError, match="There is a process 'a' already"):
        cluster.start("a")
    with pytest.raises(ValueError, match="There is no process 'z'; there are: a"):
        cluster.kill("z")


_COURSE = """
import hashlib
from potluck.testing.seeds import check_seed
digest = hashlib.sha256()
for seed in range(4):
    check_seed(seed, tell=lambda line: digest.update(line.encode()))
print(digest.hexdigest())
"""


def test_a_seed_takes_the_same_course_in_every_process() -> None:
    """Neither the order of sets nor anything else of this process has a say in it."""
    courses = {
        subprocess.run(
            [sys.executable, "-c", _COURSE],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(courses) == 1


# --------------------------------------------------------------------------------------------------
# Messages in few words: names instead of ids, nothing that is empty.

ANNA = ProcessId(NodeId("a" * 32), 7)


def who(process: ProcessId) -> str:
    """Its first letter."""
    return process.node[0]


def test_a_message_is_told_in_one_line() -> None:
    """The lineage in its first digits, empty fields not at all."""
    told = in_short(Commit("f" * 32, 3, Proposal((ANNA,), "with anna")), who)
    assert told.startswith(
        "Commit(lineage=ffffffff, epoch=3, proposal=Proposal(members={a}, reason=with anna"
    )
    assert "into=" not in told


def test_cards_and_words_are_names() -> None:
    """Whatever a message carries."""
    card = ProcessInfo(node=ANNA.node, incarnation=7)
    assert in_short(KnownProcesses((card,)), who) == "KnownProcesses(cards={a})"
    assert in_short(ProcessRole.OBSERVER, who) == "observer"


def test_who_is_unknown_keeps_its_id() -> None:
    """A name is better, but the id is something too."""
    assert Names({}).who(ANNA) == "aaaaaaaa/7"
    assert Names({}).view(None) == "no view"
