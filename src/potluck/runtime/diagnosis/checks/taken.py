"""Whether other programs have the ports on which nodes are looked for."""

from __future__ import annotations

from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Scene

__all__ = ["check_taken"]


def check_taken(scene: Scene) -> list[Finding]:
    """A node then takes another port, which those who are given only the address do not try."""
    taken = scene.machine.taken
    if not taken:
        return []
    ports = ", ".join(str(each.port) for each in taken)
    by = tuple(f"Port {each.port} is in use by {each.program}." for each in taken if each.program)
    is_all = len(taken) >= scene.machine.usual
    return [
        Finding(
            check="taken",
            cause=f"Port {ports} of this machine is in use by another program"
            if len(taken) == 1
            else f"Ports {ports} of this machine are in use by other programs",
            evidence=by or ("Somebody listens there who is no node of Potluck.",),
            fix="End that program, or let nodes listen elsewhere (POTLUCK_PORT) and give that "
            "port with the address: POTLUCK_PEERS=host:port"
            if is_all
            else "Nodes take the next free port, where others look for them too: nothing has to "
            "be done.",
            severity=Severity.PROBLEM if is_all else Severity.NOTE,
        )
    ]
