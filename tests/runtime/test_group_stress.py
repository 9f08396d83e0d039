"""Groups under fire: ranks abort, time out and leave at random while others go on.

What a call combines is written into its data: every rank adds the number of its own call in a cell
of its own.  So a result that mixes calls, or misses a rank, shows.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from potluck import SubBackend
from potluck.errors import Aborted, DistributedError, Timeout
from potluck.runtime.group import Group
from potluck.runtime.work import Work
from support.groups import LIMIT, in_world, over_tcp, sum_call
from support.threads import Background

SIZE = 3
CHAOS = 0.6
"""Seconds of it."""

CALM = 12
"""Calls after it: those that are yet to hear of a failure fail, and the last ones succeed."""

World = Callable[[int, Callable[[Group], Any]], list[Any]]
Mix = tuple[int, ...]


class Caller:
    """One rank, which makes calls in one group and keeps what came of them."""

    def __init__(self, group: Group, count: int, seed: str) -> None:
        self.group = group
        self._count = count
        self.random = random.Random(f"{seed}/{group.rank}")
        self.mixes: list[Mix] = []
        self.works: list[tuple[int, Work[Any]]] = []
        self._number = 0

    def _cells(self) -> Any:
        self._number += 1
        cells = np.ones(self._count, "i8")
        cells[:SIZE] = 0
        cells[self.group.rank] = self._number
        return cells

    def _note(self, number: int, cells: Any) -> None:
        mix = tuple(cells[:SIZE].tolist())
        assert mix[self.group.rank] == number, "the call of another was taken for ours"
        assert (cells[SIZE:] == SIZE).all(), "a rank is missing, or counted twice"
        self.mixes.append(mix)

    def run(self, timeout: float) -> bool:
        """A blocking call; whether it went well."""
        cells = self._cells()
        number = self._number
        try:
            self.group.run(sum_call(cells, SIZE), timeout)
        except (Aborted, Timeout):
            return False
        self._note(number, cells)
        return True

    def start(self) -> None:
        """One that goes on by itself, and now and then has a callback that aborts."""
        cells = self._cells()
        work = self.group.start(sum_call(cells, SIZE), lambda: cells)
        if not self.random.randrange(8):
            work.add_done_callback(lambda: self.group.abort("from a callback"))
        self.works.append((self._number, work))

    def collect(self) -> None:
        """What has come of those that were started."""
        for number, work in self.works:
            try:
                cells = work.wait(LIMIT)
            except (Aborted, Timeout):
                continue
            self._note(number, cells)
        self.works.clear()

    def misbehave(self, until: float) -> None:
        """Call, abort and dawdle."""
        while time.monotonic() < until:
            match self.random.randrange(20):
                case 0:
                    self.group.abort("at random")
                case 1 | 2 | 3 | 4 | 5 | 6:
                    self.start()
                case 7 | 8:
                    threading.Event().wait(self.random.uniform(0, 0.03))
                case 9:
                    self.run(self.random.uniform(0, 0.05))
                case _:
                    self.run(LIMIT if self.random.randrange(3) else 0.1)

    def settle(self, last: int) -> list[bool]:
        """Call until a certain one; which of them went well."""
        fine = []
        while self.group._calls < last:
            fine.append(self.run(LIMIT))
        self.collect()
        return fine


def check_mixes(callers: list[Caller]) -> None:
    """Whoever took part in a call that went well somewhere took part in no other."""
    mixes = {mix for caller in callers for mix in caller.mixes}
    for rank in range(SIZE):
        numbers = [mix[rank] for mix in mixes]
        assert len(numbers) == len(set(numbers)), "one call was part of two results"


def use_subgroups(group: Group, seed: str) -> int:
    """Make groups, use them for a while and leave them, while others still call."""
    choice, done = random.Random(f"{seed}/{group.rank}"), 0
    for number in range(6):
        sub = SubBackend(group.backend, range(SIZE), name=f"{number % 2}")
        with Group(sub) as part:
            try:
                for _ in range(choice.randrange(12)):
                    cells = np.full(1, group.rank + 1)
                    part.run(sum_call(cells, SIZE), LIMIT)
                    assert (cells == SIZE * (SIZE + 1) // 2).all()
                    done += 1
            except DistributedError as error:
                assert isinstance(error, Aborted), error  # noqa: PT017 - not another one
        sub.close()
    return done


@pytest.mark.parametrize("count", [SIZE + 1, 20_000])
@pytest.mark.parametrize("world", [in_world, over_tcp])
def test_nothing_is_mixed_up_and_nobody_hangs(world: World, count: int) -> None:
    """While every rank does as it pleases; afterwards they go on as if nothing had been.

    The seed follows from that of the test run, so the same choices can be made again.
    """
    seed = str(random.randrange(1 << 32))
    meeting, callers = threading.Barrier(SIZE), [None] * SIZE
    calls: list[int] = []
    ended: set[int] = set()
    until = time.monotonic() + CHAOS

    def action(group: Group) -> list[bool]:
        caller = callers[group.rank] = Caller(group, count, seed)  # type: ignore[call-overload]
        meddling = random.Random(f"{seed}/{group.rank}/meddling")

        def meddle() -> None:
            while time.monotonic() < until:
                threading.Event().wait(meddling.uniform(0, 0.2))
                group.abort("from another thread")

        helpers: list[Background[Any]] = [
            Background(meddle),
            Background(lambda: use_subgroups(group, seed)),
        ]
        caller.misbehave(until)
        while len(ended) < SIZE:  # some are still in a call, and need us there
            caller.run(0.05)
            if all(helper.ended for helper in helpers):
                ended.add(group.rank)
        for helper in helpers:
            helper.result()
        calls.append(group._calls)
        meeting.wait(LIMIT)
        return caller.settle(max(calls) + CALM)

    results = world(SIZE, action)
    for fine in results:
        assert isinstance(fine, list), (seed, fine)
        assert fine[-CALM // 2 :] == [True] * (CALM // 2), seed
    check_mixes(callers)  # type: ignore[arg-type]
