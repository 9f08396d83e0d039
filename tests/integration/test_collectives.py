"""Collectives among real processes, over TCP: sealed and plain, and when one of them is killed."""

import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from potluck import NetworkNamespace, SubBackend, TcpBackend
from potluck.collective.call import Call, Work
from potluck.collective.group import Group
from potluck.errors import DistributedError
from potluck.schedule import verify
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Task
from support.collectives import task
from support.groups import sum_call
from support.place import Place, as_failure
from support.ranks import Ranks
from support.threads import PATIENCE

SIZES = (1, 1000, 70_000, 1_500_000)
"""Elements: short operations, and long ones with many pieces."""

WAYS = ("ring", "tree", "doubling", "direct", "central", "")


def sum_everything(place: Place, is_plain: bool) -> int:
    """Sum vectors of all sizes in all ways, and check every element."""
    namespace = NetworkNamespace.insecure() if is_plain else None
    total = place.world_size * (place.world_size + 1) // 2
    checked = 0
    with (
        TcpBackend(place.rank, place.world_size, place.master, namespace=namespace) as backend,
        Group(backend) as group,
    ):
        for way in WAYS:
            for count in SIZES:
                array = np.full(count, place.rank + 1, "f4")
                array[-1] += 0.5
                group.run(sum_call(array, place.world_size, way or None), PATIENCE)
                assert (array[:-1] == total).all()
                assert array[-1] == total + place.world_size / 2
                checked += 1
    return checked


