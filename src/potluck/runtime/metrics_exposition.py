"""Metrics as Prometheus reads them: a collector that takes a snapshot when it is asked.

``prometheus_client`` is imported when something here is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from potluck.metrics import DistributedMetrics
from potluck.metrics.catalogue import CATALOGUE
from potluck.metrics.cells import BOUNDS
from potluck.metrics.snapshot import MetricsSnapshot, OperationSnapshot

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from potluck.metrics.families import Family

__all__ = ["CONTENT_TYPE", "MetricsCollector", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What :func:`exposition` writes: the format that every scraper reads."""


class MetricsCollector:
    """The metrics of a process, for a registry of ``prometheus_client``.

    For programs that have one anyway: ``REGISTRY.register(MetricsCollector(cluster.metrics))``.
    Numbers are looked up when somebody scrapes, so it costs nothing in between.

    >>> from prometheus_client import CollectorRegistry
    >>> from potluck import DistributedMetrics
    >>> registry, metrics = CollectorRegistry(), DistributedMetrics()
    >>> registry.register(MetricsCollector(metrics))
    >>> metrics.barrier.completed.inc()
    >>> which = {"operation": "barrier", "outcome": "completed"}
    >>> registry.get_sample_value("potluck_collective_operations_total", which)
    1
    """

    def __init__(self, metrics: DistributedMetrics | Callable[[], MetricsSnapshot]) -> None:
        self._snapshot = metrics.snapshot if isinstance(metrics, DistributedMetrics) else metrics

    def describe(self) -> list[Metric]:
        """Nothing: which metrics there are depends on what is used."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything that is known at this moment."""
        from prometheus_client import core

        makers = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        snapshot = self._snapshot()
        for family in CATALOGUE:
            metric = makers[family.kind](family.name, family.meaning, labels=family.labels)
            _fill(metric, family, snapshot)
            if metric.samples:
                yield metric


def _fill(metric: Any, family: Family, snapshot: MetricsSnapshot) -> None:
    for labels, value in family.read(snapshot):
        if isinstance(value, OperationSnapshot):
            counts = value.buckets or [0] * len(_EDGES)
            buckets = list(zip(_EDGES, accumulate(counts), strict=True))
            metric.add_metric(labels, buckets, value.seconds)
        else:
            metric.add_metric(labels, value)


# From milliseconds; "0.0025" and not "0.0025000000000000005".
_EDGES = [*(f"{bound / 1e3:.7g}" for bound in BOUNDS), "+Inf"]


def exposition(snapshot: Callable[[], MetricsSnapshot]) -> bytes:
    """The page that a scraper gets."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(snapshot))
    return generate_latest(registry)
