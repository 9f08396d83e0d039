"""`potluck run --resume`: after everybody has died, training goes on from what was saved."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from potluck.training.checkpoint import latest
from support.clusters import new_job
from support.command import started
from support.threads import PATIENCE, eventually

pytestmark = pytest.mark.slow

SCRIPT = """\
import os, sys, time
import numpy as np
import potluck

weights = np.zeros(64)
goal = int(sys.argv[1])


def apply(mean):
    weights[:] -= 0.1 * mean


options = dict(multicast=False, known=False, solo_delay=0.2, timeout=60)
with potluck.join(**options) as cluster:
    sampler = potluck.ElasticSampler(1000, seed=3)
    state = potluck.TrainingState(model=weights)
    trainer = potluck.ElasticTrainer(
        cluster, state, apply, sampler=sampler, batch=10, save_every=2
    )
    begun = trainer.step_count
    with trainer:
        while trainer.step_count < goal:
            trainer.take()
            time.sleep(0.01)
            trainer.step(weights - 1.0)
    print(f"from {begun} to {trainer.step_count}, {sampler.remaining} left, {weights[0]:.6f}")
"""


@pytest.mark.timeout(180)  # many interpreters start
def test_after_a_power_cut_another_number_of_workers_goes_on(tmp_path: Path) -> None:
    """Two workers are killed in the middle; three go on from the last complete checkpoint."""
    script, folder = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(SCRIPT)
    job = ("--nodes", "1", "--job", new_job(), "--checkpoints", str(folder))
    with started("run", *job, "--per-node", "2", str(script), "1000000") as first:
        eventually(lambda: getattr(latest(folder), "step", 0) >= 6, 2 * PATIENCE)
        cut(first)
    found = latest(folder, verify=True)
    assert found is not None
    assert found.world_size == 2
    goal = found.step + 5
    with started("run", *job, "--resume", "--per-node", "3", str(script), str(goal)) as second:
        said, notes = second.communicate(timeout=3 * PATIENCE)
    assert second.returncode == 0, notes
    resumed = [each for each in notes.splitlines() if "Resumed from" in each]
    assert len(resumed) == 3, notes  # a line for each worker
    for each in resumed:
        assert re.search(
            rf"Resumed from step {found.step} \(checkpoint of \d{{4}}-\d\d-\d\d ", each
        )
        assert each.endswith(f", folder {found.folder})")
    expected = 1 - 0.9**goal
    line = f"from {found.step} to {goal}, {1000 - 10 * goal % 1000} left, {expected:.6f}"
    assert said.count(line) == 3, said + notes
    again = latest(folder, verify=True)
    assert again is not None
    assert again.world_size == 3


def cut(process: subprocess.Popen[str]) -> None:
    """End a command and its workers at once, as a power cut does."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGSTOP)  # it must not tell the workers to end
    for each in family:
        each.kill()
    process.kill()
    psutil.wait_procs(family, timeout=10)
