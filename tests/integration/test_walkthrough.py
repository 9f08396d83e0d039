"""What README and quickstart tell people to do, done on several machines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from potluck.training.checkpoint import latest
from support.clusters import new_job
from support.command import COMMAND, started
from support.hosts import Hosts
from support.pages import ROOT, blocks
from support.threads import PATIENCE
from support.walkthrough import Walkthrough, steps_of

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def follow(folder: Path, page: str, machines: str) -> str:
    """Follow the commands of a page that name these machines; what was printed."""
    first, *_ = machines.split()
    shown = [each for each in blocks(page, "console") if f"{first}$" in each]
    printed = ""
    with Hosts(machines) as hosts:
        walk = Walkthrough(folder, page, hosts, {name: [str(COMMAND)] for name in hosts})
        for machine in hosts:
            (walk.place(machine) / "hello.py").write_text(blocks(page, "python")[0])
        for block in shown:
            steps = steps_of(block)
            assert set(steps) == set(hosts)
            for made in walk.follow(steps).values():
                assert all(step.exit_code == 0 for step in made), made
                printed += "".join(step.output for step in made)
    return printed


@pytest.mark.netns
def test_two_people_follow_the_readme(tmp_path: Path) -> None:
    """They pair and run the ten lines with two commands each."""
    printed = follow(tmp_path, README, "first second")
    for rank in (0, 1):
        assert f"rank {rank} of 2 has [1.5 1.5 1.5 1.5]" in printed


@pytest.mark.netns
@pytest.mark.timeout(180)  # four machines pair one after the other
def test_four_machines_follow_the_quickstart(tmp_path: Path) -> None:
    """A desktop admits three laptops, each with a new code; then all run the first script."""
    printed = follow(tmp_path, QUICKSTART, "desk anna ben cleo")
    for rank in range(4):
        assert f"rank {rank} of 4: " in printed
    assert printed.count("the sum is 10") == 4


@pytest.mark.timeout(180)  # interpreters start, with PyTorch
def test_the_training_script_of_the_quickstart_learns(tmp_path: Path) -> None:
    """As the page says, two processes on one machine run it; the loss falls."""
    script = tmp_path / "train.py"
    script.write_text(blocks(QUICKSTART, "python")[1], encoding="utf-8")
    options = ("run", "--nodes", "1", "--per-node", "2", "--job", new_job())
    variables = {"OMP_NUM_THREADS": "1"}
    with started(*options, str(script), variables=variables, folder=tmp_path) as run:
        printed, notes = run.communicate(timeout=4 * PATIENCE)
    assert run.returncode == 0, printed + notes
    losses = [float(loss) for loss in re.findall(r"step 200: loss (\S+)", printed)]
    assert len(losses) == 2
    assert max(losses) < 0.2
    saved = latest(tmp_path / "checkpoints", verify=True)
    assert saved is not None
    assert saved.step == 200
