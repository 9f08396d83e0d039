"""The checks, in the order in which their findings are shown: what is nearest first."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable

from potluck import _time
from potluck._types import NodeId
from potluck._version import UPGRADE, VersionMismatch, mixed
from potluck.discovery.mdns import OLD_TAG, MdnsRecord
from potluck.doctor.facts import (
    LATELY,
    DoctorFacts,
    Finding,
    ProbeAttempt,
    ProbeOutcome,
    Severity,
    Target,
)
from potluck.net.addresses import is_loopback

# --------------------------------------------------------------------------------------------------
# Whether the clocks agree.

FAR = 30.0
"""Seconds; a clock that is set by the network is wrong by far less."""


def check_clocks(scene: DoctorFacts) -> list[Finding]:
    """One that is far off does not keep nodes from meeting, but makes logs and files lie."""
    findings = []
    for target in scene.targets:
        probe = target.met
        if probe is not None and probe.skew is not None and abs(probe.skew) > FAR:
            findings.append(_finding(target.name, probe.skew))
    return findings


def _finding(name: str, skew: float) -> Finding:
    which = "ahead of" if skew > 0 else "behind"
    return Finding(
        check="clocks",
        cause=f"The clock of {name} is far off: {_duration(abs(skew))} {which} this machine's",
        evidence=("The two have compared their clocks within one answer, which took a moment.",),
        fix="Let both set their clocks by the network: sudo timedatectl set-ntp true; on macOS and "
        "Windows it is in the settings of date and time. Potluck itself does not depend on it; "
        "logs, timelines and certificates of other programs do.",
        severity=Severity.NOTE,
    )


def _duration(seconds: float) -> str:
    """In words.

    >>> _duration(90), _duration(7200), _duration(400000)
    ('90 s', '2 h', '5 days')
    """
    if seconds < 600:  # noqa: PLR2004 - ten minutes
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.0f} days"  # noqa: PLR2004


# --------------------------------------------------------------------------------------------------
# Whether another machine has a copy of this one's key.


def check_clones(scene: DoctorFacts) -> list[Finding]:
    """A home directory, a disk or the image of a virtual machine that was copied."""
    clones = [target for target in scene.targets if is_clone(scene, target)]
    if not clones:
        return []
    where = ", ".join(str(target.probes[0].address) for target in clones)
    return [
        Finding(
            check="clones",
            cause=f"Another machine, at {where}, has a copy of this machine's key",
            evidence=(
                f"It has proved to be {scene.node}, which is this machine; but it is another one.",
            ),
            fix="On the copy, delete the file node_keypair in its Potluck home (~/.potluck), and "
            "pair that machine anew: potluck pair",
        )
    ]


def is_clone(scene: DoctorFacts, target: Target) -> bool:
    """Whether a peer has proved our own id, and does not accept us as the same machine."""
    probe = target.first(ProbeOutcome.DECLINED)
    return probe is not None and probe.node == scene.node


# --------------------------------------------------------------------------------------------------
# Whether two machines have a version of the Internet protocol in common.

_NO_WAY = frozenset({errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the system says where it has no address of that kind."""


def check_families(scene: DoctorFacts) -> list[Finding]:
    """One has only IPv4, and the other is known only by IPv6; or the other way round."""
    return [
        _families_finding(scene, target) for target in scene.targets if lacks_family(scene, target)
    ]


def lacks_family(scene: DoctorFacts, target: Target) -> bool:
    """Whether all addresses of a peer are of a kind that this machine does not have."""
    theirs = _versions_of(target)
    no_way = all(
        probe.outcome is ProbeOutcome.UNREACHABLE and probe.code in _NO_WAY
        for probe in target.probes
    )
    return bool(theirs) and no_way and theirs.isdisjoint(_versions(scene.hosts))


def _versions_of(target: Target) -> set[int]:
    return _versions(
        [host for probe in target.probes for host in probe.means or (probe.address.host,)]
    )


def _versions(hosts: list[str]) -> set[int]:
    """4, 6, or both; addresses that only count on one cable do not count."""
    found: set[int] = set()
    for host in hosts:
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            continue
        if not address.is_link_local or "%" in host:
            found.add(address.version)
    return found


