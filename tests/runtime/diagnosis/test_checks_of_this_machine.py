"""What follows from what this machine says of itself: keys, names, ports, power, its system."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from potluck.core.topology_nodes import Battery
from potluck.net.addresses import Address, Interface
from potluck.runtime.diagnosis import Finding, Severity, diagnose
from potluck.runtime.diagnosis.machine import Machine, TakenPort, Trouble
from potluck.runtime.diagnosis.scene import Outcome, Probe, Scene, Target
from potluck.vocabulary import NodeId

WHERE = Address("10.0.0.2", 4711)
OTHER = NodeId("b" * 32)
HEALTHY = Scene(
    node=NodeId("a" * 32),
    namespace="home",
    tag="t" * 26,
    version=1,
    interfaces=(Interface("eth0", ("10.0.0.1",)),),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    targets=(Target("desk", "heard", (Probe(WHERE, Outcome.MET, node=OTHER),), OTHER),),
    seconds=3.0,
    machine=Machine(
        system="Linux",
        release="6.1.0",
        name="attic",
        name_means=("10.0.0.1",),
        networks=("10.0.0.1/24",),
        gateway="10.0.0.254",
        gateway_life="it answers on port 80",
        battery=Battery(80, plugged=True),
        usual=4,
    ),
)


def with_machine(scene: Scene = HEALTHY, **facts: object) -> Scene:
    """The same where this machine is a little different."""
    return replace(scene, machine=replace(scene.machine, **facts))  # type: ignore[arg-type]


def only(scene: Scene) -> Finding:
    """The one thing that is found."""
    (finding,) = diagnose(scene)
    assert finding.evidence
    assert finding.fix
    return finding


def test_a_healthy_machine_gets_a_clean_bill() -> None:
    """Plugged in, with a name that others can use, and on ports that are free."""
    assert diagnose(HEALTHY) == []


def test_keys_that_cannot_be_used_come_alone() -> None:
    """Nothing else was tried; the error's own advice is the fix."""
    trouble = Trouble("Other users may read the file /k (mode 0644)", "Run: chmod 600 /k")
    finding = only(with_machine(replace(HEALTHY, interfaces=(), targets=()), trouble=trouble))
    assert finding.check == "keys"
    assert "Other users may read the file /k" in finding.evidence[0]
    assert finding.fix == "Run: chmod 600 /k"
    assert "who may read them" in only(with_machine(trouble=Trouble("Odd", ""))).fix


def test_a_host_name_that_leads_to_loopback_is_named() -> None:
    """Worth a note: Potluck does not depend on it, a launcher may."""
    finding = only(with_machine(name_means=("127.0.1.1",)))
    assert (finding.check, finding.severity) == ("names", Severity.NOTE)
    assert "attic, leads to itself only (127.0.1.1)" in finding.cause
    assert "10.0.0.1" in finding.fix
    assert diagnose(with_machine(name_means=("127.0.1.1", "10.0.0.1"))) == []


def test_a_given_name_that_leads_back_here_is_a_problem() -> None:
    """Whoever answers there is this machine, or nobody."""
    probe = Probe(Address("desk", 4711), Outcome.REFUSED, means=("127.0.1.1",))
    finding = only(replace(HEALTHY, targets=(Target("desk", "given", (probe,)),)))
    assert (finding.check, finding.severity) == ("names", Severity.PROBLEM)
    assert "desk leads back to this machine itself (127.0.1.1)" in finding.cause
    meant = replace(probe, address=Address("localhost", 4711), means=("127.0.0.1",))
    (refused,) = diagnose(replace(HEALTHY, targets=(Target("localhost", "given", (meant,)),)))
    assert refused.check == "ports"


def test_a_port_in_use_is_named_with_its_program() -> None:
    """One of them is a note, all of them are a problem for those who know only the address."""
    one = only(with_machine(taken=(TakenPort(52416, "nginx (process 7)"),)))
    assert (one.check, one.severity) == ("taken", Severity.NOTE)
    assert one.cause == "Port 52416 of this machine is in use by another program"
    assert one.evidence == ("Port 52416 is in use by nginx (process 7).",)
    every = only(with_machine(taken=tuple(TakenPort(52416 + each) for each in range(4))))
    assert every.severity is Severity.PROBLEM
    assert "Ports 52416, 52417, 52418, 52419 of this machine are in use" in every.cause
    assert "POTLUCK_PORT" in every.fix


def test_a_battery_is_worth_a_note() -> None:
    """Soon the machine sleeps."""
    finding = only(with_machine(battery=Battery(43, plugged=False)))
    assert (finding.check, finding.severity) == ("power", Severity.NOTE)
    assert finding.cause == "This machine runs on its battery (43 %)"


def denied(code: int = errno.EHOSTUNREACH, host: str = "10.0.0.2") -> Target:
    """A neighbour to whom the system says that there is no way."""
    probe = Probe(Address(host, 1), Outcome.UNREACHABLE, "No route to host", code=code)
    return Target("desk", "given", (probe,))


def test_macos_without_its_permission_is_told_by_its_error() -> None:
    """No route to a neighbour, although there is one; multicast is then kept back too."""
    scene = with_machine(
        replace(HEALTHY, targets=(denied(),), heard_self=False), system="Darwin", release="24.0"
    )
    finding = only(scene)
    assert finding.check == "permission"
    assert "Local Network" in finding.fix
    assert "in the same network" in finding.evidence[0]


@pytest.mark.parametrize(
    ("system", "target"),
    [
        ("Linux", denied()),
        ("Darwin", denied(errno.ENETUNREACH)),
        ("Darwin", denied(host="192.168.7.7")),
    ],
)
def test_the_same_error_elsewhere_is_no_permission(system: str, target: Target) -> None:
    """On another system, with another error, or outside of the local network."""
    scene = with_machine(replace(HEALTHY, targets=(target,)), system=system, gateway_life="")
    assert [finding.check for finding in diagnose(scene)] == ["ports"]


def test_a_network_that_windows_calls_public_is_named() -> None:
    """A note where somebody was met all the same."""
    public = with_machine(system="Windows", network_category="Public")
    assert only(public).severity is Severity.NOTE
    finding = only(replace(public, targets=(), heard_self=False))
    assert (finding.check, finding.severity) == ("firewall", Severity.PROBLEM)
    assert "public" in finding.cause
    assert "Private" in finding.fix
    assert diagnose(with_machine(system="Windows", network_category="Private")) == []


def test_wsl_behind_windows_is_told_by_its_kernel_and_its_address() -> None:
    """With mirrored networking it has the addresses of Windows, and all is well."""
    wsl = with_machine(release="5.15.90.1-microsoft-standard-WSL2")
    assert diagnose(wsl) == []
    inside = replace(wsl, interfaces=(Interface("eth0", ("172.24.5.6", "fe80::1%eth0")),))
    assert only(inside).severity is Severity.NOTE
    finding = only(replace(inside, targets=(), heard_self=False))
    assert (finding.check, finding.severity) == ("wsl", Severity.PROBLEM)
    assert "NAT" in finding.cause
    assert "networkingMode=mirrored" in finding.fix
