"""Seeds on a compiled copy of the core: ``PYTHONPATH=tests python -m support.compiled_seeds``.

The package is copied to a folder outside the tree, and the modules of the membership and of its
simulation are compiled there with mypyc: the same source plays several times as many stories a
second.  The seeds are played in parts.  A file keeps one line for each part, so that a run that
was ended continues where it was; parts of another source do not count.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import gettempdir

from support.mutation_run import MODULES

SOURCE = Path(__file__).parent.parent.parent / "src" / "potluck"
_COMMANDS = frozenset({"explore", "load", "mutants", "seeds", "world", "fingerprint", "__init__"})
_STAMP = "source"
_PLAIN_BASES = frozenset({"Enum", "IntEnum"}) | {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}


def can_be_compiled(source: str) -> bool:
    """Whether mypyc has a class of its own for every class of a module.

    It has none for enumerations, for exceptions and for those with options, as messages have.

    >>> can_be_compiled("class Point: x = 1")
    True
    >>> can_be_compiled("class Hello(Message, frozen=True): x = 1")
    False
    """
    return not any(
        isinstance(node, ast.ClassDef)
        and (node.keywords or {ast.unparse(base) for base in node.bases} & _PLAIN_BASES)
        for node in ast.walk(ast.parse(source))
    )


def modules(package: Path) -> list[str]:
    """The files to compile, relative to the folder of the package."""
    core = (package / f"{name}.py" for name in MODULES)
    simulation = (p for p in (package / "testing").glob("*.py") if p.stem not in _COMMANDS)
    return sorted(
        str(path.relative_to(package.parent))
        for path in (*core, *simulation)
        if can_be_compiled(path.read_text(encoding="utf-8"))
    )


def digest(package: Path) -> str:
    """Of the membership and its simulation: what comes of a seed depends on them."""
    text = hashlib.sha256()
    core = (package / f"{name}.py" for name in MODULES)
    for path in sorted((*core, *(package / "testing").glob("*.py"), package / "_types.py")):
        text.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return text.hexdigest()


def build(folder: Path) -> str:
    """Copy the package to a folder and compile it there, if the folder has another source.

    Returns the digest of the source.
    """
    source, stamp = digest(SOURCE), folder / _STAMP
    if stamp.exists() and stamp.read_text(encoding="utf-8") == source:
        return source
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder / "potluck", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "mypyc", "--ignore-missing-imports"]
    subprocess.run(
        [*command, *modules(folder / "potluck")],
        cwd=folder,
        env=os.environ | {"MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    stamp.write_text(source, encoding="utf-8")
    return source


def play(folder: Path, first: int, seeds: int, jobs: int) -> dict[str, object]:
    """Play some seeds on the copy in a folder; the report of the command.

    Raises :class:`RuntimeError` with what the command wrote if it made no report.
    """
    options = ["--first", str(first), "--seeds", str(seeds), "--jobs", str(jobs), "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "potluck.testing.seeds", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        check=False,  # 1 if a seed failed; the report names it
    )
    try:
        facts: dict[str, object] = json.loads(ended.stdout)
    except ValueError:
        said = ended.stderr.decode(errors="replace").strip() or "it wrote nothing"
        raise RuntimeError(
            f"Seeds {first} to {first + seeds - 1} ended with code {ended.returncode} and without "
            f"a report:\n{said}"
        ) from None
    return facts


def parts(first: int, seeds: int, size: int, played: Iterable[int]) -> list[tuple[int, int]]:
    """The parts that are left: where each begins, and how many seeds it has.

    >>> parts(0, 25, 10, played=[10])
    [(0, 10), (20, 5)]
    """
    known, end = set(played), first + seeds
    return [(at, min(size, end - at)) for at in range(first, end, size) if at not in known]


def read(log: Path, source: str) -> dict[int, dict[str, object]]:
    """What a file says of the parts that were played with a source, by their first seed."""
    if not log.exists():
        return {}
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {line["first"]: line for line in lines if line["source"] == source}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m support.compiled_seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000_000, help="how many (default a million)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--part", type=int, default=10_000, help="seeds in a part (default 10000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(gettempdir()) / f"potluck-compiled-{os.getuid()}",
        help="where the copy is made, and found again (default: %(default)s)",
    )
    parser.add_argument("--log", type=Path, help="a file that keeps what came of each part")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    source = build(folder)
    log = options.log or folder / "log"
    for first, seeds in parts(options.first, options.seeds, options.part, read(log, source)):
        line = {"first": first, "source": source} | play(folder, first, seeds, options.jobs)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        sys.stdout.write(f"{first} to {first + seeds - 1}: {line['failures'] or 'all passed'}\n")
        sys.stdout.flush()
    return summarise(read(log, source))


def summarise(lines: dict[int, dict[str, object]]) -> int:
    """Say what came of all parts; 1 if a seed failed."""
    failures = [failure for line in lines.values() for failure in _list(line["failures"])]
    seeds = sum(int(str(line["seeds"])) for line in lines.values())
    sys.stdout.write(f"{seeds} seeds, {len(failures)} failed\n")
    for failure in failures:
        sys.stdout.write(f"{json.dumps(failure)}\n")
    return 1 if failures else 0


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


if __name__ == "__main__":
    sys.exit(main())
