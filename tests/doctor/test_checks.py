"""What follows from what is seen: each check names its cause, and none of the others."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from potluck._types import NodeId
from potluck._version import __version__
from potluck.discovery.mdns import OLD_TAG, MdnsRecord
from potluck.doctor.checks import CHECKS, diagnose
from potluck.doctor.facts import (
    LATELY,
    DoctorFacts,
    Finding,
    MachineFacts,
    PathFacts,
    ProbeAttempt,
    ProbeOutcome,
    Rate,
    Severity,
    StartupError,
    TakenPort,
    Target,
)
from potluck.membership.topology import Battery
from potluck.net.addresses import Address, Interface

ME, OTHER, THIRD = (NodeId(letter * 32) for letter in "abc")
WHERE = Address("10.0.0.2", 4711)
TAG, STRANGE = "t" * 26, "s" * 26
ETHERNET = Interface("eth0", ("10.0.0.1",))
LOOPBACK = Interface("lo", (), "it has no address that others can reach")
TUNNEL = Interface("wg0", ("10.8.0.2",), "it belongs to a container, a virtual machine or a VPN")


def heard(node: NodeId = OTHER, tag: str = TAG, version: int = 1) -> MdnsRecord:
    """Somebody who announces himself."""
    return MdnsRecord(
        tag, "j" * 16, node, 1, version, (WHERE,), oldest=version, potluck=__version__
    )


def target(
    outcome: ProbeOutcome, origin: str = "heard", *, words: str = "", life: str = ""
) -> Target:
    """Somebody whom this machine tried to meet at one address."""
    node = OTHER if outcome is ProbeOutcome.MET else None
    return Target("desk", origin, (ProbeAttempt(WHERE, outcome, words, life, node),), OTHER)


HEALTHY = DoctorFacts(
    node=ME,
    namespace="home",
    tag=TAG,
    interfaces=(LOOPBACK, ETHERNET),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    heard=(heard(),),
    targets=(target(ProbeOutcome.MET),),
    seconds=3.0,
)


def only(scene: DoctorFacts) -> Finding:
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
    assert len({check.__name__.removeprefix("check_") for check in CHECKS}) == len(CHECKS)


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
    deaf = replace(
        HEALTHY, heard=(), heard_self=False, targets=(target(ProbeOutcome.MET, "given"),)
    )
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
    finding = only(replace(HEALTHY, heard=(), targets=(target(ProbeOutcome.MET, origin),)))
    assert finding.check == "multicast"
    assert "does not pass between" in finding.cause
    assert "isolation" in finding.fix
    assert "POTLUCK_PEERS" in finding.fix


def test_a_silent_port_of_a_living_machine_is_a_firewall() -> None:
    """That the machine is on is part of the evidence."""
    blocked = target(ProbeOutcome.SILENT, life="it refuses port 9 at once")
    finding = only(replace(HEALTHY, targets=(blocked,)))
    assert finding.check == "ports"
    assert finding.cause == "A firewall blocks TCP port 4711 of desk"
    assert "it refuses port 9 at once" in finding.evidence[1]
    assert "ufw allow 4711/tcp" in finding.fix
    assert "just been switched off" not in finding.fix
    remembered = target(ProbeOutcome.SILENT, life=f"its network card answered {LATELY}")
    assert "just been switched off" in only(replace(HEALTHY, targets=(remembered,))).fix


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (ProbeOutcome.SILENT, "desk does not answer at all"),
        (ProbeOutcome.REFUSED, "desk is on, but Potluck is not running there"),
        (ProbeOutcome.UNREACHABLE, "There is no route to desk"),
        (ProbeOutcome.UNKNOWN_NAME, "There is no route to desk"),
        (ProbeOutcome.NOT_POTLUCK, "does not behave like a node"),
        (ProbeOutcome.FAILED, "does not behave like a node"),
        (ProbeOutcome.DECLINED, "do not accept each other as members"),
    ],
)
def test_every_other_way_to_miss_somebody_has_its_sentence(
    outcome: ProbeOutcome, cause: str
) -> None:
    """With the words of the error as evidence."""
    missed = target(outcome, "given", words="so it was said.")
    finding = only(replace(HEALTHY, heard=(), targets=(missed,)))
    assert finding.check == "ports"
    assert finding.severity is Severity.PROBLEM
    assert cause in finding.cause


def test_one_address_that_works_is_enough() -> None:
    """A machine may have others that do not."""
    probes = (
        ProbeAttempt(WHERE, ProbeOutcome.SILENT),
        ProbeAttempt(Address("fd00::2", 1), ProbeOutcome.MET, node=OTHER),
    )
    assert diagnose(replace(HEALTHY, targets=(Target("desk", "heard", probes, OTHER),))) == []


def test_a_peer_of_an_earlier_run_may_simply_be_off() -> None:
    """That is worth a note."""
    finding = only(replace(HEALTHY, targets=(target(ProbeOutcome.SILENT, "known"),)))
    assert finding.severity is Severity.NOTE


def test_another_tag_is_another_namespace() -> None:
    """Named by what is public: neither the tags in full nor anything derived from secrets."""
    finding = only(replace(HEALTHY, heard=(heard(tag=STRANGE), heard(tag=STRANGE)), targets=()))
    assert finding.check == "namespaces"
    assert finding.severity is Severity.PROBLEM
    assert "belongs to another group" in finding.cause
    assert "potluck pair" in finding.fix
    assert STRANGE not in str(finding)
    assert TAG not in str(finding)


def test_beside_members_that_are_met_a_neighbours_cluster_is_only_a_note() -> None:
    """In a student hall everybody has one."""
    finding = only(replace(HEALTHY, heard=(heard(), heard(THIRD, STRANGE))))
    assert finding.severity is Severity.NOTE


def test_another_secret_behind_a_given_address_is_a_problem_in_any_case() -> None:
    """Somebody has named it: it was meant to belong."""
    other = target(ProbeOutcome.OTHER_NAMESPACE, "given")
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
    assert "announces protocol 9; this machine speaks protocol 1" in only(announced).evidence[0]
    said = target(ProbeOutcome.OTHER_VERSION, "given", words="it speaks protocol version 9")
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
        targets=(
            *HEALTHY.targets,
            target(ProbeOutcome.REFUSED, "known"),
            target(ProbeOutcome.REFUSED),
        ),
    )
    severities = [finding.severity.value for finding in diagnose(scene)]
    assert severities == ["problem", "note", "note"]


# --------------------------------------------------------------------------------------------------
# What follows from how attempts went: isolation, families, packets, speed, clocks, clones.

OF_THE_WAY_ME, OF_THE_WAY_OTHER = NodeId("a" * 32), NodeId("b" * 32)
OF_THE_WAY_WHERE = Address("10.0.0.2", 4711)
MET = ProbeAttempt(
    OF_THE_WAY_WHERE,
    ProbeOutcome.MET,
    node=OF_THE_WAY_OTHER,
    skew=0.2,
    passage=PathFacts(1500, 1500),
)
OF_THE_WAY_HEALTHY = DoctorFacts(
    node=OF_THE_WAY_ME,
    namespace="home",
    tag="t" * 26,
    interfaces=(Interface("eth0", ("10.0.0.1",)),),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    seconds=3.0,
    machine=MachineFacts(
        system="Linux",
        networks=("10.0.0.1/24",),
        speeds=(("eth0", 1000),),
        gateway="10.0.0.254",
        gateway_life="it answers on port 80",
    ),
)


def seen(*probes: ProbeAttempt, origin: str = "heard", **facts: Rate) -> DoctorFacts:
    """One machine, and how the attempts to meet it went."""
    return replace(
        OF_THE_WAY_HEALTHY, targets=(Target("desk", origin, probes, OF_THE_WAY_OTHER, **facts),)
    )


def test_a_clean_bill() -> None:
    """Clocks that differ by little, full packets, a fast link."""
    rate = Rate(110_000_000, "10.0.0.1")
    assert diagnose(seen(MET, rate=rate)) == []


@pytest.mark.parametrize(
    ("outcome", "code"), [(ProbeOutcome.SILENT, 0), (ProbeOutcome.UNREACHABLE, errno.EHOSTUNREACH)]
)
def test_a_neighbour_without_a_sign_of_life_beside_a_router_with_one(
    outcome: ProbeOutcome, code: int
) -> None:
    """The access point keeps its clients apart; or the neighbour sleeps, which is said too."""
    finding = only(seen(ProbeAttempt(OF_THE_WAY_WHERE, outcome, code=code), origin="given"))
    assert finding.check == "isolation"
    assert "client isolation" in finding.cause
    assert "off or asleep" in finding.cause
    assert "10.0.0.254, answers: it answers on port 80" in finding.evidence[1]


def test_isolation_is_not_claimed_without_evidence() -> None:
    """A router that is silent too, another network, somebody who was met, one of an earlier run."""
    silent = ProbeAttempt(OF_THE_WAY_WHERE, ProbeOutcome.SILENT)
    far = ProbeAttempt(Address("192.168.9.9", 1), ProbeOutcome.SILENT)
    scenes = [
        replace(seen(silent), machine=replace(OF_THE_WAY_HEALTHY.machine, gateway_life="")),
        seen(far),
        seen(silent, origin="known"),
    ]
    for scene in scenes:
        assert only(scene).check == "ports"
        assert "off or asleep" in only(scene).cause
    beside = replace(
        OF_THE_WAY_HEALTHY,
        targets=(
            Target("desk", "given", (silent,)),
            Target("lap", "heard", (MET,), OF_THE_WAY_OTHER),
        ),
    )
    assert only(beside).check == "ports"


def test_a_firewall_that_refuses_politely_is_still_a_firewall() -> None:
    """The system says that there is no route, while the machine answers elsewhere."""
    probe = ProbeAttempt(
        OF_THE_WAY_WHERE,
        ProbeOutcome.UNREACHABLE,
        "No route to host",
        "it refuses port 9 at once",
        code=113,
    )
    finding = only(seen(probe))
    assert finding.cause == "A firewall blocks TCP port 4711 of desk"
    assert "No route to host" in finding.evidence[1]


def test_one_who_takes_connections_and_says_nothing_is_stopped() -> None:
    """Its kernel answers, its program does not."""
    finding = only(
        seen(
            ProbeAttempt(
                OF_THE_WAY_WHERE,
                ProbeOutcome.MUTE,
                "It accepted the connection and then did not respond.",
            )
        )
    )
    assert finding.check == "ports"
    assert "its process may be suspended" in finding.cause


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("10.0.0.1", Address("fd00::2", 1), "only by IPv6, and this machine has only IPv4"),
        ("fd00::1", Address("10.0.0.2", 1), "only by IPv4, and this machine has only IPv6"),
    ],
)
def test_machines_without_a_family_in_common(ours: str, theirs: Address, words: str) -> None:
    """The system says that there is no way to such an address."""
    probe = ProbeAttempt(
        theirs, ProbeOutcome.UNREACHABLE, "Network is unreachable", code=errno.ENETUNREACH
    )
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


@pytest.mark.parametrize("outcome", [ProbeOutcome.MET, ProbeOutcome.MUTE])
def test_large_packets_that_are_lost_are_named(outcome: ProbeOutcome) -> None:
    """Whether or not the small ones were enough to meet."""
    finding = only(seen(replace(MET, outcome=outcome, passage=PathFacts(1500, 1280))))
    assert (finding.check, finding.severity) == ("packets", Severity.PROBLEM)
    assert "small MTU" in finding.cause
    assert "1500 bytes to 10.0.0.2:4711 does not arrive, one of 1280 does" in finding.evidence[0]
    assert "mtu 1280" in finding.fix


def test_a_small_mtu_that_both_know_of_is_a_note() -> None:
    """It costs speed and nothing else."""
    finding = only(seen(replace(MET, passage=PathFacts(1000, 1000))))
    assert (finding.check, finding.severity) == ("packets", Severity.NOTE)
    assert "1000 bytes" in finding.cause


def test_a_link_slower_than_its_interface_says() -> None:
    """A tenth of what it says is too little; what an interface does not say proves nothing."""
    slow = Rate(11_000_000, "10.0.0.1")
    finding = only(seen(MET, rate=slow))
    assert (finding.check, finding.severity) == ("speed", Severity.NOTE)
    assert finding.evidence == ("88 Mbit/s went through; eth0 says it carries 1000 Mbit/s.",)
    remembered = Rate(11_000_000, "10.0.0.1", age=90.0, source="bench")
    assert only(seen(MET, rate=remembered)).evidence == (
        "88 Mbit/s went through 90 s ago (bench); eth0 says it carries 1000 Mbit/s.",
    )
    silent = replace(OF_THE_WAY_HEALTHY.machine, speeds=())
    assert diagnose(replace(seen(MET, rate=slow), machine=silent)) == []
    hundred = replace(OF_THE_WAY_HEALTHY.machine, speeds=(("eth0", 100),))
    assert diagnose(replace(seen(MET, rate=slow), machine=hundred)) == []
    fast = replace(OF_THE_WAY_HEALTHY.machine, speeds=(("eth0", 100_000),))
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
    declined = ProbeAttempt(
        OF_THE_WAY_WHERE, ProbeOutcome.DECLINED, "used on two machines", node=OF_THE_WAY_ME
    )
    finding = only(seen(declined))
    assert finding.check == "clones"
    assert "10.0.0.2:4711, has a copy of this machine's key" in finding.cause
    assert "node_keypair" in finding.fix
    assert only(seen(replace(declined, node=OF_THE_WAY_OTHER))).check == "ports"


# --------------------------------------------------------------------------------------------------
# What follows from what this machine says of itself: keys, names, ports, power, its system.

OF_THIS_MACHINE_WHERE = Address("10.0.0.2", 4711)
OF_THIS_MACHINE_OTHER = NodeId("b" * 32)
OF_THIS_MACHINE_HEALTHY = DoctorFacts(
    node=NodeId("a" * 32),
    namespace="home",
    tag="t" * 26,
    interfaces=(Interface("eth0", ("10.0.0.1",)),),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    targets=(
        Target(
            "desk",
            "heard",
            (ProbeAttempt(OF_THIS_MACHINE_WHERE, ProbeOutcome.MET, node=OF_THIS_MACHINE_OTHER),),
            OF_THIS_MACHINE_OTHER,
        ),
    ),
    seconds=3.0,
    machine=MachineFacts(
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


def with_machine(scene: DoctorFacts = OF_THIS_MACHINE_HEALTHY, **facts: object) -> DoctorFacts:
    """The same where this machine is a little different."""
    return replace(scene, machine=replace(scene.machine, **facts))  # type: ignore[arg-type]


def test_a_healthy_machine_gets_a_clean_bill() -> None:
    """Plugged in, with a name that others can use, and on ports that are free."""
    assert diagnose(OF_THIS_MACHINE_HEALTHY) == []


def test_keys_that_cannot_be_used_come_alone() -> None:
    """Nothing else was tried; the error's own advice is the fix."""
    trouble = StartupError("Other users may read the file /k (mode 0644)", "Run: chmod 600 /k")
    finding = only(
        with_machine(replace(OF_THIS_MACHINE_HEALTHY, interfaces=(), targets=()), trouble=trouble)
    )
    assert finding.check == "keys"
    assert "Other users may read the file /k" in finding.evidence[0]
    assert finding.fix == "Run: chmod 600 /k"
    assert "who may read them" in only(with_machine(trouble=StartupError("Odd", ""))).fix


