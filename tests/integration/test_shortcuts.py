"""Ranks of one machine go on over local sockets: all of it works there, and ends there, as well."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest

from potluck import DistributedContext, NetworkNamespace, RpcAgent, TcpBackend
from potluck.backend.stream_backend import LaneBackend
from potluck.collective.executor import measure
from potluck.errors import DistributedError
from potluck.net.tcp import LocalStream, TcpStream
from support.place import Place
from support.ranks import Ranks
from support.shortcuts import shortcuts
from support.threads import PATIENCE

LARGE = 3_000_001
"""Bytes of a message: several times what a socket takes."""


def kinds(backend: LaneBackend) -> set[type]:
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
    with shortcuts(), place.join() as backend, DistributedContext(backend) as context:
        assert kinds(backend) == {LocalStream}
        array = np.ones(1 << 20, "f4")
        context.all_reduce(array)
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
