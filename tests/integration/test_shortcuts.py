"""Ranks of one machine go on over local sockets: all of it works there, and ends there, as well."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from potluck import DistributedContext, NetworkNamespace, RpcAgent, TcpBackend
from potluck.backend.stream_backend import StreamBackend
from potluck.collective.executor import measure
from potluck.errors import DistributedError
from potluck.net import unix_socket
from potluck.net.tcp import LocalStream, TcpStream
from potluck.net.unix_socket import SharedMemory, share_memory
from support.place import Place
from support.ranks import Ranks
from support.shortcuts import shortcuts
from support.threads import PATIENCE

LARGE = 3_000_001
"""Bytes of a message: several times what a socket takes."""


def kinds(backend: StreamBackend) -> set[type]:
    """What the links and the streams of a rank consist of."""
    return {type(link.stream) for link in backend._links.values()}


def measure_links(place: Place) -> list[int]:
    """Sum something large; the rates that the survey before it found."""
    seen = []
    with shortcuts(), place.join() as backend, DistributedContext(backend) as context:

        def note(*arguments: Any) -> Any:
            seen.append(measure(*arguments))
            return seen[-1]

        with mock.patch("potluck.collective.executor.measure", note):
            context.all_reduce(np.ones(1 << 20, "f4"), timeout=PATIENCE)
    (rows,) = seen
    assert (rows[1] > 0).sum() == place.world_size - 1
    return [int(rate) for rate in rows[0]]


def test_within_one_machine_no_link_is_measured(ranks: Ranks) -> None:
    """How busy its processors are just now is no reason to give a rank less to do."""
    assert ranks.run(measure_links, 3) == [[0, 0, 0]] * 3


def do_everything(place: Place, is_plain: bool) -> list[str]:
    """Messages, collectives of every size, remote calls; says over what."""
    namespace = NetworkNamespace.insecure() if is_plain else None
    with (
        shortcuts(),
        TcpBackend(place.rank, place.world_size, place.master, namespace=namespace) as backend,
        DistributedContext(backend) as context,
        RpcAgent(backend) as agent,
    ):
        agent.register("twice", lambda data: data + data)
        for count in (1, 1000, 70_000, 1_500_000):
            array = np.full(count, place.rank + 1, "f4")
            context.all_reduce(array, timeout=PATIENCE)
            assert (array == sum(range(1, place.world_size + 1))).all()
        after = (place.rank + 1) % place.world_size
        inbox = bytearray(LARGE)
        receive = backend.post_recv_into(inbox, (place.rank - 1) % place.world_size)
        backend.send(bytes([place.rank]) * LARGE, after, timeout=PATIENCE)
        receive.wait(PATIENCE)
        assert inbox == bytes([(place.rank - 1) % place.world_size]) * LARGE
        assert agent.rpc_sync(after, "twice", b"ab" * LARGE, PATIENCE) == b"ab" * 2 * LARGE
        context.barrier(PATIENCE)
        return sorted(kind.__name__ for kind in kinds(backend))


@pytest.mark.parametrize("is_plain", [False, True], ids=["namespace", "in clear"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_everything_runs_over_local_sockets(
    ranks: Ranks, world_size: int, *, is_plain: bool
) -> None:
    """With and without a namespace: the ranks notice by themselves that they are neighbours."""
    assert ranks.run(do_everything, world_size, is_plain) == [["LocalStream"]] * world_size


def stay_with_tcp(place: Place) -> list[str]:
    """Only rank 0 wants shortcuts."""
    with shortcuts("on" if place.rank == 0 else "off"), place.join() as backend:
        backend.barrier(PATIENCE)
        return sorted(kind.__name__ for kind in kinds(backend))


def test_one_who_wants_no_shortcut_is_enough(ranks: Ranks) -> None:
    """Nobody is forced to leave encryption."""
    assert ranks.run(stay_with_tcp, 3) == [[TcpStream.__name__]] * 3


def sum_on(place: Place) -> str:
    """Add up until something is wrong, and say what."""
    with sharing() as agreed, place.join() as backend, DistributedContext(backend) as context:
        assert kinds(backend) == {LocalStream}
        array = np.ones(1 << 20, "f4")
        context.all_reduce(array)
        assert len(agreed) == 2
        assert None not in agreed
        place.say("ready")
        try:
            while True:
                context.all_reduce(array, "max", timeout=PATIENCE)
        except DistributedError as error:
            return f"{type(error).__name__} {error.rank}"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_neighbour_is_named_by_all_others(ranks: Ranks, victim: int) -> None:
    """In the middle of an operation, at once."""
    started = ranks.start(sum_on, 3)
    for rank in started:
        rank.expect("ready")
    started[victim].send_signal(signal.SIGKILL)
    left = [rank.value() for number, rank in enumerate(started) if number != victim]
    assert left == [f"PeerLost {victim}"] * 2


@contextlib.contextmanager
def sharing(setting: str = "on") -> Iterator[list[SharedMemory | None]]:
    """Shortcuts with shared memory or without; what was agreed on, stream by stream."""
    agreed: list[SharedMemory | None] = []

    def note(*arguments: Any, **options: Any) -> SharedMemory | None:
        agreed.append(share_memory(*arguments, **options))
        return agreed[-1]

    switch = mock.patch.dict(os.environ, {unix_socket.MEMORY_SWITCH: setting})
    with shortcuts(), switch, mock.patch.object(unix_socket, "share_memory", note):
        yield agreed


def sum_in_all_ways(place: Place, setting: str) -> tuple[list[bool], str]:
    """Collectives of large arrays; whether each stream shares memory, and what came out."""
    off = setting.split(",")
    count = 700_001  # pieces of one MiB, and a rest
    digest = hashlib.sha256()
    expected = sum(np.sin(np.arange(count) + rank) for rank in range(place.world_size))
    with (
        sharing("off" if str(place.rank) in off else "on") as agreed,
        place.join() as backend,
        DistributedContext(backend) as context,
    ):
        mine = np.sin(np.arange(count) + place.rank)
        for way in ("ring", "tree", "doubling", "direct", "centralized"):
            for kind in ("f4", "f8", "f2"):
                array = mine.astype(kind)
                context.all_reduce(array, strategy=way, timeout=PATIENCE)
                assert np.abs(array - expected).max() < (0.02 if kind == "f2" else 1e-4)
                digest.update(array.tobytes())
        array = mine.astype("f4")
        context.all_reduce(array, compression="int8", timeout=PATIENCE)
        assert np.abs(array - expected).max() < 0.2
        digest.update(array.tobytes())
        array = mine.astype("f4")
        context.broadcast(array, 1, timeout=PATIENCE)
        digest.update(array.tobytes())
        for part in context.all_gather(mine, timeout=PATIENCE):
            digest.update(np.ascontiguousarray(part).tobytes())
    return [each is not None for each in agreed], digest.hexdigest()


@pytest.mark.parametrize("world_size", [2, 4])
def test_large_arrays_travel_in_shared_memory(ranks: Ranks, world_size: int) -> None:
    """By every algorithm and in every type; all ranks end with the same bits."""
    results = ranks.run(sum_in_all_ways, world_size, "")
    for agreed, _ in results:
        assert agreed == [True] * (world_size - 1)
    assert len({digest for _, digest in results}) == 1


def test_ranks_with_and_without_shared_memory_end_with_the_same_bits(ranks: Ranks) -> None:
    """Two of three share memory; the third uses the sockets alone."""
    results = ranks.run(sum_in_all_ways, 3, "1")
    assert [agreed for agreed, _ in results] == [[True], [], [True]]
    assert len({digest for _, digest in results}) == 1


def descriptors() -> list[str]:
    """The sockets and the memory that this process has open."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.append(str(each.readlink()))
    return sorted(link for link in links if link.startswith(("socket:", "/memfd:")))


