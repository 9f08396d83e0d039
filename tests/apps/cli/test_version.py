"""``potluck version`` says what is installed."""

import json
import platform

import potluck as library
from support.command import potluck


def test_the_version_is_one_line() -> None:
    """What a bug report needs fits on one line, also as the flag everybody tries first."""
    result = potluck("version")
    assert result.returncode == 0
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith(f"potluck {library.__version__} ")
    assert potluck("--version").stdout == result.stdout


def test_the_version_for_a_program_is_json() -> None:
    """The same facts under names."""
    facts = json.loads(potluck("version", "--json").stdout)
    assert facts["potluck"] == library.__version__
    assert facts["python"] == platform.python_version()
    assert facts["protocol"] >= 1
