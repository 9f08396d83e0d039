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


def test_two_people_follow_the_quickstart(tmp_path: Path) -> None:
    """They pair and train with two commands each; the README shows the same with its own script."""
    (block,) = blocks(QUICKSTART, "console")
    steps = steps_of(block)
    (shown,) = (each for each in blocks(README, "console") if "first$" in each)
    assert steps_of(shown.replace("hello.py", "train.py")) == steps
    with Hosts("first second") as hosts:
        walk = Walkthrough(tmp_path, hosts, {name: [str(COMMAND)] for name in hosts})
        for machine in hosts:
            (walk.place(machine) / "train.py").write_text(blocks(QUICKSTART, "python")[0])
        done = walk.follow(steps)
    said = ""
    for machine, made in done.items():
        assert [step.exit_code for step in made] == [0, 0], made
        assert len(made) == len(steps[machine])
        said += "".join(step.output for step in made)
    for rank in (0, 1):
        assert f"rank {rank} of 2 found [ 2. -3.]" in said
