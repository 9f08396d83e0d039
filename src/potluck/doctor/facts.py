"""What can be seen of a network from one machine: facts only, judged by the checks."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from potluck import _platform
from potluck._types import NodeId
from potluck._version import THIS_BUILD, Build
from potluck.cluster.topology import local_profile
from potluck.discovery.mdns import MdnsRecord
from potluck.identity.node import short_name
from potluck.membership.topology import Battery
from potluck.net.addresses import Address, Interface

# --------------------------------------------------------------------------------------------------
# Whether packets of full size arrive: one is sent, and the other side's kernel must acknowledge.
#
# What is sent is the beginning of a TLS record that never ends, so no program over there sees more
# than a caller who has thought better of it.  Where a full packet is lost on the way (a switch or a
# tunnel with a smaller MTU that does not say so), the largest size that arrives is looked for.

HEADERS = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Bytes of a packet that are taken by the headers of IP and TCP."""

OPTIONS = 12
"""Bytes that the time stamps of TCP take, which every system sends."""

SIZES = (1400, 1280, 1000, 576)
"""Packets that are tried where those of full size do not pass, in bytes."""

CONNECTING = 1.0  # seconds
ARRIVING = 0.9  # seconds: two losses in a row are repeated within that
LARGEST = 9000  # bytes: the largest packets of any home network
_LOOKING = 0.01  # seconds between two looks

_RECORD = b"\x16\x03\x01\x3f\xff"  # the header of a record of 16383 bytes, which will not come


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What passes on the way to a peer."""

    packet: int
    """Bytes of the largest packet that the two sides have agreed on."""
    passes: int
    """Bytes of the largest packet that was seen to arrive: smaller if the way loses larger ones."""


def measure_passage(address: Address) -> PathFacts | None:
    """Try packets of full size, and if they are lost smaller ones; None if nothing can be told."""
    agreed, arrived = _try(address, 0)
    if agreed == 0 or arrived is None:
        return None
    if arrived:
        return PathFacts(agreed, agreed)
    sizes = [size for size in SIZES if size < agreed]
    with ThreadPoolExecutor(len(SIZES), "potluck-packets") as pool:
        results = list(pool.map(lambda size: _try(address, size)[1], sizes))
    passed = [size for size, result in zip(sizes, results, strict=True) if result]
    return PathFacts(agreed, passed[0]) if passed else None


def _try(address: Address, size: int) -> tuple[int, bool | None]:
    """Send one packet of this many bytes, 0 for full size: the agreed size, and if it arrived."""
    family, kind, proto, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, kind, proto) as sock:
        sock.settimeout(CONNECTING)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if size:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - HEADERS[family])
        sock.connect(target)
        # One byte more than a segment takes would make the kernel send two.
        segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        sock.sendall(_RECORD.ljust(min(segment, LARGEST), b"\0"))
        return segment + HEADERS[family] + OPTIONS, _arrives(sock)
    return 0, None


def _arrives(sock: socket.socket) -> bool | None:
    deadline = time.monotonic() + ARRIVING
    while (rest := _platform.unacknowledged(sock)) > 0:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOKING)
    return None if rest < 0 else True


# --------------------------------------------------------------------------------------------------
# What is known of this machine itself: facts only, gathered by ``machine_facts``.


@dataclass(frozen=True, slots=True)
class TakenPort:
    """A port on which nodes usually listen, and on which another program does."""

    port: int
    program: str = ""
    """Its name and number, where the system tells."""


@dataclass(frozen=True, slots=True)
class StartupError:
    """What keeps this machine from taking part at all: an error, for a person."""

    message: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """This machine, as far as its operating system tells; what it does not tell is empty."""

    system: str = ""
    """As ``platform.system()`` calls it: Linux, Darwin, Windows."""
    release: str = ""
    program: str = ""
    """The interpreter that runs this."""
    name: str = ""
    """The host's name."""
    name_means: tuple[str, ...] = ()
    """The addresses to which that name leads here."""
    networks: tuple[str, ...] = ()
    """Those it is attached to directly, as ``10.0.0.1/24``."""
    speeds: tuple[tuple[str, int], ...] = ()
    """What each interface says it carries, in Mbit/s; only those that say something."""
    gateway: str = ""
    """The router's address."""
    gateway_life: str = ""
    """By what it is known to be on."""
    battery: Battery | None = None
    taken: tuple[TakenPort, ...] = ()
    """Usual ports that other programs have."""
    usual: int = 0
    """How many usual ports there are."""
    network_category: str = ""
    """On Windows: Public, Private or DomainAuthenticated."""
    trouble: StartupError | None = None

    def is_attached(self, host: str) -> bool:
        """Whether an address is in a network to which this machine is attached directly.

        >>> MachineFacts(networks=("10.0.0.1/24",)).is_attached("10.0.0.77")
        True
        >>> MachineFacts(networks=("10.0.0.1/24",)).is_attached("desk.local")
        False
        """
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in ipaddress.ip_interface(each).network for each in self.networks)

    def speed_of(self, interface: str) -> int:
        """What an interface says it carries, in Mbit/s; 0 if it says nothing."""
        return dict(self.speeds).get(interface, 0)


