"""A node's process on its own: takes orders, tells news, and ends when it should."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.apps.cli.demo_messages import Failed, Leave, Listening, News, Setup
from potluck.apps.cli.demo_process import Event, NodeFailed, NodeProcess, environment, signals_held
from support.command import is_gone
from support.threads import PATIENCE


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
