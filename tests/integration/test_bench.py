"""``potluck bench`` between machines: two emulated ones, a cable of known rate between them."""

import json
import subprocess
from pathlib import Path

import pytest

from support.command import COMMAND
from support.hosts import Hosts
from support.paired_hosts import pair, variables
from support.threads import PATIENCE

pytestmark = pytest.mark.slow

RATE = 200_000_000 / 8  # bytes per second of the cable


@pytest.mark.netns
def test_two_machines_measure_the_cable_between_them(tmp_path: Path) -> None:
    """Both say the same: the cable's rate, that compression pays on it, and who is missing."""
    with Hosts("alpha beta gamma", rate="200mbit") as hosts:
        alpha, beta, gamma = hosts.values()
        pair(tmp_path, alpha, gamma)
        pair(tmp_path, alpha, beta)
        early = subprocess.run(
            beta.command([str(COMMAND), "bench", "--timeout", "2"]),
            capture_output=True,
            check=False,
            text=True,
            env=variables(tmp_path, beta),
            timeout=PATIENCE,
        )
        assert early.returncode == 3
        assert early.stderr.endswith(
            "potluck: Gave up after 2 s: 1 of 3 came (beta); missing: alpha, gamma. "
            "Run `potluck bench` there as well.\n"
        )
        runs = [
            subprocess.Popen(
                host.command([str(COMMAND), "bench", "--nodes", "2", "--quick", "--json"]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables(tmp_path, host),
            )
            for host in (alpha, beta)
        ]
        told = [run.communicate(timeout=PATIENCE) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    facts = [json.loads(said) for said, _ in told]
    assert [each.pop("absent") for each in facts] == [["gamma"], ["gamma"]]
    assert facts[0] == facts[1]
    assert sorted(facts[0]["nodes"]) == ["alpha", "beta"]
    for link in facts[0]["links"]:
        assert RATE / 2 < link["bytes_per_second"] < RATE * 1.1
    choice = facts[0]["compression"]["choice"]
    assert not choice.startswith("none")
    methods = {each["name"]: each["predicted"] for each in facts[0]["compression"]["methods"]}
    assert methods["int8"] < methods["none"] / 2
