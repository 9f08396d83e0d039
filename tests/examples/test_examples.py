"""Every example runs with `potluck run`, as its first lines and examples/README.md say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from potluck.training.checkpoint import latest
from support.clusters import new_job
from support.command import started
from support.ports import free_port
from support.threads import PATIENCE, eventually

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = {
    "ddp_mnist_like.py": (["--epochs", "1", "--pictures", "256"], r"^\[0\] epoch 0: "),
    "elastic.py": (["--steps", "10", "--batch", "8"], r"^\[[01]\] step   10  rank [01] of 2"),
    "nanogpt.py": (["--steps", "2", "--letters", "3"], r"^\[0\] step    1  loss "),
    "parameter_server.py": ([], r"^\[0\] learned \[ 2\.  -1\.   0\.5\] from \[\(1, 200\)\]"),
}
"""Settings with which each example takes a moment, and a line that it prints in the end."""


@contextmanager
def running(
    folder: Path, script: str, *arguments: str, workers: int, options: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """An example under way, on this machine alone."""
    options = ("run", "--nodes", "1", "--per-node", str(workers), "--job", new_job(), *options)
    variables = {"OMP_NUM_THREADS": "1"}
    file = str(EXAMPLES / script)
    with started(*options, file, *arguments, variables=variables, folder=folder) as run:
        watchdog = threading.Timer(4 * PATIENCE, run.kill)
        watchdog.start()
        try:
            yield run
        finally:
            watchdog.cancel()


def test_every_example_is_tried() -> None:
    """A new example needs a line above, and one in examples/README.md."""
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SMALL)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert scripts == set(re.findall(r"\]\((\w+\.py)\)", page))


@pytest.mark.timeout(180)  # interpreters start, with PyTorch
@pytest.mark.parametrize("script", SMALL)
def test_an_example_runs_with_potluck_run(tmp_path: Path, script: str) -> None:
    """On two workers, with small settings."""
    arguments, line = SMALL[script]
    with running(tmp_path, script, *arguments, workers=2) as run:
        said, notes = run.communicate(timeout=4 * PATIENCE)
    assert run.returncode == 0, said + notes
    assert re.search(line, said, re.MULTILINE), said + notes


def test_the_parameter_server_runs_alone() -> None:
    """Without a launcher it starts two workers itself; they come close to the truth."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "parameter_server.py")],
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


@pytest.mark.timeout(300)  # five interpreters start, with PyTorch
def test_the_elastic_example_survives_a_closed_lid_and_resumes(tmp_path: Path) -> None:
    """A stopped process is a laptop asleep: the others continue, it comes back, all resume."""
    endless = ("--steps", "1000000", "--batch", "12", "--save-every", "10")
    with running(tmp_path, "elastic.py", *endless, workers=3) as run:
        read_until(run, lambda line: "of 3 " in line)
        asleep = next(
            each
            for each in psutil.Process(run.pid).children(recursive=True)
            if "elastic.py" in " ".join(each.cmdline())
        )
        asleep.send_signal(signal.SIGSTOP)
        alone = step_of(read_until(run, lambda line: "of 2 " in line))
        asleep.send_signal(signal.SIGCONT)
        read_until(run, lambda line: "of 3 " in line and step_of(line) > alone)
        eventually(lambda: latest(tmp_path / "checkpoints") is not None, 4 * PATIENCE)
    with running(tmp_path, "elastic.py", *endless, workers=2, options=("--resume",)) as run:
        line = read_until(run, lambda line: "continuing from step" in line)
        assert int(line.split()[-1]) >= 10


def step_of(line: str) -> int:
    """The number of the step that a line of the elastic example is about."""
    return int(line.split()[2])


def read_until(run: subprocess.Popen[str], is_it: Callable[[str], bool]) -> str:
    """Read lines of a command until one is as wanted."""
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if is_it(line):
            return line
    raise AssertionError("It did not appear. The last lines: " + "".join(lines[-20:]))
