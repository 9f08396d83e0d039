"""The clock that counts sleep: used wherever times meet the core, and a jump accuses nobody."""

from __future__ import annotations

import inspect
import sys
import time
from functools import partial
from types import ModuleType

import pytest

from potluck.core.cluster_events import MembershipChange, MembershipEvent
from potluck.core.health_records import HealthEvent, HealthStatus
from potluck.runtime import (
    auto,
    clock,
    cluster_node,
    cluster_reporting,
    cluster_topology,
    control,
    control_contacts,
    control_lanes,
    control_links,
    observing,
    topology,
)
from support.clusters import clusters, everywhere, insist
from support.threads import eventually

ASLEEP = 3600.0  # seconds


@pytest.mark.skipif(sys.platform != "linux", reason="how Linux names its clocks")
def test_it_counts_the_time_asleep() -> None:
    """It is the clock since boot, not the one that stands still in between."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_system_without_such_a_clock_gets_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose sandbox forbids the better clock."""
    assert clock.choose("win32") is time.monotonic

    def forbid(_: int) -> float:
        raise PermissionError

    monkeypatch.setattr(time, "clock_gettime", forbid)
    assert clock.choose("linux") is time.monotonic


@pytest.mark.parametrize(
    "module",
    [
        control,
        control_links,
        control_contacts,
        control_lanes,
        cluster_node,
        cluster_reporting,
        cluster_topology,
        topology,
    ],
    ids=lambda module: str(module.__name__),
)
def test_what_meets_the_core_knows_no_other_clock(module: ModuleType) -> None:
    """Two clocks in one module would sooner or later meet in one sum."""
    assert "monotonic" not in inspect.getsource(module)
    assert "import time" not in inspect.getsource(module)


@pytest.mark.parametrize(
    ("module", "what"),
    [(auto, "core.health.summary("), (observing, "_links.dial_due(")],
    ids=["auto", "observing"],
)
def test_whoever_also_waits_keeps_the_two_apart(module: ModuleType, what: str) -> None:
    """Deadlines of callers are on the usual clock; what the links and the core are told is not."""
    source = inspect.getsource(module)
    assert source.count(what) == source.count(f"{what}clock.now())") == 1
    lines = [line for line in source.splitlines() if "monotonic" in line]
    assert all("deadline" in line for line in lines)


def test_a_machine_that_slept_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leases have ended, so it pauses; the silence was its own, so nobody is removed."""
    with clusters(3) as nodes:
        everywhere(nodes, lambda node: node.all_reduce(1.0))
        view, known = nodes[0].view, [len(node.events()) for node in nodes]
        monkeypatch.setattr(clock, "now", lambda: clock.choose(sys.platform)() + ASLEEP)

        def news(number: int) -> list[object]:
            return [each.event for each in nodes[number].events()[known[number] :]]

        def has(number: int, change: MembershipChange) -> bool:
            return any(
                isinstance(each, MembershipEvent) and each.change is change for each in news(number)
            )

        for number in range(3):
            eventually(partial(has, number, MembershipChange.PAUSED))
            eventually(partial(has, number, MembershipChange.RESUMED))
        assert everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0))) == [3.0] * 3
        assert {node.view for node in nodes} == {view}
        for number in range(3):
            health = [each for each in news(number) if isinstance(each, HealthEvent)]
            assert HealthStatus.DEAD not in [each.status for each in health]
        monkeypatch.undo()  # the clock goes back, and nobody minds that either
        assert everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0))) == [3.0] * 3
