"""Nodes that find each other and stay together: several in one process, over real connections."""

from __future__ import annotations

import functools
import logging
import socket
import threading
from typing import Any

import numpy as np
import pytest

import potluck
from potluck import AutoDiscoveryBackend, AutoDiscoveryConfig, Cluster, DistributedContext
from potluck._types import Branch
from potluck.cluster import cluster as backend
from potluck.membership.events import ClusterState
from potluck.membership.messages import MAX_BRANCHES
from support.clusters import OPTIONS, clusters, everywhere, insist, join, new_job
from support.threads import PATIENCE, Background, eventually, together


def test_three_nodes_meet_and_add_up() -> None:
    """Nobody says who is who: ranks are agreed, and every collective and message works."""
    with clusters(3) as nodes:
        assert [node.rank for node in nodes] == [0, 1, 2]
        assert {node.view for node in nodes} == {nodes[0].view}
        assert all(node.leader == nodes[0].process for node in nodes)
        sums = everywhere(nodes, lambda node: node.all_reduce(np.full(3, node.rank + 1.0)))
        assert [list(each) for each in sums] == [[6.0] * 3] * 3
        objects = everywhere(nodes, lambda node: node.all_gather_object(node.rank))
        assert objects == [[0, 1, 2]] * 3
        together(*(node.barrier for node in nodes))
        inbox = np.zeros(4)
        receive = Background(lambda: nodes[2].recv(inbox, 0, timeout=PATIENCE))
        nodes[0].send(np.arange(4.0), 2)
        receive.result()
        assert list(inbox) == [0, 1, 2, 3]


def test_asynchronous_work_and_subgroups_run_in_the_view() -> None:
    """Works are waited for later; a subgroup has ranks of its own."""
    with clusters(3) as nodes:
        works = [node.all_reduce(float(node.rank), async_op=True) for node in nodes]
        assert [work.wait(PATIENCE) for work in works] == [3.0] * 3
        halves = everywhere(nodes[::2], lambda node: node.subgroup([0, 2]))
        assert everywhere(halves, lambda half: half.all_reduce(1.0)) == [2.0, 2.0]


def test_a_node_that_leaves_is_named_and_the_others_go_on() -> None:
    """In flight or between two calls: each rank is told once, and the next call works."""
    with clusters(3) as nodes:
        everywhere(nodes, lambda node: node.all_reduce(1.0))
        waiting = Background(lambda: nodes[0].all_reduce(1.0))
        nodes[2].close()
        with pytest.raises(potluck.PeerLost) as caught:
            waiting.result()
        assert caught.value.rank == 2
        assert caught.value.node == nodes[2].process.node
        assert caught.value.recoverable
        with pytest.raises(potluck.PeerLost, match="Rank 2"):
            nodes[1].all_reduce(1.0)
        for node in nodes[:2]:
            node.wait_until_active(PATIENCE)
            assert node.world_size == 2
        assert everywhere(nodes[:2], lambda node: node.all_reduce(1.0)) == [2.0] * 2


def test_leaving_after_the_last_call_disturbs_nobody() -> None:
    """Whoever is done first says goodbye; the others, in the middle of the same call, finish it."""
    with clusters(4) as nodes:

        def finish(node: Cluster) -> list[int]:
            node.all_reduce(np.ones(100_000))
            ranks = node.all_gather_object(node.rank)
            node.close()
            return ranks

        assert everywhere(nodes, finish) == [[0, 1, 2, 3]] * 4


def test_a_result_is_shared_by_those_who_made_it() -> None:
    """Whoever leaves right after a call changes nobody's share of it, however late it is taken."""
    with clusters(2) as (first, second):
        assert everywhere([first, second], lambda node: node.all_reduce(3.0)) == [6.0, 6.0]
        second.close()
        eventually(lambda: first.view is not None and len(first.view.members) == 1)
        assert (first.rank, first.world_size) == (0, 2)
        with pytest.raises(potluck.PeerLost):
            first.all_reduce(3.0)
        assert (first.rank, first.world_size) == (0, 1)


def test_a_newcomer_is_let_in_and_everybody_is_told() -> None:
    """What ran among those before raises ViewChanged, on all of them, and then runs among all."""
    job = new_job()
    with clusters(2, job) as nodes:
        everywhere(nodes, lambda node: node.all_reduce(1.0))
        waiting = Background(lambda: nodes[0].all_reduce(1.0))
        newcomer = join(3, job)
        with newcomer:
            with pytest.raises(potluck.ViewChanged, match="changed"):
                waiting.result()
            everybody = [*nodes, newcomer]
            sums = everywhere(everybody, lambda node: insist(lambda: node.all_reduce(1.0)))
            assert sums == [3.0] * 3
            assert newcomer.rank == 2


