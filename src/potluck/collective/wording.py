"""Numbers for people: times, sizes, rates and proportions in a few characters."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ratio", "size", "speed", "time"]

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_SIZES = ((1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB"), (1, "B"))


def time(nanoseconds: int) -> str:
    """A duration.

    >>> time(682_021_000), time(41_300), time(0)
    ('682 ms', '41.3 µs', '0 ns')
    """
    return _scaled(nanoseconds, _TIMES)


def size(nbytes: int) -> str:
    """A number of bytes.

    >>> size(16 << 20)
    '16.8 MB'
    """
    return _scaled(nbytes, _SIZES)


def speed(rate: int) -> str:
    """Bytes per second.

    >>> speed(125_000_000)
    '125 MB/s'
    """
    return f"{size(rate)}/s"


def ratio(parts: Sequence[int]) -> str:
    """Proportions; of many, the first ones.

    >>> ratio((1, 1, 1, 0))
    '1:1:1:0'
    """
    shown = ":".join(map(str, parts[:8]))
    return shown if len(parts) <= 8 else f"{shown}:…"  # noqa: PLR2004 - what fits into a line


def _scaled(number: int, units: Sequence[tuple[int, str]]) -> str:
    scale, unit = next((each for each in units if number >= each[0]), units[-1])
    return f"{number / scale:.3g} {unit}"
