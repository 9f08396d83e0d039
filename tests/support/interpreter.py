"""Questions put to a fresh interpreter, where nothing has been imported yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask(source: str, *, cwd: Path, path: Path | None = None) -> Any:
    """Run the source in a fresh interpreter and return the JSON of its last printed line.

    The interpreter starts in ``cwd``, has it as its home, and writes no byte code; ``path`` is
    searched for modules first.
    """
    environment = os.environ | {"HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    if path is not None:
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *inherited])
    result = subprocess.run(
        [sys.executable, "-c", source],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(result.stdout.splitlines()[-1])
