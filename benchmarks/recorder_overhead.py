"""What the flight recorder costs: an all-reduce of 4 KiB with it and without, on loopback.

    python benchmarks/recorder_overhead.py [--quick] [--json FILE]

Two processes hold three groups at once, in clear, which is the fastest there is and so the hardest
for the recorder: one whose recorder is switched off, one as it is, and another switched off.  They
take turns in slices of milliseconds.  The overhead is the median, over the rounds, of how much
longer the recorded group took than the mean of its two neighbours; how much these differ from each
other says how far to trust it.  Beside it stands the time of one entry by itself, all of what is
added to a call, as a share of the call: that is far more exact.  FILE may be ``-`` for the
terminal.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from rich.console import Console

from _overhead import Rounds, compare, join, run, take_turns
from potluck import DistributedContext, SimulatedBackend
from potluck.collective.call import Call
from potluck.collective.group import Group
from potluck.schedule.task import Collective, Task

BAR = 0.01
"""What the overhead may be at most."""

ENTRIES = 100_000


def _nothing(*_: object) -> None:
    """Instead of an entry."""


def measure(rank: int, masters: list[str], rounds: int, count: int) -> Rounds:
    """For each round the seconds without, with, and again without the recorder."""
    with contextlib.ExitStack() as stack:
        contexts = [
            stack.enter_context(DistributedContext(join(rank, master))) for master in masters
        ]
        for silent in (contexts[0], contexts[2]):
            vars(silent.group)["_record"] = _nothing
        return take_turns(contexts, rounds, count)


def cost_of_an_entry(group: Group) -> float:
    """Seconds that taking down one call adds to it; the best of some tries, as noise only adds."""
    array = np.zeros(1024, np.float32)
    call = Call(Task.whole(Collective.ALL_REDUCE, group.world_size, 1024), array, array)
    record, best = group._record, 1.0  # noqa: SLF001 - nothing else is to be measured
    for _ in range(10):
        began = time.perf_counter()
        for number in range(ENTRIES // 10):
            record(call, number, 0.0)
        best = min(best, (time.perf_counter() - began) / (ENTRIES // 10))
    return best


def report(found: Rounds) -> dict[str, Any]:
    """The figures of all rounds."""
    facts = compare("recorder overhead", found)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        entry = cost_of_an_entry(context.group)
    share = entry / min(facts["seconds"]["without"], facts["seconds"]["without again"])
    return {**facts, "entry_seconds": entry, "share": share, "bar": BAR, "met": share <= BAR}


def show(facts: dict[str, Any]) -> None:
    """For people."""
    console = Console(highlight=False)
    console.print("All-reduce of 4 KiB, 2 ranks on loopback in clear, median of the rounds:")
    for name, value in facts["seconds"].items():
        console.print(f"  {name + ' recorder':24} {value * 1e6:8.1f} µs")
    console.print(
        f"Side by side {facts['overhead']:+.2%}; the two groups without differ by "
        f"{facts['noise']:.2%}.\nOne entry takes {facts['entry_seconds'] * 1e6:.2f} µs, which is "
        f"{facts['share']:.2%} of the call (bar {BAR:.0%}, {'met' if facts['met'] else 'NOT met'})."
    )


if __name__ == "__main__":
    run(__file__, __doc__ or "", measure, report, show)
