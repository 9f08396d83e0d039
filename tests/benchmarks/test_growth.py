"""What a large group costs does not grow faster than the group, and it forms in seconds."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import growth

SCRIPT = Path(growth.__file__)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_heartbeats_are_one_for_each_other_member(count: int) -> None:
    """In each interval, which is longer in larger groups."""
    row = growth.simulate(count)
    assert 0.7 * (count - 1) <= row["messages_per_interval"] <= 1.3 * (count - 1)
    assert row["formed"] <= growth.FORMED_64
    assert row["view_change"] <= 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_64_forms_in_five_seconds() -> None:
    """Of virtual time: each member says a few messages to each other one."""
    row = growth.simulate(64)
    assert row["formed"] <= growth.FORMED_64
    assert row["messages_to_form"] <= 20 * 63
    assert row["messages_per_interval"] <= 1.3 * 63


@pytest.mark.slow
def test_the_benchmark_measures_processes_and_draws(tmp_path: Path) -> None:
    """With figures for programs, and a picture that is one."""
    file = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--real", "2", "3", "--simulated", "2", "4"]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Real processes" in done.stdout
    found = json.loads(file.read_text())
    assert [row["members"] for row in found["real"]] == [2, 3]
    assert all(row["formed"] > 0 and row["threads_used"] > 1 for row in found["real"])
    picture = ET.fromstring(growth.draw(found))  # noqa: S314 - our own
    assert picture.tag.endswith("svg")


def test_what_is_not_as_wanted_is_said() -> None:
    """A benchmark that cannot fail says nothing."""
    row = {"members": 64, "formed": 5.5, "messages_per_interval": 130.0}
    assert [each["met"] for each in growth.verdicts([row])] == [False, False]
