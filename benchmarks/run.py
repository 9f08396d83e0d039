"""Run every benchmark in this folder, one after the other, each in a process of its own.

    python benchmarks/run.py            all of them, in full
    python benchmarks/run.py --quick    the same with few repetitions: does it run, roughly how fast
    python benchmarks/run.py p2p        only the named ones

A benchmark is a script here whose name does not begin with an underscore.  It takes ``--quick``,
prints its table, and ends with an error if it could not measure; any further option is passed on.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> dict[str, Path]:
    """The scripts in this folder by name."""
    return {
        file.stem: file
        for file in sorted(FOLDER.glob("*.py"))
        if not file.name.startswith("_") and file.name != Path(__file__).name
    }


def main(arguments: list[str]) -> int:
    """Run the wanted benchmarks to the end even if one fails; 0 if all went well."""
    options = [word for word in arguments if word.startswith("-")]
    wanted = [word for word in arguments if not word.startswith("-")]
    available = benchmarks()
    unknown = [name for name in wanted if name not in available]
    if unknown or not available:
        print(f"No benchmark named {', '.join(unknown)}" if unknown else "There is no benchmark")
        print(f"There are: {', '.join(available) or 'none'}")
        return 2
    failed = []
    for name in wanted or available:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, available[name], *options], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
