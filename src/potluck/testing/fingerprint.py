"""A core in a few bytes: two with the same fingerprint will do the same, but for small differences.

All attributes of a core are walked.  Times count from its own present, in tenths of a second, and
what is longer ago than ``FORGOTTEN`` is the same.  Left out are words, counters of messages and
statistics of arrivals: they change all the time and decide nothing in the rules that are explored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf
from typing import Any

import msgspec

from potluck.core.cluster import ClusterCore

__all__ = ["FORGOTTEN", "fingerprint"]

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

    >>> from potluck.core.cluster_cards import ProcessCard
    >>> from potluck.core.cluster_config import ClusterConfig
    >>> from potluck.vocabulary import NodeId
    >>> me = ProcessCard(node=NodeId("a" * 32), incarnation=1)
    >>> one, two = (ClusterCore(me, ClusterConfig(), now) for now in (100.0, 200.0))
    >>> fingerprint(one) == fingerprint(two)
    True
    >>> _ = two.tick(205.0)
    >>> fingerprint(one) == fingerprint(two)
    False
    """
    situation = core._situation  # noqa: SLF001 - this is about all there is in it
    health = tuple(
        (contact.process, core.health.status(contact.process).name)
        for contact in sorted(situation.contacts, key=lambda each: each.process)
    )
    return hash((core.state, health, tuple(_walk(core, situation.time, set()))))


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
    elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("potluck.core"):
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
