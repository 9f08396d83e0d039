"""Forked children of a rank: they may live and die, but the group is not theirs."""

import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from potluck import Backend, DistributedContext, TcpBackend
from potluck._platform import CAN_SHARE_MEMORY
from potluck.collective.call import Work
from support.place import Failure, Place, as_failure
from support.ports import free_port
from support.ranks import Ranks
from support.shortcuts import shortcuts
from support.threads import PATIENCE


def fork(child: Callable[[], Any]) -> Any:
    """Call something in a forked child; its result, or how it failed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        try:
            there.send(child())
        except BaseException as error:  # noqa: BLE001 - reported
            there.send(as_failure(error))

    process = context.Process(target=run)
    process.start()
    try:
        assert here.poll(PATIENCE), "the child said nothing"
        return here.recv()
    finally:
        process.join(PATIENCE)
        assert process.exitcode == 0


def talk(backend: Backend, place: Place) -> None:
    """The ranks of the group still have each other."""
    for other in place.others:
        for size in (8, 200_000):
            inbox = bytearray(size)
            receive = backend.post_recv_into(inbox, other)
            backend.send(bytes([place.rank]) * size, other, timeout=PATIENCE)
            receive.wait(PATIENCE)
            assert inbox == bytes([other]) * size
    backend.barrier(PATIENCE)


def misuse(backend: Backend, other: int) -> list[Failure]:
    """What a child gets that uses its parent's group."""
    calls: list[Callable[[], Any]] = [
        lambda: backend.send(b"", other),
        lambda: backend.send(bytes(1 << 20), other),
        lambda: backend.recv(bytearray(4), other),
        lambda: backend.post_send(b"", other),
        lambda: backend.post_recv_into(bytearray(4), other),
        backend.barrier,
        backend.progress,
    ]
    failures = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - which one it is, is for the test to judge
            failures.append(as_failure(error))
    return failures


def fork_and_misuse(place: Place) -> list[Any]:
    """A child tries to use the group."""
    with place.join() as backend:
        talk(backend, place)
        failures = fork(lambda: misuse(backend, place.others[0]))
        talk(backend, place)
        return [os.getpid(), failures]


def test_a_forked_child_may_not_use_the_group(ranks: Ranks) -> None:
    """It is told whose group it is and what to do instead; the parent does not notice."""
    for pid, failures in ranks.run(fork_and_misuse, 3):
        assert [failure["kind"] for failure in failures] == ["BackendUnavailable"] * 7
        for failure in failures:
            assert f"pid {pid}" in failure["text"]
            assert "Create a new group in the child" in failure["text"]


def close_in_child(backend: Backend) -> bool:
    """Do in a child everything that ends a backend elsewhere."""
    backend.close()
    with backend:
        pass
    gc.collect()
    return True


def fork_in_many_ways(place: Place) -> None:
    """Children that close the group, exit, crash, and run programs."""
    with place.join() as backend:
        talk(backend, place)
        assert fork(lambda: close_in_child(backend)) is True
        talk(backend, place)
        for end in (sys.exit, os._exit, os.abort):
            pid = os.fork()
            if pid == 0:
                os.close(2)  # a crash has nothing to add to the log
                end(*([0] if end is not os.abort else []))
            os.waitpid(pid, 0)
            talk(backend, place)
        subprocess.run(["true"], check=True)
        talk(backend, place)


def test_the_end_of_a_child_disturbs_nobody(ranks: Ranks) -> None:
    """By closing, by exiting with everything that runs at exit, by crashing."""
    ranks.run(fork_in_many_ways, 3, fresh=True)


def fork_in_the_middle(place: Place) -> list[str]:
    """Fork again and again while threads send and receive; what children had of our sockets."""
    inherited: list[str] = []
    with place.join() as backend:
        failures: list[BaseException] = []
        stop = threading.Event()

        def work(tag: int) -> None:
            (other,) = place.others
            try:
                last = False
                while not last:
                    last = place.rank == 0 and stop.is_set()  # rank 0 says when it is over
                    inbox = bytearray(50_000)
                    receive = backend.post_recv_into(inbox, other, tag=tag)
                    backend.send(bytes([last]) * 50_000, other, tag=tag, timeout=PATIENCE)
                    receive.wait(PATIENCE)
                    last = last or bool(inbox[0])
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            inherited += fork(list_inherited)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not failures, failures
        backend.barrier(PATIENCE)
    return inherited


