"""Looking around on loopback: a real node is heard and met, strangers are not dialled."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.backend.port import NodePort
from potluck.discovery import mdns
from potluck.discovery.local import KnownPeers
from potluck.discovery.mdns import MdnsRecord
from potluck.discovery.records import Advert, DiscoveryConfig
from potluck.doctor import probe
from potluck.doctor.checks import diagnose
from potluck.doctor.facts import MachineFacts, ProbeAttempt, ProbeOutcome
from potluck.doctor.look import look_around
from potluck.doctor.probe import DoctorListener
from potluck.identity.namespace import NetworkNamespace, Protection
from potluck.identity.node import NodeIdentity
from potluck.net.addresses import Address
from potluck.net.secure_socket import Security
from support.discovering import advert, sighting
from support.quiet_network import Stranger, hurry
from support.threads import Background, eventually


def group(home: Path, letter: str = "l") -> NetworkNamespace:
    """A namespace without a roster: whoever has the secret is a member."""
    return NetworkNamespace(
        "lab", letter.encode() * 32, protection=Protection.PASSPHRASE, home=home
    )


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Service types of this test's own, on loopback; this machine has its home here."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    monkeypatch.delenv("POTLUCK_PEERS", raising=False)
    monkeypatch.setattr(mdns, "usable_hosts", lambda **_: [])
    hurry(monkeypatch)
    jobs, doctors = (f"_pl{secrets.token_hex(3)}._tcp.local." for _ in range(2))
    monkeypatch.setattr(probe, "DOCTORS", doctors)
    monkeypatch.setattr(probe, "SERVICE", jobs)
    return jobs


def test_a_node_is_heard_and_met_and_a_stranger_only_heard(service: str, tmp_path: Path) -> None:
    """Our own announcement comes back; an address where nobody listens is told apart."""
    lab = group(tmp_path)
    security = Security(lab, NodeIdentity(b"n" * 32))
    with NodePort(security=security) as port, Stranger(service) as crier:
        member = Advert.of(lab, port.process, job="train.py", port=port.port)
        stranger = advert("s", namespace=group(tmp_path, "s"))
        looking = Background(lambda: look_around(lab, ["127.0.0.1:1"], seconds=1.0))

        def announce_until_the_end() -> bool:
            crier.shout(member)
            crier.shout(stranger)
            return looking.ended

        eventually(announce_until_the_end)
        scene = looking.result()
    assert scene.heard_self
    assert scene.mdns_works
    assert scene.met == [port.process.node]
    assert {each.node for each in scene.heard} == {port.process.node, "s" * 32}
    outcomes = {target.origin: target.probes[0].outcome for target in scene.targets}
    assert outcomes == {"given": ProbeOutcome.REFUSED, "heard": ProbeOutcome.MET}
    checks = {finding.check for finding in diagnose(replace(scene, machine=MachineFacts()))}
    assert checks == {"ports", "namespaces"}


def test_peers_of_earlier_runs_are_tried_if_they_are_not_heard(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the job; a given address is not tried twice."""
    tried: list[Address] = []

    def refuse(_members: object, address: Address) -> ProbeAttempt:
        tried.append(address)
        return ProbeAttempt(address, ProbeOutcome.REFUSED)

    monkeypatch.setattr(probe, "probe", refuse)
    lab = group(tmp_path)
    KnownPeers(tmp_path).remember(
        advert(namespace=lab, job="any.py"),
        [sighting("b", "10.0.0.2", name="desk"), sighting("c", "10.0.0.3")],
    )
    scene = look_around(lab, ["10.0.0.3:4711"], seconds=0.1)
    assert sorted(tried) == [Address("10.0.0.2", 4711), Address("10.0.0.3", 4711)]
    assert [target.name for target in scene.targets] == ["10.0.0.3:4711", "desk at 10.0.0.2:4711"]


def test_a_doctor_who_comes_late_is_waited_for(service: str, tmp_path: Path) -> None:
    """It may hear our answer only after a second; but nobody can make us stay for ever."""
    config = DiscoveryConfig(home=tmp_path)
    mine, other = advert("a"), advert("b")
    with contextlib.closing(DoctorListener(mine, config)) as listening:
        eventually(lambda: listening.heard_self)
        assert listening.listen_until(5.0) == 5.0
        came = time.monotonic()
        listening._hear_colleague("late", _heard(other))
        latest = time.monotonic() + probe.LINGER
        assert came + probe.LINGER <= listening.listen_until(came) <= latest
        assert listening.listen_until(came - 10.0) == came - 10.0 + probe.LONGEST
        assert listening.listen_until(came + 10.0) == came + 10.0
        assert [each.node for each in listening.colleagues()] == [other.node]


def test_keys_that_others_may_read_are_seen_and_nothing_is_tried(
    service: str, tmp_path: Path
) -> None:
    """The advice of the error is kept."""
    NodeIdentity.load_or_generate(tmp_path / "node_keypair")
    (tmp_path / "node_keypair").chmod(0o640)
    scene = look_around(group(tmp_path), ["10.0.0.3:4711"], seconds=0.1)
    assert scene.targets == ()
    (finding,) = diagnose(scene)
    assert finding.check == "keys"
    assert f"chmod 600 {tmp_path / 'node_keypair'}" in finding.fix


def _heard(shown: Advert) -> MdnsRecord:
    address = Address("10.0.0.1", shown.port)
    return MdnsRecord(shown.tag, shown.job_tag, shown.node, shown.incarnation, 1, (address,))
