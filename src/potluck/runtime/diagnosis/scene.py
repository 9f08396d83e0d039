"""What can be seen of a network from one machine: facts only, judged by the checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from potluck.net.addresses import Address, Interface
from potluck.net.mdns_records import Heard
from potluck.net.names import short_name
from potluck.vocabulary import NodeId

__all__ = ["Outcome", "Probe", "Scene", "Target"]


class Outcome(enum.Enum):
    """How an attempt to meet somebody ended."""

    MET = "met"  # it has proved to be a member, and we agree on who belongs
    REFUSED = "refused"  # the machine answers, nobody listens on that port
    SILENT = "silent"  # no answer at all
    UNREACHABLE = "unreachable"  # the network says that there is no way
    UNKNOWN_NAME = "unknown name"
    OTHER_NAMESPACE = "other namespace"
    OTHER_VERSION = "other version"
    NOT_POTLUCK = "not potluck"
    DECLINED = "declined"  # one of the two does not accept the other as a member
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt, at one address."""

    address: Address
    outcome: Outcome
    words: str = ""
    """The error, for a person."""
    life: str = ""
    """By what the machine is known to be on, where the port itself is silent."""
    node: NodeId | None = None
    """Who answered, once proved."""


@dataclass(frozen=True, slots=True)
class Target:
    """Somebody whom this machine tried to meet, and how that went at each address."""

    name: str
    """For people."""
    origin: str
    """"given" by hand, "known" from an earlier run, or "heard" on the network."""
    probes: tuple[Probe, ...]
    node: NodeId | None = None
    """Who it should be, where that is known."""

    @property
    def met(self) -> Probe | None:
        """The attempt that succeeded; None if none did."""
        return self.first(Outcome.MET)

    def first(self, *outcomes: Outcome) -> Probe | None:
        """The first attempt that ended in one of these ways."""
        return next((probe for probe in self.probes if probe.outcome in outcomes), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that the checks judge."""

    node: NodeId
    namespace: str
    """The name of the namespace, for people."""
    tag: str
    old_tags: tuple[str, ...] = ()
    version: int
    interfaces: tuple[Interface, ...]
    mdns: str
    """What multicast DNS does on this machine, in words."""
    mdns_works: bool
    """Whether it could be opened."""
    heard_self: bool
    """Whether our own announcement came back to us from the network."""
    heard: tuple[Heard, ...] = ()
    """Everybody else's, of whatever namespace."""
    targets: tuple[Target, ...] = ()
    seconds: float = 0.0
    """For how long it was listened."""

    @property
    def hosts(self) -> list[str]:
        """The addresses at which others may reach this machine."""
        return [host for each in self.interfaces if not each.skipped for host in each.hosts]

    @property
    def met(self) -> list[NodeId]:
        """Other machines that were met."""
        found = [target.met.node for target in self.targets if target.met is not None]
        return sorted({node for node in found if node is not None and node != self.node})


def who(node: NodeId, address: Address | str) -> str:
    """A machine as a person recognises it."""
    return f"{short_name(node)} at {address}"
