"""Machines with different builds of Potluck work together, or say why not, and lose nothing."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from potluck._version import OLDEST_PROTOCOL, PROTOCOL, THIS_BUILD
from support.builds import another_build, environment
from support.homes import Home, pair
from support.hosts import Hosts
from support.ports import free_port
from support.threads import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(12 * PATIENCE)]

TRAIN = """
import contextlib
import json
import os
import sys
import time
import numpy as np
import potluck
from potluck import ElasticTrainer, RpcAgent, TrainingState

weights = np.zeros(4)

def apply(mean):
    weights[:] -= 0.001 * mean

with (
    potluck.join(min_nodes=int(sys.argv[1]), job="train", timeout=120) as cluster,
    RpcAgent(cluster) as agent,
    ElasticTrainer(
        cluster, TrainingState(model=weights), apply, checkpoints=sys.argv[2], save_every=10
    ) as trainer,
):
    agent.register("build", lambda _: potluck.__version__.encode())
    while True:
        outcome = trainer.step(weights - 1.0)
        said = {"step": outcome.step, "size": cluster.world_size, "epoch": cluster.view.epoch}
        if outcome.step % 10 == 0:
            with contextlib.suppress(potluck.DistributedError):
                other = (cluster.rank + 1) % cluster.world_size
                said["called"] = agent.rpc_sync(other, "build", b"", timeout=5).decode()
        os.write(1, (json.dumps(said) + "\\n").encode())  # a log may come from another thread
        time.sleep(0.02)
"""


class Builds(NamedTuple):
    """What machines are upgraded to; None is the build under test."""

    later: Path
    """It also speaks our protocol."""
    newest: Path
    """It does not any more."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Two later builds: one changed compatibly, with a new field in a message, and one not."""
    folder = tmp_path_factory.mktemp("builds")
    added = 'class Sync(Opening, frozen=True, omit_defaults=True, tag="sync"):'
    last = '    """Grows with every start on that machine."""\n'
    renamed = (added, added.replace('tag="sync"', 'tag="agree"'))
    later = another_build(
        folder / "later",
        "0.2.0",
        protocol=PROTOCOL + 1,
        oldest=OLDEST_PROTOCOL,
        changes={"wire_messages.py": (last, last + '    mood: Tag = "new"\n')},
    )
    newest = another_build(
        folder / "newest",
        "0.3.0",
        protocol=PROTOCOL + 2,
        oldest=PROTOCOL + 2,
        changes={"wire_messages.py": renamed},
    )
    return Builds(later, newest)


