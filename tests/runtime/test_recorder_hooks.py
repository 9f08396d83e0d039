"""Dumps without a call: by a signal, and by the error that ends a program."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, potluck
{before}
context = potluck.DistributedContext(potluck.SimulatedBackend.create_group(1)[0])
context.barrier()
{after}
"""


def run(folder: Path, before: str, after: str) -> subprocess.CompletedProcess[str]:
    """A program with one rank that has done one barrier."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        env={**os.environ, "POTLUCK_TRACE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no such signal here")
def test_the_signal_writes_a_dump_and_the_program_goes_on(tmp_path: Path) -> None:
    """It says where; the exit code is the program's own."""
    kill = "os.kill(os.getpid(), signal.SIGUSR2); print('on'); context.close()"
    ended = run(tmp_path, "", kill)
    assert (ended.returncode, ended.stdout) == (0, "on\n")
    (path,) = tmp_path.iterdir()
    assert f"what rank 0 has done is in {path}" in ended.stderr
    header, record = map(json.loads, path.read_text().splitlines())
    assert header["reason"] == "somebody asked for it with SIGUSR2"
    assert record["what"] == "barrier"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="there is no such signal here")
def test_a_handler_of_the_programs_own_stays(tmp_path: Path) -> None:
    """A library takes nobody's signal away."""
    own = "signal.signal(signal.SIGUSR2, lambda *_: print('mine'))"
    ended = run(tmp_path, own, "os.kill(os.getpid(), signal.SIGUSR2); context.close()")
    assert ended.stdout == "mine\n"
    assert list(tmp_path.iterdir()) == []


def test_the_error_that_ends_a_program_leaves_a_dump(tmp_path: Path) -> None:
    """The traceback is as ever; before it one line says where to look."""
    ended = run(tmp_path, "", "context.close(); raise KeyError('butter')")
    assert ended.returncode == 1
    assert "KeyError: 'butter'" in ended.stderr
    (path,) = tmp_path.iterdir()
    assert f"what rank 0 did before is in {path}; `potluck trace` shows it" in ended.stderr
    header = json.loads(path.read_text().splitlines()[0])
    assert header["reason"] == "the program ended by KeyError: 'butter'"


def test_a_program_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    """Whatever its exit code: that is not an error."""
    assert run(tmp_path, "", "context.close(); sys.exit(3)").returncode == 3
    assert list(tmp_path.iterdir()) == []
