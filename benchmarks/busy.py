"""Whether a busy machine keeps its cluster, and what a cluster costs a machine.

    python benchmarks/busy.py [--quick] [--parts crowd beside rest gil] [--sizes 8 16 24 32]
                              [--load 20] [--seconds 60] [--json FILE]

*crowd* starts N processes that join one job with ``min_nodes=N``, waits until each of them has the
first view with all, and trains a step per second with gradients of 4 KiB.  *beside* does the same
with four processes next to busy loops of the same priority.  Both count view changes and errors,
which should be none.  *rest* shows the largest share of a core that the heartbeat plane (control
and I/O threads) of one member uses when nothing else happens; below 1 % is wanted.  *gil* shows
how long a thread of the user waits for the interpreter while Potluck works in other threads, on
encrypted connections.  A wait counts as far as this process used a processor meanwhile: what is
beyond that was the wait for a free processor, which *with other work* shows.

How fast a group notices a killed process and a pulled cable is measured by ``cluster.py``.  Each
process uses one BLAS thread.  Times are seconds unless a column says otherwise.  FILE may be ``-``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ELEMENTS = 1024  # of 4 bytes: the gradients of a small model
STEP = 1.0  # seconds from one step to the next
PATIENCE = 240.0  # seconds after which a process that has not joined counts as lost
SETTLE = 5.0  # seconds after the first view until everything that follows from it is over
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
PLANE = "potluck-control", "potluck-io"
PARTS = "crowd", "beside", "rest", "gil"
BESIDE = 4  # members next to the busy loops
TICK = 0.001  # seconds that the sampling thread sleeps
SWITCH_INTERVAL = 0.0001  # so that a wait is a call that keeps the GIL, not the interpreter's turn
WORK = {  # what is done while the GIL is watched
    "nothing": "",
    "all-reduce, 4 KiB": "4096",
    "all-reduce, 1 MiB": "1048576",
    "all-reduce, 64 MiB": "67108864",
    "all-reduce, 64 MiB, int8": "67108864 int8",
    "broadcast, 64 MiB": "67108864 broadcast",
}

# --- one process of the cluster ---


def say(word: str, **facts: Any) -> None:
    """Tell the process that measures."""
    print(json.dumps({"word": word, "at": time.monotonic(), **facts}), flush=True)


def processor_seconds() -> dict[str, float]:
    """What each thread of this process has used so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    used: dict[str, float] = {"all": time.process_time()}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii")
            fields = text.rpartition(")")[2].split()
            name = thread.name.split("-view-")[0]
            used[name] = used.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return used


def train(job: str, size: int, seconds: float) -> None:
    """Join, train for a while, and leave when told to."""
    import numpy as np

    import potluck

    say("started", used=processor_seconds())
    with potluck.join(size, job=job, timeout=PATIENCE) as cluster:
        first = cluster.view
        assert first is not None
        say("joined", epoch=first.epoch, size=len(first.members), used=processor_seconds())
        gradients = np.ones(ELEMENTS, dtype=np.float32)
        changes: list[str] = []
        cluster.on_view_change(lambda change: changes.append(f"{time.monotonic():.1f} {change}"))
        errors: list[str] = []
        begin = time.monotonic()
        steps, slowest, before, is_over = 0, 0.0, processor_seconds(), False
        while not is_over:
            start = time.monotonic()
            gradients[:] = 0.0
            gradients[0] = float(start >= begin + seconds)  # all end after the same step
            try:
                cluster.all_reduce(gradients, timeout=30)
            except potluck.DistributedError as error:
                errors.append(f"{time.monotonic():.1f} {type(error).__name__}: {error}"[:300])
            is_over = bool(gradients[0]) or start >= begin + seconds + 2 * PATIENCE
            steps, slowest = steps + 1, max(slowest, time.monotonic() - start)
            time.sleep(max(0.0, start + STEP - time.monotonic()))
        after = processor_seconds()
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        facts = {"steps": steps, "slowest": slowest, "errors": errors, "used": used}
        say("trained", changes=changes, **facts)
        sys.stdin.readline()


