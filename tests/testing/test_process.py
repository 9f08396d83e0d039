"""Finding each other: who is reached, what a port says, connections that replace broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from potluck._types import ProcessId
from potluck.membership.core import ClusterCore
from potluck.membership.events import Disconnect, Effect, ProbePort, SendMessage
from potluck.membership.messages import KnownProcesses
from potluck.testing.cluster import SimulatedCluster


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
        self.heard.append(("ended", how))
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
    """Both sides dial; one connection stays."""
    cluster = met("a", "b", "c")
    for name in "abc":
        assert [what for what, _ in heard(cluster, name)] == ["connected", "connected"]
    cluster.run(2.0)
    assert heard(cluster, "a") == []


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("kill", "ended"),
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
    cluster.wants(cluster.place("a"), ProbePort(cluster.place("b").process))
    cluster.run(1.0)
    assert answer in [what for what, _ in heard(cluster, "a")]


def test_an_answer_to_a_probe_does_not_reach_the_next_process() -> None:
    """Who asked has died meanwhile; who came after it knows nothing of the question."""
    cluster = met("a", "b")
    cluster.kill("b")
    cluster.run(0.1)
    cluster.wants(cluster.place("a"), ProbePort(cluster.place("b").process))
    cluster.kill("a")
    cluster.restart("a")
    cluster.run(0.2)
    assert "ended" not in [what for what, _ in heard(cluster, "a")]


def test_a_later_start_is_met_beside_the_connection_to_the_former() -> None:
    """The machine lost its power, so nobody closed the former; speaking to it shows it."""
    cluster = met("a", "b")
    heard(cluster, "a")
    old = cluster.place("b").process
    cluster.unplug("b")
    cluster.restart("b")
    cluster.run(1.0)
    new = cluster.place("b").process
    assert heard(cluster, "a") == [("connected", str(new))]
    cluster.place("a").connections[old].send("hello?")
    cluster.run(1.0)
    assert heard(cluster, "a") == [("disconnected", "the connection was reset")]


def test_a_connection_of_which_one_end_is_gone_is_replaced() -> None:
    """Whoever still had the old one is not bothered with that."""
    cluster = met("a", "b")
    for name in "ab":
        heard(cluster, name)
    cluster.place("a").connections.popitem()[1].drop()
    cluster.run(1.0)
    assert heard(cluster, "b") == []
    assert [what for what, _ in heard(cluster, "a")] == ["connected"]
    cluster.place("b").connections[cluster.place("a").process].close("goodbye")
    cluster.run(0.01)
    assert heard(cluster, "a") == [("disconnected", "goodbye")]


def test_a_slow_core_hears_of_a_connection_that_replaced_one_it_had_not_heard_of() -> None:
    """The first breaks while word of it waits in the queue, and only the dialler knows."""
    cluster = SimulatedCluster(1, core=Recorder)
    cluster.start("a", "b")
    cluster.slow("b", 0.001)  # half a second for each thing that happens
    cluster.run(0.2)
    assert heard(cluster, "b") == []
    cluster.place("a").connections.popitem()[1].drop()
    cluster.run(5.0)
    assert heard(cluster, "b") == [("connected", str(cluster.place("a").process))]


def test_who_is_given_up_is_dialled_anew() -> None:
    """What waits in a connection that was silent for long would come late."""
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
    assert cluster.place("a").connections == {}


# --------------------------------------------------------------------------------------------------
# A simulated process: what it takes in when, by which clock, and that the dead do nothing.


class Listener(ClusterCore):
    """A core that writes down what it is told and when, and wants to be woken every second."""

    def __init__(self, me: Any, config: Any, now: float) -> None:
        super().__init__(me, config, now)
        self.begun = now
        self.due = now + 1.0
        self.seen: list[tuple[str, float]] = []
        self.says: list[Effect] = []

    @property
    def next_deadline(self) -> float | None:
        """Every second of its own clock."""
        return self.due

    def connected(self, peer: Any, now: float) -> list[Effect]:
        """Write it down."""
        self.seen.append(("connected", now - self.begun))
        return []

    def disconnected(self, peer: ProcessId, cause: str, now: float) -> list[Effect]:
        """Write it down."""
        self.seen.append(("disconnected", now - self.begun))
        return []

    def receive(self, sender: ProcessId, message: Any, now: float) -> list[Effect]:
        """Write it down."""
        self.seen.append(("received", now - self.begun))
        return []

    def tick(self, now: float) -> list[Effect]:
        """Write it down, and say what was prepared."""
        self.seen.append(("tick", now - self.begun))
        self.due = now + 1.0
        says, self.says = self.says, []
        return says


def listeners(*names: str) -> SimulatedCluster:
    """Listeners that have met."""
    cluster = SimulatedCluster(2, core=Listener)
    cluster.start(*names)
    cluster.run(0.5)
    return cluster


def core(cluster: SimulatedCluster, name: str) -> Listener:
    """The listener of this name."""
    found = cluster.place(name).core
    assert isinstance(found, Listener)
    return found


def say(cluster: SimulatedCluster, sender: str, *recipients: str) -> None:
    """Let a listener say something to others when it wakes up next."""
    message = KnownProcesses(())
    core(cluster, sender).says = [
        SendMessage(cluster.place(to).process, message) for to in recipients
    ]


def kinds(cluster: SimulatedCluster, name: str) -> list[str]:
    """What a listener was told, in order, since the last question."""
    listener = core(cluster, name)
    seen, listener.seen = listener.seen, []
    return [what for what, _ in seen]


def test_it_wakes_up_by_its_own_clock() -> None:
    """A clock that runs twice as fast rings twice as often; one that leaps rings at once."""
    cluster = listeners("a", "b")
    cluster.drift("a", 2.0)
    cluster.run(4.0)
    assert kinds(cluster, "a").count("tick") == 8
    assert kinds(cluster, "b").count("tick") == 4
    cluster.jump("b", 5.0)
    cluster.run(0.01)
    assert kinds(cluster, "b") == ["tick"]


def test_a_stopped_process_takes_in_everything_late() -> None:
    """By a clock that went on; its loop rings once, somewhere among what it finds."""
    cluster = listeners("a", "b")
    kinds(cluster, "b")
    cluster.pause("b")
    say(cluster, "a", "b", "b")
    cluster.run(3.0)
    assert core(cluster, "b").seen == []
    cluster.wake("b")
    late = core(cluster, "b").seen
    assert sorted(what for what, _ in late) == ["received", "received", "tick"]
    assert all(when == pytest.approx(3.5) for _, when in late)


def test_a_suspended_process_does_not_know_how_late_it_is() -> None:
    """Its clock goes on from where it stood."""
    cluster = listeners("a", "b")
    kinds(cluster, "b")
    cluster.suspend("b")
    say(cluster, "a", "b")
    cluster.run(60.0)
    cluster.wake("b")
    ((what, when),) = core(cluster, "b").seen
    assert what == "received"
    assert when == pytest.approx(0.5)


def test_waking_what_is_awake_or_dead_changes_nothing() -> None:
    """Nor does stopping what is stopped."""
    cluster = listeners("a")
    kinds(cluster, "a")
    cluster.wake("a")
    cluster.pause("a")
    cluster.pause("a")
    cluster.kill("a")
    cluster.wake("a")
    cluster.place("a").wake()
    assert not cluster.place("a").is_alive


def test_the_dead_finish_nothing() -> None:
    """A process that dies as its first message leaves sends no second one."""
    cluster = listeners("a", "b", "c")
    say(cluster, "a", "b", "c")
    cluster.when_sends("a", "KnownProcesses", lambda: cluster.unplug("a"))
    cluster.run(3.0)
    assert "received" not in kinds(cluster, "b") + kinds(cluster, "c")


def test_nothing_of_an_earlier_start_reaches_the_next() -> None:
    """What was under way to the one before finds nobody."""
    cluster = listeners("a", "b")
    say(cluster, "a", "b")
    cluster.network.cut("a", "b")
    cluster.run(1.0)
    cluster.kill("b")
    cluster.restart("b")
    cluster.network.heal("a", "b")
    cluster.run(1.0)
    assert "received" not in kinds(cluster, "b")
