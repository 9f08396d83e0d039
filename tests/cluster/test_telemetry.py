"""Metrics of a cluster: every layer of a node counts in one place."""

import contextlib
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import potluck
from potluck import BackendUnavailable, Cluster, DistributedMetrics, PeerLost, RpcAgent, ViewChanged
from potluck._types import NodeId, ProcessId, View
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.events import ViewChange
from potluck.cluster.telemetry import NodeMetrics, Steps
from potluck.metrics.catalogue import figures
from potluck.trace.dump import dump
from potluck.trace.recorder import CAPACITY, GroupLog, Label, Recorder, Track, recorder_of
from support.clusters import OPTIONS, clusters, everywhere, join, new_job
from support.threads import PATIENCE, eventually, together


def snapshot_of(cluster: Cluster) -> potluck.MetricsSnapshot:
    """What a node has counted."""
    found = cluster.metrics_snapshot()
    assert found is not None
    return found


def test_every_layer_counts_in_one_place() -> None:
    """Views, elections, health, discovery, collectives, compression, calls."""
    with clusters(2) as nodes:
        together(*(lambda node=node: node.all_reduce(np.ones(64, "f4")) for node in nodes))
        big = [np.ones(1 << 17, "f4") for _ in nodes]
        together(
            *(
                lambda node=node, array=array: node.all_reduce(array, compression="int8")
                for node, array in zip(nodes, big, strict=True)
            )
        )
        with RpcAgent(nodes[0]) as caller, RpcAgent(nodes[1]) as server:
            server.register("echo", bytes)
            caller.rpc_sync(1, "echo", b"x", timeout=PATIENCE)
            with pytest.raises(potluck.RpcFunctionNotFound):
                caller.rpc_sync(1, "nothing", b"", timeout=PATIENCE)
            # The server counts a call after it has sent the answer.
            eventually(lambda: snapshot_of(nodes[1]).rpc.served.failed == 1)
            made, served = snapshot_of(nodes[0]).rpc, snapshot_of(nodes[1]).rpc
        eventually(lambda: bool(nodes[0].metrics) and bool(snapshot_of(nodes[0]).health.peers))
        first = snapshot_of(nodes[0])
    assert (made.calls.completed, made.calls.failed, made.in_flight) == (1, 1, 0)
    assert made.calls.errors == {"RpcFunctionNotFound": 1}
    assert (served.served.completed, served.served.failed) == (1, 1)
    assert first.all_reduce.completed == 2
    assert first.compression.operations == 1
    assert first.compression.ratio > 3
    assert (first.views.state, first.views.members, first.views.rank) == ("active", 2, 0)
    assert first.views.epoch >= 1
    assert sum(first.views.changes.values()) == first.views.installed >= 1
    assert first.elections.is_leader
    assert first.elections.events["elected"] >= 1
    (peer,) = first.peers
    assert peer.rank == 1
    assert peer.status
    assert first.discovery.arrivals >= 1
    assert figures(first)["views.members"] == 2


def test_a_loss_is_counted_with_its_cause() -> None:
    """What the others were doing is a failure, and the call after it a retry."""
    with clusters(3) as nodes:
        together(*(lambda node=node: node.barrier() for node in nodes))
        nodes[2].close()

        def go_on(node: Cluster) -> None:
            for _ in range(20):
                with contextlib.suppress(ViewChanged, PeerLost):
                    node.barrier(PATIENCE)
                if node.world_size == 2:
                    node.barrier(PATIENCE)
                    return

        together(*(lambda node=node: go_on(node) for node in nodes[:2]))
        found = snapshot_of(nodes[0])
    assert found.views.changes["left"] + found.views.changes["lost"] == 1
    assert found.views.members == 2
    assert len([each for each in found.peers if each.rank >= 0]) == 1


