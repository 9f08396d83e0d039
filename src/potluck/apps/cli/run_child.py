"""The script of a run: what is said about it, its environment, and its process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from potluck.apps.cli.run_imports import imports
from potluck.apps.cli.run_places import (
    LAUNCHER,
    MEETING,
    PER_NODE,
    Crew,
    environments,
    workers_of,
)
from potluck.apps.cli.run_workers import FORWARDED, run_workers
from potluck.runtime.recorder_files import FOLDER_VARIABLE, trace_folder

if TYPE_CHECKING:
    from potluck.apps.cli.run_gathering import Gathering
    from potluck.runtime.observing import Observer

__all__ = ["child_environments", "facts_of", "run_scripts", "saving_environment"]

MEETING_PORTS = (20_000, 32_000)
"""Below those that Linux takes for outgoing connections."""

SHOWN = 16
"""Hexadecimal digits of a script's hash."""


def facts_of(script: Path, arguments: Sequence[str], per_node: int = 1) -> dict[str, str]:
    """What machines of one run compare, and with how many workers this one comes."""
    from potluck import __version__

    return {
        "script": script.name,
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()[:SHOWN],
        "arguments": shlex.join(arguments),
        "python": platform.python_version(),
        "potluck": __version__,
        "numpy": version("numpy"),
        "torch": _version_of("torch") if imports(script, "torch") else "",
        PER_NODE: str(per_node),
        MEETING: str(_meeting_port()),
    }


def _meeting_port() -> int:
    """A port that is free, and stays so until a script that may take long to begin takes it.

    One of those that neither we nor the system hand out by themselves.
    """
    from potluck.net import tcp

    for port in random.sample(range(*MEETING_PORTS), 32):
        with contextlib.suppress(OSError):
            tcp.listen("", port).close()
            return port
    return MEETING_PORTS[0]


def _version_of(package: str) -> str:
    """Of a package that need not be there; without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def child_environments(
    observer: Observer, gathering: Gathering, peers: Sequence[str], facts: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each worker.

    With it ``potluck.join()`` finds the machines that are here now: the first worker listens where
    we did, so the others know where it is.  Ranks are set where all agree on them.
    """
    me, crew = gathering.here[0], gathering.crew
    launcher = {LAUNCHER: f"{me.node}:{me.incarnation}"}
    common = _common(observer, gathering, peers, {**facts, **launcher})
    master = me.host
    if crew is not None and crew.launchers[0].key != me.key:
        first = crew.launchers[0]
        master = gathering.hosts.get(first.key) or first.host
    ports = _ports(observer.port.port, workers_of(me))
    return environments(common, me, crew, master, ports)


def _ports(first: int, count: int) -> list[int]:
    """Ports for so many workers: our own, and those after it that are free."""
    from potluck.net import tcp

    found = [first]
    for port in range(first + 1, first + 1 + 4 * count):
        if len(found) == count:
            break
        with contextlib.suppress(OSError, OverflowError):
            tcp.listen("", port).close()
            found.append(port)
    return [*found, *[0] * (count - len(found))]  # any other will do


def _wanted_workers(gathering: Gathering, crew: Crew | None) -> int:
    """How many processes the script waits for; with more machines than wanted, not for all."""
    if crew is not None and len(crew.launchers) <= gathering.wanted:
        return crew.world_size
    return gathering.wanted * min(map(workers_of, gathering.here))


def _common(
    observer: Observer, gathering: Gathering, peers: Sequence[str], facts: Mapping[str, str]
) -> dict[str, str]:
    others = [f"{_bracketed(each.host)}:{each.port}" for each in gathering.here[1:] if each.port]
    found = [*observer.addresses, *os.environ.get("POTLUCK_PEERS", "").replace(",", " ").split()]
    return {
        **os.environ,
        "POTLUCK_RUN": "1",
        "POTLUCK_JOB": observer.job or "",
        "POTLUCK_NAMESPACE": observer.namespace.name,
        "POTLUCK_MIN_NODES": str(_wanted_workers(gathering, gathering.crew)),
        "POTLUCK_PEERS": ",".join(dict.fromkeys([*peers, *found, *others])),
        "POTLUCK_FACTS": msgspec.json.encode(dict(facts)).decode(),
        FOLDER_VARIABLE: str(trace_folder() or ""),
    }


def saving_environment(
    *, resume: bool, fresh_start: bool = False, folder: Path | None
) -> dict[str, str]:
    """What tells the script's trainings where to save, and whether to go on from what is there."""
    found = {"POTLUCK_RESUME": "1"} if resume else {}
    if fresh_start:
        found["POTLUCK_FRESH_START"] = "1"
    return found if folder is None else {**found, "POTLUCK_CHECKPOINTS": str(folder.absolute())}


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


def run_scripts(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run the script once for each environment; its exit code as a shell would say it."""
    if len(environments) == 1:
        return _run_one(command, environments[0])
    return run_workers(command, environments)


def _run_one(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the script to its end with our own input and output, passing on signals."""
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
