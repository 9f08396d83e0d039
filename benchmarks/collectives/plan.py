"""What is to be measured: cases, and sessions of several cases among the same processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from collectives.memory import ALL_REDUCE

__all__ = ["BACKGROUND", "MEMORY", "MIB", "ROUNDS", "Case", "Session", "octets", "words"]

MIB = 1 << 20

ROUNDS, BACKGROUND, MEMORY = "rounds", "background", "memory"
"""Kinds of sessions: contenders in turn; beside a busy thread; how much memory it takes."""

_UNITS = {"KIB": 1 << 10, "MIB": MIB, "GIB": 1 << 30, "B": 1}


@dataclass(frozen=True)
class Case:
    """One operation: ``inner`` of them make a slice, each contender has one slice in a round."""

    octets: int
    rounds: int
    collective: str = ALL_REDUCE

    @property
    def inner(self) -> int:
        """Operations in a slice: short ones are too short for the clock."""
        return 50 if self.octets <= 1 << 16 else 5 if self.octets <= MIB else 1

    @property
    def warm_up(self) -> int:
        """Operations before the first round, after the one whose result is checked."""
        return 2 if self.octets <= 16 * MIB else 1


@dataclass(frozen=True)
class Session:
    """Some cases among ``world_size`` processes that are started once."""

    place: str
    world_size: int
    contenders: tuple[str, ...]
    cases: tuple[Case, ...]
    kind: str = ROUNDS
    is_bare: bool = False
    """Whether Potluck takes part without its outer layer, ``DistributedContext``."""
    is_surveyed: bool = False
    """Whether a large operation comes before the first round, as in training: it measures links."""
    masters: dict[str, str] = field(default_factory=dict)
    """Where the group of each contender meets."""


def octets(text: str) -> int:
    """Bytes from what a person writes.

    >>> octets("64KiB"), octets("4")
    (65536, 4)
    """
    text = text.strip().upper()
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def words(size: int) -> str:
    """A size as a person writes it.

    >>> words(65536), words(4)
    ('64 KiB', '4 B')
    """
    units = (("MiB", 20), ("KiB", 10), ("B", 0))
    return next((f"{size >> by} {unit}" for unit, by in units if size >> by), "0 B")
