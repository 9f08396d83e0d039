"""Where the demo is seen: live in a terminal, as plain lines elsewhere, not at all by machines."""

from __future__ import annotations

import codecs
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from potluck.apps.cli.demo_crew import Audience
from potluck.apps.cli.demo_scene import STORY, Scene
from potluck.apps.cli.demo_view import BARS, picture, size

__all__ = ["LiveScreen", "PlainScreen", "SilentScreen", "event", "open_screen", "speak_plainly"]

LIVE_EVERY, PLAIN_EVERY = 0.1, 1.0
"""Seconds between two pictures."""


PLAIN_SIGNS = {**dict(zip(BARS, " .:-=+*#", strict=True)), "–": "-", "·": "|", "✕": "x", "↑": "^"}
"""What stands for a sign that a terminal cannot write."""


def speak_plainly(stream: object) -> None:
    """Let a stream write what it can where its encoding has no such signs, instead of failing."""
    codecs.register_error("potluck.plain", _plain)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="potluck.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # for nothing else it is given
    cut = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(sign, "?") for sign in cut), error.end


def event(seconds: float, sentence: str, *, grave: bool = False) -> Table:
    """What happened, with the time on the left of all its lines."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(Text(f"{seconds:6.2f} s", "dim"), Text(sentence, "bold red" if grave else ""))
    return line


class LiveScreen:
    """For a terminal: what happened scrolls, the picture stays below it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._shown = 0.0

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Print above the picture."""
        self._live.console.print(event(seconds, sentence, grave=grave))
        self._shown = 0.0  # what has changed is drawn at once

    def show(self, scene: Scene) -> None:
        """Redraw, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._shown >= LIVE_EVERY:
            self._shown = now
            self._live.update(picture(scene), refresh=True)


class PlainScreen:
    """For files, pipes and simple terminals: a line for what happens, and one now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = time.monotonic()

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:  # noqa: ARG002 - words will do
        """Print a line."""
        self._console.print(Text(f"{seconds:6.2f} s  {sentence}"), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """One line each second."""
        now, progress = time.monotonic(), scene.progress
        going = sum(actor.state == "training" for actor in scene.actors)
        if now - self._shown < PLAIN_EVERY or progress is None or not going:
            return
        self._shown = now
        which = "" if progress.run == STORY else "undisturbed: "
        self.say(
            scene.seconds,
            f"  {which}step {progress.step:,}, loss {progress.loss:.4f}, view {progress.epoch} "
            f"with {going} of {len(scene.actors)} nodes, {scene.speed:.0f} steps/s, "
            f"{size(scene.averaged)} averaged",
        )


class SilentScreen:
    """For machines: the report at the end says it all."""

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Nothing."""

    def show(self, scene: Scene) -> None:
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
