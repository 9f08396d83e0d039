"""The runner behind `make bench` runs every benchmark and hides no failure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the runner, two benchmarks and a helper that is none."""
    shutil.copy(RUNNER, tmp_path)
    (tmp_path / "apples.py").write_text("import sys; print('apples', sys.argv[1:])")
    (tmp_path / "pears.py").write_text("import sys; print('pears'); sys.exit('--fail' in sys.argv)")
    (tmp_path / "_helper.py").write_text("print('a helper was run')")
    return tmp_path


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the runner in this folder does with these arguments."""
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_benchmarks_run_with_the_options_passed_on(folder: Path) -> None:
    """Without a name all scripts run in order, helpers and the runner itself excepted."""
    result = bench(folder, "--quick")
    assert result.returncode == 0
    assert result.stdout.split("\n") == [
        *("== apples", "apples ['--quick']", "== pears", "pears", ""),
    ]


def test_only_the_named_benchmarks_run(folder: Path) -> None:
    """A name selects."""
    assert bench(folder, "pears").stdout == "== pears\npears\n"


def test_a_failing_benchmark_is_reported_at_the_end(folder: Path) -> None:
    """The others still run, and the exit code tells."""
    result = bench(folder, "--fail", "pears", "apples")
    assert result.returncode == 1
    assert "== apples" in result.stdout
    assert result.stdout.endswith("Failed: pears\n")


def test_an_unknown_benchmark_is_an_error(folder: Path) -> None:
    """A typing error does not look like success, and the names that exist are shown."""
    result = bench(folder, "plums")
    assert result.returncode == 2
    assert "There are: apples, pears" in result.stdout


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    """Nothing to measure is not a success."""
    shutil.copy(RUNNER, tmp_path)
    assert bench(tmp_path).returncode == 2
