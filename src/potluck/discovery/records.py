"""What discovery sends and receives: our advert, sightings of others, and what became of them.

An :class:`Advert` is what a process announces about itself to the whole network, so nothing in
it is secret: the namespace appears as its derived tag, the job as a tag that only members can
compute from its name, the machine as its id.  A :class:`Sighting` is a hint that a process may
be at an address.  It is never trusted: the TLS handshake shows who is really there.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from potluck._types import NodeId, ProcessId
from potluck._version import THIS_BUILD, Build
from potluck.errors import BackendUnavailable
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.private_files import potluck_home
from potluck.launch_env import read_launch
from potluck.net.addresses import Address, parse_address

_JOB_TAG_BYTES = 10  # 80 bits: no two jobs of a namespace share one by chance; 16 letters


@dataclass(frozen=True, slots=True)
class Advert:
    """What this process shows: where it can be reached, and for whom that is of interest."""

    tag: str
    """Of the namespace: :attr:`~potluck.identity.namespace.NetworkNamespace.discovery_tag`."""
    node: NodeId
    incarnation: int
    job_tag: str
    """Of its job; "" for an observer, who wants to see those of every job."""
    port: int
    """Where it listens; 0 for one who only looks, such as an observer."""
    hosts: tuple[str, ...] = ()
    """The addresses it listens on; empty for all of this machine."""
    version: int = THIS_BUILD.protocol
    oldest: int = THIS_BUILD.oldest
    potluck: str = THIS_BUILD.potluck
    old_tags: tuple[str, ...] = ()
    """Tags under which absentees still search, who have missed a change of the secret."""

    @classmethod
    def of(cls, namespace: NetworkNamespace, process: ProcessId, *, job: str, port: int) -> Advert:
        """The advert of a process that works on a job within a namespace."""
        return cls(
            tag=namespace.discovery_tag,
            node=process.node,
            incarnation=process.incarnation,
            job_tag=job_tag(namespace, job),
            port=port,
            old_tags=namespace.old_tags,
        )

    @property
    def process(self) -> ProcessId:
        """Who shows it."""
        return ProcessId(self.node, self.incarnation)


def job_tag(namespace: NetworkNamespace, job: str) -> str:
    """What stands for a job's name on the network: 16 letters and digits.

    A job usually has the name of its script, which is private.  So the tag is keyed:
    without the secret of the namespace, names cannot even be guessed and compared.

    >>> lab, attic = NetworkNamespace.generate("lab"), NetworkNamespace.generate("attic")
    >>> job_tag(lab, "train.py") == job_tag(lab, "train.py")
    True
    >>> job_tag(lab, "train.py") in {job_tag(lab, "other.py"), job_tag(attic, "train.py")}
    False
    """
    key = namespace.subkey("job tag") if namespace.is_encrypted else b"insecure"
    digest = hmac.new(key, job.encode(), hashlib.sha256).digest()
    return base64.b32encode(digest[:_JOB_TAG_BYTES]).decode().rstrip("=").lower()


@dataclass(frozen=True, slots=True)
class Sighting:
    """A hint that a process may be reached at these addresses; all sources' hints in one.

    ``node`` is None where only an address is known: one given by hand, or by the environment.
    """

    key: str
    """The same for as long as it is about the same process, or the same bare address."""
    sources: tuple[str, ...]
    """Who says so, sorted: "mdns", "neighbour", "known", "given", "environment"."""
    node: NodeId | None
    incarnation: int
    """0 where it is not known: an address by hand, a peer of an earlier run."""
    job_tag: str
    """Ours, or "" where it is not known.  Other jobs are never reported."""
    addresses: tuple[Address, ...]
    """Best first."""
    version: int
    """Of its protocol; 0 where it is not known.  Others' are reported, so that one can say so."""
    name: str = ""
    """For people, where one is known; never to be relied on."""
    oldest: int = 0
    potluck: str = ""

    @property
    def build(self) -> Build | None:
        """What it runs, or ran; None where that is not known."""
        return Build.announced(self.potluck, self.version, self.oldest)

    @property
    def process(self) -> ProcessId | None:
        """Which process it says it is; None if that is not known."""
        return ProcessId(self.node, self.incarnation) if self.node and self.incarnation else None


