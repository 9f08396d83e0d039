"""Metrics: what a process counts about everything that it does with others.

One :class:`DistributedMetrics` for a process, written by all layers and read as a
:class:`MetricsSnapshot`.  Busy places only append to a journal, which takes no lock; whoever reads
works it off.  What there is, is listed in :mod:`potluck.metrics.catalogue`.
"""

from __future__ import annotations

from potluck.metrics.cells import Counter, Gauge, Histogram, Tally
from potluck.metrics.operations import OperationMetrics
from potluck.metrics.registry import DistributedMetrics, SharedMetrics
from potluck.metrics.snapshot import MetricsSnapshot, OperationSnapshot, PeerSnapshot

__all__ = [
    "Counter",
    "DistributedMetrics",
    "Gauge",
    "Histogram",
    "MetricsSnapshot",
    "OperationMetrics",
    "OperationSnapshot",
    "PeerSnapshot",
    "SharedMetrics",
    "Tally",
]