def rest(job: str, size: int, seconds: float) -> None:
    """Join, wait, and say what that cost."""
    import potluck

    with potluck.join(size, job=job, timeout=PATIENCE, probes=False) as cluster:
        say("joined")
        sys.stdin.readline()
        time.sleep(SETTLE)
        first, before = cluster.view, processor_seconds()
        time.sleep(seconds)
        after = processor_seconds()
        used = {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}
        say("rested", used=used, calm=cluster.view == first)
        sys.stdin.readline()


class Sampler:
    """A thread of the user: it sleeps for a moment and notes how late it continues, in seconds.

    First as far as this process itself used a processor meanwhile, then the whole.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            start, used = time.perf_counter(), time.process_time()
            time.sleep(TICK)
            late = time.perf_counter() - start - TICK
            self._late.append((min(late, time.process_time() - used), late))

    def end(self) -> list[tuple[float, float]]:
        """What it noted."""
        self._is_over.set()
        self._thread.join()
        return self._late


def watch_gil(job: str, size: int, seconds: float) -> None:
    """Join, do one kind of work after the other, and say how late a sampling thread was."""
    import numpy as np

    import potluck

    os.environ["POTLUCK_SHORTCUTS"] = "off"  # else processes of one machine need no encryption
    sys.setswitchinterval(SWITCH_INTERVAL)
    sampler = Sampler()
    late = {}
    with potluck.join(size, job=job, timeout=PATIENCE, probes=False) as cluster:
        late["import and join"] = sampler.end()
        say("joined")
        for name, work in WORK.items():
            count, _, kind = work.partition(" ")
            gradients = np.ones(int(count or 4) // 4, dtype=np.float32)
            cluster.barrier()
            sampler = Sampler()
            end = time.monotonic() + seconds
            while True:
                if not work:
                    time.sleep(seconds)
                elif kind == "broadcast":
                    cluster.broadcast(gradients)
                else:
                    cluster.all_reduce(gradients, compression=kind or None)
                gradients[:] = 1.0
                over = np.array([float(time.monotonic() >= end)])
                if cluster.all_reduce(over)[0]:
                    break
            late[name] = sampler.end()
        say("watched", late=late)
        sys.stdin.readline()


# --- the process that measures ---


class Member:
    """A process of the cluster, as the one that measures sees it."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the process
        self.launched = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(folder),
        )

    def hear(self, word: str) -> dict[str, Any]:
        """Wait until it says this."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["word"] == word:
                return said
        self._log.seek(0)
        raise RuntimeError(f"a process ended: {self._log.read().decode()[-2000:]}")

    def tell(self) -> None:
        """Let it continue."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @property
    def log(self) -> str:
        """What it wrote for people."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> float:
        """End it without a word; when that was."""
        self._process.kill()
        return time.monotonic()

    def end(self) -> None:
        """Let it leave; end it if it does not."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate("\n", timeout=30)
        self._process.kill()
        self._process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Variables of a member: keys and compiled modules are in the folder."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = {"POTLUCK_HOME": str(folder / "home"), "PYTHONPYCACHEPREFIX": str(folder / "cache")}
    return {**kept, **ONE_THREAD, **places}


def prepare(folder: Path) -> None:
    """Have the keys made and the modules compiled, as on a machine that is not new."""
    program = "import potluck; potluck.join(1, solo_delay=0, job='prepare', timeout=60).close()"
    subprocess.run([sys.executable, "-c", program], env=environment(folder), check=True)


