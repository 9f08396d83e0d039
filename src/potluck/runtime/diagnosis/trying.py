"""Attempts to meet everybody who was learnt of, side by side, and how they went."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from typing import TypeVar

from potluck.backend.membership import Membership
from potluck.net.addresses import Address
from potluck.net.discovery import Advert, Sighting
from potluck.net.mdns_records import Heard
from potluck.runtime.diagnosis.consulting import Consulting
from potluck.runtime.diagnosis.probe import probe
from potluck.runtime.diagnosis.scene import Outcome, Probe, Rate, Target
from potluck.vocabulary import NodeId

__all__ = ["Trying", "result_by"]

Result = TypeVar("Result")

MAX_TARGETS = 32
MAX_COLLEAGUES = 3  # with whom it is measured how much goes through: half a second each
ADDRESSES_EACH = 3


@dataclass
class Trying:
    """Attempts under way, each target's addresses one beside the other."""

    pool: ThreadPoolExecutor
    members: Membership
    consulting: Consulting
    own: frozenset[str] = frozenset()
    """The addresses of this machine."""
    _started: dict[str, tuple[Target, list[Future[Probe]]]] = field(default_factory=dict)
    _rates: dict[NodeId, Future[Rate | None]] = field(default_factory=dict)
    _addresses: set[Address] = field(default_factory=set)

    def start(
        self, name: str, origin: str, addresses: Iterable[Address], node: NodeId | None = None
    ) -> None:
        """Try somebody at all of these addresses."""
        if name in self._started or len(self._started) >= MAX_TARGETS:
            return
        addresses = list(addresses)
        self._addresses.update(addresses)
        silent = tuple(Probe(each, Outcome.SILENT) for each in addresses)
        target = Target(name, origin, silent, node)
        attempts = [self.pool.submit(probe, self.members, each) for each in addresses]
        self._started[name] = target, attempts

    def start_heard(self, heard: Iterable[Heard], advert: Advert) -> None:
        """Try those of our namespace who announce themselves; strangers are told by their tag.

        One who shows our own id from somewhere else is tried too: its key may be a copy of ours.
        """
        for each in heard:
            ours = each.tag == advert.tag and each.version == advert.version
            addresses = each.addresses[:ADDRESSES_EACH]
            is_here = each.node == advert.node and not self.own.isdisjoint(
                address.host for address in each.addresses
            )
            if ours and not is_here and self._addresses.isdisjoint(addresses):
                name = f"{self.members.name_of(each.node)} at {addresses[0]}"
                self.start(name, "heard", addresses, each.node)

    def measure(self, colleagues: Iterable[Heard], advert: Advert) -> None:
        """Measure with those who look as well, once each."""
        for each in colleagues:
            ours = each.tag == advert.tag and each.version == advert.version
            if ours and each.node != advert.node and each.node not in self._rates:
                if len(self._rates) >= MAX_COLLEAGUES:
                    return
                addresses = each.addresses[:ADDRESSES_EACH]
                self._rates[each.node] = self.pool.submit(self.consulting.ask, addresses)

    def start_known(self, known: Iterable[Sighting], heard: Iterable[Heard]) -> None:
        """Try those of earlier runs who were not heard."""
        nodes = {each.node for each in heard}
        for each in known:
            if each.node is None or each.node in nodes:
                continue
            name = each.name or self.members.name_of(each.node)
            addresses = each.addresses[:ADDRESSES_EACH]
            if self._addresses.isdisjoint(addresses):
                self.start(f"{name} at {addresses[0]}", "known", addresses, each.node)

    def results(self, deadline: float) -> tuple[Target, ...]:
        """How it went; whoever has not answered by the deadline is silent."""
        return tuple(
            replace(
                target,
                probes=tuple(
                    result_by(deadline, attempt, instead)
                    for attempt, instead in zip(attempts, target.probes, strict=True)
                ),
                rate=self._rate(target.node, deadline),
            )
            for target, attempts in self._started.values()
        )

    def _rate(self, node: NodeId | None, deadline: float) -> Rate | None:
        asked = self._rates.get(node) if node is not None else None
        return result_by(deadline, asked, None) if asked is not None else None


def result_by(deadline: float, future: Future[Result], instead: Result) -> Result:
    """What comes of an attempt, or what to assume where that takes too long."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except NotYet:
        return instead
