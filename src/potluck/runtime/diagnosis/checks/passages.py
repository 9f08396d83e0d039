"""Whether packets of full size pass, and how much goes through."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Probe, Scene, Target

__all__ = ["check_passages", "loses_large_packets"]

SMALL = 1280
"""Bytes; what every link must carry (RFC 8200, 5).  A way that carries less is no usual one."""

SLOW = 8
"""A link is slow if it carries less than this part of what its interface says."""

BELIEVED = 1000
"""Mbit/s: more than that cannot be shown in half a second on a busy machine."""

MEGABIT = 125_000  # bytes


def check_passages(scene: Scene) -> list[Finding]:
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


def loses_large_packets(target: Target) -> Probe | None:
    """The attempt at which packets of full size were lost on the way."""
    for probe in target.probes:
        if probe.passage is not None and probe.passage.passes < probe.passage.packet:
            return probe
    return None


def _lost(target: Target, probe: Probe) -> Finding:
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


def _is_small(probe: Probe) -> bool:
    return probe.passage is not None and 0 < probe.passage.packet < SMALL


def _small(target: Target, probe: Probe) -> Finding:
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


def _slow(scene: Scene, target: Target) -> list[Finding]:
    rate = target.rate
    if rate is None:
        return []
    interface = scene.interface_of(rate.host)
    said = scene.machine.speed_of(interface)
    measured = rate.octets / MEGABIT
    if not said or measured * SLOW >= min(said, BELIEVED):
        return []
    return [
        Finding(
            check="speed",
            cause=f"The link to {target.name} is much slower than its interface says",
            evidence=(
                f"{measured:.3g} Mbit/s went through; {interface} says it carries {said} Mbit/s.",
            ),
            fix="Look for a bad or old cable, a powerline adapter, a switch for 100 Mbit/s, a weak "
            "Wi-Fi signal, or another program that fills the link. `potluck bench` measures more.",
            severity=Severity.NOTE,
        )
    ]
