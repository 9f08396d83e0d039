"""What discovery tells and hears: an advert of ours, sightings of others, and what became of them.

An :class:`Advert` is what a process says about itself to everybody on the network, so nothing in
it is secret: the namespace appears as its derived tag, the job as a tag that only members can
compute from its name, the machine as its id.  A :class:`Sighting` is a hint that somebody may be
somewhere.  It is never believed: whoever dials finds out, by TLS, who is there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import TypeAlias

from potluck.net.addresses import Address
from potluck.net.frames import PROTOCOL_VERSION
from potluck.net.namespace import NetworkNamespace
from potluck.vocabulary import NodeId, ProcessId

__all__ = [
    "Advert",
    "Changed",
    "DiscoveryEvent",
    "Found",
    "Gone",
    "Sighting",
    "job_tag",
]

_JOB_TAG_BYTES = 10  # 80 bits: no two jobs of a namespace share one by chance; 16 letters


@dataclass(frozen=True, slots=True)
class Advert:
    """What this process shows: where it can be reached, and for whom that is of interest."""

    tag: str
    """Of the namespace: :attr:`~potluck.net.namespace.NetworkNamespace.discovery_tag`."""
    node: NodeId
    incarnation: int
    job_tag: str
    """Of its job; "" for an observer, who wants to see those of every job."""
    port: int
    """Where it listens; 0 for one who only looks, such as an observer."""
    hosts: tuple[str, ...] = ()
    """The addresses it listens on; empty for all of this machine."""
    version: int = PROTOCOL_VERSION
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

    A job is usually called like its script, which is nobody else's business.  So the tag is keyed:
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

    @property
    def process(self) -> ProcessId | None:
        """Which process it says it is; None if that is not known."""
        return ProcessId(self.node, self.incarnation) if self.node and self.incarnation else None


@dataclass(frozen=True, slots=True)
class Found:
    """Somebody new."""

    sighting: Sighting


@dataclass(frozen=True, slots=True)
class Changed:
    """Somebody known, with other addresses, or seen by other sources."""

    sighting: Sighting


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody says any longer that it is there; it may well be: a connection knows better."""

    sighting: Sighting
    """As it was last."""
    reason: str


DiscoveryEvent: TypeAlias = Found | Changed | Gone