def share_and_leave(place: Place) -> list[str]:
    """What stays open after a group that shared memory, and in which an operation failed."""
    before = descriptors()
    with sharing() as agreed, place.join() as backend, DistributedContext(backend) as context:
        context.all_reduce(np.ones(1 << 20, "f4"), timeout=PATIENCE)
        with pytest.raises(DistributedError):
            context.all_reduce(np.ones((1 << 20) + place.rank, "f4"), timeout=PATIENCE)
        context.all_reduce(np.ones(1 << 20, "f4"), timeout=PATIENCE)
        assert len(agreed) == 2 * (place.world_size - 1)
        assert [each for each in descriptors() if each.startswith("/memfd:")]
        agreed.clear()
    gc.collect()
    return sorted({*descriptors()} - {*before})


def test_shared_memory_leaves_no_descriptors_behind(ranks: Ranks) -> None:
    """Neither after a failure nor at the end."""
    assert ranks.run(share_and_leave, 3) == [[], [], []]


def fail_and_go_on(place: Place) -> list[str]:
    """One rank makes another call than the rest; the next call is as if nothing had been."""
    told = []
    with shortcuts(), place.join() as backend, DistributedContext(backend) as context:
        for _ in range(3):
            array = np.ones(200_000 + place.rank, "f4")
            try:
                context.all_reduce(array, timeout=PATIENCE)
            except DistributedError as error:
                told.append(type(error).__name__)
            small = np.ones(200_000, "f4")
            context.all_reduce(small, timeout=PATIENCE)
            assert (small == place.world_size).all()
    return told


def test_after_a_failure_the_next_epoch_takes_shortcuts_again(ranks: Ranks) -> None:
    """Fresh ones: nothing half-sent is left in them."""
    assert ranks.run(fail_and_go_on, 3) == [["CollectiveMismatch"] * 3] * 3
