"""Processes that look for each other: adverts made up, and watchers who note what they are told."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from potluck._types import NodeId, ProcessId
from potluck.discovery.records import (
    Advert,
    DiscoveryConfig,
    DiscoveryEvent,
    PeerFound,
    PeerGone,
    Sighting,
)
from potluck.discovery.service import Discovery
from potluck.identity.namespace import NetworkNamespace
from potluck.net.addresses import Address
from support.threads import eventually

LAB = NetworkNamespace("lab", b"l" * 32, home=Path("/nowhere"))
ATTIC = NetworkNamespace("attic", b"a" * 32, home=Path("/nowhere"))

_numbers = itertools.count(1)


def advert(
    letter: str = "a",
    *,
    namespace: NetworkNamespace = LAB,
    job: str = "train.py",
    port: int | None = None,
) -> Advert:
    """A process of the machine with this letter, different each time."""
    number = next(_numbers)
    process = ProcessId(NodeId(letter * 32), number)
    return Advert.of(namespace, process, job=job, port=20000 + number if port is None else port)


def sighting(
    letter: str = "a",
    *hosts: str,
    incarnation: int = 1,
    port: int = 4711,
    source: str = "mdns",
    name: str = "",
) -> Sighting:
    """Somebody seen at these hosts; a bare address if the letter is empty."""
    addresses = tuple(Address(host, port) for host in hosts or ("10.0.0.1",))
    node = NodeId(letter * 32) if letter else None
    return Sighting(
        key=f"{node}/{incarnation}" if node else str(addresses[0]),
        sources=(source,),
        node=node,
        incarnation=incarnation if node else 0,
        job_tag="j" * 16 if node else "",
        addresses=addresses,
        version=1 if node else 0,
        name=name,
    )


class Watcher:
    """A process's discovery, and everything it was told."""

    def __init__(self, shown: Advert, config: DiscoveryConfig, *, service: str) -> None:
        self.advert = shown
        self.events: list[DiscoveryEvent] = []
        self.woken = threading.Event()
        self.discovery = Discovery(shown, config, self.woken.set, service=service)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Say goodbye."""
        self.discovery.close()

    def look(self) -> list[DiscoveryEvent]:
        """Note what is new, and return everything so far."""
        self.events += self.discovery.drain()
        return self.events

    def sees(self, *others: Advert) -> bool:
        """Whether it has been told of these processes, and has not been told that they left."""
        present: set[ProcessId | None] = set()
        for event in self.look():
            change = present.discard if isinstance(event, PeerGone) else present.add
            change(event.sighting.process)
        return {other.process for other in others} <= present

    def wait_for(self, *others: Advert) -> None:
        """Until it sees these."""
        eventually(lambda: self.sees(*others))

    def wait_until_open(self) -> None:
        """Until it listens on the network."""
        eventually(lambda: self.discovery.status()["mdns"].startswith("listening"))

    @property
    def met(self) -> set[ProcessId | None]:
        """Everybody it has ever found."""
        return {event.sighting.process for event in self.look() if isinstance(event, PeerFound)}


def alone(home: Path) -> DiscoveryConfig:
    """As on a machine of its own: nothing but the network."""
    return DiscoveryConfig(home=home, neighbours=False)


def files_only(home: Path) -> DiscoveryConfig:
    """As where multicast is blocked."""
    return DiscoveryConfig(home=home, multicast=False)


@contextlib.contextmanager
def watchers(service: str, config: DiscoveryConfig, *shown: Advert) -> Iterator[list[Watcher]]:
    """Several processes that look for each other."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Watcher(each, config, service=service)) for each in shown]
