"""Clusters of several nodes in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import potluck
from potluck import Cluster
from support.threads import PATIENCE, together

Node = TypeVar("Node")
Result = TypeVar("Result")

OPTIONS: dict[str, Any] = {"multicast": False, "known": False, "solo_delay": 0.2}
"""Found by the files of neighbours alone: fast, and nothing leaves the machine."""

_numbers = itertools.count(1)


def new_job() -> str:
    """A job that no other test has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def join(min_nodes: int, job: str, **options: Any) -> Cluster:
    """One node, on a thread of its own: a thread is one node of a job at a time."""
    (node,) = together(
        lambda: potluck.join(min_nodes, job=job, timeout=PATIENCE, **{**OPTIONS, **options})
    )
    return node


@contextlib.contextmanager
def clusters(size: int, job: str | None = None, **options: Any) -> Iterator[list[Cluster]]:
    """So many nodes of one cluster, in rank order."""
    name = job or new_job()
    nodes = together(*[lambda: join(size, name, **options)] * size)
    try:
        yield sorted(nodes, key=lambda node: node.rank)
    finally:
        together(*(node.close for node in nodes))


def everywhere(nodes: Sequence[Node], call: Callable[[Node], Result]) -> list[Result]:
    """Make a call on all nodes at once; what each returned."""
    return together(*(functools.partial(call, node) for node in nodes))


def insist(call: Callable[[], Result], told: list[Exception] | None = None) -> Result:
    """Make a call until it succeeds, as a program does that goes on; what it was told is kept."""
    while True:
        try:
            return call()
        except (potluck.PeerLost, potluck.ViewChanged) as error:
            if told is not None:
                told.append(error)
