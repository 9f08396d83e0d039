"""``potluck run`` on several machines: who meets whom, why it waits, and how it ends."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.command import COMMAND, START, end_all
from support.hosts import Host, Hosts
from support.paired_hosts import pair, variables
from support.threads import PATIENCE, eventually

pytestmark = [pytest.mark.netns, pytest.mark.timeout(4 * PATIENCE), pytest.mark.slow]

TOGETHER = """
import os, potluck
with potluck.join() as cluster:
    cluster.barrier()
    print("rank", cluster.rank, "of", cluster.world_size, "was", os.environ["RANK"])
"""

# Attic ends in the middle of the work, in the way that it is told.
MISFORTUNE = """
import os, pathlib, signal, sys, time
import numpy as np
import potluck

def step(number):
    if os.uname().nodename == "attic" and number == 5:
        if sys.argv[1] == "raise":
            raise ValueError("bad batch")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "leave":
            sys.exit()

with potluck.join() as cluster:
    for number in range(10_000):
        cluster.all_reduce(np.ones(10))
        os.write(1, f"step {number}\\n".encode())  # at once: Ctrl-C could cut a print in two
        step(number)
"""


OUTAGE = 20.0
"""Seconds without a network."""

_SAID = re.compile(r"(?:potluck|\d\d:\d\d:\d\d \w+ cluster): (.*)")

_ALL_HERE = re.compile(r"^potluck: (\d) of \1 (?:is|are) here")


class Terminal:
    """The command on a host, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, words: str) -> None:
        """Wait until a line with these words has come."""
        eventually(lambda: self.process.poll() is not None or bool(self.said(words)), PATIENCE)
        assert self.said(words), self.lines

    def said(self, words: str) -> list[str]:
        """The lines with these words."""
        return [line for line in self.lines if words in line]

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    @property
    def words_and_logs(self) -> list[str]:
        """What the command and the cluster have said since all machines were there."""
        begun = [number for number, line in enumerate(self.lines) if _ALL_HERE.search(line)]
        return [
            found[1] for line in self.lines[begun[-1] + 1 :] if (found := _SAID.fullmatch(line))
        ]

    @property
    def words(self) -> list[str]:
        """What the command itself has said since all machines were there."""
        begun = [number for number, line in enumerate(self.lines) if _ALL_HERE.search(line)]
        said = [line for line in self.lines[begun[-1] + 1 :] if line.startswith("potluck: ")]
        return [line.removeprefix("potluck: ") for line in said if "`potluck trace`" not in line]


class Office:
    """Machines with a person at each."""

    def __init__(self, hosts: Hosts, folder: Path, stack: contextlib.ExitStack) -> None:
        self.hosts = hosts
        self.folder = folder
        self._stack = stack

    def write(self, name: str, text: str, where: str = "") -> None:
        """A script that lies on all machines, or in a folder of one."""
        file = self.folder / where / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def run(self, machine: str, *arguments: str, where: str = "") -> Terminal:
        """Type ``potluck run`` on a machine."""
        host = self.hosts[machine]
        process = subprocess.Popen(  # its output is read by a Terminal, to its end
            host.command([sys.executable, "-c", START, str(COMMAND), "run", *arguments]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables(self.folder, host),
            cwd=self.folder / where,
            text=True,
        )
        terminal = Terminal(process)
        self._stack.callback(terminal.end)
        self._stack.callback(end_all, process.pid)
        return terminal

    def pair(self, first: str, second: str) -> None:
        """Make two machines belong together."""
        hosts: tuple[Host, Host] = self.hosts[first], self.hosts[second]
        pair(self.folder, *hosts)


@contextlib.contextmanager
def office(folder: Path, machines: str) -> Iterator[Office]:
    """Machines that are not paired yet."""
    with contextlib.ExitStack() as stack:
        yield Office(stack.enter_context(Hosts(machines)), folder, stack)


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """Desk and attic, paired."""
    with office(tmp_path_factory.mktemp("office"), "desk attic") as found:
        found.pair("desk", "attic")
        yield found


@pytest.fixture
def two(paired: Office) -> Iterator[Office]:
    """The same for one test: what runs there ends with it."""
    with contextlib.ExitStack() as stack:
        found = Office(paired.hosts, paired.folder, stack)
        found.write("together.py", TOGETHER)
        found.write("misfortune.py", MISFORTUNE)
        yield found


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Office]:
    """Three machines, paired."""
    with office(tmp_path, "desk laptop attic") as found:
        found.pair("desk", "laptop")
        found.pair("desk", "attic")
        found.write("training.py", TRAINING)
        yield found


def test_rank_0_is_where_the_command_was_typed_first_and_all_say_who_finished_how(
    two: Office,
) -> None:
    """For join() and for the variables of torchrun, whichever machine is first."""
    for first, second in (("desk", "attic"), ("attic", "desk")):
        one = two.run(first, "together.py")
        one.wait_for("1 of 2 is here")
        other = two.run(second, "together.py")
        assert [one.end(), other.end()] == [0, 0], (one.lines, other.lines)
        assert one.said("rank 0 of 2 was 0")
        assert other.said("rank 1 of 2 was 1")
        assert one.words == other.words == [f"Finished: {first} ok, {second} ok."]


