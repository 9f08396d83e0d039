"""How waiting for a run looks: a live table in a terminal, lines elsewhere, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from potluck.apps.cli.run_gathering import Gathering, labels

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

__all__ = ["Screen", "open_screen"]


class Screen(Protocol):
    """Where one sees who is here."""

    def show(self, gathering: Gathering) -> None:
        """Show what is known now; called often."""

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Say something once."""


class _Lines:
    """For files, pipes and simple terminals: one line for each change."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, gathering: Gathering) -> None:
        """A line, if something has changed."""
        line = gathering.status_line()
        if line != self._last:
            self._last = line
            self.say(line)

    def say(self, sentence: str, *, grave: bool = False) -> None:  # noqa: ARG002 - words will do
        """Print a line."""
        import typer

        typer.echo(f"potluck: {sentence}", err=True)


class _Json:
    """For programs: one JSON object in a line for each change."""

    def __init__(self) -> None:
        self._last: object = None

    def show(self, gathering: Gathering) -> None:
        """An object, if something has changed."""
        names = labels(gathering.here)
        here = [
            {"name": names[each.key], "id": each.node, "state": each.state, "facts": each.facts}
            for each in gathering.here
        ]
        facts = {"wanted": gathering.wanted, "here": here, "missing": gathering.missing}
        if facts != self._last:
            self._last = facts
            self._print(facts)

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """An object with a sentence."""
        self._print({"error" if grave else "note": sentence})

    @staticmethod
    def _print(facts: object) -> None:
        import msgspec
        import typer

        typer.echo(msgspec.json.encode(facts).decode(), err=True)


@contextmanager
def open_screen(*, json: bool) -> Iterator[Screen]:
    """The screen that fits; all of it is on standard error, for the output is the script's."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if json:
        yield _Json()
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False, transient=False) as live:
            yield _Table(live)
    else:
        yield _Lines()


class _Table:
    """For a terminal: a table that changes in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last = ""

    def show(self, gathering: Gathering) -> None:
        """Redraw, if something has changed."""
        state = f"{[(each.key, each.state) for each in gathering.here]} {gathering.missing}"
        if state != self._last:
            self._last = state
            self._live.update(_picture(gathering), refresh=True)

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Print above the table."""
        from rich.text import Text

        self._live.console.print(Text(sentence, "bold red" if grave else ""))


def _picture(gathering: Gathering) -> Group:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("machine", "address", "state", "Python", "numpy"):
        table.add_column(title)
    odd = {
        name
        for difference in gathering.differences
        for names in list(difference.values.values())[1:]
        for name in names
    }
    names = labels(gathering.here)
    for number, report in enumerate(gathering.here):
        name = names[report.key] + (" (this one)" if number == 0 else "")
        state = "running" if report.role == "member" else report.state
        style = "yellow" if names[report.key] in odd else "green" if state != "waiting" else ""
        cells = (
            name,
            f"{report.host}:{report.port}",
            state,
            report.facts.get("python", ""),
            report.facts.get("numpy", ""),
        )
        table.add_row(*(Text(cell, style) for cell in cells))
    if not gathering.is_complete:
        for name in gathering.missing:
            table.add_row(*(Text(cell, "dim") for cell in (name, "", "missing", "", "")))
    number = gathering.count
    count = f"{number} of {gathering.wanted} {'is' if number == 1 else 'are'} here"
    notes = [Text(str(each), "yellow") for each in gathering.differences]
    return Group(table, Text(f"\n{count}", "bold"), *notes)
