"""Bad times for a cluster: processes are killed, stopped and started, cables are cut and mended.

Things happen every moment, one after the other, but never so much at once that no majority is left,
and those of which nobody is told (a process stands still, a cable is cut) not more often than they
can be found out.  Whoever is not touched must go on all the time.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.cables import Cables
from support.cluster_programs import Crowd
from support.hosts import INTERFACE, Host
from support.ranks import Rank
from support.threads import PATIENCE

STALL = 10.0  # seconds that nobody who runs may be without a sum
PAUSES = (0.5, 2.0)  # seconds between two actions
FAULTS = (0.3, 4.0)  # seconds that a process is stopped for, or a cable cut
SILENTLY = 3.0  # seconds from one of these to the next: the first is known after two
SETTLED = 3.0  # seconds after which a killed process is in nobody's view
LOOK_EVERY = 0.02  # seconds
REMEMBERED = 10_000  # sums that are kept to be compared


@dataclass
class Fault:
    """Something that ends again."""

    until: float
    touched: tuple[Rank, ...]
    mend: Callable[[], None]


class Sums:
    """What members of a view have reported; all must be the same."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], str] = OrderedDict()
        self.compared = 0

    def compare(self, node: Rank, view: str, count: int, sums: str) -> None:
        """One report."""
        known = self._known.setdefault((view, count), sums)
        self.compared += known is not sums
        assert known == sums, f"{node.status()}: other sums than another member of its view"
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)


