"""Figures from what the ranks saw: medians, ratios, what was wanted and whether it was reached."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from collectives.contenders import GLOO, OPEN_MPI, PINNED, PLAIN, SEALED
from collectives.plan import Session

__all__ = ["Row", "quartiles", "rows"]

Row = dict[str, Any]
PAIRS = ((PLAIN, GLOO), (SEALED, GLOO), (PLAIN, OPEN_MPI), (SEALED, OPEN_MPI))


def rows(
    session: Session, seen: Sequence[list[dict[str, Any]]], bounds: dict[str, float] | None = None
) -> list[Row]:
    """One row per case; ``bounds`` are seconds per byte that nobody can be faster than, by name."""
    made = []
    for number, first in enumerate(seen[0]):
        each = [results[number]["seconds"] for results in seen]
        # An operation has taken as long as it took the slowest rank.
        seconds = {
            name: [max(turn) for turn in zip(*(s[name] for s in each), strict=True)]
            for name in first["seconds"]
        }
        limits = {name: each * first["octets"] for name, each in (bounds or {}).items()}
        made.append(
            {
                "place": session.place,
                "world_size": session.world_size,
                "collective": first["collective"],
                "octets": first["octets"],
                "rounds": first["rounds"],
                "plans": {name: plan for name, plan in first["plans"].items() if plan},
                "median_seconds": {n: statistics.median(taken) for n, taken in seconds.items()},
                "bound_seconds": limits,
                "cable_bytes": _crossed([results[number].get("cable", {}) for results in seen]),
                "ratios": _ratios(seconds, limits),
            }
        )
    return made


def _crossed(seen: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Bytes that an operation sent on the busiest cable, by contender."""
    return {name: max(statistics.median(each[name]) for each in seen) for name in (seen[0] or {})}


def _ratios(seconds: dict[str, list[float]], limits: dict[str, float]) -> list[dict[str, Any]]:
    """How many times faster Potluck is, from each round's own ratio."""
    ratios = []
    pairs = [
        *PAIRS,
        *((PLAIN, name) for name in seconds if name.startswith(PINNED)),
        *((ours, limit) for limit in limits for ours in (PLAIN, SEALED, GLOO, OPEN_MPI)),
    ]
    for ours, theirs in pairs:
        if ours not in seconds or not (theirs in seconds or theirs in limits):
            continue
        others = seconds.get(theirs) or [limits[theirs]] * len(seconds[ours])
        each = [other / mine for mine, other in zip(seconds[ours], others, strict=True)]
        ratios.append(
            {
                "of": ours,
                "against": theirs,
                "ratio": statistics.median(each),
                "quartiles": quartiles(each),
            }
        )
    return ratios


def quartiles(values: Sequence[float]) -> list[float]:
    """The middle half lies between these."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4]]
