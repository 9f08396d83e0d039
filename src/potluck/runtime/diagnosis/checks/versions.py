"""Whether those who belong together speak the same version of the protocol."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Outcome, Scene

__all__ = ["check_versions"]

FIX = "Install the same version of potluck on every machine: pip install --upgrade potluck"


def check_versions(scene: Scene) -> list[Finding]:
    """Announced, or said when dialled."""
    found = {}
    for heard in scene.heard:
        if heard.tag == scene.tag and heard.version != scene.version and heard.node != scene.node:
            found[heard.node] = _finding(
                scene.who(heard.node, heard.addresses[0]),
                f"It announces version {heard.version}; this machine speaks {scene.version}.",
            )
    dialled = [
        _finding(target.name, f"{probe.address}: {probe.words}")
        for target in scene.targets
        if target.met is None
        and (probe := target.first(Outcome.OTHER_VERSION)) is not None
        and target.node not in found
    ]
    return [*found.values(), *dialled]


def _finding(name: str, evidence: str) -> Finding:
    cause = f"{name} speaks another version of Potluck's protocol"
    return Finding("versions", cause, (evidence,), FIX)
