"""Whom operations wait for: a group sleeps, and metrics learn because of whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from potluck.backend.sub import SubBackend

if TYPE_CHECKING:
    from potluck.metrics import DistributedMetrics
    from potluck.runtime.group import Group

__all__ = ["watch_waiting"]


def watch_waiting(
    group: Group, metrics: DistributedMetrics, labels: Mapping[int, str]
) -> dict[int, float]:
    """Have a group count how long it sleeps because of each rank, in these metrics as well.

    A rank without a label, as everybody outside of a cluster, is called by its number.
    """
    backend, peers = group.backend, metrics.peers
    named = {}
    for rank in range(group.world_size):
        if rank != group.rank:
            number = backend.to_global(rank) if isinstance(backend, SubBackend) else rank
            named[rank] = labels.get(number) or peers.label(number, f"rank {number}")
    return peers.watch(named, group.count_waiting())
