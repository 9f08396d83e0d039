"""Pairing between emulated machines: found by multicast, and a capture that betrays nothing."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.net.namespace import NetworkNamespace
from support.command import COMMAND, environment
from support.hosts import Host, Hosts
from support.threads import PATIENCE

pytestmark = pytest.mark.netns

# Not words of the list that codes are made of: they are looked for in the capture.
NAMES = "alpha beta"


def variables(folder: Path, host: Host) -> dict[str, str]:
    """The environment of the command on a host."""
    return environment({"POTLUCK_HOME": str(folder / host.name), "POTLUCK_NAMESPACE": ""})


@contextlib.contextmanager
def showing(folder: Path, host: Host) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A host that shows a code, and what it shows."""
    command = host.command([str(COMMAND), "pair", "--json"])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables(folder, host)
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


# The command itself, with less patience for those who do not answer.
TYPE_CODE = """
from potluck.apps.cli.main import app
from potluck.runtime import pairing_guest
pairing_guest.SEARCH_SECONDS = float({patience})
app()
"""


def type_code(
    folder: Path, host: Host, *arguments: str, patience: float = 10
) -> subprocess.CompletedProcess[str]:
    """Type a code on a host."""
    program = TYPE_CODE.format(patience=patience)
    return subprocess.run(
        host.command([sys.executable, "-c", program, "pair", *arguments]),
        capture_output=True,
        check=False,
        env=variables(folder, host),
        text=True,
        timeout=PATIENCE,
    )


@contextlib.contextmanager
def captured(host: Host, file: Path) -> Iterator[None]:
    """Every packet that passes a host's cable goes into a file."""
    if shutil.which("tcpdump") is None:
        pytest.skip("a capture needs the program tcpdump")
    options = ["-i", "any", "-U", "--immediate-mode", "-Z", "root", "-w", str(file)]
    with subprocess.Popen(
        host.command(["tcpdump", *options]), stderr=subprocess.PIPE, text=True
    ) as capture:
        try:
            assert capture.stderr is not None
            while "listening on" not in capture.stderr.readline():
                assert capture.poll() is None
            yield
            capture.send_signal(signal.SIGINT)
            capture.wait(PATIENCE)
        finally:
            capture.kill()


def test_a_capture_of_discovery_and_pairing_holds_neither_code_nor_secret(tmp_path: Path) -> None:
    """The code alone is enough; whoever listens gets the two names and nothing to use."""
    file = tmp_path / "capture"
    with Hosts(NAMES) as hosts, captured(hosts["alpha"], file):
        with showing(tmp_path, hosts["alpha"]) as (host, shown):
            guest = type_code(tmp_path, hosts["beta"], shown["code"])
            assert guest.returncode == 0, guest.stderr
            assert host.stdout is not None
            paired = json.loads(host.stdout.readline())
            assert host.wait(PATIENCE) == 0
        assert paired["peer"]["name"] == "beta"
        assert "alpha is " in guest.stdout
    homes = [NetworkNamespace.load("home", home=tmp_path / name) for name in NAMES.split()]
    assert homes[0] == homes[1]
    secret, packets = homes[0].secret, file.read_bytes()
    for public in (b"_potluck-pair", f"slot={shown['code'].split('-')[0]}".encode(), b"beta"):
        assert public in packets
    words = [word.encode() for word in shown["code"].split("-")[1:]]
    written = [base64.b64encode(secret).rstrip(b"="), base64.b32encode(secret).rstrip(b"=")]
    for hidden in (secret, secret[:8], secret[-8:], secret.hex().encode(), *written, *words):
        assert hidden not in packets


def test_where_multicast_does_not_pass_the_address_helps(tmp_path: Path) -> None:
    """As in networks for guests: nobody is found, the sentence says what to do, and that works."""
    with Hosts(NAMES) as hosts:
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