def test_what_stood_on_a_view_ends_with_it() -> None:
    """Works, subgroups and receives of a view that is over raise, and never wait for nobody."""
    with clusters(3) as nodes:
        parts = everywhere(nodes[:2], lambda node: node.subgroup([0, 1]))
        work = nodes[0].all_reduce(1.0, async_op=True)
        receive = nodes[1].irecv(np.zeros(3), 0)
        nodes[2].close()
        for ending in (work, receive):
            with pytest.raises(potluck.PeerLost, match="Rank 2"):
                ending.wait(PATIENCE)
        for part in parts:
            with pytest.raises(potluck.PeerLost, match="Rank 2"):
                part.all_reduce(1.0)
        nodes[0].wait_until_active(PATIENCE)
        everywhere(nodes[:2], lambda node: insist(lambda: node.all_reduce(1.0)))


def test_jobs_do_not_mix() -> None:
    """Two scripts side by side on the same machines form two clusters."""
    with clusters(2) as first, clusters(2) as second:
        lineages = {node.view.lineage for node in (*first, *second) if node.view}
        assert len(lineages) == 2
        assert [node.world_size for node in (*first, *second)] == [2] * 4


def test_waiting_for_more_than_come_says_what_is_missing() -> None:
    """The error says how many are here and what to do; nothing is left behind."""
    with pytest.raises(potluck.Timeout) as caught:
        potluck.join(2, job=new_job(), timeout=0.5, **OPTIONS)
    assert "Waited 0.5 s for 2 nodes, but this machine has not joined a group" in str(caught.value)
    assert "waiting for the others" in str(caught.value)
    assert "potluck status" in str(caught.value)


def test_the_backend_is_a_backend_and_a_context_of_it_a_cluster() -> None:
    """As with every other backend: make it, wait for peers, put a context on it."""
    job = new_job()
    config = AutoDiscoveryConfig(job=job, min_nodes=2, **OPTIONS)
    with AutoDiscoveryBackend(config) as left, AutoDiscoveryBackend(config) as right:
        both = (left, right)
        everywhere(both, lambda each: each.wait_for_peers(1, PATIENCE))
        assert {each.rank for each in both} == {0, 1}
        assert {each.peer_count for each in both} == {1}
        assert everywhere(both, lambda each: each.all_reduce(2.0)) == [4.0] * 2
        context = DistributedContext(left)
        assert isinstance(context, Cluster)
        counting = DistributedContext.with_metrics(right)
        sums = together(lambda: context.all_reduce(1.0), lambda: counting.all_reduce(1.0))
        assert sums == [2.0, 2.0]
        snapshot = counting.metrics_snapshot()
        assert snapshot is not None
        assert left.health.is_cluster_healthy


def test_changes_are_told_to_callbacks_and_kept_as_sentences() -> None:
    """Callbacks run on a thread of their own; one that fails hinders nobody."""
    job = new_job()
    with clusters(1, job) as (first,):
        seen: list[potluck.ViewChange] = []
        threads: set[str] = set()

        def fail(_: potluck.ViewChange) -> None:
            raise ZeroDivisionError

        def give_up(_: potluck.ViewChange) -> None:
            raise SystemExit

        def keep(change: potluck.ViewChange) -> None:
            threads.add(threading.current_thread().name)
            seen.append(change)

        first.on_view_change(fail)
        first.on_view_change(give_up)
        stop = first.on_view_change(keep)
        with join(2, job) as second:
            eventually(lambda: len(seen) == 1)
            assert seen[0].joined == (second.process,)
            assert seen[0].left == ()
            assert threads == {"potluck-events"}
            stop()
        eventually(lambda: first.world_size == 1)
        assert len(seen) == 1
        sentences = [str(event) for event in first.events()]
        assert any("view 2 with 2 members" in sentence for sentence in sentences)


def test_rank_0_can_be_handed_on() -> None:
    """The leader steps down and stays a member."""
    with clusters(2) as nodes:
        leader = nodes[0]
        backend = leader.backend
        assert isinstance(backend, AutoDiscoveryBackend)
        backend.step_down()
        eventually(lambda: leader.rank == 1)
        sums = everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0)))
        assert sums == [2.0] * 2


