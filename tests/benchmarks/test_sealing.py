"""The benchmark of encryption measures both sides in one run and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sealing.py"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one round gives; its table is kept under ``table``."""
    file = tmp_path_factory.mktemp("sealing") / "figures.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert result.stderr == ""
    return {**json.loads(file.read_text()), "table": result.stdout}


@pytest.mark.soak
def test_every_case_has_both_sides_and_their_ratio(figures: dict[str, Any]) -> None:
    """One way and both ways, from 1 to 64 MiB."""
    rows = [row for row in figures["results"] if row["place"] == "loopback"]
    assert {(row["mebibytes"], row["both_ways"]) for row in rows} == {
        (size, both) for size in (1, 4, 16, 64) for both in (False, True)
    }
    for row in figures["results"]:
        assert row["ratio"] == pytest.approx(row["sealed"] / row["plain"])
        assert row["met"] is (row["ratio"] >= row["bar"])
        assert row["bar"] == {"loopback": 0.6, "1 Gbit/s": 0.97}[row["place"]]
    assert "64 MiB one way" in figures["table"]


@pytest.mark.soak
@pytest.mark.netns
def test_two_hosts_on_a_cable_are_measured_too(figures: dict[str, Any]) -> None:
    """The cable is the limit there: neither side is faster than it."""
    rows = [row for row in figures["results"] if row["place"] == "1 Gbit/s"]
    assert figures["left_out"] == ""
    assert len(rows) == 4
    for row in rows:
        most = 125e6 * (2 if row["both_ways"] else 1)
        assert 0 < row["plain"] < 1.1 * most
        assert 0 < row["sealed"] < 1.1 * most
