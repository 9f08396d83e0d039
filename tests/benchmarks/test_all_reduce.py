"""The benchmark of collectives measures everybody in one run, checks the sums, leaves nothing."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from collectives.contenders import GLOO, PLAIN, SEALED
from collectives.memory import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, Memory
from collectives.places import EQUAL, LIMIT, LOOPBACK, UNEQUAL
from collectives.plan import Session
from collectives.report import rows
from collectives.targets import TARGETS, judge

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "all_reduce.py"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """What one round gives; its tables are kept under ``tables``."""
    file = folder / "figures.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--json", str(file), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert result.returncode == 0, result.stderr
    return {**json.loads(file.read_text()), "tables": result.stdout}


def of_kind(figures: dict[str, Any], collective: str) -> dict[str, Any]:
    """The one row of a collective."""
    (row,) = (row for row in figures["results"] if row["collective"] == collective)
    assert isinstance(row, dict)
    return row


@pytest.mark.soak
def test_all_take_part_in_all_collectives(tmp_path: Path) -> None:
    """Potluck in both ways and whoever is installed, each with its time and the ratios."""
    plot = tmp_path / "plot.svg"
    figures = bench(
        *(tmp_path, "--parts", "loopback,siblings", "--ranks", "2", "--sizes", "4KiB"),
        *("--plot", str(plot)),
    )
    wanted = {PLAIN, SEALED, GLOO, "Open MPI"} - set(figures["left_out"])
    for collective in COLLECTIVES:
        row = of_kind(figures, collective)
        assert set(row["median_seconds"]) == wanted
        assert row["world_size"] == (2 if collective == ALL_REDUCE else 4)
        medians = row["median_seconds"]
        for each in row["ratios"]:  # of one round
            assert each["ratio"] == pytest.approx(medians[each["against"]] / medians[each["of"]])
    assert "2 ranks, 4 KiB" in figures["tables"]
    assert ET.parse(plot).getroot().tag.endswith("svg")  # noqa: S314 - we wrote it


def test_the_background_and_the_memory_are_measured(tmp_path: Path) -> None:
    """As single figures with a bar each."""
    figures = bench(tmp_path, "--parts", "background,memory", "--ranks", "2", "--sizes", "512KiB")
    single = [each for each in figures["targets"] if "unit" in each]
    assert [each["unit"] for each in single] == ["B/s", "B/s", "B", "B"]
    assert all(each["value"] >= 0 for each in single)


@pytest.mark.soak
@pytest.mark.netns
def test_hosts_are_measured_beside_what_their_cables_allow(tmp_path: Path) -> None:
    """Equal cables and unequal ones; nobody is faster than the limit."""
    options = ("--parts", "hosts", "--sizes", "4MiB", "--sealed", "--peers", "none")
    figures = bench(tmp_path, *options)
    assert [row["place"] for row in figures["results"]] == [EQUAL, UNEQUAL]
    for row in figures["results"]:
        (ratio,) = row["ratios"]
        assert (ratio["of"], ratio["against"]) == (SEALED, LIMIT)
        # A little above: the emulated cables let a burst of 256 KB pass at once.
        assert 0 < ratio["ratio"] < 1.2


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrong_result_is_no_measurement(collective: str) -> None:
    """One wrong number ends the run."""
    memory = Memory.of(collective, 400, 1, 2)
    memory.fill()
    memory.target[:] = {ALL_REDUCE: 3, REDUCE_SCATTER: 3, BROADCAST: 7}.get(collective, 0)
    if collective == ALL_GATHER:
        memory.target[:50], memory.target[50:] = 1, 2
    if collective == ALL_TO_ALL:
        memory.target[:50], memory.target[50:] = 2, 4
    memory.check()
    memory.target[-1] += 1
    with pytest.raises(SystemExit, match="wrong"):
        memory.check()


def test_the_slowest_rank_and_the_worst_case_count() -> None:
    """A target is met only where every case of it is."""
    session = Session(LOOPBACK, 2, (PLAIN, GLOO), ())
    seen = [
        [_seen(4, mine=[1.0, 1.0, 1.0], theirs=[9.0, 9.0, 9.0]), _seen(1024, [1.0], [3.0])],
        [_seen(4, mine=[1.0, 9.0, 2.0], theirs=[4.0, 4.0, 4.0]), _seen(1024, [2.0], [1.0])],
    ]
    made = rows(session, seen)
    assert [row["ratios"][0]["ratio"] for row in made] == [4.5, 1.5]
    judged = judge(made, [])
    assert len(judged) == len(TARGETS)
    first = judged[0]
    assert (first["met"], first["cases"], first["cases_met"]) == (False, 2, 1)
    assert first["reached"] == "1.50 × (2 ranks, 1 KiB)"
    assert {each["met"] for each in judged[1:]} == {None}


def _seen(octets: int, mine: list[float], theirs: list[float]) -> dict[str, Any]:
    return {
        "octets": octets,
        "rounds": len(mine),
        "collective": ALL_REDUCE,
        "seconds": {PLAIN: mine, GLOO: theirs},
        "plans": {PLAIN: "ring"},
    }
