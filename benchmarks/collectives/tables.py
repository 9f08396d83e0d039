"""The report as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from collectives.contenders import GLOO, OPEN_MPI, PINNED, PLAIN, SEALED
from collectives.memory import ALL_REDUCE
from collectives.places import LIMIT
from collectives.plan import words
from collectives.report import Row

__all__ = ["draw_rows", "draw_targets", "duration"]

ORDER = (PLAIN, SEALED, GLOO, OPEN_MPI)
LEFT_OUT = {(SEALED, OPEN_MPI), (OPEN_MPI, LIMIT)}
SHORT = {PLAIN: "plain", SEALED: "sealed"}


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3f} s"


def draw_rows(title: str, rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """Times side by side, and how many times faster Potluck is."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title=title)
    rounds = sorted({row["rounds"] for row in rows})
    turns = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    table.caption = "\n".join(
        [f"medians of {turns} interleaved rounds, × means times faster", *notes]
    )
    seen = {name for row in rows for name in row["median_seconds"]}
    names = [name for name in ORDER if name in seen]
    pairs = _pairs(rows)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(_short(name), justify="right", no_wrap=True)
    for ours, theirs in pairs:
        table.add_column(f"{_short(ours)} × {_short(theirs)}", justify="right")
    table.add_column("plan", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, names, pairs))
    return table


def draw_machines(title: str, rows: Sequence[Row], notes: Sequence[str]) -> Table:
    """One line for each contender: its time, what crossed the cable, and Potluck's gain."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title=title)
    table.caption = "\n".join(
        [f"medians of {rows[0]['rounds']} interleaved rounds, × means times faster", *notes]
    )
    for name in ("", "", "time", "on a cable", "plain × this", "plan"):
        table.add_column(name, justify="left" if name in {"", "plan"} else "right", no_wrap=True)
    for row in rows:
        ratios = {each["against"]: each for each in row["ratios"] if each["of"] == PLAIN}
        for name, seconds in {**row["median_seconds"], **row["bound_seconds"]}.items():
            crossed = row["cable_bytes"].get(name)
            table.add_row(
                words(row["octets"]) if name == PLAIN else "",
                _short(name),
                duration(seconds),
                "" if crossed is None else f"{crossed / row['octets']:.2f} N",
                _ratio(ratios[name]) if name in ratios else "",
                row["plans"].get(name, ""),
            )
    return table


def _short(name: str) -> str:
    return SHORT.get(name, name.removeprefix(PINNED))


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The comparisons that fit beside each other; the others are in the figures."""
    pairs = dict.fromkeys((each["of"], each["against"]) for row in rows for each in row["ratios"])
    return [pair for pair in pairs if pair not in LEFT_OUT]


def _cells(row: Row, names: list[str], pairs: list[tuple[str, str]]) -> Iterator[str]:
    kind = "" if row["collective"] == ALL_REDUCE else f" {row['collective'].replace('_', '-')}"
    yield f"{row['world_size']} ranks{kind}, {words(row['octets'])}"
    for name in names:
        seconds = row["median_seconds"].get(name)
        yield "–" if seconds is None else duration(seconds)
    ratios: dict[tuple[str, str], dict[str, Any]] = {
        (each["of"], each["against"]): each for each in row["ratios"]
    }
    for pair in pairs:
        ratio = ratios.get(pair)
        yield "–" if ratio is None else _ratio(ratio)
    yield "; ".join(dict.fromkeys(row["plans"].values()))


def _ratio(ratio: dict[str, Any]) -> str:
    low, high = ratio["quartiles"]
    return f"[bold]{ratio['ratio']:.2f}[/] {low:.2f}–{high:.2f}"


def draw_targets(targets: Sequence[dict[str, Any]], *, is_part: bool = False) -> Table:
    """What is wanted and the worst that was seen of it; of a part only what was measured."""
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, title="What is wanted")
    for title in ("all-reduce, unless it says otherwise", "against", "wanted", "worst case"):
        table.add_column(title, no_wrap=True)
    table.add_column("")
    for each in targets:
        if is_part and each["met"] is None:
            continue
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[each["met"]]
        table.add_row(each["name"], each["against"], each["wanted"], each["reached"], verdict)
    return table
