"""Whatever happens to a small cluster, views have one successor, and in the end there is one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.cluster_net import ClusterNet

faults = st.sampled_from(["kill", "restart", "cut", "half a cut", "heal", "stop", "reset", "leave"])
pauses = st.sampled_from([0.001, 0.002, 0.003, 0.05, 0.4, 1.2, 2.5])
steps = st.lists(st.tuples(faults, st.integers(0, 3), st.integers(0, 3), pauses), max_size=6)


def disturb(net: ClusterNet, fault: str, one: int, other: int) -> None:
    """Let something go wrong, if it can."""
    alive = net.alive()
    first, second = alive[one % len(alive)], alive[other % len(alive)]
    letter = "abcd"[one]
    if fault == "kill" and len(alive) > 1:
        net.kill(first)
    elif fault == "restart" and not any(process.node[0] == letter for process in alive):
        starts = sum(process.node[0] == letter for process in net.cores)
        net.add(letter, incarnation=starts + 1)
        net.mesh()
    elif fault == "cut":
        net.cut_off(alive[:one], alive[one:])
    elif fault == "half a cut" and first != second:
        net.cut.add((first, second))
    elif fault == "heal":
        net.heal()
    elif fault == "stop":
        net.stopped.add(first)
    elif fault == "reset" and (first, second) in net.lanes:
        net.sever(first, second)
    elif fault == "leave" and len(alive) > 1:
        net.do(first, net.cores[first].leave(net.now))
        net.kill(first)


@settings(max_examples=25)
@given(steps)
def test_views_have_one_successor_and_all_end_in_one(
    story: list[tuple[str, int, int, float]],
) -> None:
    """Also when faults follow each other within milliseconds."""
    net = ClusterNet()
    net.form("abcd")
    for fault, one, other, pause in story:
        disturb(net, fault, one, other)
        net.run(pause)
    for process in list(net.stopped):
        net.wake(process)
    net.cut.clear()
    for _ in range(40):
        net.mesh()
        net.run(0.5)
        views = {net.cores[process].view for process in net.alive()}
        if len(views) == 1 and all(
            view and len(view.members) == len(net.alive()) for view in views
        ):
            break
    assert all(len(views) == 1 for views in net.views().values())
    assert sorted(net.agreed()) == sorted(process.node[0] for process in net.alive())
