"""What follows from what is seen: each check names its cause, and none of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.net.addresses import Address, Interface
from potluck.net.mdns_records import OLD_TAG, Heard
from potluck.runtime.diagnosis import CHECKS, Finding, Severity, diagnose
from potluck.runtime.diagnosis.life import LATELY
from potluck.runtime.diagnosis.scene import Outcome, Probe, Scene, Target
from potluck.vocabulary import NodeId

ME, OTHER, THIRD = (NodeId(letter * 32) for letter in "abc")
WHERE = Address("10.0.0.2", 4711)
TAG, STRANGE = "t" * 26, "s" * 26
ETHERNET = Interface("eth0", ("10.0.0.1",))
LOOPBACK = Interface("lo", (), "it has no address that others can reach")
TUNNEL = Interface("wg0", ("10.8.0.2",), "it belongs to a container, a virtual machine or a VPN")


def heard(node: NodeId = OTHER, tag: str = TAG, version: int = 1) -> Heard:
    """Somebody who announces himself."""
    return Heard(tag, "j" * 16, node, 1, version, (WHERE,))


def target(outcome: Outcome, origin: str = "heard", *, words: str = "", life: str = "") -> Target:
    """Somebody whom this machine tried to meet at one address."""
    node = OTHER if outcome is Outcome.MET else None
    return Target("desk", origin, (Probe(WHERE, outcome, words, life, node),), OTHER)


HEALTHY = Scene(
    node=ME,
    namespace="home",
    tag=TAG,
    version=1,
    interfaces=(LOOPBACK, ETHERNET),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    heard=(heard(),),
    targets=(target(Outcome.MET),),
    seconds=3.0,
)


def only(scene: Scene) -> Finding:
    """The one thing that is found."""
    (finding,) = diagnose(scene)
    assert finding.evidence
    assert finding.fix
    return finding


def test_a_healthy_network_gets_a_clean_bill() -> None:
    """Somebody is heard and met; processes of this machine and neighbours do not matter."""
    assert diagnose(HEALTHY) == []
    assert HEALTHY.met == [OTHER]
    assert diagnose(replace(HEALTHY, heard=(heard(), heard(ME)))) == []


def test_every_check_has_a_word_of_its_own() -> None:
    """Programs go by it."""
    assert len({check.__module__.rpartition(".")[2] for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("interfaces", "evidence", "fix"),
    [
        ((LOOPBACK,), "lo: it has no address", "plug in the cable"),
        ((), "no interface at all", "plug in the cable"),
        ((LOOPBACK, TUNNEL), "wg0: it belongs to a container", "POTLUCK_INTERFACES=wg0"),
        ((Interface("eth0", ("10.0.0.1",), "it is down"),), "eth0: it is down", "plug in"),
    ],
)
def test_no_usable_interface_is_named_alone(
    interfaces: tuple[Interface, ...], evidence: str, fix: str
) -> None:
    """Nothing else can be wrong as long as that is."""
    finding = only(replace(HEALTHY, interfaces=interfaces, heard=(), targets=(), heard_self=False))
    assert finding.check == "interfaces"
    assert "no network interface" in finding.cause
    assert evidence in " ".join(finding.evidence)
    assert fix in finding.fix


def test_addresses_that_a_machine_gave_itself_are_suspicious() -> None:
    """No router has answered."""
    alone = Interface("eth0", ("169.254.7.7", "fe80::1%eth0"))
    finding = only(replace(HEALTHY, interfaces=(alone,)))
    assert finding.check == "interfaces"
    assert "169.254.7.7" in finding.evidence[0]
    both = Interface("eth0", ("10.0.0.1", "fe80::1%eth0"))
    assert diagnose(replace(HEALTHY, interfaces=(both,))) == []


def test_multicast_that_does_not_come_back_is_blocked_here() -> None:
    """Even if others are met by their addresses."""
    deaf = replace(HEALTHY, heard=(), heard_self=False, targets=(target(Outcome.MET, "given"),))
    finding = only(deaf)
    assert finding.check == "multicast"
    assert "firewall on this machine" in finding.cause
    assert "5353" in finding.fix


def test_multicast_that_cannot_be_opened_is_told_in_the_systems_words() -> None:
    """Another program may keep the port to itself."""
    finding = only(replace(HEALTHY, mdns_works=False, mdns="Address in use", heard=()))
    assert finding.check == "multicast"
    assert finding.evidence == ("Address in use",)


@pytest.mark.parametrize("origin", ["given", "known"])
def test_somebody_who_answers_and_is_not_heard_shows_that_multicast_does_not_pass(
    origin: str,
) -> None:
    """An access point keeps its clients apart."""
    finding = only(replace(HEALTHY, heard=(), targets=(target(Outcome.MET, origin),)))
    assert finding.check == "multicast"
    assert "does not pass between" in finding.cause
    assert "isolation" in finding.fix
    assert "POTLUCK_PEERS" in finding.fix


def test_a_silent_port_of_a_living_machine_is_a_firewall() -> None:
    """That the machine is on is part of the evidence."""
    blocked = target(Outcome.SILENT, life="it refuses port 9 at once")
    finding = only(replace(HEALTHY, targets=(blocked,)))
    assert finding.check == "ports"
    assert finding.cause == "A firewall blocks TCP port 4711 of desk"
    assert "it refuses port 9 at once" in finding.evidence[1]
    assert "ufw allow 4711/tcp" in finding.fix
    assert "just been switched off" not in finding.fix
    remembered = target(Outcome.SILENT, life=f"its network card answered {LATELY}")
    assert "just been switched off" in only(replace(HEALTHY, targets=(remembered,))).fix


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Outcome.SILENT, "desk does not answer at all"),
        (Outcome.REFUSED, "Nothing listens where desk should be"),
        (Outcome.UNREACHABLE, "There is no way to desk"),
        (Outcome.UNKNOWN_NAME, "There is no way to desk"),
        (Outcome.NOT_POTLUCK, "does not behave like a node"),
        (Outcome.FAILED, "does not behave like a node"),
        (Outcome.DECLINED, "do not accept each other as members"),
    ],
)
def test_every_other_way_to_miss_somebody_has_its_sentence(outcome: Outcome, cause: str) -> None:
    """With the words of the error as evidence."""
    missed = target(outcome, "given", words="so it was said.")
    finding = only(replace(HEALTHY, heard=(), targets=(missed,)))
    assert finding.check == "ports"
    assert finding.severity is Severity.PROBLEM
    assert cause in finding.cause


def test_one_address_that_works_is_enough() -> None:
    """A machine may have others that do not."""
    probes = (Probe(WHERE, Outcome.SILENT), Probe(Address("fd00::2", 1), Outcome.MET, node=OTHER))
    assert diagnose(replace(HEALTHY, targets=(Target("desk", "heard", probes, OTHER),))) == []


def test_a_peer_of_an_earlier_run_may_simply_be_off() -> None:
    """That is worth a note."""
    finding = only(replace(HEALTHY, targets=(target(Outcome.SILENT, "known"),)))
    assert finding.severity is Severity.NOTE


def test_another_tag_is_another_namespace() -> None:
    """Named by what is public: neither the tags in full nor anything derived from secrets."""
    finding = only(replace(HEALTHY, heard=(heard(tag=STRANGE), heard(tag=STRANGE)), targets=()))
    assert finding.check == "namespaces"
    assert finding.severity is Severity.PROBLEM
    assert "belongs to another namespace" in finding.cause
    assert "potluck pair" in finding.fix
    assert STRANGE not in str(finding)
    assert TAG not in str(finding)


def test_beside_members_that_are_met_a_neighbours_cluster_is_only_a_note() -> None:
    """In a student hall everybody has one."""
    finding = only(replace(HEALTHY, heard=(heard(), heard(THIRD, STRANGE))))
    assert finding.severity is Severity.NOTE


def test_another_secret_behind_a_given_address_is_a_problem_in_any_case() -> None:
    """Somebody has named it: it was meant to belong."""
    other = target(Outcome.OTHER_NAMESPACE, "given")
    finding = only(replace(HEALTHY, targets=(*HEALTHY.targets, other)))
    assert finding.check == "namespaces"
    assert finding.severity is Severity.PROBLEM


def test_a_missed_rotation_is_told_from_another_namespace() -> None:
    """On whichever side; it heals itself once the two meet."""
    theirs = replace(HEALTHY, old_tags=(STRANGE,), heard=(heard(tag=STRANGE),), targets=())
    assert "has missed a change of the secret" in only(theirs).cause
    newer = replace(heard(tag=STRANGE), old_tags=(TAG[:OLD_TAG],))
    ours = only(replace(HEALTHY, heard=(newer,), targets=()))
    assert ours.cause.startswith("This machine has missed a change")
    assert "potluck members --host 10.0.0.2:4711" in ours.fix


def test_another_version_is_named_once() -> None:
    """Whether it is announced, said, or both."""
    announced = replace(HEALTHY, heard=(heard(version=9),), targets=())
    assert "announces version 9; this machine speaks 1" in only(announced).evidence[0]
    said = target(Outcome.OTHER_VERSION, "given", words="it speaks protocol version 9")
    for scene in (
        replace(HEALTHY, heard=(), targets=(said,)),
        replace(announced, targets=(said,)),
    ):
        finding = only(scene)
        assert finding.check == "versions"
        assert "pip install --upgrade potluck" in finding.fix


def test_an_empty_network_is_only_a_note() -> None:
    """Nothing is wrong with this machine, as far as one can see."""
    finding = only(replace(HEALTHY, heard=(), targets=()))
    assert (finding.check, finding.severity) == ("nobody", Severity.NOTE)


def test_problems_come_first() -> None:
    """Whoever reads only the first lines reads what matters."""
    scene = replace(
        HEALTHY,
        heard=(heard(), heard(THIRD, STRANGE)),
        targets=(*HEALTHY.targets, target(Outcome.REFUSED, "known"), target(Outcome.REFUSED)),
    )
    severities = [finding.severity.value for finding in diagnose(scene)]
    assert severities == ["problem", "note", "note"]