# --------------------------------------------------------------------------------------------------


class ProbeOutcome(enum.Enum):
    """How an attempt to connect to a peer ended."""

    MET = "met"  # it has proved to be a member, and we agree on who belongs
    REFUSED = "refused"  # the machine answers, nothing listens on that port
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
class ProbeAttempt:
    """One attempt, at one address."""

    address: Address
    outcome: ProbeOutcome
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
    passage: PathFacts | None = None
    """What passes on the way; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How much goes through to another machine: measured with it now, or remembered from then."""

    bytes_per_second: int
    """Bytes per second."""
    host: str
    """The address of ours that it went through."""
    is_on_battery: bool = False
    """Whether the machine over there runs on its battery."""
    down: int = 0
    """Bytes per second from there; 0 if that was not measured."""
    latency: int = 0
    """Nanoseconds of a short message, one way; 0 if that was not measured."""
    age: float = 0.0
    """Seconds since it was measured; 0 if that was now."""
    source: str = "doctor"
    """What measured it, as the map of this machine has it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A peer that this machine tried to reach, and how that went at each address."""

    name: str
    """For people."""
    origin: str
    """"given" by hand, "known" from an earlier run, or "heard" on the network."""
    probes: tuple[ProbeAttempt, ...]
    node: NodeId | None = None
    """Who it should be, where that is known."""
    rate: Rate | None = None
    """What was measured with it; None if it was not."""

    @property
    def met(self) -> ProbeAttempt | None:
        """The attempt that succeeded; None if none did."""
        return self.first(ProbeOutcome.MET)

    def first(self, *outcomes: ProbeOutcome) -> ProbeAttempt | None:
        """The first attempt that ended in one of these ways."""
        return next((probe for probe in self.probes if probe.outcome in outcomes), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """Everything that the checks judge."""

    node: NodeId
    namespace: str
    """The name of the group."""
    tag: str
    old_tags: tuple[str, ...] = ()
    build: Build = THIS_BUILD
    interfaces: tuple[Interface, ...]
    mdns: str
    """What multicast DNS does on this machine, in words."""
    mdns_works: bool
    """Whether it could be opened."""
    heard_self: bool
    """Whether our own announcement came back to us from the network."""
    heard: tuple[MdnsRecord, ...] = ()
    """Everybody else's, of whatever namespace."""
    targets: tuple[Target, ...] = ()
    seconds: float = 0.0
    """For how long it was listened."""
    has_jobs: bool = False
    """Whether a machine of this group seems to run a job."""
    machine: MachineFacts = field(default_factory=MachineFacts)
    """What is known of this machine itself."""
    names: Mapping[NodeId, str] = field(default_factory=dict)
    """The names of the machines of the group."""

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


# --------------------------------------------------------------------------------------------------
# By what a machine shows that it is on, although a port of it is silent.

PORT_TIMEOUT = 0.4  # seconds for each port that shows whether the machine is on

PROBED_PORTS = (9, 22, 80)
"""Ports of which a machine that is on usually refuses or accepts one."""

LATELY = "within the last minute"


def signs_of_life(host: str, *, arp: Path = Path("/proc/net/arp")) -> str:
    """By what it shows that; "" if by nothing."""
    for port in PROBED_PORTS:
        try:
            socket.create_connection((host, port), PORT_TIMEOUT).close()
        except ConnectionRefusedError:
            return f"it refuses port {port} at once"
        except OSError:
            continue
        return f"it answers on port {port}"
    with contextlib.suppress(OSError):
        for line in arp.read_text().splitlines()[1:]:
            entry, _, flags, hardware, *_ = line.split()
            if entry == host and int(flags, 16) & 2 and hardware.strip("0:"):
                # The table may be a minute old, and nobody but root can have it asked anew.
                return f"its network card answered {LATELY} (ARP: {hardware})"
    return ""


# --------------------------------------------------------------------------------------------------
# What a check says: the cause, what it is seen by, and what to do about it.


class Severity(enum.Enum):
    """How bad it is."""

    PROBLEM = "problem"  # nodes that should meet do not
    NOTE = "note"  # may be as it should be; good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, in words for a person."""

    check: str
    """Which check says so, in one word; stable, for programs."""
    cause: str
    """What is wrong: one sentence."""
    evidence: tuple[str, ...]
    """What was seen: sentences, at least one."""
    fix: str
    """What to do next."""
    severity: Severity = Severity.PROBLEM


# --------------------------------------------------------------------------------------------------
# Waiting for what has no deadline of its own, such as a resolver, for so long and no longer.

Found = TypeVar("Found")


def within(seconds: float, look: Callable[[], Found], otherwise: Found) -> Found:
    """What ``look`` returns if it does so in time and without an error; else ``otherwise``.

    One who takes longer is left to its thread, which does not keep the process alive.

    >>> within(1.0, lambda: 7, 0), within(1.0, lambda: 1 // 0, 0)
    (7, 0)
    """
    found: list[Found] = []

    def run() -> None:
        try:
            found.append(look())
        except Exception:  # noqa: BLE001 - whatever the system does not tell stays unknown
            return

    thread = threading.Thread(target=run, name="look", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise


# --------------------------------------------------------------------------------------------------
# Asking this machine's operating system about itself: short questions, each with a deadline.

RESOLVING = 2.0  # seconds for a name
ASKING = 4.0  # seconds for a program of the system; PowerShell takes one to start

_CATEGORY = "(Get-NetConnectionProfile).NetworkCategory"
_GATEWAY_FLAG = 2  # RTF_GATEWAY, from <linux/route.h>


def gather_machine(
    interfaces: Iterable[Interface], taken: Iterable[TakenPort] = (), *, usual: int = 0
) -> MachineFacts:
    """Everything that can be found out without anybody else; takes seconds at most."""
    used = [each for each in interfaces if not each.skipped]
    gateway = within(ASKING, router, "")
    no_battery: Battery | None = None
    return MachineFacts(
        system=platform.system(),
        release=platform.release(),
        program=sys.executable,
        name=socket.gethostname(),
        name_means=meaning_of(socket.gethostname()),
        networks=within(ASKING, lambda: _networks(used), ()),
        speeds=within(ASKING, lambda: _speeds(used), ()),
        gateway=gateway,
        gateway_life=within(ASKING, lambda: signs_of_life(gateway), "") if gateway else "",
        battery=within(ASKING, lambda: local_profile().battery, no_battery),
        taken=tuple(taken),
        usual=usual,
        network_category=within(ASKING + 1, _category, "") if _platform.IS_WINDOWS else "",
    )


def meaning_of(name: str) -> tuple[str, ...]:
    """The addresses to which a name leads on this machine; empty if to none, or not in time."""

    def resolve() -> tuple[str, ...]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(target[0]) for *_, target in found))

    return within(RESOLVING, resolve, ())


