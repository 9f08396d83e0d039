"""All that can happen to a small cluster, up to a bound: ``python -m potluck.testing.explore``.

Three processes, of which each may crash, start again, be cut off and be back, and a newcomer, live
with the real cores on a network without chance.  Time passes in steps of half a pause.  Between
two steps one thing may happen, or be laid in wait for the next message of a kind: that it is the
last one of its sender, or that it and all that follows is lost.  Every sequence of these is played
up to a depth, and the invariants of the simulated cluster are checked at every event.  Of
two sequences that lead to the same state (:mod:`potluck.testing.explore`) one is followed.

States are copied by forking: a child of the process plays what comes after one action.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from math import inf
from random import Random
from typing import Any

import msgspec

from potluck._platform import fork
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig
from potluck.testing.cluster import SimulatedCluster
from potluck.testing.process import Violation

# --------------------------------------------------------------------------------------------------
# A core in a few bytes: two with the same fingerprint will do the same, but for small differences.
#
# All attributes of a core are walked.  Times count from its own present, in tenths of a second, and
# what is longer ago than ``FORGOTTEN`` is the same.  Left out are words, counters of messages and
# statistics of arrivals: they change all the time and decide nothing in the rules that are
# explored.

FORGOTTEN = 6.0
"""Seconds; longer than any wait of the rules at the preset."""
_MOMENT = 50.0  # clocks of explored processes begin above, so that times differ from durations
_LEFT_OUT = frozenset(
    {
        "_attempts", "_cards", "_sent", "_told", "announced", "config", "echo", "events", "held",
        "beat", "beat_at", "health", "helped_at", "me", "newest", "now", "out", "reason", "samples",
        "sentence", "sequence", "_timers", "clock", "_last_beat", "next_beat", "_probe_at",
        "_archive", "lateness", "silent_for", "_help_at",
    }
)  # fmt: skip


def fingerprint(core: ClusterCore) -> int:
    """The core's state, as a hash that is the same within one run of the interpreter.

    >>> from potluck.membership.messages import ProcessInfo
    >>> from potluck.membership.events import ClusterConfig
    >>> from potluck._types import NodeId
    >>> me = ProcessInfo(node=NodeId("a" * 32), incarnation=1)
    >>> one, two = (ClusterCore(me, ClusterConfig(), now) for now in (100.0, 200.0))
    >>> fingerprint(one) == fingerprint(two)
    True
    >>> _ = two.tick(205.0)
    >>> fingerprint(one) == fingerprint(two)
    False
    """
    state = core._state  # noqa: SLF001 - this is about all there is in it
    health = tuple(
        (contact.process, core.health.status(contact.process).name)
        for contact in sorted(state.contacts, key=lambda each: each.process)
    )
    return hash((core.state, health, tuple(_walk(core, state.time, set()))))


def _walk(thing: Any, now: float, seen: set[int]) -> Iterator[Any]:
    if isinstance(thing, float):
        yield _moment(thing, now)
    elif thing is None or isinstance(thing, str | int | bytes | bool):
        yield thing
    elif isinstance(thing, Enum):
        yield thing.name
    elif isinstance(thing, dict):
        yield "{"
        for key in sorted(thing, key=str):
            yield str(key)
            yield from _walk(thing[key], now, seen)
    elif isinstance(thing, set | frozenset):
        yield tuple(sorted(map(str, thing)))
    elif isinstance(thing, tuple | list):
        yield "("
        for item in thing:
            yield from _walk(item, now, seen)
    elif id(thing) not in seen:
        seen.add(id(thing))
        yield from _attributes(thing, now, seen)


def _attributes(thing: Any, now: float, seen: set[int]) -> Iterator[Any]:
    if isinstance(thing, msgspec.Struct):
        named = [(name, getattr(thing, name)) for name in thing.__struct_fields__]
    elif is_dataclass(thing):
        named = [(field.name, getattr(thing, field.name)) for field in fields(thing)]
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith(
        ("potluck.membership", "potluck.training.steps")
    ):
        named = list(vars(thing).items())
    else:
        return  # a function, or a table of them
    yield type(thing).__name__
    for name, value in named:
        if name not in _LEFT_OUT:
            yield name
            yield from _walk(value, now, seen)


def _moment(value: float, now: float) -> float:
    if value in (inf, -inf) or value < _MOMENT:
        return round(value, 1)
    return round(min(FORGOTTEN, max(-FORGOTTEN, now - value)), 1)


# --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
NEWCOMER = "d"
SPEEDS = {"same": (1.0, 1.0, 1.0), "different": (1.04, 0.96, 1.0)}
_MOMENTS = ("Propose", "Accepted", "Commit", "Found", "Founded")
_FORMING = 3.0  # seconds within which the three are in one view


class _Even(Random):
    """No chance: whatever is drawn lies in the middle."""

    def random(self) -> float:
        """One half."""
        return 0.5


@dataclass(slots=True)
class Findings:
    """What came of an exploration."""

    states: int = 0
    """Different ones."""
    steps: int = 0
    """Actions that were played."""
    is_complete: bool = True
    """Whether the budget was enough for all sequences of the depth."""
    violations: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Sequences of actions that break a rule, and how."""


