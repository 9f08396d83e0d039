"""Whether there is any way into a network at all."""

from __future__ import annotations

import ipaddress

from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_interfaces"]


def check_interfaces(scene: Scene) -> list[Finding]:
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


def _self_assigned(scene: Scene) -> list[Finding]:
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
