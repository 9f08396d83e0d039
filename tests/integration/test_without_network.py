"""Machines that were paired and lose their network: what the commands say about it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.command import COMMAND, end_all
from support.hosts import INTERFACE, Host, Hosts
from support.paired_hosts import home, pair, type_code, variables
from support.threads import PATIENCE

pytestmark = pytest.mark.netns


def told(folder: Path, host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a command says on a host."""
    return subprocess.run(
        host.command([str(COMMAND), *arguments]),
        env=variables(folder, host),
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE,
    )


def test_a_machine_without_a_network_hears_that_and_nothing_else(tmp_path: Path) -> None:
    """One problem from the doctor; pairing says it at once, and works when the cable is back."""
    with Hosts("desk laptop attic") as hosts:
        desk, laptop, attic = hosts.values()
        pair(tmp_path, desk, laptop)
        with subprocess.Popen(
            desk.command([str(COMMAND), "doctor", "--seconds", "5"]),
            env=variables(tmp_path, desk),
            stdout=subprocess.PIPE,
            text=True,
        ) as other:
            met = told(tmp_path, laptop, "doctor")
            other.communicate(timeout=PATIENCE)
        assert 'Members of "home" that were met: desk.' in " ".join(met.stdout.split())
        desk.unplug()
        report = told(tmp_path, desk, "doctor", "--json")
        assert report.returncode == 3, report.stderr
        (finding,) = json.loads(report.stdout)["findings"]
        assert finding["check"] == "interfaces"
        assert finding["cause"].startswith("This machine has no network interface")

        with subprocess.Popen(
            desk.command([str(COMMAND), "pair"]),
            env=variables(tmp_path, desk),
            stdout=subprocess.PIPE,
            text=True,
        ) as shows:
            try:
                assert shows.stdout is not None
                first = shows.stdout.readline()
                assert first.startswith("This machine is not connected to a network: plug in")
                said = ""
                while "Waiting; Ctrl-C stops it." not in said:
                    said += shows.stdout.readline()
                (code,) = re.findall(r"potluck pair (\S+)", said)
                attic.unplug()
                lost = type_code(tmp_path, attic, code, patience=0.5)
                assert lost.returncode == 1
                assert lost.stderr.startswith("This machine is not connected to a network: plug in")
                assert "Plug in the cable, or join the Wi-Fi" in lost.stderr
                for host in (desk, attic):
                    plug_in(host)
                assert shows.stdout.readline() == "This machine is connected now.\n"
                joined = type_code(tmp_path, attic, code)
                assert joined.returncode == 0, joined.stderr
                assert shows.wait(PATIENCE) == 0
            finally:
                end_all(shows.pid)
    assert (home(tmp_path, attic) / "namespaces").exists()


def plug_in(host: Host) -> None:
    """Put the cable back; addresses of IPv6 were lost with it."""
    host.ip("link", "set", INTERFACE, "up")
    host.ip("address", "replace", f"{host.ipv6}/64", "dev", INTERFACE, "nodad")
