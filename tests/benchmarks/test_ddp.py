"""The benchmark of training steps runs, and both contenders learn the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ddp.py"


@pytest.mark.soak
def test_a_step_is_measured_beside_gloo(tmp_path: Path) -> None:
    """A quick run gives a ratio, computing and sums apart, and weights that do not differ."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--parts", "small", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert row["ratio"] > 0
    assert row["hidden"].keys() == {"Gloo", "potluck"}
    apart = {"computing", "sums Gloo", "sums potluck"}
    assert row["median_seconds"].keys() == {"Gloo", "potluck"} | apart
    assert row["processor_seconds"].keys() == row["median_seconds"].keys()
    assert all(seconds > 0 for seconds in row["processor_seconds"].values())
    assert row["difference"] < 1e-5
    assert "What is wanted" in result.stdout
    verdict = [f"{row['ratio']:.2f}", "met" if row["met"] else "missed"]
    assert verdict in [line.split()[-2:] for line in result.stdout.splitlines()]
