"""DistributedMetrics: everything that a process counts, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeAlias

from potluck.metrics.cells import drain, hold
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
        *("training", "state", "journal", "tell", "_began"),
    )

    def __init__(self) -> None:
        self.journal: list[tuple[Enum, float, int]] = []
        """Collectives that ended well and are not counted yet: which, its seconds, its bytes."""
        self.tell: Callable[[str], None] = lambda _: None
        """Gets a sentence for each collective that has failed, for those who look on."""
        self.all_reduce = OperationMetrics(self.work_off)
        self.reduce = OperationMetrics(self.work_off)
        self.broadcast = OperationMetrics(self.work_off)
        self.all_gather = OperationMetrics(self.work_off)
        self.reduce_scatter = OperationMetrics(self.work_off)
        self.gather = OperationMetrics(self.work_off)
        self.scatter = OperationMetrics(self.work_off)
        self.all_to_all = OperationMetrics(self.work_off)
        self.barrier = OperationMetrics(self.work_off)
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

    def work_off(self) -> None:
        """Count what is in the journal."""
        with hold():
            for kind, (seconds, sizes) in _by_kind(drain(self.journal)).items():
                operation: OperationMetrics = getattr(self, kind)
                operation.take(seconds, sizes)

    def adopt_cluster(self, other: DistributedMetrics) -> None:
        """Show here what ``other`` counts of a cluster: peers, health, elections, views, discovery.

        The two share these sections afterwards; collectives stay apart.
        """
        for name in ("peers", "health", "elections", "views", "discovery"):
            setattr(self, name, getattr(other, name))

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


def _by_kind(
    journal: Iterable[tuple[Enum, float, int]],
) -> dict[str, tuple[list[float], list[int]]]:
    """How long operations of each kind took, and their bytes."""
    kinds: dict[str, tuple[list[float], list[int]]] = {}
    last: Enum | None = None
    times: list[float] = []
    sizes: list[int] = []
    for kind, seconds, nbytes in journal:
        if kind is not last:  # most programs repeat themselves
            last = kind
            times, sizes = kinds.setdefault(kind.value, ([], []))
        times.append(seconds)
        sizes.append(nbytes)
    return kinds


SharedMetrics: TypeAlias = DistributedMetrics
"""One registry given to several contexts; Python shares objects as they are."""