def test_a_host_name_that_leads_to_loopback_is_named() -> None:
    """Worth a note: Potluck does not depend on it, a launcher may."""
    finding = only(with_machine(name_means=("127.0.1.1",)))
    assert (finding.check, finding.severity) == ("names", Severity.NOTE)
    assert "attic, leads to itself only (127.0.1.1)" in finding.cause
    assert "10.0.0.1" in finding.fix
    assert diagnose(with_machine(name_means=("127.0.1.1", "10.0.0.1"))) == []


def test_a_given_name_that_leads_back_here_is_a_problem() -> None:
    """Whoever answers there is this machine, or nobody."""
    probe = ProbeAttempt(Address("desk", 4711), ProbeOutcome.REFUSED, means=("127.0.1.1",))
    finding = only(replace(OF_THIS_MACHINE_HEALTHY, targets=(Target("desk", "given", (probe,)),)))
    assert (finding.check, finding.severity) == ("names", Severity.PROBLEM)
    assert "desk leads back to this machine itself (127.0.1.1)" in finding.cause
    meant = replace(probe, address=Address("localhost", 4711), means=("127.0.0.1",))
    (refused,) = diagnose(
        replace(OF_THIS_MACHINE_HEALTHY, targets=(Target("localhost", "given", (meant,)),))
    )
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
    probe = ProbeAttempt(Address(host, 1), ProbeOutcome.UNREACHABLE, "No route to host", code=code)
    return Target("desk", "given", (probe,))


def test_macos_without_its_permission_is_told_by_its_error() -> None:
    """No route to a neighbour, although there is one; multicast is then kept back too."""
    scene = with_machine(
        replace(OF_THIS_MACHINE_HEALTHY, targets=(denied(),), heard_self=False),
        system="Darwin",
        release="24.0",
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
    scene = with_machine(
        replace(OF_THIS_MACHINE_HEALTHY, targets=(target,)), system=system, gateway_life=""
    )
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
