"""A simulated process: what it takes in when, by which clock, and that the dead do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.core.cluster import ClusterCore
from potluck.core.cluster_effects import Effect, Send
from potluck.core.cluster_messages import Acquaintances
from potluck.testing import SimulatedCluster
from potluck.vocabulary import ProcessId


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
    message = Acquaintances(())
    core(cluster, sender).says = [Send(cluster.place(to).process, message) for to in recipients]


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
    cluster.when_sends("a", "Acquaintances", lambda: cluster.unplug("a"))
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