def _families_finding(scene: DoctorFacts, target: Target) -> Finding:
    (theirs, *_) = _versions_of(target)
    ours = 4 if theirs == 6 else 6  # noqa: PLR2004 - the protocol's own number
    shown = ", ".join(str(probe.address) for probe in target.probes)
    return Finding(
        check="families",
        cause=f"{target.name} is known only by IPv{theirs}, and this machine has only IPv{ours}",
        evidence=(
            f"Tried: {shown}. This machine has {', '.join(scene.hosts) or 'no address'}.",
            f"The system says: {target.probes[0].words}.",
        ),
        fix=f"Turn IPv{theirs} on here (it may be off in the system's network settings), or give "
        f"the other machine's IPv{ours} address.",
    )


# --------------------------------------------------------------------------------------------------
# Whether there is any way into a network at all.


def check_interfaces(scene: DoctorFacts) -> list[Finding]:
    """Only loopback, containers, VPNs, or cables that are not plugged in."""
    if scene.hosts:
        return _self_assigned(scene)
    seen = tuple(f"{each.name}: {each.skipped}." for each in scene.interfaces)
    hidden = [each.name for each in scene.interfaces if each.hosts and "VPN" in each.skipped]
    fix = "Connect this machine to the network of the others: plug in the cable, or join the Wi-Fi."
    if hidden:
        fix += (
            f" If the others are to be reached through {hidden[0]}, say so: "
            f"POTLUCK_INTERFACES={hidden[0]}"
        )
    return [
        Finding(
            check="interfaces",
            cause="This machine has no network interface through which others could reach it"
            + _only(hidden),
            evidence=seen or ("There is no interface at all.",),
            fix=fix,
        )
    ]


def _only(hidden: list[str]) -> str:
    if not hidden:
        return ""
    return f", only such of containers, virtual machines or VPNs ({', '.join(hidden)})"


def _self_assigned(scene: DoctorFacts) -> list[Finding]:
    """Addresses that a machine gives itself when no router gives it one."""
    if not all(_is_self_assigned(host) for host in scene.hosts):
        return []
    return [
        Finding(
            check="interfaces",
            cause="This machine has only addresses that it gave itself: no router has given it one",
            evidence=(f"Its addresses are {', '.join(scene.hosts)}.",),
            fix="Check the cable or the Wi-Fi password. With a cable straight from machine to "
            "machine this is as it should be, if the other one has such addresses too.",
        )
    ]


