"""Metrics of process groups: all groups of a process count in one place."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from potluck import SimulatedBackend
from potluck.runtime import metrics_endpoint
from potluck.runtime.metrics_endpoint import process_metrics
from potluck.training.process_group import ProcessGroup
from support.threads import PATIENCE, eventually, together


@pytest.fixture
def fresh() -> Iterator[None]:
    """As in a process that has had no group yet."""
    process_metrics.cache_clear()
    yield
    process_metrics.cache_clear()


def reduce_on_two_ranks() -> None:
    """Once at once, once started and waited for."""
    groups = [
        ProcessGroup(backend, timedelta(seconds=20), "pair")
        for backend in SimulatedBackend.create_group(2)
    ]
    try:
        together(*(lambda each=group: each.allreduce(torch.ones(4)).wait() for group in groups))
        together(*(lambda each=group: each.barrier().wait() for group in groups))
    finally:
        for group in groups:
            group.shutdown()


def test_operations_of_all_groups_are_counted(fresh: None) -> None:
    """What is under way counts when it ends, on the thread that ends it."""
    reduce_on_two_ranks()
    reduce_on_two_ranks()
    metrics = process_metrics()
    eventually(lambda: metrics.snapshot().all_reduce.completed == 4)
    eventually(lambda: metrics.snapshot().barrier.completed == 4)
    assert metrics.snapshot().all_reduce.bytes_processed == 4 * 16


def test_they_are_served_where_the_environment_says_so(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script for PyTorch needs no change to be watched."""
    endings: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", endings.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.create_server((metrics_endpoint.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("POTLUCK_METRICS_PORT", str(port))
    try:
        reduce_on_two_ranks()
        url = f"http://127.0.0.1:{port}/metrics"
        page = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()
        assert "potluck_uptime_seconds" in page
    finally:
        (end,) = endings
        end()
