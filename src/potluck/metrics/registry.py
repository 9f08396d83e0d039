"""DistributedMetrics: everything that a process counts, in one place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, TypeAlias

from potluck.metrics.cells import hold
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
        *("training", "state", "journal", "records", "_began"),
    )

    def __init__(self) -> None:
        self.journal: list[tuple[Enum, float, int]] = []
        """Collectives that ended well and are not counted yet: which, its seconds, its bytes."""
        self.records: list[tuple[tuple[Any, ...], float]] = []
        """The same, as the flight recorder has them, and when they ended.

        Nothing is worked out on the way of an operation: what, begin, end, number, bytes of an
        element, epoch, and the label of a group, which knows its ranks.
        """
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
        with hold():  # only who holds it takes something out; others may append meanwhile
            count = len(self.records)
            records = self.records[:count]
            del self.records[:count]
            count = len(self.journal)
            taken = self.journal[:count]
            del self.journal[:count]
            taken += _read(records)
            for kind, (seconds, sizes) in _by_kind(taken).items():
                operation: OperationMetrics = getattr(self, kind)
                operation.take(seconds, sizes)

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


def _read(records: Iterable[tuple[tuple[Any, ...], float]]) -> Iterator[tuple[Enum, float, int]]:
    """What the flight recorder knows of calls, as the journal has it."""
    task, size, label, nbytes = None, 0, None, 0
    for record, end in records:
        if record[0] is not task or record[4] != size or record[6] is not label:
            task, size, label = record[0], record[4], record[6]
            nbytes = _size_of(record)  # which takes long, but most programs repeat themselves
        yield record[0].collective, end - record[1], nbytes


def _size_of(record: tuple[Any, ...]) -> int:
    """Bytes of what this rank gave or got, whichever is more."""
    task, label = record[0], record[6]
    rank = label.members.index(label.rank) if label.members else label.rank
    elements: int = max(task.input(rank).length, task.output(rank).length)
    return elements * int(record[4])


def _by_kind(
    journal: Iterable[tuple[Enum, float, int]],
) -> dict[str, tuple[list[float], list[int]]]:
    """How long operations of each kind took, and their bytes."""
    kinds: dict[str, tuple[list[float], list[int]]] = {}
    last: Enum | None = None
    times: list[float] = []
    sizes: list[int] = []
    for kind, seconds, nbytes in journal:
        if kind is not last:
            last = kind
            times, sizes = kinds.setdefault(kind.value, ([], []))
        times.append(seconds)
        sizes.append(nbytes)
    return kinds


SharedMetrics: TypeAlias = DistributedMetrics
"""One registry given to several contexts; Python shares objects as they are."""
