"""Whether names lead to machines, and not back to the one that asks."""

from __future__ import annotations

from potluck.net.addresses import is_loopback
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene, Target

__all__ = ["check_names", "leads_back"]


def check_names(scene: Scene) -> list[Finding]:
    """As Debian sets it up, a machine's own name means 127.0.1.1, which is nobody else's."""
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
    """Whether somebody was given by a name that means this very machine."""
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


def _addresses(scene: Scene) -> str:
    return scene.hosts[0] if scene.hosts else "once it has one"
