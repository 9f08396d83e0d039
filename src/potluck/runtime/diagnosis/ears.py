"""What is heard: the jobs on this network, and others who look around."""

from __future__ import annotations

import time
from dataclasses import replace

from potluck.net.discovery import Advert, DiscoveryConfig
from potluck.net.mdns_records import SERVICE, Heard
from potluck.net.mdns_source import MdnsSource

__all__ = ["DOCTORS", "Ears"]

DOCTORS = "_potluck-doctor._tcp.local."
"""Where those who look announce themselves: jobs are not disturbed."""

LINGER = 1.5  # seconds: one who has just come may get our answer only after a second
LONGEST = 4.0  # seconds that others can make us stay
MAX_HEARD = 256


class Ears:
    """Listens and announces until closed."""

    def __init__(self, advert: Advert, config: DiscoveryConfig) -> None:
        self._advert = advert
        self._heard: dict[str, Heard] = {}
        self._colleagues: set[str] = set()
        self._colleague_came = 0.0
        self.heard_self = False
        observer = replace(advert, port=0)
        self._sources = [
            MdnsSource(observer, config, self._hear, self._forget, service=SERVICE),
            MdnsSource(advert, config, self._hear_colleague, self._forget, service=DOCTORS),
        ]

    def _hear(self, name: str, heard: Heard) -> bool:
        if (heard.node, heard.incarnation) == self._advert.process:
            self.heard_self = True
        elif len(self._heard) < MAX_HEARD:
            self._heard[name] = heard
        return False

    def _hear_colleague(self, name: str, heard: Heard) -> bool:
        if name not in self._heard and (heard.node, heard.incarnation) != self._advert.process:
            self._colleague_came = time.monotonic()
            self._colleagues.add(name)
        return self._hear(name, heard)

    def _forget(self, _name: str, _reason: str) -> None:
        """Whoever was here for a moment was here."""

    def listen_until(self, planned: float) -> float:
        """When to stop: later than planned if another doctor has just come and must hear us."""
        return max(planned, min(self._colleague_came + LINGER, planned + LONGEST))

    def others(self) -> list[Heard]:
        """Everybody else, each process once."""
        found = {(each.node, each.incarnation): each for each in list(self._heard.values())}
        return list(found.values())

    def colleagues(self) -> list[Heard]:
        """Those of them who look around as well."""
        return [self._heard[name] for name in list(self._colleagues) if name in self._heard]

    @property
    def is_open(self) -> bool:
        """Whether it was possible to listen at all."""
        return all(source.is_open for source in self._sources)

    @property
    def status(self) -> str:
        """How that went, in words."""
        return self._sources[-1].status

    def close(self) -> None:
        """Take our announcement back."""
        for source in self._sources:
            source.close()
