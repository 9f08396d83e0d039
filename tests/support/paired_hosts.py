"""Emulated machines that are paired with the command, as two people would; and captures of it."""

from __future__ import annotations

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

from support.command import COMMAND, environment
from support.hosts import Host
from support.threads import PATIENCE, eventually

LAST_WORD = b"here the capture ends"

_SAY_THE_END = f"""
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto({LAST_WORD!r}, ("127.0.0.1", 9))
"""


def home(folder: Path, host: Host) -> Path:
    """Where a host keeps its keys."""
    return folder / host.name


def variables(folder: Path, host: Host, namespace: str = "") -> dict[str, str]:
    """The environment of the command on a host."""
    return environment(
        {"POTLUCK_HOME": str(home(folder, host)), "POTLUCK_NAMESPACE": namespace},
    )


@contextlib.contextmanager
def showing(
    folder: Path, host: Host, namespace: str = ""
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A host that shows a code, and what it shows."""
    command = host.command([str(COMMAND), "pair", "--json"])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables(folder, host, namespace)
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


# The command itself, with less patience for those who do not answer.
TYPE_CODE = """
from potluck.apps.cli.main import app
from potluck.trust import pairing as pairing_guest
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


def pair(folder: Path, shower: Host, typist: Host, namespace: str = "") -> str:
    """Pair two machines by the command; the code that did it."""
    with showing(folder, shower, namespace) as (process, shown):
        guest = type_code(folder, typist, shown["code"])
        assert guest.returncode == 0, guest.stderr
        assert process.stdout is not None
        paired = json.loads(process.stdout.readline())
        assert process.wait(PATIENCE) == 0
    assert paired["peer"]["name"] == typist.name
    assert f"{shower.name} is " in guest.stdout
    return str(shown["code"])


@contextlib.contextmanager
def captured(host: Host, file: Path) -> Iterator[None]:
    """Every packet that passes a host's cable goes into a file."""
    if shutil.which("tcpdump") is None:
        pytest.skip("a capture needs the program tcpdump")
    # Room for 16 MiB: by default it is so little that a busy machine loses packets.
    options = ["-i", "any", "-U", "--immediate-mode", "-s", "0", "-B", "16384", "-Z", "root"]
    options += ["-w", str(file)]
    with subprocess.Popen(
        host.command(["tcpdump", *options]), stderr=subprocess.PIPE, text=True
    ) as capture:
        try:
            assert capture.stderr is not None
            while "listening on" not in capture.stderr.readline():
                assert capture.poll() is None
            yield
            # It leaves what it has not read yet behind: what came last must be in the file.
            subprocess.run(host.command([sys.executable, "-c", _SAY_THE_END]), check=True)
            eventually(lambda: LAST_WORD in file.read_bytes())
            capture.send_signal(signal.SIGINT)
            capture.wait(PATIENCE)
        finally:
            capture.kill()
