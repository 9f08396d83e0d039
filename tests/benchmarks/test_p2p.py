"""The point-to-point benchmark measures both sides in one run and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "p2p.py"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What one round gives."""
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert result.stderr == ""
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_every_case_has_both_sides_and_their_ratio(figures: dict[str, Any]) -> None:
    """Small round trips and large messages, one way and both ways."""
    rows = figures["results"]
    assert {row["case"] for row in rows} == {"round trip", "one way", "both ways"}
    for row in rows:
        assert row["bare"] > 0
        assert row["ratio"] == pytest.approx(row["potluck"] / row["bare"])


def test_the_bars_are_reported_beside_the_figures(figures: dict[str, Any]) -> None:
    """A bar says what is wanted; whether it is met changes nothing about the exit code."""
    bars = {
        (row["case"], row["size_bytes"], row["figure"]): row["bar"] for row in figures["results"]
    }
    assert bars["round trip", 64, "p50"] == 1.5
    assert all(bars["one way", mebibytes << 20, "rate"] == 0.8 for mebibytes in (1, 16, 64))
    for row in figures["results"]:
        if row["bar"] is not None:
            better = (
                row["ratio"] <= row["bar"] if row["unit"] == "s" else row["ratio"] >= row["bar"]
            )
            assert row["met"] is better


def test_a_table_is_printed_and_a_file_written(tmp_path: Path) -> None:
    """For people and for machines at once."""
    file = tmp_path / "p2p.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert "64 B round trip, p50" in result.stdout
    assert "64 MiB one way" in result.stdout
    assert json.loads(file.read_text())["rounds"] == 1
