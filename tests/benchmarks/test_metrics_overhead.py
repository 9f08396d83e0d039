"""The benchmark of the metrics' overhead measures all three groups in one run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "metrics_overhead.py"


def test_the_overhead_is_reported_beside_its_bar_and_the_noise() -> None:
    """The bar says what is wanted; whether a short run meets it changes nothing."""
    command = [sys.executable, str(SCRIPT), "--rounds", "2", "--count", "5", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert result.stderr == ""
    facts = json.loads(result.stdout)
    assert set(facts["seconds"]) == {"without", "with", "without again"}
    assert all(seconds > 0 for seconds in facts["seconds"].values())
    assert facts["bar"] == 0.02
    assert facts["met"] == (facts["overhead"] <= facts["bar"])
    assert facts["noise"] >= 0
    assert facts["rounds"] == 2
    assert 0 < facts["counting_seconds"] < 1e-3
    assert facts["size_bytes"] == pytest.approx(4096)
