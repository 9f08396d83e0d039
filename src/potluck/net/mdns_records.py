"""How an advert is written into a record of multicast DNS, and read from one with every suspicion.

The name of the record is ``TAG-JOB-TOKEN``, so that strangers can be told by it.  Its text says, in
six short fields, what :class:`~potluck.net.discovery_records.Advert` holds; the tags of earlier
secrets are cut short, since they only have to be recognised.  Everybody on the network may write
such records.  What does not look exactly like one of ours is no record.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.net.addresses import MAX_PORT, Address, by_preference, is_loopback
from potluck.net.discovery_records import Advert, Sighting
from potluck.net.names import short_name
from potluck.vocabulary import NodeId

__all__ = ["MAX_TEXT", "SERVICE", "Heard", "label_of", "properties_of", "read_record"]

SERVICE = "_potluck._tcp.local."

MAX_TEXT = 512
"""Bytes of a text that is read at all; ours have about 150, and 270 after many rotations."""

MAX_HOSTS = 8
"""Addresses of one record that are looked at: more would let it point us at a whole network."""

OLD_TAG = 12
"""Letters shown of an earlier tag: 60 bits, enough to recognise it."""

IPV6 = 6

_LABEL = re.compile(r"[a-z2-7]{26}-[a-z2-7]{16}-[0-9a-f]{12}")
_FORMS: dict[bytes, re.Pattern[bytes]] = {
    b"v": re.compile(rb"[0-9]{1,6}"),
    b"t": re.compile(rb"[a-z2-7]{26}"),
    b"n": re.compile(rb"[0-9a-z]{32}"),
    b"i": re.compile(rb"[0-9]{1,18}"),
    b"j": re.compile(rb"[a-z2-7]{16}"),
    b"p": re.compile(rb"[0-9]{1,5}"),
}
_OLD = re.compile(rb"[a-z2-7]{12}(,[a-z2-7]{12}){0,7}")


@dataclass(frozen=True, slots=True)
class Heard:
    """What a record says, of whatever namespace and job."""

    tag: str
    job_tag: str
    node: NodeId
    incarnation: int
    version: int
    addresses: tuple[Address, ...]
    old_tags: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """The machine as a person recognises it."""
        return f"{short_name(self.node)} at {self.addresses[0]}"

    @property
    def is_elsewhere(self) -> str:
        """What is said of it wherever it is seen from another namespace."""
        return f"{self.who} belongs to another namespace"

    def sighting(self, advert: Advert) -> Sighting | None:
        """What it means for us: None if it is about another namespace, another job or ourselves."""
        if (self.node, self.incarnation) == advert.process:
            return None
        if self.tag == advert.tag:
            if advert.job_tag not in {"", self.job_tag}:
                return None
            job = self.job_tag
        elif self.tag in advert.old_tags or advert.tag[:OLD_TAG] in self.old_tags:
            job = ""  # tags of jobs follow the secret, which one of us has missed a change of
        else:
            return None
        return Sighting(
            key=f"{self.node}/{self.incarnation}",
            sources=("mdns",),
            node=self.node,
            incarnation=self.incarnation,
            job_tag=job,
            addresses=self.addresses,
            version=self.version,
        )


def label_of(advert: Advert) -> str:
    """The name of its record: different for each process, and in all parts for each job.

    The last part also names its addresses.  Were that the same for two jobs, taking back the record
    of the one would take back the addresses of the other.
    """
    about = f"{advert.node}/{advert.incarnation}/{advert.tag}/{advert.job_tag}"
    token = hashlib.sha256(about.encode()).hexdigest()[:12]
    return f"{advert.tag}-{advert.job_tag}-{token}"


def is_label(label: str) -> bool:
    """Whether a record of this name can be one of ours."""
    return _LABEL.fullmatch(label) is not None


def properties_of(advert: Advert) -> dict[str, str]:
    """The text of its record."""
    fields = {
        "v": str(advert.version),
        "t": advert.tag,
        "n": str(advert.node),
        "i": str(advert.incarnation),
        "j": advert.job_tag,
        "p": str(advert.port),
    }
    if advert.old_tags:
        fields["o"] = ",".join(tag[:OLD_TAG] for tag in advert.old_tags[:8])
    return fields


def read_record(
    properties: Mapping[bytes, bytes | None], hosts: Sequence[str], *, loopback: bool
) -> Heard | None:
    """What a record says; None if it is not exactly of our form, or leads nowhere.

    ``loopback`` says whether addresses that lead back to this machine are meant that way.
    """
    values = {name: properties.get(name) or b"" for name in _FORMS}
    if not all(form.fullmatch(values[name]) for name, form in _FORMS.items()):
        return None
    port, incarnation = int(values[b"p"]), int(values[b"i"])
    usable = [host for host in by_preference(hosts) if _leads_somewhere(host, loopback=loopback)]
    if not 0 < port <= MAX_PORT or not incarnation or not usable:
        return None
    old = properties.get(b"o") or b""
    return Heard(
        tag=values[b"t"].decode(),
        job_tag=values[b"j"].decode(),
        node=NodeId(values[b"n"].decode()),
        incarnation=incarnation,
        version=int(values[b"v"]),
        addresses=tuple(Address(host, port) for host in usable[:MAX_HOSTS]),
        old_tags=tuple(old.decode().split(",")) if _OLD.fullmatch(old) else (),
    )


def _leads_somewhere(host: str, *, loopback: bool) -> bool:
    """Not back to ourselves; and a link-local address is only good with its interface."""
    if is_loopback(host):
        return loopback
    address = ipaddress.ip_address(host.partition("%")[0])
    is_bare = address.version == IPV6 and address.is_link_local and "%" not in host
    return not (is_bare or address.is_unspecified or address.is_multicast)
