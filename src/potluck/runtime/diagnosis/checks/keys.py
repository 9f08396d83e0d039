"""Whether this machine's own keys can be used at all."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_keys"]


def check_keys(scene: Scene) -> list[Finding]:
    """Files that others may read or change, that belong to somebody else, or that are damaged."""
    trouble = scene.machine.trouble
    if trouble is None:
        return []
    return [
        Finding(
            check="keys",
            cause="The keys of this machine cannot be used",
            evidence=(f"{trouble.message}.", "A secret that others could have read is none."),
            fix=trouble.fix or "Check whose files these are, and who may read them.",
        )
    ]
