"""What is wanted of collectives, and what was reached of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collectives.contenders import GLOO, OPEN_MPI, PLAIN, SEALED
from collectives.memory import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from collectives.places import EQUAL, LIMIT, LOOPBACK, UNEQUAL
from collectives.plan import MIB, words
from collectives.report import Row

__all__ = ["BACKGROUND_RATE", "EXTRA_MEMORY", "TARGETS", "Target", "judge"]

BACKGROUND_RATE = 125e6
"""Bytes per second, at least, beside a busy thread."""

EXTRA_MEMORY = 8 * MIB
"""Bytes, at most, beyond the array itself."""


@dataclass(frozen=True)
class Target:
    """``ours`` shall be at least ``at_least`` times as fast as ``theirs``, in each such case."""

    name: str
    ours: str
    theirs: str
    at_least: float
    smallest: int = 0
    largest: int = 1 << 40
    worlds: tuple[int, ...] = (2, 4)
    place: str = LOOPBACK
    collective: str = ALL_REDUCE

    def covers(self, row: Row) -> bool:
        """Whether a row is one of these cases."""
        return (
            row["place"] == self.place
            and row["collective"] == self.collective
            and row["world_size"] in self.worlds
            and self.smallest <= row["octets"] <= self.largest
        )


LARGE = 16 * MIB

TARGETS = [
    Target("plain, 4 B to 1 MiB", PLAIN, GLOO, 2.5, 4, MIB),
    Target("plain, 2 ranks, 4 to 256 MiB", PLAIN, GLOO, 1.3, 4 * MIB, worlds=(2,)),
    Target("plain, 4 ranks, 4 to 16 MiB", PLAIN, GLOO, 1.3, 4 * MIB, LARGE, worlds=(4,)),
    Target("plain, 4 ranks, 64 and 256 MiB", PLAIN, GLOO, 1.15, 64 * MIB, worlds=(4,)),
    Target("plain, 16 MiB and more", PLAIN, OPEN_MPI, 1.0, LARGE),
    Target("sealed, 2 ranks, 16 MiB and more", SEALED, GLOO, 0.95, LARGE, worlds=(2,)),
    Target("sealed, 4 ranks, 16 MiB and more", SEALED, GLOO, 0.85, LARGE, worlds=(4,)),
    Target(f"{EQUAL}, sealed", SEALED, LIMIT, 0.97, LARGE, place=EQUAL),
    Target(f"{UNEQUAL}, sealed", SEALED, GLOO, 1.4, LARGE, place=UNEQUAL),
    Target(f"{UNEQUAL}, sealed", SEALED, LIMIT, 0.9, LARGE, place=UNEQUAL),
    *(
        Target(
            f"plain, {collective.replace('_', '-')}, 4 ranks, 64 MiB",
            *(PLAIN, GLOO, 1.15, 64 * MIB),
            worlds=(4,),
            collective=collective,
        )
        for collective in (REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)
    ),
]


def judge(rows: Iterable[Row], figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every target with the case in which we are furthest behind; and the single figures."""
    rows = list(rows)
    judged = [_judge(target, rows) for target in TARGETS]
    for figure in figures:
        high = figure["wanted"].startswith("≥")
        value, bar = figure["value"], figure["bar"]
        judged.append({**figure, "met": value >= bar if high else value <= bar})
    return judged


def _judge(target: Target, rows: list[Row]) -> dict[str, Any]:
    found = [
        (each["ratio"], row)
        for row in rows
        if target.covers(row)
        for each in row["ratios"]
        if (each["of"], each["against"]) == (target.ours, target.theirs)
    ]
    facts: dict[str, Any] = {
        "name": target.name,
        "against": target.theirs,
        "bar": target.at_least,
        "wanted": f"≥ {target.at_least:g} ×",
        "cases": len(found),
        "cases_met": sum(ratio >= target.at_least for ratio, _ in found),
    }
    if not found:
        return {**facts, "value": None, "reached": "not measured", "met": None}
    worst, row = min(found, key=lambda each: each[0])
    reached = f"{worst:.2f} × ({row['world_size']} ranks, {words(row['octets'])})"
    return {**facts, "value": worst, "reached": reached, "met": worst >= target.at_least}
