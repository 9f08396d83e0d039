"""Other builds of Potluck: copies of the package with other versions, run as real processes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import potluck

PACKAGE = Path(potluck.__file__).parent


def another_build(
    folder: Path,
    potluck_version: str,
    *,
    protocol: int = 1,
    oldest: int = 1,
    home_format: int = 1,
    checkpoint_format: int = 1,
    changes: Mapping[str, tuple[str, str]] | None = None,
) -> Path:
    """Put a build with these versions into a folder; where Python has to look for it.

    ``changes`` are texts that differ in files of the package, each there once.
    """
    shutil.copytree(PACKAGE, folder / "potluck", ignore=shutil.ignore_patterns("__pycache__"))
    constants: dict[str, object] = {
        "__version__": f'"{potluck_version}"',
        "PROTOCOL": protocol,
        "OLDEST_PROTOCOL": oldest,
        "HOME_FORMAT": home_format,
        "CHECKPOINT_FORMAT": checkpoint_format,
    }
    versions = folder / "potluck" / "_version.py"
    text = versions.read_text(encoding="utf-8")
    for name, value in constants.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count == 1, name
    versions.write_text(text, encoding="utf-8")
    for name, (old, new) in (changes or {}).items():
        path = folder / "potluck" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def environment(build: Path | None, **variables: str) -> dict[str, str]:
    """The environment of a process that runs a build; None stands for the one under test."""
    found = {**os.environ, **variables}
    if build is not None:
        before = os.environ.get("PYTHONPATH", "")
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(build), before)))
    return found