def holder_of(port: int) -> str:
    """The program that listens on a port of this machine; "" where the system does not tell."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,) and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def _networks(used: Iterable[Interface]) -> tuple[str, ...]:
    import psutil

    names = {each.name for each in used}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses if name in names else ():
            if each.family == socket.AF_INET and each.netmask:
                found.append(str(ipaddress.ip_interface(f"{each.address}/{each.netmask}")))
            elif each.family == socket.AF_INET6 and each.netmask:
                length = int(ipaddress.IPv6Address(each.netmask)).bit_count()
                found.append(f"{each.address.partition('%')[0]}/{length}")
    return tuple(found)


def _speeds(used: Iterable[Interface]) -> tuple[tuple[str, int], ...]:
    import psutil

    state = psutil.net_if_stats()
    return tuple(
        (each.name, state[each.name].speed)
        for each in used
        if each.name in state and 0 < state[each.name].speed < 1 << 20  # unknown is 0 or 2**32 - 1
    )


def router(table: Path = Path("/proc/net/route")) -> str:
    """The address of this machine's router; "" where there is none, or it is unknown."""
    if _platform.IS_MACOS:
        text = _output_of("/sbin/route", "-n", "get", "default")
        found = re.search(r"gateway: ([0-9.]+)", text)
        return found[1] if found else ""
    if _platform.IS_WINDOWS:
        return ""
    return parse_route(table.read_text())


def parse_route(table: str) -> str:
    r"""The router in a routing table of Linux.

    >>> parse_route("Iface Destination Gateway Flags\neth0 00000000 0100000A 0003 0 0 0 0 0 0 0")
    '10.0.0.1'
    """
    for line in table.splitlines()[1:]:
        _, destination, gateway, flags, *_ = line.split()
        if int(destination, 16) == 0 and int(flags, 16) & _GATEWAY_FLAG:
            return str(ipaddress.IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder)))
    return ""


def _category() -> str:
    return _output_of("powershell", "-NoProfile", "-Command", _CATEGORY).strip()


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=False)  # noqa: S603
    return done.stdout