def begin(speeds: Sequence[float], min_nodes: int) -> SimulatedCluster:
    """Three processes in one view."""
    config = ClusterConfig(min_nodes=min_nodes)
    cluster = SimulatedCluster(config=config, chance=_Even())
    cluster.train()
    cluster.start(*NAMES)
    for name, speed in zip(NAMES, speeds, strict=True):
        cluster.drift(name, speed)
    if not cluster.run_until(lambda: cluster.in_one_view(*NAMES), within=_FORMING):
        raise Violation(f"No view within {_FORMING} s: {cluster.summary()}")
    return cluster


def actions(cluster: SimulatedCluster) -> Iterator[tuple[str, Callable[[], None]]]:
    """All that may happen now; half a pause passes after each."""
    yield "time passes", lambda: None
    names = list(cluster.places)
    others = {name: [each for each in names if each != name] for name in names}
    for name in names:
        place = cluster.place(name)
        if place.core is None:
            yield f"restart {name}", lambda name=name: cluster.restart(name)  # type: ignore[misc]
            continue
        yield f"crash {name}", lambda name=name: cluster.unplug(name)  # type: ignore[misc]
        yield f"kill {name}", lambda name=name: cluster.kill(name)  # type: ignore[misc]
        yield (
            f"cut {name}",
            lambda name=name: cluster.cut([name], others[name], keep=False),  # type: ignore[misc]
        )
    if cluster.network.cuts:
        yield "heal", cluster.heal
    if NEWCOMER not in cluster.places:
        yield "newcomer", lambda: cluster.start(NEWCOMER)
    if not cluster.triggers:
        yield from _moments(cluster, others)


