"""What an idle member of a cluster costs: processor time of its control and I/O threads.

    python benchmarks/heartbeats.py [--sizes 2 4 8 16 32] [--seconds 20]

N processes on this machine join one job and then do nothing.  The table shows the largest share of
a core that the threads of one member used: the heartbeat plane (control and I/O) should stay below
1 %.  The processes share the machine, so measure on an idle one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from busy import PATIENCE, members, processor_seconds, say

SETTLE = 5.0  # seconds after the first view until everything that follows from it is over
PLANE = "potluck-control", "potluck-io"


def member(job: str, size: int, seconds: float) -> None:
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


def main() -> None:
    """Measure group after group."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.member:
        job, size, seconds = wanted.member
        member(job, int(size), float(seconds))
        return
    print(f"{'members':>8} {'control':>8} {'I/O':>8} {'both':>8} {'all':>8}  one view")
    for size in wanted.sizes:
        with members(size, wanted.seconds, program=__file__, option="--member") as started:
            for each in started:
                each.hear("joined")
            for each in started:
                each.tell()
            rested = [each.hear("rested") for each in started]
        most = [max(each["used"].get(name, 0.0) for each in rested) for name in (*PLANE, "all")]
        both = max(sum(each["used"].get(name, 0.0) for name in PLANE) for each in rested)
        shares = [f"{share:8.2%}" for share in (most[0], most[1], both, most[2])]
        print(f"{size:8d} {' '.join(shares)}  {all(each['calm'] for each in rested)}", flush=True)


if __name__ == "__main__":
    main()
