"""A timedelta does wherever a number of seconds does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

import potluck
from potluck import (
    AutoDiscoveryConfig,
    CollectiveConfig,
    DistributedConfig,
    DistributedContext,
    ElectionConfig,
    HealthConfig,
    SimulatedBackend,
    TcpBackend,
    Timeout,
)
from support.ports import free_port

SHORT = timedelta(milliseconds=50)
LONG = timedelta(minutes=1)

LATE: dict[str, Callable[[DistributedContext], object]] = {
    "all_reduce": lambda left: left.all_reduce(1, timeout=SHORT),
    "barrier": lambda left: left.barrier(SHORT),
    "recv": lambda left: left.recv(bytearray(1), 1, timeout=SHORT),
    "recv_timeout": lambda left: left.recv_timeout(bytearray(1), 1, SHORT),
    "work": lambda left: left.all_reduce(1, async_op=True).wait(SHORT),
    "transfer": lambda left: left.irecv(np.zeros(1), 1).wait(SHORT),
    "objects": lambda left: left.all_gather_object(1, timeout=SHORT),
    "ask": lambda left: left.all_gather(np.ones(1), counts="ask", timeout=SHORT),
    "function": lambda left: potluck.all_reduce(left.backend, 1, timeout=SHORT),
    "operation": lambda left: left.backend.post_recv_into(bytearray(1), 1).wait(SHORT),
    "backend": lambda left: left.backend.recv(bytearray(1), 1, timeout=SHORT),
}


@pytest.mark.parametrize("name", LATE)
def test_every_call_that_waits_takes_one(name: str) -> None:
    """And gives up after it."""
    left, right = SimulatedBackend.create_group(2)
    with DistributedContext(left) as context, right, pytest.raises(Timeout):
        LATE[name](context)


def test_the_limit_of_a_context_may_be_one() -> None:
    """For all calls that say nothing."""
    left, right = SimulatedBackend.create_group(2)
    with DistributedContext(left) as context, right:
        context.timeout = SHORT  # type: ignore[assignment]
        assert context.timeout == 0.05
        with pytest.raises(Timeout):
            context.barrier()
        left.timeout = SHORT  # type: ignore[assignment]
        with pytest.raises(Timeout):
            left.recv(bytearray(1), 1)


def test_configurations_take_them() -> None:
    """They are seconds from then on."""
    assert DistributedConfig(["a"], 0, timeout=LONG).timeout == 60.0  # type: ignore[arg-type]
    assert CollectiveConfig(timeout=LONG).timeout == 60.0  # type: ignore[arg-type]
    election = ElectionConfig(election_timeout=LONG)  # type: ignore[arg-type]
    assert election.election_timeout == 60.0
    health = HealthConfig(pause_after=LONG)  # type: ignore[arg-type]
    assert health.pause_after == 60.0
    auto = AutoDiscoveryConfig(solo_delay=SHORT)  # type: ignore[arg-type]
    assert auto.solo_delay == 0.05


def test_a_rendezvous_and_a_cluster_take_them() -> None:
    """Both wait for others."""
    with pytest.raises(Timeout, match=r"0\.05 s"):
        TcpBackend(0, 2, f"127.0.0.1:{free_port()}", timeout=SHORT)
    with potluck.join(job="durations", multicast=False, solo_delay=0.0, timeout=LONG) as cluster:
        with pytest.raises(Timeout):
            cluster.wait_for_peers(3, SHORT)
        assert cluster.wait_until_active(LONG).members
        assert cluster.all_reduce(1.0, timeout=LONG) == 1.0
