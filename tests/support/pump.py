"""A pump for tests of turns: its bytes are callables, and it notices when two threads run it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from potluck.backend.operation import Operation, PumpLock
from support.threads import Background, eventually


class Pump:
    """A pump whose bytes are callables: each call waits for one and runs it."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.turns = PumpLock(self._pump, lambda: self.work.put(None))
        self.inside = 0
        self.calls = 0

    def _pump(self, timeout: float | None) -> None:
        self.inside += 1
        self.calls += 1
        try:
            assert self.inside == 1, "two threads pump at once"
            try:
                action = self.work.get(timeout=timeout) if timeout != 0 else self.work.get_nowait()
            except queue.Empty:
                return
            if action is not None:
                action()
        finally:
            self.inside -= 1

    @property
    def sleepers(self) -> int:
        """Threads that wait without pumping."""
        return len(self.turns._sleepers)


@contextmanager
def pumping_thread(pump: Pump) -> Iterator[Operation]:
    """Another thread holds the pump, until its own operation is done."""
    own = Operation(pump.turns)
    thread = Background(own.wait)
    eventually(lambda: pump.inside == 1)
    try:
        yield own
    finally:
        pump.work.put(own.finish)
        thread.result()
