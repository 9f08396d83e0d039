"""What README and quickstart tell two people to do, done on two machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import COMMAND
from support.hosts import Hosts
from support.pages import ROOT, blocks
from support.walkthrough import Walkthrough, steps_of

pytestmark = pytest.mark.netns

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def test_two_people_follow_the_readme_and_the_quickstart(tmp_path: Path) -> None:
    """They pair as the README says, and run its script and that of the quickstart."""
    (first,) = (block for block in blocks(README, "console") if "first$" in block)
    (second,) = blocks(QUICKSTART, "console")
    with Hosts("first second") as hosts:
        walk = Walkthrough(tmp_path, hosts, dict.fromkeys(hosts, [str(COMMAND)]))
        for machine in hosts:
            (walk.place(machine) / "hello.py").write_text(blocks(README, "python")[0])
            (walk.place(machine) / "train.py").write_text(blocks(QUICKSTART, "python")[0])
        steps = steps_of(first)
        assert [command.split()[1] for command in steps["first"]] == ["pair", "run"]
        for machine, commands in steps_of(second).items():
            pair, run = commands  # the same as in the README, but for the script
            assert pair == steps[machine][0]
            steps[machine].append(run)
        done = walk.follow(steps)
    for machine, all_steps in done.items():
        assert [step.exit_code for step in all_steps] == [0, 0, 0], all_steps
        assert len(all_steps) == len(steps[machine])
    said = "".join(step.output for step in done["first"] + done["second"])
    for rank in (0, 1):
        assert f"rank {rank} of 2 has [1.5 1.5 1.5 1.5]" in said
        assert f"rank {rank} of 2 found [ 2. -3.]" in said
