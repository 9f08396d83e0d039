"""Whether machines will stay awake."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_power"]

FIX = "Plug it in, and let it not sleep while it trains; it is slower on battery as well."


def check_power(scene: Scene) -> list[Finding]:
    """On battery a laptop soon sleeps, and is slower."""
    findings = []
    battery = scene.machine.battery
    if battery is not None and not battery.plugged:
        findings.append(
            Finding(
                check="power",
                cause=f"This machine runs on its battery ({battery.percent} %)",
                evidence=("Its power supply is not plugged in, says the operating system.",),
                fix=FIX,
                severity=Severity.NOTE,
            )
        )
    findings += [
        Finding(
            check="power",
            cause=f"{target.name} runs on its battery",
            evidence=("It says so itself.",),
            fix=FIX,
            severity=Severity.NOTE,
        )
        for target in scene.targets
        if target.rate is not None and target.rate.is_on_battery
    ]
    return findings
