"""The demo's model: everything follows from the seed, the gradient is right, and it learns."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from potluck.apps.cli.demo_messages import Failed, Leave, Listening, News, Setup
from potluck.apps.cli.demo_node import Array, Model, spirals
from potluck.apps.cli.demo_story import Event, NodeFailed, NodeProcess, environment, signals_held
from support.command import is_gone
from support.threads import PATIENCE


def total_loss(model: Model, points: Array, labels: Array) -> float:
    """The summed loss."""
    return model.gradient(points, labels, np.empty(model.size, points.dtype))


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
    gradient = np.empty(model.size)
    model.gradient(points, labels, gradient)
    parameters = model.state[0]
    slopes = np.empty(model.size)
    for index in range(model.size):
        before = parameters[index]
        sides = []
        for change in (1e-6, -1e-6):
            parameters[index] = before + change
            sides.append(total_loss(model, points, labels))
        parameters[index] = before
        slopes[index] = (sides[0] - sides[1]) / 2e-6
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=1e-7)


def test_shards_add_up_to_the_whole() -> None:
    """What the ranks compute for their own points sums to the gradient for all."""
    points, labels = spirals(30, seed=2, dtype=np.float64)
    model = Model(seed=2, hidden=4, dtype=np.float64)
    whole = np.empty(model.size)
    loss = model.gradient(points, labels, whole)
    total, total_of_losses = np.zeros(model.size), 0.0
    for rank in range(4):
        part = np.empty(model.size)
        total_of_losses += model.gradient(points[rank::4], labels[rank::4], part)
        total += part
    np.testing.assert_allclose(total, whole, rtol=1e-12)
    assert total_of_losses == pytest.approx(loss)


def test_it_learns() -> None:
    """Steps against the gradient lower the loss and raise the accuracy on other points."""
    points, labels = spirals(400, seed=5)
    unseen = spirals(200, seed=6)
    model = Model(seed=5, hidden=32)
    gradient = np.empty(model.size, np.float32)
    losses = []
    first_accuracy = model.accuracy(*unseen)
    for _ in range(600):
        losses.append(model.gradient(points, labels, gradient))
        model.update(gradient / np.float32(400))
    assert model.tree["steps"].tolist() == [600]
    assert losses[-1] < losses[0] / 2
    assert model.accuracy(*unseen) > first_accuracy


def test_the_loss_of_a_batch_is_that_of_its_points() -> None:
    """The mean loss at the end is measured like the loss on the way."""
    points, labels = spirals(40, seed=3)
    model = Model(seed=3, hidden=8)
    assert model.loss(points, labels) == pytest.approx(total_loss(model, points, labels) / 40)


def test_one_bit_changes_the_fingerprint() -> None:
    """Equal fingerprints mean equal parameters."""
    one, other = Model(seed=3, hidden=4), Model(seed=3, hidden=4)
    assert one.fingerprint == other.fingerprint
    other.state[0][-1] = np.nextafter(other.state[0][-1], np.float32(1))
    assert one.fingerprint != other.fingerprint


def test_a_confident_mistake_overflows_nothing() -> None:
    """A huge score is still a finite loss."""
    points, labels = spirals(4, seed=1)
    model = Model(seed=1, hidden=4)
    model.state[0] = 1e4
    gradient = np.empty(model.size, np.float32)
    with np.errstate(over="ignore"):
        loss = model.gradient(points, labels, gradient)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


# --------------------------------------------------------------------------------------------------
# A node's process on its own: takes orders, tells news, and ends when it should.


class Node:
    """A process, and what it tells."""

    def __init__(self, home: Path) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.process = NodeProcess("basil", home, self.events)

    def news(self) -> News | None:
        """The next thing it tells."""
        return self.events.get(timeout=PATIENCE)[1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node that has just been started."""
    node = Node(tmp_path)
    yield node
    node.process.close()
    assert is_gone(node.process.pid)


def test_a_killed_process_is_explained_by_its_signal(node: Node) -> None:
    """The error names node, process and signal; an order to it is harmless."""
    os.kill(node.process.pid, signal.SIGKILL)
    assert node.news() is None
    node.process.order(Leave())
    error = node.process.explain_end()
    assert f"(pid {node.process.pid}) is gone: it was ended by the signal SIGKILL" in str(error)


def test_what_fails_in_a_node_is_told_with_its_traceback(node: Node) -> None:
    """Words for people, and where it comes from for whoever repairs it."""
    node.process.order(Leave())  # nobody has told it who it is
    said = node.news()
    assert isinstance(said, Failed)
    assert said.text == "TypeError: The first order says who one is, unlike Leave()"
    error = node.process.explain_end(said)
    assert isinstance(error, NodeFailed)
    assert said.text in str(error)
    assert error.trace.startswith("Traceback (most recent call last)")
    assert node.news() is None


def test_it_ends_when_its_orders_end(node: Node) -> None:
    """Whatever it does at the moment: the demo that started it is gone."""
    node.process.order(
        Setup(name="basil", secret="00" * 32, nodes=2, seed=0, steps=1, pace=0.0, multicast=False)
    )
    while not isinstance(node.news(), Listening):
        pass
    assert node.process._process.stdin is not None
    node.process._process.stdin.close()
    while node.news() is not None:
        pass
    assert node.process._process.wait(PATIENCE) == 1


def test_a_line_that_is_no_news_is_a_failure(node: Node) -> None:
    """Nothing that a process writes by mistake is taken for news."""
    read, write = os.pipe()
    os.write(write, b"hello\n")
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        node.process._read_news(pipe, node.events)
    assert node.news() == Failed(r"it wrote b'hello\n', which is no news")
    assert "still runs" in str(node.process.explain_end())


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


def test_a_signal_waits_until_a_process_is_somebodys() -> None:
    """One that comes while a node is started ends the demo afterwards, not in between."""
    happened: list[str] = []
    before = signal.signal(signal.SIGHUP, lambda *_: happened.append("told"))
    try:
        with signals_held():
            signal.raise_signal(signal.SIGHUP)
            happened.append("started")
        assert happened == ["started", "told"]
        signal.raise_signal(signal.SIGHUP)
        assert happened[2:] == ["told"]  # as before
    finally:
        signal.signal(signal.SIGHUP, before)
