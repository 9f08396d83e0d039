"""PyTorch's own tests of ``torch.distributed``: what passes on Gloo passes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PASSED = TESTS / "support" / "torch_suite_passed.txt"
"""What passes on Gloo and here, in PyTorch 2.13 without CUDA."""

LONGEST = 3000  # seconds for the whole suite on one backend; it takes about four minutes


FOR_MPI = [
    f"test_all_to_all{kind}{where}"
    for kind in ("", "_single_equal_split", "_single_unequal_split")
    for where in ("", "_complex", "_full_group")
]
"""Tests on the CPU that the suite leaves to MPI."""


def outcomes(backend: str, *tests: str) -> dict[str, dict[str, Any]]:
    """What becomes of every test of the suite on a backend."""
    done = subprocess.run(
        [sys.executable, "-m", "support.torch_suite", backend, *tests],
        cwd=TESTS,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=LONGEST,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["test"]: result for result in results}


@pytest.mark.soak
@pytest.mark.timeout(2 * LONGEST)
def test_all_that_passes_on_gloo_passes_here() -> None:
    """Test by test, with three ranks; skips by the name of the backend are lifted."""
    theirs, ours = outcomes("gloo"), outcomes("potluck")
    assert theirs.keys() == ours.keys()
    passed = {name for name, result in theirs.items() if result["outcome"] == "passed"}
    assert len(passed) > 80
    recorded = set(PASSED.read_text(encoding="utf-8").split())
    if torch.__version__.startswith("2.13."):
        assert passed == recorded
    missing = {name: ours[name]["why"] for name in passed if ours[name]["outcome"] != "passed"}
    assert missing == {}


@pytest.mark.soak
@pytest.mark.timeout(LONGEST)
def test_what_is_left_to_mpi_passes_too() -> None:
    """Gloo is spared these tests, by name."""
    found = outcomes("potluck:mpi", *FOR_MPI)
    assert {
        name: result["why"] for name, result in found.items() if result["outcome"] != "passed"
    } == {}
    assert len(found) == 9
