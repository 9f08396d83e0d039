"""The checks, in the order in which their findings are shown: what is nearest first."""

from __future__ import annotations

from collections.abc import Callable

from potluck.runtime.diagnosis.checks.clocks import check_clocks
from potluck.runtime.diagnosis.checks.clones import check_clones
from potluck.runtime.diagnosis.checks.families import check_families
from potluck.runtime.diagnosis.checks.interfaces import check_interfaces
from potluck.runtime.diagnosis.checks.isolation import check_isolation
from potluck.runtime.diagnosis.checks.keys import check_keys
from potluck.runtime.diagnosis.checks.multicast import check_multicast
from potluck.runtime.diagnosis.checks.names import check_names
from potluck.runtime.diagnosis.checks.namespaces import check_namespaces
from potluck.runtime.diagnosis.checks.nobody import check_nobody
from potluck.runtime.diagnosis.checks.passages import check_passages
from potluck.runtime.diagnosis.checks.platforms import check_platforms
from potluck.runtime.diagnosis.checks.ports import check_ports
from potluck.runtime.diagnosis.checks.power import check_power
from potluck.runtime.diagnosis.checks.taken import check_taken
from potluck.runtime.diagnosis.checks.versions import check_versions
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["CHECKS", "diagnose"]

CHECKS: tuple[Callable[[Scene], list[Finding]], ...] = (
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


def diagnose(scene: Scene) -> list[Finding]:
    """What follows from what was seen; problems first, and an empty list for a healthy network."""
    unable = check_keys(scene)
    if unable:
        return unable  # nothing was tried
    if not scene.hosts:
        return check_interfaces(scene)  # without a network everything else follows from that
    findings = [finding for check in CHECKS for finding in check(scene)]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.PROBLEM)
