"""MpiBackend: real ranks, started by mpirun."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from potluck import BackendUnavailable, MpiBackend
from support.command import environment

pytestmark = pytest.mark.slow

SUITE = Path(__file__).parents[1] / "support" / "engine_suite.py"
OPTIONS = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self"]


def test_everything_works_over_mpi() -> None:
    """The same suite as over TCP and Gloo, by four ranks."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("ranks of MPI need the program mpirun")
    result = subprocess.run(
        [mpirun, *OPTIONS, "-n", "4", sys.executable, str(SUITE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
        env=environment({"PYTHONPATH": str(SUITE.parents[1])}),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("everything was right") == 4


def test_without_mpi_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has not installed the extra."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailable, match=r"potluck\[mpi\]"):
        MpiBackend()
