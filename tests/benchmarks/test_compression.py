"""The benchmarks of compression run, check their sums, and leave nothing behind."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import convergence

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


def bench(folder: Path, name: str, *arguments: str) -> Any:
    """The figures of a quick run."""
    file = folder / "figures.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json", str(file)]
    result = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=55
    )
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text())


def test_encoders_and_loopback_are_measured(tmp_path: Path) -> None:
    """Every method with its speed, and what it gains beside the uncompressed."""
    figures = bench(tmp_path, "compression", "--parts", "encoders,loopback")
    assert {"int8", "topk:0.01", "bfloat16"} <= {row["method"] for row in figures["encoders"]}
    assert all(row["encode_gbs"] > 0 for row in figures["encoders"])
    rows = {row["method"]: row for row in figures["loopback"]}
    assert rows["none"]["speedup"] == 1.0
    assert rows["none"]["error"] < 1e-6
    assert 1e-6 < rows["bfloat16"]["error"] < rows["int8"]["error"] < 0.01


@pytest.mark.netns
def test_hosts_are_measured_too(tmp_path: Path) -> None:
    """Cables are where compression pays."""
    figures = bench(tmp_path, "compression", "--parts", "fast")
    rows = {row["method"]: row for row in figures["fast"]}
    assert rows["int8"]["speedup"] > 1.0


@pytest.mark.soak
def test_the_study_of_convergence_draws_its_curves(tmp_path: Path) -> None:
    """With feedback and without."""
    plot = tmp_path / "plot.svg"
    rows = bench(tmp_path, "convergence", "--plot", str(plot))
    assert [(row["method"], row["feedback"]) for row in rows][:3] == [
        ("none", False),
        ("int8", True),
        ("int8", False),
    ]
    assert ET.parse(plot).getroot().tag.endswith("svg")  # noqa: S314 - we wrote it


@pytest.mark.soak
def test_what_is_left_behind_arrives_with_feedback() -> None:
    """The loss falls; less is missing in the end than without feedback."""
    kept, lost = (convergence.train("int8", 0, 25, has_feedback=has) for has in (True, False))
    assert kept.loss < 0.95 * kept.curve[0][1]
    assert kept.missing < lost.missing < 0.01