@dataclass(frozen=True, slots=True)
class PeerFound:
    """A new process was seen."""

    sighting: Sighting


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A known process has other addresses, or is seen by other sources."""

    sighting: Sighting


@dataclass(frozen=True, slots=True)
class PeerGone:
    """No source sees the process any longer; it may still be there, and connected."""

    sighting: Sighting
    """As it was last."""
    reason: str


DiscoveryEvent: TypeAlias = PeerFound | PeerChanged | PeerGone


# --------------------------------------------------------------------------------------------------
# Where to look for others: what a caller said, what the environment says, and the usual port.
#
# Addresses by hand (``peers=[...]`` or ``POTLUCK_PEERS``) are of use only if ports can be known
# beforehand.  So a node prefers :data:`DEFAULT_PORT` and the few ports after it, and an address
# without a port means these.

DEFAULT_PORT = 52416
"""Where the first node of a machine listens if the port is free; the second one on the next."""

USUAL_PORTS = 4
"""How many of them are tried on a machine whose address was given without a port."""

MAX_GIVEN = 64
"""Addresses that may be given by hand; more are a mistake."""


@dataclass(frozen=True, slots=True)
class LauncherRendezvous:
    """What a launcher's environment says about where to meet."""

    addresses: tuple[Address, ...] = ()
    """Where rank 0 is, or may be."""
    listen_port: int | None = None
    """Where this process has to listen to be found there: it is rank 0."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LauncherRendezvous:
        """As MASTER_ADDR and the like tell; empty where no launcher has said anything.

        >>> env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "desk", "MASTER_PORT": "4711"}
        >>> LauncherRendezvous.from_environment(env).listen_port
        4711
        """
        if "POTLUCK_RUN" in environ:  # `potluck run` has said where all are, in POTLUCK_PEERS
            return cls()
        with contextlib.suppress(BackendUnavailable, ValueError):
            launch = read_launch(environ)
            masters = tuple(parse_address(text) for text in launch.masters)
            return cls(masters, masters[0].port if launch.rank == 0 else None)
        return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Which sources to use, and how."""

    peers: tuple[Address, ...] = ()
    """Given by hand; these are always tried."""
    rendezvous: LauncherRendezvous = LauncherRendezvous()
    interfaces: tuple[str, ...] = ()
    """Use these alone; empty means all that others may reach."""
    virtual: bool = False
    """Use container and VPN interfaces too."""
    multicast: bool = True
    """Ask the local network by multicast DNS."""
    neighbours: bool = True
    """Look for processes of this machine and user."""
    known: bool = True
    """Try the peers of the last run, and keep those of this one."""
    announce: bool = True
    """Be found; an observer only looks."""
    home: Path = field(default_factory=potluck_home)

    @classmethod
    def from_environment(
        cls, peers: Iterable[str] = (), *, environ: Mapping[str, str] = os.environ
    ) -> DiscoveryConfig:
        """The usual configuration: arguments first, then ``POTLUCK_PEERS`` and a launcher's words.

        >>> config = DiscoveryConfig.from_environment(["10.0.0.5:4711"], environ={})
        >>> [str(address) for address in config.peers]
        ['10.0.0.5:4711']
        """
        texts = list(peers) or re.split(r"[,\s]+", environ.get("POTLUCK_PEERS", "").strip())
        return cls(
            peers=given_addresses(text for text in texts if text),
            rendezvous=LauncherRendezvous.from_environment(environ),
            interfaces=tuple(environ.get("POTLUCK_INTERFACES", "").replace(",", " ").split()),
        )


def given_addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    """Addresses by hand; one without a port becomes several, with the usual ports.

    >>> [str(address) for address in given_addresses(["desk"])][:2]
    ['desk:52416', 'desk:52417']
    """
    found: dict[Address, None] = {}
    for text in texts:
        address = parse_address(text, default_port=0)
        ports = [address.port] if address.port else range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS)
        found |= {Address(address.host, port): None for port in ports}
    if len(found) > MAX_GIVEN * USUAL_PORTS:
        msg = f"{len(found)} addresses of peers were given; at most {MAX_GIVEN} machines can be"
        raise ValueError(msg)
    return tuple(found)
