"""Finding each other: who is reached, what a port says, and lanes that replace broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.core.cluster import ClusterCore
from potluck.core.cluster_effects import Disconnect, Effect, Probe
from potluck.testing import SimulatedCluster
from potluck.vocabulary import ProcessId


class Recorder(ClusterCore):
    """A core that writes down what it is told about others, and decides nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[tuple[str, str]] = []
        self.answer: list[Effect] = []

    @property
    def next_deadline(self) -> float | None:
        """It never wakes up by itself."""
        return None

    def connected(self, peer: Any, now: float) -> list[Effect]:
        """Write it down."""
        self.heard.append(("connected", str(peer.process)))
        return self.answer

    def disconnected(self, peer: ProcessId, cause: str, now: float) -> list[Effect]:
        """Write it down."""
        self.heard.append(("disconnected", cause))
        return []

    def ended(self, peer: ProcessId, how: str, now: float) -> list[Effect]:
        """Write it down."""
        self.heard.append(("refused", how))
        return []

    def unreachable(self, peer: ProcessId, why: str, now: float) -> list[Effect]:
        """Write it down."""
        self.heard.append(("unreachable", why))
        return []


def met(*names: str) -> SimulatedCluster:
    """Recorders that are connected to each other."""
    cluster = SimulatedCluster(1, core=Recorder)
    cluster.start(*names)
    cluster.run(1.0)
    return cluster


def heard(cluster: SimulatedCluster, name: str) -> list[tuple[str, str]]:
    """What a recorder was told since the last question."""
    core = cluster.place(name).core
    assert isinstance(core, Recorder)
    told, core.heard = core.heard, []
    return told


def test_everybody_meets_everybody_once() -> None:
    """Both sides dial; one lane stays."""
    cluster = met("a", "b", "c")
    for name in "abc":
        assert [what for what, _ in heard(cluster, name)] == ["connected", "connected"]
    cluster.run(2.0)
    assert heard(cluster, "a") == []


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("kill", "refused"),
        ("unplug", "unreachable"),
        ("pause", "unreachable"),
        ("cut", "unreachable"),
    ],
)
def test_what_a_port_says(fault: str, answer: str) -> None:
    """Only a dead process on a living machine refuses."""
    cluster = met("a", "b")
    if fault == "cut":
        cluster.cut(["a"], ["b"])
    else:
        getattr(cluster, fault)("b")
    cluster.run(0.01)
    cluster.place("a").give_up(cluster.place("b").process, "it is silent")
    heard(cluster, "a")
    cluster.wants(cluster.place("a"), Probe(cluster.place("b").process))
    cluster.run(1.0)
    assert answer in [what for what, _ in heard(cluster, "a")]


def test_an_answer_to_a_probe_does_not_reach_the_next_process() -> None:
    """Who asked has died meanwhile; who came after it knows nothing of the question."""
    cluster = met("a", "b")
    cluster.kill("b")
    cluster.run(0.1)
    cluster.wants(cluster.place("a"), Probe(cluster.place("b").process))
    cluster.kill("a")
    cluster.restart("a")
    cluster.run(0.2)
    assert "refused" not in [what for what, _ in heard(cluster, "a")]


def test_a_later_start_is_met_beside_the_lane_to_the_former() -> None:
    """The machine lost its power, so nobody closed the former; speaking to it shows it."""
    cluster = met("a", "b")
    heard(cluster, "a")
    old = cluster.place("b").process
    cluster.unplug("b")
    cluster.restart("b")
    cluster.run(1.0)
    new = cluster.place("b").process
    assert heard(cluster, "a") == [("connected", str(new))]
    cluster.place("a").lanes[old].send("hello?")
    cluster.run(1.0)
    assert heard(cluster, "a") == [("disconnected", "the connection was reset")]


def test_a_lane_of_which_one_end_is_gone_is_replaced() -> None:
    """Whoever still had the old one is not bothered with that."""
    cluster = met("a", "b")
    for name in "ab":
        heard(cluster, name)
    cluster.place("a").lanes.popitem()[1].drop()
    cluster.run(1.0)
    assert heard(cluster, "b") == []
    assert [what for what, _ in heard(cluster, "a")] == ["connected"]
    cluster.place("b").lanes[cluster.place("a").process].close("goodbye")
    cluster.run(0.01)
    assert heard(cluster, "a") == [("disconnected", "goodbye")]


def test_who_is_given_up_is_dialled_anew() -> None:
    """What waits in a lane that was silent for long would come late."""
    cluster = met("a", "b")
    for name in "ab":
        heard(cluster, name)
    cluster.place("a").give_up(cluster.place("b").process, "it was silent")
    cluster.run(1.0)
    assert [what for what, _ in heard(cluster, "a")] == ["disconnected", "connected"]
    assert [what for what, _ in heard(cluster, "b")] == ["disconnected", "connected"]


def test_who_is_barred_stays_outside() -> None:
    """A core that wants no connection to somebody gets none."""
    cluster = SimulatedCluster(1, core=Recorder)
    cluster.start("a", "b")
    core = cluster.place("a").core
    assert isinstance(core, Recorder)
    core.answer = [Disconnect(cluster.place("b").process, "no thanks")]
    cluster.run(5.0)
    assert len(heard(cluster, "a")) == 1
    assert cluster.place("a").lanes == {}
