"""What follows from how attempts went: isolation, families, packets, speed, clocks, clones."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from potluck.net.addresses import Address, Interface
from potluck.runtime.diagnosis import Finding, Severity, diagnose
from potluck.runtime.diagnosis.machine import Machine
from potluck.runtime.diagnosis.packets import Passage
from potluck.runtime.diagnosis.scene import Outcome, Probe, Rate, Scene, Target
from potluck.vocabulary import NodeId

ME, OTHER = NodeId("a" * 32), NodeId("b" * 32)
WHERE = Address("10.0.0.2", 4711)
MET = Probe(WHERE, Outcome.MET, node=OTHER, skew=0.2, passage=Passage(1500, 1500))
HEALTHY = Scene(
    node=ME,
    namespace="home",
    tag="t" * 26,
    version=1,
    interfaces=(Interface("eth0", ("10.0.0.1",)),),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    seconds=3.0,
    machine=Machine(
        system="Linux",
        networks=("10.0.0.1/24",),
        speeds=(("eth0", 1000),),
        gateway="10.0.0.254",
        gateway_life="it answers on port 80",
    ),
)


def seen(*probes: Probe, origin: str = "heard", **facts: Rate) -> Scene:
    """One machine, and how the attempts to meet it went."""
    return replace(HEALTHY, targets=(Target("desk", origin, probes, OTHER, **facts),))


def only(scene: Scene) -> Finding:
    """The one thing that is found."""
    (finding,) = diagnose(scene)
    assert finding.evidence
    assert finding.fix
    return finding


def test_a_clean_bill() -> None:
    """Clocks that differ by little, full packets, a fast link."""
    rate = Rate(110_000_000, "10.0.0.1")
    assert diagnose(seen(MET, rate=rate)) == []


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.SILENT, 0), (Outcome.UNREACHABLE, errno.EHOSTUNREACH)]
)
def test_a_neighbour_without_a_sign_of_life_beside_a_router_with_one(
    outcome: Outcome, code: int
) -> None:
    """The access point keeps its clients apart; or the neighbour sleeps, which is said too."""
    finding = only(seen(Probe(WHERE, outcome, code=code), origin="given"))
    assert finding.check == "isolation"
    assert "client isolation" in finding.cause
    assert "off or asleep" in finding.cause
    assert "10.0.0.254, answers: it answers on port 80" in finding.evidence[1]


def test_isolation_is_not_claimed_without_evidence() -> None:
    """A router that is silent too, another network, somebody who was met, one of an earlier run."""
    silent = Probe(WHERE, Outcome.SILENT)
    far = Probe(Address("192.168.9.9", 1), Outcome.SILENT)
    scenes = [
        replace(seen(silent), machine=replace(HEALTHY.machine, gateway_life="")),
        seen(far),
        seen(silent, origin="known"),
    ]
    for scene in scenes:
        assert only(scene).check == "ports"
        assert "off or asleep" in only(scene).cause
    beside = replace(
        HEALTHY, targets=(Target("desk", "given", (silent,)), Target("lap", "heard", (MET,), OTHER))
    )
    assert only(beside).check == "ports"


def test_a_firewall_that_refuses_politely_is_still_a_firewall() -> None:
    """The system says that there is no route, while the machine answers elsewhere."""
    probe = Probe(
        WHERE, Outcome.UNREACHABLE, "No route to host", "it refuses port 9 at once", code=113
    )
    finding = only(seen(probe))
    assert finding.cause == "A firewall blocks TCP port 4711 of desk"
    assert "No route to host" in finding.evidence[1]


def test_one_who_takes_connections_and_says_nothing_is_stopped() -> None:
    """Its kernel answers, its program does not."""
    finding = only(seen(Probe(WHERE, Outcome.MUTE, "It took the connection, and said nothing.")))
    assert finding.check == "ports"
    assert "its program is stopped" in finding.cause


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("10.0.0.1", Address("fd00::2", 1), "only by IPv6, and this machine has only IPv4"),
        ("fd00::1", Address("10.0.0.2", 1), "only by IPv4, and this machine has only IPv6"),
    ],
)
def test_machines_without_a_family_in_common(ours: str, theirs: Address, words: str) -> None:
    """The system says that there is no way to such an address."""
    probe = Probe(theirs, Outcome.UNREACHABLE, "Network is unreachable", code=errno.ENETUNREACH)
    scene = replace(seen(probe), interfaces=(Interface("eth0", (ours,)),))
    finding = only(scene)
    assert finding.check == "families"
    assert words in finding.cause
    named = replace(probe, address=Address("desk", 1), means=(theirs.host,))
    assert words in only(replace(scene, targets=(Target("desk", "given", (named,)),))).cause
    both = replace(scene, interfaces=(Interface("eth0", ("10.0.0.1", "fd00::1")),))
    assert only(both).check == "ports"
    odd = replace(probe, address=Address("desk", 1))
    assert only(replace(scene, targets=(Target("desk", "given", (odd,)),))).check == "ports"


@pytest.mark.parametrize("outcome", [Outcome.MET, Outcome.MUTE])
def test_large_packets_that_are_lost_are_named(outcome: Outcome) -> None:
    """Whether or not the small ones were enough to meet."""
    finding = only(seen(replace(MET, outcome=outcome, passage=Passage(1500, 1280))))
    assert (finding.check, finding.severity) == ("packets", Severity.PROBLEM)
    assert "small MTU" in finding.cause
    assert "1500 bytes to 10.0.0.2:4711 does not arrive, one of 1280 does" in finding.evidence[0]
    assert "mtu 1280" in finding.fix


def test_a_small_mtu_that_both_know_of_is_a_note() -> None:
    """It costs speed and nothing else."""
    finding = only(seen(replace(MET, passage=Passage(1000, 1000))))
    assert (finding.check, finding.severity) == ("packets", Severity.NOTE)
    assert "1000 bytes" in finding.cause


def test_a_link_slower_than_its_interface_says() -> None:
    """A tenth of what it says is too little; what an interface does not say proves nothing."""
    slow = Rate(11_000_000, "10.0.0.1")
    finding = only(seen(MET, rate=slow))
    assert (finding.check, finding.severity) == ("speed", Severity.NOTE)
    assert finding.evidence == ("88 Mbit/s went through; eth0 says it carries 1000 Mbit/s.",)
    silent = replace(HEALTHY.machine, speeds=())
    assert diagnose(replace(seen(MET, rate=slow), machine=silent)) == []
    hundred = replace(HEALTHY.machine, speeds=(("eth0", 100),))
    assert diagnose(replace(seen(MET, rate=slow), machine=hundred)) == []
    fast = replace(HEALTHY.machine, speeds=(("eth0", 100_000),))
    assert diagnose(replace(seen(MET, rate=Rate(10**9, "10.0.0.1")), machine=fast)) == []


def test_a_colleague_on_battery_is_told_of() -> None:
    """It says so itself while the two measure."""
    finding = only(seen(MET, rate=Rate(10**9, "10.0.0.1", is_on_battery=True)))
    assert finding.cause == "desk runs on its battery"


@pytest.mark.parametrize(
    ("skew", "words"),
    [(-90.0, "90 s behind"), (7200.0, "2 h ahead of"), (86400.0 * 400, "400 days ahead of")],
)
def test_a_clock_far_off_is_named(skew: float, words: str) -> None:
    """It does not keep nodes from meeting."""
    finding = only(seen(replace(MET, skew=skew)))
    assert (finding.check, finding.severity) == ("clocks", Severity.NOTE)
    assert words in finding.cause


def test_a_copy_of_our_key_is_named() -> None:
    """It proves our own id from another machine; one that declines for another reason does not."""
    declined = Probe(WHERE, Outcome.DECLINED, "used on two machines", node=ME)
    finding = only(seen(declined))
    assert finding.check == "clones"
    assert "10.0.0.2:4711, has a copy of this machine's key" in finding.cause
    assert "node_keypair" in finding.fix
    assert only(seen(replace(declined, node=OTHER))).check == "ports"
