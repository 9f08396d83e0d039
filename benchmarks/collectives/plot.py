"""A picture of the all-reduces: time over size, both on logarithmic scales, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from collectives.contenders import GLOO, OPEN_MPI, PLAIN, SEALED
from collectives.memory import ALL_REDUCE
from collectives.places import LOOPBACK
from collectives.plan import words
from collectives.report import Row
from collectives.tables import duration

__all__ = ["draw_plot"]

COLOURS = {PLAIN: "#0b7285", SEALED: "#2f9e44", GLOO: "#e8590c", OPEN_MPI: "#868e96"}
WIDTH, HEIGHT = 480, 300  # of one panel
LEFT, TOP, GAP = 64, 52, 84

Point = tuple[float, float]


class Scale:
    """From a range of values to a range of the picture, by their logarithms."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        self._low, high = math.log(min(values)), math.log(max(values))
        self._start, self._factor = start, (stop - start) / max(1e-9, high - self._low)

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self._start + (math.log(value) - self._low) * self._factor


def draw_plot(rows: Sequence[Row]) -> str:
    """One panel for each world size."""
    shown = [row for row in rows if (row["place"], row["collective"]) == (LOOPBACK, ALL_REDUCE)]
    worlds = sorted({row["world_size"] for row in shown})
    parts = list(_legend(shown))
    for number, world in enumerate(worlds):
        panel = [row for row in shown if row["world_size"] == world]
        parts += _panel(panel, LEFT + number * (WIDTH + GAP))
    width, height = LEFT + len(worlds) * (WIDTH + GAP) - GAP + 24, TOP + HEIGHT + 48
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    style = 'font-family="sans-serif" font-size="11" fill="#495057">'
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head + style, paper, *parts, "</svg>", ""])


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    names = [name for name in COLOURS if any(name in row["median_seconds"] for row in rows)]
    for number, name in enumerate(names):
        x = LEFT + number * 120
        yield f'<circle cx="{x}" cy="16" r="4" fill="{COLOURS[name]}"/>'
        yield _text(x + 9, 20, name)


def _panel(rows: Sequence[Row], left: float) -> Iterator[str]:
    sizes = sorted({row["octets"] for row in rows})
    times = [seconds for row in rows for seconds in row["median_seconds"].values()]
    across = Scale(sizes, left, left + WIDTH)
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    up = Scale([10.0**low, 10.0**high], TOP + HEIGHT, TOP)
    yield _text(left, TOP - 12, f"{rows[0]['world_size']} ranks, loopback", weight="bold")
    for power in range(low, high + 1):
        y = up(10.0**power)
        yield _line([(left, y), (left + WIDTH, y)], "#dee2e6", 1)
        yield _text(left - 6, y + 4, duration(10.0**power), anchor="end")
    for size in sizes:
        yield _text(across(size), TOP + HEIGHT + 18, words(size), anchor="middle", size=10)
    for name, colour in COLOURS.items():
        points = [
            (across(row["octets"]), up(row["median_seconds"][name]))
            for row in sorted(rows, key=lambda row: int(row["octets"]))
            if name in row["median_seconds"]
        ]
        if points:
            yield _line(points, colour, 2)
            for x, y in points:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'


def _line(points: Sequence[Point], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "normal"
) -> str:
    form = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {form}>{escape(text)}</text>'