class Chaos:
    """Things that happen to a crowd, on hosts of their own if there are any."""

    def __init__(self, crowd: Crowd, size: int, seed: int, hosts: Sequence[Host] = ()) -> None:
        self._crowd = crowd
        self._size = size
        self._random = random.Random(seed)
        self._free = list(hosts)
        self._places: dict[Rank, Host] = {}
        self._cables = Cables(hosts) if hosts else None
        self._seen: dict[Rank, float] = {}
        self._present: set[Rank] = set()
        self._faults: list[Fault] = []
        self._killed: list[float] = []
        self._silent_at = 0.0  # when the last of which nobody is told happened
        self.sums = Sums()
        self.alive: list[Rank] = []
        self.actions: Counter[str] = Counter()
        self.longest = 0.0
        """Seconds without a sum of somebody who was not touched."""
        self.starved = 0.0
        """Seconds in which this machine did not even wake us up."""
        self._last: list[str] = []
        self._history: deque[str] = deque(maxlen=20)
        for _ in range(size):
            self._start()

    def run(self, seconds: float) -> list[Rank]:
        """Let things happen for a while; who is alive then, all of them well."""
        while not self._present.issuperset(self.alive):
            self._listen()
        end, next_at = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            self._listen()
            if time.monotonic() >= next_at:
                self._act()
                next_at = time.monotonic() + self._random.uniform(*PAUSES)
        for fault in list(self._faults):
            self._mend(fault)
        self._settle()
        return self.alive

    def _settle(self) -> None:
        """Wait until all say of one view, a while after the last fault, that all are in it."""
        since, views = time.monotonic() + SETTLED, dict[Rank, str]()
        while len(views) < len(self.alive) or len(set(views.values())) > 1:
            assert time.monotonic() < since + PATIENCE, f"not all in one view; {self._told()}"
            for node in self.alive:
                while node.has_news():
                    said = self._hear(node)
                    is_whole = said.get("size") == len(self.alive) and said["at"] > since
                    views.pop(node, None)
                    if is_whole:
                        views[node] = said["view"]
            self._sleep()

    # -- watching ------------------------------------------------------------------------------

    def _listen(self) -> None:
        now = time.monotonic()
        for fault in [fault for fault in self._faults if now >= fault.until]:
            self._mend(fault)
        touched = {node for fault in self._faults for node in fault.touched}
        for node in self.alive:
            while node.has_news():
                self._hear(node)
            if node in touched:
                self._seen[node] = max(self._seen[node], time.monotonic())
            stalled = time.monotonic() - self._seen[node]
            self.longest = max(self.longest, stalled)
            why = f"no sum for {stalled:.1f} s; {self._told()}"
            assert stalled < STALL, f"{why}\n{node.status()}"
        self._sleep()

    def _sleep(self) -> None:
        """Time in which this machine was too busy even to wake us up is nobody's stall."""
        began = time.monotonic()
        time.sleep(LOOK_EVERY)
        late = time.monotonic() - began - LOOK_EVERY
        self.starved += late
        for node in self.alive:
            self._seen[node] += late

    def _told(self) -> str:
        return f"{self.starved:.1f} s were lost to other work; " + ", ".join(self._history)

    def _hear(self, node: Rank) -> dict[str, Any]:
        said = node.hear_any()
        if said["word"] in {"beat", "view"}:
            self._present.add(node)
            self._seen[node] = time.monotonic()
            self.sums.compare(node, said["view"], said["count"], said["sums"])
        return said

    # -- acting --------------------------------------------------------------------------------

    def _act(self) -> None:
        possible = ["start"] * (len(self.alive) < self._size)
        if self._can_bear_more():
            possible += ["kill"]
            if time.monotonic() >= self._silent_at + SILENTLY:
                possible += ["stop", "cut" if self._cables else "stop"]
        if possible:
            what = self._random.choice(possible)
            getattr(self, f"_{what}")()
            self.actions[what] += 1
            self._history.append(f"{time.strftime('%X')} {what} {self._last}")

    def _can_bear_more(self) -> bool:
        """Whether a majority stays untouched if another one is not."""
        self._killed = [at for at in self._killed if at > time.monotonic() - SETTLED]
        members = len(self._present.intersection(self.alive))
        return 2 * (members - len(self._faults) - 1) > members + len(self._killed)

    def _some(self, count: int) -> list[Rank]:
        touched = {node for fault in self._faults for node in fault.touched}
        fit = [node for node in self.alive if node in self._present and node not in touched]
        chosen = self._random.sample(fit, count)
        self._last = [self._places[n].name if n in self._places else str(n.pid) for n in chosen]
        return chosen

    def _start(self) -> None:
        host = self._free.pop(0) if self._free else None
        (node,) = self._crowd.start(1, 2, [host.command] if host else [])
        if host is not None:
            self._places[node] = host
        self.alive.append(node)
        self._last = [host.name if host else str(node.pid)]
        self._seen[node] = time.monotonic() + PATIENCE  # an interpreter takes its time

    def _kill(self) -> None:
        (node,) = self._some(1)
        self._crowd.kill(node)
        self._killed.append(time.monotonic())
        self.alive.remove(node)
        if node in self._places:
            self._free.append(self._places.pop(node))

    def _stop(self) -> None:
        (node,) = self._some(1)
        node.send_signal(signal.SIGSTOP)

        def wake() -> None:
            node.send_signal(signal.SIGCONT)

        self._add_fault((node,), wake)

    def _cut(self) -> None:
        """The way between two machines, in one direction or both; or one is cut off altogether."""
        self._random.choice([self._pull, self._separate])()

    def _separate(self) -> None:
        cables = self._cables
        assert cables is not None
        nodes = self._some(2)
        one, other = (self._places[node] for node in nodes)
        ways = [(one, other), (other, one)][: self._random.choice([1, 2])]
        for way in ways:
            cables.cut(*way)

        def mend() -> None:
            for way in ways:
                cables.mend(*way)

        self._add_fault(tuple(nodes), mend)

    def _pull(self) -> None:
        (node,) = self._some(1)
        host = self._places[node]
        host.unplug()
        self._add_fault((node,), lambda: host.ip("link", "set", INTERFACE, "up"))

    def _add_fault(self, touched: tuple[Rank, ...], mend: Callable[[], None]) -> None:
        self._silent_at = time.monotonic()
        until = self._silent_at + self._random.uniform(*FAULTS)
        self._faults.append(Fault(until, touched, mend))

    def _mend(self, fault: Fault) -> None:
        self._faults.remove(fault)
        fault.mend()
        for node in fault.touched:
            self._seen[node] = max(self._seen[node], time.monotonic())