def test_whom_operations_wait_for_is_known() -> None:
    """The one who comes late, by its name, in seconds."""
    with clusters(2) as nodes:
        together(*(lambda node=node: node.barrier() for node in nodes))
        before = snapshot_of(nodes[0]).peers[0].waiting
        waiting = nodes[0].barrier

        def come_late() -> None:
            # The other one is in its barrier, and sleeps, before this one begins.
            eventually(lambda: snapshot_of(nodes[0]).peers[0].waiting > before + 0.05)
            nodes[1].barrier()

        together(waiting, come_late)
        found = snapshot_of(nodes[0])
    (peer,) = found.peers
    assert peer.waiting > before + 0.05
    assert figures(found)["waiting.1"] == peer.waiting


def test_a_subgroup_counts_for_the_same_peers() -> None:
    """By their names, whatever ranks they have there."""
    with clusters(2) as nodes:
        together(*(lambda node=node: node.subgroup([0, 1]).barrier() for node in nodes))
        found = snapshot_of(nodes[0])
    assert found.barrier.completed == 1
    assert len({each.peer for each in found.peers}) == 1


def test_metrics_are_served_where_somebody_asked_for_it() -> None:
    """Until the cluster is left; a second process needs another port."""
    job = new_job()
    with join(1, job, metrics_port=0) as cluster:
        cluster.barrier()
        url = cluster.metrics_url
        assert url is not None
        page = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()  # noqa: S310 - our own
        assert "\npotluck_view_members 1.0\n" in page
        assert 'outcome="completed"} 1.0' in page
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(BackendUnavailable, match="Metrics cannot be served"):
            join(1, new_job(), metrics_port=port)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=PATIENCE)  # noqa: S310 - nobody is there


def test_nothing_is_counted_where_nobody_wants_it() -> None:
    """Nor served."""
    with join(1, new_job(), metrics=False, metrics_port=0) as cluster:
        cluster.barrier()
        assert cluster.metrics is None
        assert cluster.metrics_snapshot() is None
        assert cluster.metrics_url is None


def test_observers_are_told_the_same_numbers() -> None:
    """Over their own connection: they need no port for that."""
    with join(1, new_job()) as cluster:
        cluster.barrier()
        node = cluster.innermost._node  # type: ignore[attr-defined]
        told = node.control.ask(lambda: node._journals.journal(0)).figures
    assert (told["barrier.completed"], told["views.members"], told["views.epoch"]) == (1, 1, 1)


def test_somebody_may_bring_the_metrics_along() -> None:
    """Of several clusters of one program, for instance."""
    metrics = DistributedMetrics()
    with join(1, new_job(), metrics=metrics) as cluster:
        cluster.barrier()
        assert cluster.metrics is metrics
    assert metrics.snapshot().barrier.completed == 1


