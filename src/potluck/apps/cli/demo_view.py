"""The demo's picture: nodes, links and curves, for a terminal of 80 columns and more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from potluck.apps.cli.demo_scene import STORY, UNDISTURBED, Actor, Link, Scene

__all__ = ["BARS", "link_words", "picture", "size", "sparkline", "table"]

STYLES = {
    **dict.fromkeys(("training", "healthy"), "green"),
    "done": "bold green",
    **dict.fromkeys(("killed", "dead"), "bold red"),
    **dict.fromkeys(
        ("degraded", "suspect", "starting", "starting again", "looking around"), "yellow"
    ),
}

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
TINY = 1e-6
"""No loss is drawn as less."""

FIGURES = ("step", "share", "averaged", "rate")

MOST_LINKS = 6
"""Links that are listed; of more, the slowest."""


def sparkline(points: Sequence[tuple[int, float]], last: int, low: float, high: float) -> str:
    """Values by step as a line of text, on a scale that several lines can share.

    >>> sparkline([(1, 4.0), (25, 2.0), (50, 0.0)], last=100, low=0.0, high=4.0)
    '████████████▄▄▄▄▄▄▄▄▄▄▄▄▁'
    """
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    columns: dict[int, str] = {}
    for step, value in points:
        columns[_column(step, last)] = BARS[int((min(max(value, low), high) - low) * scale)]
    line, bar = "", BARS[0]
    for column in range(max(columns, default=-1) + 1):
        bar = columns.get(column, bar)
        line += bar
    return line


def _column(step: int, last: int) -> int:
    return min(CURVE_WIDTH, step * CURVE_WIDTH // max(1, last))


def size(count: float) -> str:
    """Bytes for people.

    >>> size(800_000), size(98_765_432_100)
    ('0.8 MB', '98.8 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"  # noqa: PLR2004


def table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table with columns that begin on the left, and columns of figures."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for title in left:
        made.add_column(title)
    for title in right:
        made.add_column(title, justify="right")
    return made


def picture(scene: Scene) -> Group:
    """Everything at a glance."""
    return Group(
        "",
        _nodes(scene),
        *_remarks(scene),
        "",
        *_links(scene),
        *_curves(scene),
        Text(_status(scene), "dim"),
    )


def _nodes(scene: Scene) -> Table:
    nodes = table(("rank", "node", "state", "health"), FIGURES)
    for actor in scene.actors:
        health = scene.health(actor)
        cells = (
            actor.name,
            actor.state,
            health.status if health and actor.state != "killed" else "",
        )
        progress = actor.progress
        is_going = progress is not None and actor.state != "killed"
        rank = str(progress.rank) if progress and is_going else "–"
        row = [Text(cell, STYLES.get(cell, "")) for cell in (rank, *cells)]
        nodes.add_row(*row, *_figures(actor))
    return nodes


def _figures(actor: Actor) -> Iterator[str]:
    if actor.progress is not None:
        yield f"{actor.progress.step:,}"
        yield str(actor.progress.share) if actor.state != "killed" else "–"
        yield size(actor.progress.averaged)
        yield f"{size(actor.progress.rate)}/s" if actor.state != "killed" else "–"


def _remarks(scene: Scene) -> Iterator[Text]:
    """What ``potluck status`` says of those who are not well."""
    for actor in scene.actors:
        if actor.reason:
            yield Text(actor.reason, "yellow")
        health = scene.health(actor)
        if health is not None and health.status != "healthy":
            yield Text(f"{actor.name} is {health.status}: {health.reason}", "yellow")


def _links(scene: Scene) -> Iterator[Table | Text]:
    found = sorted(scene.links(), key=lambda link: link.round_trip or 0.0, reverse=True)
    if not found:
        return
    shown = sorted(found[:MOST_LINKS], key=lambda link: link.ends)
    links = table(("link",), ("round trip", "rate"))
    for link in shown:
        links.add_row(*link_words(link))
    yield links
    if len(found) > len(shown):
        yield Text(f"and {len(found) - len(shown)} more, which are no slower", "dim")
    yield Text("")


def link_words(link: Link) -> tuple[str, str, str]:
    """Between whom, how long, and how much.

    >>> link_words(Link(("basil", "sage"), 0.0021, 118_000_000))
    ('basil – sage', '2.1 ms', '118 MB/s')
    """
    trip = "" if link.round_trip is None else f"{link.round_trip * 1e3:.1f} ms"
    rate = f"{link.rate / 1e6:.0f} MB/s" if link.is_limit else "not a limit"
    return " – ".join(link.ends), trip, rate if link.rate else ""


def _curves(scene: Scene) -> Iterator[Text]:
    """Both curves on one scale, and below them where somebody went and came."""
    # By magnitude: what a loss still gains when it is small would be flat otherwise.
    curves = {
        run: [(step, math.log(max(loss, TINY))) for step, loss in losses]
        for run, losses in scene.losses.items()
    }
    everything = [point for curve in curves.values() for point in curve]
    last = max([scene.steps, *(step for step, _ in everything)])
    values = [value for _, value in everything] or [0.0]
    for run, title in ((STORY, "loss"), (UNDISTURBED, "undisturbed")):
        losses = scene.losses.get(run, [])
        if losses or run == STORY:
            curve = sparkline(curves.get(run, []), last, min(values), max(values))
            now = f"{losses[-1][1]:.4f}" if losses else "…"
            style = "cyan" if run == STORY else "blue"
            yield Text.assemble(f"{title:<12}", (curve, style), f"  {now}")
    signs = [" "] * (CURVE_WIDTH + 1)
    for step, sign in scene.marks:
        signs[_column(step, last)] = sign
    yield Text(" " * 12 + "".join(signs).rstrip(), "bold red")


def _status(scene: Scene) -> str:
    progress = scene.progress
    if progress is None:
        return f"{scene.seconds:.1f} s"
    pace = ", slowed down to be watched" if progress.run == STORY else ", at full speed"
    return (
        f"view {progress.epoch} · step {progress.step:,} · {scene.speed:.0f} steps/s{pace} · "
        f"{scene.seconds:.1f} s"
    )
