"""Whether two machines have a version of the Internet protocol in common."""

from __future__ import annotations

import errno
import ipaddress

from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Outcome, Scene, Target

__all__ = ["check_families", "lacks_family"]

_NO_WAY = frozenset({errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What the system says where it has no address of that kind."""


def check_families(scene: Scene) -> list[Finding]:
    """One has only IPv4, and the other is known only by IPv6; or the other way round."""
    return [_finding(scene, target) for target in scene.targets if lacks_family(scene, target)]


def lacks_family(scene: Scene, target: Target) -> bool:
    """Whether all addresses of somebody are of a kind that this machine has none of."""
    theirs = _versions_of(target)
    no_way = all(
        probe.outcome is Outcome.UNREACHABLE and probe.code in _NO_WAY for probe in target.probes
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


def _finding(scene: Scene, target: Target) -> Finding:
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
