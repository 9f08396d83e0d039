"""What is known of one link: its profile by each address, and which address to try first.

Two machines often have several ways to each other (cable and Wi-Fi, IPv4 and IPv6).  Measured ones
are ordered by how long a message of 1 MiB would take, the others keep the order in which the peer
named them.  An address that failed goes to the end for a while that doubles with every failure; it
is never dropped, since it may be the only one left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

__all__ = ["ConnectionProfile", "Endpoint", "Paths", "RateSource"]

Endpoint: TypeAlias = tuple[str, int]
"""Host and port."""

MESSAGE = 1 << 20
"""Bytes of the message by which addresses are compared."""

CABLE_RATE, RADIO_RATE = 125_000_000, 25_000_000
"""Bytes per second to assume where only the latency is known: Ethernet with 1 Gbit/s, Wi-Fi."""

CABLE_LATENCY = 500_000
"""Nanoseconds one way; a link that takes longer is taken for a radio link."""

WINDOW = 60.0
"""Seconds for which a rate seen in real traffic is not lowered by a lower one: traffic that was
limited by something else says only what a link can do at least."""

MARGIN = 0.8
"""Another address replaces the one in use only if a message takes at most this share of time."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds for which a failed address is tried last


class RateSource(Enum):
    """Where a rate comes from."""

    UNKNOWN = "unknown"
    PROBE = "probe"
    """A short measurement of its own."""
    TRAFFIC = "traffic"
    """What collectives saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionProfile:
    """One way from a node to another.  Zero means: not measured yet.

    >>> wifi = ConnectionProfile(latency=2_000_000, up=25_000_000, down=25_000_000)
    >>> wifi.latency / 1e6, wifi.up * 8 // 1_000_000
    (2.0, 200)
    """

    latency: int = 0
    """Nanoseconds that a short message takes, one way."""
    jitter: int = 0
    """Nanoseconds by which that varies."""
    measured_at: float = 0.0
    """When latency and jitter were measured, on the observer's clock."""
    up: int = 0
    """Bytes per second that the node can send to the other."""
    down: int = 0
    """Bytes per second that come back."""
    rated_at: float = 0.0
    rated_by: RateSource = RateSource.UNKNOWN
    address: Endpoint | None = None
    """Which of the other's addresses; None where that is not known."""
    interface: str = ""
    """Which of our own interfaces; empty where that is not known."""

    def __post_init__(self) -> None:
        """Refuse what no link can have."""
        if min(self.latency, self.jitter, self.up, self.down) < 0:
            msg = f"Latency, jitter and rates of a connection cannot be negative: {self}"
            raise ValueError(msg)

    @classmethod
    def from_round_trip(
        cls, seconds: float, now: float, *, jitter: float = 0.0, address: Endpoint | None = None
    ) -> ConnectionProfile:
        """What a heartbeat and its answer tell: half of the round trip is one way."""
        latency, deviation = (max(0, round(time * 5e8)) for time in (seconds, jitter))
        return cls(latency=max(1, latency), jitter=deviation, measured_at=now, address=address)

    @property
    def seconds_for_message(self) -> float:
        """How long a message of 1 MiB takes, as far as one can tell."""
        usual = CABLE_RATE if self.latency <= CABLE_LATENCY else RADIO_RATE
        return self.latency / 1e9 + MESSAGE / (self.up or usual)

    def updated(self, newer: ConnectionProfile) -> ConnectionProfile:
        """This, with what a newer measurement of the same way found."""
        found = self._rated(newer) if newer.up or newer.down else self
        if newer.latency:
            found = replace(
                found, latency=newer.latency, jitter=newer.jitter, measured_at=newer.measured_at
            )
        return replace(found, interface=newer.interface or self.interface)

    def _rated(self, newer: ConnectionProfile) -> ConnectionProfile:
        up, down = newer.up or self.up, newer.down or self.down
        if newer.rated_by is RateSource.TRAFFIC and newer.rated_at - self.rated_at < WINDOW:
            up, down = max(up, self.up), max(down, self.down)
            if (up, down) == (self.up, self.down):
                return self  # nothing new; the better figure keeps its age
        return replace(self, up=up, down=down, rated_at=newer.rated_at, rated_by=newer.rated_by)


@dataclass(frozen=True, slots=True)
class _Failures:
    count: int
    until: float  # tried last up to then


class Paths:
    """The ways from this node to one other, best first."""

    def __init__(self) -> None:
        self._named: tuple[Endpoint, ...] = ()
        self._failures: dict[Endpoint, _Failures] = {}
        self._in_use: Endpoint | None = None

    def copy(self) -> Paths:
        """The same, as it is now."""
        found = Paths()
        found._named, found._in_use = self._named, self._in_use
        found._failures = dict(self._failures)
        return found

    @property
    def named(self) -> tuple[Endpoint, ...]:
        """The addresses as the peer named them."""
        return self._named

    def name(self, addresses: Iterable[Endpoint]) -> None:
        """The peer tells its addresses, best first; what is no more is forgotten."""
        self._named = tuple(dict.fromkeys((host, port) for host, port in addresses))
        self._failures = {
            address: failures
            for address, failures in self._failures.items()
            if address in self._named
        }
        if self._in_use not in self._named:
            self._in_use = None

    def used(self, address: Endpoint) -> None:
        """A connection by this address is open."""
        self._failures.pop(address, None)
        if address in self._named:
            self._in_use = self._named[self._named.index(address)]

    def failed(self, address: Endpoint, now: float) -> None:
        """A connection by this address could not be made, or broke."""
        if address not in self._named:
            return
        count = self._failures[address].count + 1 if address in self._failures else 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count - 1, 10))
        self._failures[address] = _Failures(count, now + pause)
        if self._in_use == address:
            self._in_use = None

    def order(
        self, profiles: Mapping[Endpoint | None, ConnectionProfile], now: float
    ) -> tuple[Endpoint, ...]:
        """Which to try, one after the other."""
        ranked = sorted(self._named, key=lambda address: self._key(address, profiles, now))
        current = self._in_use
        if current is None:
            return tuple(ranked)
        best = ranked[0]
        if best in profiles and current in profiles:
            times = [profiles[address].seconds_for_message for address in (best, current)]
            if times[0] <= MARGIN * times[1]:
                return tuple(ranked)
        ranked.remove(current)
        return (current, *ranked)

    def _key(
        self,
        address: Endpoint,
        profiles: Mapping[Endpoint | None, ConnectionProfile],
        now: float,
    ) -> tuple[bool, float, int]:
        """Those that failed lately last, then by time, then as they were named."""
        failures = self._failures.get(address)
        avoided = failures is not None and now < failures.until <= now + LONGEST_PAUSE
        profile = profiles.get(address)
        seconds = float("inf") if profile is None else profile.seconds_for_message
        return avoided, seconds, self._named.index(address)