@pytest.mark.parametrize("is_plain", [False, True], ids=["sealed", "plain"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_sums_are_right_in_every_world(ranks: Ranks, world_size: int, *, is_plain: bool) -> None:
    """Whatever the algorithm, the length and the protection."""
    results = ranks.run(sum_everything, world_size, is_plain)
    assert results == [len(WAYS) * len(SIZES)] * world_size


def do_every_collective(place: Place) -> list[str]:
    """One of each kind, with uneven blocks."""
    done = []
    with place.join() as backend, Group(backend) as group:
        for collective in Collective:
            for count in (7, 200_000):
                work = task(collective, place.world_size, count, root=1)
                reducer, inputs = verify.exact(work), verify.distinct(work)
                target = np.zeros(work.output(place.rank).length, "u8")
                used = reducer if collective.reduces else None
                group.run(Call(work, inputs[place.rank], target, used), PATIENCE)
                wanted = verify.expected(work, inputs, reducer)[place.rank]
                assert target.tobytes() == wanted.tobytes(), collective
                done.append(collective.value)
    return done


def test_every_collective_runs_over_tcp(ranks: Ranks) -> None:
    """By the plan that the ranks agree on."""
    results = ranks.run(do_every_collective, 3)
    assert [len(each) for each in results] == [2 * len(Collective)] * 3


def sum_until_the_end(place: Place, way: str, count: int) -> Any:
    """Sum again and again; what went wrong, and when."""
    with place.join() as backend, Group(backend) as group:
        array = np.zeros(count, "f4")
        group.run(sum_call(array, place.world_size, way), PATIENCE)
        place.say("going")
        try:
            while True:
                group.run(sum_call(array, place.world_size, way), PATIENCE)
        except DistributedError as error:
            return as_failure(error)


@pytest.mark.parametrize("count", [100, 2_000_000])
@pytest.mark.parametrize("way", ["ring", "tree", "doubling", "direct"])
def test_a_killed_rank_is_named_by_all(ranks: Ranks, way: str, count: int) -> None:
    """In the middle of an operation; also by those that had no connection to it."""
    group = ranks.start(sum_until_the_end, 4, way, count)
    for rank in group:
        rank.expect("going")
    group[2].kill()
    for number in (0, 1, 3):
        failure = group[number].value()
        assert failure["kind"] == "PeerLost", failure
        assert failure["rank"] == 2


def work_in_overlapping_groups(place: Place) -> list[float]:
    """The whole and two subgroups at once, on threads of their own, beside messages."""
    sums: dict[str, float] = {}
    errors: list[BaseException] = []
    with place.join() as backend:
        parts = {"all": [0, 1, 2], "left": [0, 1], "right": [1, 2]}
        subs = {
            name: SubBackend(backend, members, name=name)
            for name, members in parts.items()
            if place.rank in members
        }

        def work(name: str, sub: SubBackend) -> None:
            try:
                with Group(sub) as group:
                    for _ in range(15):
                        array = np.full(60_000, 1 + sub.rank, "f8")
                        group.run(sum_call(array, sub.world_size), PATIENCE)
                        sums[name] = float(array[17])
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        threads = [threading.Thread(target=work, args=each) for each in subs.items()]
        for thread in threads:
            thread.start()
        right, left = (place.rank + 1) % 3, (place.rank - 1) % 3
        for number in range(50):
            backend.send(bytes([number]) * 10_000, right)
            inbox = bytearray(10_000)
            backend.recv(inbox, left)
            assert inbox[0] == number
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors, errors
        backend.barrier()
    return [sums[name] for name in sorted(sums)]


def test_groups_overlap_with_each_other_and_with_messages(ranks: Ranks) -> None:
    """Nobody takes what belongs to another."""
    assert ranks.run(work_in_overlapping_groups, 3) == [[6.0, 3.0], [6.0, 3.0, 3.0], [6.0, 3.0]]


def measure_memory(place: Place, way: str) -> int:
    """Bytes that a large sum needs beyond its own array."""
    with place.join() as backend, Group(backend) as group:
        array = np.ones(16 << 20, "f4")
        group.run(sum_call(np.ones(1 << 20, "f4"), place.world_size, way), PATIENCE)
        tracemalloc.start()
        group.run(sum_call(array, place.world_size, way), PATIENCE)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (array == place.world_size).all()
    return peak


@pytest.mark.parametrize("way", ["ring", "direct"])
def test_a_large_sum_needs_little_more_than_its_array(ranks: Ranks, way: str) -> None:
    """Below 8 MiB, however long the vector."""
    for peak in ranks.run(measure_memory, 4, way):
        assert peak < 8 << 20


def sum_in_the_background(place: Place) -> float:
    """Megabytes per second of asynchronous sums beside a loop in pure Python."""
    with place.join() as backend, Group(backend) as group:
        array = np.ones(4 << 20, "f4")
        group.run(sum_call(array, 2), PATIENCE)
        start = time.monotonic()
        works: list[Work[None]] = [group.start(sum_call(array, 2)) for _ in range(3)]
        turns = 0
        while not works[-1].done:
            turns += 1
        took = time.monotonic() - start
        for work in works:
            work.wait(0)
        assert turns > 0
    return 3 * array.nbytes / took / 1e6


def test_sums_go_on_beside_a_busy_thread(ranks: Ranks) -> None:
    """They come to an end, and the thread is not held up; how fast is for the benchmark to say."""
    assert min(ranks.run(sum_in_the_background, 2)) > 0


def meet_somebody_who_disagrees(place: Place) -> Any:
    """Rank 1 takes another reduction than the others; afterwards all go on."""
    with place.join() as backend, Group(backend) as group:
        array = np.ones(10, "f4")
        work = Task.whole(Collective.ALL_REDUCE, place.world_size, 10)
        op = ReduceOp.MAX if place.rank == 1 else ReduceOp.SUM
        call = Call(work, array, array, Reducer.of(op, "f4"))
        failure = place.failure_of(group.run, call, PATIENCE)
        array = np.ones(10, "f4")
        group.run(sum_call(array, place.world_size), PATIENCE)
        return [failure["kind"], failure["text"], float(array[0])]


def test_a_disagreement_reaches_every_process(ranks: Ranks) -> None:
    """It names both sides, and the next operation is as if nothing had been."""
    for kind, text, total in ranks.run(meet_somebody_who_disagrees, 3):
        assert kind == "CollectiveMismatch"
        assert "all_reduce(sum, float32, 10 elements)" in text
        assert "all_reduce(max, float32, 10 elements)" in text
        assert total == 3.0
