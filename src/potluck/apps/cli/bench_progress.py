"""How far a measurement is: a moving line in a terminal, a few lines elsewhere; on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["open_progress"]


@contextmanager
def open_progress(*, silent: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that is told at every step what comes now."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if silent:
        yield lambda _what: None
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=None)
            yield lambda what: progress.update(task, description=what)
    else:
        yield _lines()


def _lines() -> Callable[[str], None]:
    """One line for each part, not for each step of it."""
    import typer

    last = ""

    def show(what: str) -> None:
        nonlocal last
        part = "the algorithms" if " on " in what else what.partition(" by ")[0]
        if part != last:
            last = part
            typer.echo(f"potluck: {part}", err=True)

    return show
