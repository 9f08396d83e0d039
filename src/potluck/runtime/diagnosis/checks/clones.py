"""Whether another machine has a copy of this one's key."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Outcome, Scene, Target

__all__ = ["check_clones", "is_clone"]


def check_clones(scene: Scene) -> list[Finding]:
    """A home directory, a disk or the image of a virtual machine that was copied."""
    clones = [target for target in scene.targets if is_clone(scene, target)]
    if not clones:
        return []
    where = ", ".join(str(target.probes[0].address) for target in clones)
    return [
        Finding(
            check="clones",
            cause=f"Another machine, at {where}, has a copy of this machine's key",
            evidence=(
                f"It has proved to be {scene.node}, which is this machine; but it is another one.",
            ),
            fix="On the copy, delete the file node_keypair in its Potluck home (~/.potluck), and "
            "pair that machine anew: potluck pair",
        )
    ]


def is_clone(scene: Scene, target: Target) -> bool:
    """Whether somebody has proved our own id, and does not accept us as the same machine."""
    probe = target.first(Outcome.DECLINED)
    return probe is not None and probe.node == scene.node
