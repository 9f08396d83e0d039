"""Metrics of process groups: one registry for all groups of a process, served if that is wished."""

from __future__ import annotations

import atexit
from functools import cache

from potluck.metrics import DistributedMetrics
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.metrics_endpoint import MetricsEndpoint

__all__ = ["process_metrics"]


@cache
def process_metrics() -> DistributedMetrics:
    """Where all process groups of this process count.

    With ``POTLUCK_METRICS_PORT`` they can be read over HTTP from the first group on.
    """
    metrics = DistributedMetrics()
    address = AutoDiscoveryConfig().metrics_address
    if address is not None:
        host, port = address
        atexit.register(MetricsEndpoint(metrics, port, host).close)
    return metrics
