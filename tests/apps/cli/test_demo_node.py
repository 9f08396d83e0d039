"""The demo's model: everything follows from the seed, the gradient is right, and it learns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from potluck.apps.cli.demo_node import Model, spirals
from potluck.apps.cli.demo_story import Node, NodeFailed, environment
from support.command import is_gone
from support.threads import PATIENCE


def test_the_seed_decides_everything() -> None:
    """All ranks make the same data and the same first parameters on their own."""
    assert all(map(np.array_equal, spirals(50, seed=3), spirals(50, seed=3)))
    assert not np.array_equal(spirals(50, seed=3)[0], spirals(50, seed=4)[0])
    assert np.array_equal(Model(seed=3).state, Model(seed=3).state)
    assert not np.array_equal(Model(seed=3).state, Model(seed=4).state)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Compared with what a small change of each parameter does."""
    points, labels = spirals(8, seed=1, dtype=np.float64)
    model = Model(seed=1, hidden=4, dtype=np.float64)
    _, gradient, _ = model.learn(points, labels)
    parameters = model.state[0]
    slopes = np.empty(model.size)
    for index in range(model.size):
        before = parameters[index]
        sides = []
        for change in (1e-6, -1e-6):
            parameters[index] = before + change
            sides.append(model.learn(points, labels)[0])
        parameters[index] = before
        slopes[index] = (sides[0] - sides[1]) / 2e-6
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-7)


def test_shards_add_up_to_the_whole() -> None:
    """What the ranks compute for their own points sums to the gradient for all."""
    points, labels = spirals(30, seed=2, dtype=np.float64)
    model = Model(seed=2, hidden=4, dtype=np.float64)
    total = np.zeros(model.size)
    for rank in range(4):
        total += model.learn(points[rank::4], labels[rank::4])[1]
    np.testing.assert_allclose(total, model.learn(points, labels)[1], rtol=1e-12)


def test_it_learns() -> None:
    """Steps against the gradient lower the loss and raise the accuracy on other points."""
    points, labels = spirals(400, seed=5)
    unseen = spirals(200, seed=6)
    model = Model(seed=5, hidden=32)
    first_loss, first_accuracy = model.learn(points, labels)[0], model.learn(*unseen)[2]
    for _ in range(600):
        model.update(model.learn(points, labels)[1] / np.float32(400))
    assert model.steps.tolist() == [600]
    assert model.learn(points, labels)[0] < first_loss / 2
    assert model.learn(*unseen)[2] > first_accuracy


def test_a_node_without_samples_has_no_loss() -> None:
    """A batch that is smaller than the number of nodes leaves one without any."""
    model = Model(seed=3, hidden=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would stand in the middle of the demo's picture
        loss, gradient, right = model.learn(*spirals(0, seed=3))
    assert (loss, right) == (0, 0)
    assert not gradient.any()


def test_a_confident_mistake_overflows_nothing() -> None:
    """A huge score is still a finite loss."""
    points, labels = spirals(4, seed=1)
    model = Model(seed=1, hidden=4)
    model.state[0] = 1e4
    with np.errstate(over="ignore"):
        loss, gradient, _ = model.learn(points, labels)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


# --------------------------------------------------------------------------------------------------
# The process of a node on its own: what it prints is read, and it ends when it should.

SETTINGS = {
    "join": {"port": 0, "peers": ["127.0.0.1:9"], "multicast": False, "known": False},
    "seed": 0,
    "steps": 4,
    "view": 1,
    "pace": 0.0,
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node that waits for another one."""
    variables = environment(tmp_path / "home", name="basil", job="demo", min_nodes="2")
    command = [sys.executable, "-m", "potluck.apps.cli.demo_node", json.dumps(SETTINGS)]
    with (tmp_path / "basil.out").open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=output)
    yield Node("basil", process, tmp_path / "basil.out")
    process.kill()
    process.communicate()
    assert is_gone(process.pid)


def test_half_a_line_is_read_when_it_is_whole(node: Node) -> None:
    """The demo may look while a node writes; each line is read once."""
    step = {"run": "story", "step": 3, "loss": 0.5}
    text = json.dumps(step)
    with node.output.open("a") as output:
        output.write(text[:9])
        output.flush()
        assert list(node.read()) == []
        output.write(text[9:] + "\n")
    assert list(node.read()) == [step]
    assert list(node.read()) == []
    assert node.steps == [step]


def test_a_killed_process_is_explained_by_its_signal(node: Node) -> None:
    """The error names node, process and signal."""
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait(PATIENCE)
    cause = rf"The demo's node basil \(pid {node.process.pid}\) ended unexpectedly.*signal SIGKILL"
    with pytest.raises(NodeFailed, match=cause):
        list(node.read())


def test_a_node_ends_when_the_demo_has_ended(node: Node) -> None:
    """Whatever it does at the moment: its standard input ends with the demo."""
    assert node.process.stdin is not None
    node.process.stdin.close()
    assert node.process.wait(PATIENCE) == 1


def test_nothing_that_sets_up_the_users_clusters_reaches_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its namespace, peers and launchers are not the demo's; which interfaces may be used is."""
    for name in ("POTLUCK_NAMESPACE", "POTLUCK_PEERS", "RANK", "MASTER_ADDR", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("POTLUCK_INTERFACES", "eth0")
    given = environment(tmp_path)
    assert given["POTLUCK_HOME"] == str(tmp_path)
    assert given["POTLUCK_INTERFACES"] == "eth0"
    kept = {name for name in given if name.startswith(("POTLUCK_", "SLURM_", "RANK", "MASTER_"))}
    assert kept == {"POTLUCK_HOME", "POTLUCK_INTERFACES"}
