"""Whether the clocks agree."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_clocks"]

FAR = 30.0
"""Seconds; a clock that is set by the network is wrong by far less."""


def check_clocks(scene: Scene) -> list[Finding]:
    """One that is far off does not keep nodes from meeting, but makes logs and files lie."""
    findings = []
    for target in scene.targets:
        probe = target.met
        if probe is not None and probe.skew is not None and abs(probe.skew) > FAR:
            findings.append(_finding(target.name, probe.skew))
    return findings


def _finding(name: str, skew: float) -> Finding:
    which = "ahead of" if skew > 0 else "behind"
    return Finding(
        check="clocks",
        cause=f"The clock of {name} is far off: {_duration(abs(skew))} {which} this machine's",
        evidence=("The two have compared their clocks within one answer, which took a moment.",),
        fix="Let both set their clocks by the network: sudo timedatectl set-ntp true; on macOS and "
        "Windows it is in the settings of date and time. Potluck itself does not depend on it; "
        "logs, timelines and certificates of other programs do.",
        severity=Severity.NOTE,
    )


def _duration(seconds: float) -> str:
    """In words.

    >>> _duration(90), _duration(7200), _duration(400000)
    ('90 s', '2 h', '5 days')
    """
    if seconds < 600:  # noqa: PLR2004 - ten minutes
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.0f} days"  # noqa: PLR2004
