"""Numbers for people."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import potluck
from potluck import (
    AutoDiscoveryConfig,
    CollectiveConfig,
    DistributedConfig,
    DistributedContext,
    ElasticTrainer,
    ElectionConfig,
    HealthConfig,
    LocalSgd,
    RpcAgent,
    RpcConfig,
    RpcTimeout,
    SimulatedBackend,
    TcpBackend,
    TcpRpcBackend,
    Timeout,
    TrainingState,
    _time,
)
from potluck._time import Countdown, read_timeout
from support.contexts import in_group
from support.ports import free_port
from support.threads import together


def test_numbers_are_scaled() -> None:
    """To the unit in which they are short."""
    assert [_time.duration(ns) for ns in (5, 1500, 2_000_000, 3_210_000_000)] == [
        "5 ns",
        "1.5 µs",
        "2 ms",
        "3.21 s",
    ]
    assert [_time.size(count) for count in (0, 999, 1000, 5_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "5 GB",
    ]
    assert _time.speed(25_000_000) == "25 MB/s"


def test_long_proportions_are_cut() -> None:
    """A thousand shares do not belong into a sentence."""
    assert _time.ratio((2, 1)) == "2:1"
    assert _time.ratio((1,) * 1000) == "1:1:1:1:1:1:1:1:…"


# --------------------------------------------------------------------------------------------------
# A timedelta does wherever a number of seconds does.

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
    paced = HealthConfig.wired().paced(timedelta(seconds=1), LONG)
    assert (paced.interval, paced.pause_after) == (1.0, 60.0)
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


# -- remote calls --------------------------------------------------------------------------------

CALLS: dict[str, Callable[[RpcAgent], object]] = {
    "rpc_sync": lambda agent: agent.rpc_sync(1, "wait", timeout=SHORT),
    "rpc_async": lambda agent: agent.rpc_async(1, "wait", timeout=SHORT).wait(),
    "service": lambda agent: agent.service(1, timeout=SHORT).linger(b""),
}

LOOKS: dict[str, Callable[[RpcAgent], object]] = {
    "wait": lambda agent: agent.rpc_async(1, "wait").wait(SHORT),
    "result": lambda agent: agent.rpc_async(1, "wait").result(SHORT),
    "exception": lambda agent: agent.rpc_async(1, "wait").exception(SHORT),
}


def call_in_vain(call: Callable[[RpcAgent], object], config: RpcConfig | None = None) -> None:
    """Call a function that does not return before the call has ended."""
    left, right = SimulatedBackend.create_group(2)
    over = threading.Event()

    def wait(payload: bytes) -> bytes:
        over.wait(30.0)
        return payload

    with left, right, RpcAgent(left, config) as caller, RpcAgent(right) as server:
        server.register("wait", wait)
        server.expose(wait, name="linger")
        try:
            call(caller)
        finally:
            over.set()


@pytest.mark.parametrize("name", CALLS)
def test_a_remote_call_takes_one(name: str) -> None:
    """It is over after that."""
    with pytest.raises(RpcTimeout):
        call_in_vain(CALLS[name])


@pytest.mark.parametrize("name", LOOKS)
def test_waiting_for_a_remote_call_takes_one(name: str) -> None:
    """The call itself continues."""
    with pytest.raises(Timeout) as raised:
        call_in_vain(LOOKS[name])
    assert not isinstance(raised.value, RpcTimeout)
    assert raised.value.seconds == 0.05


def test_an_agent_is_configured_with_one() -> None:
    """Calls that are given no time of their own end after it."""
    config = RpcConfig(timeout=SHORT)  # type: ignore[arg-type]
    assert config.timeout == 0.05
    with pytest.raises(RpcTimeout):
        call_in_vain(lambda agent: agent.rpc_sync(1, "wait"), config)


def test_messages_for_remote_calls_take_one() -> None:
    """No message comes."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, pytest.raises(Timeout):
        TcpRpcBackend(left).recv(bytearray(1), 1, timeout=SHORT)


# -- training ------------------------------------------------------------------------------------


def pair_of_contexts(stack: contextlib.ExitStack) -> list[DistributedContext]:
    """Two ranks that are closed in the end."""
    ranks = SimulatedBackend.create_group(2)
    return [stack.enter_context(DistributedContext(each)) for each in ranks]


def test_a_trainer_takes_one() -> None:
    """A step whose partner does not come ends after it."""
    with contextlib.ExitStack() as stack:
        trainers = [
            ElasticTrainer(context, TrainingState(model=np.zeros(1)), print, timeout=SHORT)
            for context in pair_of_contexts(stack)
        ]
        together(*(each.start for each in trainers))
        with pytest.raises(Timeout):
            trainers[0].step({"g": np.ones(1)})


def test_local_sgd_takes_one() -> None:
    """A meeting whose partner does not come ends after it."""
    with contextlib.ExitStack() as stack:
        meetings = [
            LocalSgd(context, {"w": np.zeros(1)}, every=1, timeout=SHORT)
            for context in pair_of_contexts(stack)
        ]
        together(*(each.trainer.start for each in meetings))
        with pytest.raises(Timeout):
            meetings[0].step()


# --------------------------------------------------------------------------------------------------
# Time limits: what is no length of time is refused in words.


def test_seconds_are_a_number_or_none() -> None:
    """Of any kind that numbers have; infinity is no limit."""
    assert read_timeout(None) is None
    assert read_timeout(float("inf")) is None
    assert read_timeout(0) == 0
    assert read_timeout(np.float32(2.5)) == 2.5  # type: ignore[arg-type]


def test_a_countdown_is_shared() -> None:
    """What one thing has used, the next does not have; no limit stays none."""
    countdown = Countdown(50)
    first, second = countdown.left, countdown.left
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 50
    assert Countdown(0).left == 0
    assert Countdown(None).left is None
    assert Countdown(float("inf")).left == float("inf")


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [
        ("5", TypeError, "A timeout is a number of seconds, or None for no limit, not '5'"),
        (True, TypeError, "not True"),
        (float("nan"), ValueError, "zero or more seconds, not nan"),
        (-1, ValueError, "zero or more seconds, not -1"),
    ],
)
def test_everything_else_is_refused_before_anything_moves(
    timeout: Any, error: type[Exception], words: str
) -> None:
    """By calls and by waits; the group goes on."""

    def act(context: Any) -> int:
        with pytest.raises(error, match=words):
            context.all_reduce(1, timeout=timeout)
        work = context.all_reduce(1, async_op=True)
        with pytest.raises(error, match=words):
            work.wait(timeout)
        assert work.wait(10) == 2
        return int(context.all_reduce(1))

    assert in_group(2, act) == [2, 2]
