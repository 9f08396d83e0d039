"""Machines that were paired and lose their network: what the commands say about it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.command import COMMAND, end_all
from support.hosts import Host, Hosts
from support.paired_hosts import home, pair, type_code, variables
from support.threads import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.slow]


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
    script = tmp_path / "train.py"
    script.write_text("import potluck\npotluck.join()")
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

        for command in (["status"], ["run", "--timeout", "1", str(script)]):
            heard = told(tmp_path, desk, *command)
            assert heard.returncode == 3, heard
            lines = [
                each for each in (heard.stdout + heard.stderr).splitlines() if "Gave" not in each
            ]
            assert lines[-1].removeprefix("potluck: ") == (
                "This machine is not connected to a network: plug in the cable, or join the Wi-Fi."
            )
            assert "could not be reached" not in heard.stdout + heard.stderr

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
                    host.plug_in()
                assert shows.stdout.readline() == "This machine is connected now.\n"
                joined = type_code(tmp_path, attic, code)
                assert joined.returncode == 0, joined.stderr
                assert shows.wait(PATIENCE) == 0
            finally:
                end_all(shows.pid)
    assert (home(tmp_path, attic) / "namespaces").exists()