def _moments(
    cluster: SimulatedCluster, others: dict[str, list[str]]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may be laid in wait for a message."""
    for name in NAMES:
        for kind in _MOMENTS:

            def crash(name: str = name, kind: str = kind) -> None:
                cluster.when_sends(name, kind, lambda: cluster.unplug(name))

            def drop(name: str = name, kind: str = kind) -> None:
                cluster.when_sends(
                    name, kind, lambda: cluster.cut([name], others[name], keep=False)
                )

            yield f"crash {name} at {kind}", crash
            yield f"drop {name} from {kind}", drop


def state_of(cluster: SimulatedCluster) -> int:
    """Where everything stands, in one number."""
    deepest = max(
        (t.value.depth for name in cluster.places if (t := cluster.trainer_of(name)) is not None),
        default=0,
    )
    parts: list[object] = [
        tuple(sorted(cluster.network.cuts)),
        tuple(trigger[:2] for trigger in cluster.triggers),
    ]
    for name, place in cluster.places.items():
        trainer = cluster.trainer_of(name)
        core = place.core
        if core is None:
            parts.append((name, place.is_powered, place.process))
            continue
        parts.append((name, fingerprint(core), tuple(sorted(map(str, place.connections)))))
        if trainer is not None:
            report = trainer.report
            behind = deepest - trainer.value.depth
            parts.append((report.position[:2], report.attended, report.holds, min(behind, 3)))
    return hash(tuple(parts))


class Explorer:
    """Plays all sequences of actions up to a depth, within a budget of seconds and states."""

    def __init__(self, depth: int, seconds: float, states: int) -> None:
        self._depth = depth
        self._end = time.monotonic() + seconds
        self._most = states
        self._seen: dict[int, int] = {}  # state -> how much deeper it was followed
        self.findings = Findings()

    def explore(self, cluster: SimulatedCluster, path: tuple[str, ...] = ()) -> None:
        """Follow everything that can happen from here."""
        left = self._depth - len(path)
        state = state_of(cluster)
        if self._seen.get(state, -1) >= left:
            return
        self._seen[state] = left
        self.findings.states = len(self._seen)
        if left == 0:
            return
        for name, _ in list(actions(cluster)):
            if time.monotonic() > self._end or len(self._seen) >= self._most:
                self.findings.is_complete = False
                return
            self._fork(cluster, path, name)
            if self.findings.violations:
                return

    def _fork(self, cluster: SimulatedCluster, path: tuple[str, ...], name: str) -> None:
        """Let a child play one action and all that follows, and take over what it found."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        child = fork()
        if child == 0:
            status = 1
            try:
                os.close(reader)
                self._play(cluster, path, name)
                with os.fdopen(writer, "wb") as pipe:
                    pipe.write(msgspec.msgpack.encode((self._seen, self.findings)))
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        self._seen, self.findings = msgspec.msgpack.decode(
            found, type=tuple[dict[int, int], Findings]
        )

    def _play(self, cluster: SimulatedCluster, path: tuple[str, ...], name: str) -> None:
        path = (*path, name)
        self.findings.steps += 1
        try:
            _happens(cluster, name)
        except Exception as error:  # noqa: BLE001 - a core that raises is a finding like any other
            self.findings.violations.append((path, f"{type(error).__name__}: {error}"))
            return
        self.explore(cluster, path)


def _happens(cluster: SimulatedCluster, name: str) -> None:
    """Play one action, and let half a pause pass."""
    dict(actions(cluster))[name]()
    cluster.run(cluster.config.health.pause_after / 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m potluck.testing.explore", description=__doc__)
    parser.add_argument("--depth", type=int, default=4, help="actions in a row (default 4)")
    parser.add_argument("--seconds", type=float, default=120.0, help="per setting (default 120)")
    parser.add_argument("--states", type=int, default=200_000, help="at most, per setting")
    parser.add_argument("--min-nodes", type=int, default=2)
    parser.add_argument("--after", default="", help='begin after these: "cut b; time passes; heal"')
    options = parser.parse_args(arguments)
    is_broken = False
    for words, speeds in SPEEDS.items():
        explorer = Explorer(options.depth, options.seconds, options.states)
        begun = time.monotonic()
        cluster = begin(speeds, options.min_nodes)
        for name in filter(None, options.after.split("; ")):
            _happens(cluster, name)
        explorer.explore(cluster)
        found = explorer.findings
        extent = "all of them" if found.is_complete else "as many as the budget allows"
        sys.stdout.write(
            f"clocks of {words} speed: {found.states} states by {found.steps} actions, sequences "
            f"of up to {options.depth} ({extent}), in {time.monotonic() - begun:.0f} s\n"
        )
        for path, violation in found.violations:
            is_broken = True
            sys.stdout.write(f"  {'; '.join(path)}: {violation}\n")
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
