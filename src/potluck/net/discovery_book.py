"""Who is seen at this moment, by all sources together, and what of it has been told already.

Sources write into the book, the node reads the difference to what it has read before.  So a node
that does not read for a while misses nothing and nothing piles up: at most one event for each
process waits, and whoever came and went in between was never there.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from potluck.net.addresses import Address
from potluck.net.discovery_records import Changed, DiscoveryEvent, Found, Gone, Sighting

__all__ = ["MAX_ADDRESSES", "MAX_PER_SOURCE", "Book"]

MAX_PER_SOURCE = 300
"""Sightings kept of one source; more push out its oldest, and nobody else's."""

MAX_ADDRESSES = 12
"""Addresses of one process, from all sources together."""

PREFERENCE = ("neighbour", "mdns", "known", "given", "environment")
"""Whose addresses come first: the shortest way, then the freshest news."""

_LIVE = frozenset({"neighbour", "mdns"})  # these hear the process itself


class Book:
    """What all sources report; safe to use from any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._reports: dict[str, dict[str, Sighting]] = {source: {} for source in PREFERENCE}
        self._reasons: dict[str, str] = {}
        self._own: frozenset[Address] = frozenset()
        self._told: dict[str, Sighting] = {}
        self._is_dirty = False

    def report(self, source: str, sighting: Sighting) -> None:
        """A source sees somebody, or sees something new about him."""
        with self._lock:
            reports = self._reports[source]
            if reports.get(sighting.key) == sighting:
                return
            reports.pop(sighting.key, None)  # what is reported last is the last to go
            reports[sighting.key] = sighting
            if len(reports) > MAX_PER_SOURCE:
                oldest = next(iter(reports))
                del reports[oldest]
                self._reasons[oldest] = f"more than {MAX_PER_SOURCE} claim to be here"
        self._touch()

    def withdraw(self, source: str, key: str, reason: str) -> None:
        """A source no longer sees somebody."""
        with self._lock:
            if self._reports[source].pop(key, None) is None:
                return
            self._reasons[key] = reason
        self._touch()

    def replace(self, source: str, sightings: Iterable[Sighting], reason: str) -> None:
        """A source sees these and nobody else."""
        wanted = {sighting.key: sighting for sighting in sightings}
        with self._lock:
            gone = self._reports[source].keys() - wanted.keys()
        for key in gone:
            self.withdraw(source, key, reason)
        for sighting in wanted.values():
            self.report(source, sighting)

    def exclude(self, addresses: Iterable[Address]) -> None:
        """These are our own: a bare address among them is nobody to be found."""
        own = frozenset(addresses)
        with self._lock:
            if own == self._own:
                return
            self._own = own
        self._touch()

    def sightings(self) -> list[Sighting]:
        """Everybody who is seen at this moment."""
        with self._lock:
            return list(self._visible().values())

    def drain(self) -> list[DiscoveryEvent]:
        """What has changed since the last call."""
        with self._lock:
            if not self._is_dirty:
                return []
            self._is_dirty = False
            before, self._told = self._told, self._visible()
            reasons, self._reasons = self._reasons, {}
            events: list[DiscoveryEvent] = [
                Gone(sighting, reasons.get(key) or "it was found under its own name")
                for key, sighting in before.items()
                if key not in self._told
            ]
            for key, sighting in self._told.items():
                if key not in before:
                    events.append(Found(sighting))
                elif before[key] != sighting:
                    events.append(Changed(sighting))
            return events

    def _touch(self) -> None:
        with self._lock:
            was_dirty, self._is_dirty = self._is_dirty, True
        if not was_dirty:
            self._wake()

    def _visible(self) -> dict[str, Sighting]:
        """Everybody once: sources merged, bare addresses dropped where their owner is known."""
        merged: dict[str, Sighting] = {}
        for source in PREFERENCE:
            for key, sighting in self._reports[source].items():
                merged[key] = _merge(merged[key], sighting) if key in merged else sighting
        live = [each for each in merged.values() if _LIVE.intersection(each.sources)]
        nodes = {each.node for each in live}
        taken = {address for each in live for address in each.addresses} | self._own
        return {
            key: each
            for key, each in merged.items()
            if _LIVE.intersection(each.sources)
            or (each.node not in nodes and not taken.issuperset(each.addresses))
        }


def own_addresses(hosts: Iterable[str], port: int) -> set[Address]:
    """Under which addresses this process would find itself."""
    name = socket.gethostname()
    names = {*hosts, name, f"{name}.local", "localhost", "127.0.0.1", "127.0.1.1", "::1"}
    return {Address(host, port) for host in names}


def _merge(first: Sighting, second: Sighting) -> Sighting:
    """One hint of two about the same process; the first one's word counts where they differ."""
    addresses = tuple(dict.fromkeys((*first.addresses, *second.addresses)))
    return replace(
        first,
        sources=tuple(sorted({*first.sources, *second.sources})),
        addresses=addresses[:MAX_ADDRESSES],
        job_tag=first.job_tag or second.job_tag,
        version=first.version or second.version,
        name=first.name or second.name,
    )
