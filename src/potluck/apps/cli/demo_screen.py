"""How the demo looks: a live table in a terminal, plain lines elsewhere, nothing for machines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from potluck.apps.cli.demo_director import Audience
from potluck.apps.cli.demo_members import Standing

__all__ = ["LiveScreen", "PlainScreen", "SilentScreen", "open_screen", "sparkline"]

Losses = Sequence[tuple[int, float]]

LIVE_EVERY, PLAIN_EVERY = 0.1, 1.0
"""Seconds between two pictures."""

CURVE_WIDTH = 48
STYLES = {"training": "green", "done": "bold green", "killed": "bold red"}
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """A curve in one line of text; long ones are thinned out.

    >>> sparkline([4, 3, 2, 1, 0])
    '█▆▄▂▁'
    """
    if not values:
        return ""
    if len(values) > width:
        values = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((value - low) * scale)] for value in values)


def picture(members: Sequence[Standing], losses: Losses) -> Group:
    """The table, and the curve of the loss below it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("rank", "pid", "state"):
        table.add_column(title)
    for title in ("step", "own loss", "sent", "messages/s", "throughput"):
        table.add_column(title, justify="right")
    for member in members:
        table.add_row(str(member.rank), str(member.pid), _state(member), *_figures(member))
    curve = sparkline([loss for _, loss in losses])
    now = f"{losses[-1][1]:.4f}" if losses else "…"
    return Group("", table, Text.assemble("\nloss of all  ", (curve, "cyan"), f"  {now}"))


def _state(member: Standing) -> Text:
    return Text(member.state, STYLES.get(member.state, "yellow"))


def _figures(member: Standing) -> Iterator[str]:
    progress = member.progress
    if progress is None:
        return
    yield f"{progress.step:,}"
    yield f"{progress.own_loss:.4f}"
    yield _size(progress.sent)
    moving = member.state == "training"
    yield f"{progress.message_rate:,.0f}" if moving else "–"
    yield f"{_size(progress.byte_rate)}/s" if moving else "–"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"  # noqa: PLR2004


class LiveScreen:
    """For a terminal: the story scrolls, the table stays below it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._shown = 0.0

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Print above the table."""
        self._live.console.print(Text(sentence, "bold red" if grave else ""))

    def show(self, members: Sequence[Standing], losses: Losses) -> None:
        """Redraw, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._shown >= LIVE_EVERY:
            self._shown = now
            self._live.update(picture(members, losses), refresh=True)


class PlainScreen:
    """For files, pipes and simple terminals: one line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = time.monotonic()

    def say(self, sentence: str, *, grave: bool = False) -> None:  # noqa: ARG002 - words will do
        """Print a line."""
        self._console.print(Text(sentence), soft_wrap=True)

    def show(self, members: Sequence[Standing], losses: Losses) -> None:
        """One line each second."""
        now = time.monotonic()
        training = [m.progress for m in members if m.progress and m.state == "training"]
        if now - self._shown < PLAIN_EVERY or not training or not losses:
            return
        self._shown = now
        rate = sum(progress.byte_rate for progress in training) / 1e6
        messages = sum(progress.message_rate for progress in training)
        self.say(
            f"  step {losses[-1][0]:5,}  loss {losses[-1][1]:.4f}  "
            f"{len(training)} of {len(members)} train  "
            f"{messages:6,.0f} messages/s  {rate:6.1f} MB/s"
        )


class SilentScreen:
    """For machines: the report at the end says it all."""

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Nothing."""

    def show(self, members: Sequence[Standing], losses: Losses) -> None:
        """Nothing."""


@contextmanager
def open_screen(console: Console, *, silent: bool) -> Iterator[Audience]:
    """The screen that fits."""
    if silent:
        yield SilentScreen()
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield LiveScreen(live)
    else:
        yield PlainScreen(console)
