"""Nodes on emulated machines that can be found and dialled, and the doctor who looks at them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck._version import PROTOCOL
from potluck.identity.namespace import NetworkNamespace, Protection
from support.builds import another_build
from support.command import COMMAND
from support.hosts import Host
from support.paired_hosts import home, variables
from support.threads import PATIENCE

# A node as it stands at its door: it can be found and dialled, and does nothing else.
NODE = """
import sys, time
ahead, now = float(sys.argv[1]), time.time
time.time = lambda: now() + ahead
from potluck.backend.port import NodePort
from potluck.discovery.records import Advert, DiscoveryConfig
from potluck.discovery.service import Discovery
from potluck.identity.namespace import NetworkNamespace
lab = NetworkNamespace.load("lab")
with NodePort(lab, port=52416) as port:
    advert = Advert.of(lab, port.process, job="train.py", port=port.port)
    with Discovery(advert, DiscoveryConfig.from_environment()):
        print("ready", flush=True)
        sys.stdin.read()
"""


def admit(folder: Path, host: Host, letter: str = "l") -> None:
    """Give a host the secret with this letter, which has no roster."""
    NetworkNamespace(
        "lab", letter.encode() * 32, protection=Protection.PASSPHRASE, home=home(folder, host)
    ).save()


@contextlib.contextmanager
def nodes_on(
    folder: Path,
    *hosts: Host,
    newer: Sequence[Host] = (),
    ahead: Mapping[Host, float] | None = None,
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A node on each of these hosts, ready; on some with a newer protocol, or a clock ahead."""
    with contextlib.ExitStack() as stack:
        started = {}
        build = folder / "newer build"
        if newer:
            after = PROTOCOL + 1
            another_build(build, "9.8.7", protocol=after, oldest=after)
        for host in (*hosts, *newer):
            seconds = str((ahead or {}).get(host, 0.0))
            path = {"PYTHONPATH": str(build)} if host in newer else {}
            process = subprocess.Popen(
                host.command([sys.executable, "-c", NODE, seconds]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=variables(folder, host, "lab") | path,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started[host.name] = process
        for process in started.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield started


class Doctor:
    """``potluck doctor``, or another command that looks around, under way on a host."""

    def __init__(
        self,
        folder: Path,
        host: Host,
        *arguments: str,
        seconds: float = 2.0,
        through: Sequence[str] = (),
        verb: Sequence[str] = (),
    ) -> None:
        verb = verb or ["doctor", "--json", "--seconds", str(seconds)]
        command = [*through, str(COMMAND), *verb, *arguments]
        self._process = subprocess.Popen(
            host.command(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables(folder, host, "lab"),
        )

    def report(self) -> dict[str, Any]:
        """What it says at the end, its exit code included."""
        with self._process:
            out, errors = self._process.communicate(timeout=1.5 * PATIENCE)
        assert out, errors
        return {"exit": self._process.returncode, **json.loads(out)}


def problems(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Check and cause of everything that is a problem."""
    return [
        (finding["check"], finding["cause"])
        for finding in report["findings"]
        if finding["severity"] == "problem"
    ]


def examine(folder: Path, hosts: Sequence[Host], *arguments: str) -> list[dict[str, Any]]:
    """Let the doctor look from several hosts at once."""
    running = [Doctor(folder, host, *arguments) for host in hosts]
    return [doctor.report() for doctor in running]
