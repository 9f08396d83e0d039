"""Avahi, the usual mDNS daemon of Linux, on an emulated machine, with a message bus of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import INTERFACE, Host
from support.threads import PATIENCE, eventually

BUS = """<busconfig><type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/>
<allow own="*"/><allow user="*"/></policy></busconfig>"""

DAEMON = f"""[server]
use-ipv4=yes
use-ipv6=yes
allow-interfaces={INTERFACE}
[publish]
publish-workstation=no
"""

# Its pid file belongs to this host alone: the real machine may run an avahi of its own.
START = """mkdir -p /run/avahi-daemon && mount -t tmpfs none /run/avahi-daemon &&
exec avahi-daemon --no-drop-root --no-chroot --no-rlimits --file "$1" """


class Avahi:
    """The daemon under way, and its tools."""

    def __init__(self, host: Host, environ: dict[str, str]) -> None:
        self._host = host
        self._environ = environ

    @contextlib.contextmanager
    def publishing(self, name: str, kind: str, port: int, *texts: str) -> Iterator[None]:
        """A service of some other program."""
        command = ["avahi-publish", "-s", name, kind, str(port), *texts]
        with _running(self._host, command, self._environ) as process:
            assert process.stderr is not None
            assert "Established" in process.stderr.readline()
            yield

    def browse(self, kind: str) -> str:
        """What its user sees of a kind of service."""
        done = subprocess.run(
            self._host.command(["avahi-browse", "-rpt", kind]),
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        return done.stdout


@contextlib.contextmanager
def avahi_on(host: Host, folder: Path) -> Iterator[Avahi]:
    """Start it on a host."""
    for program in ("dbus-daemon", "avahi-daemon", "avahi-browse", "avahi-publish"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing (Debian: dbus avahi-daemon avahi-utils)")
    bus, config, daemon = folder / "bus", folder / "bus.conf", folder / "avahi.conf"
    config.write_text(BUS.format(path=bus))
    daemon.write_text(DAEMON)
    environ = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus}"}
    buses = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile"]
    with _running(host, buses, environ):
        eventually(bus.exists)
        with _running(host, ["sh", "-c", START, "avahi", str(daemon)], environ) as process:
            assert process.stderr is not None
            while "Server startup complete" not in (line := process.stderr.readline()):
                assert line, "avahi-daemon did not start"
            yield Avahi(host, environ)


@contextlib.contextmanager
def _running(
    host: Host, command: list[str], environ: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        host.command(command),
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
