"""Whether announcements pass: out of this machine, and between the machines."""

from __future__ import annotations

from potluck.runtime.diagnosis.checks.platforms import (
    denies_local_network,
    is_behind_windows,
    is_public_network,
)
from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_multicast"]

BY_HAND = "Until then give the addresses: POTLUCK_PEERS=host:port,host:port"


def check_multicast(scene: Scene) -> list[Finding]:
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


def _blocked_here(scene: Scene) -> Finding:
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


def _met_but_not_heard(scene: Scene) -> list[str]:
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
