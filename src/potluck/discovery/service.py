"""Finding the others: every source at once, merged into one stream of events.

Sources, fastest first: files of processes on the same machine, multicast DNS, peers of the last
run, addresses given by hand, the environment of a launcher.  They run on threads of their own and
never call into the node but for ``wake``, which says that :meth:`Discovery.drain` has something.
What is not drained is merged, never queued up: at most one event for each process waits.

Everything here is a hint.  Hints are bounded in number and size, and no peer is trusted before TLS
has shown who it is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from potluck import _process
from potluck._process import Closing
from potluck.discovery.local import MAX_KNOWN, KnownPeers, LocalProcesses
from potluck.discovery.mdns import SERVICE, MdnsRecord, MdnsSource
from potluck.discovery.records import (
    Advert,
    DiscoveryConfig,
    DiscoveryEvent,
    PeerChanged,
    PeerFound,
    PeerGone,
    Sighting,
)
from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.net.addresses import Address, is_loopback, usable_hosts

# --------------------------------------------------------------------------------------------------
# Who is seen at this moment, by all sources together, and what of it has been told already.
#
# Sources write into the book, the node reads the difference to what it has read before.  So a node
# that does not read for a while misses nothing and nothing piles up: at most one event for each
# process waits, and whoever came and went in between was never there.

MAX_PER_SOURCE = 300
"""Sightings kept of one source; more push out its own oldest."""

MAX_ADDRESSES = 12
"""Addresses of one process, from all sources together."""

PREFERENCE = ("neighbour", "mdns", "known", "given", "environment")
"""Whose addresses come first: the shortest way, then the freshest news."""

_LIVE = frozenset({"neighbour", "mdns"})  # these hear the process itself


class SightingTable:
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
        """A source sees a process, or something new about it."""
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
        """A source no longer sees a process."""
        with self._lock:
            if self._reports[source].pop(key, None) is None:
                return
            self._reasons[key] = reason
        self._touch()

    def replace(self, source: str, sightings: Iterable[Sighting], reason: str) -> None:
        """A source sees these processes and no others."""
        wanted = {sighting.key: sighting for sighting in sightings}
        with self._lock:
            gone = self._reports[source].keys() - wanted.keys()
        for key in gone:
            self.withdraw(source, key, reason)
        for sighting in wanted.values():
            self.report(source, sighting)

    def exclude(self, addresses: Iterable[Address]) -> None:
        """These addresses are our own: a sighting of only these is ourselves."""
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

    def seen_by(self, source: str) -> list[Sighting]:
        """What one source sees at this moment."""
        with self._lock:
            return list(self._reports[source].values())

    def drain(self) -> list[DiscoveryEvent]:
        """What has changed since the last call."""
        with self._lock:
            if not self._is_dirty:
                return []
            self._is_dirty = False
            before, self._told = self._told, self._visible()
            reasons, self._reasons = self._reasons, {}
            events: list[DiscoveryEvent] = [
                PeerGone(sighting, reasons.get(key) or "it was found under its own name")
                for key, sighting in before.items()
                if key not in self._told
            ]
            for key, sighting in self._told.items():
                if key not in before:
                    events.append(PeerFound(sighting))
                elif before[key] != sighting:
                    events.append(PeerChanged(sighting))
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
        oldest=first.oldest or second.oldest,
        potluck=first.potluck or second.potluck,
        name=first.name or second.name,
    )


# --------------------------------------------------------------------------------------------------

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
        self._book = SightingTable(wake)
        self._names: dict[str, str] = {}
        """Of records of multicast DNS, with the key of whom they are about."""
        self._status: dict[str, str] = {}
        self._strangers: dict[str, MdnsRecord] = {}
        self._to_remember: list[Sighting] = []
        self._known = KnownPeers(config.home) if config.known else None
        self._hosts: frozenset[str] = frozenset()
        """The addresses of this machine."""
        self._seen: list[Sighting] = []
        self._eager_until = time.monotonic() + EAGER
        self._is_closed = self._is_forked = False
        self._news = threading.Condition()
        self._exclude_own(advert)
        self._report_given()
        self._neighbours = self._open_neighbours()
        self._publish(advert)  # before multicast: one who hears of us there looks for our note
        self._mdns = (
            MdnsSource(advert, config, self._heard, self._lost, service=service)
            if config.multicast
            else None
        )
        self._thread = threading.Thread(
            target=self._run, args=(advert,), name="potluck-discovery", daemon=True
        )
        self._thread.start()
        _process.on_fork(self)

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

    def remember(self, peers: Iterable[Sighting]) -> None:
        """Keep peers that have proved who they are, at once, with addresses where they answered."""
        with self._news:
            self._to_remember = [*self._to_remember, *peers][-MAX_KNOWN:]
            self._news.notify()

    @property
    def strangers(self) -> int:
        """How many processes of other groups or jobs were seen; bounded."""
        return len(self._strangers)

    @property
    def foreigners(self) -> list[MdnsRecord]:
        """Machines of another namespace: of each the process that was heard first."""
        found = {each.node: each for each in list(self._strangers.values())[::-1]}
        return [each for each in found.values() if each.tag != self._advert.tag]

    def status(self) -> dict[str, str]:
        """In words, for each source: what it does, or why it cannot."""
        mdns = {"mdns": self._mdns.status} if self._mdns is not None else {}
        return {**self._status, **mdns}

    def close(self) -> None:
        """Announce that we leave, and end every thread; takes about half a second."""
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

    def _heard(self, name: str, heard: MdnsRecord) -> bool:
        sighting = heard.sighting(self._advert)
        before = self._names.get(name)
        if before is not None and (sighting is None or sighting.key != before):
            self._lost(name, "its address belongs to another process now")
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

    def _run(self, published: Advert) -> None:
        own_at = 0.0
        try:
            while not self._is_closed:
                advert = self._advert
                if advert != published:
                    published = advert
                    self._publish(advert)
                    if self._mdns is not None:
                        self._mdns.update(advert)
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
            self._hosts = frozenset(usable_hosts(virtual=True))
            self._book.exclude(own_addresses(advert.hosts or self._hosts, advert.port))

    def _open_neighbours(self) -> LocalProcesses | None:
        if not self._config.neighbours and not self._config.announce:
            return None
        try:
            return LocalProcesses(self._config.home)
        except DistributedError as error:
            self._note("neighbour", str(error))
            return None

    def _publish(self, advert: Advert) -> None:
        if self._known is not None:
            peers = self._known.recall(advert)
            self._book.replace("known", peers, "it is not known in this group and job")
            self._note("known", f"{len(peers)} peers of earlier runs")
        if self._neighbours is not None and self._config.announce:
            try:
                self._neighbours.publish(advert)
            except (DistributedError, OSError) as error:
                self._note("neighbour", str(error))

    def _look(self, advert: Advert) -> None:
        if self._neighbours is None or not self._config.neighbours:
            return
        try:
            found = self._neighbours.look(advert)
        except OSError as error:
            self._note("neighbour", f"the notes of other processes cannot be read: {error}")
            return
        before, seen = {each.key for each in self._seen}, self._book.seen_by("mdns")
        if found != self._seen:
            self._seen, self._eager_until = found, time.monotonic() + EAGER
            self._book.replace("neighbour", found, _ENDED)
        # A process of this machine whose note is gone has ended, also if another process removed
        # the note before we saw it.  Its record of multicast DNS would last for minutes.
        for each in seen:
            is_here = each.key in before or self._is_of_this_machine(each)
            if is_here and each.process and not self._neighbours.has_note(each.process):
                self._book.withdraw("mdns", each.key, _ENDED)
        self._note("neighbour", f"{len(found)} other processes on this machine")

    def _is_of_this_machine(self, sighting: Sighting) -> bool:
        """By its key and its address: a copy of our key on another machine is not."""
        return sighting.node == self._advert.node and any(
            is_loopback(host) or host in self._hosts
            for host in (address.host for address in sighting.addresses)
        )

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
