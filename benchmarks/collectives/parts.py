"""The parts of the benchmark; each can be run alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from collectives.contenders import FLAT, GLOO, PINNED, PLAIN, SEALED
from collectives.launch import Place, run_session
from collectives.memory import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from collectives.places import (
    CABLES,
    EQUAL,
    LIMIT,
    LOOPBACK,
    MACHINES,
    UNEQUAL,
    four_hosts,
    machines,
)
from collectives.plan import BACKGROUND, MEMORY, MIB, Case, Session, words
from collectives.report import Row, quartiles, rows
from collectives.targets import BACKGROUND_RATE, EXTRA_MEMORY

__all__ = ["PARTS", "Run", "Wishes"]

SIZES = (4, 1 << 10, 1 << 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
SIBLINGS = (REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)
MACHINE_SIZES = (4, 1 << 10, 1 << 16, MIB, 16 * MIB, 64 * MIB)
HOST_SIZES = {EQUAL: (16 * MIB, 64 * MIB), UNEQUAL: (16 * MIB,)}

Tables = Iterator[tuple[str, list[Row], list[str]]]


@dataclass(frozen=True)
class Wishes:
    """What is to be measured, as far as it was said."""

    ours: tuple[str, ...] = (PLAIN, SEALED)
    peers: tuple[str, ...] = ()
    worlds: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = ()
    """None means those of each part."""
    rounds: int | None = None
    is_quick: bool = False
    is_bare: bool = False
    strategies: tuple[str, ...] = ()
    """What is compared among machines; none means the usual flat ones."""
    megabits: int | None = None
    """Of cables between machines; slower ones are the limit on a busy computer too."""

    def sizes_or(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        """The wanted sizes, or the usual ones; large ones take too long for a glance."""
        chosen = self.sizes or usual
        return tuple(s for s in chosen if s <= 16 * MIB) if self.is_quick else chosen

    def case(self, size: int, collective: str = ALL_REDUCE, *, at_most: int = 31) -> Case:
        """A case, with fewer rounds the longer they take."""
        usual = 31 if size <= MIB else 15 if size <= 16 * MIB else 9
        usual = min(usual, at_most)
        return Case(size, self.rounds or (min(5, usual) if self.is_quick else usual), collective)


@dataclass
class Run:
    """What has been measured so far."""

    wishes: Wishes
    rows: list[Row] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def measure(
        self, session: Session, place: Place, bounds: dict[str, float] | None = None
    ) -> list[Row]:
        """Run a session and keep its rows."""
        session = replace(session, is_bare=self.wishes.is_bare)
        made = rows(session, run_session(session, place), bounds)
        self.rows += made
        return made


def on_loopback(run: Run) -> Tables:
    """All-reduces of all sizes."""
    wishes = run.wishes
    names = (*wishes.ours, *wishes.peers)
    for world in wishes.worlds:
        cases = tuple(wishes.case(size) for size in wishes.sizes_or(SIZES))
        session = Session(LOOPBACK, world, names, cases)
        yield f"All-reduce among {world} ranks over loopback", run.measure(session, Place()), []


def siblings(run: Run) -> Tables:
    """The other collectives on large vectors."""
    wishes = run.wishes
    sizes = wishes.sizes or ((4 * MIB,) if wishes.is_quick else (64 * MIB,))
    cases = tuple(wishes.case(size, name) for name in SIBLINGS for size in sizes)
    session = Session(LOOPBACK, 4, (*wishes.ours, *wishes.peers), cases)
    yield "Other collectives among 4 ranks over loopback", run.measure(session, Place()), []


def on_hosts(run: Run) -> Tables:
    """Four machines with cables; what matters there is encryption, so only that."""
    wishes = run.wishes
    names = (
        *(name for name in wishes.ours if name == SEALED or len(wishes.ours) == 1),
        *wishes.peers,
    )
    for place, cables in CABLES.items():
        title = f"All-reduce among {place}"
        cases = tuple(wishes.case(size, at_most=7) for size in wishes.sizes_or(HOST_SIZES[place]))
        try:
            with four_hosts(cables) as (hosts, bound, source):
                session = Session(place, len(cables.megabits), names, cases)
                made = run.measure(session, hosts, {LIMIT: bound})
            yield title, made, [source]
        except (OSError, RuntimeError) as error:
            run.left_out[place] = str(error)
            yield title, [], [f"This was not measured: {error}"]


def on_machines(run: Run) -> Tables:
    """Several ranks on each machine: two levels beside flat plans, and what crosses the cable."""
    wishes = run.wishes
    pinned = wishes.strategies or ("ring", "tree:1", "direct")
    names = (PLAIN, FLAT, *(f"{PINNED}{each}" for each in pinned))
    names += tuple(name for name in wishes.peers if name == GLOO)
    for place, usual in MACHINES.items():
        which = replace(usual, megabits=wishes.megabits or usual.megabits)
        title = f"All-reduce among {place}, {which.megabits} Mbit/s"
        cases = tuple(wishes.case(size, at_most=9) for size in wishes.sizes_or(MACHINE_SIZES))
        try:
            with machines(which) as (hosts, bound, source):
                session = Session(place, sum(which.ranks), names, cases)
                session = replace(session, is_surveyed=True)
                made = run.measure(session, hosts, {LIMIT: bound})
            yield title, made, [source]
        except (OSError, RuntimeError) as error:
            run.left_out[place] = str(error)
            yield title, [], [f"This was not measured: {error}"]


def in_background(run: Run) -> Tables:
    """Asynchronous operations beside a busy thread."""
    wishes = run.wishes
    size = (wishes.sizes or (64 * MIB,))[0]
    case = wishes.case(size, at_most=7)
    session = Session(LOOPBACK, 2, wishes.ours, (case,), BACKGROUND)
    seen = run_session(session, Place())
    for first, second in zip(*seen, strict=True):
        slower = [min(each) for each in zip(first["rates"], second["rates"], strict=True)]
        rate = statistics.median(slower)
        low, high = quartiles(slower)
        run.figures.append(
            {
                "name": f"{_kind(first)}, asynchronous {words(size)} beside a busy thread, 2 ranks",
                "against": "",
                "value": rate,
                "quartiles": [low, high],
                "unit": "B/s",
                "bar": BACKGROUND_RATE,
                "wanted": f"≥ {BACKGROUND_RATE / 1e6:.0f} MB/s",
                "reached": f"{rate / 1e6:.0f} MB/s ({low / 1e6:.0f}–{high / 1e6:.0f})",
            }
        )
    yield from ()


def in_memory(run: Run) -> Tables:
    """How much a large operation needs beyond its array."""
    wishes = run.wishes
    size = (wishes.sizes or ((16 if wishes.is_quick else 256) * MIB,))[0]
    for world in wishes.worlds:
        for name in wishes.ours:
            session = Session(LOOPBACK, world, (name,), (wishes.case(size),), MEMORY)
            seen = run_session(session, Place())
            grown = max(results[0]["grown"] for results in seen)
            run.figures.append(
                {
                    "name": f"{_kind(seen[0][0])}, extra memory of {words(size)}, {world} ranks",
                    "against": "",
                    "value": grown,
                    "unit": "B",
                    "bar": EXTRA_MEMORY,
                    "wanted": f"≤ {EXTRA_MEMORY / MIB:.0f} MiB",
                    "reached": f"{grown / MIB:.1f} MiB",
                }
            )
    yield from ()


def _kind(result: dict[str, Any]) -> str:
    return "plain" if result["contender"] == PLAIN else "sealed"


PARTS: dict[str, Callable[[Run], Tables]] = {
    "loopback": on_loopback,
    "siblings": siblings,
    "hosts": on_hosts,
    "machines": on_machines,
    "background": in_background,
    "memory": in_memory,
}
