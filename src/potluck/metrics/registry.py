"""DistributedMetrics: everything that a process counts, in one place."""

from __future__ import annotations

import time
from typing import TypeAlias

from potluck.metrics.operations import OperationMetrics
from potluck.metrics.peers import PeerBook
from potluck.metrics.sections import (
    CompressionMetrics,
    DiscoveryMetrics,
    ElectionMetrics,
    HealthMetrics,
    RpcMetrics,
    StateMetrics,
    TrainingMetrics,
    ViewMetrics,
)
from potluck.metrics.snapshot import OPERATIONS, MetricsSnapshot

__all__ = ["DistributedMetrics", "SharedMetrics"]


class DistributedMetrics:
    """What is counted, by all layers of a process; any number of contexts and threads may share it.

    >>> metrics = DistributedMetrics()
    >>> metrics.all_reduce.completed.inc()
    >>> metrics.snapshot().all_reduce.completed
    1
    """

    __slots__ = (
        *OPERATIONS,
        *("peers", "compression", "health", "elections", "views", "discovery", "rpc"),
        *("training", "state", "_began"),
    )

    def __init__(self) -> None:
        self.all_reduce = OperationMetrics()
        self.reduce = OperationMetrics()
        self.broadcast = OperationMetrics()
        self.all_gather = OperationMetrics()
        self.reduce_scatter = OperationMetrics()
        self.gather = OperationMetrics()
        self.scatter = OperationMetrics()
        self.all_to_all = OperationMetrics()
        self.barrier = OperationMetrics()
        self.peers = PeerBook()
        self.compression = CompressionMetrics()
        self.health = HealthMetrics()
        self.elections = ElectionMetrics()
        self.views = ViewMetrics()
        self.discovery = DiscoveryMetrics()
        self.rpc = RpcMetrics()
        self.training = TrainingMetrics()
        self.state = StateMetrics()
        self._began = time.monotonic()

    def snapshot(self) -> MetricsSnapshot:
        """All numbers as they are now."""
        return MetricsSnapshot(
            time=time.time(),
            uptime=time.monotonic() - self._began,
            peers=self.peers.snapshot(),
            compression=self.compression.snapshot(),
            health=self.health.snapshot(),
            elections=self.elections.snapshot(),
            views=self.views.snapshot(),
            discovery=self.discovery.snapshot(),
            rpc=self.rpc.snapshot(),
            training=self.training.snapshot(),
            state=self.state.snapshot(),
            **{name: getattr(self, name).snapshot() for name in OPERATIONS},
        )


SharedMetrics: TypeAlias = DistributedMetrics
"""One registry given to several contexts; Python shares objects as they are."""
