"""Whether those who are here have the same secret."""

from __future__ import annotations

from potluck.net.mdns_records import OLD_TAG, Heard
from potluck.runtime.diagnosis.finding import Finding, Severity
from potluck.runtime.diagnosis.scene import Outcome, Scene, Target
from potluck.vocabulary import NodeId

__all__ = ["check_namespaces"]

SHOWN = 8  # letters of a tag; enough to compare, and public anyway

PAIR = "Pair the two: `potluck pair` on one of them, and type the code it shows on the other."


def check_namespaces(scene: Scene) -> list[Finding]:
    """Another secret, or an earlier or later one of ours; tags are compared, never secrets."""
    findings = []
    nodes: set[NodeId] = set()
    for heard in scene.heard:
        if heard.tag != scene.tag and heard.node not in {scene.node, *nodes}:
            nodes.add(heard.node)
            findings.append(_heard(scene, heard))
    findings += [
        _dialled(scene, target)
        for target in scene.targets
        if target.met is None and target.first(Outcome.OTHER_NAMESPACE) is not None
    ]
    return findings


def _heard(scene: Scene, heard: Heard) -> Finding:
    name = scene.who(heard.node, heard.addresses[0])
    seen = (
        f"It shows the tag {heard.tag[:SHOWN]}…, this machine {scene.tag[:SHOWN]}… "
        f'(namespace "{scene.namespace}").'
    )
    evidence = (seen,)
    if heard.tag in scene.old_tags:
        cause = f"{name} has missed a change of the secret"
        fix = "It is brought up to date as soon as it meets a member: start Potluck on both."
        return Finding("namespaces", cause, evidence, fix, Severity.NOTE)
    if scene.tag[:OLD_TAG] in heard.old_tags:
        cause = f"This machine has missed a change of the secret, which {name} has"
        fix = f"It is brought up to date by: potluck members --host {heard.addresses[0]}"
        return Finding("namespaces", cause, evidence, fix)
    return Finding(
        check="namespaces",
        cause=heard.is_elsewhere,
        evidence=evidence,
        fix=f"If it should belong to this one: {PAIR} If both know several, choose the same one "
        "with --namespace or POTLUCK_NAMESPACE.",
        # Beside members that were met, a neighbour's cluster is nobody's fault.
        severity=Severity.NOTE if scene.met else Severity.PROBLEM,
    )


def _dialled(scene: Scene, target: Target) -> Finding:
    probe = target.first(Outcome.OTHER_NAMESPACE)
    assert probe is not None
    seen = (
        f"{probe.address} answers, but with another secret than that of "
        f'"{scene.namespace}" on this machine.'
    )
    return Finding(
        check="namespaces",
        cause=f"{target.name} belongs to another namespace",
        evidence=(seen,),
        fix=f"{PAIR} If both know several namespaces, choose the same one with --namespace or "
        "POTLUCK_NAMESPACE.",
    )
