"""One of the processes that measure:  ``python rank.py FOLDER RANK``.

It reads ``FOLDER/session.json`` and leaves what it saw in ``FOLDER/RANK.json``.  Under ``mpirun``
the rank is ``-`` and comes from there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from potluck.collective.call import Work

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives.contenders import PATIENCE, Contender, Potluck, call_for, enter
from collectives.memory import ALL_REDUCE, Memory
from collectives.plan import BACKGROUND, MEMORY, MIB, Case, Session

Result = dict[str, Any]

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def measure(case: Case, contenders: dict[str, Contender], memory: Memory) -> Result:
    """All rounds of a case: seconds for one operation, by contender.

    Each turn ends with a barrier: what a rank still owes to another, MPI sends only while somebody
    is in one of its calls, and the next turn is another library's.
    """
    steps = {name: contender.prepare(memory) for name, contender in contenders.items()}
    for name, step in steps.items():
        memory.fill()
        contenders[name].barrier()
        step()
        memory.check()
        for _ in range(case.warm_up):
            step()
        contenders[name].barrier()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cable: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(case.rounds):
        turn = number % len(steps)  # nobody always follows the same one
        for name in [*steps, *steps][turn : turn + len(steps)]:
            memory.fill()
            contenders[name].barrier()
            before = sent_bytes()
            seconds[name].append(clock(steps[name], case.inner))
            contenders[name].barrier()
            cable[name].append((sent_bytes() - before) / case.inner)
    plans = {name: each.describe(memory) for name, each in contenders.items()}
    return {**asdict(case), "seconds": seconds, "plans": plans, "cable": cable}


def sent_bytes() -> int:
    """What this host has sent on its cable, headers included; 0 where there is none."""
    try:
        return int(COUNTER.read_text(encoding="ascii"))
    except OSError:
        return 0


def clock(step: Any, inner: int) -> float:
    """Seconds that one operation takes."""
    start = time.perf_counter()
    for _ in range(inner):
        step()
    return (time.perf_counter() - start) / inner


def in_background(case: Case, contender: Potluck, memory: Memory) -> Result:
    """Bytes per second of asynchronous operations beside a loop in pure Python."""
    group, call = contender.group, call_for(memory)
    rates = []
    for number in range(case.rounds + case.warm_up):
        memory.fill()
        group.barrier(PATIENCE)
        start = time.perf_counter()
        work: Work[None] = group.start(call, timeout=PATIENCE)
        turns = 0
        while not work.done:
            turns += 1
        took = time.perf_counter() - start
        work.wait(PATIENCE)
        if number == 0:
            memory.check()
        if number >= case.warm_up:
            rates.append(memory.target.nbytes / took)
    return {**asdict(case), "rates": rates}


def extra_memory(case: Case, contender: Potluck, memory: Memory) -> Result:
    """Bytes that this process grew by, at most, in its first large operation."""
    small = Memory.of(case.collective, 4, memory.rank, memory.world_size)
    contender.prepare(small)()  # connects
    memory.fill()
    contender.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest so far
    before = _status("VmRSS")
    contender.prepare(memory)()
    grown = _status("VmHWM") - before
    memory.check()
    return {**asdict(case), "grown": grown}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"This system does not tell {name}")


def run(session: Session, rank: int) -> list[Result]:
    """Take part in a session."""
    contenders: dict[str, Contender] = {}
    results = []
    try:
        for name in session.contenders:
            master = session.masters[name]
            contenders[name] = enter(
                name, rank, session.world_size, master, is_bare=session.is_bare
            )
        if session.is_surveyed:
            for contender in contenders.values():
                contender.prepare(Memory.of(ALL_REDUCE, MIB, rank, session.world_size))()
        for case in session.cases:
            memory = Memory.of(case.collective, case.octets, rank, session.world_size)
            if session.kind in {BACKGROUND, MEMORY}:
                action = in_background if session.kind == BACKGROUND else extra_memory
                for name, contender in contenders.items():
                    assert isinstance(contender, Potluck)
                    results.append({**action(case, contender, memory), "contender": name})
            else:
                results.append(measure(case, contenders, memory))
        for contender in contenders.values():
            contender.barrier()  # nobody leaves while others are at it
    finally:
        for contender in contenders.values():
            contender.close()
    return results


def main(folder: Path, place: str) -> None:
    """Run from the command line."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"] if place == "-" else place)
    facts = json.loads((folder / "session.json").read_text(encoding="utf-8"))
    facts["cases"] = tuple(Case(**case) for case in facts["cases"])
    results = run(Session(**facts), rank)
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
