"""What a script imports, found without running it: only what it uses has to be alike everywhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

__all__ = ["imports"]

MOST_FILES = 200
"""Files of the user's own that are looked at."""


def imports(script: Path, package: str) -> bool:
    """Whether a script imports a package: itself, or in modules beside it, or by a package it uses.

    A script that cannot be read is taken to do so.
    """
    waiting, seen = [script], {script}
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (OSError, ValueError, SyntaxError, RecursionError):
            return True
        for name in _imported(tree):
            first, _, rest = name.partition(".")
            if package in {first, rest} or _needs(first, package):
                return True
            for path in _beside(script.parent, name):
                if path not in seen and len(seen) < MOST_FILES:
                    seen.add(path)
                    waiting.append(path)
    return False


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{each.name}".lstrip(".") for each in node.names)


def _beside(folder: Path, name: str) -> list[Path]:
    """The files of a module that lies beside the script."""
    parts = name.split(".")
    found = []
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        found += [path / "__init__.py", path.with_suffix(".py")]
    return [each for each in found if each.is_file()]


def _needs(name: str, package: str) -> bool:
    """Whether an installed package of this name says that it needs the other one."""
    if name in sys.stdlib_module_names or name == "potluck":  # which works without
        return False
    try:
        needed = requires(name) or []
    except (PackageNotFoundError, ValueError):
        return False
    return any(
        each.split(";")[0].strip().startswith(package)
        and not each.split(";")[0].strip()[len(package) :][:1].isalnum()
        and "extra ==" not in each
        for each in needed
    )
