"""Barriers over the mesh: nobody leaves early, the absent are named, all stay in step."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial

import pytest

from potluck import DistributedError, InvalidRank, PeerLost, Timeout
from potluck.backend.mesh import MeshBackend
from potluck.net.frames import Kind
from support.meshes import memory_group, mesh_group, pump_until
from support.threads import Background, together


def all_pass(group: list[MeshBackend], laps: int = 3) -> None:
    """Everybody passes a few barriers in step."""
    arrived = dict.fromkeys(range(len(group)), 0)

    def visit(mesh: MeshBackend) -> None:
        for lap in range(1, laps + 1):
            arrived[mesh.rank] = lap
            mesh.barrier(timeout=20)
            assert min(arrived.values()) >= lap

    together(*[partial(visit, mesh) for mesh in group])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_nobody_leaves_before_all_have_arrived(size: int) -> None:
    """Over real sockets, lap after lap."""
    with mesh_group(size) as group:
        all_pass(group, laps=20)


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (9, 4)])
def test_a_barrier_is_logarithmic(size: int, rounds: int) -> None:
    """Each rank sends one token for each doubling, not one for each rank."""
    tokens: Counter[int] = Counter()
    with memory_group(size) as group:
        for mesh in group:

            def count(*facts: int, rank: int = mesh.rank, tell: object = mesh._gates._tell) -> None:
                tokens[rank] += facts[1] == Kind.TOKEN
                assert callable(tell)
                tell(*facts)

            mesh._gates._tell = count
        all_pass(group, laps=1)
    assert tokens == Counter(dict.fromkeys(range(size), rounds))


def test_a_barrier_that_times_out_names_who_did_not_come() -> None:
    """Not those who wait as well, although no token came from some of them."""
    with mesh_group(5) as group:
        waiting = [Background(group[rank].barrier) for rank in (1, 3)]
        arrival = group[0].post_barrier()
        pump_until(group[0], lambda: group[0]._gates.missing(0) == [2, 4])
        with pytest.raises(Timeout, match="ranks 2, 4 have not arrived") as caught:
            arrival.wait(0.01)
        assert (caught.value.missing, caught.value.seconds) == ((2, 4), 0.01)
        together(arrival.wait, group[2].barrier, group[4].barrier)
        for one in waiting:
            one.result()


def test_a_single_absent_rank_is_the_errors_rank() -> None:
    """It is then also the one to look at."""
    with mesh_group(3) as group:
        waiting = Background(group[2].barrier)
        arrival = group[0].post_barrier()
        pump_until(group[0], lambda: group[0]._gates.missing(0) == [1])
        with pytest.raises(Timeout, match="rank 1 has not arrived") as caught:
            arrival.wait(0)
        assert caught.value.rank == 1
        together(arrival.wait, group[1].barrier)
        waiting.result()


def test_a_blocking_barrier_announces_itself_before_it_gives_up() -> None:
    """Also one with little time tells the others that it was there."""
    with mesh_group(4) as group:
        with pytest.raises(Timeout):
            group[0].barrier(timeout=0.4)  # its one token goes to rank 1
        arrival = group[3].post_barrier()
        pump_until(group[3], lambda: group[3]._gates.missing(0) == [1, 2])
        assert arrival.cancel()


def test_a_barrier_that_timed_out_goes_on_where_it_stopped() -> None:
    """Called again, it is the same barrier: afterwards everybody is in step."""
    with mesh_group(4) as group:
        for mesh in group[:3]:
            with pytest.raises(Timeout):
                mesh.barrier(timeout=0.02)
        with pytest.raises(Timeout):
            group[0].barrier(timeout=0.02)
        all_pass(group, laps=5)


def test_a_barrier_passed_after_its_caller_gave_up_counts() -> None:
    """The other has passed it: when the caller comes back it returns at once, and in step."""
    with mesh_group(2) as (left, right):
        with pytest.raises(Timeout):
            left.barrier(timeout=0.02)
        right.barrier()  # the token of the one that gave up is here
        pump_until(left, lambda: left._gates._gates[0].unclaimed)
        left.barrier(timeout=0)
        waiting = Background(right.barrier)
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(1), 0, 0.05)
        assert not waiting.ended
        left.barrier()
        waiting.result()
        all_pass([left, right])


def test_a_cancelled_barrier_can_be_called_again() -> None:
    """The operation ends, the barrier stays where it is."""
    with mesh_group(2) as group:
        arrival = group[0].post_barrier()
        assert arrival.cancel()
        all_pass(group)


def test_several_threads_of_one_rank_queue_up() -> None:
    """Three threads a side: each call is one barrier, whoever makes it."""
    with mesh_group(3) as group:
        together(*[mesh.barrier for mesh in group for _ in range(4)])
        all_pass(group)


def test_a_barrier_of_others_is_refused() -> None:
    """And leaves the group usable."""
    with mesh_group(3) as group:
        for members in ([1, 2], [0, 7]):
            with pytest.raises(InvalidRank):
                group[0].post_barrier(members=members)
        all_pass(group)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_rank_wakes_the_barrier(size: int, lost: int) -> None:
    """Everybody that waits in it learns who is gone, and so does everybody who comes later."""
    with mesh_group(size) as group:
        survivors = [mesh for mesh in group if mesh.rank != lost]
        waiting = [Background(mesh.barrier) for mesh in survivors]
        pump_until(group[lost], lambda: group[lost]._gates._gates != {} or size > 2)
        group[lost].close()
        for one in waiting:
            with pytest.raises(PeerLost) as caught:
                one.result()
            assert caught.value.rank == lost
        for mesh in survivors:
            with pytest.raises(PeerLost):
                mesh.barrier(timeout=10)


@pytest.mark.parametrize("size", [3, 4])
def test_who_waits_alone_is_woken_too(size: int) -> None:
    """Although the ranks that would have told it have not come to the barrier."""
    for lost in range(1, size):
        with mesh_group(size) as group:
            waiting = Background(group[0].barrier)
            group[lost].close()
            with pytest.raises(PeerLost) as caught:
                waiting.result(within=10)
            assert caught.value.rank == lost


@pytest.mark.parametrize("size", [2, 3, 5])
def test_who_has_passed_may_leave_at_once(size: int) -> None:
    """Its goodbye does not overtake its arrival: the others pass as well."""

    def visit(mesh: MeshBackend) -> None:
        mesh.barrier()
        mesh.close()

    for _ in range(10):
        with mesh_group(size) as group:
            together(*[partial(visit, mesh) for mesh in group])


def test_a_lost_rank_breaks_only_the_barriers_it_is_in() -> None:
    """A group without it goes on."""
    with mesh_group(3) as group:
        waiting = [Background(mesh.barrier) for mesh in group[:2]]
        group[2].close()
        for one in waiting:
            with pytest.raises(PeerLost):
                one.result()
        for _ in range(3):
            pair = [mesh.post_barrier(group=9, members=[0, 1]) for mesh in group[:2]]
            together(*[one.wait for one in pair])


def test_barriers_and_cancels_in_a_storm_stay_in_step() -> None:
    """Time-outs of random length on all sides; counted by calls that returned, nobody is ahead."""
    laps = [0] * 3

    def visit(mesh: MeshBackend) -> None:
        pause = 0.0001 * (mesh.rank + 1)
        while laps[mesh.rank] < 30:
            with contextlib.suppress(Timeout):
                mesh.barrier(timeout=pause)
                laps[mesh.rank] += 1
                assert max(laps) - min(laps) <= 1
            pause = min(2 * pause, 0.05)

    with mesh_group(3) as group:
        try:
            together(*[partial(visit, mesh) for mesh in group])
        except DistributedError as error:
            pytest.fail(str(error))
    assert laps == [30] * 3
