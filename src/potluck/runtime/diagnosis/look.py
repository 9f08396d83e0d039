"""Looking around: listens, announces, and tries to meet everybody it learns of, for a few seconds.

While it looks, this machine can be found and dialled by another one that does the same; so running
it on two machines at once checks the way between them in both directions, without any job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from potluck.backend.membership import Membership
from potluck.backend.port import NodePort
from potluck.net.addresses import Address, interfaces
from potluck.net.discovery import Advert, DiscoveryConfig, Sighting
from potluck.net.discovery_config import DEFAULT_PORT, USUAL_PORTS, given_addresses
from potluck.net.frames import PROTOCOL_VERSION
from potluck.net.known_peers import KnownPeers
from potluck.net.mdns_records import SERVICE, Heard
from potluck.net.mdns_source import MdnsSource
from potluck.net.names import short_name
from potluck.net.namespace import NetworkNamespace
from potluck.runtime.diagnosis.probe import probe
from potluck.runtime.diagnosis.scene import Probe, Scene, Target, who
from potluck.vocabulary import NodeId

__all__ = ["SECONDS", "look_around"]

SECONDS = 3.0
"""For how long it is listened.  Whoever has just announced himself answers only after a second
(RFC 6762, 6), everybody else at once."""

DOCTORS = "_potluck-doctor._tcp.local."
"""Where those who look announce themselves: jobs are not disturbed."""

JOB = "potluck doctor"

LINGER = 1.5  # seconds: one who has just come may get our answer only after a second
LONGEST = 4.0  # seconds that others can make us stay
MAX_HEARD = 256
MAX_TARGETS = 32
ADDRESSES_EACH = 3
WORKERS = 16
_PAUSE = 0.05  # seconds between two looks at what was heard


def look_around(
    namespace: NetworkNamespace, peers: Sequence[str] = (), *, seconds: float = SECONDS
) -> Scene:
    """Everything that can be seen from here; takes ``seconds``, and a few more if some are silent.

    Raises a :class:`~potluck.errors.DistributedError` where this machine itself cannot take part.
    """
    config = DiscoveryConfig.from_environment(peers)
    texts = list(peers) or [str(address) for address in config.peers]
    given = {text: given_addresses([text]) for text in texts}
    with _open_port(namespace) as port, ThreadPoolExecutor(WORKERS, "potluck-probe") as pool:
        advert = Advert.of(namespace, port.process, job=JOB, port=port.port)
        trying = _Trying(pool, port.members)
        for text, addresses in given.items():
            trying.start(text, "given", addresses)
        with _ears(advert, config) as ears:
            began = time.monotonic()
            while time.monotonic() < ears.listen_until(began + seconds):
                trying.start_heard(ears.others(), advert)
                time.sleep(_PAUSE)
            heard = ears.others()
            trying.start_known(KnownPeers(config.home).recall(replace(advert, job_tag="")), heard)
            targets = trying.results()
            works, status = ears.is_open, ears.status
        return Scene(
            node=port.process.node,
            namespace=namespace.name,
            tag=advert.tag,
            old_tags=advert.old_tags,
            version=PROTOCOL_VERSION,
            interfaces=tuple(interfaces(virtual=config.virtual, only=config.interfaces)),
            mdns=status,
            mdns_works=works,
            heard_self=ears.heard_self,
            heard=tuple(heard),
            targets=targets,
            seconds=seconds,
        )


def _open_port(namespace: NetworkNamespace) -> NodePort:
    """Where nodes usually listen, so that the very port is tried; else anywhere."""
    for number in range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS):
        with contextlib.suppress(OSError):  # taken by a node that runs here
            return NodePort(namespace, port=number)
    return NodePort(namespace)


class _Ears:
    """What is heard: the jobs on this network, and others who look."""

    def __init__(self, advert: Advert, config: DiscoveryConfig) -> None:
        self._advert = advert
        self._heard: dict[str, Heard] = {}
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


def _ears(advert: Advert, config: DiscoveryConfig) -> contextlib.closing[_Ears]:
    return contextlib.closing(_Ears(advert, config))


@dataclass
class _Trying:
    """Attempts under way, each target's addresses one beside the other."""

    pool: ThreadPoolExecutor
    members: Membership
    _started: dict[str, tuple[Target, list[Future[Probe]]]] = field(default_factory=dict)
    _addresses: set[Address] = field(default_factory=set)

    def start(
        self, name: str, origin: str, addresses: Iterable[Address], node: NodeId | None = None
    ) -> None:
        """Try somebody at all of these addresses."""
        if name in self._started or len(self._started) >= MAX_TARGETS:
            return
        addresses = list(addresses)
        self._addresses.update(addresses)
        target = Target(name, origin, (), node)
        attempts = [self.pool.submit(probe, self.members, each) for each in addresses]
        self._started[name] = target, attempts

    def start_heard(self, heard: Iterable[Heard], advert: Advert) -> None:
        """Try those of our namespace who announce themselves; strangers are told by their tag."""
        for each in heard:
            ours = each.tag == advert.tag and each.version == advert.version
            addresses = each.addresses[:ADDRESSES_EACH]
            if ours and each.node != advert.node and self._addresses.isdisjoint(addresses):
                self.start(who(each.node, addresses[0]), "heard", addresses, each.node)

    def start_known(self, known: Iterable[Sighting], heard: Iterable[Heard]) -> None:
        """Try those of earlier runs who were not heard."""
        nodes = {each.node for each in heard}
        for each in known:
            if each.node is None or each.node in nodes:
                continue
            name = each.name or short_name(each.node)
            addresses = each.addresses[:ADDRESSES_EACH]
            if self._addresses.isdisjoint(addresses):
                self.start(f"{name} at {addresses[0]}", "known", addresses, each.node)

    def results(self) -> tuple[Target, ...]:
        """How it went; every attempt ends within seconds."""
        return tuple(
            replace(target, probes=tuple(attempt.result() for attempt in attempts))
            for target, attempts in self._started.values()
        )
