"""``potluck trace``: the flight recorders of all ranks, as one timeline and a few sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, working

if TYPE_CHECKING:
    from potluck.apps.cli.trace_analysis import Alignment, Dump, Summary


EXAMPLES = """\
potluck trace                              what went wrong last on this machine
potluck trace desk.trace.jsonl attic/      dumps of several ranks; a folder means all in it
potluck trace dumps/ -o monday.json        where to write it; open it on https://ui.perfetto.dev
"""

EXIT_CODES = (
    "Exit codes: 0 all dumps were read, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 some dumps could not be read (the others are in the timeline), 130 interrupted."
)

DAMAGED = 3

SHOWN = 12
"""Failures, and events, that are told; more are in the timeline."""

WIDE = 120
"""Columns where there is no terminal to fit into."""


def trace(
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DUMPS",
            help="Dumps of flight recorders, or folders with such.",
            show_default="the last incident in POTLUCK_TRACE_DIR, or in ~/.potluck/traces",
        ),
    ] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the timeline; - is stdout.")
    ] = Path("trace.json"),
    json: Json = False,
) -> None:
    """Put the dumps of all ranks together: one timeline, who was waited for, what failed and why.

    Every rank keeps its last operations in memory. They are written down when a rank is lost,
    ranks disagree or time runs out, when a program calls cluster.dump_trace(), and when `potluck
    run` gets the signal SIGUSR2. Copy the dumps of all machines to one, and open the timeline on
    https://ui.perfetto.dev.
    """
    from potluck.apps.cli.trace_analysis import align, merge, summarize

    with working("Putting the dumps together", silent=str(output) == "-"):
        found, troubles = _read(dumps or [])
        ranks = sorted(merge(found), key=lambda dump: (dump.header.rank, dump.header.process))
        alignment = align(ranks)
        summary = summarize(ranks, alignment)
        written = _write(output, ranks, alignment)
    if json and str(output) != "-":
        from potluck.apps.cli.membership import print_json

        print_json(_facts(written, summary, alignment, troubles))
    else:
        _print(written, summary, alignment, troubles, to_stderr=str(output) == "-")
    if troubles:
        raise typer.Exit(DAMAGED)


def _read(given: list[Path]) -> tuple[list[Dump], list[str]]:
    """What could be read, and what is wrong with the rest."""
    from potluck.apps.cli.trace_analysis import UnreadableDump, expand, latest, read_dump
    from potluck.trace.dump import trace_folder

    folder = trace_folder()
    paths = expand(given or ([] if folder is None else [folder]))
    found, troubles = [], []
    for path in paths:
        try:
            dump = read_dump(path)
        except UnreadableDump as error:
            troubles.append(str(error))
            continue
        found.append(dump)
        troubles += [] if dump.trouble is None else [dump.trouble]
    if not found:
        where = " ".join(map(str, given)) or str(
            folder or "nowhere, since POTLUCK_TRACE_DIR is empty"
        )
        raise UnreadableDump(
            f"There is no dump to show in {where}",
            cause=" ".join(troubles) or None,
            hint="A dump is written when a rank is lost or time runs out, by cluster.dump_trace(), "
            "and when `potluck run` gets SIGUSR2.",
        )
    return (found if given else latest(found)), troubles


def _write(output: Path, ranks: list[Dump], alignment: Alignment) -> str:
    """Write the timeline; atomically, where that is a file."""
    import msgspec

    from potluck.apps.cli.trace_output import timeline
    from potluck.errors import from_os_error

    content = msgspec.json.encode(
        {
            "traceEvents": timeline(ranks, alignment.offsets),
            "displayTimeUnit": "ms",
            "otherData": {"made by": "potluck trace", "clocks": list(alignment.notes)},
        }
    )
    if str(output) == "-":
        typer.echo(content)
        return "stdout"
    try:
        _put(output, content)
    except OSError as error:
        hint = "Give another place with -o."
        raise from_os_error(f"{output} could not be written", error, hint=hint) from error
    return str(output)


def _put(output: Path, content: bytes) -> None:
    """Write it whole or not at all; a device or a pipe is written to, never replaced."""
    import os

    if output.exists() and not output.is_file():
        output.write_bytes(content)
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    file = temporary.open("xb")  # nobody's link is followed
    try:
        with file:
            file.write(content)
        temporary.replace(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _facts(
    written: str, summary: Summary, alignment: Alignment, troubles: list[str]
) -> dict[str, Any]:
    return {
        "timeline": written,
        "ranks": list(summary.ranks),
        "missing": list(summary.missing),
        "operations": summary.operations,
        "waiting": [
            {"rank": each.name, "seconds": each.seconds, "operations": len(each.operations)}
            for each in summary.waiting
        ],
        "failed": [
            {"what": each.what, "ranks": list(each.ranks), "reason": each.reason}
            for each in summary.failed
        ],
        "running": list(summary.running),
        "events": list(summary.events),
        "clocks": list(alignment.notes),
        "troubles": troubles,
    }


def _print(
    written: str, summary: Summary, alignment: Alignment, troubles: list[str], *, to_stderr: bool
) -> None:
    from rich.console import Console
    from rich.text import Text

    from potluck.apps.cli.trace_output import sentences

    console = Console(highlight=False, stderr=to_stderr)
    if not console.is_terminal:
        console.width = WIDE
    for text, style in sentences(summary, alignment, troubles, SHOWN):
        console.print(Text(text, style))
    console.print(
        Text(f"\nThe timeline is in {written}: open it on https://ui.perfetto.dev", "bold")
    )
