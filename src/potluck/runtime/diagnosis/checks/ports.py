"""Whether those who were found can be reached on their port."""

from __future__ import annotations

from potluck.runtime.diagnosis.checks.clones import is_clone
from potluck.runtime.diagnosis.checks.families import lacks_family
from potluck.runtime.diagnosis.checks.isolation import is_kept_apart
from potluck.runtime.diagnosis.checks.names import leads_back
from potluck.runtime.diagnosis.checks.passages import loses_large_packets
from potluck.runtime.diagnosis.checks.platforms import denies_local_network
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.life import LATELY
from potluck.runtime.diagnosis.scene import Outcome, Probe, Scene, Target

__all__ = ["check_ports"]


def check_ports(scene: Scene) -> list[Finding]:
    """Dropped by a firewall, nobody there, no way there, or somebody else."""
    return [
        finding
        for target in scene.targets
        if target.met is None and not _is_explained(scene, target)
        for finding in _judge(target)
    ]


def _is_explained(scene: Scene, target: Target) -> bool:
    """Whether another check knows better why this one was not met."""
    return (
        leads_back(target)
        or lacks_family(scene, target)
        or is_kept_apart(scene, target)
        or is_clone(scene, target)
        or denies_local_network(scene, target)
        or loses_large_packets(target) is not None
    )


def _judge(target: Target) -> list[Finding]:
    """The outcome that says most about why none of its addresses worked."""
    for outcome, judge in (
        (Outcome.DECLINED, _declined),
        (Outcome.NOT_POTLUCK, _not_potluck),
        (Outcome.FAILED, _not_potluck),
        (Outcome.MUTE, _mute),
        (Outcome.SILENT, _silent),
        (Outcome.UNREACHABLE, _unreachable),
        (Outcome.UNKNOWN_NAME, _unreachable),
        (Outcome.REFUSED, _refused),
    ):
        others = (Outcome.OTHER_NAMESPACE, Outcome.OTHER_VERSION)  # these have their own checks
        probe = target.first(outcome)
        if probe is not None and target.first(*others) is None:
            return [judge(target, probe)]
    return []


def _silent(target: Target, probe: Probe) -> Finding:
    host, port = probe.address
    if not probe.life:
        return Finding(
            check="ports",
            cause=f"{target.name} does not answer at all: it is off or asleep, or elsewhere",
            evidence=(
                _seen(target),
                f"There was no answer from {probe.address}, not even of its network card.",
            ),
            fix="Wake it up, and let it not sleep while it trains (also with the lid closed); "
            "check that it is in the same network as this one.",
            severity=_severity(target),
        )
    how = "does not answer" if probe.outcome is Outcome.SILENT else f"is refused ({probe.words})"
    return Finding(
        check="ports",
        cause=f"A firewall blocks TCP port {port} of {target.name}",
        evidence=(_seen(target), f"{probe.address} {how}, though {_is_there(probe)}."),
        fix=f"On {host}, allow TCP port {port}: sudo ufw allow {port}/tcp, or sudo firewall-cmd "
        f"--add-port={port}/tcp; on Windows, allow Python in private networks.{_doubt(probe)}",
        severity=_severity(target),
    )


def _is_there(probe: Probe) -> str:
    return f"the machine is there: {probe.life}"


def _doubt(probe: Probe) -> str:
    """Who has just gone off looks like a firewall for as long as its network card is remembered."""
    if LATELY not in probe.life:
        return ""
    return " If it has just been switched off, unplugged or put to sleep, look again in a minute."


def _mute(target: Target, probe: Probe) -> Finding:
    return Finding(
        check="ports",
        cause=f"{target.name} takes connections and says nothing: its program is stopped, or the "
        "machine falls asleep",
        evidence=(_seen(target), f"{probe.address}: {probe.words}"),
        fix="Look at the program there: let it go on if it was stopped (Ctrl-Z, a debugger), and "
        "see that the machine does not sleep and has memory left.",
        severity=_severity(target),
    )


def _refused(target: Target, probe: Probe) -> Finding:
    return Finding(
        check="ports",
        cause=f"Nothing listens where {target.name} should be",
        evidence=(_seen(target), f"{probe.address} refused the connection at once."),
        fix="Start Potluck there, or check the port: the program says where it listens.",
        severity=_severity(target),
    )


def _unreachable(target: Target, probe: Probe) -> Finding:
    if probe.life:
        return _silent(target, probe)
    return Finding(
        check="ports",
        cause=f"There is no way to {target.name}",
        evidence=(_seen(target), f"{probe.address}: {probe.words}"),
        fix="Check the address, that both machines are in the same network, and their firewalls.",
        severity=_severity(target),
    )


def _not_potluck(target: Target, probe: Probe) -> Finding:
    return Finding(
        check="ports",
        cause=f"Whoever answers at {probe.address} does not behave like a node of Potluck",
        evidence=(_seen(target), probe.words),
        fix="Check the address and the port; update Potluck on that machine if it is one.",
        severity=_severity(target),
    )


def _declined(target: Target, probe: Probe) -> Finding:
    return Finding(
        check="ports",
        cause=f"{target.name} and this machine do not accept each other as members",
        evidence=(_seen(target), probe.words),
        fix="Pair the two: `potluck pair` on one of them. `potluck members` shows who belongs.",
    )


def _seen(target: Target) -> str:
    return {
        "given": "Its address was given by hand.",
        "known": "It was there in an earlier run.",
        "heard": "It announces itself on this network.",
    }[target.origin]


def _severity(target: Target) -> Severity:
    """Somebody of an earlier run may simply be switched off."""
    return Severity.NOTE if target.origin == "known" else Severity.PROBLEM
