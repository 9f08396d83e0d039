"""``potluck doctor`` on emulated machines, with the fault injected: it must name that very one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.firewalls import block_multicast, drop, isolate, keep_apart
from support.hosts import Hosts
from support.patients import Doctor, admit, examine, nodes_on, problems

pytestmark = [pytest.mark.netns, pytest.mark.slow]


def test_a_healthy_network_and_one_without_multicast(tmp_path: Path) -> None:
    """First a clean bill, also for two who look at each other; then the switch keeps them apart."""
    with Hosts("alpha beta router") as hosts:
        alpha, beta, router = hosts.values()
        for host in (alpha, beta):
            admit(tmp_path, host)
            host.ip("route", "add", "default", "via", router.ipv4)
        for report in examine(tmp_path, [alpha, beta]):
            assert (report["exit"], report["healthy"], report["findings"]) == (0, True, [])
            assert len(report["met"]) == 1
        isolate(hosts)
        with nodes_on(tmp_path, beta):
            report = Doctor(tmp_path, alpha, "--peer", beta.ipv4).report()
            keep_apart(hosts, "alpha", "beta")
            for host in (alpha, beta):
                host.ip("neighbour", "flush", "all")
            apart = Doctor(tmp_path, alpha, "--peer", f"{beta.ipv4}:52416", seconds=0.5).report()
    assert report["exit"] == 3
    ((check, cause),) = problems(report)
    assert check == "multicast"
    assert "does not pass between this machine and others" in cause
    (finding,) = report["findings"]
    assert beta.ipv4 in finding["evidence"][0]
    assert "POTLUCK_PEERS" in finding["fix"]
    ((check, cause),) = problems(apart)
    assert check == "isolation"
    assert "keeps this machine apart from " in cause
    assert router.ipv4 in str(apart["findings"][0]["evidence"])


def test_every_injected_fault_is_named(tmp_path: Path) -> None:
    """A firewall, another secret and another version elsewhere; no multicast, no interface here."""
    with Hosts("healthy walled stranger newer deaf lonely clinic") as hosts:
        for name, host in hosts.items():
            admit(tmp_path, host, "x" if name == "stranger" else "l")
        drop(hosts["walled"], "tcp dport 52416")
        block_multicast(hosts["deaf"])
        hosts["lonely"].ip("link", "set", "eth0", "name", "docker0")
        patients = [hosts[name] for name in ("healthy", "walled", "stranger")]
        with nodes_on(tmp_path, *patients, newer=[hosts["newer"]]):
            clinic, deaf, lonely = examine(
                tmp_path, [hosts["clinic"], hosts["deaf"], hosts["lonely"]]
            )
    addresses = {name: host.ipv4 for name, host in hosts.items()}
    found = {
        check: cause for check, cause in problems(clinic) if re.search(r"\d+\.\d+\.\d+\.\d+", cause)
    }
    assert found["ports"].startswith("A firewall blocks TCP port 52416 of ")
    assert addresses["walled"] in found["ports"]
    assert addresses["newer"] in found["versions"]
    notes = [finding for finding in clinic["findings"] if finding["check"] == "namespaces"]
    assert len(notes) == 1  # only a note: the healthy one was met
    assert f"{addresses['stranger']}:52416 belongs to another group" in notes[0]["cause"]
    assert addresses["healthy"] not in str(clinic["findings"])
    assert len(problems(clinic)) == 2
    assert len(clinic["met"]) == 1

    assert [check for check, _ in problems(deaf)] == ["multicast"]
    assert "A firewall on this machine blocks multicast DNS" in problems(deaf)[0][1]
    assert [check for check, _ in problems(lonely)] == ["interfaces"]
    assert "POTLUCK_INTERFACES=docker0" in lonely["findings"][0]["fix"]
    assert {report["exit"] for report in (clinic, deaf, lonely)} == {3}
