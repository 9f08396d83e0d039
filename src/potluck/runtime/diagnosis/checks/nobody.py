"""Whether there is anybody else."""

from __future__ import annotations

from potluck.runtime.diagnosis.checks.platforms import is_behind_windows, is_public_network
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_nobody"]


def check_nobody(scene: Scene) -> list[Finding]:
    """An empty network is not ill, but nothing about the way to others could be checked."""
    others = [heard for heard in scene.heard if heard.node != scene.node]
    if scene.met or others or scene.targets or not scene.hosts:
        return []
    if is_public_network(scene) or is_behind_windows(scene):
        return []  # no wonder
    return [
        Finding(
            check="nobody",
            cause="No other machine was found, so the way to others could not be checked",
            evidence=(f"Nobody else announced itself within {scene.seconds:g} s.",),
            fix="Run `potluck doctor` on the other machine at the same time, or give its address: "
            "potluck doctor --peer ADDRESS. If it runs there too and neither hears the other, the "
            "network keeps them apart (guest network, client isolation) or drops multicast.",
            severity=Severity.NOTE,
        )
    ]
