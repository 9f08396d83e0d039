"""Families: what a line of the catalogue of metrics is, and how it finds its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from potluck.metrics.snapshot import MetricsSnapshot, OperationSnapshot

__all__ = [
    "Family",
    "Read",
    "Sample",
    "each_operation",
    "in_cluster",
    "one",
    "outcomes",
    "tally",
    "used",
]

Sample: TypeAlias = tuple[tuple[str, ...], "float | OperationSnapshot"]
"""The values of the labels, and a number, or an operation of which the durations are meant."""

Read: TypeAlias = Callable[[MetricsSnapshot], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: one line of the catalogue."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    read: Read
    labels: tuple[str, ...] = ()


def used(snapshot: MetricsSnapshot) -> Iterator[tuple[str, OperationSnapshot]]:
    """The kinds of collectives that were used."""
    for name, each in snapshot.operations.items():
        if each.completed or each.failed:
            yield name, each


def each_operation(read: Callable[[OperationSnapshot], float]) -> Read:
    """A number of each kind of collective that was used."""
    return lambda snapshot: [((name,), read(each)) for name, each in used(snapshot)]


def one(read: Callable[[MetricsSnapshot], float | OperationSnapshot | None]) -> Read:
    """A single number; None where there is nothing to show."""

    def samples(snapshot: MetricsSnapshot) -> list[Sample]:
        value = read(snapshot)
        return [] if value is None else [((), value)]

    return samples


def tally(read: Callable[[MetricsSnapshot], Mapping[str, float]]) -> Read:
    """Numbers by a label."""
    return lambda snapshot: [((name,), value) for name, value in read(snapshot).items()]


def outcomes(read: Callable[[MetricsSnapshot], OperationSnapshot]) -> Read:
    """How often it ended well, and how often not."""

    def samples(snapshot: MetricsSnapshot) -> list[Sample]:
        each = read(snapshot)
        return [(("completed",), each.completed), (("failed",), each.failed)]

    return samples


def in_cluster(
    read: Callable[[MetricsSnapshot], float],
) -> Callable[[MetricsSnapshot], float | None]:
    """Only where there is a cluster."""
    return lambda snapshot: read(snapshot) if snapshot.views.state else None
