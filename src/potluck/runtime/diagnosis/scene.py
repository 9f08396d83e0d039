"""What can be seen of a network from one machine: facts only, judged by the checks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.net.addresses import Address, Interface
from potluck.net.mdns_records import Heard
from potluck.net.names import short_name
from potluck.runtime.diagnosis.machine import Machine
from potluck.runtime.diagnosis.packets import Passage
from potluck.vocabulary import NodeId

__all__ = ["Outcome", "Probe", "Rate", "Scene", "Target"]


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
    MUTE = "mute"  # the connection was taken, and then nothing was said
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
    code: int = 0
    """The error's number, where the system gave one."""
    means: tuple[str, ...] = ()
    """Where the address is a name: to what that leads here."""
    skew: float | None = None
    """Seconds by which the clock over there is ahead of ours; None if it was not told."""
    passage: Passage | None = None
    """What passes on the way; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What another machine that looked around as well has shown: how much goes through to it."""

    octets: int
    """Bytes per second."""
    host: str
    """The address of ours that it went through."""
    is_on_battery: bool = False
    """Whether the machine over there runs on its battery."""


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
    rate: Rate | None = None
    """What was measured with it; None if it was not."""

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
    has_jobs: bool = False
    """Whether somebody of this namespace seems to work on something."""
    machine: Machine = field(default_factory=Machine)
    """What is known of this machine itself."""
    names: Mapping[NodeId, str] = field(default_factory=dict)
    """What the machines of the namespace are called."""

    @property
    def hosts(self) -> list[str]:
        """The addresses at which others may reach this machine."""
        return [host for each in self.interfaces if not each.skipped for host in each.hosts]

    @property
    def met(self) -> list[NodeId]:
        """Other machines that were met."""
        found = [target.met.node for target in self.targets if target.met is not None]
        return sorted({node for node in found if node is not None and node != self.node})

    def name_of(self, node: NodeId) -> str:
        """What people call a machine."""
        return self.names.get(node) or short_name(node)

    def who(self, node: NodeId, address: Address | str) -> str:
        """A machine as a person recognises it."""
        return f"{self.name_of(node)} at {address}"

    def interface_of(self, host: str) -> str:
        """The name of the interface that has an address of ours; "" if none has."""
        return next((each.name for each in self.interfaces if host in each.hosts), "")