def test_different_scripts_do_not_stop_each_other(two: Office) -> None:
    """Each waits, and says what the other machine does instead; once they agree they begin."""
    two.write("other.py", "print('other')")
    meet = [two.run(name, "together.py") for name in ("desk", "attic")]
    assert [each.end() for each in meet] == [0, 0]  # now they know where the other is
    desk, attic = (
        two.run("desk", "--nodes", "2", "together.py"),
        two.run("attic", "--nodes", "2", "--timeout", "12", "other.py"),
    )
    desk.wait_for("waits to run")
    attic.wait_for("waits to run")
    assert attic.end() == 3
    assert desk.said("waits to run")[0] == (
        "potluck: attic waits to run other.py, not together.py: "
        "type `potluck run together.py` there, or `potluck run other.py` here."
    )
    assert two.run("attic", "together.py").end() == 0
    assert desk.end() == 0
    assert not desk.said("differs")


def test_of_two_versions_of_a_script_is_said_whose_differs(two: Office) -> None:
    """By the names of the machines, on both of them."""
    two.write("together.py", "print('another')", "old")
    runs = [two.run("desk", "together.py"), two.run("attic", "together.py", where="old")]
    for each in runs:
        assert each.end() == 1
        assert each.words == [
            "The script on attic differs from the one on desk.",
            "Copy the same script to all machines, or use --anyway.",
        ]


def test_machines_that_are_not_paired_are_told_what_to_type(tmp_path: Path) -> None:
    """At once, by the command and by a script that waits; and what waits is found once paired."""
    with office(tmp_path, "desk attic") as rooms:
        rooms.write("train.py", TOGETHER)
        rooms.write("waits.py", "import potluck\npotluck.join(min_nodes=2)")
        script = rooms.run("desk", "--timeout", "12", "waits.py")
        runs = [rooms.run(each, "--nodes", "2", "train.py") for each in ("desk", "attic")]
        for each in runs:
            each.wait_for("runs Potluck, but is not paired with this machine. To pair them, run")
            assert each.lines[0] == (
                "potluck: This machine is not paired with any other. To pair them, run `potluck "
                "pair` here, and the command that it shows on the other machine."
            )
        assert script.end() == 3
        alone, here, waits, ended = script.lines
        assert alone == (
            "potluck: This machine is not paired with any other, so the script runs on it alone; "
            "`potluck pair` adds a machine."
        )
        assert here == "potluck: 1 of 1 is here: desk"
        assert waits.endswith(
            "cluster: Waiting for 2 machines, but this machine is not paired with any other."
        )
        assert ended == (
            "potluck: desk: --timeout ended it after 12 s; its script was still running"
        )
        runs[0].process.send_signal(signal.SIGINT)
        assert runs[0].end() == 130
        rooms.pair("desk", "attic")
        before = len(runs[1].lines)
        desk = rooms.run("desk", "train.py")  # the other one waits since before the two were paired
        assert [desk.end(), runs[1].end()] == [0, 0]
        for line in [*desk.lines, *runs[1].lines[before:]]:
            assert "not paired" not in line
            assert "could not be reached" not in line
        desk = rooms.run("desk", "train.py")
        desk.wait_for("train.py does not run on attic yet: type `potluck run train.py` there.")
        assert rooms.run("attic", "train.py").end() == 0
        assert desk.end() == 0


def misfortune(rooms: Office, what: str) -> tuple[Terminal, Terminal]:
    """The two machines at work, typed first on desk."""
    desk = rooms.run("desk", "misfortune.py", what)
    desk.wait_for("1 of 2 is here")
    attic = rooms.run("attic", "misfortune.py", what)
    for each in (desk, attic):
        each.wait_for("step 4")
    return desk, attic


def test_an_error_reaches_the_other_machine_as_one_line(two: Office) -> None:
    """The traceback is where it happened; the other machine's own would tell nothing."""
    desk, attic = misfortune(two, "raise")
    assert [desk.end(), attic.end()] == [1, 1]
    cause = "attic: ValueError: bad batch, misfortune.py:9"
    for each in (desk, attic):
        first, last = each.words
        assert first == cause
        assert re.fullmatch(r"Finished: desk stopped after \S+ s, attic failed after \S+ s\.", last)
    assert not desk.said("Traceback")
    assert len(attic.said("Traceback")) == 1


def test_a_script_that_is_killed_is_named_with_the_signal_and_its_memory(two: Office) -> None:
    """On both machines; the exit code is what a shell would say."""
    desk, attic = misfortune(two, "kill")
    assert [desk.end(), attic.end()] == [1, 137]
    for each in (desk, attic):
        first, last = each.words
        assert re.fullmatch(
            r"attic: killed by SIGKILL; it used up to \S+ MB, and \S+ .B of \S+ GB were free.*",
            first,
        )
        assert "attic killed by SIGKILL after " in last
        assert not each.said("Traceback")


