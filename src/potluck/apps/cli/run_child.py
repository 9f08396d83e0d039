"""The script of a run: what is said about it, its environment, and its process."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from potluck.apps.cli.run_gathering import Gathering
    from potluck.runtime.observing import Observer

__all__ = ["child_environment", "facts_of", "run_script"]

SHOWN = 16
"""Hexadecimal digits of a script's hash."""

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def facts_of(script: Path, arguments: Sequence[str]) -> dict[str, str]:
    """What machines of one run compare."""
    from potluck import __version__

    return {
        "script": script.name,
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()[:SHOWN],
        "arguments": shlex.join(arguments),
        "python": platform.python_version(),
        "potluck": __version__,
        "numpy": version("numpy"),
    }


def child_environment(
    observer: Observer, gathering: Gathering, peers: Sequence[str], facts: Mapping[str, str]
) -> dict[str, str]:
    """With which ``potluck.join()`` in the script finds the machines that are here now.

    The script listens where we did, so the others know where it is.
    """
    others = [f"{_bracketed(each.host)}:{each.port}" for each in gathering.here[1:] if each.port]
    found = [*observer.addresses, *os.environ.get("POTLUCK_PEERS", "").replace(",", " ").split()]
    return {
        **os.environ,
        "POTLUCK_JOB": observer.job or "",
        "POTLUCK_NAMESPACE": observer.namespace.name,
        "POTLUCK_MIN_NODES": str(gathering.wanted),
        "POTLUCK_PORT": str(observer.port.port),
        "POTLUCK_PEERS": ",".join(dict.fromkeys([*peers, *found, *others])),
        "POTLUCK_FACTS": msgspec.json.encode(dict(facts)).decode(),
    }


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_in_front() -> bool:
    """Whether Ctrl-C in our terminal reaches us and our children, wherever the input is from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0))
    except OSError:
        return sys.stdin.isatty()
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def run_script(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the script to its end, passing on signals; its exit code as a shell would say it."""
    line = [sys.executable, *command]  # what the user typed
    with subprocess.Popen(line, env=dict(environment)) as process:  # noqa: S603

        def forward(number: int, _frame: FrameType | None) -> None:
            # In a terminal Ctrl-C reaches the script by itself; twice would be once too often.
            if number != signal.SIGINT or not _is_in_front():
                process.send_signal(number)

        before = {
            number: signal.signal(number, forward)
            for name in FORWARDED
            if (number := getattr(signal, name, None)) is not None
        }
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 - code if code < 0 else code
