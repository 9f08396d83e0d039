"""Whether the network itself keeps its clients apart, as guest networks and access points do."""

from __future__ import annotations

import errno

from potluck.runtime.diagnosis.checks.families import lacks_family
from potluck.runtime.diagnosis.checks.platforms import denies_local_network
from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Outcome, Scene, Target

__all__ = ["check_isolation", "is_kept_apart"]

_NO_ANSWER = {(Outcome.SILENT, 0), (Outcome.UNREACHABLE, errno.EHOSTUNREACH)}
"""In time, or ever: the second is said where nobody has answered for an address (ARP)."""


def check_isolation(scene: Scene) -> list[Finding]:
    """Nobody of the same network answers, not even a network card, while the router does."""
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


def is_kept_apart(scene: Scene, target: Target) -> bool:
    """Whether somebody of our own network does not answer in any way, while the router does."""
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