def test_ctrl_c_on_one_machine_reaches_the_other_as_one_line(two: Office) -> None:
    """Without a traceback on either."""
    desk, attic = misfortune(two, "work")
    desk.process.send_signal(signal.SIGINT)
    assert [desk.end(), attic.end()] == [130, 1]
    for each in (desk, attic):
        first, last = each.words
        assert first.startswith("desk: interrupted by Ctrl-C, misfortune.py:")
        assert re.fullmatch(
            r"Finished: desk interrupted after \S+ s, attic stopped after \S+ s\.", last
        )
        assert not each.said("Traceback")


def test_a_machine_that_ends_before_the_others_is_named(two: Office) -> None:
    """With the arguments, where those are not the same."""
    desk = two.run("desk", "misfortune.py", "work")
    desk.wait_for("1 of 2 is here")
    attic = two.run("attic", "misfortune.py", "leave")
    assert [desk.end(), attic.end()] == [1, 0]
    assert not desk.said("Traceback")
    assert desk.words[-2] == (
        "attic: its script ended without an error while others needed it; "
        "its arguments differ (attic: leave; desk: work)."
    )
    for each in (desk, attic):
        assert re.fullmatch(r"Finished: desk stopped after \S+ s, attic ok\.", each.words[-1])


TRAINING = """
import time
from pathlib import Path
import numpy as np
import potluck

weights = np.zeros(4)

def apply(mean):
    weights[:] -= 0.1 * mean

with potluck.join() as cluster:
    sampler = potluck.ElasticSampler(1000, seed=3)
    state = potluck.TrainingState(model=weights)
    with potluck.ElasticTrainer(cluster, state, apply, sampler=sampler, batch=12) as trainer:
        stop = False
        while not stop:
            trainer.take()
            outcome = trainer.step(np.full(4, float(Path("stop").exists())))
            stop = weights[0] < 0
            if trainer.step_count % 10 == 0:
                print("step", trainer.step_count, flush=True)
            time.sleep(0.02)
"""


def test_who_leaves_and_comes_back_is_one_line_each_with_names(three: Office) -> None:
    """A cable that is out; a script that is killed and started again, which is one machine."""
    runs = {name: three.run(name, "training.py") for name in three.hosts}
    for each in runs.values():
        each.wait_for("step 10")
    attic = three.hosts["attic"]
    attic.unplug()
    for name in ("desk", "laptop"):
        runs[name].wait_for("attic left: it did not respond for")
    runs["attic"].wait_for("Paused: this machine is not connected to a network.")
    attic.plug_in()
    for name in ("desk", "laptop"):
        runs[name].wait_for("attic came back")
    runs["attic"].wait_for("This machine continues with desk and laptop")
    kill_script(runs["laptop"])
    assert runs["laptop"].end() == 137
    runs["again"] = three.run("laptop", "training.py")
    for name in ("desk", "attic"):
        runs[name].wait_for("laptop came back")
    runs["again"].wait_for("step")
    (three.folder / "stop").touch()
    assert [runs[name].end() for name in ("desk", "attic", "again")] == [0, 0, 0]
    for name in ("desk", "attic"):
        lines = [each for each in runs[name].words_and_logs if "trace" not in each]
        assert not [each for each in lines if re.search(r"[a-z2-7]{8}/\d", each)], lines
        ending = lines[-1]
        assert ending.startswith("Finished: ")
        assert "laptop ok (restarted)" in ending
        assert ending.count("laptop") == 1
    assert [cut(each) for each in runs["desk"].words_and_logs[:-1]] == [
        "attic left: it did not respond for",
        "attic came back",
        "laptop: killed by SIGKILL",
        "laptop came back",
    ]
    assert [cut(each) for each in runs["attic"].words_and_logs[:-1]] == [
        "Paused: this machine is not connected to a network",
        "This machine continues with desk and laptop",
        "laptop: killed by SIGKILL",
        "laptop came back",
    ]


def test_after_an_outage_launchers_hear_of_each_other_again(three: Office) -> None:
    """Ctrl-C on one machine soon after: the others say so, and all know how each has ended."""
    runs = {name: three.run(name, "training.py") for name in three.hosts}
    for each in runs.values():
        each.wait_for("step 10")
    attic = three.hosts["attic"]
    attic.unplug()
    runs["desk"].wait_for("attic left: it did not respond for")
    time.sleep(OUTAGE)  # long enough that the system itself tries rarely
    attic.plug_in()
    runs["attic"].wait_for("This machine continues with desk and laptop")
    runs["desk"].process.send_signal(signal.SIGINT)
    for name in ("attic", "laptop"):
        runs[name].wait_for("desk: interrupted by Ctrl-C")
    (three.folder / "stop").touch()
    for each in runs.values():
        each.end()
        assert each.words[-1].startswith("Finished: ")
        assert "not heard from" not in each.words[-1], each.lines


def cut(line: str) -> str:
    """A line without figures, and without what follows them."""
    return re.split(r" \d|;|\.", line)[0]


def kill_script(terminal: Terminal) -> None:
    """Kill the script of a run, not the command itself."""
    for each in psutil.Process(terminal.process.pid).children(recursive=True):
        if "training.py" in each.cmdline() and "run" not in each.cmdline():
            each.kill()
