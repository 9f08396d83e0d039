"""How the summary of a trace reads, line by line, with the style of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from potluck.apps.cli.trace_clocks import Alignment
from potluck.apps.cli.trace_summary import Summary
from potluck.core.roster_words import listed

__all__ = ["sentences"]


def sentences(
    summary: Summary, alignment: Alignment, troubles: Sequence[str], most: int
) -> Iterator[tuple[str, str]]:
    """Every line and its style; of failures and events the last ``most``."""
    yield _whose(summary), "bold"
    if summary.missing:
        yield _missing(summary), "yellow"
    for note in alignment.notes:
        yield printable(note), "dim"
    yield f"\n{_waited_for(summary)}", "bold"
    for rest in summary.waiting[1:4]:
        yield f"  {printable(rest.name)}: {_seconds(rest.seconds)} in {_times(rest.operations)}", ""
    yield from _failures(summary, most)
    for sentence in summary.running:
        yield printable(sentence), "yellow"
    if summary.events:
        yield "\nWhat happened in the cluster:", "bold"
        yield from ((f"  {printable(each)}", "") for each in summary.events[-most:])
    for trouble in troubles:
        yield printable(trouble), "red"


def printable(text: str) -> str:
    """Without what a terminal would obey: dumps may come from anybody."""
    return "".join(each if each.isprintable() else "�" for each in text)


def _whose(summary: Summary) -> str:
    who = listed([printable(each) for each in summary.ranks[:16]])
    count = "1 operation" if summary.operations == 1 else f"{summary.operations} operations"
    return f"{count} of {who}."


def _missing(summary: Summary) -> str:
    gone = listed([printable(each) for each in summary.missing[:16]])
    return f"There is no dump of {gone}: killed, or not copied here."


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _times(operations: set[tuple[str, str, tuple[int, ...], int, str]]) -> str:
    return "1 operation" if len(operations) == 1 else f"{len(operations)} operations"


def _waited_for(summary: Summary) -> str:
    if not summary.waiting:
        return "Nobody was waited for noticeably."
    first = summary.waiting[0]
    name = printable(first.name)
    return (
        f"{name[0].upper()}{name[1:]} was waited for most: {_seconds(first.seconds)} of all "
        f"others together, in {_times(first.operations)}."
    )


def _failures(summary: Summary, most: int) -> Iterator[tuple[str, str]]:
    if not summary.failed:
        yield "No operation failed.", "green"
        return
    count = len(summary.failed)
    yield f"\n{count} operation{'s' * (count != 1)} failed:", "bold"
    for each in summary.failed[-most:]:
        ranks = listed([str(rank) for rank in each.ranks[:16]])
        where = f"on rank{'s' * (len(each.ranks) != 1)} {ranks}"
        yield f"  {printable(each.what)} {where}: {printable(each.reason)}", "red"
    if count > most:
        yield f"  The timeline has {count - most} more, from before.", ""
