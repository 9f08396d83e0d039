"""The benchmark of the flight recorder measures with and without it in one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recorder_overhead.py"


def test_the_cost_of_an_entry_is_told_as_a_share_of_the_call() -> None:
    """Beside the times of three groups side by side, and whether the bar is met."""
    command = [sys.executable, str(SCRIPT), "--rounds", "2", "--count", "5", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    facts = json.loads(result.stdout)
    assert facts["rounds"] == 2
    assert min(facts["seconds"].values()) > 0
    without = min(facts["seconds"]["without"], facts["seconds"]["without again"])
    assert abs(facts["share"] - facts["entry_seconds"] / without) < 1e-9
    assert facts["met"] is (facts["share"] <= facts["bar"] == 0.01)
