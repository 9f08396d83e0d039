"""Start the processes of a session, on this machine or on emulated hosts; collect their results.

All contenders share the same processes.  Open MPI wants its processes started by ``mpirun``, so
if it takes part ``mpirun`` starts them all, without pinning them to cores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from collectives.contenders import GLOO, OPEN_MPI
from collectives.plan import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the emulated hosts

from support.hosts import INTERFACE, Host

__all__ = ["Place", "Result", "missing_peers", "run_session"]

RANK = Path(__file__).resolve().with_name("rank.py")
LIMIT = 900  # seconds for a whole session

Result = dict[str, Any]

MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--quiet"),
    *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
)


@dataclass(frozen=True)
class Place:
    """Where ranks run: on this machine, or one on each host."""

    hosts: tuple[Host, ...] = ()

    @property
    def address(self) -> str:
        """Where rank 0 can be met."""
        return self.hosts[0].ipv4 if self.hosts else "127.0.0.1"

    @property
    def interface(self) -> str:
        """What all traffic has to use."""
        return INTERFACE if self.hosts else "lo"

    def commands(self, world_size: int, folder: Path, *, is_mpi: bool) -> list[list[str]]:
        """What to start: each rank, or the one program that starts them."""
        if is_mpi:
            return [self._mpirun(world_size, folder)]
        ranks = [[sys.executable, str(RANK), str(folder), str(rank)] for rank in range(world_size)]
        if not self.hosts:
            return ranks
        return [host.command(rank) for host, rank in zip(self.hosts, ranks, strict=True)]

    def _mpirun(self, world_size: int, folder: Path) -> list[str]:
        options = ["--mca", "btl_tcp_if_include", self.interface, "-np", str(world_size)]
        program = [sys.executable, str(RANK), str(folder), "-"]
        if not self.hosts:
            return [*MPIRUN, *options, *program]
        agent = folder / "agent"
        agent.write_text(self._agent(), encoding="ascii")
        agent.chmod(0o700)
        names = ",".join(host.name for host in self.hosts)
        options += ["--host", names, "--mca", "plm_rsh_agent", str(agent)]
        options += ["--mca", "oob_tcp_if_include", self.interface]
        return self.hosts[0].command([*MPIRUN, *options, *program])

    def _agent(self) -> str:
        """A shell script in the place of ``ssh``: it runs a command on the named host."""
        lines = ["#!/bin/sh", 'name="$1"; shift', 'case "$name" in']
        for host in self.hosts:
            command = host.command(["sh", "-c"])
            before = " ".join(f"'{word}'" for word in command)
            lines.append(f'{host.name}) exec {before} "$*";;')
        return "\n".join([*lines, "esac", ""])


def missing_peers() -> dict[str, str]:
    """Who cannot take part here, and why."""
    missing = {}
    if importlib.util.find_spec("torch") is None:
        missing[GLOO] = "torch is not installed"
    if shutil.which("mpirun") is None:
        missing[OPEN_MPI] = "mpirun is not installed (Debian, Ubuntu: apt install openmpi-bin)"
    elif importlib.util.find_spec("mpi4py") is None:
        missing[OPEN_MPI] = "mpi4py is not installed (pip install mpi4py)"
    return missing


def run_session(session: Session, place: Place) -> list[list[Result]]:
    """Run it; the results of every rank."""
    ports = free_ports(len(session.contenders))
    masters = {
        name: f"{place.address}:{port}"
        for name, port in zip(session.contenders, ports, strict=True)
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = asdict(replace(session, masters=masters))
        (folder / "session.json").write_text(json.dumps(facts), encoding="utf-8")
        is_mpi = OPEN_MPI in session.contenders
        run_all(
            place.commands(session.world_size, folder, is_mpi=is_mpi), _environment(folder, place)
        )
        files = [folder / f"{rank}.json" for rank in range(session.world_size)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _environment(folder: Path, place: Place) -> dict[str, str]:
    """One circle for all ranks, made for this run; and one thread for each rank's arithmetic."""
    environment = {
        **os.environ,
        "POTLUCK_HOME": str(folder / "home"),
        "GLOO_SOCKET_IFNAME": place.interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment.pop("POTLUCK_NAMESPACE", None)
    return environment


def run_all(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> None:
    """Run processes side by side; when one fails the others are ended too."""
    started: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + LIMIT
    try:
        for command in commands:
            process = subprocess.Popen(command, env=environment)
            started.append(process)  # one by one: those before a failure are to be ended
        running = list(started)
        while running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(0.2)
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                raise SystemExit("The measurement failed: a process ended early or took too long")
            running = [process for process in running if process.poll() is None]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # mpirun ends its own processes when it is asked to
        for process in started:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Ports to be used at once."""
    with contextlib.ExitStack() as held:
        made = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in made]
