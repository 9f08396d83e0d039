"""Processes that were started with different quorum settings, before there is a cluster."""

from __future__ import annotations

from potluck.core.cluster import ClusterConfig, ClusterState
from potluck.core.cluster_effects import Note
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet


def notes(net: ClusterNet, process: ProcessId) -> list[str]:
    """What a process told people."""
    return [str(e.event) for _, who, e in net.effects if who == process and isinstance(e, Note)]


def test_one_process_with_another_setting_does_not_keep_the_others_from_beginning() -> None:
    """It is left out, and both sides say why."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=2))
    b = net.add("b", config=ClusterConfig(min_nodes=2, quorum="any"))
    c = net.add("c", config=ClusterConfig(min_nodes=2))
    net.mesh()
    net.run(20)
    assert net.view_of(a).members == (a, c)
    assert net.view_of(c).members == (a, c)
    core = net.cores[b]
    assert core.state is ClusterState.JOINING
    assert "quorum='any'" in core.reason
    assert "quorum='majority'" in core.reason
    assert [text for text in notes(net, a) if "quorum='any'" in text and "b (" in text]


def test_two_that_do_not_fit_wait_and_say_why() -> None:
    """Neither begins with the other, and neither has enough without it."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=2))
    b = net.add("b", config=ClusterConfig(min_nodes=2, quorum="any"))
    net.mesh()
    net.run(20)
    for process in (a, b):
        assert net.cores[process].view is None
        assert "all processes of a job need the same setting" in net.cores[process].reason


def test_of_two_that_could_begin_alone_only_the_first_does() -> None:
    """Otherwise one job would have two clusters that can never merge."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=1))
    b = net.add("b", config=ClusterConfig(min_nodes=1, quorum="any"))
    net.mesh()
    net.run(20)
    assert net.view_of(a).members == (a,)
    assert net.cores[b].state is ClusterState.JOINING
    assert "all processes of a job need the same setting" in net.cores[b].reason
