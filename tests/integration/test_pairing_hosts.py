"""Pairing between emulated machines: found by multicast, past strangers, or by address."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.identity.namespace import NetworkNamespace
from support.hosts import Host, Hosts
from support.paired_hosts import showing, type_code
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]

# Somebody else's machine: claims a number, and writes down what it is told.
FORGER = """
import socket, sys
from potluck._version import PROTOCOL
from potluck.trust.pairing_net import PairingDiscovery
slot, file = int(sys.argv[1]), sys.argv[2]
with socket.create_server(("", 0)) as door, PairingDiscovery() as discovery:
    for port in (door.getsockname()[1], 9):  # his own, and one where nobody answers
        discovery.announce(slot, port, PROTOCOL)
    print("announced", flush=True)
    while True:
        line, _ = door.accept()
        with line, open(file, "ab", buffering=0) as notes:
            line.settimeout(20)
            line.sendall(bytes(4))
            while data := line.recv(4096):
                notes.write(data)
"""


@contextlib.contextmanager
def forging(host: Host, slot: str, notes: Path) -> Iterator[None]:
    """A host that answers the search for somebody else's number."""
    command = host.command([sys.executable, "-c", FORGER, slot, str(notes)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "announced\n"
            yield
        finally:
            process.kill()


def test_forged_records_lead_nobody_to_a_stranger(tmp_path: Path) -> None:
    """He announced the number too; the two find each other, and he has learned nothing."""
    notes = tmp_path / "notes"
    with Hosts("alpha beta gamma") as hosts, showing(tmp_path, hosts["alpha"]) as (host, shown):
        slot, *words = shown["code"].split("-")
        with forging(hosts["gamma"], slot, notes):
            guest = type_code(tmp_path, hosts["beta"], shown["code"])
        assert guest.returncode == 0, guest.stderr
        assert host.wait(PATIENCE) == 0
    kept = [NetworkNamespace.load("home", home=tmp_path / name) for name in ("alpha", "beta")]
    assert kept[0] == kept[1]
    told = notes.read_bytes() if notes.exists() else b""  # it may not have been asked at all
    for hidden in (kept[0].secret, *(word.encode() for word in words)):
        assert hidden not in told


def test_where_multicast_does_not_pass_the_address_helps(tmp_path: Path) -> None:
    """As in networks for guests: nobody is found, the sentence says what to do, and that works."""
    with Hosts("alpha beta") as hosts:
        alpha, beta = hosts.values()
        for host in hosts.values():  # the switch keeps multicast to itself
            port = ["link", "set", host._port, "type", "bridge_slave", "mcast_flood", "off"]
            subprocess.run(["ip", "-n", hosts._switch, *port], check=True)
        with showing(tmp_path, alpha) as (shower, shown):
            lonely = type_code(tmp_path, beta, shown["code"], patience=1)
            assert lonely.returncode == 1
            assert "No machine that shows the number" in lonely.stderr
            assert "potluck pair CODE --host ADDRESS" in lonely.stderr
            where = f"{alpha.ipv4}:{shown['port']}"
            found = type_code(tmp_path, beta, shown["code"], "--host", where)
            assert found.returncode == 0, found.stderr
            assert shower.wait(PATIENCE) == 0
