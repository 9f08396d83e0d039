"""Counts the source files that run on four ways through Potluck.

``python docs/ways.py`` starts real processes on this machine, records which functions of Potluck
run while each of the four things below happens, and prints them in the order of their first call.
``--write`` also puts the result into ``docs/internals/ways.md``.

* ``all_reduce``: one warm, blocking all-reduce of 1 MiB, on the calling thread.
* ``join``: from the call of :func:`potluck.join` to the first agreed view, on all threads.
* ``rpc``: one warm remote call, on all threads of both sides.
* ``death``: from the end of one of three members to the next committed step of another one.

A file counts when one of its functions is called; importing it does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "potluck"
PAGE = ROOT / "docs" / "internals" / "ways.md"

LIMITS = {"all_reduce": 20, "join": 60, "rpc": 14, "death": 40}
DEPTH = 10  # frames from all_reduce to the socket, both included
TITLES = {
    "all_reduce": "A warm `all_reduce`",
    "join": "`potluck.join()` to the first view",
    "rpc": "One remote call, on both sides",
    "death": "A member's death to the next committed step",
}
INTRODUCTION = """\
`python docs/ways.py --write` starts real processes, records which functions run, and writes this
page. Files are below `src/potluck`, in the order of their first call. A file counts when one of its
functions is called; importing it does not count. `join` and `death` include everything that runs in
the process meanwhile, heartbeats and discovery too."""
SOCKET_CALLS = {"send", "sendmsg", "recv_into", "recvmsg_into", "recv"}
IS_FUNCTION = 0x1  # CO_OPTIMIZED: neither a module nor the body of a class


class Trail:
    """The functions of Potluck that are called while it is open, with the thread of each."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, str], str] = {}
        self.depth = 0
        self.is_open = False
        self._known: dict[CodeType, tuple[str, str] | None] = {}

    def install(self) -> None:
        """Watch this thread, and those that are started from now on."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_open:
            return
        if event == "call":
            place = self._place(frame.f_code)
            if place is not None and place not in self.first:
                self.first[place] = threading.current_thread().name
        elif event == "c_call" and getattr(argument, "__name__", "") in SOCKET_CALLS:
            self.depth = max(self.depth, self._frames(frame))

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._known:
            path = Path(code.co_filename)
            is_ours = SOURCE in path.parents and code.co_flags & IS_FUNCTION
            name = path.relative_to(SOURCE).as_posix() if is_ours else ""
            self._known[code] = (name, code.co_qualname) if is_ours else None
        return self._known[code]

    def _frames(self, frame: FrameType | None) -> int:
        count = 0
        while frame is not None:
            count += self._place(frame.f_code) is not None
            frame = frame.f_back
        return count

    def result(self) -> dict[str, Any]:
        """What was called, in order."""
        return {"calls": [[*place, who] for place, who in self.first.items()], "depth": self.depth}


def import_everything() -> None:
    """Import the library, so that what only runs on import does not count."""
    import potluck

    for name in potluck.__all__:
        getattr(potluck, name)


def play_all_reduce(rank: int, trail: Trail) -> None:
    """A few calls that warm everything up, then the one that counts."""
    import numpy as np

    import potluck

    with potluck.join(2, job="ways", multicast=False, timeout=60) as cluster:
        values = np.ones(1 << 18, np.float32)
        for _ in range(20):
            cluster.all_reduce(values)
        sys.setprofile(trail._see)
        trail.is_open = rank == 0
        cluster.all_reduce(values)
        trail.is_open = False
        sys.setprofile(None)
        cluster.barrier()


def play_join(rank: int, trail: Trail) -> None:
    """Join, and nothing else."""
    import potluck

    trail.install()
    trail.is_open = rank == 0
    cluster = potluck.join(2, job="ways", multicast=False, timeout=60)
    trail.is_open = False
    cluster.barrier(timeout=30)
    cluster.close()


def play_rpc(rank: int, trail: Trail) -> None:
    """Calls that warm everything up, then one from rank 0 to rank 1; both sides watch it.

    The group has fixed ranks, so no heartbeat runs beside the call.
    """
    import potluck

    trail.install()
    with potluck.TcpBackend.from_env() as backend, potluck.RpcAgent(backend) as agent:
        agent.expose(lambda value: 2 * value, name="double")
        backend.barrier()
        for _ in range(200 if rank == 0 else 0):
            agent.call(1, "double", 21)
        backend.barrier()
        trail.is_open = True
        if rank == 0:
            agent.call(1, "double", 21)
        else:
            time.sleep(0.5)
        trail.is_open = False
        backend.barrier()


def play_death(_: int, trail: Trail) -> None:
    """Train; the last of three members ends without a word, the first watches what follows."""
    import numpy as np

    import potluck

    trail.install()
    weights = np.zeros(1000, np.float32)

    def apply(mean: Any) -> None:
        weights[:] -= mean

    cluster = potluck.join(3, job="ways", multicast=False, timeout=60)
    state = potluck.TrainingState(model=weights)
    with cluster, potluck.ElasticTrainer(cluster, state, apply) as trainer:
        outcome = trainer.step(np.ones(1000, np.float32))
        for _ in range(10):
            outcome = trainer.step(np.ones(1000, np.float32))
        if cluster.rank == outcome.world_size - 1:
            os._exit(0)
        trail.is_open = cluster.rank == 0
        before = outcome.world_size
        while outcome.world_size == before:
            outcome = trainer.step(np.ones(1000, np.float32))
        trail.is_open = False


PLAYS = {
    "all_reduce": (play_all_reduce, 2),
    "join": (play_join, 2),
    "rpc": (play_rpc, 2),
    "death": (play_death, 3),
}


def follow(name: str) -> dict[str, Any]:
    """Play one of the four in processes of its own; the calls of all that watched."""
    with tempfile.TemporaryDirectory(prefix="potluck-ways-") as home:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        environment = os.environ | {"POTLUCK_HOME": home, "POTLUCK_LOG": "error"}
        environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        results = [Path(home) / f"result-{rank}.json" for rank in range(PLAYS[name][1])]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--play", name, str(rank), str(result)],
                env=environment | ({"RANK": str(rank)} if name == "rpc" else {}),
            )
            for rank, result in enumerate(results)
        ]
        for process in processes:
            process.wait(120)
        found = [json.loads(result.read_text()) for result in results if result.exists()]
    calls = [call for one in found for call in one["calls"]]
    return {"calls": calls, "depth": max(one["depth"] for one in found)}


def files_of(found: dict[str, Any]) -> dict[str, list[str]]:
    """The files in the order of their first call, each with its functions."""
    files: dict[str, list[str]] = {}
    for name, function, _ in found["calls"]:
        functions = files.setdefault(name, [])
        if function not in functions:
            functions.append(function)
    return files


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="renew docs/internals/ways.md")
    parser.add_argument("ways", nargs="*", default=list(PLAYS), help="which of the four")
    options = parser.parse_args()
    if options.play:
        name, rank, result = options.play
        trail = Trail()
        import_everything()
        PLAYS[name][0](int(rank), trail)
        Path(result).write_text(json.dumps(trail.result()))
        return
    found = {name: follow(name) for name in options.ways}
    for name, one in found.items():
        files = files_of(one)
        sys.stdout.write(f"{headline(name, one)}\n")
        for file, functions in files.items():
            sys.stdout.write(f"  {file}: {', '.join(functions[:4])}\n")
    if options.write:
        PAGE.write_text(page(found), encoding="utf-8")


def headline(name: str, found: dict[str, Any]) -> str:
    """How many files, and how deep."""
    depth = (
        f", {found['depth']} frames to the socket (goal: {DEPTH})" if name == "all_reduce" else ""
    )
    return f"{name}: {len(files_of(found))} files (goal: {LIMITS[name]}){depth}"


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page of the documentation."""
    lines = ["# Four ways through the code", "", INTRODUCTION]
    for name, one in found.items():
        lines += ["", f"## {TITLES[name]}", "", f"{headline(name, one)}.", ""]
        lines += ["| file | first calls |", "|---|---|"]
        for file, functions in files_of(one).items():
            plain = [function for function in functions if "<" not in function] or functions
            lines.append(f"| `{file}` | {', '.join(f'`{function}`' for function in plain[:3])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
