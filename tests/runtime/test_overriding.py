"""A backend whose author wrote all_reduce or barrier anew: a context calls that."""

from typing import Any

import numpy as np
import pytest

import potluck
from potluck import (
    AutoDiscoveryBackend,
    AutoDiscoveryConfig,
    DistributedBackend,
    DistributedContext,
    DistributedMetrics,
    RingBackend,
    SimulatedBackend,
)


class Doubling(SimulatedBackend):
    """As the origin has it: one buffer, in place, no options."""

    barriers = 0

    def all_reduce(self, buffer: Any) -> None:
        """Double it."""
        buffer *= 2

    def barrier(self) -> None:  # type: ignore[override]
        """Count it."""
        self.barriers += 1


def test_a_context_calls_what_the_backend_has_written_anew() -> None:
    """Blocking, asynchronous, and by the functions; the array comes back."""
    backend = Doubling(0, 1)
    with DistributedContext(backend) as context:
        array = np.ones(2)
        assert context.all_reduce(array) is array
        assert context.all_reduce(array, "sum").tolist() == [4, 4]
        assert context.all_reduce(array, async_op=True).wait(30).tolist() == [8, 8]
        assert potluck.all_reduce(backend, array).tolist() == [16, 16]
        context.barrier()
        context.barrier(timeout=None)
        potluck.barrier(backend)
        assert backend.barriers == 3
        assert DistributedContext(context).all_reduce(array).tolist() == [32, 32]


def test_an_option_it_does_not_know_is_not_dropped() -> None:
    """The caller would get another result than asked for."""
    with DistributedContext(Doubling(0, 1)) as context, pytest.raises(TypeError):
        context.all_reduce(np.ones(2), "max")


def test_what_it_does_is_counted() -> None:
    """With its bytes; and what it raises."""

    class Failing(Doubling):
        def barrier(self) -> None:  # type: ignore[override]
            raise ConnectionError

    metrics = DistributedMetrics()
    with DistributedContext.with_metrics(Failing(0, 1), metrics) as context:
        context.all_reduce(np.ones(2))
        with pytest.raises(ConnectionError):
            context.barrier()
    seen = metrics.snapshot()
    assert (seen.all_reduce.completed, seen.all_reduce.bytes_processed) == (1, 16)
    assert (seen.barrier.completed, seen.barrier.failed) == (0, 1)


def test_it_may_call_the_librarys_own() -> None:
    """On a backend that has collectives."""

    class Noting(SimulatedBackend, DistributedBackend):
        calls = 0

        def all_reduce(self, array: Any, op: Any = "sum", **options: Any) -> Any:
            self.calls += 1
            return super().all_reduce(array, op, **options)

    backend = Noting(0, 1)
    with DistributedContext(backend) as context:
        assert context.all_reduce(3.0, "mean") == 3.0
        assert backend.calls == 1


def test_a_ring_of_a_users_own_kind_is_respected_too() -> None:
    """Whatever it derives from."""

    class Ring(RingBackend):
        def barrier(self, *_: Any, **__: Any) -> Any:
            return "mine"

    with Ring(potluck.DistributedConfig(["127.0.0.1:9"], 0)) as ring:
        assert DistributedContext(ring).barrier() == "mine"


def test_a_cluster_respects_it_too() -> None:
    """Although its ranks change."""

    class Node(AutoDiscoveryBackend):
        def all_reduce(self, array: Any, op: Any = "sum", **options: Any) -> Any:
            return -super().all_reduce(array, op, **options)

    alone = AutoDiscoveryConfig(job="overriding", multicast=False, solo_delay=0.0)
    with DistributedContext(Node(alone)) as cluster:
        assert cluster.all_reduce(2.0) == -2.0
