"""Times a new user's path from a fresh clone, and records it in ``quickstart.md`` (``--write``).

First ``make demo`` in a clone with an empty environment, twice; then two emulated hosts on one
switch, the second with nothing but the wheel, which follow the README with two commands each.
Needs root and the program ``ip`` for the hosts, and a package index for the installations.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "tests")]

from support.hosts import Hosts  # noqa: E402 - found by the path above
from support.pages import blocks  # noqa: E402
from support.walkthrough import Walkthrough, steps_of  # noqa: E402

PAGE = DOCS / "quickstart.md"
README = ROOT / "README.md"
PATIENCE = 900.0  # seconds for one installation over a slow line

_PART = re.compile(r"(<!-- measured: first use -->\n).*?(<!-- end -->)", re.DOTALL)


def timed(*command: str, cwd: Path) -> float:
    """Run a command to its end; how many seconds that took."""
    began = time.monotonic()
    kept = {name: os.environ[name] for name in os.environ if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        command, cwd=cwd, env=kept, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return time.monotonic() - began


def one_machine(folder: Path) -> dict[str, float]:
    """Clone, and see the demo twice."""
    clone = folder / "potluck"
    return {
        "`git clone` (from this machine's disk)": timed(
            "git", "clone", "--quiet", str(ROOT), str(clone), cwd=folder
        ),
        "`make demo`, which also installs everything": timed("make", "demo", cwd=clone),
        "`make demo` again": timed("make", "demo", cwd=clone),
    }


def two_machines(folder: Path) -> dict[str, float]:
    """A wheel for the second, then pair and train."""
    clone, second = folder / "potluck", folder / "env"
    python = str(clone / ".venv/bin/python")
    wheel = timed(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", ".", cwd=clone)
    (file,) = (clone / "dist").glob("*.whl")
    install = timed(python, "-m", "venv", str(second), cwd=folder)
    install += timed(str(second / "bin/pip"), "install", "-q", str(file), cwd=folder)
    page = README.read_text(encoding="utf-8")
    (commands,) = (each for each in blocks(page, "console") if "first$" in each)
    with Hosts("first second") as hosts:
        walk = Walkthrough(
            folder,
            page,
            hosts,
            {
                "first": [str(clone / ".venv/bin/potluck")],
                "second": [str(second / "bin/potluck")],
            },
        )
        for machine in hosts:
            (walk.place(machine) / "hello.py").write_text(blocks(page, "python")[0])
        done = walk.follow(steps_of(commands))
    for steps in done.values():
        for step in steps:
            if step.exit_code:
                sys.exit(f"{step.command}: {step.output}")
    pair, run = done["second"]
    return {
        "making the wheel": wheel,
        "installing it on the second machine": install,
        "`potluck pair CODE`, until both belong together": pair.seconds,
        "`potluck run hello.py`, until both have finished": run.seconds,
    }


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record it in docs/quickstart.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = one_machine(folder) | two_machines(folder)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    where = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {day}"
    )
    rows = [f"| {what} | {seconds:.1f} s |" for what, seconds in times.items()]
    total = sum(times.values())
    table = "\n".join(
        [
            f"| {where} | |",
            "|---|---|",
            *rows,
            f"| **all of it, without reading** | {total:.0f} s |",
        ]
    )
    print(table)
    if options.write:
        text = _PART.sub(rf"\g<1>\n{table}\n\n\g<2>", PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