class Running:
    """A process of some build, and what it has printed so far."""

    def __init__(
        self, command: Sequence[str], home: Path, build: Path | None, **variables: str
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(build, POTLUCK_HOME=str(home), **variables),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    @property
    def said(self) -> list[dict[str, Any]]:
        """The lines in JSON."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def wait_for(self, words: str, seconds: float = PATIENCE) -> str:
        """Wait until a line with these words has come."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: any(words in line for line in self.lines), seconds)
        assert any(words in line for line in self.lines), self.lines[-20:]
        return next(line for line in self.lines if words in line)

    def follow(self, size: int, steps: int = 10) -> int:
        """Wait for steps with this many members; the last step."""
        seen = len(self.said)

        def done() -> bool:
            return [each["size"] for each in self.said[seen:]].count(size) >= steps

        with contextlib.suppress(AssertionError):
            eventually(lambda: done() or self.process.poll() is not None, PATIENCE)
        assert done(), self.lines[-20:]
        return int(self.said[-1]["step"])

    def stop(self) -> None:
        """End it, as closing the terminal does."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)


class Machines:
    """Hosts that are paired with each other, on which builds run."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder = folder
        self.hosts = hosts
        first, *others = (Home(folder, name) for name in hosts)
        for other in others:
            pair(first, other)
        self._stack = contextlib.ExitStack()

    def run(self, name: str, build: Path | None, *arguments: str) -> Running:
        """Start a Python program on a host."""
        command = self.hosts[name].command([sys.executable, *arguments])
        running = Running(command, self.folder / name, build)
        self._stack.callback(running.stop)
        return running

    def train(self, name: str, build: Path | None, wanted: int = 1) -> Running:
        """Start the training there."""
        checkpoints = self.folder / f"checkpoints of {name}"
        return self.run(name, build, "-c", TRAIN, str(wanted), str(checkpoints))

    def ask(self, name: str, build: Path | None, *arguments: str) -> str:
        """What a command says there."""
        running = self.run(name, build, "-m", "potluck", *arguments)
        running.process.wait(PATIENCE)
        running.stop()
        return re.sub(r"\s+", " ", "\n".join(running.lines))

    def close(self) -> None:
        """End all programs."""
        self._stack.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Three hosts of one group."""
    with Hosts("attic desk nas") as hosts, contextlib.closing(Machines(tmp_path, hosts)) as found:
        yield found


@pytest.mark.netns
def test_machines_are_upgraded_one_at_a_time(machines: Machines, builds: Builds) -> None:
    """The training goes on, and everybody can see which machine has which version."""
    names = list(machines.hosts)
    running = {name: machines.train(name, None, wanted=3) for name in names}
    last = max(each.follow(3) for each in running.values())
    for number, name in enumerate(names):
        running[name].stop()
        others = [running[each] for each in names if each != name]
        for other in others:
            other.follow(2, steps=5)
        running[name] = machines.train(name, builds.later)
        step = min([each.follow(3) for each in running.values()])
        assert step > last
        last = step
        if number == 0:
            old = f"desk and nas run {THIS_BUILD}" if name == "attic" else ""
            for teller, build in (("attic", builds.later), ("desk", None)):
                told = machines.ask(teller, build, "status")
                assert f"{old}, attic Potluck 0.2.0 (protocols 1 to 2)" in told
                assert "They work together; to upgrade desk and nas, type `pip install" in told
                assert "Potluck 0.2.0" in machines.ask(teller, build, "members")
                doctor = machines.ask(teller, build, "doctor")
                assert "Potluck 0.2.0 (protocols 1 to 2)" in doctor
    called = {said.get("called") for each in running.values() for said in each.said}
    assert called >= {"0.2.0"}
    assert "They work together" not in machines.ask("nas", builds.later, "status")


@pytest.mark.netns
def test_a_build_that_cannot_work_with_the_others_does_not_disturb_them(
    machines: Machines, builds: Builds
) -> None:
    """Both sides say which machine to upgrade, within seconds; when it is, it comes in."""
    desk, nas = (machines.train(name, None, wanted=2) for name in ("desk", "nas"))
    desk.follow(2)
    epoch = desk.said[-1]["epoch"]
    began = time.monotonic()
    attic = machines.train("attic", builds.newest)
    theirs = "Potluck 0.3.0 (protocol 3)"
    for name, running in (("desk", desk), ("nas", nas)):
        said = running.wait_for("they cannot work together")
        assert f"{name} runs {THIS_BUILD}, attic {theirs}: they cannot work together." in said
        assert f"Upgrade {name}: type `pip install --upgrade potluck` there." in said
    for name in ("desk", "nas"):
        attic.wait_for(f"attic runs {theirs}, {name} {THIS_BUILD}: they cannot work together.")
        attic.wait_for(f"Upgrade {name}: type `pip install --upgrade potluck` there.")
    assert time.monotonic() - began < PATIENCE / 2
    desk.follow(2, steps=50)
    nas.follow(2, steps=50)
    assert {each["epoch"] for each in desk.said if each["size"] == 2} == {epoch}
    assert sum("cannot work together" in line for line in desk.lines) == 1
    for command in ("status", "doctor"):
        told = machines.ask("attic", builds.newest, command)
        assert "Upgrade desk: type `pip install --upgrade potluck` there." in told
    told = machines.ask("desk", None, "status")
    assert f"attic {theirs}" in told
    assert theirs in machines.ask("desk", None, "members")
    attic.stop()
    machines.train("attic", builds.later).follow(3)


@pytest.mark.netns
def test_a_run_names_the_machine_with_another_version(machines: Machines, builds: Builds) -> None:
    """And what to type there; when that is done the run begins."""
    script = machines.folder / "work.py"
    script.write_text(
        "import potluck\nwith potluck.join() as c:\n    c.barrier()\n    print(c.world_size)\n"
    )
    run = ("-m", "potluck", "run", "--nodes", "2", str(script))
    desk = machines.run("desk", None, *run)
    attic = machines.run("attic", builds.newest, *run)
    sentence = "Upgrade desk: type `pip install --upgrade potluck` there."
    for each in (desk, attic):
        said = each.wait_for("cannot work together")
        assert sentence in each.wait_for("Upgrade desk")
        assert "attic" in said
    desk.stop()
    upgraded = machines.run("desk", builds.newest, *run)
    for each in (upgraded, attic):
        assert each.process.wait(PATIENCE) == 0, each.lines


RANK = """
import sys
import potluck
from potluck import RpcAgent, TcpBackend
rank, port = int(sys.argv[1]), sys.argv[2]
with TcpBackend(rank, 2, f"127.0.0.1:{port}", timeout=float(sys.argv[3])) as backend:
    backend.barrier()
    with RpcAgent(backend) as agent:
        agent.register("build", lambda _: potluck.__version__.encode())
        backend.barrier()
        print("met", agent.rpc_sync(1 - rank, "build").decode(), flush=True)
        backend.barrier()
"""


def start_ranks(
    homes: Sequence[Path], builds: Sequence[Path | None], seconds: float
) -> list[Running]:
    """A rank with each of the builds."""
    port = str(free_port())
    return [
        Running(
            [sys.executable, "-c", RANK, str(rank), port, str(seconds)],
            home,
            build,
            POTLUCK_NAME=f"machine{rank}",
        )
        for rank, (home, build) in enumerate(zip(homes, builds, strict=True))
    ]


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    """Two machines of one group, on loopback."""
    first, second = Home(tmp_path, "machine0"), Home(tmp_path, "machine1")
    pair(first, second)
    return [first.path, second.path]


@pytest.mark.parametrize("is_newer_first", [True, False])
def test_ranks_of_builds_that_fit_meet_and_call_each_other(
    homes: list[Path], builds: Builds, *, is_newer_first: bool
) -> None:
    """Whichever of them is rank 0."""
    chosen = [builds.later, None] if is_newer_first else [None, builds.later]
    ranks = start_ranks(homes, chosen, PATIENCE)
    assert [rank.process.wait(PATIENCE) for rank in ranks] == [0, 0], [r.lines for r in ranks]
    met = [rank.wait_for("met") for rank in ranks]
    expected = [f"met {THIS_BUILD.potluck}", "met 0.2.0"]
    assert met == (expected if is_newer_first else expected[::-1])


@pytest.mark.parametrize("is_newer_first", [True, False])
def test_ranks_of_builds_that_do_not_fit_say_so(
    homes: list[Path], builds: Builds, *, is_newer_first: bool
) -> None:
    """The one that dials at once, rank 0 in its log, and again when it gives up."""
    chosen = [builds.newest, None] if is_newer_first else [None, builds.newest]
    ranks = start_ranks(homes, chosen, 10.0)
    texts = [str(THIS_BUILD), "Potluck 0.3.0 (protocol 3)"]
    older = "machine1" if is_newer_first else "machine0"
    for rank, running in enumerate(ranks):
        mine, theirs = texts if (rank == 0) != is_newer_first else texts[::-1]
        running.wait_for(
            f"machine{rank} runs {mine}, machine{1 - rank} {theirs}: they cannot work together"
        )
        running.wait_for(f"Upgrade {older}: type `pip install --upgrade potluck` there.")
    assert all(rank.process.wait(PATIENCE) == 1 for rank in ranks)
    assert "HandshakeRefused" in ranks[1].lines[-1]
    assert "Timeout" in ranks[0].lines[-1]
    assert "they cannot work together" in ranks[0].lines[-1]


def test_pairing_says_on_both_machines_which_one_to_upgrade(tmp_path: Path, builds: Builds) -> None:
    """A build that speaks our protocol too is paired; one that does not costs no try."""
    command = [sys.executable, "-m", "potluck", "pair"]
    shower = Running([*command, "--json"], tmp_path / "desk", None, POTLUCK_NAME="desk")
    with contextlib.ExitStack() as stack:
        stack.callback(shower.stop)
        shown = json.loads(shower.wait_for('"code"'))
        where = f"127.0.0.1:{shown['port']}"

        def type_code(name: str, build: Path) -> Running:
            arguments = [*command, shown["code"], "--host", where]
            typist = Running(arguments, tmp_path / name, build, POTLUCK_NAME=name)
            typist.process.wait(PATIENCE)
            typist.stop()
            return typist

        refused = type_code("attic", builds.newest)
        assert refused.process.returncode == 1
        text = " ".join(refused.lines)
        assert f"attic runs Potluck 0.3.0 (protocol 3), the other machine {THIS_BUILD}" in text
        assert "Upgrade the other machine: type `pip install --upgrade potluck` there." in text
        told = json.loads(shower.wait_for("other version"))["reason"]
        assert f'desk runs {THIS_BUILD}, "attic" Potluck 0.3.0 (protocol 3)' in told
        assert "Upgrade desk: type `pip install --upgrade potluck` there." in told
        assert type_code("nas", builds.later).process.returncode == 0
        shower.process.wait(PATIENCE)
        assert shower.process.returncode == 0
