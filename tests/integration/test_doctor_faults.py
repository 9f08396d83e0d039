"""``potluck doctor`` on emulated machines with less usual faults, all injected into one network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.firewalls import reject
from support.hosts import NETWORK_6, Host, Hosts
from support.paired_hosts import home
from support.patients import Doctor, admit, nodes_on

pytestmark = [pytest.mark.netns, pytest.mark.slow]

DAY = 86400.0

# A battery that is not plugged in, where the operating system keeps such things.
ON_BATTERY = """
supplies=/sys/class/power_supply
mount -t tmpfs none $supplies && mkdir $supplies/BAT0 && cd $supplies/BAT0 || exit 9
echo Discharging > status; echo 43 > capacity
echo 43 > energy_now; echo 100 > energy_full; echo 10 > power_now
cd / && exec "$@"
"""

NO_IPV6 = "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"

SQUATTER = """
import socket, sys
doors = [socket.create_server(("", port)) for port in range(52416, 52420)]
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def squatter_on(host: Host) -> Iterator[None]:
    """Another program has all the ports on which nodes usually listen."""
    with subprocess.Popen(
        host.command([sys.executable, "-c", SQUATTER]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def found(report: dict[str, Any]) -> dict[str, str]:
    """Check -> all its causes; strangers, of whom there are several around, left out."""
    causes: dict[str, str] = {}
    for each in report["findings"]:
        assert each["evidence"]
        assert each["fix"]
        if each["check"] != "namespaces":
            causes[each["check"]] = causes.get(each["check"], "") + each["cause"] + "\n"
    return causes


def test_every_other_injected_fault_is_named(tmp_path: Path) -> None:
    """Each by the doctor who has to do with it, and nothing else by that doctor."""
    names = "clinic odd tight copy polite stopped gone laptop crowded alone loose"
    with Hosts(names) as hosts:
        for name, host in hosts.items():
            letter = {"laptop": "s", "crowded": "s", "alone": "a"}.get(name, "l")
            admit(tmp_path, host, letter)
        inject(hosts)
        nodes = [hosts[name] for name in ("odd", "tight", "polite", "stopped")]
        with nodes_on(tmp_path, *nodes, ahead={hosts["odd"]: DAY}) as running:
            clinic_key(tmp_path, hosts["clinic"], hosts["copy"])
            with nodes_on(tmp_path, hosts["copy"]), squatter_on(hosts["crowded"]):
                os.kill(running["stopped"].pid, signal.SIGSTOP)
                reports = examine_all(tmp_path, hosts)
                os.kill(running["stopped"].pid, signal.SIGCONT)
        judge(reports, hosts)


def inject(hosts: Hosts) -> None:
    """Everything that can be wrong with a cable, an address, a name or a firewall."""
    hosts["odd"].ip("link", "set", "eth0", "mtu", "1000")
    hosts.switch("link", "set", hosts["tight"]._port, "mtu", "1300")
    reject(hosts["polite"], "tcp dport 52416")
    hosts["gone"].unplug()
    hosts.limit("laptop", "20mbit")
    hosts["crowded"].run(["sh", "-c", NO_IPV6])
    alone = hosts["alone"]
    alone.ip("address", "flush", "dev", "eth0")
    alone.ip("address", "add", "169.254.7.7/16", "dev", "eth0")
    hosts.write("laptop", "hosts", "127.0.0.1 localhost\n127.0.1.1 laptop\n")
    hosts.write("copy", "machine-id", "0123456789abcdef0123456789abcdef\n")


def clinic_key(folder: Path, clinic: Host, copy: Host) -> None:
    """A home directory that was copied to another machine; made by a short look beforehand."""
    code = "from potluck.identity.node import NodeIdentity; NodeIdentity.load_or_generate()"
    environment = os.environ | {"POTLUCK_HOME": str(home(folder, clinic))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    shutil.copy(home(folder, clinic) / "node_keypair", home(folder, copy) / "node_keypair")


def examine_all(folder: Path, hosts: Hosts) -> dict[str, dict[str, Any]]:
    """Let all doctors look at once."""
    loose = home(folder, hosts["loose"])
    shutil.copy(home(folder, hosts["clinic"]) / "node_keypair", loose / "node_keypair")
    (loose / "node_keypair").chmod(0o644)
    stopped, gone = hosts["stopped"].ipv4, hosts["gone"].ipv4
    doctors = {
        "clinic": Doctor(folder, hosts["clinic"], "--peer", f"{stopped}:52416,{gone}:52416"),
        "laptop": Doctor(
            folder, hosts["laptop"], through=["sh", "-c", ON_BATTERY, "sh"], seconds=3.0
        ),
        "crowded": Doctor(
            folder, hosts["crowded"], "--peer", f"[{NETWORK_6}:1]:52416", seconds=3.0
        ),
        "alone": Doctor(folder, hosts["alone"]),
        "loose": Doctor(folder, hosts["loose"]),
    }
    status = Doctor(folder, hosts["alone"], verb=["status", "--json"])
    reports = {name: doctor.report() for name, doctor in doctors.items()}
    return reports | {"status": status.report()}


def judge(reports: dict[str, dict[str, Any]], hosts: Hosts) -> None:
    """Every cause is named, with the machine it is about, and none that was not injected."""
    clinic = found(reports["clinic"])
    assert set(clinic) == {"clocks", "packets", "clones", "ports"}
    assert f"{hosts['odd'].ipv4}:52416 is far off: 24 h ahead" in clinic["clocks"]
    assert f"{hosts['odd'].ipv4}:52416 has a small MTU: 1000 bytes" in clinic["packets"]
    assert "Large packets are lost on the way to " in clinic["packets"]
    assert hosts["tight"].ipv4 in clinic["packets"]
    assert f"at {hosts['copy'].ipv4}:52416, has a copy of this machine's key" in clinic["clones"]
    assert "A firewall blocks TCP port 52416 of " in clinic["ports"]
    assert hosts["polite"].ipv4 in clinic["ports"]
    assert (
        f"{hosts['stopped'].ipv4}:52416 accepts connections but does not respond" in clinic["ports"]
    )
    assert f"{hosts['gone'].ipv4}:52416 does not answer at all: it is off" in clinic["ports"]
    assert len(clinic["ports"].splitlines()) == 3

    laptop = found(reports["laptop"])
    assert set(laptop) == {"power", "names", "speed"}
    assert "runs on its battery (43 %)" in laptop["power"]
    assert "laptop, leads to itself only (127.0.1.1)" in laptop["names"]
    crowded = found(reports["crowded"])
    assert set(crowded) == {"taken", "families", "speed", "power"}
    assert "Ports 52416, 52417, 52418, 52419" in crowded["taken"]
    assert "only by IPv6, and this machine has only IPv4" in crowded["families"]
    assert "much slower than its interface says" in crowded["speed"] + laptop["speed"]

    alone = found(reports["alone"])
    assert "has only addresses that it gave itself" in alone["interfaces"]
    loose = reports["loose"]
    assert [each["check"] for each in loose["findings"]] == ["keys"]
    assert "chmod 600" in loose["findings"][0]["fix"]
    foreign = [each for each in reports["status"]["story"][0] if "another group" in each]
    causes = [f"{each['cause']}." for each in reports["alone"]["findings"]]
    single = [each for each in foreign if hosts["copy"].ipv4 not in each]  # one key, two places
    assert single
    assert set(single) <= set(causes)  # word for word
    assert {name: report["exit"] for name, report in reports.items()} == {
        **dict.fromkeys(("clinic", "crowded", "alone", "loose", "status"), 3),
        "laptop": 0,
    }