@pytest.mark.parametrize(
    ("options", "variables", "address"),
    [
        ({}, {}, None),
        ({"metrics_port": 9464}, {}, ("127.0.0.1", 9464)),
        ({"metrics_port": 1, "metrics_host": "::1"}, {"POTLUCK_METRICS_PORT": "2"}, ("::1", 1)),
        ({}, {"POTLUCK_METRICS_PORT": "9464"}, ("127.0.0.1", 9464)),
        ({}, {"POTLUCK_METRICS_PORT": "9464", "LOCAL_RANK": "3"}, ("127.0.0.1", 9467)),
        ({}, {"POTLUCK_METRICS_PORT": "0", "LOCAL_RANK": "3"}, ("127.0.0.1", 0)),
        (
            {},
            {"POTLUCK_METRICS_PORT": "80", "POTLUCK_METRICS_HOST": "10.0.0.1"},
            ("10.0.0.1", 80),
        ),
        ({"metrics": False}, {"POTLUCK_METRICS_PORT": "80"}, None),
    ],
)
def test_where_metrics_are_served_is_said_in_two_ways(
    options: dict[str, object],
    variables: dict[str, str],
    address: tuple[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arguments win over the environment; workers of one machine stand side by side."""
    for name in ("POTLUCK_METRICS_PORT", "POTLUCK_METRICS_HOST", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = AutoDiscoveryConfig(**OPTIONS, **options)  # type: ignore[arg-type]
    assert config.metrics_address == address


A, B, C = (ProcessId(NodeId(letter * 32), 1) for letter in "abc")


class Departures:
    """A control thread that knows who has left in order."""

    def __init__(self, *gone: ProcessId) -> None:
        self._gone = gone

    def has_departed(self, process: ProcessId) -> bool:
        """Whether it has."""
        return process in self._gone


@pytest.mark.parametrize(
    ("previous", "view", "cause"),
    [
        (None, View("x", 1, (A,)), "founded"),
        (None, View("x", 4, (A, B)), "joined"),
        (View("x", 1, (A,)), View("x", 2, (A, B)), "joined"),
        (View("x", 1, (A, B)), View("x", 2, (A,)), "left"),
        (View("x", 1, (A, C)), View("x", 2, (A,)), "lost"),
        (View("x", 1, (A, B, C)), View("x", 2, (A,)), "lost"),
        (View("x", 1, (A,)), View("y", 5, (B, A)), "merged"),
        (View("x", 1, (A, B)), View("x", 2, (B, A)), "other"),
    ],
)
def test_what_brought_a_view_is_one_word(previous: View | None, view: View, cause: str) -> None:
    """Where only some of those who are gone left in order, a member was lost."""
    counting = NodeMetrics(DistributedMetrics(), Departures(B), None)  # type: ignore[arg-type]
    assert counting._cause(ViewChange(view, previous, "because")) == cause


def test_a_fault_in_counting_does_not_end_the_node(caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log, and the control thread goes on."""
    with join(1, new_job()) as cluster:
        counting = cluster.innermost._node._counting  # type: ignore[attr-defined]
        counting._control = None
        counting.look()
        assert counting.figures()["views.members"] == 1
        cluster.barrier()
    assert "could not be updated" in caplog.text


# --------------------------------------------------------------------------------------------------
# What a node of a cluster takes down beside its operations: views, events, steps.


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    """With its number, and the view in which it was made."""
    recorder = Recorder()
    log = GroupLog(recorder, Label(Track.COLLECTIVES, "world", "line/3", 1))
    steps = Steps()
    steps.note(log, 7)
    steps.note(log, 9, "state received")
    first, second = recorder.records(0.0)
    assert (first.lane, first.what, first.number, first.view) == (
        "training",
        "step",
        7,
        "line/3",
    )
    assert (second.what, second.number, second.rank) == ("state received", 9, 1)
    assert second.begin == first.end


def test_operations_do_not_crowd_out_events() -> None:
    """A death is still known after a thousand further operations, which take 0.1 s."""
    recorder = Recorder()
    recorder.append_event(("dead", 1.0, 1.0, 0, 0, 0, Label(Track.CLUSTER), None, "attic is dead"))
    for number in range(2 * CAPACITY):
        recorder.append(("step", 2.0, 3.0, number, 0, 0, Label(Track.TRAINING), None, None))
    first, *rest = recorder.records(0.0)
    assert (first.what, first.reason) == ("dead", "attic is dead")
    assert len(rest) == CAPACITY


def test_a_dump_after_the_end_still_says_whose_it_is(tmp_path: Path) -> None:
    """The last words of a program may come when its cluster is closed; who left is told too."""
    with clusters(2) as nodes:
        everywhere(nodes, lambda node: node.barrier())
        stays, goes = nodes
        recorder, process = recorder_of(stays), goes.process
        goes.close()
        eventually(lambda: stays.view is not None and len(stays.view.members) == 1)
    header, *records = map(
        json.loads, dump(recorder, tmp_path / "a", reason="late").read_text().splitlines()
    )
    assert header["process"] in header["views"][header["view"]]
    assert [len(members) for members in header["views"].values()] == [2, 1]
    said = [record["reason"] for record in records if record["lane"] == "cluster"]
    assert any("left" in sentence or "goodbye" in sentence for sentence in said)
    assert process.node in str(header["views"])
