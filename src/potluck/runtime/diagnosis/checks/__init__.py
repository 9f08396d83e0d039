"""The checks, in the order in which their findings are shown: what is nearest first."""

from __future__ import annotations

from collections.abc import Callable

from potluck.runtime.diagnosis.checks.interfaces import check_interfaces
from potluck.runtime.diagnosis.checks.multicast import check_multicast
from potluck.runtime.diagnosis.checks.namespaces import check_namespaces
from potluck.runtime.diagnosis.checks.nobody import check_nobody
from potluck.runtime.diagnosis.checks.ports import check_ports
from potluck.runtime.diagnosis.checks.versions import check_versions
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["CHECKS", "diagnose"]

CHECKS: tuple[Callable[[Scene], list[Finding]], ...] = (
    check_interfaces,
    check_multicast,
    check_ports,
    check_namespaces,
    check_versions,
    check_nobody,
)


def diagnose(scene: Scene) -> list[Finding]:
    """What follows from what was seen; problems first, and an empty list for a healthy network."""
    findings = [finding for check in CHECKS for finding in check(scene)]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.PROBLEM)
