"""How far a measurement is: a bar in a terminal, a few lines elsewhere; always on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["open_progress"]


@contextmanager
def open_progress(*, silent: bool = False) -> Iterator[Callable[[str, int], None]]:
    """A function that is told at every step what comes now, and how many steps there are."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if silent:
        yield lambda _what, _steps: None
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=None)
            made = -1

            def show(what: str, steps: int) -> None:
                nonlocal made
                made += 1
                progress.update(task, description=what, total=steps, completed=made)

            yield show
    else:
        yield _lines()


def _lines() -> Callable[[str, int], None]:
    """One line for each part, not for each step of it."""
    import typer

    last = ""

    def show(what: str, _steps: int) -> None:
        nonlocal last
        part = "the algorithms" if " on " in what else what.partition(" by ")[0]
        if part != last:
            last = part
            typer.echo(f"potluck: {part}", err=True)

    return show
