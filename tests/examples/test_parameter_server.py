"""The parameter server learns what is to be learned, in real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.ports import free_port

SCRIPT = Path(__file__).parents[2] / "examples" / "parameter_server.py"


def test_the_parameter_server_learns() -> None:
    """Two workers push all their steps, and the parameters come close to the truth."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert result.stderr == ""
    assert "learned [ 2.  -1.   0.5] from [(1, 200), (2, 200)]" in result.stdout
    losses = [float(loss) for loss in re.findall(r"the last loss was (\S+)", result.stdout)]
    assert len(losses) == 2
    assert max(losses) < 1e-6
