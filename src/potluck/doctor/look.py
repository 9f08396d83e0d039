"""Looking around: listens, announces, and tries to meet everybody it learns of, for a few seconds.

While it looks, this machine can be found and dialled by another one that does the same; so running
it on two machines at once checks the way between them in both directions, without any job.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from potluck import _time as node_clock
from potluck._types import NodeId, ProcessId
from potluck._version import NewerFile
from potluck.backend.port import NodePort
from potluck.cluster.topology import LinkStore, local_profile
from potluck.discovery.local import KnownPeers
from potluck.discovery.records import (
    DEFAULT_PORT,
    USUAL_PORTS,
    Advert,
    DiscoveryConfig,
    given_addresses,
)
from potluck.doctor.facts import (
    DoctorFacts,
    MachineFacts,
    ProbeOutcome,
    Rate,
    StartupError,
    TakenPort,
    Target,
    gather_machine,
    holder_of,
)
from potluck.doctor.probe import ConnectionProbes, DoctorListener, PeerThroughput, probe, result_by
from potluck.errors import DistributedError
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.private_files import DamagedFile, UnsafeFile
from potluck.membership.topology import ClusterTopology, ConnectionProfile, LinkSource
from potluck.net.addresses import Address, Interface, interfaces

SECONDS = 3.0
"""How long to listen.  A machine that has just announced itself answers only after a second
(RFC 6762, 6), everybody else at once."""

LATER = 6.0
"""Seconds after which those who have not answered by then are silent."""

JOB = "potluck doctor"

WORKERS = 24
_PAUSE = 0.05  # seconds between two looks at what was heard

_ANOTHER_PROGRAM = frozenset({ProbeOutcome.NOT_POTLUCK, ProbeOutcome.FAILED, ProbeOutcome.MUTE})


def look_around(
    namespace: NetworkNamespace | str | None = None,
    peers: Sequence[str] = (),
    *,
    seconds: float = SECONDS,
) -> DoctorFacts:
    """Everything that can be seen from here; takes ``seconds``, and a few more if some are silent.

    Files that others may read, or that are damaged, are part of what is seen.
    """
    config = DiscoveryConfig.from_environment(peers)
    texts = list(peers) or [str(address) for address in config.peers]
    given = {text: given_addresses([text]) for text in texts}
    found = tuple(interfaces(virtual=config.virtual, only=config.interfaces))
    try:
        if not isinstance(namespace, NetworkNamespace):
            namespace = NetworkNamespace.load_or_create(namespace)
        port, busy = _open_port(namespace)
    except (UnsafeFile, DamagedFile, NewerFile) as error:
        return _unable(found, StartupError(error.message, error.hint or ""))
    with port:
        return _Look(namespace, port, config, found, busy).scene(given, seconds)


def _open_port(namespace: NetworkNamespace) -> tuple[NodePort, list[int]]:
    """Where nodes usually listen, so that the very port is tried; else anywhere."""
    busy: list[int] = []
    for number in range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS):
        try:
            return NodePort(namespace, port=number), busy
        except (UnsafeFile, DamagedFile, NewerFile):
            raise
        except OSError:  # taken by a node that runs here, or by somebody else
            busy.append(number)
    return NodePort(namespace), busy


def _unable(found: tuple[Interface, ...], trouble: StartupError) -> DoctorFacts:
    """What is seen where this machine cannot even say who it is."""
    return DoctorFacts(
        node=NodeId(""),
        namespace="",
        tag="",
        interfaces=found,
        mdns="not tried",
        mdns_works=False,
        heard_self=False,
        machine=MachineFacts(system=platform.system(), trouble=trouble),
    )


class _Look:
    """One look, with everything it needs."""

    def __init__(
        self,
        namespace: NetworkNamespace,
        port: NodePort,
        config: DiscoveryConfig,
        found: tuple[Interface, ...],
        busy: Sequence[int],
    ) -> None:
        self._namespace = namespace
        self._port = port
        self._config = config
        self._interfaces = found
        self._busy = busy
        self._advert = Advert.of(namespace, port.process, job=JOB, port=port.port)

    def scene(self, given: dict[str, tuple[Address, ...]], seconds: float) -> DoctorFacts:
        """Look, and tell."""
        consulting = PeerThroughput(self._port, self._advert.job_tag, local_profile())
        pool = ThreadPoolExecutor(WORKERS, "potluck-probe")
        try:
            own = frozenset(host for each in self._interfaces for host in each.hosts)
            trying = ConnectionProbes(pool, self._port.members, consulting, own)
            return self._listen(trying, pool, given, seconds)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            consulting.close()

    def _listen(
        self,
        trying: ConnectionProbes,
        pool: ThreadPoolExecutor,
        given: dict[str, tuple[Address, ...]],
        seconds: float,
    ) -> DoctorFacts:
        machine = pool.submit(self._machine)
        for text, addresses in given.items():
            trying.start(text, "given", addresses)
        advert, config = self._advert, self._config
        with contextlib.closing(DoctorListener(advert, config)) as listener:
            began = time.monotonic()
            while time.monotonic() < listener.listen_until(began + seconds):
                trying.start_heard(listener.others(), advert)
                trying.measure(listener.colleagues(), advert)
                time.sleep(_PAUSE)
            heard = listener.others()
            known = KnownPeers(config.home).recall(replace(advert, job_tag=""))
            trying.start_known(known, heard)
            deadline = time.monotonic() + LATER
            targets = self._with_the_map(trying.results(deadline))
            return DoctorFacts(
                node=advert.node,
                namespace=self._namespace.name,
                tag=advert.tag,
                old_tags=advert.old_tags,
                interfaces=self._interfaces,
                targets=targets,
                mdns=listener.status,
                mdns_works=listener.is_open,
                heard_self=listener.heard_self,
                heard=tuple(heard),
                seconds=seconds,
                has_jobs=bool(self._busy) or len(heard) > len(listener.colleagues()),
                machine=result_by(deadline, machine, MachineFacts()),
                names=self._names(),
            )

    def _with_the_map(self, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        """Keep what was measured now; where nothing was, add what an earlier run has measured."""
        now, store = node_clock.now(), LinkStore(self._advert.tag, self._config.home)
        remembered = store.load(now)
        topology = ClusterTopology(self._port.process)
        used = [each.hosts[0] for each in self._interfaces if not each.skipped]
        found = []
        for target in targets:
            rate, link = target.rate, remembered.get(target.node) if target.node else None
            if rate is not None and target.node is not None:
                peer = ProcessId(target.node, 0)
                topology.add_node(peer, now=now)
                measured = ConnectionProfile(
                    up=rate.bytes_per_second,
                    down=rate.down,
                    rated_at=now,
                    rated_by=LinkSource.DOCTOR,
                    latency=rate.latency,
                    measured_at=now,
                    measured_by=LinkSource.DOCTOR,
                )
                topology.add_connection(topology.me, peer, measured)
            elif link is not None and link.up and len(used) == 1:  # else it is not known by which
                age, source = now - link.rated_at, link.rated_by.value
                rate = Rate(link.up, used[0], age=age, source=source)
            found.append(replace(target, rate=rate))
        with contextlib.suppress(DistributedError, OSError):  # what was seen is shown all the same
            store.save(topology, now)
        return tuple(found)

    def _names(self) -> dict[NodeId, str]:
        roster = self._port.members.roster
        return {each.node_id: each.name for each in roster.members} if roster else {}

    def _machine(self) -> MachineFacts:
        """What this machine says of itself, and who has the ports that nodes usually have."""
        members = self._port.members
        ports = [Address("127.0.0.1", number) for number in self._busy]
        with ThreadPoolExecutor(USUAL_PORTS, "potluck-ports") as pool:
            answers = list(pool.map(lambda port: probe(members, port), ports))
        taken = [
            TakenPort(answer.address.port, holder_of(answer.address.port))
            for answer in answers
            if answer.outcome in _ANOTHER_PROGRAM
        ]
        return gather_machine(self._interfaces, taken, usual=USUAL_PORTS)
