"""The benchmark of remote calls measures every system in one run and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rpc.py"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What one round gives."""
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", "-"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=55)
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


@pytest.mark.soak
def test_every_case_has_all_systems_that_are_installed(figures: dict[str, Any]) -> None:
    """And says which are not."""
    rows = figures["results"]
    assert [row["unit"] for row in rows] == ["s", "calls/s", "B/s"]
    names = {"potluck", "potluck, TLS", "torch", "gRPC", "ZeroMQ"} - set(figures["missing"])
    assert {"potluck", "potluck, TLS", "torch"} <= names
    for row in rows:
        assert all(row[name] > 0 for name in names)
    assert {"potluck", "potluck, TLS"} <= figures["beside"].keys()


@pytest.mark.soak
def test_the_bars_are_reported_beside_the_figures(figures: dict[str, Any]) -> None:
    """A bar says what is wanted; whether it is met changes nothing about the exit code."""
    bars = {(bar["case"], bar["beside"]): bar for bar in figures["bars"]}
    assert bars["64 B echo, p50", "torch"]["bar"] == 0.8
    assert bars["64 B echo, 64 in flight", "torch"]["bar"] == 1.0
    for bar in figures["bars"]:
        better = bar["ratio"] <= bar["bar"] if "p50" in bar["case"] else bar["ratio"] >= bar["bar"]
        assert bar["met"] is better
