"""``potluck status --watch``: the same again whenever something changes, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["watch"]

PAUSE = 0.25
"""Seconds between two looks."""


def watch(
    console: Console,
    look: Callable[[], tuple[Any, list[RenderableType]]],
    say: Callable[[Any], None] | None,
) -> None:
    """Show what ``look`` sees: in place in a terminal, elsewhere whenever it has changed.

    ``look`` returns what is compared, and how it is drawn; with ``say`` the first is told instead.
    """
    try:
        if say is None and console.is_terminal and not console.is_dumb_terminal:
            _in_place(console, look)
        else:
            _on_change(console, look, say)
    except KeyboardInterrupt:
        return  # how one ends it


def _in_place(console: Console, look: Callable[[], tuple[Any, list[RenderableType]]]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            hint = Text("\nCtrl-C ends this.", "dim")
            live.update(Group(*look()[1], hint), refresh=True)
            time.sleep(PAUSE)


def _on_change(
    console: Console,
    look: Callable[[], tuple[Any, list[RenderableType]]],
    say: Callable[[Any], None] | None,
) -> None:
    last: Any = None
    while True:
        seen, drawn = look()
        if seen != last:
            last = seen
            if say is not None:
                say(seen)
            else:
                console.rule(time.strftime("%H:%M:%S"), align="left", characters="-")
                for each in drawn:
                    console.print(each, soft_wrap=not console.is_terminal)
                console.file.flush()
        time.sleep(PAUSE)
