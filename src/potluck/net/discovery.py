"""Finding the others: every source at once, merged into one stream of events.

Sources, fastest first: files of processes on the same machine, multicast DNS, peers of the last
run, addresses given by hand, the environment of a launcher.  They run on threads of their own and
never call into the node but for ``wake``, which says that :meth:`Discovery.drain` has something.
What is not drained is merged, never queued up: at most one event for each process waits.

Everything here is a hint.  Hints are bounded in number and size, and nobody is believed before TLS
has shown who he is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from potluck.closing import Closing
from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.addresses import Address, usable_hosts
from potluck.net.discovery_book import Book, own_addresses
from potluck.net.discovery_config import DEFAULT_PORT, DiscoveryConfig, Rendezvous, preferred_port
from potluck.net.discovery_neighbours import Neighbours
from potluck.net.discovery_records import (
    Advert,
    Changed,
    DiscoveryEvent,
    Found,
    Gone,
    Sighting,
    job_tag,
)
from potluck.net.known_peers import KnownPeers
from potluck.net.mdns_records import SERVICE, Heard
from potluck.net.mdns_source import MdnsSource

__all__ = [
    "DEFAULT_PORT",
    "Advert",
    "Changed",
    "Discovery",
    "DiscoveryConfig",
    "DiscoveryEvent",
    "Found",
    "Gone",
    "Rendezvous",
    "Sighting",
    "job_tag",
    "preferred_port",
]

_logger = get_logger(__name__)

EAGER = 5.0  # seconds after a start or a change in which neighbours are looked for often
EAGER_PAUSE, CALM_PAUSE = 0.05, 0.5  # seconds between two looks
OWN_EVERY = 2.0  # seconds between two looks at the addresses of this machine
MAX_STRANGERS = 1000  # that are told apart
CLOSING = 2.0  # seconds for the thread to end; it never waits longer than for a file

_ENDED = "its process on this machine has ended"


class Discovery(Closing):
    """Shows one process to the others and sees them, until closed; a context manager.

    Returns at once: the sources start on their own threads.  ``wake`` is called from those threads
    whenever there is something to drain; it must return at once and not call back.
    """

    def __init__(
        self,
        advert: Advert,
        config: DiscoveryConfig,
        wake: Callable[[], None] = lambda: None,
        *,
        service: str = SERVICE,
    ) -> None:
        self._advert = advert
        self._config = config
        self._book = Book(wake)
        self._names: dict[str, str] = {}
        """Of records of multicast DNS, with the key of whom they are about."""
        self._status: dict[str, str] = {}
        self._strangers: dict[str, Heard] = {}
        self._to_remember: list[Sighting] = []
        self._known = KnownPeers(config.home) if config.known else None
        self._neighbours: Neighbours | None = None
        self._seen: list[Sighting] = []
        self._eager_until = time.monotonic() + EAGER
        self._is_closed = self._is_forked = False
        self._news = threading.Condition()
        self._exclude_own(advert)
        self._report_given()
        self._mdns = (
            MdnsSource(advert, config, self._heard, self._lost, service=service)
            if config.multicast
            else None
        )
        self._thread = threading.Thread(target=self._run, name="potluck-discovery", daemon=True)
        self._thread.start()
        descriptors.on_fork(self)

    def drain(self) -> list[DiscoveryEvent]:
        """What has happened since the last call, at most one event for each process; at once."""
        return self._book.drain()

    def sightings(self) -> list[Sighting]:
        """Everybody who is seen at this moment."""
        return self._book.sightings()

    def update(self, advert: Advert) -> None:
        """Show something else from now on: another port, another tag after a rotation; at once."""
        with self._news:
            self._advert = advert
            self._news.notify()
        if self._mdns is not None:
            self._mdns.update(advert)

    def remember(self, peers: Iterable[Sighting]) -> None:
        """Keep peers that have proved who they are, at once, with addresses where they answered."""
        with self._news:
            self._to_remember = list(peers)
            self._news.notify()

    @property
    def strangers(self) -> int:
        """How many were heard that are of another namespace or job; of very many, so many."""
        return len(self._strangers)

    @property
    def foreigners(self) -> list[Heard]:
        """Machines of another namespace: of each the process that was heard first."""
        found = {each.node: each for each in list(self._strangers.values())[::-1]}
        return [each for each in found.values() if each.tag != self._advert.tag]

    def status(self) -> dict[str, str]:
        """In words, for each source: what it does, or why it cannot."""
        mdns = {"mdns": self._mdns.status} if self._mdns is not None else {}
        return {**self._status, **mdns}

    def close(self) -> None:
        """Say goodbye and end every thread; takes about half a second."""
        if self._is_forked:
            return  # the threads are the parent's, and so is the goodbye
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join(CLOSING)
        if self._mdns is not None:
            self._mdns.close()

    def become_forked(self) -> None:
        """In a forked child: a thread of the parent may hold a lock for ever."""
        self._is_forked = True

    # --- multicast DNS, on its threads ---

    def _heard(self, name: str, heard: Heard) -> bool:
        sighting = heard.sighting(self._advert)
        before = self._names.get(name)
        if before is not None and (sighting is None or sighting.key != before):
            self._lost(name, "it has become somebody else")
        if sighting is None:
            if len(self._strangers) < MAX_STRANGERS and heard.node != self._advert.node:
                self._strangers[name] = heard
            return False
        self._names[name] = sighting.key
        self._book.report("mdns", sighting)
        return True

    def _lost(self, name: str, reason: str) -> None:
        key = self._names.pop(name, None)
        # A process that changes its job or namespace has two records for a moment.
        if key is not None and key not in self._names.values():
            self._book.withdraw("mdns", key, reason)

    # --- everything else, on our own thread ---

    def _report_given(self) -> None:
        for source, addresses in (
            ("given", self._config.peers),
            ("environment", self._config.rendezvous.addresses),
        ):
            for address in addresses:
                self._book.report(source, _bare(source, address))

    def _run(self) -> None:
        self._neighbours = self._open_neighbours()
        published: Advert | None = None
        own_at = 0.0
        try:
            while not self._is_closed:
                advert = self._advert
                if advert != published:
                    published = advert
                    self._publish(advert)
                if time.monotonic() >= own_at:
                    own_at = time.monotonic() + OWN_EVERY
                    self._exclude_own(advert)
                self._look(advert)
                self._keep(advert)
                self._pause(advert)
            self._keep(self._advert)
        finally:
            if self._neighbours is not None:
                self._neighbours.close()

    def _pause(self, advert: Advert) -> None:
        """Until something is asked of us, or it is time to look again."""
        with self._news:
            if not self._is_closed and not self._to_remember and self._advert == advert:
                is_eager = time.monotonic() < self._eager_until
                self._news.wait(EAGER_PAUSE if is_eager else CALM_PAUSE)

    def _exclude_own(self, advert: Advert) -> None:
        with contextlib.suppress(OSError):  # an interface may vanish while it is looked at
            hosts = advert.hosts or usable_hosts(virtual=True)
            self._book.exclude(own_addresses(hosts, advert.port))

    def _open_neighbours(self) -> Neighbours | None:
        if not self._config.neighbours:
            return None
        try:
            return Neighbours(self._config.home)
        except DistributedError as error:
            self._note("neighbour", str(error))
            return None

    def _publish(self, advert: Advert) -> None:
        if self._known is not None:
            peers = self._known.recall(advert)
            self._book.replace("known", peers, "it is not known under this namespace and job")
            self._note("known", f"{len(peers)} peers of earlier runs")
        if self._neighbours is not None and self._config.announce:
            try:
                self._neighbours.publish(advert)
            except DistributedError as error:
                self._note("neighbour", str(error))

    def _look(self, advert: Advert) -> None:
        if self._neighbours is None:
            return
        try:
            found = self._neighbours.look(advert)
        except OSError as error:
            self._note("neighbour", f"the notes of other processes cannot be read: {error}")
            return
        if found != self._seen:
            self._seen, self._eager_until = found, time.monotonic() + EAGER
            self._book.replace("neighbour", found, _ENDED)
        for key in self._neighbours.dead:
            self._book.withdraw("mdns", key, _ENDED)  # its record would last for minutes
        self._note("neighbour", f"{len(found)} other processes on this machine")

    def _keep(self, advert: Advert) -> None:
        with self._news:
            peers, self._to_remember = self._to_remember, []
        if peers and self._known is not None:
            try:
                self._known.remember(advert, peers)
            except DistributedError as error:
                self._note("known", f"peers could not be kept for the next run: {error}")

    def _note(self, source: str, words: str) -> None:
        """Keep a source's state, and log it when it changes."""
        if self._status.get(source) != words:
            self._status[source] = words
            _logger.debug("discovery, %s: %s", source, words)


def _bare(source: str, address: Address) -> Sighting:
    """Somewhere to try, without knowing whom."""
    return Sighting(
        key=str(address),
        sources=(source,),
        node=None,
        incarnation=0,
        job_tag="",
        addresses=(address,),
        version=0,
    )
