"""What single operating systems put in the way, told by the traces that it leaves.

``denies_local_network``, ``is_public_network`` and ``is_behind_windows`` are these traces; other
checks, which would explain the same by a firewall, keep silent where one of them fits.
"""

from __future__ import annotations

import errno
import ipaddress

from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Outcome, Scene, Target

__all__ = ["check_platforms", "denies_local_network", "is_behind_windows", "is_public_network"]

_NAT = ipaddress.ip_network("172.16.0.0/12")
"""From where Windows takes the addresses of its virtual machines."""


def check_platforms(scene: Scene) -> list[Finding]:
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


def denies_local_network(scene: Scene, target: Target) -> bool:
    """Told by "no route to host" for a neighbour, to which macOS does know a route."""
    return scene.machine.system == "Darwin" and any(
        probe.outcome is Outcome.UNREACHABLE
        and probe.code == errno.EHOSTUNREACH
        and any(scene.machine.is_attached(host) for host in probe.means or (probe.address.host,))
        for probe in target.probes
    )


def is_public_network(scene: Scene) -> bool:
    """Windows closes all ports, and keeps multicast out, on networks that it calls public."""
    return scene.machine.system == "Windows" and "Public" in scene.machine.network_category


def is_behind_windows(scene: Scene) -> bool:
    """WSL2 has addresses that only its Windows can reach, unless its networking is mirrored."""
    is_wsl = scene.machine.system == "Linux" and "microsoft" in scene.machine.release.lower()
    hosts = [ipaddress.ip_address(host.partition("%")[0]) for host in scene.hosts]
    routed = [host for host in hosts if not host.is_link_local]
    return is_wsl and bool(routed) and all(host in _NAT for host in routed)


def _macos(scene: Scene, target: Target) -> Finding:
    probe = target.first(Outcome.UNREACHABLE)
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


def _windows(scene: Scene) -> Finding:
    return Finding(
        check="firewall",
        cause="Windows treats this network as public: its firewall keeps others out",
        evidence=(f"Get-NetConnectionProfile says: {scene.machine.network_category}.",),
        fix="Settings, Network & internet, properties of the connection: private network. Or, as "
        "an administrator: Set-NetConnectionProfile -NetworkCategory Private. When Windows asks, "
        "allow Python in private networks.",
        severity=Severity.NOTE if scene.met else Severity.PROBLEM,
    )


def _wsl(scene: Scene) -> Finding:
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
