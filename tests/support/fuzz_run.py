"""Run the fuzzer for a while: ``python -m support.fuzz_run --inputs 10000000``."""

from __future__ import annotations

import argparse
import random
import sys
import time

from support.fuzz_targets import targets
from support.fuzzing import fuzz


def main() -> int:
    """Print the figures and every fault; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=24 * 3600.0)
    parser.add_argument("--only", default="", help="decoders whose names begin with this")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    begin = time.monotonic()
    chosen = [each for each in targets() if each.name.startswith(options.only)]
    figures = fuzz(chosen, seed=options.seed, inputs=options.inputs, seconds=options.seconds)
    print(  # noqa: T201
        f"seed {options.seed}: {figures.total} inputs over {len(figures.inputs)} decoders in "
        f"{time.monotonic() - begin:.0f} s, {figures.refused} refused, slowest "
        f"{figures.slowest * 1000:.1f} ms, at most {figures.largest >> 10} KiB, "
        f"{len(figures.faults)} faults"
    )
    shown = {(fault.target, fault.what[:60]): fault for fault in figures.faults}
    for fault in shown.values():
        print(f"  {fault}")  # noqa: T201
    return int(bool(figures.faults))


if __name__ == "__main__":
    sys.exit(main())