def test_a_program_can_continue_without_those_who_are_missing() -> None:
    """Of three one is left, which waits; the program says that it need not."""
    with clusters(3) as nodes:
        survivor = nodes[2]
        survivor.continue_without_missing()  # nothing happens while the cluster works
        for lost in nodes[:2]:
            lost.backend._node.control.links.send = lambda *_: None  # type: ignore[attr-defined]
        eventually(lambda: _state(survivor) is ClusterState.PAUSED)
        with pytest.raises(potluck.NoQuorum, match="potluck continue"):
            survivor.all_reduce(1.0, timeout=0.5)
        survivor.continue_without_missing()
        assert insist(lambda: survivor.all_reduce(1.0)) == 1.0
        assert survivor.view is not None
        assert survivor.view.members == (survivor.process,)
        assert survivor.view.ancestry  # it continues what was


def _state(node: potluck.Cluster) -> ClusterState:
    control = node.backend._node.control  # type: ignore[attr-defined]
    state: ClusterState = control.ask(lambda: control.core.state)
    return state


def test_addresses_given_by_hand_are_enough() -> None:
    """No multicast, no files: one knows the address of the other."""
    job = new_job()
    lonely = {**OPTIONS, "neighbours": False}
    with AutoDiscoveryBackend(AutoDiscoveryConfig(job=job, min_nodes=2, **lonely)) as first:
        where = f"127.0.0.1:{first.port}"
        with potluck.join(2, job=job, peers=[where], timeout=PATIENCE, **lonely) as second:
            first.wait_for_peers(1, PATIENCE)
            assert second.world_size == first.world_size == 2


def test_a_connection_that_breaks_between_two_who_live_is_made_anew() -> None:
    """A router forgot it, say: the call fails, the view begins afresh, and the next call works."""
    with clusters(2) as nodes:
        everywhere(nodes, lambda node: node.all_reduce(1.0))
        before = nodes[0].view
        session = nodes[0].backend.sessions.latest
        session.backend._links[1].stream._sock.shutdown(socket.SHUT_RDWR)
        told = [
            Background(functools.partial(node.recv, bytearray(9), 1 - node.rank)) for node in nodes
        ]
        for one in told:
            with pytest.raises((potluck.PeerLost, potluck.ViewChanged)):
                one.result()
        eventually(lambda: all(node.view != before for node in nodes))
        sums = everywhere(nodes, lambda node: insist(lambda: node.all_reduce(1.0)))
        assert sums == [2.0, 2.0]


def test_without_its_control_thread_a_node_is_of_no_use_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Calls under way and later ones end with the cause; the others lose this node and go on."""

    def fail() -> None:
        raise ZeroDivisionError("planted")

    with clusters(2) as nodes:
        waiting = Background(lambda: nodes[0].all_reduce(1.0))
        backend = nodes[0].backend
        assert isinstance(backend, AutoDiscoveryBackend)
        backend._node.control.post(fail)
        with pytest.raises(potluck.BackendUnavailable, match="planted"):
            waiting.result()
        with pytest.raises(potluck.BackendUnavailable, match="Join again"):
            nodes[0].barrier()
        assert "The control thread failed" in caplog.text
        nodes[0].close()
        assert insist(lambda: nodes[1].all_reduce(1.0)) == 1.0


def test_an_abort_by_the_program_is_that_and_nothing_else() -> None:
    """The view stays, and the next call works."""
    with clusters(2) as nodes:
        before = nodes[0].view
        group = nodes[0].group
        waiting = Background(lambda: nodes[0].all_reduce(1.0))
        eventually(lambda: group._is_busy)
        nodes[0].abort("changed my mind")
        with pytest.raises(potluck.Aborted, match="changed my mind"):
            waiting.result()
        with pytest.raises(potluck.Aborted, match="changed my mind"):
            nodes[1].all_reduce(1.0)
        assert everywhere(nodes, lambda node: node.all_reduce(1.0)) == [2.0, 2.0]
        assert nodes[0].view == before


def test_who_waits_without_end_is_told_for_what(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that seems to hang says once who is missing, and goes on waiting."""
    monkeypatch.setattr(backend, "SILENCE", 0.3)
    job = new_job()
    waiting = Background(lambda: potluck.join(2, job=job, **OPTIONS))
    eventually(lambda: "Still waiting. Waited 0.3 s for 2 nodes" in caplog.text)
    with join(2, job), waiting.result() as first:
        assert first.world_size == 2