def _is_self_assigned(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_link_local


# --------------------------------------------------------------------------------------------------
# What single operating systems put in the way, told by the traces that it leaves.
#
# ``denies_local_network``, ``is_public_network`` and ``is_behind_windows`` are these traces; other
# checks, which would explain the same by a firewall, keep silent where one of them fits.

_NAT = ipaddress.ip_network("172.16.0.0/12")
"""From where Windows takes the addresses of its virtual machines."""


def check_platforms(scene: DoctorFacts) -> list[Finding]:
    """Permission of macOS for the local network, Windows' public networks, and WSL2's NAT."""
    findings = []
    denied = [target for target in scene.targets if denies_local_network(scene, target)]
    if denied:
        findings.append(_macos(scene, denied[0]))
    if is_public_network(scene):
        findings.append(_windows(scene))
    if is_behind_windows(scene):
        findings.append(_wsl(scene))
    return findings


def denies_local_network(scene: DoctorFacts, target: Target) -> bool:
    """Told by "no route to host" for a neighbour, to which macOS does know a route."""
    return scene.machine.system == "Darwin" and any(
        probe.outcome is ProbeOutcome.UNREACHABLE
        and probe.code == errno.EHOSTUNREACH
        and any(scene.machine.is_attached(host) for host in probe.means or (probe.address.host,))
        for probe in target.probes
    )


def is_public_network(scene: DoctorFacts) -> bool:
    """Windows closes all ports, and keeps multicast out, on networks that it calls public."""
    return scene.machine.system == "Windows" and "Public" in scene.machine.network_category


def is_behind_windows(scene: DoctorFacts) -> bool:
    """WSL2 has addresses that only its Windows can reach, unless its networking is mirrored."""
    is_wsl = scene.machine.system == "Linux" and "microsoft" in scene.machine.release.lower()
    hosts = [ipaddress.ip_address(host.partition("%")[0]) for host in scene.hosts]
    routed = [host for host in hosts if not host.is_link_local]
    return is_wsl and bool(routed) and all(host in _NAT for host in routed)


def _macos(scene: DoctorFacts, target: Target) -> Finding:
    probe = target.first(ProbeOutcome.UNREACHABLE)
    assert probe is not None
    return Finding(
        check="permission",
        cause="macOS does not allow this program into the local network",
        evidence=(
            f"{probe.address}: {probe.words}; but it is in the same network as this machine.",
        ),
        fix="System Settings, Privacy & Security, Local Network: allow the terminal, or the "
        f"program that started {scene.machine.program or 'Python'}; then start it anew.",
    )


def _windows(scene: DoctorFacts) -> Finding:
    return Finding(
        check="firewall",
        cause="Windows treats this network as public: its firewall keeps others out",
        evidence=(f"Get-NetConnectionProfile says: {scene.machine.network_category}.",),
        fix="Settings, Network & internet, properties of the connection: private network. Or, as "
        "an administrator: Set-NetConnectionProfile -NetworkCategory Private. When Windows asks, "
        "allow Python in private networks.",
        severity=Severity.NOTE if scene.met else Severity.PROBLEM,
    )


def _wsl(scene: DoctorFacts) -> Finding:
    return Finding(
        check="wsl",
        cause="This Linux runs inside Windows (WSL2), behind an address that only Windows can "
        "reach (NAT)",
        evidence=(f"The kernel is {scene.machine.release}; its address is {scene.hosts[0]}.",),
        fix="Let it share the network of Windows: write [wsl2] and networkingMode=mirrored into "
        "the file .wslconfig in your Windows home, then: wsl --shutdown. Or run Potluck in "
        "Windows itself.",
        severity=Severity.NOTE if scene.met else Severity.PROBLEM,
    )


# --------------------------------------------------------------------------------------------------
# Whether the network itself keeps its clients apart, as guest networks and access points do.

_NO_ANSWER = {(ProbeOutcome.SILENT, 0), (ProbeOutcome.UNREACHABLE, errno.EHOSTUNREACH)}
"""In time, or ever: the second means that no machine answered for the address (ARP)."""


def check_isolation(scene: DoctorFacts) -> list[Finding]:
    """No machine of the same network answers, not even its network card, but the router does."""
    apart = [target for target in scene.targets if is_kept_apart(scene, target)]
    if not apart:
        return []
    names = ", ".join(target.name for target in apart)
    which = "them" if len(apart) > 1 else "it"
    return [
        Finding(
            check="isolation",
            cause=f"The network keeps this machine apart from {names} (client isolation), "
            f"or {which} is off or asleep",
            evidence=(
                f"{_tried(apart)}: no answer, not even of a network card, in the same network.",
                f"The router, {scene.machine.gateway}, answers: {scene.machine.gateway_life}.",
            ),
            fix="If the other machine is awake: turn off client isolation (also: AP isolation, "
            "wireless isolation) in the router, or leave the guest network. A cable helps too.",
        )
    ]


def is_kept_apart(scene: DoctorFacts, target: Target) -> bool:
    """Whether a machine of our own network does not answer at all, while the router does."""
    machine = scene.machine
    if not machine.gateway_life or target.origin == "known" or scene.met:
        return False
    if lacks_family(scene, target) or denies_local_network(scene, target):
        return False
    return bool(target.probes) and all(
        (probe.outcome, probe.code) in _NO_ANSWER
        and not probe.life
        and any(machine.is_attached(host) for host in probe.means or (probe.address.host,))
        for probe in target.probes
    )


def _tried(targets: list[Target]) -> str:
    hosts = dict.fromkeys(probe.address.host for target in targets for probe in target.probes)
    return ", ".join(hosts)


# --------------------------------------------------------------------------------------------------
# Whether this machine's own keys can be used at all.


def check_keys(scene: DoctorFacts) -> list[Finding]:
    """Files that others may read or change, that belong to another user, or that are damaged."""
    trouble = scene.machine.trouble
    if trouble is None:
        return []
    return [
        Finding(
            check="keys",
            cause="The keys of this machine cannot be used",
            evidence=(f"{trouble.message}.", "A secret that others could have read is none."),
            fix=trouble.fix or "Check whose files these are, and who may read them.",
        )
    ]


# --------------------------------------------------------------------------------------------------
# Whether announcements pass: out of this machine, and between the machines.

BY_HAND = "Until then give the addresses: POTLUCK_PEERS=host:port,host:port"


def check_multicast(scene: DoctorFacts) -> list[Finding]:
    """Blocked by this machine's firewall, or kept from passing by an access point or a switch."""
    if not scene.hosts:
        return []  # there is nothing it could pass through
    if is_public_network(scene) or is_behind_windows(scene):
        return []  # that keeps it out
    if any(denies_local_network(scene, target) for target in scene.targets):
        return []
    if not scene.mdns_works:
        return [
            Finding(
                check="multicast",
                cause="Multicast DNS, by which nodes find each other, cannot be used here",
                evidence=(scene.mdns,),
                fix="Check that no other program keeps UDP port 5353 to itself. " + BY_HAND,
            )
        ]
    if not scene.heard_self:
        return [_blocked_here(scene)]
    unheard = _met_but_not_heard(scene)
    if not unheard:
        return []
    return [
        Finding(
            check="multicast",
            cause="Multicast does not pass between this machine and others that it can reach",
            evidence=(
                *(f"{each} answers, but its announcements are not heard." for each in unheard),
                "This machine hears its own announcement, so its own firewall lets them through.",
            ),
            fix="Turn off client isolation (also: AP isolation, guest network) and multicast "
            "filtering (IGMP snooping) in the router, and allow UDP port 5353 in the firewall of "
            f"the other machine. {BY_HAND}",
        )
    ]


def _blocked_here(scene: DoctorFacts) -> Finding:
    seen = (
        f"What this machine announced on {', '.join(scene.hosts)} did not come back to it "
        f"within {scene.seconds:g} s, as it does where nothing is in the way."
    )
    return Finding(
        check="multicast",
        cause="A firewall on this machine blocks multicast DNS, by which nodes find each other",
        evidence=(seen,),
        fix="Allow UDP port 5353: sudo ufw allow 5353/udp, or sudo firewall-cmd --add-service=mdns;"
        f" on Windows, call the network private. {BY_HAND}",
    )


def _met_but_not_heard(scene: DoctorFacts) -> list[str]:
    heard = {each.node for each in scene.heard}
    met = {
        target.met.node: target.met.address
        for target in scene.targets
        if target.origin != "heard" and target.met is not None
    }
    return [
        scene.who(node, address)
        for node, address in met.items()
        if node is not None and node not in heard and node != scene.node
    ]


# --------------------------------------------------------------------------------------------------
# Whether names lead to machines, and not back to the one that asks.


def check_names(scene: DoctorFacts) -> list[Finding]:
    """As Debian sets it up, a machine's own name means 127.0.1.1, which no other machine has."""
    led_back = [target for target in scene.targets if leads_back(target)]
    if led_back:
        return [_given(target) for target in led_back]
    machine = scene.machine
    if not machine.name_means or not all(is_loopback(host) for host in machine.name_means):
        return []
    means = ", ".join(machine.name_means)
    return [
        Finding(
            check="names",
            cause=f"The name of this machine, {machine.name}, leads to itself only ({means})",
            evidence=(
                f"On this machine {machine.name} means {means}, which no other can reach.",
                "Potluck tells others its real addresses; other launchers may tell that one.",
            ),
            fix=f"Use an address in place of the name ({_addresses(scene)}), or change the line of "
            f"{machine.name} in /etc/hosts to it.",
            severity=Severity.NOTE,
        )
    ]


def leads_back(target: Target) -> bool:
    """Whether a peer was given by a name that means this very machine."""
    return any(
        probe.means and all(is_loopback(host) for host in probe.means) for probe in target.probes
    ) and all(probe.address.host != "localhost" for probe in target.probes)


def _given(target: Target) -> Finding:
    probe = next(probe for probe in target.probes if probe.means)
    means = ", ".join(probe.means)
    return Finding(
        check="names",
        cause=f"The name {probe.address.host} leads back to this machine itself ({means})",
        evidence=(f"Here {probe.address.host} means {means}, which no other machine can reach.",),
        fix=f"Give the address of the machine in place of its name, or remove the line of "
        f"{probe.address.host} with {probe.means[0]} from /etc/hosts.",
    )


def _addresses(scene: DoctorFacts) -> str:
    return scene.hosts[0] if scene.hosts else "once it has one"


# --------------------------------------------------------------------------------------------------
# Whether those who are here have the same secret.

SHOWN = 8  # letters of a tag; enough to compare, and public anyway

PAIR = "Pair the two: `potluck pair` on one of them, and type the code it shows on the other."


def check_namespaces(scene: DoctorFacts) -> list[Finding]:
    """Another secret, or an earlier or later one of ours; tags are compared, never secrets."""
    findings = []
    nodes: set[NodeId] = set()
    for heard in scene.heard:
        if heard.tag != scene.tag and heard.node not in {scene.node, *nodes}:
            nodes.add(heard.node)
            findings.append(_heard(scene, heard))
    findings += [
        _dialled(scene, target)
        for target in scene.targets
        if target.met is None and target.first(ProbeOutcome.OTHER_NAMESPACE) is not None
    ]
    return findings


def _heard(scene: DoctorFacts, heard: MdnsRecord) -> Finding:
    name = scene.who(heard.node, heard.addresses[0])
    seen = (
        f"It shows the tag {heard.tag[:SHOWN]}…, this machine {scene.tag[:SHOWN]}… "
        f'(group "{scene.namespace}").'
    )
    evidence = (seen,)
    if heard.tag in scene.old_tags:
        cause = f"{name} has missed a change of the secret"
        fix = "It is brought up to date as soon as it meets a member: start Potluck on both."
        return Finding("namespaces", cause, evidence, fix, Severity.NOTE)
    if scene.tag[:OLD_TAG] in heard.old_tags:
        cause = f"This machine has missed a change of the secret, which {name} has"
        fix = f"It is brought up to date by: potluck members --host {heard.addresses[0]}"
        return Finding("namespaces", cause, evidence, fix)
    return Finding(
        check="namespaces",
        cause=heard.is_elsewhere,
        evidence=evidence,
        fix=f"If it should belong to this one: {PAIR} If both know several, choose the same one "
        "with --namespace or POTLUCK_NAMESPACE.",
        # Beside members that were met, a neighbour's cluster is nobody's fault.
        severity=Severity.NOTE if scene.met else Severity.PROBLEM,
    )


def _dialled(scene: DoctorFacts, target: Target) -> Finding:
    probe = target.first(ProbeOutcome.OTHER_NAMESPACE)
    assert probe is not None
    seen = (
        f"{probe.address} answers, but with another secret than that of "
        f'"{scene.namespace}" on this machine.'
    )
    return Finding(
        check="namespaces",
        cause=f"{target.name} belongs to another group",
        evidence=(seen,),
        fix=f"{PAIR} If both are in several groups, choose the same one with --namespace or "
        "POTLUCK_NAMESPACE.",
    )


# --------------------------------------------------------------------------------------------------
# Whether there is anybody else.


def check_pairing(scene: DoctorFacts) -> list[Finding]:
    """Alone a machine is not ill, but pairing comes before all else that others are needed for."""
    if not _is_unpaired(scene):
        return []
    return [
        Finding(
            check="pairing",
            cause="This machine is not paired with any other",
            evidence=(f'It is the only machine of "{scene.namespace}".',),
            fix="To train on several machines, pair them first: type `potluck pair` here, and on "
            "the other machine the command that it shows.",
            severity=Severity.NOTE,
        )
    ]


def _is_unpaired(scene: DoctorFacts) -> bool:
    """Whether no other machine belongs to this group; tells how to pair those that were heard."""
    others = [heard for heard in scene.heard if heard.node != scene.node]
    return set(scene.names) == {scene.node} and not others and not scene.targets


def check_nobody(scene: DoctorFacts) -> list[Finding]:
    """An empty network is not ill, but nothing about the way to others could be checked."""
    others = [heard for heard in scene.heard if heard.node != scene.node]
    if scene.met or others or scene.targets or not scene.hosts or _is_unpaired(scene):
        return []
    if is_public_network(scene) or is_behind_windows(scene):
        return []  # no wonder
    return [
        Finding(
            check="nobody",
            cause="No other machine was found, so the way to others could not be checked",
            evidence=(f"No other machine announced itself within {scene.seconds:g} s.",),
            fix="Run `potluck doctor` on the other machine at the same time, or give its address: "
            "potluck doctor --peer ADDRESS. If it runs there too and neither hears the other, the "
            "network keeps them apart (guest network, client isolation) or drops multicast.",
            severity=Severity.NOTE,
        )
    ]


# --------------------------------------------------------------------------------------------------
# Whether packets of full size pass, and how much goes through.

SMALL = 1280
"""Bytes; what every link must carry (RFC 8200, 5).  A path that carries less is unusual."""

SLOW = 8
"""A link is slow if it carries less than this part of what its interface says."""

BELIEVED = 1000
"""Mbit/s: more than that cannot be shown in half a second on a busy machine."""

MEGABIT = 125_000  # bytes


def check_passages(scene: DoctorFacts) -> list[Finding]:
    """Large packets that are lost or not allowed; a link slower than its interface says."""
    findings = []
    for target in scene.targets:
        probe = loses_large_packets(target)
        if probe is not None:
            findings.append(_lost(target, probe))
        else:
            findings += [_small(target, each) for each in target.probes if _is_small(each)][:1]
        findings += _slow(scene, target)
    return findings


def loses_large_packets(target: Target) -> ProbeAttempt | None:
    """The attempt at which packets of full size were lost on the way."""
    for probe in target.probes:
        if probe.passage is not None and probe.passage.passes < probe.passage.packet:
            return probe
    return None


def _lost(target: Target, probe: ProbeAttempt) -> Finding:
    assert probe.passage is not None
    packet, passes = probe.passage.packet, probe.passage.passes
    return Finding(
        check="packets",
        cause=f"Large packets are lost on the way to {target.name} (a path with a small MTU)",
        evidence=(
            f"A packet of {packet} bytes to {probe.address} does not arrive, one of {passes} does.",
            "Connections open, and then hang as soon as something large is sent.",
        ),
        fix=f"Something on the way (a VPN, a tunnel, a switch, jumbo frames on one side only) "
        f"carries less than it should. Until it is mended, set the MTU on both machines: "
        f"sudo ip link set dev INTERFACE mtu {passes}",
    )


def _is_small(probe: ProbeAttempt) -> bool:
    return probe.passage is not None and 0 < probe.passage.packet < SMALL


def _small(target: Target, probe: ProbeAttempt) -> Finding:
    assert probe.passage is not None
    return Finding(
        check="packets",
        cause=f"The way to {target.name} has a small MTU: {probe.passage.packet} bytes",
        evidence=(
            f"Both sides agreed on packets of {probe.passage.packet} bytes; usual are 1500.",
        ),
        fix="Check the MTU of the interfaces on both machines (ip link), and of the VPN or tunnel "
        "between them; small packets cost speed.",
        severity=Severity.NOTE,
    )


def _slow(scene: DoctorFacts, target: Target) -> list[Finding]:
    rate = target.rate
    if rate is None:
        return []
    interface = scene.interface_of(rate.host)
    said = scene.machine.speed_of(interface)
    measured = rate.bytes_per_second / MEGABIT
    ago = f" {_time.duration(round(rate.age * 1e9))} ago ({rate.source})" if rate.age else ""
    through = f"{measured:.3g} Mbit/s went through{ago}"
    if not said or measured * SLOW >= min(said, BELIEVED):
        return []
    return [
        Finding(
            check="speed",
            cause=f"The link to {target.name} is much slower than its interface says",
            evidence=(f"{through}; {interface} says it carries {said} Mbit/s.",),
            fix="Look for a bad or old cable, a powerline adapter, a switch for 100 Mbit/s, a weak "
            "Wi-Fi signal, or another program that fills the link. `potluck bench` measures more.",
            severity=Severity.NOTE,
        )
    ]


# --------------------------------------------------------------------------------------------------
# Whether those who were found can be reached on their port.


def check_ports(scene: DoctorFacts) -> list[Finding]:
    """Dropped by a firewall, nothing listening, no route, or another program listening."""
    return [
        finding
        for target in scene.targets
        if target.met is None and not _is_explained(scene, target)
        for finding in _judge(target)
    ]


def _is_explained(scene: DoctorFacts, target: Target) -> bool:
    """Whether another check knows better why this one was not met."""
    return (
        leads_back(target)
        or lacks_family(scene, target)
        or is_kept_apart(scene, target)
        or is_clone(scene, target)
        or denies_local_network(scene, target)
        or loses_large_packets(target) is not None
    )


def _judge(target: Target) -> list[Finding]:
    """The outcome that says most about why none of its addresses worked."""
    for outcome, judge in (
        (ProbeOutcome.DECLINED, _declined),
        (ProbeOutcome.NOT_POTLUCK, _not_potluck),
        (ProbeOutcome.FAILED, _not_potluck),
        (ProbeOutcome.MUTE, _mute),
        (ProbeOutcome.SILENT, _silent),
        (ProbeOutcome.UNREACHABLE, _unreachable),
        (ProbeOutcome.UNKNOWN_NAME, _unreachable),
        (ProbeOutcome.REFUSED, _refused),
    ):
        others = (
            ProbeOutcome.OTHER_NAMESPACE,
            ProbeOutcome.OTHER_VERSION,
        )  # these have their own checks
        probe = target.first(outcome)
        if probe is not None and target.first(*others) is None:
            return [judge(target, probe)]
    return []


def _silent(target: Target, probe: ProbeAttempt) -> Finding:
    host, port = probe.address
    if not probe.life:
        return Finding(
            check="ports",
            cause=f"{target.name} does not answer at all: it is off or asleep, or elsewhere",
            evidence=(
                _seen(target),
                f"There was no answer from {probe.address}, not even of its network card.",
            ),
            fix="Wake it up, and let it not sleep while it trains (also with the lid closed); "
            "check that it is in the same network as this one.",
            severity=_severity(target),
        )
    how = (
        "does not answer" if probe.outcome is ProbeOutcome.SILENT else f"is refused ({probe.words})"
    )
    return Finding(
        check="ports",
        cause=f"A firewall blocks TCP port {port} of {target.name}",
        evidence=(_seen(target), f"{probe.address} {how}, though {_is_there(probe)}."),
        fix=f"On {host}, allow TCP port {port}: sudo ufw allow {port}/tcp, or sudo firewall-cmd "
        f"--add-port={port}/tcp; on Windows, allow Python in private networks.{_doubt(probe)}",
        severity=_severity(target),
    )


def _is_there(probe: ProbeAttempt) -> str:
    return f"the machine is there: {probe.life}"


def _doubt(probe: ProbeAttempt) -> str:
    """Who has just gone off looks like a firewall for as long as its network card is remembered."""
    if LATELY not in probe.life:
        return ""
    return " If it has just been switched off, unplugged or put to sleep, look again in a minute."


def _mute(target: Target, probe: ProbeAttempt) -> Finding:
    return Finding(
        check="ports",
        cause=f"{target.name} accepts connections but does not respond: its process may be "
        "suspended or the machine going to sleep",
        evidence=(_seen(target), f"{probe.address}: {probe.words}"),
        fix="Look at the program there: resume it if it was stopped (Ctrl-Z, a debugger), and "
        "check that the machine does not sleep and has memory left.",
        severity=_severity(target),
    )


def _refused(target: Target, probe: ProbeAttempt) -> Finding:
    return Finding(
        check="ports",
        cause=f"{target.name} is on, but Potluck is not running there",
        evidence=(_seen(target), f"{probe.address} refused the connection at once."),
        fix="That is normal while no job runs there. Otherwise start the job, or check the port.",
        severity=_severity(target),
    )


def _unreachable(target: Target, probe: ProbeAttempt) -> Finding:
    if probe.life:
        return _silent(target, probe)
    return Finding(
        check="ports",
        cause=f"There is no route to {target.name}",
        evidence=(_seen(target), f"{probe.address}: {probe.words}"),
        fix="Check the address, that both machines are in the same network, and their firewalls.",
        severity=_severity(target),
    )


def _not_potluck(target: Target, probe: ProbeAttempt) -> Finding:
    return Finding(
        check="ports",
        cause=f"The program at {probe.address} does not behave like a node of Potluck",
        evidence=(_seen(target), probe.words),
        fix="Check the address and the port; update Potluck on that machine if it is one.",
        severity=_severity(target),
    )


def _declined(target: Target, probe: ProbeAttempt) -> Finding:
    return Finding(
        check="ports",
        cause=f"{target.name} and this machine do not accept each other as members",
        evidence=(_seen(target), probe.words),
        fix="Pair the two: `potluck pair` on one of them. `potluck members` shows who belongs.",
    )


def _seen(target: Target) -> str:
    return {
        "given": "Its address was given by hand.",
        "known": "It was there in an earlier run.",
        "heard": "It announces itself on this network.",
    }[target.origin]


def _severity(target: Target) -> Severity:
    """A machine of an earlier run may simply be switched off."""
    return Severity.NOTE if target.origin == "known" else Severity.PROBLEM


# --------------------------------------------------------------------------------------------------
# Whether machines will stay awake.

FIX = "Plug it in, and let it not sleep while it trains; it is slower on battery as well."


def check_power(scene: DoctorFacts) -> list[Finding]:
    """On battery a laptop soon sleeps, and is slower."""
    findings = []
    battery = scene.machine.battery
    if battery is not None and not battery.plugged:
        findings.append(
            Finding(
                check="power",
                cause=f"This machine runs on its battery ({battery.percent} %)",
                evidence=("Its power supply is not plugged in, says the operating system.",),
                fix=FIX,
                severity=Severity.NOTE,
            )
        )
    findings += [
        Finding(
            check="power",
            cause=f"{target.name} runs on its battery",
            evidence=("It says so itself.",),
            fix=FIX,
            severity=Severity.NOTE,
        )
        for target in scene.targets
        if target.rate is not None and target.rate.is_on_battery
    ]
    return findings


# --------------------------------------------------------------------------------------------------
# Whether other programs have the ports on which nodes are looked for.


def check_taken(scene: DoctorFacts) -> list[Finding]:
    """A node then takes another port, which those who are given only the address do not try."""
    taken = scene.machine.taken
    if not taken:
        return []
    ports = ", ".join(str(each.port) for each in taken)
    by = tuple(f"Port {each.port} is in use by {each.program}." for each in taken if each.program)
    is_all = len(taken) >= scene.machine.usual
    return [
        Finding(
            check="taken",
            cause=f"Port {ports} of this machine is in use by another program"
            if len(taken) == 1
            else f"Ports {ports} of this machine are in use by other programs",
            evidence=by or ("Another program listens there.",),
            fix="End that program, or let nodes listen elsewhere (POTLUCK_PORT) and give that "
            "port with the address: POTLUCK_PEERS=host:port"
            if is_all
            else "Nodes take the next free port, where others look for them too: nothing has to "
            "be done.",
            severity=Severity.PROBLEM if is_all else Severity.NOTE,
        )
    ]


# --------------------------------------------------------------------------------------------------
# Whether those who belong together speak the same version of the protocol.


def check_versions(scene: DoctorFacts) -> list[Finding]:
    """Announced, or said when dialled; other versions with which one can work are mentioned."""
    here = scene.name_of(scene.node)
    found: dict[NodeId, Finding] = {}
    builds = {here: scene.build}
    for heard in scene.heard:
        if heard.tag != scene.tag or heard.node == scene.node:
            continue
        who = scene.who(heard.node, heard.addresses[0])
        if scene.build.agreed(heard.build) is None:
            error = VersionMismatch(here, scene.build, who, heard.build)
            found[heard.node] = _versions_finding(
                error.message,
                f"{who} announces {heard.build.range}; this machine speaks {scene.build.range}.",
                error.hint or "",
            )
        else:
            builds[scene.name_of(heard.node)] = heard.build
    dialled = [
        _versions_finding(
            f"{target.name} runs a version of Potluck that cannot work with this one",
            f"{probe.address}: {probe.words}",
            f"Upgrade the older one: type `{UPGRADE}` there.",
        )
        for target in scene.targets
        if target.met is None
        and (probe := target.first(ProbeOutcome.OTHER_VERSION)) is not None
        and target.node not in found
    ]
    notes = []
    if mixture := mixed(builds):
        cause, fix = mixture
        notes.append(_versions_finding(cause, "They announce that.", fix, Severity.NOTE))
    return [*found.values(), *dialled, *notes]


def _versions_finding(
    cause: str, evidence: str, fix: str, severity: Severity = Severity.PROBLEM
) -> Finding:
    return Finding("versions", cause, (evidence,), fix, severity)


# --------------------------------------------------------------------------------------------------

CHECKS: tuple[Callable[[DoctorFacts], list[Finding]], ...] = (
    check_pairing,
    check_interfaces,
    check_platforms,
    check_taken,
    check_names,
    check_multicast,
    check_isolation,
    check_families,
    check_ports,
    check_passages,
    check_namespaces,
    check_clones,
    check_versions,
    check_clocks,
    check_power,
    check_nobody,
)


def diagnose(scene: DoctorFacts) -> list[Finding]:
    """What follows from what was seen; problems first, and an empty list for a healthy network."""
    unable = check_keys(scene)
    if unable:
        return unable  # nothing was tried
    if not scene.hosts:
        return check_interfaces(scene)  # without a network everything else follows from that
    findings = [finding for check in CHECKS for finding in check(scene)]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.PROBLEM)