def list_inherited() -> list[str]:
    """The descriptors of groups that this process has: connections and what watches them."""
    found = [str(connection) for connection in psutil.Process().net_connections("tcp")]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone
            target = str(descriptor.readlink())
            found += [target] if "anon_inode:[event" in target else []
    return found


def test_forking_in_the_middle_of_traffic_is_safe(ranks: Ranks) -> None:
    """Whatever another thread holds at that moment, no child hangs or has a socket of ours."""
    # In processes of their own: engines of earlier tests may have left connections in others.
    started = ranks.start(fork_in_the_middle, 2, wrap=lambda _: list)
    assert [rank.value() for rank in started] == [[], []]


def misuse_collectives(context: DistributedContext, work: Work[Any], depth: int) -> list[Failure]:
    """What a child gets that uses its parent's collectives, those under way included."""
    calls: list[Callable[[], Any]] = [
        lambda: context.all_reduce(1, timeout=PATIENCE),
        lambda: context.all_reduce(1, async_op=True),
        lambda: work.wait(PATIENCE),
        lambda: context.barrier(PATIENCE),
    ]
    failures = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - which one it is, is for the test to judge
            failures.append(as_failure(error))
    context.abort("a child")
    if depth:
        failures += fork(lambda: misuse_collectives(context, work, depth - 1))
    context.close()
    return failures


def fork_in_an_operation(place: Place) -> list[Any]:
    """A child is made while a collective waits for its last rank, and several more in line."""
    with DistributedContext(place.join()) as context:
        context.barrier()
        failures: list[Failure] = []
        works: list[Work[int]] = []
        if place.rank == 0:
            works = [context.all_reduce(1, async_op=True) for _ in range(3)]
            failures += fork(lambda: misuse_collectives(context, works[0], 1))
            failures += fork(lambda: misuse_collectives(context, works[2], 1))
            pid = os.fork()
            if not pid:
                sys.exit(0)  # with all that runs at exit
            os.waitpid(pid, 0)
        context.post_barrier().wait(PATIENCE)
        if not works:
            works = [context.all_reduce(1, async_op=True) for _ in range(3)]
        sums = [work.wait(PATIENCE) for work in works]
        return [[failure["kind"] for failure in failures], sums, context.all_reduce(1)]


def test_forking_in_the_middle_of_a_collective_is_safe(ranks: Ranks) -> None:
    """The child is refused at once, whatever it tries, and ends; the parent goes on."""
    results = ranks.run(fork_in_an_operation, 3, fresh=True)
    assert results[0] == [["BackendUnavailable"] * 16, [3, 3, 3], 3]
    assert results[1] == results[2] == [[], [3, 3, 3], 3]


def make_groups_in_children(place: Place, master: str) -> list[int]:
    """Children form a group of their own while their parents have one."""
    with place.join() as backend:

        def child() -> int:
            with TcpBackend(place.rank, place.world_size, master) as group:
                talk(group, place)
                return group.world_size

        size = fork(child)
        talk(backend, place)
        return [size]


def test_children_may_make_groups_of_their_own(ranks: Ranks) -> None:
    """As the hint that they get promises."""
    master = f"127.0.0.1:{free_port()}"
    assert ranks.run(make_groups_in_children, 3, master) == [[3]] * 3


def shared_memory() -> list[str]:
    """The memory that this process shares with other ranks, mapped or open."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    opened = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            opened.append(str(each.readlink()))
    return [each for each in (*mapped, *opened) if "memfd:potluck" in each]


def fork_while_sharing(place: Place) -> tuple[int, Any]:
    """A child between two sums; what the rank shares, and what its child does."""
    array = np.ones(1 << 20, "f4")
    with shortcuts(), place.join() as backend, DistributedContext(backend) as context:
        context.all_reduce(array, timeout=PATIENCE)
        mine, left = len(shared_memory()), fork(shared_memory)
        context.all_reduce(array, timeout=PATIENCE)
    assert (array == place.world_size**2).all()
    return mine, left


@pytest.mark.skipif(not CAN_SHARE_MEMORY, reason="this platform shares no memory")
def test_a_forked_child_lets_go_of_shared_memory(ranks: Ranks) -> None:
    """And its parents still use it."""
    assert ranks.run(fork_while_sharing, 2) == [[4, []]] * 2