def test_progress_is_noted_as_plain_numbers() -> None:
    """It travels in every heartbeat: what cannot travel is refused where it is said."""
    with clusters(2) as nodes:
        backend = nodes[0].innermost
        assert isinstance(backend, AutoDiscoveryBackend)
        origin = (Branch("a" * 32, 3),)
        nodes[0].note_progress(np.int64(3), origin)  # type: ignore[arg-type] # as good as an int
        control = backend._node.control
        noted = control.ask(lambda: (control.core.samples, control.core.origin))
        assert noted == (3, origin)
        for samples, branches in (
            (-1, ()),
            (1 << 62, ()),
            (1, (Branch("a" * 33, 1),)),
            (1, (Branch("a", -1),)),
            (1, tuple(Branch("a", each) for each in range(MAX_BRANCHES + 1))),
        ):
            with pytest.raises(ValueError, match="out of bounds"):
                nodes[0].note_progress(samples, branches)
        with pytest.raises(TypeError):
            nodes[0].note_progress(2.5)  # type: ignore[arg-type]
        assert control.ask(lambda: control.core.samples) == 3
        assert everywhere(nodes, lambda node: node.all_reduce(1.0)) == [2.0] * 2
        assert backend.health is not None  # its control thread answers


def test_a_program_can_add_events() -> None:
    """They stand among the others, and nothing is logged a second time."""
    with clusters(1) as (node,):
        node.note_event("the learning rate is lower now", logging.WARNING)
        eventually(lambda: "the learning rate is lower now" in map(str, node.events()))
        event = next(each for each in node.events() if str(each).startswith("the learning"))
        assert event.level == logging.WARNING


@pytest.mark.parametrize("counts", [True, False])
def test_metrics_given_to_a_context_have_the_views_and_who_leads(counts: bool) -> None:
    """Those before the context was made as well, and also where the node was told not to count."""
    config = AutoDiscoveryConfig(job=new_job(), multicast=False, solo_delay=0.0, metrics=counts)
    metrics = potluck.DistributedMetrics()
    backend = AutoDiscoveryBackend(config)
    backend.wait_until_active(PATIENCE)
    with DistributedContext.with_metrics(backend, metrics) as cluster:
        cluster.all_reduce(1.0)
        seen = metrics.snapshot()
        assert seen == cluster.metrics_snapshot() or cluster.metrics is metrics
        assert (seen.views.installed, seen.views.members, seen.views.rank) == (1, 1, 0)
        assert seen.elections.is_leader
        assert seen.all_reduce.completed == 1


def test_a_cluster_says_who_leads_and_why() -> None:
    """With the public types: state, role, view, process, topology."""
    with clusters(2) as nodes:
        for node in nodes:
            state, view = node.election, node.view
            assert isinstance(state, potluck.ElectionState)
            assert isinstance(view, potluck.View)
            assert isinstance(node.process, potluck.ProcessId)
            assert isinstance(node.topology, potluck.SharedTopology)
            assert (state.leader, state.lineage, state.epoch) == (
                node.leader,
                view.lineage,
                view.epoch,
            )
            leads = node.process == node.leader
            expected = potluck.ElectionRole.LEADING if leads else potluck.ElectionRole.FOLLOWING
            assert state.role is expected
            assert state.reason
            kinds = {
                each.event.kind
                for each in node.events()
                if isinstance(each.event, potluck.ElectionEvent)
            }
            assert kinds <= set(potluck.ElectionKind)


# --------------------------------------------------------------------------------------------------
# ``potluck.join()`` with what people may give it by mistake.


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5"])
def test_a_node_does_not_wait_for_a_time_that_is_none(timeout: Any) -> None:
    """It is refused at once, whether or not there is anything to wait for."""
    with pytest.raises((TypeError, ValueError), match="A timeout"):
        potluck.join(job="nobody", multicast=False, timeout=timeout)


def test_an_interface_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is spelled wrongly would leave this machine alone, and nobody would know why."""
    with join(1, new_job(), interfaces=["nosuch0"]) as alone:
        assert alone.world_size == 1
    assert "the network interface nosuch0 is missing" in caplog.text
    assert ", lo" in caplog.text or ": lo" in caplog.text


def test_a_thread_that_joins_a_job_again_leaves_it_first(caplog: pytest.LogCaptureFixture) -> None:
    """As a notebook cell does that is run twice: the first cluster must not stay a member."""
    job = new_job()
    options: dict[str, Any] = {"multicast": False, "solo_delay": 0.0, "timeout": 30}
    first = potluck.join(1, job=job, **options)
    with (
        potluck.join(1, job=job, **options) as second,
        potluck.join(1, job=new_job(), **options) as other,
    ):
        assert first.world_size == second.world_size == other.world_size == 1
        assert second.all_reduce(2.0) == 2.0
        with pytest.raises(potluck.DistributedError, match="closed"):
            first.barrier()
    assert caplog.text.count("join() was called again") == 1
