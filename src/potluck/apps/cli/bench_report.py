"""The results of ``potluck bench``: as facts for a program, and as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from potluck.apps.cli.bench_compression import Method, Prospect, prospects, speeds
from potluck.apps.cli.bench_measuring import Case, Links, matrix_of
from potluck.collective import wording
from potluck.collective.compression.choice import choose
from potluck.collective.planner import Planner
from potluck.collective.task import Collective, Task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Results"]

GRADIENT = 16 << 20
"""Bytes of the gradient for which compression is judged: four million parameters."""


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured; the same on all ranks."""

    links: Sequence[Links]
    cases: Sequence[Case]
    methods: Sequence[Method]

    def facts(self) -> dict[str, Any]:
        """For a program."""
        matrix = matrix_of(list(self.links))
        return {
            "nodes": [each.name for each in self.links],
            "links": [
                {
                    "from": here,
                    "to": there,
                    "bytes_per_second": links.up.get(there, 0),
                    "latency_ns": links.latency.get(there, 0),
                }
                for here, links in enumerate(self.links)
                for there in sorted(links.latency)
            ],
            "all_reduce": list(self._sizes()),
            "compression": {
                "gradient_bytes": GRADIENT,
                "methods": [asdict(each) for each in prospects(matrix, self.methods, GRADIENT)],
                "choice": self._choice(),
            },
        }

    def _sizes(self) -> Iterator[dict[str, Any]]:
        planner = Planner(matrix_of(list(self.links)))
        for nbytes in dict.fromkeys(case.nbytes for case in self.cases):
            mine = [case for case in self.cases if case.nbytes == nbytes]
            measured = [case for case in mine if case.measured is not None]
            fastest = min(measured, key=lambda case: case.measured or 0, default=None)
            plan = planner.plan(Task.whole(Collective.ALL_REDUCE, len(self.links), nbytes // 4))
            yield {
                "bytes": nbytes,
                "algorithms": [
                    {
                        "name": case.algorithm,
                        "predicted_ns": case.predicted,
                        "measured_ns": case.measured,
                    }
                    for case in mine
                ],
                "fastest": None if fastest is None else fastest.algorithm,
                "planned": plan.algorithm,
                "reason": plan.reason,
            }

    def _choice(self) -> str:
        """What ``compression="auto"`` would take, as a sentence."""
        matrix = matrix_of(list(self.links))
        return choose(matrix, GRADIENT // 4, speeds(self.methods), has_feedback=True).reason

    def print(self, console: Console) -> None:
        """For a person."""
        from rich.text import Text

        console.print(Text("Links (from row to column)", "bold"))
        console.print(self._link_table())
        console.print(Text("\nAll-reduce: measured time, and what the planner expected", "bold"))
        console.print(self._case_table())
        for size in self._sizes():
            console.print(Text(f"{wording.size(size['bytes'])}: {size['reason']}", "dim"))
        title = f"\nCompression of a gradient of {wording.size(GRADIENT)} on these links"
        console.print(Text(title, "bold"))
        console.print(self._method_table())
        console.print(Text(f'compression="auto" takes {self._choice()}', "bold green"))

    def _link_table(self) -> Table:
        table = _table("", *(f"to {rank}" for rank in range(len(self.links))))
        for here, links in enumerate(self.links):
            cells = [
                "–"
                if there == here
                else f"{wording.speed(links.up.get(there, 0))}, "
                f"{wording.time(links.latency.get(there, 0))}"
                for there in range(len(self.links))
            ]
            table.add_row(f"{here} {links.name}", *cells)
        return table

    def _case_table(self) -> Table:
        sizes = list(self._sizes())
        names = [each["name"] for each in sizes[0]["algorithms"]] if sizes else []
        table = _table("bytes", *names, "fastest")
        for size in sizes:
            cells = [
                f"{_time(each['measured_ns'])} ({wording.time(each['predicted_ns'])})"
                for each in size["algorithms"]
            ]
            table.add_row(wording.size(size["bytes"]), *cells, size["fastest"] or "")
        return table

    def _method_table(self) -> Table:
        table = _table("method", "bytes", "encodes", "decodes", "all-reduce", "gain", "lost a step")
        found = prospects(matrix_of(list(self.links)), self.methods, GRADIENT)
        plain = found[0].predicted
        for each in found:
            table.add_row(*_cells(each, plain))
        return table


def _cells(each: Prospect, plain: int) -> tuple[str, ...]:
    is_plain = each.nbytes == GRADIENT
    return (
        each.name,
        wording.size(each.nbytes),
        "" if is_plain else wording.speed(each.encode),
        "" if is_plain else wording.speed(each.decode),
        wording.time(each.predicted),
        "" if is_plain else f"{plain / max(1, each.predicted):.2g}×",
        f"{each.error:.2%}",
    )


def _time(nanoseconds: int | None) -> str:
    return "not measured" if nanoseconds is None else wording.time(nanoseconds)


def _table(*titles: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    return table
