"""The links of a job as its members measured them, and the shortest way round them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from potluck.apps.cli.status_facts import JobStatus
from potluck.runtime.observing_journal import Journal
from potluck.vocabulary import LinkMatrix

__all__ = ["links_of", "name_key", "ring_of"]

Key: TypeAlias = tuple[str, int]

MAX_LINKS = 600
"""Links in one picture: all of 25 nodes.  Of a hundred there are ten thousand."""

LARGEST = (1 << 32) - 1
"""Nanoseconds that a link matrix can hold."""


def name_key(key: Key) -> str:
    """A process, in one word."""
    return f"{key[0]}/{key[1]}"


def links_of(
    job: JobStatus, journals: Mapping[Key, Journal], ring: Sequence[str]
) -> list[dict[str, Any]]:
    """Every link as each of its ends sees it; of very many, those of the ring and the bad ones."""
    found = _all_links(job, journals)
    if len(found) <= MAX_LINKS:
        return found
    after = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
    kept = [
        each
        for each in found
        if each["status"] != "healthy" or after.get(each["from"]) == each["to"]
    ]
    return kept[:MAX_LINKS]


def _all_links(job: JobStatus, journals: Mapping[Key, Journal]) -> list[dict[str, Any]]:
    ranks = {(each.node, each.incarnation): rank for rank, each in enumerate(job.authority.members)}
    found = []
    for report in job.reports:
        journal = journals.get(report.key)
        for line in report.peers:
            target = (line.node, line.incarnation)
            rank = ranks.get(target)
            times = journal.latency if journal is not None else []
            latency = times[rank] if rank is not None and rank < len(times) else 0
            found.append(
                {
                    "from": name_key(report.key),
                    "to": name_key(target),
                    "address": line.address,
                    "status": line.status,
                    "reason": line.reason,
                    "round_trip": line.round_trip,
                    "latency": latency * 1e-9 if latency else None,
                }
            )
    return found


def ring_of(job: JobStatus, journals: Mapping[Key, Journal]) -> list[str]:
    """The members in the order in which the way round is shortest, by what they measured."""
    members = [(each.node, each.incarnation) for each in job.authority.members]
    rows = [journals.get(each) for each in members]
    if len(members) < 3:  # noqa: PLR2004 - of two there is one order
        return [name_key(each) for each in members]
    known = [row for row in rows if row is not None and len(row.latency) == len(members)]
    if len(known) < len(members) or any(row.up <= 0 for row in known):
        return [name_key(each) for each in members]
    matrix = LinkMatrix(
        tuple(row.up for row in known),
        tuple(max(0, row.down) for row in known),
        tuple(tuple(min(max(0, time), LARGEST) for time in row.latency) for row in known),
    )
    return [name_key(members[rank]) for rank in _order(matrix)]


@functools.lru_cache(maxsize=16)
def _order(matrix: LinkMatrix) -> tuple[int, ...]:
    from potluck.collective.planner import Planner

    return tuple(Planner(matrix).ring)