@contextlib.contextmanager
def members(
    size: int,
    seconds: float,
    *,
    work: str = "train",
    load: int = 0,
) -> Iterator[list[Member]]:
    """Processes of one job, started together, beside ``load`` busy loops."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prepare(Path(folder))
        stack.enter_context(busy_loops(load))
        job = f"busy-{os.getpid()}-{size}"
        command = [__file__, "--member", work, job, str(size), str(seconds)]
        started = [Member(Path(folder), command) for _ in range(size)]
        try:
            yield started
        finally:
            for each in started:
                each.end()


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """``count`` processes that compute and never wait."""
    program = "while True: sum(range(10_000))"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def measure_training(size: int, seconds: float, load: int = 0) -> dict[str, Any]:
    """Form a cluster and train; what was seen."""
    with members(size, seconds, load=load) as started:
        began = min(each.launched for each in started)
        joined = [each.hear("joined") for each in started]
        trained = [each.hear("trained") for each in started]
        logs = [each.log for each in started]
    if os.environ.get("BUSY_LOGS"):
        Path(os.environ["BUSY_LOGS"]).write_text("\n=====\n".join(logs), encoding="utf-8")
    return {
        "members": size,
        "load": load,
        "formed": max(each["at"] for each in joined) - began,
        "processor time to join": max(each["used"]["all"] for each in joined),
        "steps": min(each["steps"] for each in trained),
        "slowest step": max(each["slowest"] for each in trained),
        "view changes": max(len(each["changes"]) for each in trained),
        "errors": sum(len(each["errors"]) for each in trained),
        "first error": next((text for each in trained for text in each["errors"]), ""),
        "last changes": max((each["changes"] for each in trained), key=len)[-3:],
    }


def measure_rest(size: int, seconds: float) -> dict[str, Any]:
    """Form a cluster and let it rest; what that cost."""
    with members(size, seconds, work="rest") as started:
        for each in started:
            each.hear("joined")
        for each in started:
            each.tell()
        rested = [each.hear("rested") for each in started]
    most = {name: max(each["used"].get(name, 0.0) for each in rested) for name in (*PLANE, "all")}
    plane = max(sum(each["used"].get(name, 0.0) for name in PLANE) for each in rested)
    return {
        "members": size,
        "control": most[PLANE[0]],
        "I/O": most[PLANE[1]],
        "heartbeat plane": plane,
        "process": most["all"],
        "one view": all(each["calm"] for each in rested),
    }


def measure_gil(seconds: float) -> list[dict[str, Any]]:
    """Two members that work; how long their other threads waited."""
    with members(2, seconds, work="gil") as started:
        watched = [each.hear("watched")["late"] for each in started]
    rows = []
    for name in watched[0]:
        held, late = (
            sorted(1e3 * each[kind] for member in watched for each in member[name])
            for kind in (0, 1)
        )
        share = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
        found = {f"{key}, ms": held[int(at * (len(held) - 1))] for key, at in share.items()}
        found["worst, ms"] = held[-1]
        found["p99 with other work, ms"] = late[int(0.99 * (len(late) - 1))]
        rows.append({"work": name, "samples": len(held), **found})
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One part as a table; what went wrong stands below it."""
    hidden = {"first error", "last changes"}
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in rows[0]:
        if name not in hidden:
            table.add_column(name, justify="left" if name == "work" else "right")
    for row in rows:
        cells = [_written(name, value) for name, value in row.items() if name not in hidden]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    for row in rows:
        for words in (row.get("first error"), *row.get("last changes", ())):
            if words:
                console.print(f"{row['members']} members: {words}", markup=False)


def _written(name: str, value: Any) -> str:
    if name in {"control", "I/O", "heartbeat plane", "process"}:
        return f"{value:.2%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small groups, a few seconds each")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", type=int, nargs="+", help="members of a crowd, and at rest")
    parser.add_argument("--load", type=int, default=20, help="busy loops beside four members")
    parser.add_argument("--seconds", type=float, help="of training, rest or work")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.member:
        work, job, size, length = wanted.member
        {"train": train, "rest": rest, "gil": watch_gil}[work](job, int(size), float(length))
        return
    sizes = wanted.sizes or ([4, 8] if wanted.quick else [8, 16, 24, 32])
    seconds = wanted.seconds or (5.0 if wanted.quick else 60.0)
    found: dict[str, list[dict[str, Any]]] = {}
    for part in wanted.parts:
        if part == "crowd":
            found[part] = [measure_training(size, seconds) for size in sizes]
        elif part == "beside":
            found[part] = [measure_training(BESIDE, seconds, wanted.load)]
        elif part == "rest":
            found[part] = [measure_rest(size, min(seconds, 20.0)) for size in sizes]
        else:
            found[part] = measure_gil(min(seconds, 10.0))
        show(part, found[part])
    if wanted.json:
        text = json.dumps(found, indent=1)
        if wanted.json == "-":
            print(text)
        else:
            Path(wanted.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
