"""Whether a busy machine keeps its cluster: many processes on few cores, and a few beside a load.

    python benchmarks/busy.py crowd [--sizes 8 16 24 32] [--seconds 60]
    python benchmarks/busy.py beside [--size 4] [--load 20] [--seconds 60]

*crowd* starts N processes that join one job with ``min_nodes=N``, waits until each of them has the
first view with all, and trains a step per second with gradients of 4 KiB.  *beside* does the same
next to busy loops of the same priority.  Both count view changes and errors, which should be none.
How long a group needs to see a killed process and a pulled cable is measured by ``cluster.py``.

Each process uses one BLAS thread.  Times are seconds.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ELEMENTS = 1024  # of 4 bytes: the gradients of a small model
STEP = 1.0  # seconds from one step to the next
PATIENCE = 240.0  # seconds after which a process that has not joined counts as lost
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


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


def member(job: str, size: int, seconds: float) -> None:
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
        steps, slowest, before = 0, 0.0, processor_seconds()
        while time.monotonic() < begin + seconds:
            start = time.monotonic()
            try:
                cluster.all_reduce(gradients, timeout=30)
            except potluck.DistributedError as error:
                errors.append(f"{time.monotonic():.1f} {type(error).__name__}: {error}"[:300])
            steps, slowest = steps + 1, max(slowest, time.monotonic() - start)
            time.sleep(max(0.0, start + STEP - time.monotonic()))
        after = processor_seconds()
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        facts = {"steps": steps, "slowest": slowest, "errors": errors, "used": used}
        say("trained", changes=changes, **facts)
        sys.stdin.readline()


# --- the process that measures ---


Wrap = Callable[[list[str]], list[str]]


class Member:
    """A process of the cluster, as the one that measures sees it."""

    def __init__(self, folder: Path, command: list[str], wrap: Wrap = list) -> None:
        self._log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the process
        self.launched = time.monotonic()
        self._process = subprocess.Popen(
            wrap([sys.executable, *command]),
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
    wraps: Sequence[Wrap] | None = None,
    *,
    program: str = __file__,
    option: str = "member",
    load: int = 0,
) -> Iterator[list[Member]]:
    """Processes of one job, started together, beside a load of so many busy loops."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        prepare(Path(folder))
        stack.enter_context(busy_loops(load))
        job = f"busy-{os.getpid()}-{size}"
        makers = wraps or [list] * size
        command = [program, option, job, str(size), str(seconds)]
        started = [Member(Path(folder), command, wrap) for wrap in makers]
        try:
            yield started
        finally:
            for each in started:
                each.end()


def train(size: int, seconds: float, load: int = 0) -> dict[str, Any]:
    """Form a cluster and train; what was seen."""
    with members(size, seconds, load=load) as started:
        began = min(each.launched for each in started)
        ready = [each.hear("started") for each in started]
        joined = [each.hear("joined") for each in started]
        trained = [each.hear("trained") for each in started]
        logs = [each.log for each in started]
    if os.environ.get("BUSY_LOGS"):
        Path(os.environ["BUSY_LOGS"]).write_text("\n=====\n".join(logs), encoding="utf-8")
    names = sorted({name for each in trained for name in each["used"]})
    shares = {
        name: max(each["used"].get(name, 0.0) for each in trained) / seconds for name in names
    }
    return {
        "size": size,
        "started": max(each["at"] for each in ready) - began,
        "formed": max(each["at"] for each in joined) - began,
        "first epochs": sorted({each["epoch"] for each in joined}),
        "forming cost": max(each["used"]["all"] for each in joined),
        "view changes": max(len(each["changes"]) for each in trained),
        "errors": sum(len(each["errors"]) for each in trained),
        "steps": min(each["steps"] for each in trained),
        "slowest step": max(each["slowest"] for each in trained),
        "cores": {name: round(share, 4) for name, share in shares.items() if share > 0.0005},
        "first error": next((e for each in trained for e in each["errors"]), ""),
        "last changes": max((each["changes"] for each in trained), key=len)[-3:],
    }


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """A load of so many processes that compute and never wait."""
    program = "while True: sum(range(10_000))"
    loops = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def show(found: dict[str, Any]) -> None:
    """One result, as it comes."""
    print(json.dumps(found, indent=1, default=str), flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    crowd = parts.add_parser("crowd")
    crowd.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 24, 32])
    crowd.add_argument("--seconds", type=float, default=60.0)
    beside = parts.add_parser("beside")
    beside.add_argument("--size", type=int, default=4)
    beside.add_argument("--load", type=int, default=20)
    beside.add_argument("--seconds", type=float, default=60.0)
    child = parts.add_parser("member")
    child.add_argument("job")
    child.add_argument("size", type=int)
    child.add_argument("seconds", type=float)
    wanted = parser.parse_args()
    if wanted.part == "member":
        member(wanted.job, wanted.size, wanted.seconds)
    elif wanted.part == "crowd":
        for size in wanted.sizes:
            show(train(size, wanted.seconds))
    else:
        show(train(wanted.size, wanted.seconds, wanted.load))


if __name__ == "__main__":
    main()
