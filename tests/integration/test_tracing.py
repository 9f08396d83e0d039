"""Dumps of real ranks whose steady clocks differ, as those of different machines do."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from potluck import DistributedContext
from potluck.apps.cli.trace_analysis import align, matched_messages, read_dump, summarize
from support.place import Place
from support.ranks import Ranks, Wrap

AHEAD = 5000  # seconds by which the clock of the second rank is ahead
LATE = 0.03  # seconds that it comes late to every operation
EXACT = 0.01  # seconds, on a machine that does other things as well


def work(place: Place, folder: str) -> str:
    """Some sums to which rank 1 comes late, a message, a dump."""
    with DistributedContext(place.join()) as context:
        array = np.ones(1024, np.float32)
        for _ in range(12):
            if context.rank:
                time.sleep(LATE)  # what this is about
            context.all_reduce(array)
        if context.rank:
            context.recv(array, 0)
        else:
            context.send(array, 1)
        context.barrier()
        return str(context.dump_trace(Path(folder) / f"{context.rank}.trace.jsonl"))


def elsewhere(rank: int) -> Wrap:
    """Rank 1 gets a clock of its own."""
    clock = ["unshare", "--time", "--fork", "--kill-child"]
    clock += ["--monotonic", str(AHEAD), "--boottime", str(AHEAD)]
    return lambda command: [*clock, *command] if rank else command


@pytest.mark.netns
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare")
def test_clocks_are_put_side_by_side_and_who_is_late_stays_late(
    ranks: Ranks, tmp_path: Path
) -> None:
    """By what the ranks did together; half of the lateness would be hidden by halving times."""
    started = ranks.start(work, 2, str(tmp_path), wrap=elsewhere)
    dumps = [read_dump(Path(rank.value())) for rank in started]
    assert dumps[1].header.monotonic - dumps[0].header.monotonic > AHEAD / 2
    assert dumps[0].header.machine != dumps[1].header.machine
    found = align(dumps)
    assert abs(found.offsets[1] + AHEAD) < EXACT
    assert "operations in common" in found.notes[0]
    waiting = summarize(dumps, found).waiting
    assert waiting[0].name.startswith("rank 1")
    assert waiting[0].seconds > 8 * LATE
    ((_, sent), (_, taken)) = matched_messages(dumps)[0]
    assert taken.end is not None
    assert sent.begin <= taken.end + found.offsets[1]
